// SPDX-License-Identifier: Apache-2.0
#include "common/dtype.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "common/bf16_rows.h"

namespace attnd {
namespace {

// The exponent bits that are all ones exactly in NaN and infinity.
constexpr uint32_t kFp32Exponent = 0x7F800000u;
constexpr uint16_t kBf16Exponent = 0x7F80u;
constexpr uint16_t kFp16Exponent = 0x7C00u;

template <typename T>
T Load(const std::byte* source) {
  T value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

template <typename T>
void Store(std::byte* target, T value) {
  std::memcpy(target, &value, sizeof(value));
}

// Branch-free over a block so that compilers vectorise it.
template <typename T, T kExponent>
bool BlockFinite(const std::byte* source, size_t count) {
  T bad = 0;  // of the elements' width, or a vector of elements would have to be narrowed
  for (size_t i = 0; i < count; ++i) {
    const bool all_ones = (Load<T>(source + i * sizeof(T)) & kExponent) == kExponent;
    bad |= static_cast<T>(all_ones ? ~T{0} : T{0});
  }
  return bad == 0;
}

}  // namespace

absl::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return "bf16";
    case DType::kFp16:
      return "fp16";
    case DType::kFp32:
      return "fp32";
  }
  return "invalid";
}

float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

float Fp16ToFloat(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1Fu;
  const uint32_t mantissa = bits & 0x3FFu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide_exponent = exponent == 31 ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | (wide_exponent << 23) | (mantissa << 13));
}

uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t FloatToFp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7E00u;
  if (magnitude >= 65520.0f) return sign | kFp16Exponent;  // rounds to infinity
  if (magnitude < 0x1p-14f) {  // subnormal: nearbyint rounds ties to even
    return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));
  }
  uint32_t rounded = std::bit_cast<uint32_t>(magnitude);
  rounded += 0xFFFu + ((rounded >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - (112u << 23)) >> 13);
}

void ToFloat(DType dtype, const std::byte* source, size_t count, float* target) {
  switch (dtype) {
    case DType::kFp32:
      if (count > 0) std::memcpy(target, source, count * sizeof(float));
      return;
    case DType::kBf16:
      for (size_t i = 0; i < count; ++i) target[i] = Bf16ToFloat(Load<uint16_t>(source + 2 * i));
      return;
    case DType::kFp16:
      for (size_t i = 0; i < count; ++i) target[i] = Fp16ToFloat(Load<uint16_t>(source + 2 * i));
      return;
  }
}

void FromFloat(DType dtype, const float* source, size_t count, std::byte* target) {
  switch (dtype) {
    case DType::kFp32:
      if (count > 0) std::memcpy(target, source, count * sizeof(float));
      return;
    case DType::kBf16:
      RoundToBf16(source, count, target);
      return;
    case DType::kFp16:
      for (size_t i = 0; i < count; ++i) Store(target + 2 * i, FloatToFp16(source[i]));
      return;
  }
}

bool AllFinite(DType dtype, const std::byte* source, size_t count) {
  switch (dtype) {
    case DType::kFp32:
      return BlockFinite<uint32_t, kFp32Exponent>(source, count);
    case DType::kBf16:
      return BlockFinite<uint16_t, kBf16Exponent>(source, count);
    case DType::kFp16:
      return BlockFinite<uint16_t, kFp16Exponent>(source, count);
  }
  return false;
}

}  // namespace attnd
