// SPDX-License-Identifier: Apache-2.0
//
// What goes into the tensor cores' m16n8k16 product.
//
// A product has 16 rows, and a unit's tile only kLanes = 8 queries. So each number of the queries
// is split into two of 16 bits: rows 0..7 hold the greater parts, rows 8..15 the rests, and adding
// row r and row r + 8 of the result (which one thread holds both of) gives what fp32 numbers on the
// left would have given, to 2^-16. It costs nothing, as rows would be empty otherwise. Weights of
// values are the right side, their two parts two products (attend.cuh).
#ifndef ATTND_GPU_CUDA_STEP_MATRIX_CUH_
#define ATTND_GPU_CUDA_STEP_MATRIX_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "gpu/cuda/instructions.cuh"

namespace attnd::gpu {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// Conversions and the few pair operations that the kernels need of a 16-bit type.
template <typename T>
struct Element;

template <>
struct Element<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  // 128 and its ulp of 1: or-ing a 4-bit code into it gives 128 + code exactly.
  static constexpr uint32_t kCodeBase = 0x43004300u;
  static constexpr float kCodeOffset = 128.0f;
  static __device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __forceinline__ Pair Pack(float low, float high) {
    return __floats2bfloat162_rn(low, high);
  }
  static __device__ __forceinline__ float2 Unpack(Pair pair) { return __bfloat1622float2(pair); }
};

template <>
struct Element<__half> {
  using Pair = __half2;
  static constexpr uint32_t kCodeBase = 0x64006400u;  // 1024, ulp 1
  static constexpr float kCodeOffset = 1024.0f;
  static __device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }
  static __device__ __forceinline__ Pair Pack(float low, float high) {
    return __floats2half2_rn(low, high);
  }
  static __device__ __forceinline__ float2 Unpack(Pair pair) { return __half22float2(pair); }
};

template <typename Pair>
__device__ __forceinline__ uint32_t Bits(Pair pair) {
  return *reinterpret_cast<uint32_t*>(&pair);
}

// (x, y) as a pair of T, and what its rounding left over as another.
template <typename T>
__device__ __forceinline__ void Split(float x, float y, uint32_t* greater, uint32_t* rest) {
  const auto pair = Element<T>::Pack(x, y);
  const float2 rounded = Element<T>::Unpack(pair);
  *greater = Bits(pair);
  *rest = Bits(Element<T>::Pack(x - rounded.x, y - rounded.y));
}

// The squares of two 4-bit codes, at bits 0..3 and 16..19 of `codes`, exactly.
template <typename T>
__device__ __forceinline__ uint32_t CodeSquares(uint32_t codes) {
  using Pair = typename Element<T>::Pair;
  uint32_t bits = (codes & 0x000F000Fu) | Element<T>::kCodeBase;
  const Pair offset = Element<T>::Pack(Element<T>::kCodeOffset, Element<T>::kCodeOffset);
  const Pair code = __hsub2(*reinterpret_cast<Pair*>(&bits), offset);
  return Bits(__hmul2(code, code));
}

// The greatest, or the sum, over the four threads that share g.
__device__ __forceinline__ float MaxOverT(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float SumOverT(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// exp2(x - max), and 0 where x is -infinity even if max is.
__device__ __forceinline__ float Weight(float x, float max) {
  return x == -INFINITY ? 0.0f : Exp2(x - max);
}

__device__ __forceinline__ const std::byte* ShuffleAddress(const std::byte* address,
                                                           uint32_t lane) {
  return reinterpret_cast<const std::byte*>(
      __shfl_sync(~0u, reinterpret_cast<unsigned long long>(address), lane));
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_MATRIX_CUH_
