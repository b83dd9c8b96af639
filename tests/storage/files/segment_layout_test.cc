// SPDX-License-Identifier: Apache-2.0
//
// Goal: a file's bytes are those of docs/FORMAT.md, and the parser takes any bytes and lets none
// through that are beyond a limit. Method: a file read by hand, with a CRC32C made bit by bit;
// random headers, their fields changed, through the parser that skips checksums.
#include "storage/files/segment_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "storage/files/checksum.h"
#include "tests/storage/files/segment_samples.h"
#include "tests/storage/io/memory_storage.h"

namespace attnd::storage::test {
namespace {

using Bytes = std::vector<std::byte>;

// Where they begin in a file of SmallHeader.
constexpr uint64_t kTable = uint64_t{4096} * 8;
constexpr uint64_t kFooter = uint64_t{4096} * 9;

// CRC32C from its polynomial.
uint32_t SlowCrc(const Bytes& bytes) {
  uint32_t crc = ~0u;
  for (const std::byte byte : bytes) {
    crc ^= static_cast<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
  }
  return ~crc;
}

// A file and how FORMAT.md says to look at it.
class ByHand {
 public:
  explicit ByHand(Bytes bytes) : bytes_(std::move(bytes)) {}

  uint64_t Number(uint64_t offset, int size) const {
    uint64_t number = 0;
    for (int i = size - 1; i >= 0; --i) {
      number = number << 8 | static_cast<uint64_t>(bytes_[offset + static_cast<uint64_t>(i)]);
    }
    return number;
  }
  uint32_t U32(uint64_t offset) const { return static_cast<uint32_t>(Number(offset, 4)); }
  uint64_t U64(uint64_t offset) const { return Number(offset, 8); }
  std::string Text(uint64_t offset, uint64_t count) const {
    return {reinterpret_cast<const char*>(bytes_.data() + offset), count};
  }
  // Of [offset, + count), behind its owner: chain, part, page, head.
  uint32_t Crc(uint8_t part, uint8_t page, uint8_t head, uint64_t offset, uint64_t count) const {
    Bytes all(bytes_.begin() + 16, bytes_.begin() + 48);
    all.resize(48);
    all[32] = std::byte{part};
    all[36] = std::byte{page};
    all[40] = std::byte{head};
    const auto begin = bytes_.begin() + static_cast<ptrdiff_t>(offset);
    all.insert(all.end(), begin, begin + static_cast<ptrdiff_t>(count));
    return SlowCrc(all);
  }
  bool Zeros(uint64_t begin, uint64_t end) const {
    for (uint64_t at = begin; at < end; ++at) {
      if (bytes_[at] != std::byte{0}) return false;
    }
    return true;
  }
  uint64_t size() const { return bytes_.size(); }

