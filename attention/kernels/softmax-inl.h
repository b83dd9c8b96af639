// SPDX-License-Identifier: Apache-2.0
//
// The softmax over logits of quads, [n][4]. Compiled once for each instruction set, as
// kernels-inl.h is.
#include <cstddef>

#include "hwy/highway.h"

#if defined(ATTND_ATTENTION_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_ATTENTION_SOFTMAX_INL_H_
#undef ATTND_ATTENTION_SOFTMAX_INL_H_
#else
#define ATTND_ATTENTION_SOFTMAX_INL_H_
#endif

#include "attention/kernels/kernels-inl.h"
#include "attention/kernels/softmax_state.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd::attention::kernels {
namespace HWY_NAMESPACE {

constexpr float kMinExp = -100.0f;  // exp below is 0 in float, and -infinity must not reach Exp

// The maximum over the 128-bit blocks of v, lane by lane.
template <class D>
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> MaxBlocks([[maybe_unused]] D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return MaxBlocks(half, hn::Max(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// max[j] = max(max[j], x[i][j] over i).
HWY_INLINE void MaxQuadsImpl(const float* x, size_t n, float* max) {
  const F32 d;
  const hn::CappedTag<float, 4> d4;
  const size_t lanes = hn::Lanes(d);
  const size_t total = n * kQuad;
  size_t i = 0;
  auto m4 = hn::LoadU(d4, max);
  if (total >= lanes) {
    VF m = hn::LoadU(d, x);
    for (i = lanes; i + lanes <= total; i += lanes) m = hn::Max(m, hn::LoadU(d, x + i));
    m4 = hn::Max(m4, MaxBlocks(d, m));
  }
  for (; i < total; i += kQuad) m4 = hn::Max(m4, hn::LoadU(d4, x + i));
  hn::StoreU(m4, d4, max);
}

template <class D>
HWY_INLINE hn::Vec<D> ExpClamped(D d, hn::Vec<D> x) {
  const auto floor = hn::Set(d, kMinExp);
  return hn::IfThenElseZero(hn::Gt(x, floor), hn::Exp(d, hn::Max(x, floor)));
}

// out[i][j] = exp(x[i][j] - max[j]);  sum[j] += their sum. out may be x.
HWY_INLINE void ExpQuadsImpl(const float* x, size_t n, const float* max, float* out, float* sum) {
  const F32 d;
  const hn::CappedTag<float, 4> d4;
  const size_t lanes = hn::Lanes(d);
  const size_t total = n * kQuad;
  const VF m = hn::LoadDup128(d, max);
  VF s = hn::Zero(d);
  size_t i = 0;
  for (; i + lanes <= total; i += lanes) {
    const VF e = ExpClamped(d, hn::Sub(hn::LoadU(d, x + i), m));
    hn::StoreU(e, d, out + i);
    s = hn::Add(s, e);
  }
  auto s4 = hn::Add(hn::LoadU(d4, sum), SumBlocks(d, s));
  const auto m4 = hn::LoadU(d4, max);
  for (; i < total; i += kQuad) {
    const auto e = ExpClamped(d4, hn::Sub(hn::LoadU(d4, x + i), m4));
    hn::StoreU(e, d4, out + i);
    s4 = hn::Add(s4, e);
  }
  hn::StoreU(s4, d4, sum);
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd::attention::kernels
HWY_AFTER_NAMESPACE();

#endif  // ATTND_ATTENTION_SOFTMAX_INL_H_
