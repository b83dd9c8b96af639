// SPDX-License-Identifier: Apache-2.0
//
// Matrix products of a warp on tensor cores, as the kernels of an index build use them. With lane =
// 4 g + q: operand A has rows g and g + 8, operand B column g, the result rows g and g + 8 at
// columns 2 q and 2 q + 1.
#ifndef ATTND_GPU_CUDA_INDEX_INDEX_MMA_CUH_
#define ATTND_GPU_CUDA_INDEX_INDEX_MMA_CUH_

#include <cstdint>

#include "gpu/layout/kernel_shapes.h"

namespace attnd::gpu::cuda {

// d = a b + c for a 16 x 16 by 16 x 8 tile.
template <typename Element>
__device__ __forceinline__ void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1, const float (&c)[4]) {
  if constexpr (Element::kDtype == DType::kBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  }
}

// d += a b for a 16 x 8 by 8 x 8 tile of tf32 numbers: floats with 10 bits of mantissa, which
// ToTf32 makes. a: (g, q), (g + 8, q), (g, q + 4), (g + 8, q + 4); b: (q, g), (q + 4, g).
__device__ __forceinline__ void MultiplyAddTf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t ToTf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_INDEX_INDEX_MMA_CUH_
