// SPDX-License-Identifier: Apache-2.0
//
// What the kernels use of bf16, in place of CUDA's own header of this name.
#ifndef ATTND_TESTS_GPU_EMULATED_CUDA_BF16_H_
#define ATTND_TESTS_GPU_EMULATED_CUDA_BF16_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 x) { return attnd::Bf16ToFloat(x.bits); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {{attnd::FloatToBf16(x)}, {attnd::FloatToBf16(y)}};
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
  return {__bfloat162float(pair.x), __bfloat162float(pair.y)};
}
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(__bfloat162float(a.x) - __bfloat162float(b.x),
                               __bfloat162float(a.y) - __bfloat162float(b.y));
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(__bfloat162float(a.x) * __bfloat162float(b.x),
                               __bfloat162float(a.y) * __bfloat162float(b.y));
}

#endif  // ATTND_TESTS_GPU_EMULATED_CUDA_BF16_H_
