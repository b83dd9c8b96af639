// SPDX-License-Identifier: Apache-2.0
#include "common/bf16_rows.h"

#include <cstring>

// The targets left out would only lengthen the build.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "common/bf16_rows.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// Must follow foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using U32 = hn::ScalableTag<uint32_t>;
using Bits = hn::Vec<U32>;

constexpr uint32_t kWithoutSign = 0x7FFFFFFF;
constexpr uint32_t kInfinity = 0x7F800000;
constexpr uint32_t kQuietNan = 0x400000;

// The bf16 in the upper half of each number.
HWY_INLINE Bits Rounded(U32 d, Bits bits) {
  const Bits odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1));
  const Bits nearest = hn::Add(hn::Add(bits, hn::Set(d, 0x7FFF)), odd);
  const auto nan = hn::Gt(hn::And(bits, hn::Set(d, kWithoutSign)), hn::Set(d, kInfinity));
  return hn::IfThenElse(nan, hn::Or(bits, hn::Set(d, kQuietNan)), nearest);
}

void RoundToBf16Lanes(const float* source, size_t count, std::byte* target) {
  const U32 d;
  const hn::Rebind<uint16_t, U32> half;
  const size_t lanes = hn::Lanes(d);
  HWY_ALIGN uint32_t rest[HWY_MAX_BYTES / sizeof(uint32_t)] = {};
  const auto store = [&](const uint32_t* from, std::byte* to, size_t n) {
    const Bits rounded = hn::ShiftRight<16>(Rounded(d, hn::LoadU(d, from)));
    HWY_ALIGN uint16_t halves[HWY_MAX_BYTES / sizeof(uint32_t)];
    hn::Store(hn::TruncateTo(half, rounded), half, halves);
    std::memcpy(to, halves, n * sizeof(uint16_t));
  };
  const auto* bits = reinterpret_cast<const uint32_t*>(source);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) store(bits + i, target + i * sizeof(uint16_t), lanes);
  if (i == count) return;
  std::memcpy(rest, source + i, (count - i) * sizeof(float));
  store(rest, target + i * sizeof(uint16_t), count - i);
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(RoundToBf16Lanes);

void RoundToBf16(const float* source, size_t count, std::byte* target) {
  HWY_DYNAMIC_DISPATCH(RoundToBf16Lanes)(source, count, target);
}

}  // namespace attnd
#endif
