// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/regression_terms.h"

#include <algorithm>
#include <cmath>

namespace attnd::attention {
namespace {

// Longer queries count as this long: what is summed over channels stays a float.
constexpr float kQueryMax = 1e17f;

size_t RotatedFloats(size_t dim) { return 2 * kQuad * dim + kernels::SquaresFloats(dim); }

}  // namespace

size_t RegressionTerms::ArenaBytes(const ModelShape& shape, size_t segments, size_t quads) {
  constexpr size_t kRounding = 64;  // of each allocation
  const size_t dim = shape.head_dim;
  const size_t each = sizeof(Rotated) + RotatedFloats(dim) * sizeof(float) + 3 * kRounding;
  const size_t prepared = sizeof(kernels::Queries) + kernels::QueriesFloats(dim) * sizeof(float) +
                          kQuad * dim * sizeof(float) + 3 * kRounding;
  return segments * quads * each + quads * prepared + kQuad * dim * sizeof(float) + 2 * kRounding;
}

RegressionTerms::RegressionTerms(const UnitQuery& query, StepArena* arena)
    : head_dim_(query.view->shape.head_dim),
      value_dim_(query.view->shape.value_dim),
      dtype_(AxesDType(*query.view->indexes.clusters())),
      quads_(query.quads()) {
  prepared_ = arena->Allocate<kernels::Queries>(quads_);
  variances_ = arena->Allocate<float>(kQuad * head_dim_);
  std::fill(variances_.begin(), variances_.end(), 0.0f);
  const float scale = query.view->shape.softmax_scale;
  for (size_t quad = 0; quad < quads_; ++quad) {
    const std::span<float> bounded = arena->Allocate<float>(kQuad * head_dim_);
    for (size_t c = 0; c < bounded.size(); ++c) {
      const float scaled = query.queries[quad * kQuad * head_dim_ + c] * scale;
      bounded[c] = std::clamp(scaled, -kQueryMax, kQueryMax);
    }
    float* memory = arena->Allocate<float>(kernels::QueriesFloats(head_dim_)).data();
    prepared_[quad] = kernels::PrepareQueries(dtype_, bounded.data(), 1, head_dim_, memory);
  }
  rotated_ = arena->Allocate<Rotated>(query.view->segments.size() * quads_);
  for (Rotated& rotated : rotated_) {
    rotated = {};
    rotated.queries = arena->Allocate<float>(RotatedFloats(head_dim_)).data();
  }
}

void RegressionTerms::Rotate(size_t segment, size_t quad, const ClusterIndex& index) {
  Rotated& rotated = rotated_[segment * quads_ + quad];
  kernels::DotRows(dtype_, index.axes, head_dim_ * DTypeBytes(dtype_), head_dim_, head_dim_,
                   prepared_[quad], rotated.queries);
  float* const by_lane = rotated.queries + kQuad * head_dim_;
  for (size_t a = 0; a < head_dim_; ++a) {
    for (size_t j = 0; j < kQuad; ++j) by_lane[j * head_dim_ + a] = rotated.queries[a * kQuad + j];
  }
  // Not rounded: axes' variances differ by orders of magnitude, and a query may well be longest
  // along one of next to none.
  rotated.squares = kernels::PrepareSquares(by_lane, 1, head_dim_, by_lane + kQuad * head_dim_,
                                            /*rounded=*/false);
}

void RegressionTerms::AddVariances(const ClusterIndex& index, size_t first, size_t count,
                                   const float* weight, const float* d2) {
  kernels::AddWeightedVariances(index.deviation_codes + first * head_dim_ / 2,
                                index.variance_unit + first, count, head_dim_, d2, weight,
                                variances_.data());
}

void RegressionTerms::Shift(size_t segment, size_t quad, const ClusterIndex& index, float* shift,
                            float (&variances)[kQuad]) {
  const Rotated& rotated = rotated_[segment * quads_ + quad];
  float weights[kernels::kDimMax * kQuad];
  for (size_t a = 0; a < head_dim_; ++a) {
    for (size_t j = 0; j < kQuad; ++j) {
      const float query = rotated.queries[a * kQuad + j];
      weights[a * kQuad + j] = query * variances_[j * head_dim_ + a];
      variances[j] += query * weights[a * kQuad + j];
    }
  }
  kernels::AddWeightedRows(dtype_, index.slopes, value_dim_ * DTypeBytes(dtype_), head_dim_,
                           value_dim_, weights, shift);
  std::fill(variances_.begin(), variances_.end(), 0.0f);
}

}  // namespace attnd::attention
