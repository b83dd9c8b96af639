// SPDX-License-Identifier: Apache-2.0
//
// Goal: what is read of files is what they say, damage is told from a disk that does not answer,
// and a file that a crash cut short is none. Method: a disk in memory that loses power at every
// step of writing, and files changed by hand.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ctl/rebuild.h"
#include "storage/files/checksum.h"
#include "tests/ctl/support.h"
#include "tests/storage/io/io_support.h"
#include "tests/storage/io/memory_storage.h"

namespace attnd::ctl::test {
namespace {

using storage::DataFolder;
using storage::test::MemoryStorage;

class FindFilesTest : public testing::Test {
 protected:
  static SampleFile Segment(uint64_t number) {
    SampleFile sample;
    sample.number = number;
    sample.chain = ChainOf(number);
    return sample;
  }
  DataFolder Folder(MemoryStorage* disk) {
    return DataFolder::OpenWithSecret(disk, "/data", storage::Secret()).value();
  }
  absl::StatusOr<FoundFiles> Find(MemoryStorage* disk) {
    const auto queue = disk->MakeQueue();
    const auto folder = DataFolder::OpenWithSecret(disk, "/data", storage::Secret());
    if (!folder.ok()) return folder.status();
    return FindFiles(*folder, disk, queue.get(), {});
  }

  const uint64_t seed_ = storage::test::TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
};

TEST_F(FindFilesTest, SaysWhatFilesSay) {
  MemoryStorage disk(seed_);
  const DataFolder folder = Folder(&disk);
  SampleFile tail = Segment(300);
  tail.sealed_id = 77;
  tail.parent = ChainOf(5);
  tail.segments_before = 2;
  const auto queue = disk.MakeQueue();
  ASSERT_TRUE(WriteSample(Segment(5), folder, &disk, queue.get()).ok());
  ASSERT_TRUE(WriteSample(tail, folder, &disk, queue.get()).ok());
  disk.Put("/data/quarantine/0000000000001000.seg", {});
  disk.Put("/data/segments/00/0000000000000500.seg.tmp", {});
  disk.Put("/data/segments/00/notes", {});
  const auto found = Find(&disk);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->whole.size(), 2u);
  EXPECT_TRUE(found->damaged.empty());
  EXPECT_EQ(found->whole[0].number, 5u);
  EXPECT_EQ(found->whole[0].chain, ChainOf(5));
  EXPECT_EQ(found->whole[1].sealed_id, 77u);
  EXPECT_EQ(found->whole[1].parent, ChainOf(5));
  EXPECT_EQ(found->whole[1].sealed_tokens, 2 * kSegmentTokens + kTailTokens);
  EXPECT_EQ(found->last_number, 0x1000u) << "numbers in quarantine are not given again";
}

TEST_F(FindFilesTest, ACrashLeavesAWholeFileOrNone) {
  uint64_t whole = 0, none = 0;
  for (uint64_t changes = 0;; ++changes) {
    SCOPED_TRACE(changes);
    MemoryStorage disk(seed_ + changes);
    const DataFolder folder = Folder(&disk);
    const auto queue = disk.MakeQueue();
    ASSERT_TRUE(WriteSample(Segment(1), folder, &disk, queue.get()).ok());
    const uint64_t before = disk.changes();
    disk.PowerOffAfter(changes);
    const bool written = WriteSample(Segment(2), folder, &disk, queue.get()).ok();
    // A disk that does not answer is no damage.
    if (!disk.power()) {
      EXPECT_FALSE(FindFiles(folder, &disk, queue.get(), {}).ok());
    }
    disk.Crash();
    const auto found = Find(&disk);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_TRUE(found->damaged.empty());
    ASSERT_TRUE(found->whole.size() == 1 || found->whole.size() == 2);
    if (written) {
      EXPECT_EQ(found->whole.size(), 2u);
    }
    (found->whole.size() == 2 ? whole : none)++;
    if (disk.changes() - before < changes) break;
  }
  EXPECT_GT(whole, 0u);
  EXPECT_GT(none, 3u);
}

TEST_F(FindFilesTest, DamageIsFoundInHeaderMetadataAndTable) {
  MemoryStorage disk(seed_);
  const DataFolder folder = Folder(&disk);
  const auto queue = disk.MakeQueue();
  ASSERT_TRUE(WriteSample(Segment(1), folder, &disk, queue.get()).ok());
  auto* bytes = disk.MutableBytes(folder.SegmentPath(1));
  const uint64_t last_block = bytes->size() - storage::kBlockBytes;
  for (const uint64_t at : {uint64_t{20}, uint64_t{4100}, last_block - 4096, last_block + 20}) {
    (*bytes)[at] ^= std::byte{1};
    const auto found = Find(&disk);
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_EQ(found->damaged.size(), 1u) << at;
    EXPECT_EQ(found->damaged[0].number, 1u);
    (*bytes)[at] ^= std::byte{1};
  }
  bytes->resize(bytes->size() - storage::kBlockBytes);
  EXPECT_EQ(Find(&disk)->damaged.size(), 1u);
  bytes->clear();
  EXPECT_EQ(Find(&disk)->damaged.size(), 1u);
}

// A file that is sound, and whose header and metadata contradict each other.
TEST_F(FindFilesTest, SizesThatNoModelGivesAreDamage) {
  MemoryStorage disk(seed_);
  const DataFolder folder = Folder(&disk);
  const auto queue = disk.MakeQueue();
  const auto write = [&](uint64_t number, auto change) {
    storage::SegmentFileHeader header = Segment(number).Header();
    change(&header);
    return storage::WriteSegmentFile(header, Zeros(), &disk, queue.get(),
                                     folder.SegmentPath(number), {});
  };
  ASSERT_TRUE(write(1, [](auto* header) { header->layers = 2; }).ok());
  ASSERT_TRUE(write(2, [](auto* header) { header->tokens = 64; }).ok());
  ASSERT_TRUE(write(3, [](auto* header) { header->index_head_bytes += 64; }).ok());
  ASSERT_TRUE(write(4, [](auto* header) { header->page_bytes *= 2; }).ok());
  ASSERT_TRUE(write(5, [](auto* header) { header->metadata.assign(3, '\xff'); }).ok());
  ASSERT_TRUE(write(6, [](auto* header) { header->kind = storage::SegmentKind::kTail; }).ok());
  ASSERT_TRUE(write(7, [](auto*) {}).ok());
  const auto found = Find(&disk);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->damaged.size(), 6u);
  EXPECT_EQ(found->whole.size(), 1u);
}

