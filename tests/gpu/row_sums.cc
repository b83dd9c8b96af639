// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/row_sums.h"

#include "common/dtype.h"

// Nothing that is watched is inlined into such a function: they call no small ones in their loops.
#define ATTND_UNWATCHED __attribute__((no_sanitize("thread", "address")))

namespace attnd::gpu::test::reference {

ATTND_UNWATCHED double SumOfSquares(const double* a, const double* b, size_t n, double enough) {
  constexpr size_t kAtOnce = 16;  // between two looks at `enough`
  double sum = 0;
  for (size_t first = 0; first < n && sum < enough; first += kAtOnce) {
    const size_t end = first + kAtOnce < n ? first + kAtOnce : n;
    for (size_t i = first; i < end; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  }
  return sum;
}

ATTND_UNWATCHED double SumOfProducts(const double* a, const double* b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

ATTND_UNWATCHED void AddProducts(double factor, const double* row, size_t n, double* to) {
  for (size_t i = 0; i < n; ++i) to[i] += factor * row[i];
}

ATTND_UNWATCHED void AddSquares(double factor, const double* row, size_t n, double* to) {
  for (size_t i = 0; i < n; ++i) to[i] += factor * row[i] * row[i];
}

ATTND_UNWATCHED size_t Closest(const double* point, const double* const* rows, size_t count,
                               size_t n) {
  size_t closest = 0;
  double least = __builtin_inf();
  for (size_t r = 0; r < count; ++r) {
    const double distance = SumOfSquares(point, rows[r], n, least);
    if (!(distance < least)) continue;
    least = distance;
    closest = r;
  }
  return closest;
}

ATTND_UNWATCHED void Turn(double c, double s, size_t n, size_t stride, double* a, double* b) {
  for (size_t i = 0; i < n * stride; i += stride) {
    const double x = a[i], y = b[i];
    a[i] = c * x + s * y;
    b[i] = c * y - s * x;
  }
}

ATTND_UNWATCHED void Scale(double factor, double* row, size_t n) {
  for (size_t i = 0; i < n; ++i) row[i] *= factor;
}

ATTND_UNWATCHED void WidenBf16(const uint16_t* bits, size_t n, double* to) {
  for (size_t i = 0; i < n; ++i) to[i] = __builtin_bit_cast(float, uint32_t{bits[i]} << 16);
}

ATTND_UNWATCHED void WidenFp16(const uint16_t* bits, size_t n, double* to) {
  for (size_t i = 0; i < n; ++i) to[i] = Fp16ToFloat(bits[i]);
}

ATTND_UNWATCHED void WidenFp32(const float* numbers, size_t n, double* to) {
  for (size_t i = 0; i < n; ++i) to[i] = numbers[i];
}

ATTND_UNWATCHED void AddBytes(double factor, const int8_t* codes, size_t n, double* to) {
  for (size_t i = 0; i < n; ++i) to[i] += factor * codes[i];
}

ATTND_UNWATCHED void SquareHalves(double factor, const uint8_t* codes, size_t n, double* to) {
  for (size_t i = 0; i < n; ++i) {
    const double low = codes[i] % 16, high = codes[i] / 16;
    to[i] = factor * low * low;
    to[i + n] = factor * high * high;
  }
}

}  // namespace attnd::gpu::test::reference
