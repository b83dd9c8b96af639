// SPDX-License-Identifier: Apache-2.0
//
// Element types of tensors and their scalar conversions. The vector kernels have their own
// (attention/kernels/kernels.h).
#ifndef ATTND_COMMON_DTYPE_H_
#define ATTND_COMMON_DTYPE_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "common/dtype_bytes.h"

namespace attnd {

absl::string_view DTypeName(DType dtype);  // "bf16", "fp16", "fp32"

float Bf16ToFloat(uint16_t bits);
float Fp16ToFloat(uint16_t bits);
// Both round to nearest, ties to even; fp16 overflows to infinity. NaN stays NaN.
uint16_t FloatToBf16(float value);
uint16_t FloatToFp16(float value);

// Converts `count` elements at `source` of type `dtype` to float, or back. The buffers do not
// overlap.
void ToFloat(DType dtype, const std::byte* source, size_t count, float* target);
void FromFloat(DType dtype, const float* source, size_t count, std::byte* target);

// True if no element is NaN or infinite.
bool AllFinite(DType dtype, const std::byte* source, size_t count);

}  // namespace attnd

#endif  // ATTND_COMMON_DTYPE_H_
