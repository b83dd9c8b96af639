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

}  // namespace attnd::gpu::test::reference
