// SPDX-License-Identifier: Apache-2.0
#include "attention/index/regression_describer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "attention/kernels/kernels.h"
#include "attention/segment/index_parts.h"
#include "common/dtype.h"

namespace attnd::attention {
namespace {

// Multiply-adds of a chunk: a tenth of a millisecond.
constexpr size_t kPassChunkWork = size_t{1} << 20;
constexpr uint32_t kPassChunkTokensMax = 64;
// Axes with less than this share of all variance have no slope: theirs would be one rounding by
// another.
constexpr double kLeastVarianceShare = 1e-12;
// Keys deviate from their centroid at most by this, so that sums of their products stay floats:
// over 4,096 clusters and 576 axes, 2.4e38. Hardly a query may look at keys this large.
constexpr float kDeviationMax = 1e16f;
// Slopes stay floats, and so does what they make of coordinates, whatever the values.
constexpr double kSlopeMax = 1e18;

// sum[i][...] += sum_j a[j][i] * b[j][...] over `count` rows; a: [count][a_dim], b: [count][b_dim],
// sum: [a_dim][b_dim]. quad and sums are scratch.
void AddProducts(const float* a, size_t a_dim, const float* b, size_t b_dim, size_t count,
                 float* quad, float* sums, double* sum) {
  for (size_t i = 0; i < a_dim; i += kQuad) {
    for (size_t j = 0; j < count; ++j) std::copy_n(a + j * a_dim + i, kQuad, quad + j * kQuad);
    std::fill_n(sums, kQuad * b_dim, 0.0f);
    kernels::AddWeightedRows(DType::kFp32, reinterpret_cast<const std::byte*>(b),
                             b_dim * sizeof(float), count, b_dim, quad, sums);
    for (size_t k = 0; k < kQuad * b_dim; ++k) sum[i * b_dim + k] += sums[k];
  }
}

// out = sum_i x[i] * rows[i] of four vectors x at a time: x [4][dim], rows [dim][width], out
// [4][width] that is added to.
void AddFourProducts(const float* x, size_t dim, const float* rows, size_t width, float* quad,
                     float* out) {
  for (size_t i = 0; i < dim; ++i) {
    for (size_t j = 0; j < kQuad; ++j) quad[i * kQuad + j] = x[j * dim + i];
  }
  kernels::AddWeightedRows(DType::kFp32, reinterpret_cast<const std::byte*>(rows),
                           width * sizeof(float), dim, width, quad, out);
}

}  // namespace

uint64_t RegressionDescriber::ScratchBytes(const SegmentForm& form) {
  const uint64_t dim = form.shape.head_dim, value_dim = form.shape.value_dim;
  const uint64_t clusters = form.tokens / InfoOf(ClusterForm::kRegression).tokens + 1;
  return clusters * ((dim + value_dim) * sizeof(float) + sizeof(uint32_t)) +
         uint64_t{kPassChunkTokensMax} * (3 * dim + value_dim) * sizeof(float) +
         dim * dim * (3 * sizeof(double) + sizeof(float)) + dim * value_dim * sizeof(double) +
         8 * (dim + value_dim) * sizeof(double);
}

void RegressionDescriber::Start(const ClusteredHead& head) {
  head_ = head;
  const ModelShape& shape = head.form->shape;
  dim_ = shape.head_dim;
  value_dim_ = shape.value_dim;
  uint32_t clusters = 0;
  std::memcpy(&clusters, head.index, sizeof(clusters));
  starts_.resize(clusters + 1);
  std::memcpy(starts_.data(), head.index + head.layout->starts, starts_.size() * sizeof(uint32_t));
  chunk_tokens_ = static_cast<uint32_t>(std::clamp<size_t>(
      kPassChunkWork / (dim_ * (dim_ + value_dim_)) / kQuad * kQuad, kQuad, kPassChunkTokensMax));
  keys_.resize(chunk_tokens_ * dim_);
  values_.resize(chunk_tokens_ * value_dim_);
  coordinates_.resize(chunk_tokens_ * dim_);
  quad_.resize(kQuad * std::max<size_t>(dim_, chunk_tokens_));
  sums_.resize(kQuad * std::max(dim_, value_dim_));
  centroids_.resize(clusters * dim_);
  mean_values_.resize(clusters * value_dim_);
  stored_value_.resize(value_dim_);
  cluster_sum_.assign(dim_ + value_dim_, 0.0);
  moments_.assign(dim_ * dim_, 0.0);
  by_channel_.resize(dim_ * dim_);
  cross_.assign(dim_ * value_dim_, 0.0);
  squares_.assign(dim_, 0.0);
  phase_ = Phase::kMeans;
  next_ = starts_.front();
  cluster_ = 0;
}

bool RegressionDescriber::RunChunk() {
  if (phase_ == Phase::kDone) return false;
  if (phase_ == Phase::kAxes) {
    if (axes_.RunChunk()) return true;
    NextPhase();
    return true;
  }
  PassSome();
  if (next_ < starts_.back()) return true;
  NextPhase();
  return phase_ != Phase::kDone;
}

void RegressionDescriber::NextPhase() {
  if (phase_ == Phase::kMoments) axes_.Start(moments_, dim_);
  if (phase_ == Phase::kAxes) StoreAxes();
  if (phase_ == Phase::kVariances) StoreSlopes();
  phase_ = static_cast<Phase>(static_cast<int>(phase_) + 1);
  next_ = starts_.front();
  cluster_ = 0;
  std::fill(cluster_sum_.begin(), cluster_sum_.end(), 0.0);
}

// A chunk ends with its cluster, so that all its tokens are of one.
void RegressionDescriber::PassSome() {
  const uint32_t end = std::min(starts_[cluster_ + 1], next_ + chunk_tokens_);
  LoadTokens(next_, end);
  next_ = end;
  if (phase_ == Phase::kMeans) SumMeans();
  if (phase_ == Phase::kMoments) SumMoments();
  if (phase_ == Phase::kVariances) SumVariances();
  if (phase_ == Phase::kResiduals) SumResiduals();
  if (next_ < starts_[cluster_ + 1]) return;
  EndCluster(cluster_++);
  std::fill(cluster_sum_.begin(), cluster_sum_.end(), 0.0);
}

// Rows up to a multiple of four are there; those beyond the tokens are 0.
void RegressionDescriber::LoadTokens(uint32_t begin, uint32_t end) {
  const PageGeometry geometry(head_.form->shape);
  count_ = end - begin;
  std::fill(keys_.begin(), keys_.end(), 0.0f);
  for (uint32_t i = 0; i < count_; ++i) {
    float* const key = keys_.data() + i * dim_;
    float* const value = values_.data() + i * value_dim_;
    ToFloat(geometry.dtype, head_.pages + geometry.KeyOffset(begin + i), dim_, key);
    ToFloat(geometry.dtype, head_.pages + geometry.ValueOffset(begin + i), value_dim_, value);
    if (phase_ == Phase::kMeans) continue;
    const float* const centroid = centroids_.data() + cluster_ * dim_;
    const float* const mean_value = mean_values_.data() + cluster_ * value_dim_;
    for (size_t c = 0; c < dim_; ++c) {
      key[c] = std::clamp(key[c] - centroid[c], -kDeviationMax, kDeviationMax);
    }
    for (size_t c = 0; c < value_dim_; ++c) value[c] -= mean_value[c];
  }
}

void RegressionDescriber::SumMeans() {
  for (uint32_t i = 0; i < count_; ++i) {
    for (size_t c = 0; c < dim_; ++c) cluster_sum_[c] += keys_[i * dim_ + c];
    for (size_t c = 0; c < value_dim_; ++c) {
      cluster_sum_[dim_ + c] += values_[i * value_dim_ + c];
    }
  }
}

void RegressionDescriber::SumMoments() {
  AddProducts(keys_.data(), dim_, keys_.data(), dim_, count_, quad_.data(), sums_.data(),
              moments_.data());
}

// coordinates_ = keys_ along the axes.
void RegressionDescriber::FindCoordinates() {
  std::fill(coordinates_.begin(), coordinates_.end(), 0.0f);
  for (uint32_t i = 0; i < count_; i += kQuad) {
    AddFourProducts(keys_.data() + i * dim_, dim_, by_channel_.data(), dim_, quad_.data(),
                    coordinates_.data() + i * dim_);
  }
}

void RegressionDescriber::SumVariances() {
  FindCoordinates();
  for (uint32_t i = 0; i < count_; ++i) {
    for (size_t a = 0; a < dim_; ++a) {
      const double y = coordinates_[i * dim_ + a];
      cluster_sum_[a] += y * y;
    }
  }
  AddProducts(values_.data(), value_dim_, coordinates_.data(), dim_, count_, quad_.data(),
              sums_.data(), cross_.data());
}

void RegressionDescriber::SumResiduals() {
  FindCoordinates();
  const auto* slopes = reinterpret_cast<const float*>(head_.index + head_.layout->slopes);
  for (uint32_t i = 0; i < count_; i += kQuad) {
    std::fill_n(sums_.begin(), kQuad * value_dim_, 0.0f);
    AddFourProducts(coordinates_.data() + i * dim_, dim_, slopes, value_dim_, quad_.data(),
                    sums_.data());
    const size_t rows = std::min<size_t>(kQuad, count_ - i);
    for (size_t k = 0; k < rows * value_dim_; ++k) {
      const double rest = double{values_[i * value_dim_ + k]} - sums_[k];
      cluster_sum_[0] += rest * rest;
    }
  }
}

// Writes what the phase has found of a cluster.
void RegressionDescriber::EndCluster(uint32_t cluster) {
  const IndexLayout& layout = *head_.layout;
  const double size = starts_[cluster + 1] - starts_[cluster];
  if (phase_ == Phase::kMeans) {
    float* const centroid = centroids_.data() + cluster * dim_;
    float* const mean_value = mean_values_.data() + cluster * value_dim_;
    for (size_t c = 0; c < dim_; ++c) centroid[c] = static_cast<float>(cluster_sum_[c] / size);
    for (size_t c = 0; c < value_dim_; ++c) {
      mean_value[c] = static_cast<float>(cluster_sum_[dim_ + c] / size);
    }
    StoreMeans(cluster);
    double norm2 = 0;
    for (const float x : stored_value_) norm2 += double{x} * x;
    StoreAt(head_.index + layout.value_norm2, cluster, static_cast<float>(norm2));
    StoreAt(head_.index + layout.log_size, cluster, static_cast<float>(std::log(size)));
  }
  if (phase_ == Phase::kVariances) StoreVariances(cluster);
  if (phase_ == Phase::kResiduals) {
    StoreAt(head_.index + layout.spread, cluster,
            static_cast<float>(std::sqrt(cluster_sum_[0] / size)));
  }
}

// Leaves the mean value in stored_value_ as the dtype has rounded it: as estimates use it.
void RegressionDescriber::StoreMeans(uint32_t cluster) {
  const ModelShape& shape = head_.form->shape;
  const size_t element = DTypeBytes(shape.dtype);
  std::byte* const centroid = head_.index + head_.layout->centroids + cluster * dim_ * element;
  std::byte* mean_value = centroid;  // of a latent shape, its front
  FromFloat(shape.dtype, centroids_.data() + cluster * dim_, dim_, centroid);
  if (!shape.latent) {
    mean_value = head_.index + head_.layout->mean_values + cluster * value_dim_ * element;
    FromFloat(shape.dtype, mean_values_.data() + cluster * value_dim_, value_dim_, mean_value);
  }
  ToFloat(shape.dtype, mean_value, value_dim_, stored_value_.data());
}

void RegressionDescriber::StoreVariances(uint32_t cluster) {
  const double size = starts_[cluster + 1] - starts_[cluster];
  const std::span<double> deviations(cluster_sum_.data(), dim_);
  for (size_t a = 0; a < dim_; ++a) {
    squares_[a] += deviations[a];
    deviations[a] = std::sqrt(deviations[a] / size);
  }
  auto* codes = reinterpret_cast<uint8_t*>(head_.index + head_.layout->deviation_codes);
  StoreAt(head_.index + head_.layout->variance_unit, cluster,
          CodeDeviations(deviations, codes + cluster * dim_ / 2));
}

void RegressionDescriber::StoreAxes() {
  for (size_t a = 0; a < dim_; ++a) {
    const std::span<const double> axis = axes_.axis(a);
    for (size_t c = 0; c < dim_; ++c) {
      const auto element = static_cast<float>(axis[c]);
      StoreAt(head_.index + head_.layout->axes, a * dim_ + c, element);
      by_channel_[c * dim_ + a] = element;
    }
  }
}

// Along the axes coordinates have no covariance, so each slope is that of its axis alone. A ridge
// of head_dim tokens' worth keeps a short segment from fitting its noise.
void RegressionDescriber::StoreSlopes() {
  const double tokens = starts_.back() - starts_.front();
  const double ridge = 1 + static_cast<double>(dim_) / tokens;
  const double least = kLeastVarianceShare * std::accumulate(squares_.begin(), squares_.end(), 0.0);
  for (size_t a = 0; a < dim_; ++a) {
    const double scale = squares_[a] > least ? 1 / (ridge * squares_[a]) : 0;
    for (size_t c = 0; c < value_dim_; ++c) {
      const double slope = std::clamp(cross_[c * dim_ + a] * scale, -kSlopeMax, kSlopeMax);
      StoreAt(head_.index + head_.layout->slopes, a * value_dim_ + c, static_cast<float>(slope));
    }
  }
}

}  // namespace attnd::attention