// It is not damaged, and nobody here can say who needs it.
TEST_F(FindFilesTest, AFileOfALaterFormatEndsIt) {
  MemoryStorage disk(seed_);
  const DataFolder folder = Folder(&disk);
  const auto queue = disk.MakeQueue();
  ASSERT_TRUE(WriteSample(Segment(1), folder, &disk, queue.get()).ok());
  auto* bytes = disk.MutableBytes(folder.SegmentPath(1));
  (*bytes)[8] = std::byte{2};
  storage::Checksum checksum(ChainOf(1), storage::Part::kHeader);
  checksum.Add(bytes->data(), storage::kBlockBytes - sizeof(uint32_t));
  const uint32_t value = checksum.value();
  std::memcpy(bytes->data() + storage::kBlockBytes - sizeof(value), &value, sizeof(value));
  EXPECT_TRUE(absl::IsFailedPrecondition(Find(&disk).status())) << Find(&disk).status();
}

TEST_F(FindFilesTest, EndsWhenItIsAskedTo) {
  MemoryStorage disk(seed_);
  const DataFolder folder = Folder(&disk);
  const auto queue = disk.MakeQueue();
  for (uint64_t number = 1; number <= 5; ++number) {
    ASSERT_TRUE(WriteSample(Segment(number), folder, &disk, queue.get()).ok());
  }
  const auto found =
      FindFiles(folder, &disk, queue.get(), [](uint64_t done, uint64_t total) -> absl::Status {
        EXPECT_EQ(total, 5u);
        return done == 3 ? absl::CancelledError("enough") : absl::OkStatus();
      });
  EXPECT_TRUE(absl::IsCancelled(found.status()));
}

}  // namespace
}  // namespace attnd::ctl::test
