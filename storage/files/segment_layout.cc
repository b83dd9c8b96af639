// SPDX-License-Identifier: Apache-2.0
#include "storage/files/segment_layout.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/status.h"
#include "storage/files/checksum.h"

namespace attnd::storage {
namespace {

using Magic = std::array<char, 8>;
constexpr Magic kHeaderMagic = {'A', 'T', 'T', 'N', 'D', 'S', 'E', 'G'};
constexpr Magic kFooterMagic = {'A', 'T', 'T', 'N', 'D', 'E', 'N', 'D'};
constexpr size_t kBlockChecksumOffset = kBlockBytes - sizeof(uint32_t);

// The blocks as they lie on disk. Fields are aligned by themselves: there is no padding between
// them.
struct HeaderBlock {
  Magic magic;
  uint32_t format;
  uint32_t kind;
  ChainId chain;
  ChainId parent;
  uint64_t first_position;
  uint32_t tokens;
  uint32_t unclustered;
  uint32_t layers;
  uint32_t kv_heads;
  uint64_t index_head_bytes;
  uint32_t page_bytes;
  uint32_t pages;
  uint32_t metadata_bytes;
  uint32_t metadata_checksum;
  uint64_t metadata_offset;
  uint64_t indexes_offset;
  uint64_t index_stride_bytes;
  uint64_t pages_offset;
  uint64_t run_stride_bytes;
  uint64_t table_offset;
  uint64_t table_bytes;
  uint64_t footer_offset;
  uint64_t file_bytes;
  std::array<std::byte, 3892> reserved;  // zeros
  uint32_t checksum;
};
static_assert(sizeof(HeaderBlock) == kBlockBytes && std::is_trivially_copyable_v<HeaderBlock>);
static_assert(offsetof(HeaderBlock, first_position) == 80 &&
              offsetof(HeaderBlock, metadata_bytes) == 120 &&
              offsetof(HeaderBlock, file_bytes) == 192 && offsetof(HeaderBlock, reserved) == 200 &&
              offsetof(HeaderBlock, checksum) == kBlockChecksumOffset);

struct FooterBlock {
  Magic magic;
  uint32_t format;
  uint32_t header_checksum;
  uint64_t file_bytes;
  uint64_t table_offset;
  uint64_t table_bytes;
  uint32_t table_checksum;
  std::array<std::byte, 4048> reserved;  // zeros
  uint32_t checksum;
};
static_assert(sizeof(FooterBlock) == kBlockBytes && std::is_trivially_copyable_v<FooterBlock>);
static_assert(offsetof(FooterBlock, table_checksum) == 40 &&
              offsetof(FooterBlock, checksum) == kBlockChecksumOffset);

absl::Status CheckRange(const char* field, uint64_t value, uint64_t least, uint64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, "; allowed: ", least, "..", most));
}

absl::Status CheckGeometry(const SegmentFileHeader& header) {
  ATTND_RETURN_IF_ERROR(CheckRange("layers", header.layers, 1, kFileHeadsMax));
  ATTND_RETURN_IF_ERROR(CheckRange("kv_heads", header.kv_heads, 1, kFileHeadsMax));
  // Two factors of 2^20 at most.
  ATTND_RETURN_IF_ERROR(CheckRange("layers * kv_heads", header.heads(), 1, kFileHeadsMax));
  ATTND_RETURN_IF_ERROR(
      CheckRange("index_head_bytes", header.index_head_bytes, 0, kIndexHeadBytesMax));
  ATTND_RETURN_IF_ERROR(CheckRange("pages", header.pages, 0, kPagesMax));
  const uint32_t page_bytes_min = header.pages == 0 ? 0 : 1;
  return CheckRange("page_bytes", header.page_bytes, page_bytes_min, kPageBytesMax);
}

absl::Status CheckHeader(const SegmentFileHeader& header, uint64_t metadata_bytes) {
  ATTND_RETURN_IF_ERROR(CheckRange("kind", static_cast<uint32_t>(header.kind),
                                   static_cast<uint32_t>(SegmentKind::kClusters),
                                   static_cast<uint32_t>(SegmentKind::kTail)));
  ATTND_RETURN_IF_ERROR(CheckRange("first_position", header.first_position, 0,
                                   std::numeric_limits<uint64_t>::max() - header.tokens));
  ATTND_RETURN_IF_ERROR(CheckRange("unclustered", header.unclustered, 0, header.tokens));
  ATTND_RETURN_IF_ERROR(CheckRange("metadata bytes", metadata_bytes, 0, kMetadataBytesMax));
  return CheckGeometry(header);
}

uint64_t IndexChecksums(const SegmentFileHeader& header) {
  return header.index_head_bytes == 0 ? 0 : header.heads();
}

