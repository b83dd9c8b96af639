// SPDX-License-Identifier: Apache-2.0
//
// Sums over rows, which take nearly all of the references' time. Sanitizers that look at each
// access would take most of theirs here, and do not: rows are a reference's own, which no other
// thread has, and callers compare their sizes. What is read of a step's or a sequence's memory is
// copied into such a row first (LoadTo), which sanitizers see.
#ifndef ATTND_TESTS_GPU_ROW_SUMS_H_
#define ATTND_TESTS_GPU_ROW_SUMS_H_

#include <cstddef>
#include <cstdint>

namespace attnd::gpu::test::reference {

// Of squares of differences, or a part of the sum that is `enough`.
double SumOfSquares(const double* a, const double* b, size_t n, double enough);
double SumOfProducts(const double* a, const double* b, size_t n);
// to += factor * row.
void AddProducts(double factor, const double* row, size_t n, double* to);
// to += factor * row * row, number by number.
void AddSquares(double factor, const double* row, size_t n, double* to);
void Scale(double factor, double* row, size_t n);
// The number of the closest of `count` rows, the first among equals.
size_t Closest(const double* point, const double* const* rows, size_t count, size_t n);
// Turns n points, whose coordinates lie `stride` apart: a to c * a + s * b, and b to c * b - s * a.
void Turn(double c, double s, size_t n, size_t stride, double* a, double* b);
// The numbers that these bits are.
void WidenBf16(const uint16_t* bits, size_t n, double* to);
void WidenFp16(const uint16_t* bits, size_t n, double* to);
void WidenFp32(const float* numbers, size_t n, double* to);
// to += factor * codes.
void AddBytes(double factor, const int8_t* codes, size_t n, double* to);
// factor * code * code of the codes in the low halves of n bytes, then of those in the high ones.
void SquareHalves(double factor, const uint8_t* codes, size_t n, double* to);

}  // namespace attnd::gpu::test::reference

#endif  // ATTND_TESTS_GPU_ROW_SUMS_H_
