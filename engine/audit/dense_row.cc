// SPDX-License-Identifier: Apache-2.0
#include "engine/audit/dense_row.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "attention/kernels/softmax_state.h"
#include "glog/logging.h"

namespace attnd::engine {

using attention::kQuad;
using attention::kTailBlockTokens;
using attention::QuadState;
using attention::kernels::PrepareQueries;
using attention::kernels::Queries;
using attention::kernels::QueriesFloats;

namespace {

// Blocks of a tail that are summed in single precision: as many tokens as a segment has.
constexpr size_t kPartBlocks = 128;

// Of one quad: its queries as they come and as they are prepared, and its state's values. Each
// begins at a multiple of 64 bytes, as dims are multiples of 16.
size_t QuadFloats(const ModelShape& shape) {
  return kQuad * shape.head_dim + QueriesFloats(shape.head_dim) + kQuad * shape.value_dim;
}

size_t Quads(const ModelShape& shape) {
  return shape.kv_heads * size_t{(shape.group() + kQuad - 1) / kQuad};
}

double Norm(std::span<const double> vector) {
  double norm2 = 0;
  for (const double x : vector) norm2 += x * x;
  return std::sqrt(norm2);
}

}  // namespace

uint64_t DenseRow::Bytes(const attention::SequenceView& view) {
  const ModelShape& shape = view.shape;
  const uint64_t quad_bytes =
      QuadFloats(shape) * sizeof(float) + sizeof(Queries) + sizeof(QuadState);
  return sizeof(DenseRow) + (view.tail.size() + view.segments.size()) * sizeof(Source) +
         Quads(shape) * quad_bytes +
         uint64_t{shape.query_heads} * (shape.value_dim + 2) * sizeof(double);
}

DenseRow::DenseRow(const attention::SequenceView& view, uint32_t layer, uint64_t tokens)
    : shape_(view.shape), layer_(layer) {
  sources_.reserve(view.tail.size() + view.segments.size());
  uint64_t first = view.tail_begin / kTailBlockTokens * kTailBlockTokens;  // of the block
  for (size_t i = 0; i < view.tail.size() && first < tokens; ++i, first += kTailBlockTokens) {
    Source& source = sources_.emplace_back();
    source.block = view.tail[i];
    source.begin = static_cast<uint32_t>(std::max(first, view.tail_begin) - first);
    source.end = static_cast<uint32_t>(std::min(first + kTailBlockTokens, tokens) - first);
    source.last = i % kPartBlocks == kPartBlocks - 1;
  }
  if (!sources_.empty()) sources_.back().last = true;
  for (const auto& segment : view.segments) {
    Source& source = sources_.emplace_back();
    source.segment = segment;
    source.end = segment->tokens();
    source.last = true;
  }
}

void DenseRow::Start(std::span<const float> q) {
  const size_t dim = shape_.head_dim, group = shape_.group();
  CHECK_EQ(q.size(), shape_.query_heads * dim);
  CHECK(states_.empty()) << "a row is started twice";
  memory_ = AlignedBuffer(Quads(shape_) * QuadFloats(shape_) * sizeof(float));
  if (memory_.data() == nullptr) throw std::bad_alloc();
  auto* next = reinterpret_cast<float*>(memory_.data());  // zeros: lanes without a head stay so
  queries_.reserve(Quads(shape_));
  states_.reserve(Quads(shape_));
  for (size_t kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
    for (size_t first = 0; first < group; first += kQuad) {
      const size_t lanes = std::min(kQuad, group - first);
      std::copy_n(q.data() + (kv_head * group + first) * dim, lanes * dim, next);
      float* const prepared = next + kQuad * dim;
      queries_.push_back(PrepareQueries(shape_.dtype, next, shape_.softmax_scale, dim, prepared));
      QuadState& state = states_.emplace_back();
      state.values = prepared + QueriesFloats(dim);
      attention::ClearState(shape_.value_dim, &state);
      next += QuadFloats(shape_);
    }
  }
  max_.assign(shape_.query_heads, -std::numeric_limits<double>::infinity());
  lse_.assign(shape_.query_heads, 0);
  out_.assign(size_t{shape_.query_heads} * shape_.value_dim, 0);
  if (!sources_.empty()) token_ = sources_.front().begin;
}

DenseRow::Progress DenseRow::Advance() {
  const auto piece = static_cast<uint32_t>(
      std::max<size_t>(attention::kernels::kRowBlock, kPieceTokens / QuadsPerHead()));
  for (uint32_t room = piece; room > 0 && source_ < sources_.size();) {
    const Source& source = sources_[source_];
    const auto segment = source.segment.lock();
    const auto block = source.block.lock();
    if (segment == nullptr && block == nullptr) return Progress::kGone;
    const uint32_t end = std::min(source.end, token_ + room);
    room -= end - token_;
    Attend(segment != nullptr ? segment->pages(layer_, head_) : block->pages(layer_, head_), end);
  }
  if (source_ < sources_.size()) return Progress::kMore;
  Normalise();
  return Progress::kDone;
}

void DenseRow::Attend(const std::byte* pages, uint32_t end) {
  attention::TokenRun run;
  run.pages = pages;
  run.range = {token_, end};
  const size_t first = head_ * QuadsPerHead();
  attention::kernels::AttendRuns(attention::PageGeometry(shape_), {&run, 1}, &queries_[first],
                                 QuadsPerHead(), &states_[first]);
  token_ = end;
  if (token_ == sources_[source_].end) Next();
}

void DenseRow::Next() {
  if (++head_ == shape_.kv_heads) {
    head_ = 0;
    if (sources_[source_].last) Fold();
    ++source_;
  }
  if (source_ < sources_.size()) token_ = sources_[source_].begin;
}

void DenseRow::Fold() {
  const size_t group = shape_.group(), dim = shape_.value_dim;
  for (size_t head = 0; head < shape_.query_heads; ++head) {
    const size_t in_group = head % group, lane = in_group % kQuad;
    const QuadState& state = states_[head / group * QuadsPerHead() + in_group / kQuad];
    if (state.sum[lane] == 0) continue;
    const double max = std::max<double>(max_[head], state.max[lane]);
    const double before = std::exp(max_[head] - max), now = std::exp(state.max[lane] - max);
    max_[head] = max;
    lse_[head] = lse_[head] * before + state.sum[lane] * now;
    double* const sums = out_.data() + head * dim;
    const float* const values = state.values + lane * dim;
    for (size_t c = 0; c < dim; ++c) sums[c] = sums[c] * before + values[c] * now;
  }
  for (QuadState& state : states_) attention::ClearState(dim, &state);
}

void DenseRow::Normalise() {
  const size_t dim = shape_.value_dim;
  for (size_t head = 0; head < shape_.query_heads; ++head) {
    for (size_t c = 0; c < dim; ++c) out_[head * dim + c] /= lse_[head];
    lse_[head] = max_[head] + std::log(lse_[head]);
  }
}

Comparison CompareWithDense(std::span<const float> out, std::span<const float> lse,
                            const DenseRow& dense) {
  const size_t heads = lse.size(), dim = out.size() / heads;
  CHECK_EQ(heads, dense.lse().size());
  CHECK_EQ(out.size(), dense.out().size());
  Comparison comparison;
  std::vector<double> difference(dim);
  for (size_t head = 0; head < heads; ++head) {
    const std::span<const double> truth = dense.out().subspan(head * dim, dim);
    for (size_t c = 0; c < dim; ++c) difference[c] = out[head * dim + c] - truth[c];
    const double off = Norm(difference), norm = Norm(truth);
    const double error = norm > 0 ? off / norm : off > 0 ? 1 : 0;
    comparison.error_mean += error / static_cast<double>(heads);
    comparison.error_max = std::max(comparison.error_max, error);
    const double share = std::exp(std::min(0.0, lse[head] - dense.lse()[head]));
    comparison.covered_mass += share / static_cast<double>(heads);
  }
  return comparison;
}

}  // namespace attnd::engine
