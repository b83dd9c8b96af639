// SPDX-License-Identifier: Apache-2.0
//
// Goal: whatever fails, a segment file is there whole or not at all, an error leaves nothing
// behind, and no wrong byte is handed out. Method: random files on a disk in memory that fails and
// loses power as its seed says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "storage/files/segment_file.h"
#include "tests/storage/files/segment_samples.h"
#include "tests/storage/io/memory_storage.h"

namespace attnd::storage::test {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

constexpr char kPath[] = "/data/00ff.seg";

// A fault that passes is healed by one more try or reported; no wrong byte comes of it.
TEST(SegmentFileFaultsTest, FaultsOfReadsAreNeverWrongBytes) {
  int healed = 0, lost = 0;
  for (uint64_t round = 0; round < 300; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() + round);
    Random random(TestSeed() + round);
    const Sample sample(round % 4 == 0 ? RandomHeader(&random) : SmallHeader(&random), &random);
    const auto disk = MakeDisk(TestSeed() + round);
    const auto queue = disk->MakeQueue(1 + random.Below32(20));
    ASSERT_TRUE(Write(sample, disk.get(), queue.get(), kPath).ok());
    const double often = 0.02 * static_cast<double>(random.Below(10));
    disk->SetFaults({.read_error = often,
                     .read_short = often,
                     .read_bit_flip = often,
                     .read_misdirected = often});
    const absl::Status status = Check(sample, disk.get(), queue.get(), kPath, &random);
    ASSERT_TRUE(status.ok() || absl::IsDataLoss(status)) << status;
    if (!status.ok()) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(kPath));
    }
    (status.ok() ? healed : lost) += often > 0 ? 1 : 0;
    ExpectTidy(*disk);
  }
  EXPECT_GT(healed, 20);
  EXPECT_GT(lost, 20);
}

TEST(SegmentFileFaultsTest, AReadIsTriedTwiceAndThenLostByName) {
  Random random(TestSeed());
  const Sample sample(SmallHeader(&random), &random);
  const auto disk = MakeDisk(TestSeed());
  const auto queue = disk->MakeQueue();
  ASSERT_TRUE(Write(sample, disk.get(), queue.get(), kPath).ok());
  const auto file = SegmentFile::Open(disk.get(), queue.get(), kPath);
  ASSERT_TRUE(file.ok()) << file.status();
  disk->SetFaults({.read_error = 1});
  const uint64_t before = disk->counters().reads;
  const absl::Status status = ReadPagesOf(**file, sample, {{1, 3}}, queue.get());
  EXPECT_EQ(disk->counters().reads - before, 2u);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status.message(),
            "/data/00ff.seg: page 3 of layer 1, KV head 0: read: a fault drawn by the test");
  EXPECT_EQ(SegmentFile::Open(disk.get(), queue.get(), kPath).status().code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(SegmentFile::Open(disk.get(), queue.get(), "/data/none.seg").status().code(),
            absl::StatusCode::kNotFound);
}

// An index is known to be wrong only when its last transfer has come: it is read again as a whole.
TEST(SegmentFileFaultsTest, AnIndexThatCameWrongIsReadAgain) {
  Random random(TestSeed());
  SegmentFileHeader header = SmallHeader(&random);
  header.index_head_bytes = 600000;
  const Sample sample(header, &random);
  const auto disk = MakeDisk(TestSeed());
  const auto queue = disk->MakeQueue();
  ASSERT_TRUE(Write(sample, disk.get(), queue.get(), kPath).ok());
  const auto file = SegmentFile::Open(disk.get(), queue.get(), kPath);
  ASSERT_TRUE(file.ok()) << file.status();
  disk->SetFaults({.read_bit_flip = 0.1});
  int healed = 0, lost = 0;
  for (int round = 0; round < 100; ++round) {
    const uint64_t before = disk->counters().reads;
    const absl::Status status = ReadIndexesOf(**file, sample, queue.get());
    const uint64_t reads = disk->counters().reads - before;
    ASSERT_TRUE(status.ok() || absl::IsDataLoss(status)) << status;
    if (!status.ok()) {
      EXPECT_THAT(std::string(status.message()), HasSubstr("index of layer "));
    }
    healed += status.ok() && reads > 6 ? 1 : 0;
    lost += status.ok() ? 0 : 1;
  }
  EXPECT_GT(healed, 5);
  EXPECT_GT(lost, 0);
}

TEST(SegmentFileFaultsTest, AnErrorWhileWritingLeavesNothing) {
  const std::pair<MemoryFaults, absl::StatusCode> cases[] = {
      {{.create_full = 1}, absl::StatusCode::kResourceExhausted},
      {{.write_error = 1}, absl::StatusCode::kUnavailable},
      {{.write_error = 0.2}, absl::StatusCode::kUnavailable},
      {{.sync_error = 1}, absl::StatusCode::kUnavailable},
      {{.rename_error = 1}, absl::StatusCode::kUnavailable},
      {{.sync_folder_error = 1}, absl::StatusCode::kUnavailable},
  };
  for (const auto& [faults, code] : cases) {
    for (uint64_t round = 0; round < 8; ++round) {
      SCOPED_TRACE(testing::Message() << "seed " << TestSeed() + round);
      Random random(TestSeed() + round);
      SegmentFileHeader header = SmallHeader(&random);
      header.pages = 4000;  // some 20 writes
      const Sample sample(header, &random);
      const auto disk = MakeDisk(TestSeed() + round);
      const auto queue = disk->MakeQueue(1 + random.Below32(8));
      disk->SetFaults(faults);
      const absl::Status status = Write(sample, disk.get(), queue.get(), kPath);
      if (status.ok() && faults.write_error == 0.2) continue;  // none was drawn
      EXPECT_EQ(status.code(), code) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(kPath));
      EXPECT_THAT(disk->Paths(), IsEmpty());
      ExpectTidy(*disk);
      // The disk recovers, and so does the writer.
      disk->SetFaults({});
      EXPECT_EQ(Write(sample, disk.get(), queue.get(), kPath), absl::OkStatus());
      EXPECT_EQ(Check(sample, disk.get(), queue.get(), kPath, &random), absl::OkStatus());
    }
  }
}

