// SPDX-License-Identifier: Apache-2.0
//
// Goal: no first or last block makes the parsers of segment files crash, what they take is within
// every limit, and is written again as it was read. No checksum stands before them. An input is the
// header's 200 bytes that are in use, the footer's 44, and one more: odd, the header's offsets
// (its bytes 128..199) are made to follow from its sizes, which a fuzzer would hardly guess; what
// comes behind lies over the reserved bytes.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "storage/files/segment_layout.h"
#include "tests/fuzz/target.h"

namespace attnd::fuzz {
namespace {

using storage::DecodedHeader;
using storage::SegmentFileHeader;
using storage::SegmentLayout;

constexpr size_t kHeaderBytes = 200, kFooterBytes = 44;
using Bytes = std::array<std::byte, storage::kBlockBytes>;

struct Blocks {
  Bytes header{}, footer{};
  bool follow = false;  // offsets from sizes
};

Blocks BlocksOf(const uint8_t* data, size_t bytes) {
  Blocks blocks;
  const auto take = [&](std::byte* to, size_t most) {
    const size_t now = std::min(most, bytes);
    if (now > 0) std::memcpy(to, data, now);
    data += now;
    bytes -= now;
  };
  std::byte last{};
  take(blocks.header.data(), kHeaderBytes);
  take(blocks.footer.data(), kFooterBytes);
  take(&last, 1);
  blocks.follow = (last & std::byte{1}) != std::byte{0};
  take(blocks.header.data() + kHeaderBytes, storage::kBlockBytes - kHeaderBytes);
  return blocks;
}

template <typename T>
T FieldAt(const Bytes& block, size_t offset) {
  T value;
  std::memcpy(&value, block.data() + offset, sizeof(value));
  return value;
}

// docs/FORMAT.md's places, not the parser's.
SegmentFileHeader HeaderIn(const Bytes& block) {
  SegmentFileHeader header;
  header.kind = static_cast<storage::SegmentKind>(FieldAt<uint32_t>(block, 12));
  std::memcpy(header.chain.data(), block.data() + 16, 32);
  std::memcpy(header.parent.data(), block.data() + 48, 32);
  header.first_position = FieldAt<uint64_t>(block, 80);
  header.tokens = FieldAt<uint32_t>(block, 88);
  header.unclustered = FieldAt<uint32_t>(block, 92);
  header.layers = FieldAt<uint32_t>(block, 96);
  header.kv_heads = FieldAt<uint32_t>(block, 100);
  header.index_head_bytes = FieldAt<uint64_t>(block, 104);
  header.page_bytes = FieldAt<uint32_t>(block, 112);
  header.pages = FieldAt<uint32_t>(block, 116);
  return header;
}

bool WithinLimits(const SegmentFileHeader& header, const SegmentLayout& layout) {
  const bool kind =
      header.kind == storage::SegmentKind::kClusters || header.kind == storage::SegmentKind::kTail;
  const bool heads = header.layers >= 1 && header.layers <= storage::kFileHeadsMax &&
                     header.kv_heads >= 1 && header.heads() <= storage::kFileHeadsMax;
  const bool sizes = header.index_head_bytes <= storage::kIndexHeadBytesMax &&
                     header.page_bytes <= storage::kPageBytesMax &&
                     header.pages <= storage::kPagesMax &&
                     layout.metadata_bytes <= storage::kMetadataBytesMax &&
                     layout.table_bytes <= 4 * storage::kFileChecksumsMax;
  const bool positions =
      header.first_position <= UINT64_MAX - header.tokens && header.unclustered <= header.tokens;
  const bool order = layout.metadata_offset == storage::kBlockBytes &&
                     layout.indexes_offset >= layout.metadata_offset &&
                     layout.pages_offset >= layout.indexes_offset &&
                     layout.table_offset >= layout.pages_offset &&
                     layout.footer_offset >= layout.table_offset + layout.table_bytes &&
                     layout.file_bytes == layout.footer_offset + storage::kBlockBytes &&
                     layout.file_bytes <= INT64_MAX;
  return kind && heads && sizes && positions && order;
}

// A header that was taken, or was made to be.
void CheckTaken(const DecodedHeader& decoded, const Bytes& footer) {
  if (!WithinLimits(decoded.header, decoded.layout)) Fail("a header beyond its limits");
  Bytes again;
  storage::EncodeHeader(decoded.header, decoded.layout, decoded.metadata_checksum, again);
  const auto second = storage::DecodeHeader(again);
  if (!second.ok() || second->header != decoded.header || second->layout != decoded.layout) {
    Fail("a header is not read back");
  }
  const auto end = storage::DecodeFooterUnchecked(footer, decoded);
  if (!end.ok()) return;
  storage::EncodeFooter(*second, end->table_checksum, again);
  const auto same = storage::DecodeFooter(again, *second);
  if (!same.ok() || same->table_checksum != end->table_checksum) Fail("a footer is not read back");
}

void Follow(Blocks* blocks) {
  const SegmentFileHeader header = HeaderIn(blocks->header);
  const auto layout = storage::LayOut(header, FieldAt<uint32_t>(blocks->header, 120));
  if (!layout.ok()) return;
  const uint32_t checksum = FieldAt<uint32_t>(blocks->header, 124);
  storage::EncodeHeader(header, *layout, checksum, blocks->header);
  const auto decoded = storage::DecodeHeader(blocks->header);
  if (!decoded.ok()) Fail("a layout that was made is not taken");
  if (decoded->header != header || decoded->layout != *layout) Fail("a field lies elsewhere");
}

}  // namespace

void Fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

std::string GoodInput(std::mt19937_64* random) {
  SegmentFileHeader header;
  header.kind = static_cast<storage::SegmentKind>(1 + Below(random, 2));
  for (uint8_t& byte : header.chain) byte = static_cast<uint8_t>(Below(random, 256));
  header.first_position = Below(random, uint64_t{1} << 48);
  header.tokens = static_cast<uint32_t>(Below(random, 100000));
  header.unclustered = static_cast<uint32_t>(Below(random, header.tokens + 1));
  header.layers = static_cast<uint32_t>(1 + Below(random, 100));
  header.kv_heads = static_cast<uint32_t>(1 + Below(random, 64));
  header.index_head_bytes = Below(random, 2) * Below(random, storage::kIndexHeadBytesMax);
  header.page_bytes = static_cast<uint32_t>(1 + Below(random, storage::kPageBytesMax));
  header.pages = static_cast<uint32_t>(Below(random, 5000));
  Bytes block, footer;
  const auto layout = storage::LayOut(header, Below(random, storage::kMetadataBytesMax + 1));
  if (!layout.ok()) Fail("a good header is refused");
  const uint32_t checksum = storage::EncodeHeader(header, *layout, 0, block);
  storage::EncodeFooter({header, *layout, 0, checksum}, 0, footer);
  std::string input(reinterpret_cast<const char*>(block.data()), kHeaderBytes);
  input.append(reinterpret_cast<const char*>(footer.data()), kFooterBytes);
  input.push_back(static_cast<char>(Below(random, 2)));
  return input;
}

}  // namespace attnd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using namespace attnd;  // NOLINT(google-build-using-namespace)
  fuzz::Blocks blocks = fuzz::BlocksOf(data, bytes);
  if (blocks.follow) fuzz::Follow(&blocks);
  const auto decoded = storage::DecodeHeaderUnchecked(blocks.header);
  if (decoded.ok()) {
    fuzz::CheckTaken(*decoded, blocks.footer);
  } else if (!absl::IsDataLoss(decoded.status()) && !absl::IsFailedPrecondition(decoded.status())) {
    fuzz::Fail("an error of another kind");
  }
  return 0;
}
