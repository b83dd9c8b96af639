// SPDX-License-Identifier: Apache-2.0
#include "attention/index/regression_describer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

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
// over 8,192 clusters and 576 axes, 2.3e38. Hardly a query may look at keys this large.
constexpr float kDeviationMax = 7e15f;
// Slopes stay floats, and so does what they make of coordinates, whatever the values.
constexpr double kSlopeMax = 1e18;

// Clusters of a union that are taken at once.
constexpr uint32_t kMembersAtOnce = 16;
static_assert(kMembersAtOnce % kQuad == 0);

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
  const ClusterFormInfo info = *form.indexes.clusters();
  const uint64_t clusters = form.tokens / info.tokens + 1;
  const uint64_t unions =
      info.fan > 0 ? clusters * (dim * sizeof(float) + sizeof(double) + sizeof(Union)) : 0;
  return unions + clusters * ((dim + value_dim) * sizeof(float) + sizeof(uint32_t)) +
         uint64_t{kPassChunkTokensMax} * (3 * dim + value_dim) * sizeof(float) +
         dim * dim * (3 * sizeof(double) + sizeof(float)) + dim * value_dim * sizeof(double) +
         dim * value_dim * sizeof(float) + 8 * (dim + value_dim) * sizeof(double);
}

void RegressionDescriber::Start(const ClusteredHead& head) {
  head_ = head;
  info_ = *head.form->indexes.clusters();
  const ModelShape& shape = head.form->shape;
  dim_ = shape.head_dim;
  value_dim_ = shape.value_dim;
  uint32_t clusters = 0;
  std::memcpy(&clusters, head.index, sizeof(clusters));
  starts_.resize(clusters + 1);
  std::memcpy(starts_.data(), head.index + head.layout->clusters.starts,
              starts_.size() * sizeof(uint32_t));
  ListUnions();
  if (!unions_.empty()) {
    variances_.resize(clusters * dim_);
    rests_.resize(clusters);
    union_centroid_.resize(dim_);
    union_mean_value_.resize(value_dim_);
  }
  chunk_tokens_ = static_cast<uint32_t>(std::clamp<size_t>(
      kPassChunkWork / (dim_ * (dim_ + value_dim_)) / kQuad * kQuad, kQuad, kPassChunkTokensMax));
  const size_t rows = std::max(chunk_tokens_, kMembersAtOnce);
  keys_.resize(rows * dim_);
  values_.resize(rows * value_dim_);
  coordinates_.resize(rows * dim_);
  quad_.resize(kQuad * std::max<size_t>(dim_, rows));
  sums_.resize(kQuad * std::max(dim_, value_dim_));
  centroids_.resize(clusters * dim_);
  mean_values_.resize(clusters * value_dim_);
  stored_value_.resize(value_dim_);
  cluster_sum_.assign(dim_ + value_dim_, 0.0);
  moments_.assign(dim_ * dim_, 0.0);
  by_channel_.resize(dim_ * dim_);
  cross_.assign(dim_ * value_dim_, 0.0);
  squares_.assign(dim_, 0.0);
  slopes_.resize(dim_ * value_dim_);
  if (info_.compact) StoreBases();
  phase_ = Phase::kMeans;
  next_ = starts_.front();
  cluster_ = 0;
}

bool RegressionDescriber::RunChunk() {
  if (phase_ == Phase::kDone) return false;
  if (phase_ == Phase::kAxes) {
    axes_.Find(moments_, dim_);
    NextPhase();
    return true;
  }
  if (phase_ == Phase::kUnions) {
    AddSomeMembers();
    if (member_ < unions_[union_].end) return true;
    EndUnion();
    if (++union_ < unions_.size()) {
      StartUnion();
      return true;
    }
    phase_ = Phase::kDone;
    return false;
  }
  PassSome();
  if (next_ < starts_.back()) return true;
  NextPhase();
  return phase_ != Phase::kDone;
}

