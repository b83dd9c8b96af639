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

__device__ __forceinline__ void AddScaled(float factor, const float4& x, float4* sum) {
  sum->x += factor * x.x;
  sum->y += factor * x.y;
  sum->z += factor * x.z;
  sum->w += factor * x.w;
}

template <int kValueDim>
struct CoopMergeMemory {
  float2 norms[kCoopWarps];
  float values[2][kCoopWarps][kValueDim];  // of the zones, of the other states
};

// The states of one lane, merged by one thread block: the thread blocks' zones, then their
// estimates, then their chosen tokens. The constructor asks for everything at once, as each wait is
// one for the whole group. Each thread has the heads of two states, and four channels of all of its
// warp's states.
template <int kValueDim>
class CoopMerger {
 public:
  // tile: the states of the unit's tile.
  __device__ __forceinline__ CoopMerger(const float* tile, uint32_t lane)
      : blocks_(ThreadBlockCluster::blocks()), states_(3 * blocks_) {
    const auto state = [&](uint32_t i) {
      return tile + uint64_t{i} * StateFloats(kValueDim) + lane * (kStateHead + kValueDim);
    };
#pragma unroll
    for (uint32_t k = 0; k < 2; ++k) {
      const uint32_t i = k * 32 + thread_;
      if (i >= states_) continue;
      heads_[k] = *reinterpret_cast<const float4*>(state(i));
      dropped_[k] = state(i)[4];
    }
#pragma unroll
    for (uint32_t k = 0; k < kOwn; ++k) {
      const uint32_t i = k * kCoopWarps + warp_;
      values_[k] = make_float4(0, 0, 0, 0);
      if (i < states_ && thread_ * 4 < kValueDim) {
        values_[k] = *reinterpret_cast<const float4*>(state(i) + kStateHead + thread_ * 4);
      }
    }
  }

  // Every thread of the block calls it, once.
  __device__ __forceinline__ MergedLane Merge(CoopMergeMemory<kValueDim>* memory) {
    MergedLane merged;
    merged.max = Max();
    float factors[2];
    AddHeads(merged.max, factors, merged.sums);
    AddValues(factors, memory);
    __syncthreads();
    merged.zone_value = merged.other_value = 0;
    if (threadIdx.x < kValueDim) {
      for (uint32_t w = 0; w < kCoopWarps; ++w) {
        merged.zone_value += memory->values[0][w][threadIdx.x];
        merged.other_value += memory->values[1][w][threadIdx.x];
      }
    }
    return merged;
  }

 private:
  static constexpr uint32_t kStatesMax = 3 * kCoopBlocksMax;
  static constexpr uint32_t kOwn = (kStatesMax + kCoopWarps - 1) / kCoopWarps;  // of a warp
  static_assert(kStatesMax <= 64 && kValueDim <= 128);

  // The greatest maximum of the states that hold anything.
  __device__ __forceinline__ float Max() const {
    float max = -INFINITY;
#pragma unroll
    for (uint32_t k = 0; k < 2; ++k) {
      if (heads_[k].y > 0) max = fmaxf(max, heads_[k].x);
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      max = fmaxf(max, __shfl_xor_sync(~0u, max, offset));
    }
    return max;
  }

  // The factors of this thread's two states relative to `max`, and the sums over all states.
  __device__ __forceinline__ void AddHeads(float max, float (&factors)[2],
                                           float (&all)[kLaneSums]) const {
    float sums[kLaneSums] = {};
#pragma unroll
    for (uint32_t k = 0; k < 2; ++k) {
      const uint32_t i = k * 32 + thread_;
      factors[k] = heads_[k].y > 0 ? Exp2(heads_[k].x - max) : 0.0f;
      const float sum = factors[k] * heads_[k].y;
      const bool estimate = i >= blocks_ && i < 2 * blocks_;
      sums[kZones] += i < blocks_ ? sum : 0.0f;
      sums[kOthers] += i < blocks_ ? 0.0f : sum;
      sums[kEstimated] += estimate ? sum : 0.0f;
      sums[kErrors] += estimate ? heads_[k].z : 0.0f;
      sums[kMoments] += estimate ? heads_[k].w : 0.0f;
      sums[kDropped] += estimate ? dropped_[k] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kLaneSums; ++k) {
      for (int offset = 16; offset > 0; offset /= 2) {
        sums[k] += __shfl_xor_sync(~0u, sums[k], offset);
      }
      all[k] = sums[k];
    }
  }

  // Leaves this warp's sums of values in `memory`.
  __device__ __forceinline__ void AddValues(const float (&factors)[2],
                                            CoopMergeMemory<kValueDim>* memory) const {
    float4 of_kind[2] = {};
#pragma unroll
    for (uint32_t k = 0; k < kOwn; ++k) {
      const uint32_t i = k * kCoopWarps + warp_;
      const float factor =
          i < 32 ? __shfl_sync(~0u, factors[0], i % 32) : __shfl_sync(~0u, factors[1], i % 32);
      const float of_zone = i < blocks_ ? factor : 0.0f;
      AddScaled(of_zone, values_[k], &of_kind[0]);
      AddScaled(factor - of_zone, values_[k], &of_kind[1]);
    }
    if (thread_ * 4 >= kValueDim) return;
#pragma unroll
    for (uint32_t kind = 0; kind < 2; ++kind) {
      *reinterpret_cast<float4*>(&memory->values[kind][warp_][thread_ * 4]) = of_kind[kind];
    }
  }

  const uint32_t warp_ = threadIdx.x / 32;
  const uint32_t thread_ = threadIdx.x % 32;
  const uint32_t blocks_;  // thread blocks of the cooperative group
  const uint32_t states_;
  float4 heads_[2] = {make_float4(-INFINITY, 0, 0, 0), make_float4(-INFINITY, 0, 0, 0)};
  float dropped_[2] = {0, 0};
  float4 values_[kOwn];
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_COOP_MERGE_CUH_
