// SPDX-License-Identifier: Apache-2.0
//
// The matrix instructions of a warp (gpu/cuda/instructions.cuh), each lane working out its own part
// of the result. Sums are exact to fp32's rounding at the end, which tensor cores are not.
#ifndef ATTND_TESTS_GPU_EMULATED_PRODUCTS_H_
#define ATTND_TESTS_GPU_EMULATED_PRODUCTS_H_

#include <array>
#include <cstdint>

#include "common/dtype.h"

namespace attnd::gpu::emulated {

void MultiplyAdd16(DType dtype, float (&d)[4], const uint32_t (&a)[4], std::array<uint32_t, 2> b);
void MultiplyAddBytes(bool a_signed, int (&d)[4], std::array<uint32_t, 4> a,
                      std::array<uint32_t, 2> b);
// row: 8 numbers of 16 bits, row i % 8 of matrix i / 8 of lane i.
void TransposeMatrices(const uint32_t (&row)[4], uint32_t (&to)[4]);

}  // namespace attnd::gpu::emulated

#endif  // ATTND_TESTS_GPU_EMULATED_PRODUCTS_H_
