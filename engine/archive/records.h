// SPDX-License-Identifier: Apache-2.0
//
// The metadata of the archive's files (archive.proto), and the contents of segments and tails as
// sources of such files.
#ifndef ATTND_ENGINE_ARCHIVE_RECORDS_H_
#define ATTND_ENGINE_ARCHIVE_RECORDS_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/segment/pages.h"
#include "engine/sequence/sequence.h"
#include "engine/types.h"
#include "storage/files/segment_file.h"

namespace attnd::engine {

// Metadata of a file, read and checked.
struct FileMetadata {
  std::string tenant;
  OpenArgs args;  // of segments: without a policy
  std::vector<TokenIds::Run> token_ids;
  std::vector<float> key_bounds;  // of segments: [layers]
  std::string label_channels;     // of segments: LabelChannelsId, or empty in older files
  bool sections = false;          // of segments: SegmentForm::sections
  // Of tails.
  uint64_t sealed_id = 0;
  uint64_t tokens = 0;
  int64_t sealed_unix_s = 0;
};

// Identifies the channels of a segment's labels: equal exactly for equal channels. Empty without
// labels.
absl::StatusOr<std::string> LabelChannelsId(const attention::Segment& segment);

std::string EncodeMetadata(const FileMetadata& metadata);
// DataLoss, saying what is wrong; FailedPrecondition for metadata of a newer version. kind: whether
// the metadata must have the parts of a tail or of a segment.
absl::StatusOr<FileMetadata> DecodeMetadata(const std::string& bytes, storage::SegmentKind kind);

// The parts of `runs` with positions in [begin, end).
std::vector<TokenIds::Run> RunsWithin(std::span<const TokenIds::Run> runs, uint64_t begin,
                                      uint64_t end);

// The header of a segment's file, without names and metadata.
storage::SegmentFileHeader HeaderOf(const attention::Segment& segment);

// A whole segment as the source of a file. The segment must outlive this object.
class SegmentBytes : public storage::SegmentSource {
 public:
  explicit SegmentBytes(const attention::Segment& segment) : segment_(segment) {}
  const std::byte* Index(uint64_t head) const override {
    return segment_.index_block().data() + head * segment_.layout().head_bytes;
  }
  const std::byte* Pages(uint64_t head) const override {
    return segment_.payload_block().data() + head * segment_.pages_head_bytes();
  }
  bool pages_last() const override { return true; }

 private:
  const attention::Segment& segment_;
};

// The position of a tail's first page: the start of its first tail block.
inline uint64_t FirstTailPosition(uint64_t tail_begin) {
  return tail_begin / attention::kTailBlockTokens * attention::kTailBlockTokens;
}
// How many pages a head of a tail with positions [tail_begin, end) has.
inline uint64_t TailPages(uint64_t tail_begin, uint64_t end) {
  if (end <= tail_begin) return 0;
  return attention::PageGeometry::PagesFor(end - FirstTailPosition(tail_begin));
}

// The committed positions of a history's tail, in pages from the start of its first tail block, as
// the source of a file. The result of Pages is a copy without uncommitted positions, valid until
// the next call.
class TailBytes : public storage::SegmentSource {
 public:
  explicit TailBytes(const HistorySnapshot& history);
  storage::SegmentFileHeader Header() const;
  const std::byte* Index(uint64_t /*head*/) const override { return nullptr; }
  const std::byte* Pages(uint64_t head) const override;

 private:
  const HistorySnapshot& history_;
  const uint64_t first_;  // position of the first page
  const uint32_t pages_;  // of a head
  mutable std::vector<std::byte> run_;
};

// Appends a tail's pages, [heads][pages][page_bytes] from the start of its first tail block, to a
// sequence that ends where the tail begins. ResourceExhausted if there is no memory.
absl::Status AppendTail(const storage::SegmentFileHeader& header, const std::byte* pages,
                        std::span<const TokenIds::Run> token_ids, Sequence* sequence);

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_RECORDS_H_
