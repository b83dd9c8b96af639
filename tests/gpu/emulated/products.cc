// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/emulated/products.h"

#include <vector>

#include "tests/gpu/emulated/grid.h"

namespace attnd::gpu::emulated {
namespace {

constexpr uint32_t kAllLanes = ~uint32_t{0};

// What fp16's bits are as floats.
const std::vector<float>& Fp16Numbers() {
  static const std::vector<float> numbers = [] {
    std::vector<float> all;
    for (uint32_t bits = 0; bits < 1u << 16; ++bits) {
      all.push_back(Fp16ToFloat(static_cast<uint16_t>(bits)));
    }
    return all;
  }();
  return numbers;
}

WarpWords Words(const uint32_t* a, const uint32_t* b) {
  return {{a[0], a[1], a[2], a[3], b[0], b[1]}};
}

// d(row, column) for the lane's rows g and g + 8 and columns 2t and 2t + 1. dot(x, y): the sum of
// products of two words. A row of a is words 0 and 2 of four lanes (rows g) or 1 and 3 (g + 8), a
// column of b words 4 and 5.
template <typename T, typename Dot>
void ForResult(const WarpWords* lanes, T (&d)[4], Dot dot) {
  const uint32_t g = running.thread.x % 32 / 4, t = running.thread.x % 4;
  for (uint32_t half = 0; half < 2; ++half) {
    for (uint32_t c = 0; c < 2; ++c) {
      auto sum = dot(0, 0);
      for (uint32_t k = 0; k < 4; ++k) {
        const auto& row = lanes[g * 4 + k].words;
        const auto& column = lanes[(2 * t + c) * 4 + k].words;
        sum += dot(row[half], column[4]) + dot(row[half + 2], column[5]);
      }
      d[half * 2 + c] = static_cast<T>(d[half * 2 + c] + sum);
    }
  }
}

}  // namespace

void MultiplyAdd16(DType dtype, float (&d)[4], const uint32_t (&a)[4], std::array<uint32_t, 2> b) {
  const bool fp16 = dtype == DType::kFp16;
  const WarpWords* lanes =
      Exchange(fp16 ? "product of fp16" : "product of bf16", kAllLanes, Words(a, b.data()));
  const std::vector<float>& numbers = Fp16Numbers();
  const auto number = [&](uint32_t bits) -> double {
    return fp16 ? numbers[bits] : Bf16ToFloat(static_cast<uint16_t>(bits));
  };
  ForResult(lanes, d, [&](uint32_t x, uint32_t y) {
    return number(x & 0xFFFF) * number(y & 0xFFFF) + number(x >> 16) * number(y >> 16);
  });
}

void MultiplyAddBytes(bool a_signed, int (&d)[4], std::array<uint32_t, 4> a,
                      std::array<uint32_t, 2> b) {
  const WarpWords* lanes = Exchange(a_signed ? "product of signed bytes" : "product of bytes",
                                    kAllLanes, Words(a.data(), b.data()));
  ForResult(lanes, d, [&](uint32_t x, uint32_t y) {
    int sum = 0;
    for (uint32_t i = 0; i < 32; i += 8) {
      const auto byte = static_cast<uint8_t>(x >> i);
      sum += (a_signed ? static_cast<int8_t>(byte) : int{byte}) * static_cast<int8_t>(y >> i);
    }
    return sum;
  });
}

void TransposeMatrices(const uint32_t (&row)[4], uint32_t (&to)[4]) {
  const WarpWords* lanes =
      Exchange("load of matrices", kAllLanes, {{row[0], row[1], row[2], row[3]}});
  const uint32_t g = running.thread.x % 32 / 4, t = running.thread.x % 4;
  for (uint32_t matrix = 0; matrix < 4; ++matrix) {
    const auto at = [&](uint32_t r) {
      return lanes[matrix * 8 + r].words[g / 2] >> g % 2 * 16 & 0xFFFF;
    };
    to[matrix] = at(2 * t) | at(2 * t + 1) << 16;
  }
}

}  // namespace attnd::gpu::emulated
