// SPDX-License-Identifier: Apache-2.0
//
// Rows of one decode step, without an engine: random ones, or such of a trained model.
#ifndef ATTND_BENCH_GPU_STEP_ROWS_H_
#define ATTND_BENCH_GPU_STEP_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "attention/policy/policy.h"
#include "bench/synthetic_sequence.h"

namespace attnd::bench {

// A sequence of one layer, and the queries that steps ask of it one after another. They all see all
// of its tokens, so that equal steps run from a graph.
struct RowSource {
  std::shared_ptr<const attention::SequenceView> view;
  uint64_t tokens = 0;
  DType query_dtype = DType::kFp32;
  uint32_t steps = 1;
  std::vector<std::byte> queries;  // [steps][query_heads][head_dim]
};

// Who builds a row's segments.
struct RowBuilding {
  uint32_t threads = 1;                  // of the CPU
  attention::Backend* device = nullptr;  // builds what it can
};

// Queries that move slowly: from one random query to another in kQueryWay steps, each a mix of its
// two neighbours, of about their length. [steps][query_heads][head_dim]
inline constexpr uint32_t kQueryWay = 16;
std::vector<float> MovingQueries(const ModelShape& shape, uint64_t seed, uint32_t steps);

// Of rows of one layer in bf16; dies where it is no model's.
ModelShape ShapeOfRows(uint32_t query_heads, uint32_t kv_heads, uint32_t head_dim);

// Keys in short runs around random centres, and MovingQueries.
RowSource RandomRow(const ModelShape& shape, uint64_t tokens, uint64_t seed,
                    attention::IndexSet indexes, const RowBuilding& building, SegmentCut cut,
                    uint32_t steps = 1);
// The first layer of a capture (bench/pages/page_trace_capture.py), and its decoded tokens'
// queries; segments as a device builds them.
RowSource CapturedRow(const std::string& path, attention::IndexSet indexes,
                      const RowBuilding& building);

// Rows of one query token each.
class StepRows {
 public:
  explicit StepRows(std::vector<RowSource> sources);

  // Runs step `number`, which may be any; rows take the policies in turn. Returns the microseconds
  // that the caller waits.
  double Run(attention::Backend* backend, std::span<const attention::Policy> policies,
             uint32_t number = 0);
  double Run(attention::Backend* backend, const attention::Policy& policy, uint32_t number = 0) {
    return Run(backend, {&policy, 1}, number);
  }

  const ModelShape& shape() const { return sources_.front().view->shape; }
  const std::vector<RowSource>& sources() const { return sources_; }
  // The pages of all segments of all rows.
  std::vector<std::span<const std::byte>> Payload() const;
  uint64_t PayloadBytes() const;
  // Of the first row.
  uint64_t tokens() const { return sources_.front().tokens; }
  // Of the last step: [rows][query_heads][value_dim].
  const std::vector<float>& outputs() const { return outputs_; }
  const std::vector<float>& lse() const { return lse_; }  // [rows][query_heads]
  const std::vector<attention::RowStats>& stats() const { return stats_; }
  // Of the tokens of clusters, those that the last step read.
  double ReadShare() const;
  // Mean over rows of the error that the last step predicted; -1 if it predicted none.
  double PredictedError() const;

 private:
  const std::vector<RowSource> sources_;
  std::vector<attention::StepRow> rows_;
  std::vector<attention::RowStats> stats_;
  std::vector<float> outputs_, lse_;
};

// Of |a - b| / |b| by query head: the mean and the greatest. NaN is the greatest.
struct Apart {
  double mean = 0, worst = 0;
};
Apart ApartOf(const std::vector<float>& a, const std::vector<float>& b, size_t value_dim);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_GPU_STEP_ROWS_H_
