// SPDX-License-Identifier: Apache-2.0
//
// How the fetch stage copies a page. A benchmark measures it alone (bench/gpu/host_reads.cu).
#ifndef ATTND_GPU_CUDA_STEP_COPY_PAGE_CUH_
#define ATTND_GPU_CUDA_STEP_COPY_PAGE_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace attnd::gpu {

// A warp copies a page, with 4 KiB of it on their way at a time.
__device__ __forceinline__ void CopyPage(const std::byte* from, std::byte* to, uint32_t bytes) {
  constexpr uint32_t kAtOnce = 8;
  const auto* source = reinterpret_cast<const uint4*>(from);
  auto* target = reinterpret_cast<uint4*>(to);
  const uint32_t chunks = bytes / sizeof(uint4);
  for (uint32_t first = threadIdx.x % 32; first < chunks; first += 32 * kAtOnce) {
    uint4 data[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + i * 32 < chunks) data[i] = __ldcs(source + first + i * 32);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + i * 32 < chunks) target[first + i * 32] = data[i];
    }
  }
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_COPY_PAGE_CUH_
