// SPDX-License-Identifier: Apache-2.0
//
// Merging the states that a cooperative group's thread blocks leave of a unit: the answer of one
// lane.
#ifndef ATTND_GPU_CUDA_STEP_COOP_MERGE_CUH_
#define ATTND_GPU_CUDA_STEP_COOP_MERGE_CUH_

#include <cstdint>

#include "gpu/cuda/step/cooperative_group.cuh"
#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/merge.cuh"

namespace attnd::gpu {

template <int kValueDim>
struct CoopMergeMemory {
  SquaredLengths lengths[kCoopWarps];
  float values[2][kCoopWarps][kValueDim];  // of the zones, of the other states
};

// A thread's share of a lane's states: the heads of two of them, and four channels of all those of
// its warp. The states are the thread blocks' zones, then their estimates, then their chosen
// tokens.
struct CoopShare {
  static constexpr uint32_t kStatesMax = 3 * kCoopBlocksMax;
  static constexpr uint32_t kOwn = (kStatesMax + kCoopWarps - 1) / kCoopWarps;  // of a warp
  static_assert(kStatesMax <= 64);

  float4 heads[2] = {make_float4(-INFINITY, 0, 0, 0), make_float4(-INFINITY, 0, 0, 0)};
  float dropped[2] = {0, 0};
  float4 values[kOwn];
};

// Asks for the whole share at once, as each wait is one for the whole group.
template <int kValueDim>
__device__ __forceinline__ void LoadShare(const float* tile, uint32_t lane, uint32_t states,
                                          CoopShare* share) {
  const uint32_t warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const auto state = [&](uint32_t i) {
    return tile + uint64_t{i} * StateFloats(kValueDim) + lane * (kStateHead + kValueDim);
  };
#pragma unroll
  for (uint32_t k = 0; k < 2; ++k) {
    const uint32_t i = k * 32 + thread;
    if (i >= states) continue;
    share->heads[k] = *reinterpret_cast<const float4*>(state(i));
    share->dropped[k] = state(i)[kHeadDropped];
  }
#pragma unroll
  for (uint32_t k = 0; k < CoopShare::kOwn; ++k) {
    const uint32_t i = k * kCoopWarps + warp;
    share->values[k] = make_float4(0, 0, 0, 0);
    if (i < states && thread * 4 < kValueDim) {
      share->values[k] = *reinterpret_cast<const float4*>(state(i) + kStateHead + thread * 4);
    }
  }
}

// The greatest maximum of the states that hold anything.
__device__ __forceinline__ float MaxOfHeads(const CoopShare& share) {
  float max = -INFINITY;
#pragma unroll
  for (uint32_t k = 0; k < 2; ++k) {
    if (share.heads[k].y > 0) max = fmaxf(max, share.heads[k].x);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    max = fmaxf(max, __shfl_xor_sync(~0u, max, offset));
  }
  return max;
}

// The factors of this thread's two states relative to merged->max, and the sums over all states.
__device__ __forceinline__ void AddHeads(const CoopShare& share, uint32_t blocks,
                                         float (&factors)[2], MergedLane* merged) {
  float sums[kLaneSums] = {};
#pragma unroll
  for (uint32_t k = 0; k < 2; ++k) {
    const uint32_t i = k * 32 + threadIdx.x % 32;
    const float4& head = share.heads[k];
    factors[k] = head.y > 0 ? Exp2(head.x - merged->max) : 0.0f;
    const float sum = factors[k] * head.y;
    const bool estimate = i >= blocks && i < 2 * blocks;
    sums[kZones] += i < blocks ? sum : 0.0f;
    sums[kOthers] += i < blocks ? 0.0f : sum;
    sums[kEstimated] += estimate ? sum : 0.0f;
    sums[kErrors] += estimate ? head.z : 0.0f;
    sums[kMoments] += estimate ? head.w : 0.0f;
    sums[kDropped] += estimate ? share.dropped[k] : 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kLaneSums; ++k) {
    for (int offset = 16; offset > 0; offset /= 2) {
      sums[k] += __shfl_xor_sync(~0u, sums[k], offset);
    }
    merged->sums[k] = sums[k];
  }
}

// Leaves this warp's sums of values in `memory`.
template <int kValueDim>
__device__ __forceinline__ void AddValues(const CoopShare& share, uint32_t blocks,
                                          const float (&factors)[2],
                                          CoopMergeMemory<kValueDim>* memory) {
  const uint32_t warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  float4 of_kind[2] = {};
#pragma unroll
  for (uint32_t k = 0; k < CoopShare::kOwn; ++k) {
    const uint32_t i = k * kCoopWarps + warp;
    const float factor =
        i < 32 ? __shfl_sync(~0u, factors[0], i % 32) : __shfl_sync(~0u, factors[1], i % 32);
    const float of_zone = i < blocks ? factor : 0.0f;
    AddScaled(of_zone, share.values[k], &of_kind[0]);
    AddScaled(factor - of_zone, share.values[k], &of_kind[1]);
  }
  if (thread * 4 < kValueDim) {
#pragma unroll
    for (uint32_t kind = 0; kind < 2; ++kind) {
      *reinterpret_cast<float4*>(&memory->values[kind][warp][thread * 4]) = of_kind[kind];
    }
  }
}

// The states of one lane, merged by one thread block. tile: the states of the unit's tile.
template <int kValueDim>
__device__ __forceinline__ MergedLane MergeCoop(const float* tile, uint32_t lane,
                                                CoopMergeMemory<kValueDim>* memory) {
  static_assert(kValueDim <= 128);
  const uint32_t blocks = ThreadBlockCluster::blocks();
  CoopShare share;
  LoadShare<kValueDim>(tile, lane, 3 * blocks, &share);
  MergedLane merged;
  merged.max = MaxOfHeads(share);
  merged.tree = false;
  float factors[2];
  AddHeads(share, blocks, factors, &merged);
  AddValues(share, blocks, factors, memory);
  __syncthreads();
  merged.values[kOfZones] = merged.values[kOfOthers] = merged.values[kOfSlopes] = 0;
  if (threadIdx.x < kValueDim) {
    for (uint32_t w = 0; w < kCoopWarps; ++w) {
      merged.values[kOfZones] += memory->values[kOfZones][w][threadIdx.x];
      merged.values[kOfOthers] += memory->values[kOfOthers][w][threadIdx.x];
    }
  }
  return merged;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_COOP_MERGE_CUH_
