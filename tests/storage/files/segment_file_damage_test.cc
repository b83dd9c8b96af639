// SPDX-License-Identifier: Apache-2.0
//
// Goal: no damage to a file goes unseen, and none of it is handed out. Method: a small file on a
// disk in memory is damaged in every place, one at a time, and in many ways; each time Open, or
// reading the part that was touched, says DataLoss, and so does Verify of a file that was opened
// before.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "storage/files/segment_file.h"
#include "storage/files/segment_layout.h"
#include "tests/storage/files/segment_samples.h"
#include "tests/storage/io/memory_storage.h"

namespace attnd::storage::test {
namespace {

using Bytes = std::vector<std::byte>;

constexpr char kPath[] = "/data/01.seg";
constexpr uint64_t kSectorBytes = 512;

class SegmentFileDamageTest : public testing::Test {
 protected:
  SegmentFileDamageTest()
      : trace_(__FILE__, __LINE__, testing::Message() << "seed " << TestSeed()),
        random_(TestSeed()),
        sample_(SmallHeader(&random_), &random_),
        disk_(MakeDisk(TestSeed())),
        queue_(disk_->MakeQueue()) {
    EXPECT_EQ(Write(sample_, disk_.get(), queue_.get(), kPath), absl::OkStatus());
    bytes_ = disk_->MutableBytes(kPath);
    whole_ = *bytes_;
    auto opened = SegmentFile::Open(disk_.get(), queue_.get(), kPath);
    EXPECT_TRUE(opened.ok()) << opened.status();
    opened_ = *std::move(opened);
    layout_ = *LayOut(sample_.header(), sample_.header().metadata.size());
  }

  std::byte& At(uint64_t offset) { return (*bytes_)[offset]; }
  Bytes CopyOf(uint64_t offset, uint64_t count) const {
    const auto begin = whole_.begin() + static_cast<ptrdiff_t>(offset);
    return {begin, begin + static_cast<ptrdiff_t>(count)};
  }
  void Overwrite(uint64_t offset, const Bytes& with) {
    std::ranges::copy(with, bytes_->begin() + static_cast<ptrdiff_t>(offset));
  }
  uint64_t PageOffset(uint64_t head, uint32_t page) const {
    return layout_.RunOffset(head) + uint64_t{page} * sample_.header().page_bytes;
  }

  static bool IsLost(const absl::Status& status) { return absl::IsDataLoss(status); }
  absl::Status Open() { return SegmentFile::Open(disk_.get(), queue_.get(), kPath).status(); }
  absl::Status Verify() { return opened_->Verify(queue_.get(), {}); }

  // Everything that can be read is right or lost; true if something is lost.
  testing::AssertionResult AllReadsAreRightOrLost(const SegmentFile& file, bool* lost) {
    const PageNumbers pages = SomePages(sample_.header(), 6, &random_);
    for (const absl::Status& status :
         {ReadIndexesOf(file, sample_, queue_.get()), ReadAllPagesOf(file, sample_, queue_.get()),
          ReadPagesOf(file, sample_, pages, queue_.get())}) {
      if (!status.ok() && !IsLost(status)) return testing::AssertionFailure() << status;
      *lost |= !status.ok();
    }
    return testing::AssertionSuccess();
  }

  // Damage anywhere: it is found, whoever comes by.
  testing::AssertionResult IsFound() {
    const auto opened = SegmentFile::Open(disk_.get(), queue_.get(), kPath);
    if (!opened.ok() && !IsLost(opened.status())) {
      return testing::AssertionFailure() << opened.status();
    }
    bool lost = !opened.ok(), unused = false;
    if (opened.ok()) {
      if ((*opened)->header() != sample_.header()) {
        return testing::AssertionFailure() << "WRONG HEADER HANDED OUT";
      }
      if (auto result = AllReadsAreRightOrLost(**opened, &lost); !result) return result;
    }
    if (auto result = AllReadsAreRightOrLost(*opened_, &unused); !result) return result;
    if (!lost) return testing::AssertionFailure() << "nobody saw it";
    if (!IsLost(Verify())) return testing::AssertionFailure() << "Verify did not see it";
    return testing::AssertionSuccess();
  }

  // Every bit of [offset, + count) in turn: `seen` says DataLoss, and so does Verify.
  template <typename Seen>
  void FlipEveryBit(uint64_t offset, uint64_t count, const Seen& seen) {
    for (uint64_t bit = 0; bit < 8 * count; ++bit) {
      const std::byte mask = std::byte{1} << static_cast<int>(bit % 8);
      At(offset + bit / 8) ^= mask;
      const absl::Status status = seen();
      ASSERT_TRUE(IsLost(status)) << "bit " << bit << " from " << offset << " on: " << status;
      ASSERT_TRUE(IsLost(Verify())) << "bit " << bit << " from " << offset << " on";
      At(offset + bit / 8) ^= mask;
    }
  }

