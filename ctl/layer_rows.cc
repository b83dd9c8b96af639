// SPDX-License-Identifier: Apache-2.0
#include "ctl/layer_rows.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "attention/segment/pages.h"
#include "attention/segment/segment_loader.h"
#include "common/status.h"

namespace attnd::ctl {

using attention::PageGeometry;
using storage::SegmentFileHeader;

absl::StatusOr<LayerRows> LayerRows::Make(const OpenedFile* opened, storage::IoQueue* queue) {
  LayerRows rows(opened);
  const SegmentFileHeader& header = opened->header();
  if (header.kind == storage::SegmentKind::kTail) {
    rows.first_place_ = header.first_position - engine::FirstTailPosition(header.first_position);
  } else {
    ATTND_RETURN_IF_ERROR(rows.ReadPositions(queue));
  }
  ATTND_RETURN_IF_ERROR(rows.TakeMemory());
  return rows;
}

// The loader's block for the payload stays as it is: nothing touches it, so that it takes no
// memory.
absl::Status LayerRows::ReadPositions(storage::IoQueue* queue) {
  const SegmentFileHeader& header = opened_->header();
  attention::SegmentLoader loader(1, opened_->form(), header.first_position);
  if (!loader.allocated()) {
    return absl::ResourceExhaustedError("the system refused memory for a segment's index");
  }
  ATTND_RETURN_IF_ERROR(opened_->file->ReadIndexes(queue, loader.index_block().data(), {}));
  if (const absl::Status index = loader.Check(); !index.ok()) {
    return absl::DataLossError(index.message());
  }
  const auto segment = loader.Finish();
  tokens_at_.reserve(header.heads() * header.tokens);
  for (uint32_t layer = 0; layer < header.layers; ++layer) {
    for (uint32_t head = 0; head < header.kv_heads; ++head) {
      const auto positions = segment->positions(layer, head);
      tokens_at_.insert(tokens_at_.end(), positions.begin(), positions.end());
    }
  }
  return absl::OkStatus();
}

absl::Status LayerRows::TakeMemory() {
  const SegmentFileHeader& header = opened_->header();
  const PageGeometry geometry(opened_->metadata.args.shape);
  // No overflow: 2^10 heads of at most 2^16 pages of 2^20 bytes.
  const uint64_t bytes = uint64_t{header.kv_heads} * header.pages * header.page_bytes;
  if (bytes > kLayerBytesMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a layer of a file has ", bytes, " bytes; allowed are ", kLayerBytesMax));
  }
  pages_ = AlignedBuffer(bytes);
  if (bytes > 0 && pages_.data() == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the system refused ", bytes, " bytes for a layer of a file"));
  }
  keys_.resize(uint64_t{header.tokens} * header.kv_heads * geometry.key_row_bytes);
  values_.resize(uint64_t{header.tokens} * header.kv_heads * geometry.value_row_bytes);
  return absl::OkStatus();
}

absl::StatusOr<LayerRows::Layer> LayerRows::Read(uint32_t layer, storage::IoQueue* queue) {
  const SegmentFileHeader& header = opened_->header();
  const PageGeometry geometry(opened_->metadata.args.shape);
  const uint64_t run_bytes = uint64_t{header.pages} * header.page_bytes;
  std::vector<storage::PageRead> reads;
  reads.reserve(uint64_t{header.kv_heads} * header.pages);
  for (uint32_t head = 0; head < header.kv_heads; ++head) {
    for (uint32_t page = 0; page < header.pages; ++page) {
      reads.push_back({uint64_t{layer} * header.kv_heads + head, page,
                       pages_.data() + head * run_bytes + uint64_t{page} * header.page_bytes});
    }
  }
  ATTND_RETURN_IF_ERROR(opened_->file->ReadPages(queue, reads, {}));
  for (uint32_t head = 0; head < header.kv_heads; ++head) {
    const std::byte* const run = pages_.data() + head * run_bytes;
    const uint64_t first_of_head = (uint64_t{layer} * header.kv_heads + head) * header.tokens;
    for (uint64_t place = 0; place < header.tokens; ++place) {
      const uint64_t token = tokens_at_.empty() ? place : tokens_at_[first_of_head + place];
      const uint64_t row = token * header.kv_heads + head, from = first_place_ + place;
      std::memcpy(keys_.data() + row * geometry.key_row_bytes, run + geometry.KeyOffset(from),
                  geometry.key_row_bytes);
      if (!geometry.stores_values()) continue;
      std::memcpy(values_.data() + row * geometry.value_row_bytes, run + geometry.ValueOffset(from),
                  geometry.value_row_bytes);
    }
  }
  return Layer{keys_, values_};
}

}  // namespace attnd::ctl
