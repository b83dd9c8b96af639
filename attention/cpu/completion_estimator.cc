// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/completion_estimator.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/policy/policy.h"
#include "attention/segment/segment.h"

namespace attnd::attention {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();
constexpr size_t kRounding = size_t{8} * 64;  // of the arena's separate allocations

}  // namespace

size_t CompletionEstimator::ArenaBytes(const SequenceView& view) {
  const ModelShape& shape = view.shape;
  const size_t features = shape.head_dim;
  return features * (sizeof(float) + (2 + shape.value_dim) * sizeof(double)) +
         shape.group() * (features * sizeof(float) + sizeof(double)) + kRounding;
}

CompletionEstimator::CompletionEstimator(const UnitQuery& query, StepArena* arena)
    : query_(query),
      maps_(*query.view->state.feature_maps),
      features_(maps_.features()),
      value_dim_(query.view->shape.value_dim) {
  const size_t group = query.view->shape.group();
  m_ = arena->Allocate<float>(features_);
  whole_ = arena->Allocate<double>(features_);
  u_ = arena->Allocate<double>(features_);
  t_ = arena->Allocate<double>(features_ * value_dim_);
  query_features_ = arena->Allocate<float>(group * features_);
  log_mass_ = arena->Allocate<double>(group);
  std::fill(log_mass_.begin(), log_mass_.end(), kNothing);
  for (size_t head = 0; head < group; ++head) completed_ += completes(head) ? 1 : 0;
}

bool CompletionEstimator::completes(size_t head) const {
  if (query_.policy->completion != Completion::kMaps) {
    return query_.policy->completion == Completion::kOn;
  }
  const size_t group = query_.view->shape.group();
  return maps_.completed(query_.layer, static_cast<uint32_t>(query_.kv_head * group + head));
}

void CompletionEstimator::Prepare() {
  std::fill(m_.begin(), m_.end(), kNegativeInfinity);
  for (const auto& segment : query_.view->segments) {
    const SummaryIndex summary = segment->summary(query_.layer, query_.kv_head);
    for (size_t f = 0; f < features_; ++f) m_[f] = std::max(m_[f], summary.m[f]);
  }
  const size_t group = query_.view->shape.group(), dim = query_.view->shape.head_dim;
  float quads[kQuad * kernels::kDimMax], features[kQuad * kernels::kDimMax];
  for (size_t head = 0; head < group; ++head) {
    if (!completes(head)) continue;
    std::fill_n(quads, kQuad * dim, 0.0f);  // every head has a map of its own
    std::copy_n(query_.queries + head * dim, dim, quads);
    maps_.QueryFeatures(query_.layer, static_cast<uint32_t>(query_.kv_head * group + head), quads,
                        features);
    for (size_t f = 0; f < features_; ++f) {
      query_features_[head * features_ + f] = features[f * kQuad];
    }
  }
}

size_t CompletionEstimator::AddReader(StepArena* arena) {
  std::byte* memory = arena->Allocate<std::byte>(FeatureSums::Bytes(query_.view->shape)).data();
  readers_.emplace_back(&maps_, query_.view->shape, query_.layer, query_.kv_head, m_.data(),
                        memory);
  return readers_.size() - 1;
}

// The remainder's u and T: what all segments hold less what was read.
void CompletionEstimator::Subtract() {
  std::fill(u_.begin(), u_.end(), 0.0);
  std::fill(t_.begin(), t_.end(), 0.0);
  for (const auto& segment : query_.view->segments) {
    const SummaryIndex summary = segment->summary(query_.layer, query_.kv_head);
    for (size_t f = 0; f < features_; ++f) {
      const double shrink = std::exp(double{summary.m[f]} - m_[f]);
      u_[f] += shrink * summary.u[f];
      for (size_t c = f * value_dim_; c < (f + 1) * value_dim_; ++c) {
        t_[c] += shrink * summary.t[c];
      }
    }
  }
  std::copy(u_.begin(), u_.end(), whole_.begin());
  for (const FeatureSums& read : readers_) {
    for (size_t f = 0; f < features_; ++f) u_[f] -= read.u()[f];
    for (size_t c = 0; c < t_.size(); ++c) t_[c] -= read.t()[c];
  }
  for (size_t f = 0; f < features_; ++f) {
    if (!(u_[f] > 0) || u_[f] < query_.policy->epsilon * whole_[f]) u_[f] = 0;
  }
}

double CompletionEstimator::Evaluate(size_t head, float* mean) const {
  const float* log_query = query_features_.data() + head * features_;
  double a[kernels::kDimMax], greatest = kNothing, sum = 0;
  for (size_t f = 0; f < features_; ++f) {
    a[f] = u_[f] == 0 ? kNothing : double{log_query[f]} + m_[f] + std::log(u_[f]);
    greatest = std::max(greatest, a[f]);
  }
  if (greatest == kNothing) return kNothing;
  for (size_t f = 0; f < features_; ++f) sum += std::exp(a[f] - greatest);
  double means[kernels::kDimMax] = {};
  for (size_t f = 0; f < features_; ++f) {
    if (u_[f] == 0) continue;
    const double weight = std::exp(a[f] - greatest) / (sum * u_[f]);
    for (size_t c = 0; c < value_dim_; ++c) means[c] += weight * t_[f * value_dim_ + c];
  }
  for (size_t c = 0; c < value_dim_; ++c) mean[c] = static_cast<float>(means[c]);
  return greatest + std::log(sum);
}

void CompletionEstimator::Estimate(uint64_t middle, std::span<QuadState> states) {
  uint64_t read = 0;
  for (FeatureSums& reader : readers_) {
    reader.Finish();
    read += reader.tokens();
  }
  if (read >= middle || !completes_any()) return;
  Subtract();
  float values[kQuad * kernels::kDimMax];
  for (size_t quad = 0; quad < query_.quads(); ++quad) {
    QuadState estimate;
    estimate.values = values;
    ClearState(value_dim_, &estimate);
    for (size_t lane = 0; lane < query_.LanesOf(quad); ++lane) {
      const size_t head = quad * kQuad + lane;
      if (!completes(head)) continue;
      log_mass_[head] = Evaluate(head, values + lane * value_dim_);
      if (log_mass_[head] == kNothing) continue;
      estimate.max[lane] = static_cast<float>(log_mass_[head]);
      estimate.sum[lane] = 1;
    }
    MergeState(estimate, value_dim_, &states[quad]);
  }
}

}  // namespace attnd::attention
