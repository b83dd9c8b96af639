// SPDX-License-Identifier: Apache-2.0
//
// What the files of vector kernels share. Each of these files, and this header with it, is compiled
// once for each instruction set, as Highway's foreach_target.h describes.
#include <cstddef>

#include "hwy/highway.h"

#if defined(ATTND_ATTENTION_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_ATTENTION_KERNELS_INL_H_
#undef ATTND_ATTENTION_KERNELS_INL_H_
#else
#define ATTND_ATTENTION_KERNELS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace attnd::attention::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, so that every dimension (a multiple of 16) is a whole number of vectors.
using F32 = hn::CappedTag<float, 16>;
using VF = hn::Vec<F32>;

// How far ahead of the arithmetic memory is prefetched, along rows that lie side by side.
constexpr size_t kAheadBytes = 8192;

// Adds the 128-bit blocks of v together: the result's lowest block is the sum.
template <class D>
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> SumBlocks([[maybe_unused]] D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return SumBlocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// The sums of four vectors' lanes, as one block.
template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> SumFour(D d, V a, V b, V c, V e) {
  const hn::RepartitionToWide<D> wide;
  const V ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const V ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto lower = hn::InterleaveLower(wide, hn::BitCast(wide, ab), hn::BitCast(wide, ce));
  const auto upper = hn::InterleaveUpper(wide, hn::BitCast(wide, ab), hn::BitCast(wide, ce));
  return SumBlocks(d, hn::Add(hn::BitCast(d, lower), hn::BitCast(d, upper)));
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd::attention::kernels
HWY_AFTER_NAMESPACE();

#endif  // ATTND_ATTENTION_KERNELS_INL_H_
