// SPDX-License-Identifier: Apache-2.0
#include "attention/index/kmeans.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "attention/kernels/kernels.h"

namespace attnd::attention {
namespace {

constexpr size_t kLanes = 16;  // the kernel's padding
// Multiply-adds of a chunk: a tenth of a millisecond.
constexpr size_t kChunkWork = size_t{2} << 20;
constexpr size_t kChunkPointsMin = 8;               // what the kernel takes at once
constexpr size_t kChunkElements = size_t{1} << 15;  // of centroids that are set

}  // namespace

void KMeans::Start(std::span<const float> points, size_t n, size_t dim, size_t clusters,
                   size_t late) {
  points_ = points;
  n_ = n;
  dim_ = dim;
  clusters_ = clusters;
  early_ = clusters - late;
  stride_ = (clusters + kLanes - 1) / kLanes * kLanes;
  phase_ = Phase::kSeed;
  iteration_ = 0;
  next_ = 0;
  // Seeding writes every early cluster; the kernel never lets the others win, whatever their
  // centroids.
  centroids_t_.resize(dim * stride_);
  half_norms_.resize(stride_);
  std::fill(half_norms_.begin() + static_cast<ptrdiff_t>(early_), half_norms_.end(),
            std::numeric_limits<float>::infinity());
  sums_.resize(clusters * dim);
  sizes_.resize(clusters);
  assignment_.resize(n);
  mean_.resize(dim);
}

bool KMeans::RunChunk() {
  if (phase_ == Phase::kAssign) {
    AssignSome();
    if (next_ < n_) return true;
    phase_ = ++iteration_ == kKMeansIterations ? Phase::kDone : Phase::kMove;
  } else if (phase_ == Phase::kSplit) {
    FindFarthest();
    if (next_ < n_) return true;
    MakeLateClusters();
    phase_ = Phase::kAssign;
  } else if (phase_ != Phase::kDone) {
    SetSome();
    if (next_ < clusters_) return true;
    const bool split = early_ < clusters_ && iteration_ == kKMeansIterations / 2;
    if (split) spreads_.assign(early_, {});
    phase_ = split ? Phase::kSplit : Phase::kAssign;
  }
  next_ = 0;
  return phase_ != Phase::kDone;
}

void KMeans::AssignSome() {
  // The late clusters are made after half of the iterations.
  const size_t clusters = iteration_ < kKMeansIterations / 2 ? early_ : clusters_;
  const size_t points = kChunkWork / (clusters * dim_) / kChunkPointsMin * kChunkPointsMin;
  const size_t count = std::min(n_ - next_, std::max(kChunkPointsMin, points));
  const float* point = points_.data() + next_ * dim_;
  kernels::AssignClosest(point, count, dim_, centroids_t_.data(), half_norms_.data(), clusters,
                         stride_, assignment_.data() + next_);
  for (size_t i = 0; i < count; ++i, point += dim_) {
    const uint32_t cluster = assignment_[next_ + i];
    double* sum = sums_.data() + cluster * dim_;
    for (size_t k = 0; k < dim_; ++k) sum[k] += point[k];
    ++sizes_[cluster];
  }
  next_ += count;
}

// Puts some centroids at their first points or at their members' means, and clears their sums for
// the next assignment. An empty cluster keeps its place: it may win points again.
void KMeans::SetSome() {
  const size_t end = std::min(clusters_, next_ + std::max<size_t>(1, kChunkElements / dim_));
  for (; next_ < end; ++next_) {
    double* sum = sums_.data() + next_ * dim_;
    if (phase_ == Phase::kSeed) {
      if (next_ < early_) SetCentroid(next_, points_.data() + next_ * n_ / early_ * dim_);
    } else if (sizes_[next_] != 0) {
      for (size_t k = 0; k < dim_; ++k) mean_[k] = static_cast<float>(sum[k] / sizes_[next_]);
      SetCentroid(next_, mean_.data());
    }
    std::fill_n(sum, dim_, 0.0);
    sizes_[next_] = 0;
  }
}

// Of some points, how far they are from their clusters' moved centroids.
void KMeans::FindFarthest() {
  const size_t end = std::min(n_, next_ + std::max<size_t>(1, kChunkElements / dim_));
  for (; next_ < end; ++next_) {
    const uint32_t cluster = assignment_[next_];
    const float* point = points_.data() + next_ * dim_;
    double square = 0;
    for (size_t k = 0; k < dim_; ++k) {
      const double difference = double{point[k]} - centroids_t_[k * stride_ + cluster];
      square += difference * difference;
    }
    // Points of keys so large that they are no floats when scaled.
    if (!(square < std::numeric_limits<double>::infinity())) continue;
    Spread& spread = spreads_[cluster];
    spread.squares += square;
    if (square <= spread.farthest) continue;
    spread.farthest = square;
    spread.point = next_;
  }
}

// Clusters that lie in one point give none.
void KMeans::MakeLateClusters() {
  std::vector<uint32_t> widest(early_);
  std::iota(widest.begin(), widest.end(), 0u);
  std::stable_sort(widest.begin(), widest.end(), [this](uint32_t a, uint32_t b) {
    return spreads_[a].squares > spreads_[b].squares;
  });
  for (size_t late = 0; early_ + late < clusters_; ++late) {
    const Spread& spread = spreads_[widest[late]];
    if (!(spread.squares > 0)) return;
    SetCentroid(early_ + late, points_.data() + spread.point * dim_);
  }
}

void KMeans::SetCentroid(size_t cluster, const float* values) {
  double norm2 = 0;
  for (size_t k = 0; k < dim_; ++k) {
    centroids_t_[k * stride_ + cluster] = values[k];
    norm2 += double{values[k]} * values[k];
  }
  half_norms_[cluster] = static_cast<float>(norm2 / 2);
}

}  // namespace attnd::attention