 private:
  const Bytes bytes_;
};

struct Written {
  Written()
      : random(TestSeed()), sample(SmallHeader(&random), &random), disk(MakeDisk(TestSeed())) {
    const auto queue = disk->MakeQueue();
    EXPECT_EQ(Write(sample, disk.get(), queue.get(), "/data/a.seg"), absl::OkStatus());
  }
  ByHand file() const { return ByHand(*disk->MutableBytes("/data/a.seg")); }
  Random random;
  Sample sample;
  std::unique_ptr<MemoryStorage> disk;
};

std::string TextOf(const std::byte* data, uint64_t count) {
  return {reinterpret_cast<const char*>(data), count};
}

TEST(SegmentLayoutTest, TheCheckSequenceIsCrc32c) {
  const std::string digits = "123456789";
  EXPECT_EQ(Crc32c(digits.data(), digits.size()), 0xe3069283u);
  EXPECT_EQ(Crc32c(digits.data() + 4, 5, Crc32c(digits.data(), 4)), 0xe3069283u);
}

// SmallHeader: 2 layers of one KV head, indexes of 300 bytes, 7 pages of 700, 500 bytes of
// metadata.
TEST(SegmentLayoutTest, TheHeaderByHand) {
  const Written written;
  const ByHand file = written.file();
  EXPECT_EQ(file.Text(0, 8), "ATTNDSEG");
  EXPECT_EQ(file.U32(8), 1u);   // format
  EXPECT_EQ(file.U32(12), 1u);  // kind
  const auto& header = written.sample.header();
  EXPECT_EQ(std::memcmp(file.Text(16, 32).data(), header.chain.data(), 32), 0);
  EXPECT_EQ(std::memcmp(file.Text(48, 32).data(), header.parent.data(), 32), 0);
  EXPECT_EQ(file.U64(80), 8192u);  // first_position
  const uint32_t words[] = {77, 5, 2, 1, 300, 0, 700, 7, 500};
  for (uint64_t i = 0; i < std::size(words); ++i) EXPECT_EQ(file.U32(88 + 4 * i), words[i]) << i;
  EXPECT_EQ(file.U32(124), file.Crc(2, 0, 0, 4096, 4096));  // metadata
  const uint64_t blocks[] = {1, 2, 1, 4, 2, 8};
  for (uint64_t i = 0; i < std::size(blocks); ++i) {
    EXPECT_EQ(file.U64(128 + 8 * i), 4096 * blocks[i]) << i;
  }
  EXPECT_EQ(file.U64(176), 64u);  // of the table: 2 indexes, 14 pages
  EXPECT_EQ(file.U64(184), kFooter);
  EXPECT_EQ(file.U64(192), 4096u * 10);
  EXPECT_EQ(file.size(), 4096u * 10);
  EXPECT_TRUE(file.Zeros(200, 4092));
  EXPECT_EQ(file.U32(4092), file.Crc(1, 0, 0, 0, 4092));
}

TEST(SegmentLayoutTest, TheContentsByHand) {
  const Written written;
  const ByHand file = written.file();
  const Sample& sample = written.sample;
  EXPECT_EQ(file.Text(4096, 500), sample.header().metadata);
  EXPECT_TRUE(file.Zeros(4096 + 500, 8192));
  for (uint8_t head = 0; head < 2; ++head) {
    const uint64_t index = 4096 * (2 + uint64_t{head}), run = 4096 * (4 + 2 * uint64_t{head});
    EXPECT_EQ(file.Text(index, 300), TextOf(sample.Index(head), 300));
    EXPECT_TRUE(file.Zeros(index + 300, index + 4096));
    EXPECT_EQ(file.U32(kTable + 4 * uint64_t{head}), file.Crc(3, 0, head, index, 4096));
    EXPECT_EQ(file.Text(run, 4900), TextOf(sample.Pages(head), 4900));
    EXPECT_TRUE(file.Zeros(run + 4900, run + 8192));
    for (uint8_t page = 0; page < 7; ++page) {
      const uint64_t begin = run + 700 * uint64_t{page};
      const uint64_t end = page == 6 ? run + 8192 : begin + 700;  // the last one's with padding
      EXPECT_EQ(file.U32(kTable + 4 * (2 + 7 * uint64_t{head} + page)),
                file.Crc(4, page, head, begin, end - begin));
    }
  }
  EXPECT_TRUE(file.Zeros(kTable + 64, kFooter));
}

TEST(SegmentLayoutTest, TheFooterByHand) {
  const Written written;
  const ByHand file = written.file();
  const uint64_t footer = kFooter;
  EXPECT_EQ(file.Text(footer, 8), "ATTNDEND");
  EXPECT_EQ(file.U32(footer + 8), 1u);
  EXPECT_EQ(file.U32(footer + 12), file.U32(4092));  // the header's
  EXPECT_EQ(file.U64(footer + 16), 4096u * 10);
  EXPECT_EQ(file.U64(footer + 24), kTable);
  EXPECT_EQ(file.U64(footer + 32), 64u);
  EXPECT_EQ(file.U32(footer + 40), file.Crc(5, 0, 0, kTable, 4096));
  EXPECT_TRUE(file.Zeros(footer + 44, footer + 4092));
  EXPECT_EQ(file.U32(footer + 4092), file.Crc(6, 0, 0, footer, 4092));
}

TEST(SegmentLayoutTest, ALaterFormatIsNoDamage) {
  const Written written;
  Bytes* bytes = written.disk->MutableBytes("/data/a.seg");
  (*bytes)[8] = std::byte{2};
  const uint32_t crc = ByHand(*bytes).Crc(1, 0, 0, 0, 4092);
  std::memcpy(bytes->data() + 4092, &crc, 4);
  const auto queue = written.disk->MakeQueue();
  const auto file = SegmentFile::Open(written.disk.get(), queue.get(), "/data/a.seg");
  EXPECT_EQ(file.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(file.status().message()), testing::HasSubstr("format 2"));
}

// What fields are set to: limits and their neighbours, and what overflows when multiplied.
uint64_t Awkward(Random* random) {
  const uint64_t values[] = {0,
                             1,
                             kBlockBytes,
                             kFileHeadsMax,
                             kPagesMax,
                             kMetadataBytesMax,
                             kFileChecksumsMax,
                             kIndexHeadBytesMax,
                             uint64_t{1} << 31,
                             uint64_t{1} << 63,
                             std::numeric_limits<uint64_t>::max()};
  const uint64_t value = values[random->Below(std::size(values))];
  return value + random->Below(3) - 1;
}

void ExpectWithinLimits(const DecodedHeader& decoded) {
  const SegmentFileHeader& header = decoded.header;
  const SegmentLayout& layout = decoded.layout;
  EXPECT_GE(header.heads(), 1u);
  EXPECT_LE(header.heads(), kFileHeadsMax);
  EXPECT_LE(header.index_head_bytes, kIndexHeadBytesMax);
  EXPECT_LE(header.page_bytes, kPageBytesMax);
  EXPECT_LE(header.pages, kPagesMax);
  EXPECT_LE(layout.metadata_bytes, kMetadataBytesMax);
  EXPECT_LE(layout.table_bytes, 4 * kFileChecksumsMax);
  const __uint128_t indexes = __uint128_t{header.heads()} * layout.index_stride_bytes;
  const __uint128_t pages = __uint128_t{header.heads()} * layout.run_stride_bytes;
  const __uint128_t bytes = 2 * kBlockBytes + RoundUpToBlock(layout.metadata_bytes) + indexes +
                            pages + RoundUpToBlock(layout.table_bytes);
  EXPECT_TRUE(bytes == layout.file_bytes);
  EXPECT_LE(layout.file_bytes, uint64_t{std::numeric_limits<int64_t>::max()});
}

TEST(SegmentLayoutTest, TheParserTakesAnyBytesAndBreaksNoLimit) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  int taken = 0;
  for (int round = 0; round < 50000; ++round) {
    SegmentFileHeader header = SmallHeader(&random);
    if (round % 32 == 0) {
      header = RandomHeader(&random);
      header.metadata.clear();
    }
    const auto layout = LayOut(header, header.metadata.size());
    ASSERT_TRUE(layout.ok()) << layout.status();
    std::array<std::byte, kBlockBytes> block, footer;
    EncodeHeader(header, *layout, 0, block);
    EncodeFooter({header, *layout, 0, 0}, 0, footer);
    for (uint64_t change = random.Below(4); change > 0; --change) {
      const uint64_t value = Awkward(&random);
      const uint64_t size = random.Below(2) == 0 ? 4 : 8;
      std::memcpy(block.data() + 4 * random.Below(50), &value, size);
      if (change == 3) std::memcpy(footer.data() + 4 * random.Below(11), &value, size);
    }
    const auto decoded = DecodeHeaderUnchecked(block);
    if (!decoded.ok()) continue;
    ++taken;
    ExpectWithinLimits(*decoded);
    EXPECT_EQ(LayOut(decoded->header, decoded->layout.metadata_bytes).value(), decoded->layout);
    DecodeFooterUnchecked(footer, *decoded).IgnoreError();
  }
  EXPECT_GT(taken, 5000);
  EXPECT_LT(taken, 45000);
}

// Every bit of what follows from other fields, or is reserved, though no checksum is compared.
TEST(SegmentLayoutTest, TheParserTakesNoOtherOffsets) {
  Random random(TestSeed());
  const SegmentFileHeader header = SmallHeader(&random);
  const SegmentLayout layout = LayOut(header, header.metadata.size()).value();
  std::array<std::byte, kBlockBytes> block, footer;
  EncodeHeader(header, layout, 0, block);
  const DecodedHeader decoded = DecodeHeaderUnchecked(block).value();
  EncodeFooter(decoded, 0, footer);
  ASSERT_TRUE(DecodeFooterUnchecked(footer, decoded).ok());
  for (size_t bit = size_t{8} * 128; bit < size_t{8} * 4092; ++bit) {
    const std::byte mask = std::byte{1} << static_cast<int>(bit % 8);
    block[bit / 8] ^= mask;
    EXPECT_EQ(DecodeHeaderUnchecked(block).status().code(), absl::StatusCode::kDataLoss) << bit;
    block[bit / 8] ^= mask;
    if (bit < size_t{8} * 160) continue;
    const size_t at = bit / 8 - 160 + 16;  // from byte 16 on, but for the table's checksum
    if (at >= 40 && at < 44) continue;
    footer[at] ^= mask;
    EXPECT_EQ(DecodeFooterUnchecked(footer, decoded).status().code(), absl::StatusCode::kDataLoss)
        << at;
    footer[at] ^= mask;
  }
}

// A size that a header claims and its offsets follow: large files that nobody has are taken apart
// right, not refused.
TEST(SegmentLayoutTest, HeadersOfEveryAllowedSizeComeBack) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  int taken = 0;
  for (int round = 0; round < 50000; ++round) {
    SegmentFileHeader header = SmallHeader(&random);
    header.metadata.clear();
    header.layers = static_cast<uint32_t>(Awkward(&random) >> random.Below(20));
    header.kv_heads = static_cast<uint32_t>(Awkward(&random) >> random.Below(20));
    header.index_head_bytes = Awkward(&random) >> random.Below(20);
    header.page_bytes = static_cast<uint32_t>(Awkward(&random) >> random.Below(20));
    header.pages = static_cast<uint32_t>(Awkward(&random) >> random.Below(20));
    const uint64_t metadata_bytes = Awkward(&random) >> random.Below(40);
    const auto layout = LayOut(header, metadata_bytes);
    if (!layout.ok()) continue;
    ++taken;
    std::array<std::byte, kBlockBytes> block, footer;
    const uint32_t checksum = EncodeHeader(header, *layout, 5, block);
    const auto decoded = DecodeHeader(block);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(decoded->header, header);
    EXPECT_EQ(decoded->layout, *layout);
    EXPECT_EQ(decoded->metadata_checksum, 5u);
    EXPECT_EQ(decoded->checksum, checksum);
    ExpectWithinLimits(*decoded);
    EncodeFooter(*decoded, 6, footer);
    EXPECT_EQ(DecodeFooter(footer, *decoded).value().table_checksum, 6u);
  }
  EXPECT_GT(taken, 300);
}

}  // namespace
}  // namespace attnd::storage::test
