// SPDX-License-Identifier: Apache-2.0
//
// Goal: a segment file gives back what was written, whatever its geometry, and refuses what is
// beyond its limits. Method: random files on a disk in memory; a few on a real one.
#include "storage/files/segment_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/storage/files/segment_samples.h"
#include "tests/storage/io/memory_storage.h"
#include "tests/temporary_folder.h"

namespace attnd::storage::test {
namespace {

using testing::IsEmpty;

constexpr char kPath[] = "/data/00ff.seg";
constexpr absl::StatusCode kOk = absl::StatusCode::kOk;

TEST(SegmentFileTest, RoundTripsOfRandomGeometries) {
  for (uint64_t round = 0; round < 120; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() + round);
    Random random(TestSeed() + round);
    const Sample sample(RandomHeader(&random), &random);
    const auto disk = MakeDisk(TestSeed() + round);
    const uint32_t depth = 1 + random.Below32(70);
    const auto queue = disk->MakeQueue(depth);
    ASSERT_EQ(Write(sample, disk.get(), queue.get(), kPath), absl::OkStatus());
    EXPECT_THAT(disk->Paths(), testing::ElementsAre(kPath));
    EXPECT_EQ(disk->counters().syncs, 1u);
    EXPECT_EQ(disk->MutableBytes(kPath)->size(), SegmentFileBytes(sample.header()).value());
    ASSERT_EQ(Check(sample, disk.get(), queue.get(), kPath, &random), absl::OkStatus());
    EXPECT_LE(disk->counters().in_flight_max, depth);
    ExpectTidy(*disk);
  }
}

TEST(SegmentFileTest, TheLargestMetadataAndPages) {
  Random random(TestSeed());
  SegmentFileHeader header = SmallHeader(&random);
  header.metadata.assign(kMetadataBytesMax, 'm');
  header.page_bytes = kPageBytesMax;
  header.pages = 3;
  const Sample sample(header, &random);
  const auto disk = MakeDisk(TestSeed());
  const auto queue = disk->MakeQueue(64);
  ASSERT_EQ(Write(sample, disk.get(), queue.get(), kPath), absl::OkStatus());
  EXPECT_EQ(Check(sample, disk.get(), queue.get(), kPath, &random), absl::OkStatus());
}

TEST(SegmentFileTest, AnEmptyTailIsAFile) {
  Random random(TestSeed());
  SegmentFileHeader header;
  header.kind = SegmentKind::kTail;
  header.layers = header.kv_heads = 1;
  const Sample sample(header, &random);
  const auto disk = MakeDisk(TestSeed());
  const auto queue = disk->MakeQueue();
  ASSERT_EQ(Write(sample, disk.get(), queue.get(), kPath), absl::OkStatus());
  EXPECT_EQ(disk->MutableBytes(kPath)->size(), 2 * kBlockBytes);
  EXPECT_EQ(Check(sample, disk.get(), queue.get(), kPath, &random), absl::OkStatus());
}

TEST(SegmentFileTest, AHeaderBeyondALimitIsRefusedByName) {
  using Change = void (*)(SegmentFileHeader*);
  const std::pair<const char*, Change> cases[] = {
      {"kind", [](SegmentFileHeader* h) { h->kind = SegmentKind{3}; }},
      {"layers", [](SegmentFileHeader* h) { h->layers = 0; }},
      {"kv_heads", [](SegmentFileHeader* h) { h->kv_heads = kFileHeadsMax + 1; }},
      {"layers * kv_heads", [](SegmentFileHeader* h) { h->layers = h->kv_heads = 1u << 16; }},
      {"index_head_bytes",
       [](SegmentFileHeader* h) { h->index_head_bytes = kIndexHeadBytesMax + 1; }},
      {"page_bytes", [](SegmentFileHeader* h) { h->page_bytes = 0; }},
      {"page_bytes", [](SegmentFileHeader* h) { h->page_bytes = kPageBytesMax + 1; }},
      {"pages", [](SegmentFileHeader* h) { h->pages = kPagesMax + 1; }},
      {"pages and indexes",
       [](SegmentFileHeader* h) { h->pages = kPagesMax, h->layers = 1u << 12; }},
      {"metadata", [](SegmentFileHeader* h) { h->metadata.resize(kMetadataBytesMax + 1); }},
      {"first_position", [](SegmentFileHeader* h) { h->first_position = UINT64_MAX - 1; }},
      {"unclustered", [](SegmentFileHeader* h) { h->unclustered = h->tokens + 1; }},
  };
  for (const auto& [name, change] : cases) {
    Random random(TestSeed());
    const Sample sample(SmallHeader(&random), &random);
    SegmentFileHeader header = sample.header();
    change(&header);
    const auto bytes = SegmentFileBytes(header);
    EXPECT_EQ(bytes.status().code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_THAT(std::string(bytes.status().message()), testing::StartsWith(name));
    const auto disk = MakeDisk(TestSeed());
    const auto queue = disk->MakeQueue();
    const absl::Status written =
        WriteSegmentFile(header, sample, disk.get(), queue.get(), kPath, {});
    EXPECT_EQ(written.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_THAT(disk->Paths(), IsEmpty());
  }
}

TEST(SegmentFileTest, PagesThatAreNotThereAreRefused) {
  Random random(TestSeed());
  const Sample sample(SmallHeader(&random), &random);
  const auto disk = MakeDisk(TestSeed());
  const auto queue = disk->MakeQueue();
  ASSERT_TRUE(Write(sample, disk.get(), queue.get(), kPath).ok());
  const auto file = SegmentFile::Open(disk.get(), queue.get(), kPath);
  ASSERT_TRUE(file.ok()) << file.status();
  std::vector<std::byte> to(sample.header().page_bytes);
  for (const PageRead& read : {PageRead{2, 0, to.data()}, PageRead{0, 7, to.data()}}) {
    EXPECT_EQ((*file)->ReadPages(queue.get(), {&read, 1}, {}).code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ((*file)->ReadPages(queue.get(), {}, {}).code(), kOk);
}

TEST(SegmentFileTest, NeighboursAreOneRead) {
  Random random(TestSeed());
  SegmentFileHeader header = SmallHeader(&random);
  header.page_bytes = 5000;
  header.pages = 120;
  const Sample sample(header, &random);
  const auto disk = MakeDisk(TestSeed());
  const auto queue = disk->MakeQueue();
  ASSERT_TRUE(Write(sample, disk.get(), queue.get(), kPath).ok());
  const auto file = SegmentFile::Open(disk.get(), queue.get(), kPath);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto reads_of = [&](const PageNumbers& pages) {
    const uint64_t before = disk->counters().reads;
    EXPECT_EQ(ReadPagesOf(**file, sample, pages, queue.get()), absl::OkStatus());
    return disk->counters().reads - before;
  };
  EXPECT_EQ(reads_of({{0, 5}}), 1u);
  EXPECT_EQ(reads_of({{0, 7}, {0, 5}, {0, 6}, {0, 6}}), 1u);
  EXPECT_EQ(reads_of({{0, 5}, {0, 7}}), 2u);
  EXPECT_EQ(reads_of({{0, 119}, {1, 0}}), 2u);
  PageNumbers all;
  for (uint32_t page = 0; page < header.pages; ++page) all.emplace_back(1, page);
  EXPECT_EQ(reads_of(all), 3u);  // 52 pages are 256 KiB
}

// Hands out a sample's pages from memory that is `shift` bytes off a block's address. kTogether:
// the heads' runs lie behind one another; kApart: in another order; kReused: one run's memory is
// all there is, and holds what was asked for last.
enum class Runs { kTogether, kApart, kReused };
class MovedPages : public SegmentSource {
 public:
  MovedPages(const Sample& sample, uint64_t shift, Runs runs)
      : sample_(sample), runs_(runs), room_(sample.page_bytes() + 2 * kBlockBytes) {
    const auto at = reinterpret_cast<uintptr_t>(room_.data());
    pages_ = room_.data() + (kBlockBytes - at % kBlockBytes) + shift;
    for (uint64_t head = 0; head < sample.header().heads(); ++head) Fill(head);
  }
  const std::byte* Index(uint64_t head) const override { return sample_.Index(head); }
  const std::byte* Pages(uint64_t head) const override {
    if (runs_ == Runs::kReused) Fill(head);
    return Place(head);
  }
  bool pages_last() const override { return runs_ != Runs::kReused; }

 private:
  uint64_t RunBytes() const {
    return uint64_t{sample_.header().pages} * sample_.header().page_bytes;
  }
  std::byte* Place(uint64_t head) const {
    const uint64_t last = sample_.header().heads() - 1;
    const uint64_t place[] = {head, last - head, 0};
    return pages_ + place[static_cast<size_t>(runs_)] * RunBytes();
  }
  void Fill(uint64_t head) const { std::copy_n(sample_.Pages(head), RunBytes(), Place(head)); }

  const Sample& sample_;
  const Runs runs_;
  std::vector<std::byte> room_;
  std::byte* pages_ = nullptr;
};

// Pages of whole blocks that last are written from where they lie, others are copied: nobody sees
// which.
TEST(SegmentFileTest, WherePagesLieChangesNoByte) {
  Random random(TestSeed());
  SegmentFileHeader header = SmallHeader(&random);
  header.pages = 75;  // of more than one transfer
  for (const uint32_t page_bytes : {4096u, 8192u, 5000u, 2048u}) {
    header.page_bytes = page_bytes;
    for (const uint32_t index_bytes : {0u, 300u, 4096u}) {
      header.index_head_bytes = index_bytes;
      const Sample sample(header, &random);
      for (const uint64_t shift : {0u, 8u}) {
        for (const Runs runs : {Runs::kTogether, Runs::kApart, Runs::kReused}) {
          SCOPED_TRACE(testing::Message() << page_bytes << "-byte pages, " << shift << " off, runs "
                                          << static_cast<int>(runs) << ", seed " << TestSeed());
          const auto disk = MakeDisk(TestSeed());
          const auto queue = disk->MakeQueue();
          const MovedPages moved(sample, shift, runs);
          ASSERT_EQ(WriteSegmentFile(header, moved, disk.get(), queue.get(), kPath, {}),
                    absl::OkStatus());
          EXPECT_EQ(Check(sample, disk.get(), queue.get(), kPath, &random), absl::OkStatus());
          ExpectTidy(*disk);
        }
      }
    }
  }
}

TEST(SegmentFileTest, ManyThreadsReadOneFile) {
  Random random(TestSeed());
  SegmentFileHeader header = SmallHeader(&random);
  header.pages = 300;
  const Sample sample(header, &random);
  const auto disk = MakeDisk(TestSeed());
  const auto queue = disk->MakeQueue();
  ASSERT_TRUE(Write(sample, disk.get(), queue.get(), kPath).ok());
  const auto file = SegmentFile::Open(disk.get(), queue.get(), kPath);
  ASSERT_TRUE(file.ok()) << file.status();
  std::vector<std::thread> threads;
  for (uint64_t number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      Random own(TestSeed() + number);
      const auto own_queue = disk->MakeQueue();
      for (int i = 0; i < 20; ++i) {
        const PageNumbers pages = SomePages(header, 30, &own);
        EXPECT_EQ(ReadPagesOf(**file, sample, pages, own_queue.get()), absl::OkStatus());
        EXPECT_EQ((*file)->Verify(own_queue.get(), {}), absl::OkStatus());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(SegmentFileTest, OnARealDisk) {
  const attnd::test::TemporaryFolder folder;
  const auto files = MakePosixFileSystem();
  for (const auto kind : {IoQueueOptions::Kind::kAuto, IoQueueOptions::Kind::kThreads}) {
    const auto queue = MakeIoQueue({.kind = kind});
    ASSERT_TRUE(queue.ok()) << queue.status();
    for (uint64_t round = 0; round < 8; ++round) {
      SCOPED_TRACE(testing::Message() << "seed " << TestSeed() + round);
      Random random(TestSeed() + round);
      const Sample sample(RandomHeader(&random), &random);
      const std::string path = folder.Path(std::to_string(round) + ".seg");
      ASSERT_EQ(Write(sample, files.get(), queue->get(), path), absl::OkStatus());
      EXPECT_EQ(Check(sample, files.get(), queue->get(), path, &random), absl::OkStatus());
    }
  }
}

}  // namespace
}  // namespace attnd::storage::test
