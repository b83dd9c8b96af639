// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/step_rows.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <numbers>
#include <utility>

#include "bench/pages/page_capture.h"
#include "bench/support.h"
#include "bench/synthetic_sequence.h"

namespace attnd::bench {
namespace {

constexpr uint32_t kSegmentTokens = 8192;

}  // namespace

std::vector<float> MovingQueries(const ModelShape& shape, uint64_t seed, uint32_t steps) {
  constexpr uint64_t kApart = 1'000'003;  // seeds of one sequence's queries
  std::vector<float> queries, from, to;
  for (uint32_t step = 0; step < steps; ++step) {
    if (step % kQueryWay == 0) {
      from = step == 0 ? MakeQueries(shape, seed) : std::move(to);
      to = MakeQueries(shape, seed + kApart * (step / kQueryWay + 1));
    }
    // A quarter of a turn: normal numbers stay normal ones.
    const double angle = std::numbers::pi / 2 * (step % kQueryWay) / kQueryWay;
    const auto cosine = static_cast<float>(std::cos(angle));
    const auto sine = static_cast<float>(std::sin(angle));
    for (size_t i = 0; i < from.size(); ++i) queries.push_back(cosine * from[i] + sine * to[i]);
  }
  return queries;
}

ModelShape ShapeOfRows(uint32_t query_heads, uint32_t kv_heads, uint32_t head_dim) {
  ModelShape shape = Bf16Shape(/*layers=*/1, query_heads, kv_heads, head_dim);
  shape.softmax_scale = 1 / std::sqrt(static_cast<float>(head_dim));
  Must(shape.Validate());
  return shape;
}

RowSource RandomRow(const ModelShape& shape, uint64_t tokens, uint64_t seed,
                    attention::IndexSet indexes, const RowBuilding& building, SegmentCut cut,
                    uint32_t steps) {
  RowSource source;
  source.view = MakeSyntheticSequence(shape, tokens, kSegmentTokens, building.threads, seed,
                                      indexes, cut, building.device)
                    .view;
  source.tokens = tokens;
  source.steps = steps;
  const std::vector<float> queries = MovingQueries(shape, 100 + seed, steps);
  source.queries.resize(queries.size() * sizeof(float));
  std::memcpy(source.queries.data(), queries.data(), source.queries.size());
  return source;
}

RowSource CapturedRow(const std::string& path, attention::IndexSet indexes,
                      const RowBuilding& building) {
  PageCapture capture =
      Must(ReadPageCapture(path, indexes, building.threads, /*sections=*/false, building.device));
  RowSource source;
  source.view = std::move(capture.view);
  source.tokens = uint64_t{capture.prompt_tokens} + capture.decoded_tokens;
  source.query_dtype = source.view->shape.dtype;
  source.steps = capture.decoded_tokens;
  source.queries = std::move(capture.queries);
  return source;
}

StepRows::StepRows(std::vector<RowSource> sources)
    : sources_(std::move(sources)),
      rows_(sources_.size()),
      stats_(sources_.size()),
      outputs_(sources_.size() * shape().query_heads * shape().value_dim),
      lse_(sources_.size() * shape().query_heads) {
  for (size_t r = 0; r < rows_.size(); ++r) {
    if (!(sources_[r].view->shape == shape())) {
      Must(absl::InvalidArgumentError("rows of a step are of models of one shape"));
    }
    attention::StepRow& row = rows_[r];
    row.view = sources_[r].view;
    row.query_tokens = 1;
    row.query_only = true;
    row.query_dtype = sources_[r].query_dtype;
    row.past_tokens = sources_[r].tokens;
    row.out = outputs_.data() + r * shape().query_heads * shape().value_dim;
    row.lse = lse_.data() + r * shape().query_heads;
    row.stats = &stats_[r];
  }
}

double StepRows::Run(attention::Backend* backend, std::span<const attention::Policy> policies,
                     uint32_t number) {
  for (size_t r = 0; r < rows_.size(); ++r) {
    const RowSource& source = sources_[r];
    const size_t bytes =
        size_t{shape().query_heads} * shape().head_dim * DTypeBytes(source.query_dtype);
    rows_[r].queries = source.queries.data() + number % source.steps * bytes;
    rows_[r].policy = &policies[r % policies.size()];
  }
  attention::StepRequest request;
  request.rows = rows_;
  const auto start = std::chrono::steady_clock::now();
  Must(backend->Step(request));
  return MicrosBetween(start, std::chrono::steady_clock::now());
}

std::vector<std::span<const std::byte>> StepRows::Payload() const {
  std::vector<std::span<const std::byte>> blocks;
  for (const RowSource& source : sources_) {
    for (const auto& segment : source.view->segments) blocks.push_back(segment->payload_block());
  }
  return blocks;
}

uint64_t StepRows::PayloadBytes() const {
  uint64_t bytes = 0;
  for (const auto block : Payload()) bytes += block.size();
  return bytes;
}

double StepRows::ReadShare() const {
  double exact = 0, all = 0;
  for (const attention::RowStats& stats : stats_) {
    exact += static_cast<double>(stats.exact_tokens);
    all += static_cast<double>(stats.exact_tokens + stats.estimated_tokens + stats.dropped_tokens);
  }
  return all > 0 ? exact / all : 0;
}

double StepRows::PredictedError() const {
  double sum = 0;
  for (const attention::RowStats& stats : stats_) {
    if (!stats.predicted_error_mean.has_value()) return -1;
    sum += *stats.predicted_error_mean;
  }
  return sum / static_cast<double>(stats_.size());
}

Apart ApartOf(const std::vector<float>& a, const std::vector<float>& b, size_t value_dim) {
  Apart result;
  for (size_t at = 0; at < a.size(); at += value_dim) {
    double apart2 = 0, norm2 = 0;
    for (size_t c = at; c < at + value_dim; ++c) {
      apart2 += (double{a[c]} - b[c]) * (double{a[c]} - b[c]);
      norm2 += double{b[c]} * b[c];
    }
    const double apart = std::sqrt(apart2 / norm2);
    result.mean += apart / static_cast<double>(a.size() / value_dim);
    if (!std::isnan(result.worst) && !(apart <= result.worst)) result.worst = apart;
  }
  return result;
}

}  // namespace attnd::bench