void RegressionDescriber::NextPhase() {
  if (phase_ == Phase::kAxes) StoreAxes();
  if (phase_ == Phase::kVariances) StoreSlopes();
  phase_ = static_cast<Phase>(static_cast<int>(phase_) + 1);
  next_ = starts_.front();
  cluster_ = 0;
  std::fill(cluster_sum_.begin(), cluster_sum_.end(), 0.0);
  if (phase_ != Phase::kUnions) return;
  if (unions_.empty()) {
    phase_ = Phase::kDone;
    return;
  }
  union_ = 0;
  StartUnion();
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
  for (uint32_t i = 0; i < count_; i += kQuad) {
    std::fill_n(sums_.begin(), kQuad * value_dim_, 0.0f);
    AddFourProducts(coordinates_.data() + i * dim_, dim_, slopes_.data(), value_dim_, quad_.data(),
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
  const IndexLayout::Clusters& part = head_.layout->clusters;
  const double size = starts_[cluster + 1] - starts_[cluster];
  if (phase_ == Phase::kMeans) {
    float* const centroid = centroids_.data() + cluster * dim_;
    float* const mean_value = mean_values_.data() + cluster * value_dim_;
    for (size_t c = 0; c < dim_; ++c) centroid[c] = static_cast<float>(cluster_sum_[c] / size);
    for (size_t c = 0; c < value_dim_; ++c) {
      mean_value[c] = static_cast<float>(cluster_sum_[dim_ + c] / size);
    }
    StoreMeans(part, cluster, centroid, mean_value, size);
  }
  if (phase_ == Phase::kVariances) {
    for (size_t a = 0; a < dim_; ++a) squares_[a] += cluster_sum_[a];
    if (!unions_.empty()) {
      for (size_t a = 0; a < dim_; ++a) {
        variances_[cluster * dim_ + a] = static_cast<float>(cluster_sum_[a] / size);
      }
    }
    StoreVariances(part, cluster, size);
  }
  if (phase_ == Phase::kResiduals) {
    if (!unions_.empty()) rests_[cluster] = cluster_sum_[0] / size;
    StoreSpread(part, cluster, cluster_sum_[0] / size);
  }
}

// What rows in bytes differ from: the means over the segment.
void RegressionDescriber::StoreBases() {
  bases_.resize(dim_ + value_dim_);
  const bool latent = head_.form->shape.latent;
  for (size_t c = 0; c < dim_; ++c) {
    bases_[c] = static_cast<float>(head_.mean[c]);
    StoreAt(head_.index + head_.layout->key_base, c, bases_[c]);
  }
  for (size_t c = 0; c < value_dim_; ++c) {
    bases_[dim_ + c] = latent ? bases_[c] : static_cast<float>(head_.mean[dim_ + c]);
    if (!latent) StoreAt(head_.index + head_.layout->value_base, c, bases_[dim_ + c]);
  }
}

// Means, |mean value|^2 and the size of a cluster or a union. Leaves the mean value in
// stored_value_ as it is read back, which is what estimates use.
void RegressionDescriber::StoreMeans(const IndexLayout::Clusters& part, uint32_t number,
                                     const float* centroid, const float* mean_value, double size) {
  const ModelShape& shape = head_.form->shape;
  std::byte* const index = head_.index;
  if (info_.compact) {
    const auto store = [&](size_t codes, size_t scales, const float* row, size_t base, size_t dim) {
      const float scale =
          CodeByteRow({row, dim}, bases_.data() + base,
                      reinterpret_cast<int8_t*>(index + codes + size_t{number} * dim));
      StoreAt(index + scales, number, scale);
      return scale;
    };
    size_t codes = part.centroids + size_t{number} * dim_;
    float scale = store(part.centroids, part.centroid_scales, centroid, 0, dim_);
    if (!shape.latent) {
      codes = part.mean_values + size_t{number} * value_dim_;
      scale = store(part.mean_values, part.mean_value_scales, mean_value, dim_, value_dim_);
    }
    const auto* row = reinterpret_cast<const int8_t*>(index + codes);
    for (size_t c = 0; c < value_dim_; ++c) stored_value_[c] = bases_[dim_ + c] + scale * row[c];
  } else {
    const size_t element = DTypeBytes(shape.dtype);
    std::byte* row = index + part.centroids + number * dim_ * element;
    FromFloat(shape.dtype, centroid, dim_, row);
    if (!shape.latent) {
      row = index + part.mean_values + number * value_dim_ * element;
      FromFloat(shape.dtype, mean_value, value_dim_, row);
    }
    ToFloat(shape.dtype, row, value_dim_, stored_value_.data());
  }
  double norm2 = 0;
  for (const float x : stored_value_) norm2 += double{x} * x;
  StoreAt(index + part.value_norm2, number, static_cast<float>(norm2));
  StoreAt(index + part.log_size, number, static_cast<float>(std::log(size)));
}

// Of the sums of squares along the axes in cluster_sum_, which it uses up.
void RegressionDescriber::StoreVariances(const IndexLayout::Clusters& part, uint32_t number,
                                         double size) {
  const std::span<double> deviations(cluster_sum_.data(), dim_);
  for (double& x : deviations) x = std::sqrt(x / size);
  auto* codes = reinterpret_cast<uint8_t*>(head_.index + part.deviation_codes);
  StoreAt(head_.index + part.variance_unit, number,
          CodeDeviations(deviations, codes + number * dim_ / 2));
}

void RegressionDescriber::StoreSpread(const IndexLayout::Clusters& part, uint32_t number,
                                      double mean_square) {
  StoreAt(head_.index + part.spread, number, static_cast<float>(std::sqrt(mean_square)));
}

// Stores `count` numbers as the form has axes and slopes, and leaves them as they are read back.
void RegressionDescriber::StoreRegressionRow(size_t offset, size_t row, size_t count,
                                             float* numbers) {
  const DType dtype = AxesDType(info_);
  std::byte* const to = head_.index + offset + row * count * DTypeBytes(dtype);
  FromFloat(dtype, numbers, count, to);
  ToFloat(dtype, to, count, numbers);
}

void RegressionDescriber::StoreAxes() {
  std::vector<float> row(dim_);
  for (size_t a = 0; a < dim_; ++a) {
    const std::span<const double> axis = axes_.axis(a);
    for (size_t c = 0; c < dim_; ++c) row[c] = static_cast<float>(axis[c]);
    StoreRegressionRow(head_.layout->axes, a, dim_, row.data());
    for (size_t c = 0; c < dim_; ++c) by_channel_[c * dim_ + a] = row[c];
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
    float* const row = slopes_.data() + a * value_dim_;
    for (size_t c = 0; c < value_dim_; ++c) {
      const double slope = std::clamp(cross_[c * dim_ + a] * scale, -kSlopeMax, kSlopeMax);
      row[c] = static_cast<float>(slope);
    }
    StoreRegressionRow(head_.layout->slopes, a, value_dim_, row);
  }
}

// ---- unions of clusters ----

void RegressionDescriber::ListUnions() {
  unions_.clear();
  std::vector<uint32_t> clusters;  // first of each row, and their number, of the level below
  for (uint32_t c = 0; c < starts_.size(); ++c) clusters.push_back(c);
  for (const TreeLevel level : {kGroups, kSections}) {
    const IndexLayout::Clusters& part = head_.layout->level(level);
    if (part.room == 0) return;
    uint32_t count = 0;
    std::memcpy(&count, head_.index + part.count, sizeof(count));
    std::vector<uint32_t> members(count + 1);
    std::memcpy(members.data(), head_.index + part.first_members,
                members.size() * sizeof(uint32_t));
    for (uint32_t& member : members) member = clusters[member];
    clusters = std::move(members);
    for (uint32_t i = 0; i < count; ++i) {
      unions_.push_back({&part, i, clusters[i], clusters[i + 1]});
    }
  }
}

// The union's means, from its clusters' by their sizes.
void RegressionDescriber::StartUnion() {
  const auto [part, number, begin, end] = unions_[union_];
  std::fill(cluster_sum_.begin(), cluster_sum_.end(), 0.0);
  for (uint32_t m = begin; m < end; ++m) {
    const double size = starts_[m + 1] - starts_[m];
    for (size_t c = 0; c < dim_; ++c) cluster_sum_[c] += size * centroids_[m * dim_ + c];
    for (size_t c = 0; c < value_dim_; ++c) {
      cluster_sum_[dim_ + c] += size * mean_values_[m * value_dim_ + c];
    }
  }
  const double size = starts_[end] - starts_[begin];
  for (size_t c = 0; c < dim_; ++c) union_centroid_[c] = static_cast<float>(cluster_sum_[c] / size);
  for (size_t c = 0; c < value_dim_; ++c) {
    union_mean_value_[c] = static_cast<float>(cluster_sum_[dim_ + c] / size);
  }
  StoreMeans(*part, number, union_centroid_.data(), union_mean_value_.data(), size);
  std::fill(cluster_sum_.begin(), cluster_sum_.end(), 0.0);
  union_rest_ = 0;
  member_ = begin;
}

// A member's square along an axis is that of its tokens about its own mean, and that of this mean
// about the union's; so is the square of its rest, as its tokens' rests sum to nothing.
void RegressionDescriber::AddSomeMembers() {
  const uint32_t begin = member_;
  count_ = std::min(kMembersAtOnce, unions_[union_].end - begin);
  std::fill(keys_.begin(), keys_.end(), 0.0f);
  for (uint32_t i = 0; i < count_; ++i) {
    const float* const centroid = centroids_.data() + (begin + i) * dim_;
    for (size_t c = 0; c < dim_; ++c) {
      keys_[i * dim_ + c] =
          std::clamp(centroid[c] - union_centroid_[c], -kDeviationMax, kDeviationMax);
    }
  }
  FindCoordinates();
  for (uint32_t i = 0; i < count_; ++i) {
    const double size = starts_[begin + i + 1] - starts_[begin + i];
    if (i % kQuad == 0) {
      std::fill_n(sums_.begin(), kQuad * value_dim_, 0.0f);
      AddFourProducts(coordinates_.data() + i * dim_, dim_, slopes_.data(), value_dim_,
                      quad_.data(), sums_.data());
    }
    for (size_t a = 0; a < dim_; ++a) {
      const double y = coordinates_[i * dim_ + a];
      cluster_sum_[a] += size * (variances_[(begin + i) * dim_ + a] + y * y);
    }
    const float* const mean_value = mean_values_.data() + (begin + i) * value_dim_;
    const float* const explained = sums_.data() + i % kQuad * value_dim_;
    double rest2 = 0;
    for (size_t c = 0; c < value_dim_; ++c) {
      const double rest = double{mean_value[c]} - union_mean_value_[c] - explained[c];
      rest2 += rest * rest;
    }
    union_rest_ += size * (rests_[begin + i] + rest2);
  }
  member_ += count_;
}

void RegressionDescriber::EndUnion() {
  const auto [part, number, begin, end] = unions_[union_];
  const double size = starts_[end] - starts_[begin];
  StoreVariances(*part, number, size);
  StoreSpread(*part, number, union_rest_ / size);
}

}  // namespace attnd::attention
