// SPDX-License-Identifier: Apache-2.0
//
// Dot products with instructions that Highway offers only in versions newer than Debian 12's.
// AVX512-BF16 (Zen 4, Cooper Lake and later) multiplies pairs of bf16 numbers exactly and adds the
// products in fp32, with half the instructions of widening the numbers first. AVX512-VNNI (Zen 4,
// Cascade Lake and later) does the same for 16-bit integers. Row and cluster kernels use these
// functions where HaveBf16Dot() or HaveInt16Dot() is true.
#ifndef ATTND_ATTENTION_KERNELS_X86_DOT_H_
#define ATTND_ATTENTION_KERNELS_X86_DOT_H_

#include <cstddef>
#include <cstdint>

namespace attnd::attention::kernels {

bool HaveBf16Dot();
bool HaveInt16Dot();

// out[i][j] = scale * (q[j] . rows[i]).   rows: [n] of [dim] bf16; q: [4][dim] of bf16; out:
// [n][4]; dim is a multiple of 16. ahead: rows to prefetch meanwhile, [n] or null.
void DotBf16Rows(const std::byte* const* rows, const std::byte* const* ahead, size_t n, size_t dim,
                 const uint16_t* q, float scale, float* out);

// Squared queries as 15-bit integers, in the order that DotInt16Deviations needs.
struct Int16Squares {
  const int16_t* values = nullptr;
  float unit[4] = {0, 0, 0, 0};  // what the integer 1 is worth, for each query
};

// 16-bit numbers of memory that MakeInt16Squares needs.
constexpr size_t Int16SquaresSize(size_t dim) { return (dim + 63) / 64 * 256; }

// From q_squared, [4][dim], finite: each channel rounded to 2^-16 of its query's greatest. memory
// holds Int16SquaresSize(dim).
Int16Squares MakeInt16Squares(const float* q_squared, size_t dim, int16_t* memory);

// kernels::DotDeviations, with integers within a lane and floats across lanes. ahead: bytes from a
// row to the row that is prefetched meanwhile.
void DotInt16Deviations(const uint8_t* codes, const float* unit, size_t n, size_t dim,
                        const Int16Squares& q, float* out, size_t ahead);

}  // namespace attnd::attention::kernels

#endif  // ATTND_ATTENTION_KERNELS_X86_DOT_H_
