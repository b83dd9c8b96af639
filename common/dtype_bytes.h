// SPDX-License-Identifier: Apache-2.0
//
// Element types of tensors, for sources of the GPU: common/dtype.h brings headers that take CUDA's
// compiler a second in each of them.
#ifndef ATTND_COMMON_DTYPE_BYTES_H_
#define ATTND_COMMON_DTYPE_BYTES_H_

#include <cstddef>
#include <cstdint>

namespace attnd {

enum class DType : uint8_t { kBf16 = 1, kFp16 = 2, kFp32 = 3 };

constexpr size_t DTypeBytes(DType dtype) { return dtype == DType::kFp32 ? 4 : 2; }

}  // namespace attnd

#endif  // ATTND_COMMON_DTYPE_BYTES_H_
