// SPDX-License-Identifier: Apache-2.0
//
// Tokens by cluster: a stable counting sort of one head by one thread block. Each warp counts its
// own run of tokens, so that no order of arrival shows in the result.
#include "gpu/cuda/index/index_block.cuh"
#include "gpu/cuda/index/index_kernels.cuh"
#include "gpu/cuda/launch.h"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kWarps = 16;
constexpr uint32_t kThreads = kWarps * 32;

// -------------------------------------------------------------------------------------------------
// Kernel. Thread block b: head b. Shared memory: uint16 [kWarps][clusters], first each warp's count
// of each cluster, then the place of its next token; 16 bits do, as places end at 65535 (that of a
// cluster after the last token may wrap, and is not used).
// -------------------------------------------------------------------------------------------------

template <bool kLast>
__global__ void __launch_bounds__(kThreads) SortKernel(const __grid_constant__ IndexPlan plan) {
  extern __shared__ uint16_t places[];
  __shared__ uint32_t sums[kWarps];
  const Head head(plan, blockIdx.x);
  const auto* assignment = head.At<const uint16_t>(plan.layout.assignment);  // [tokens]
  auto* order = head.At<uint16_t>(plan.layout.order);                        // [tokens]
  auto* starts = head.At<uint32_t>(plan.layout.starts);                      // [clusters + 1]

  const uint32_t warp = threadIdx.x / 32;
  const uint32_t run = CeilDiv(plan.tokens, kWarps * 32) * 32;
  const uint32_t begin = min(plan.tokens, warp * run), end = min(plan.tokens, begin + run);
  uint16_t* own = places + warp * plan.clusters;

  for (uint32_t i = threadIdx.x; i < kWarps * plan.clusters; i += kThreads) places[i] = 0;
  __syncthreads();
  ForTokens(assignment, begin, end,
            [&](bool valid, uint32_t, uint32_t cluster, uint32_t rank, uint32_t size) {
              if (valid && rank == 0) own[cluster] += static_cast<uint16_t>(size);
              __syncwarp();
            });
  __syncthreads();

  std::byte* index = head.Index();
  auto* index_starts = reinterpret_cast<uint32_t*>(index + head.job.offsets.starts);
  uint32_t next_place = 0, kept = 0;
  for (uint32_t base = 0; base < plan.clusters; base += kThreads) {
    const uint32_t cluster = base + threadIdx.x;
    const bool valid = cluster < plan.clusters;
    uint32_t size = 0;
    if (valid) {
      for (uint32_t w = 0; w < kWarps; ++w) size += places[w * plan.clusters + cluster];
    }
    uint32_t total;
    const uint32_t start = next_place + BlockPrefix<kWarps>(size, sums, &total);
    next_place += total;
    if (valid) {
      starts[cluster] = start;
      uint32_t place = start;
      for (uint32_t w = 0; w < kWarps; ++w) {
        uint16_t& entry = places[w * plan.clusters + cluster];
        const uint32_t count = entry;
        entry = static_cast<uint16_t>(place);
        place += count;
      }
    }
    if constexpr (kLast) {
      uint32_t kept_here;
      const uint32_t number = kept + BlockPrefix<kWarps>(size != 0, sums, &kept_here);
      kept += kept_here;
      if (size != 0) index_starts[number] = plan.unclustered + start;
    }
  }
  if (threadIdx.x == 0) {
    starts[plan.clusters] = plan.tokens;
    if constexpr (kLast) {
      index_starts[kept] = plan.unclustered + plan.tokens;
      *reinterpret_cast<uint32_t*>(index) = kept;
    }
  }
  __syncthreads();

  ForTokens(assignment, begin, end,
            [&](bool valid, uint32_t token, uint32_t cluster, uint32_t rank, uint32_t size) {
              if (valid) order[own[cluster] + rank] = static_cast<uint16_t>(token);
              __syncwarp();
              if (valid && rank == 0) own[cluster] += static_cast<uint16_t>(size);
              __syncwarp();
            });
}

template <bool kLast>
cudaError_t Launch(const IndexPlan& plan, cudaStream_t stream) {
  const uint32_t shared_bytes = kWarps * plan.clusters * sizeof(uint16_t);
  // What the greatest segment needs, once and for all sizes.
  const cudaError_t error = AllowShared(SortKernel<kLast>, shared_bytes);
  if (error != cudaSuccess) return error;
  SortKernel<kLast><<<plan.heads, kThreads, shared_bytes, stream>>>(plan);
  return cudaGetLastError();
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launcher.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchSort(const IndexPlan& plan, bool last, cudaStream_t stream) {
  return last ? Launch<true>(plan, stream) : Launch<false>(plan, stream);
}

}  // namespace attnd::gpu::cuda
