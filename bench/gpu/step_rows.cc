// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/step_rows.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "bench/pages/page_capture.h"
#include "bench/support.h"
#include "bench/synthetic_sequence.h"

namespace attnd::bench {
namespace {

constexpr uint32_t kSegmentTokens = 8192;

}  // namespace

RowSource RandomRow(const ModelShape& shape, uint64_t tokens, uint64_t seed,
                    attention::IndexSet indexes, uint32_t threads, SegmentCut cut) {
  RowSource source;
  source.view =
      MakeSyntheticSequence(shape, tokens, kSegmentTokens, threads, seed, indexes, cut).view;
  source.tokens = tokens;
  const std::vector<float> queries = MakeQueries(shape, 100 + seed);
  source.queries.resize(queries.size() * sizeof(float));
  std::memcpy(source.queries.data(), queries.data(), source.queries.size());
  return source;
}

RowSource CapturedRow(const std::string& path, attention::IndexSet indexes, uint32_t threads) {
  PageCapture capture = Must(ReadPageCapture(path, indexes, threads, /*sections=*/false));
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

double StepRows::Run(attention::Backend* backend, const attention::Policy& policy,
                     uint32_t number) {
  for (size_t r = 0; r < rows_.size(); ++r) {
    const RowSource& source = sources_[r];
    const size_t bytes =
        size_t{shape().query_heads} * shape().head_dim * DTypeBytes(source.query_dtype);
    rows_[r].queries = source.queries.data() + number % source.steps * bytes;
    rows_[r].policy = &policy;
  }
  attention::StepRequest request;
  request.rows = rows_;
  const auto start = std::chrono::steady_clock::now();
  Must(backend->Step(request));
  return MicrosBetween(start, std::chrono::steady_clock::now());
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