TEST(SegmentFileFaultsTest, WritesThatWentAstrayAreFound) {
  int found = 0;
  for (uint64_t round = 0; round < 100; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() + round);
    Random random(TestSeed() + round);
    SegmentFileHeader header = SmallHeader(&random);
    header.pages = 2000;
    const Sample sample(header, &random);
    const auto disk = MakeDisk(TestSeed() + round);
    const auto queue = disk->MakeQueue();
    disk->SetFaults({.write_misdirected = 0.1, .write_lost = 0.1});
    ASSERT_TRUE(Write(sample, disk.get(), queue.get(), kPath).ok());
    const absl::Status status = Check(sample, disk.get(), queue.get(), kPath, &random);
    EXPECT_TRUE(status.ok() || absl::IsDataLoss(status)) << status;
    found += status.ok() ? 0 : 1;
  }
  EXPECT_GT(found, 50);
}

TEST(SegmentFileFaultsTest, SomebodyElsesTemporaryFileStays) {
  Random random(TestSeed());
  const Sample sample(SmallHeader(&random), &random);
  const auto disk = MakeDisk(TestSeed());
  const auto queue = disk->MakeQueue();
  const std::string temporary = std::string(kPath) + kTemporarySuffix;
  disk->Put(temporary, {});
  EXPECT_EQ(Write(sample, disk.get(), queue.get(), kPath).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(disk->Paths(), testing::ElementsAre(temporary));
}

// Ends at the n-th question, whatever is under way then.
TEST(SegmentFileFaultsTest, ACallerMayEndACallAtAnyQuestion) {
  Random random(TestSeed());
  SegmentFileHeader header = SmallHeader(&random);
  header.pages = 3000;
  const Sample sample(header, &random);
  const auto disk = MakeDisk(TestSeed());
  const auto queue = disk->MakeQueue(3);
  int left = 0;
  const Proceed proceed = [&left] {
    return left-- > 0 ? absl::OkStatus() : absl::DeadlineExceededError("late");
  };
  std::vector<std::byte> to(sample.page_bytes());
  const auto run = [&](const std::function<absl::Status()>& call) {
    for (int questions = 0; questions < 1000; ++questions) {
      left = questions;
      const absl::Status status = call();
      EXPECT_EQ(queue->in_flight(), 0u);
      if (status.ok()) return questions;
      EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    }
    return 1000;
  };
  const int written = run([&] {
    auto status = WriteSegmentFile(header, sample, disk.get(), queue.get(), kPath, proceed);
    if (!status.ok()) {
      EXPECT_THAT(disk->Paths(), IsEmpty());
    }
    return status;
  });
  EXPECT_GT(written, 10);
  EXPECT_LT(written, 1000);
  const auto file = SegmentFile::Open(disk.get(), queue.get(), kPath);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto pages = run([&] { return (*file)->ReadAllPages(queue.get(), to.data(), proceed); });
  EXPECT_GT(pages, 3);
  EXPECT_LT(pages, 1000);
  EXPECT_TRUE(std::equal(to.begin(), to.end(), sample.Pages(0)));
  EXPECT_LT(run([&] { return (*file)->Verify(queue.get(), proceed); }), 1000);
}

// Power fails before each change in turn, and everything not synced is torn: the file is there,
// whole, or not there at all; there it is if the caller was told so. An older one is always there.
TEST(SegmentFileFaultsTest, ACrashLeavesAWholeFileOrNone) {
  int there = 0, gone = 0;
  for (uint64_t round = 0; round < 40; ++round) {
    for (uint64_t changes = 0;; ++changes) {
      SCOPED_TRACE(testing::Message()
                   << "seed " << TestSeed() + round << ", " << changes << " changes");
      Random random(TestSeed() + round);
      SegmentFileHeader header = SmallHeader(&random);
      header.pages = 1 + random.Below32(2000);
      const Sample older(SmallHeader(&random), &random), sample(header, &random);
      const auto disk = MakeDisk(1000 * (TestSeed() + round) + changes);
      const auto queue = disk->MakeQueue(1 + random.Below32(4));
      ASSERT_TRUE(Write(older, disk.get(), queue.get(), "/data/older.seg").ok());
      disk->PowerOffAfter(changes);
      const absl::Status written = Write(sample, disk.get(), queue.get(), kPath);
      const bool ended = disk->power();
      disk->Crash();
      ASSERT_EQ(Check(older, disk.get(), queue.get(), "/data/older.seg", &random),
                absl::OkStatus());
      const absl::Status status = Check(sample, disk.get(), queue.get(), kPath, &random);
      ASSERT_TRUE(status.ok() || (!written.ok() && absl::IsNotFound(status))) << status;
      (status.ok() ? there : gone) += written.ok() ? 0 : 1;
      ExpectTidy(*disk);
      if (ended) break;
    }
  }
  EXPECT_GT(there, 5);  // a rename that went through before its folder was synced
  EXPECT_GT(gone, 100);
}

}  // namespace
}  // namespace attnd::storage::test
