// SPDX-License-Identifier: Apache-2.0
//
// RowDescription: all that the planning of a step must know of a row, without sequences, policies
// and segments. The backend makes a description from a StepRow (describe_row.h), the benchmark of
// kernels from numbers of its own; step_writer.h turns descriptions into bytes.
#ifndef ATTND_GPU_STEP_ROW_DESCRIPTION_H_
#define ATTND_GPU_STEP_ROW_DESCRIPTION_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "common/dtype.h"
#include "gpu/layout/index_layout.h"
#include "gpu/layout/kernel_shapes.h"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

// What the rows of one wave have in common, as one header describes them.
struct WaveShape {
  KernelShape kernel{};
  uint32_t kv_heads = 0;
  uint32_t group = 0;  // query heads of a KV head
  float softmax_scale = 0;
  DType query_dtype = DType::kFp32;
  // Chosen tokens may lie in files: such a wave may have to run again (file_pages.h), for which
  // rows without files need not wait.
  bool reads_files = false;
  // Rows that estimate what does not come in time wait so long, in microseconds from the step's
  // start; absent for rows that wait for all their pages, and unless reads_files.
  std::optional<uint32_t> miss_wait_us = std::nullopt;
  DType out_dtype = DType::kFp32;
  bool operator==(const WaveShape&) const = default;

  uint32_t query_heads() const { return kv_heads * group; }
};

// A segment that the row reads.
struct SegmentDescription {
  uint32_t tokens = 0;
  uint32_t unclustered = 0;   // of them; the first ones
  uint32_t max_clusters = 0;  // rows that the index has room for
  uint64_t index_head_bytes = 0;
  uint64_t pages_head_bytes = 0;  // of all pages
  bool in_file = false;           // the pages
  IndexOffsets offsets{};
  // Of a tree; its clusters are the leaves.
  uint32_t max_groups = 0;
  TreeOffsets tree{};
};

// A row: constant while the row is answered, whatever parts it is divided into.
struct RowDescription {
  WaveShape shape;

  // The policy, at the step's layer.
  UnitKind kind = UnitKind::kDense;
  CutKind cut = CutKind::kTopK;
  bool second_order = false;  // estimates of the second order; not without clusters
  double exact_share = 0, estimated_share = 0;
  double p1 = 0, p2 = 0;
  double tolerance = std::numeric_limits<double>::infinity(), floor = 0;
  double head_tolerance = 0;

  // The query tokens, in host memory.
  uint32_t query_tokens = 0;           // at least 1
  const std::byte* queries = nullptr;  // [query_tokens][query_heads][head_dim] of query_dtype

  // The tail. Its tokens are numbered from the start of the first tail block. Query token i sees
  // those from tail_begin on and below tail_limit + (causal ? i : 0).
  uint32_t tail_begin = 0;
  uint64_t tail_limit = 0;
  bool causal = true;

  // The segments that the row reads, in memory of whoever describes it; a streaming row reads only
  // the segments that hold its sink.
  std::span<const SegmentDescription> segments;
  // Of all segments of the row's history.
  uint64_t history_segments = 0;
  uint64_t history_tokens = 0;
  uint64_t history_clustered = 0;

  uint64_t history_unclustered() const { return history_tokens - history_clustered; }
  // How many tail tokens, counted from the first tail block's start, query token i sees.
  uint64_t TailLimit(uint64_t i) const { return tail_limit + (causal ? i : 0); }
  uint64_t tail_end() const { return TailLimit(query_tokens - 1); }
};

// New tokens that a step uploads in its own input buffer: rows of one KV head that follow one
// another on a page. The tokens must stay until StepWriter::WriteTokens.
struct Upload {
  enum class Rows : uint8_t { kKeys, kValues, kPage };  // kPage: keys and values, of a whole page
  std::byte* to = nullptr;                              // on the device
  const std::byte* from = nullptr;
  uint64_t bytes = 0;
  Rows rows = Rows::kKeys;
  uint32_t kv_head = 0;
  uint64_t first_token = 0;  // numbered as RowDescription::tail_begin
};

// Where the row's history lies on the device, at the step's layer, as long as it is pinned there.
struct RowMemory {
  struct SegmentPlace {
    const std::byte* index;  // of KV head 0
    const std::byte* pages;
    uint64_t first_page = 0;  // as SegmentRef::first_page
  };
  std::vector<SegmentPlace> segments;         // of RowDescription::segments
  std::vector<const std::byte*> tail_blocks;  // KV head 0's pages of the blocks that the row sees
  std::vector<Upload> uploads;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_ROW_DESCRIPTION_H_