  const testing::ScopedTrace trace_;
  Random random_;
  const Sample sample_;
  const std::unique_ptr<MemoryStorage> disk_;
  const std::unique_ptr<IoQueue> queue_;
  Bytes* bytes_ = nullptr;  // as they are, to be damaged
  Bytes whole_;             // as they were written
  SegmentLayout layout_;
  std::unique_ptr<SegmentFile> opened_;  // before any damage
};

TEST_F(SegmentFileDamageTest, EveryBitOfTheHeader) {
  FlipEveryBit(0, kBlockBytes, [&] { return Open(); });
}

TEST_F(SegmentFileDamageTest, EveryBitOfTheFooter) {
  FlipEveryBit(layout_.footer_offset, kBlockBytes, [&] { return Open(); });
}

TEST_F(SegmentFileDamageTest, EveryBitOfTheMetadataAndItsPadding) {
  ASSERT_EQ(layout_.indexes_offset - layout_.metadata_offset, kBlockBytes);
  FlipEveryBit(layout_.metadata_offset, kBlockBytes, [&] { return Open(); });
}

TEST_F(SegmentFileDamageTest, EveryBitOfTheTableAndItsPadding) {
  ASSERT_EQ(layout_.footer_offset - layout_.table_offset, kBlockBytes);
  FlipEveryBit(layout_.table_offset, kBlockBytes, [&] { return Open(); });
}

TEST_F(SegmentFileDamageTest, EveryBitOfTheIndexesAndTheirPadding) {
  ASSERT_EQ(layout_.pages_offset - layout_.indexes_offset, 2 * kBlockBytes);
  FlipEveryBit(layout_.indexes_offset, 2 * kBlockBytes,
               [&] { return ReadIndexesOf(*opened_, sample_, queue_.get()); });
}

// The page that was touched is lost, by name, and no other is. Padding is the last page's.
TEST_F(SegmentFileDamageTest, EveryByteOfThePagesAndTheirPadding) {
  const SegmentFileHeader& header = sample_.header();
  for (uint64_t offset = layout_.pages_offset; offset < layout_.table_offset; ++offset) {
    const uint64_t in_pages = offset - layout_.pages_offset;
    const uint64_t head = in_pages / layout_.run_stride_bytes;
    const uint64_t in_run = in_pages % layout_.run_stride_bytes;
    const uint32_t touched =
        std::min(static_cast<uint32_t>(in_run / header.page_bytes), header.pages - 1);
    const auto mask = static_cast<std::byte>(1 + random_.Below(255));
    At(offset) ^= mask;
    for (uint32_t page = 0; page < header.pages; ++page) {
      const absl::Status status = ReadPagesOf(*opened_, sample_, {{head, page}}, queue_.get());
      ASSERT_EQ(status.code(),
                page == touched ? absl::StatusCode::kDataLoss : absl::StatusCode::kOk)
          << "byte " << offset << ", page " << page << ": " << status;
    }
    ASSERT_TRUE(IsLost(ReadAllPagesOf(*opened_, sample_, queue_.get()))) << "byte " << offset;
    ASSERT_TRUE(IsLost(Verify())) << "byte " << offset;
    At(offset) ^= mask;
  }
}

TEST_F(SegmentFileDamageTest, EverySectorZeroed) {
  int zeroed = 0;
  for (uint64_t offset = 0; offset < whole_.size(); offset += kSectorBytes) {
    Overwrite(offset, Bytes(kSectorBytes));
    if (*bytes_ == whole_) continue;  // padding
    ASSERT_TRUE(IsFound()) << "sector at " << offset;
    *bytes_ = whole_;
    ++zeroed;
  }
  EXPECT_GT(zeroed, 20);
}

TEST_F(SegmentFileDamageTest, EveryTwoBlocksSwapped) {
  for (uint64_t a = 0; a < whole_.size(); a += kBlockBytes) {
    for (uint64_t b = a + kBlockBytes; b < whole_.size(); b += kBlockBytes) {
      Overwrite(a, CopyOf(b, kBlockBytes));
      Overwrite(b, CopyOf(a, kBlockBytes));
      ASSERT_TRUE(IsFound()) << "blocks at " << a << " and " << b;
      *bytes_ = whole_;
    }
  }
}

TEST_F(SegmentFileDamageTest, EveryTwoPagesSwapped) {
  const SegmentFileHeader& header = sample_.header();
  const uint64_t pages = header.heads() * header.pages;
  for (uint64_t i = 0; i < pages; ++i) {
    for (uint64_t j = i + 1; j < pages; ++j) {
      const uint64_t a = PageOffset(i / header.pages, static_cast<uint32_t>(i % header.pages));
      const uint64_t b = PageOffset(j / header.pages, static_cast<uint32_t>(j % header.pages));
      Overwrite(a, CopyOf(b, header.page_bytes));
      Overwrite(b, CopyOf(a, header.page_bytes));
      ASSERT_TRUE(IsFound()) << "pages " << i << " and " << j;
      *bytes_ = whole_;
    }
  }
}

// Another file of the same geometry, even of the same position: any part of it in the
// place of ours, every block and every page.
TEST_F(SegmentFileDamageTest, PartsOfAnotherFile) {
  SegmentFileHeader header = sample_.header();
  header.chain[31] ^= 1;
  header.metadata[0] ^= 1;
  const Sample other(header, &random_);
  ASSERT_TRUE(Write(other, disk_.get(), queue_.get(), "/data/02.seg").ok());
  const Bytes theirs = *disk_->MutableBytes("/data/02.seg");
  ASSERT_EQ(theirs.size(), whole_.size());
  const auto take = [&](uint64_t offset, uint64_t count) {
    const auto begin = theirs.begin() + static_cast<ptrdiff_t>(offset);
    Overwrite(offset, Bytes(begin, begin + static_cast<ptrdiff_t>(count)));
    EXPECT_TRUE(IsFound()) << count << " bytes at " << offset;
    *bytes_ = whole_;
  };
  for (uint64_t at = 0; at < whole_.size(); at += kBlockBytes) take(at, kBlockBytes);
  for (uint64_t head = 0; head < header.heads(); ++head) {
    for (uint32_t page = 0; page < header.pages; ++page) {
      take(PageOffset(head, page), header.page_bytes);
    }
  }
  take(0, layout_.pages_offset);  // all but what makes the contents
}

// The same contents in a file of another chain: the blocks are as right as can be, but not ours.
TEST_F(SegmentFileDamageTest, TheTableBelongsToItsChain) {
  SegmentFileHeader header = sample_.header();
  header.chain[0] ^= 1;
  Bytes block(kBlockBytes);
  EncodeHeader(header, layout_, 0, Block(block));
  Overwrite(0, block);
  EXPECT_TRUE(IsFound());
}

// A header of the same chain and geometry, right in itself, as an older write left it.
TEST_F(SegmentFileDamageTest, AHeaderOrBothEndsOfAnotherTime) {
  const auto old = DecodeHeader(ConstBlock(whole_.data(), kBlockBytes));
  ASSERT_TRUE(old.ok()) << old.status();
  DecodedHeader changed = *old;
  ++changed.header.tokens;
  Bytes block(kBlockBytes);
  changed.checksum = EncodeHeader(changed.header, layout_, old->metadata_checksum, Block(block));
  Overwrite(0, block);
  EXPECT_TRUE(IsFound());
  const Bytes footer = CopyOf(layout_.footer_offset, kBlockBytes);
  const auto decoded = DecodeFooter(ConstBlock(footer.data(), kBlockBytes), *old);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EncodeFooter(changed, decoded->table_checksum, Block(block));
  Overwrite(layout_.footer_offset, block);
  EXPECT_EQ(Open(), absl::OkStatus());  // a file like any other, now
  EXPECT_TRUE(IsLost(Verify()));        // but not the one that was opened
}

TEST_F(SegmentFileDamageTest, EveryLengthByBlock) {
  for (uint64_t size = 0; size <= whole_.size() + 3 * kBlockBytes; size += kBlockBytes) {
    if (size == whole_.size()) continue;
    bytes_->resize(size);
    EXPECT_TRUE(IsLost(Open())) << size << " bytes";
    // What was behind the end is nothing to a file that is open already.
    EXPECT_TRUE(size > whole_.size() || IsLost(Verify())) << size << " bytes";
    *bytes_ = whole_;
  }
}

TEST_F(SegmentFileDamageTest, LengthsThatAreNoBlocks) {
  for (int round = 0; round < 100; ++round) {
    bytes_->resize(whole_.size() - 1 - random_.Below(whole_.size() - 1));
    EXPECT_TRUE(IsLost(Open())) << bytes_->size() << " bytes";
    EXPECT_TRUE(IsLost(Verify())) << bytes_->size() << " bytes";
    *bytes_ = whole_;
  }
}

TEST_F(SegmentFileDamageTest, RandomFlips) {
  for (int round = 0; round < 10000; ++round) {
    const uint64_t flips = 1 + random_.Below(round % 2 == 0 ? 1 : 10);
    for (uint64_t i = 0; i < flips; ++i) {
      At(random_.Below(whole_.size())) ^= std::byte{1} << static_cast<int>(random_.Below(8));
    }
    if (*bytes_ == whole_) continue;  // the same bit twice
    ASSERT_TRUE(IsFound()) << "round " << round;
    *bytes_ = whole_;
  }
}

TEST_F(SegmentFileDamageTest, RandomBytesOverAnyRange) {
  for (int round = 0; round < 2000; ++round) {
    const uint64_t offset = random_.Below(whole_.size());
    const uint64_t count = 1 + random_.Below(std::min<uint64_t>(whole_.size() - offset, 9000));
    Overwrite(offset, random_.Bytes(count));
    if (*bytes_ == whole_) continue;
    ASSERT_TRUE(IsFound()) << count << " bytes at " << offset;
    *bytes_ = whole_;
  }
}

}  // namespace
}  // namespace attnd::storage::test
