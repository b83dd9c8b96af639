// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "attention/kernels/kernels.h"

// The targets left out would only lengthen the build.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernels/kmeans_kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h.
#include "attention/kernels/kernels-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd::attention::kernels {
namespace HWY_NAMESPACE {

// Points that share the loads of centroids: as many as have sums in registers.
constexpr size_t kAssignPoints = HWY_TARGET <= HWY_AVX3 ? 8 : 4;

// The best clusters of some points so far, one for each lane.
template <size_t kPoints>
struct Closest {
  using Indexes = hn::Vec<hn::RebindToUnsigned<F32>>;
  VF score[kPoints];  // point . centroid - half the centroid's squared norm
  Indexes cluster[kPoints];

  HWY_INLINE Closest() {
    for (size_t p = 0; p < kPoints; ++p) {
      score[p] = hn::Set(F32(), -std::numeric_limits<float>::infinity());
      cluster[p] = hn::Zero(hn::RebindToUnsigned<F32>());
    }
  }
  HWY_INLINE void Offer(size_t p, VF other, Indexes clusters) {
    const hn::RebindToUnsigned<F32> du;
    const auto better = hn::Gt(other, score[p]);
    score[p] = hn::IfThenElse(better, other, score[p]);
    cluster[p] = hn::IfThenElse(hn::RebindMask(du, better), clusters, cluster[p]);
  }
  // The lower of equals.
  HWY_INLINE uint32_t Best(size_t p) const {
    const F32 d;
    alignas(64) float value[16];
    alignas(64) uint32_t index[16];
    hn::Store(score[p], d, value);
    hn::Store(cluster[p], hn::RebindToUnsigned<F32>(), index);
    size_t lane = 0;
    for (size_t i = 1; i < hn::Lanes(d); ++i) {
      if (value[i] > value[lane] || (value[i] == value[lane] && index[i] < index[lane])) lane = i;
    }
    return index[lane];
  }
};

// Offers kVectors vectors of clusters, from cluster `first` on, to each of kPoints points.
template <size_t kPoints, size_t kVectors>
HWY_INLINE void OfferClusters(const float* points, size_t dim, const float* centroids_t,
                              const float* half_norms, size_t stride, size_t first,
                              Closest<kPoints>* closest) {
  const F32 d;
  const size_t lanes = hn::Lanes(d);
  VF sum[kVectors][kPoints];
  for (auto& of_vector : sum) {
    for (VF& s : of_vector) s = hn::Zero(d);
  }
  for (size_t k = 0; k < dim; ++k) {
    VF centroids[kVectors];
    for (size_t v = 0; v < kVectors; ++v) {
      centroids[v] = hn::LoadU(d, centroids_t + k * stride + first + v * lanes);
    }
    for (size_t p = 0; p < kPoints; ++p) {
      const VF x = hn::Set(d, points[p * dim + k]);
      for (size_t v = 0; v < kVectors; ++v) sum[v][p] = hn::MulAdd(x, centroids[v], sum[v][p]);
    }
  }
  for (size_t v = 0; v < kVectors; ++v) {
    const size_t at = first + v * lanes;
    const VF norms = hn::LoadU(d, half_norms + at);
    const auto clusters = hn::Iota(hn::RebindToUnsigned<F32>(), static_cast<uint32_t>(at));
    for (size_t p = 0; p < kPoints; ++p) {
      closest->Offer(p, hn::Sub(sum[v][p], norms), clusters);
    }
  }
}

template <size_t kPoints>
HWY_INLINE void AssignPoints(const float* points, size_t dim, const float* centroids_t,
                             const float* half_norms, size_t clusters, size_t stride,
                             uint32_t* assignment) {
  const size_t lanes = hn::Lanes(F32());
  Closest<kPoints> closest;
  size_t c = 0;
  for (; c + lanes < clusters; c += 2 * lanes) {
    OfferClusters<kPoints, 2>(points, dim, centroids_t, half_norms, stride, c, &closest);
  }
  if (c < clusters) {
    OfferClusters<kPoints, 1>(points, dim, centroids_t, half_norms, stride, c, &closest);
  }
  for (size_t p = 0; p < kPoints; ++p) assignment[p] = closest.Best(p);
}

void AssignClosest(const float* points, size_t n, size_t dim, const float* centroids_t,
                   const float* half_norms, size_t clusters, size_t stride, uint32_t* assignment) {
  size_t i = 0;
  for (; i + kAssignPoints <= n; i += kAssignPoints) {
    AssignPoints<kAssignPoints>(points + i * dim, dim, centroids_t, half_norms, clusters, stride,
                                assignment + i);
  }
  for (; i < n; ++i) {
    AssignPoints<1>(points + i * dim, dim, centroids_t, half_norms, clusters, stride,
                    assignment + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd::attention::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd::attention::kernels {

HWY_EXPORT(AssignClosest);

void AssignClosest(const float* points, size_t n, size_t dim, const float* centroids_t,
                   const float* half_norms, size_t clusters, size_t stride, uint32_t* assignment) {
  HWY_DYNAMIC_DISPATCH(AssignClosest)
  (points, n, dim, centroids_t, half_norms, clusters, stride, assignment);
}

}  // namespace attnd::attention::kernels
#endif  // HWY_ONCE
