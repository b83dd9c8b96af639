// SPDX-License-Identifier: Apache-2.0
//
// Magnitude: how large the numbers of a tensor are, in one pass that also finds NaN and infinities.
#ifndef ATTND_ENGINE_MAGNITUDE_H_
#define ATTND_ENGINE_MAGNITUDE_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/dtype.h"

namespace attnd::engine {

// The greatest bit pattern without its sign: numbers of one dtype and their patterns have the same
// order, with infinity and then NaN above all.
template <typename T>
T GreatestPattern(const std::byte* source, size_t count) {
  constexpr T kWithoutSign = static_cast<T>(~T{0}) >> 1;
  T greatest = 0;
  for (size_t i = 0; i < count; ++i) {
    T bits;
    std::memcpy(&bits, source + i * sizeof(T), sizeof(T));
    greatest = std::max<T>(greatest, bits & kWithoutSign);
  }
  return greatest;
}

// The greatest absolute value of `count` elements; infinity or NaN if an element is one of them, 0
// of nothing.
inline float Magnitude(DType dtype, const std::byte* source, size_t count) {
  switch (dtype) {
    case DType::kBf16:
      return Bf16ToFloat(GreatestPattern<uint16_t>(source, count));
    case DType::kFp16:
      return Fp16ToFloat(GreatestPattern<uint16_t>(source, count));
    case DType::kFp32:
      return std::bit_cast<float>(GreatestPattern<uint32_t>(source, count));
  }
  return 0;
}

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_MAGNITUDE_H_