// Places parts one behind the other. Limits keep all sums far below 2^64 as they are; checked all
// the same, as limits change and a sum that wraps would pass every later check.
class Placer {
 public:
  // Where `count` times `stride_bytes` begin.
  uint64_t Place(uint64_t count, uint64_t stride_bytes) {
    const uint64_t offset = end_;
    const auto bytes = CheckedProduct({count, stride_bytes});
    if (!bytes.has_value() || __builtin_add_overflow(end_, *bytes, &end_) ||
        end_ > std::numeric_limits<int64_t>::max()) {
      overflow_ = true;
      end_ = 0;
    }
    return offset;
  }
  uint64_t end() const { return end_; }
  bool overflow() const { return overflow_; }

 private:
  uint64_t end_ = 0;
  bool overflow_ = false;
};

absl::Status Wrong(const char* part, absl::string_view what) {
  return absl::DataLossError(absl::StrCat(part, ": ", what));
}

uint32_t BlockChecksum(const ChainId& chain, Part part, ConstBlock block) {
  Checksum checksum(chain, part);
  checksum.Add(block.data(), kBlockChecksumOffset);
  return checksum.value();
}

template <typename T>
uint32_t SealBlock(const ChainId& chain, Part part, T* fields, Block block) {
  std::memcpy(block.data(), fields, kBlockBytes);
  fields->checksum = BlockChecksum(chain, part, block);
  std::memcpy(block.data() + kBlockChecksumOffset, &fields->checksum, sizeof(fields->checksum));
  return fields->checksum;
}

template <typename T>
T FieldsOf(ConstBlock block) {
  T fields;
  std::memcpy(&fields, block.data(), kBlockBytes);
  return fields;
}

// What both blocks have in common and every format keeps: magic, checksum, format.
template <typename T>
absl::Status CheckBlock(const char* name, const T& fields, const Magic& magic,
                        bool checksum_right) {
  if (fields.magic != magic) return Wrong(name, "its first 8 bytes are not those of such a block");
  if (!checksum_right) return Wrong(name, "wrong checksum");
  if (fields.format != kSegmentFormat) {
    return absl::FailedPreconditionError(absl::StrCat(
        name, ": format ", fields.format, "; this program knows format ", kSegmentFormat));
  }
  const auto is_zero = [](std::byte b) { return b == std::byte{0}; };
  if (!std::ranges::all_of(fields.reserved, is_zero)) {
    return Wrong(name, "reserved bytes are not zeros");
  }
  return absl::OkStatus();
}

SegmentFileHeader HeaderOf(const HeaderBlock& fields) {
  SegmentFileHeader header;
  header.kind = static_cast<SegmentKind>(fields.kind);
  header.chain = fields.chain;
  header.parent = fields.parent;
  header.first_position = fields.first_position;
  header.tokens = fields.tokens;
  header.unclustered = fields.unclustered;
  header.layers = fields.layers;
  header.kv_heads = fields.kv_heads;
  header.index_head_bytes = fields.index_head_bytes;
  header.page_bytes = fields.page_bytes;
  header.pages = fields.pages;
  return header;
}

SegmentLayout LayoutOf(const HeaderBlock& fields) {
  SegmentLayout layout;
  layout.metadata_offset = fields.metadata_offset;
  layout.metadata_bytes = fields.metadata_bytes;
  layout.indexes_offset = fields.indexes_offset;
  layout.index_stride_bytes = fields.index_stride_bytes;
  layout.pages_offset = fields.pages_offset;
  layout.run_stride_bytes = fields.run_stride_bytes;
  layout.table_offset = fields.table_offset;
  layout.table_bytes = fields.table_bytes;
  layout.footer_offset = fields.footer_offset;
  layout.file_bytes = fields.file_bytes;
  return layout;
}

absl::StatusOr<DecodedHeader> DecodeHeaderBlock(const HeaderBlock& fields, bool checksum_right) {
  ATTND_RETURN_IF_ERROR(CheckBlock("header", fields, kHeaderMagic, checksum_right));
  DecodedHeader decoded;
  decoded.header = HeaderOf(fields);
  const auto layout = LayOut(decoded.header, fields.metadata_bytes);
  if (!layout.ok()) return Wrong("header", layout.status().message());
  // The offsets on disk are for those who read a file by hand; they can only be these.
  if (LayoutOf(fields) != *layout) return Wrong("header", "offsets do not follow from its sizes");
  decoded.layout = *layout;
  decoded.metadata_checksum = fields.metadata_checksum;
  decoded.checksum = fields.checksum;
  return decoded;
}

absl::StatusOr<DecodedFooter> DecodeFooterBlock(const FooterBlock& fields,
                                                const DecodedHeader& header, bool checksum_right) {
  ATTND_RETURN_IF_ERROR(CheckBlock("footer", fields, kFooterMagic, checksum_right));
  if (fields.file_bytes != header.layout.file_bytes ||
      fields.table_offset != header.layout.table_offset ||
      fields.table_bytes != header.layout.table_bytes) {
    return Wrong("footer", "its offsets are not the header's");
  }
  return DecodedFooter{fields.table_checksum, fields.checksum};
}

}  // namespace

