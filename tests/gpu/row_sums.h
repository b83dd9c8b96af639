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
void Scale(double factor, double* row, size_t n);
// The numbers that these bits are.
void WidenBf16(const uint16_t* bits, size_t n, double* to);
void WidenFp16(const uint16_t* bits, size_t n, double* to);
void WidenFp32(const float* numbers, size_t n, double* to);

}  // namespace attnd::gpu::test::reference

#endif  // ATTND_TESTS_GPU_ROW_SUMS_H_
