// SPDX-License-Identifier: Apache-2.0
//
// What the kernels use of fp16, in place of CUDA's own header of this name.
#ifndef ATTND_TESTS_GPU_EMULATED_CUDA_FP16_H_
#define ATTND_TESTS_GPU_EMULATED_CUDA_FP16_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};
inline float __half2float(__half x) { return attnd::Fp16ToFloat(x.bits); }
inline __half2 __floats2half2_rn(float x, float y) {
  return {{attnd::FloatToFp16(x)}, {attnd::FloatToFp16(y)}};
}
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) - __half2float(b.x),
                           __half2float(a.y) - __half2float(b.y));
}
inline __half2 __hmul2(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) * __half2float(b.x),
                           __half2float(a.y) * __half2float(b.y));
}

#endif  // ATTND_TESTS_GPU_EMULATED_CUDA_FP16_H_
