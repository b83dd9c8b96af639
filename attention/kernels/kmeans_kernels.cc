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

// The best cluster of each of kPoints points; two vectors of clusters at a time.
template <size_t kPoints>
HWY_INLINE void AssignPoints(const float* points, size_t dim, const float* centroids_t,
                             const float* half_norms, size_t stride, uint32_t* assignment) {
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  const size_t lanes = hn::Lanes(d);
  VF best[kPoints];
  hn::Vec<decltype(du)> where[kPoints];
  for (size_t p = 0; p < kPoints; ++p) {
    best[p] = hn::Set(d, -std::numeric_limits<float>::infinity());
    where[p] = hn::Zero(du);
  }
  for (size_t c = 0; c < stride; c += 2 * lanes) {
    // With 16 lanes the stride may be an odd number of vectors: the second one then repeats the
    // first.
    const size_t c1 = c + lanes < stride ? c + lanes : c;
    VF s0[kPoints], s1[kPoints];
    for (size_t p = 0; p < kPoints; ++p) s0[p] = s1[p] = hn::Zero(d);
    for (size_t k = 0; k < dim; ++k) {
      const VF v0 = hn::LoadU(d, centroids_t + k * stride + c);
      const VF v1 = hn::LoadU(d, centroids_t + k * stride + c1);
      for (size_t p = 0; p < kPoints; ++p) {
        const VF x = hn::Set(d, points[p * dim + k]);
        s0[p] = hn::MulAdd(x, v0, s0[p]);
        s1[p] = hn::MulAdd(x, v1, s1[p]);
      }
    }
    const VF n0 = hn::LoadU(d, half_norms + c), n1 = hn::LoadU(d, half_norms + c1);
    const auto i0 = hn::Iota(du, static_cast<uint32_t>(c));
    const auto i1 = hn::Iota(du, static_cast<uint32_t>(c1));
    for (size_t p = 0; p < kPoints; ++p) {
      const VF t0 = hn::Sub(s0[p], n0), t1 = hn::Sub(s1[p], n1);
      const auto m0 = hn::Gt(t0, best[p]);
      best[p] = hn::IfThenElse(m0, t0, best[p]);
      where[p] = hn::IfThenElse(hn::RebindMask(du, m0), i0, where[p]);
      const auto m1 = hn::Gt(t1, best[p]);
      best[p] = hn::IfThenElse(m1, t1, best[p]);
      where[p] = hn::IfThenElse(hn::RebindMask(du, m1), i1, where[p]);
    }
  }
  alignas(64) float value[16];
  alignas(64) uint32_t index[16];
  for (size_t p = 0; p < kPoints; ++p) {
    hn::Store(best[p], d, value);
    hn::Store(where[p], du, index);
    size_t lane = 0;
    for (size_t i = 1; i < lanes; ++i) {
      if (value[i] > value[lane] || (value[i] == value[lane] && index[i] < index[lane])) lane = i;
    }
    assignment[p] = index[lane];
  }
}

void AssignClosest(const float* points, size_t n, size_t dim, const float* centroids_t,
                   const float* half_norms, size_t stride, uint32_t* assignment) {
  size_t i = 0;
  for (; i + 4 <= n; i += 4) {
    AssignPoints<4>(points + i * dim, dim, centroids_t, half_norms, stride, assignment + i);
  }
  for (; i < n; ++i) {
    AssignPoints<1>(points + i * dim, dim, centroids_t, half_norms, stride, assignment + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd::attention::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd::attention::kernels {

HWY_EXPORT(AssignClosest);

void AssignClosest(const float* points, size_t n, size_t dim, const float* centroids_t,
                   const float* half_norms, size_t stride, uint32_t* assignment) {
  HWY_DYNAMIC_DISPATCH(AssignClosest)(points, n, dim, centroids_t, half_norms, stride, assignment);
}

}  // namespace attnd::attention::kernels
#endif  // HWY_ONCE
