// SPDX-License-Identifier: Apache-2.0
//
// PageCapture: a model's keys, values and queries, as bench/pages/page_trace_capture.py wrote them,
// as a segmented sequence.
#ifndef ATTND_BENCH_PAGES_PAGE_CAPTURE_H_
#define ATTND_BENCH_PAGES_PAGE_CAPTURE_H_

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/backend.h"

namespace attnd::bench {

// What a capture's file starts with.
struct CaptureHeader {
  char magic[8];
  uint32_t layers, query_heads, kv_heads, head_dim, prompt_tokens, decoded_tokens;
  float softmax_scale;
};
static_assert(sizeof(CaptureHeader) == 36);

// Reads it from the start of `file`, which was opened at `path`, and checks it; returns the model's
// shape. Unavailable or DataLoss, naming the path.
absl::StatusOr<ModelShape> ReadCaptureHeader(const std::string& path, std::ifstream* file,
                                             CaptureHeader* header);

struct PageCapture {
  std::shared_ptr<const attention::SequenceView> view;  // the prompt in segments, then the tail
  uint32_t prompt_tokens = 0;
  uint32_t decoded_tokens = 0;
  std::vector<std::byte> queries;  // bf16 [layers][decoded_tokens][query_heads][head_dim]

  const std::byte* query(uint32_t layer, uint32_t token) const {
    const ModelShape& shape = view->shape;
    const size_t row = size_t{shape.query_heads} * shape.head_dim * DTypeBytes(shape.dtype);
    return queries.data() + (size_t{layer} * decoded_tokens + token) * row;
  }
};

// Reads a capture and segments its prompt as the engine does one without token ids: runs of 8,192
// tokens and more outside the window, the last one of 512 or more. threads: that build them.
// sections, device: see WithSegment.
// Unavailable or DataLoss, naming the path.
absl::StatusOr<PageCapture> ReadPageCapture(
    const std::string& path, attention::IndexSet indexes = attention::kClusterIndexes,
    uint32_t threads = 1, bool sections = true, attention::Backend* device = nullptr);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_CAPTURE_H_