absl::StatusOr<SegmentLayout> LayOut(const SegmentFileHeader& header, uint64_t metadata_bytes) {
  ATTND_RETURN_IF_ERROR(CheckHeader(header, metadata_bytes));
  const auto pages = CheckedProduct({header.heads(), header.pages});
  const auto run_bytes = CheckedProduct({header.pages, header.page_bytes});
  if (!pages.has_value() || !run_bytes.has_value()) {
    return absl::InvalidArgumentError("pages: more than 2^64 of them, or of their bytes");
  }
  const uint64_t checksums = *pages + IndexChecksums(header);
  ATTND_RETURN_IF_ERROR(CheckRange("pages and indexes", checksums, 0, kFileChecksumsMax));
  SegmentLayout layout;
  layout.metadata_bytes = metadata_bytes;
  layout.index_stride_bytes = RoundUpToBlock(header.index_head_bytes);
  layout.run_stride_bytes = RoundUpToBlock(*run_bytes);
  layout.table_bytes = checksums * sizeof(uint32_t);
  Placer placer;
  placer.Place(1, kBlockBytes);
  layout.metadata_offset = placer.Place(1, RoundUpToBlock(metadata_bytes));
  layout.indexes_offset = placer.Place(header.heads(), layout.index_stride_bytes);
  layout.pages_offset = placer.Place(header.heads(), layout.run_stride_bytes);
  layout.table_offset = placer.Place(1, RoundUpToBlock(layout.table_bytes));
  layout.footer_offset = placer.Place(1, kBlockBytes);
  layout.file_bytes = placer.end();
  if (placer.overflow()) return absl::InvalidArgumentError("file: more than 2^63 bytes");
  return layout;
}

uint64_t IndexChecksumAt(uint64_t head) { return head; }

uint64_t PageChecksumAt(const SegmentFileHeader& header, uint64_t head, uint32_t page) {
  return IndexChecksums(header) + head * header.pages + page;
}

uint32_t EncodeHeader(const SegmentFileHeader& header, const SegmentLayout& layout,
                      uint32_t metadata_checksum, Block block) {
  HeaderBlock fields{};
  fields.magic = kHeaderMagic;
  fields.format = kSegmentFormat;
  fields.kind = static_cast<uint32_t>(header.kind);
  fields.chain = header.chain;
  fields.parent = header.parent;
  fields.first_position = header.first_position;
  fields.tokens = header.tokens;
  fields.unclustered = header.unclustered;
  fields.layers = header.layers;
  fields.kv_heads = header.kv_heads;
  fields.index_head_bytes = header.index_head_bytes;
  fields.page_bytes = header.page_bytes;
  fields.pages = header.pages;
  fields.metadata_bytes = static_cast<uint32_t>(layout.metadata_bytes);
  fields.metadata_checksum = metadata_checksum;
  fields.metadata_offset = layout.metadata_offset;
  fields.indexes_offset = layout.indexes_offset;
  fields.index_stride_bytes = layout.index_stride_bytes;
  fields.pages_offset = layout.pages_offset;
  fields.run_stride_bytes = layout.run_stride_bytes;
  fields.table_offset = layout.table_offset;
  fields.table_bytes = layout.table_bytes;
  fields.footer_offset = layout.footer_offset;
  fields.file_bytes = layout.file_bytes;
  return SealBlock(header.chain, Part::kHeader, &fields, block);
}

uint32_t EncodeFooter(const DecodedHeader& header, uint32_t table_checksum, Block block) {
  FooterBlock fields{};
  fields.magic = kFooterMagic;
  fields.format = kSegmentFormat;
  fields.header_checksum = header.checksum;
  fields.file_bytes = header.layout.file_bytes;
  fields.table_offset = header.layout.table_offset;
  fields.table_bytes = header.layout.table_bytes;
  fields.table_checksum = table_checksum;
  return SealBlock(header.header.chain, Part::kFooter, &fields, block);
}

absl::StatusOr<DecodedHeader> DecodeHeader(ConstBlock block) {
  const auto fields = FieldsOf<HeaderBlock>(block);
  return DecodeHeaderBlock(fields,
                           fields.checksum == BlockChecksum(fields.chain, Part::kHeader, block));
}

absl::StatusOr<DecodedHeader> DecodeHeaderUnchecked(ConstBlock block) {
  return DecodeHeaderBlock(FieldsOf<HeaderBlock>(block), true);
}

absl::StatusOr<DecodedFooter> DecodeFooter(ConstBlock block, const DecodedHeader& header) {
  const auto fields = FieldsOf<FooterBlock>(block);
  const bool right = fields.checksum == BlockChecksum(header.header.chain, Part::kFooter, block);
  if (right && fields.header_checksum != header.checksum) {
    return Wrong("footer", "it belongs to another header");
  }
  return DecodeFooterBlock(fields, header, right);
}

absl::StatusOr<DecodedFooter> DecodeFooterUnchecked(ConstBlock block, const DecodedHeader& header) {
  return DecodeFooterBlock(FieldsOf<FooterBlock>(block), header, true);
}

}  // namespace attnd::storage
