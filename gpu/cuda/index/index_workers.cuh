// SPDX-License-Identifier: Apache-2.0
//
// Who works on a cluster: one warp, as most clusters have about 16 members, or all warps of the
// thread block for the few that have very many. Which of the two depends on the size alone, and
// parts are summed in warp order, so that results do not depend on timing.
#ifndef ATTND_GPU_CUDA_INDEX_INDEX_WORKERS_CUH_
#define ATTND_GPU_CUDA_INDEX_INDEX_WORKERS_CUH_

#include "gpu/cuda/index/index_kernels.cuh"

namespace attnd::gpu::cuda {

inline constexpr uint32_t kBlockWarps = 8;        // of a thread block
inline constexpr uint32_t kBlockClusters = 32;    // that a thread block works on
inline constexpr uint32_t kWarpMembersMax = 512;  // larger clusters are a whole thread block's work

struct MemberRange {
  uint32_t begin, end;
};

struct OneWarp {
  __device__ __forceinline__ bool Leads() const { return true; }
  __device__ __forceinline__ MemberRange Part(uint32_t begin, uint32_t end) const {
    return {begin, end};
  }
  template <typename T, uint32_t kPart>
  __device__ __forceinline__ void Sum(T (&)[kPart], T*) const {}
};

struct WholeBlock {
  __device__ __forceinline__ bool Leads() const { return threadIdx.x / 32 == 0; }
  // This warp's share of members [begin, end).
  __device__ __forceinline__ MemberRange Part(uint32_t begin, uint32_t end) const {
    const uint32_t run = CeilDiv(end - begin, kBlockWarps);
    const uint32_t first = min(end, begin + threadIdx.x / 32 * run);
    return {first, min(end, first + run)};
  }
  // Adds the warps' `part`s; all get the sum. shared: [kBlockWarps][32][kPart].
  template <typename T, uint32_t kPart>
  __device__ __forceinline__ void Sum(T (&part)[kPart], T* shared) const {
    __syncthreads();  // none still reads what was summed before
#pragma unroll
    for (uint32_t e = 0; e < kPart; ++e) shared[threadIdx.x * kPart + e] = part[e];
    __syncthreads();
#pragma unroll
    for (uint32_t e = 0; e < kPart; ++e) {
      T sum = 0;
      for (uint32_t w = 0; w < kBlockWarps; ++w) {
        sum += shared[(w * 32 + threadIdx.x % 32) * kPart + e];
      }
      part[e] = sum;
    }
  }
};

// Adds the rows of a range to sum, this lane's channels. row: as ForRows has it.
template <typename Element, uint32_t kPart, typename Row>
__device__ __forceinline__ void AddRows(MemberRange range, Row row, double (&sum)[kPart]) {
  ForRows<kPart / 2>(
      range.begin, range.end, row,
      [&](const uint32_t(&pairs)[kPart / 2]) {
#pragma unroll
        for (uint32_t p = 0; p < kPart / 2; ++p) {
          const float2 x = Element::Unpack(pairs[p]);
          sum[2 * p] += x.x;
          sum[2 * p + 1] += x.y;
        }
      },
      [] {});
}

// Calls work(workers, cluster, begin, end) for clusters [first, last): once by one warp, or once by
// each of the thread block's warps. starts: [last + 1], the members' places.
template <typename Work>
__device__ __forceinline__ void ForClusters(uint32_t first, uint32_t last, const uint32_t* starts,
                                            Work work) {
  for (uint32_t c = first + threadIdx.x / 32; c < last; c += kBlockWarps) {
    const uint32_t begin = starts[c], end = starts[c + 1];
    if (end - begin <= kWarpMembersMax) work(OneWarp(), c, begin, end);
  }
  for (uint32_t c = first; c < last; ++c) {
    const uint32_t begin = starts[c], end = starts[c + 1];
    if (end - begin > kWarpMembersMax) work(WholeBlock(), c, begin, end);
  }
}

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_INDEX_INDEX_WORKERS_CUH_
