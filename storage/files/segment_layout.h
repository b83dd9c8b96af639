// SPDX-License-Identifier: Apache-2.0
//
// SegmentLayout: where the parts of a segment file lie, and the bytes of its first and last block.
// Pure functions: no I/O. docs/FORMAT.md has every byte.
//
//   header | metadata | indexes | pages | table of checksums | footer
//
// Each part begins at a block, and so does each head's index and each head's run of pages. A writer
// needs one pass: what it knows only at the end, the table and its checksum, lies at the end.
#ifndef ATTND_STORAGE_FILES_SEGMENT_LAYOUT_H_
#define ATTND_STORAGE_FILES_SEGMENT_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/files/segment_file.h"
#include "storage/io/file_system.h"

namespace attnd::storage {

inline constexpr uint32_t kSegmentFormat = 1;

constexpr uint64_t RoundUpToBlock(uint64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

// Follows from a header and its metadata's size. All offsets are multiples of kBlockBytes; so are
// sizes, but for those that say otherwise.
struct SegmentLayout {
  uint64_t metadata_offset = 0;
  uint64_t metadata_bytes = 0;  // without padding
  uint64_t indexes_offset = 0;
  uint64_t index_stride_bytes = 0;  // from one head's index to the next one's
  uint64_t pages_offset = 0;
  uint64_t run_stride_bytes = 0;  // from one head's run of pages to the next one's
  uint64_t table_offset = 0;
  uint64_t table_bytes = 0;  // without padding
  uint64_t footer_offset = 0;
  uint64_t file_bytes = 0;
  bool operator==(const SegmentLayout&) const = default;

  uint64_t IndexOffset(uint64_t head) const { return indexes_offset + head * index_stride_bytes; }
  uint64_t RunOffset(uint64_t head) const { return pages_offset + head * run_stride_bytes; }
};

// InvalidArgument names the field that is beyond its limit. Looks at no metadata, only at its size.
absl::StatusOr<SegmentLayout> LayOut(const SegmentFileHeader& header, uint64_t metadata_bytes);

// Places in the table of checksums, which is an array of uint32: an index's of each head, if there
// are indexes, then each page's, head by head.
uint64_t IndexChecksumAt(uint64_t head);
uint64_t PageChecksumAt(const SegmentFileHeader& header, uint64_t head, uint32_t page);

using Block = std::span<std::byte, kBlockBytes>;
using ConstBlock = std::span<const std::byte, kBlockBytes>;

// The content of the first block.
struct DecodedHeader {
  SegmentFileHeader header;  // without metadata: that lies elsewhere
  SegmentLayout layout;
  uint32_t metadata_checksum = 0;
  uint32_t checksum = 0;  // the block's own
};
// The last block's, beyond what it repeats.
struct DecodedFooter {
  uint32_t table_checksum = 0;
  uint32_t checksum = 0;  // the block's own
};

// Fill a block and return its checksum. `layout` is of the same header.
uint32_t EncodeHeader(const SegmentFileHeader& header, const SegmentLayout& layout,
                      uint32_t metadata_checksum, Block block);
uint32_t EncodeFooter(const DecodedHeader& header, uint32_t table_checksum, Block block);

// Take any bytes. DataLoss says what is wrong with them; FailedPrecondition: they are whole, and of
// a format that this program does not know. What they return is within every limit.
absl::StatusOr<DecodedHeader> DecodeHeader(ConstBlock block);
absl::StatusOr<DecodedFooter> DecodeFooter(ConstBlock block, const DecodedHeader& header);

// These decode without comparing the block with its own checksum: for fuzzing, as a fuzzer that had
// to guess checksums would never reach the code behind the comparison.
absl::StatusOr<DecodedHeader> DecodeHeaderUnchecked(ConstBlock block);
absl::StatusOr<DecodedFooter> DecodeFooterUnchecked(ConstBlock block, const DecodedHeader& header);

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_FILES_SEGMENT_LAYOUT_H_
