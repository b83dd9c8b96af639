// SPDX-License-Identifier: Apache-2.0
//
// What thread blocks and warps do together when tokens are put in order.
#ifndef ATTND_GPU_CUDA_INDEX_INDEX_BLOCK_CUH_
#define ATTND_GPU_CUDA_INDEX_INDEX_BLOCK_CUH_

#include "gpu/cuda/index/index_kernels.cuh"

namespace attnd::gpu::cuda {

// Exclusive prefix sum over the kWarps * 32 threads of a thread block; *total gets the sum. sums:
// shared, [kWarps].
template <uint32_t kWarps>
__device__ __forceinline__ uint32_t BlockPrefix(uint32_t value, uint32_t* sums, uint32_t* total) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t prefix = value;
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, prefix, step);
    if (lane >= step) prefix += other;
  }
  __syncthreads();  // none still reads the last call's sums
  if (lane == 31) sums[warp] = prefix;
  __syncthreads();
  uint32_t before = 0, all = 0;
#pragma unroll
  for (uint32_t w = 0; w < kWarps; ++w) {
    if (w < warp) before += sums[w];
    all += sums[w];
  }
  *total = all;
  return before + prefix - value;
}

// Calls use(valid, token, cluster, rank, size) for a warp's tokens in order, 32 at a time: `rank`
// counts the earlier ones among the 32 that have the same cluster, `size` all of them. All lanes
// are called, those without a token with valid = false.
template <typename Use>
__device__ __forceinline__ void ForTokens(const uint16_t* assignment, uint32_t begin, uint32_t end,
                                          Use use) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t base = begin; base < end; base += 32) {
    const uint32_t token = base + lane;
    // Lanes without a token share a number that no cluster has.
    const uint32_t cluster = token < end ? assignment[token] : 0xffffffffu;
    const uint32_t same = __match_any_sync(kAllLanes, cluster);
    const uint32_t rank = __popc(same & ((1u << lane) - 1));
    use(token < end, token, cluster, rank, static_cast<uint32_t>(__popc(same)));
  }
}

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_INDEX_INDEX_BLOCK_CUH_
