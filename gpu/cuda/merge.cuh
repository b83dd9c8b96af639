// SPDX-License-Identifier: Apache-2.0
//
// The merge stage: a lane's states in piece order, its output, and what the answer was made of.
#ifndef ATTND_GPU_CUDA_MERGE_CUH_
#define ATTND_GPU_CUDA_MERGE_CUH_

#include <cfloat>
#include <cstdint>

#include "gpu/cuda/matrix.cuh"
#include "gpu/cuda/place.cuh"

namespace attnd::gpu {

inline constexpr uint32_t kMergeWarps = 8;
// An output may cancel to nearly nothing; errors are then relative to this share of the values'
// root mean square.
inline constexpr float kLeastNormShare = 1e-3f;

__device__ __forceinline__ float BlockSum(float x, float* memory) {  // memory: [warps]
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (uint32_t w = 0; w < blockDim.x / 32; ++w) sum += memory[w];
  return sum;
}

__device__ __forceinline__ float BlockMax(float x, float* memory) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = x;
  __syncthreads();
  float max = -INFINITY;
  for (uint32_t w = 0; w < blockDim.x / 32; ++w) max = fmaxf(max, memory[w]);
  return max;
}

// A lane of several states, at one scale. values: of channels 4 i.. of thread i of a warp group.
struct LaneSum {
  float sum = 0;
  float4 values = {0, 0, 0, 0};
};

// Merges a block's lane. Each warp takes every kMergeWarps-th state, in 32 threads of 4 channels
// and more for wider values; then the warps' sums are added in their order.
template <int kValueDim>
class LaneMerger {
 public:
  static constexpr int kVectors = (kValueDim + 127) / 128;  // of 4 channels, of a thread
  struct Memory {
    float reduce[kMergeWarps];
    float sum[kMergeWarps];
    float values[kMergeWarps][kValueDim];
  };

  // states: of the lane's tile; lane within it.
  __device__ LaneMerger(const float* states, uint32_t lane, Memory* memory)
      : states_(states + lane * (kStateHead + kValueDim)), memory_(memory) {}

  // The greatest maximum of states [begin, end) that hold anything.
  __device__ float Max(uint32_t begin, uint32_t end) const {
    float max = -INFINITY;
    for (uint32_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
      const float2 head = *reinterpret_cast<const float2*>(State(i));
      if (head.y > 0) max = fmaxf(max, head.x);
    }
    return BlockMax(max, memory_->reduce);
  }

  // Sum over states [begin, end) of component `which` of their heads.
  __device__ float HeadSum(uint32_t begin, uint32_t end, uint32_t which) const {
    float sum = 0;
    for (uint32_t i = begin + threadIdx.x; i < end; i += blockDim.x) sum += State(i)[which];
    return BlockSum(sum, memory_->reduce);
  }

  // Adds states [begin, end), scaled to `max`. Every thread gets the sum; values_[c] of channel c =
  // threadIdx.x go to threads below kValueDim.
  __device__ float Add(uint32_t begin, uint32_t end, float max, float* value) {
    const uint32_t warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    float sum = 0;
    float4 values[kVectors] = {};
#pragma unroll 4
    for (uint32_t i = begin + warp; i < end; i += kMergeWarps) {
      const float* state = State(i);
      const float2 head = *reinterpret_cast<const float2*>(state);
      const float factor = head.y > 0 ? Exp2(head.x - max) : 0.0f;
      sum += factor * head.y;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t channel = v * 128 + thread * 4;
        if (channel >= kValueDim) continue;
        const float4 x = *reinterpret_cast<const float4*>(state + kStateHead + channel);
        values[v].x += factor * x.x;
        values[v].y += factor * x.y;
        values[v].z += factor * x.z;
        values[v].w += factor * x.w;
      }
    }
    __syncthreads();
    if (thread == 0) memory_->sum[warp] = sum;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t channel = v * 128 + thread * 4;
      if (channel < kValueDim) {
        *reinterpret_cast<float4*>(&memory_->values[warp][channel]) = values[v];
      }
    }
    __syncthreads();
    float total = 0;
    *value = 0;
    for (uint32_t w = 0; w < kMergeWarps; ++w) {
      total += memory_->sum[w];
      if (threadIdx.x < kValueDim) *value += memory_->values[w][threadIdx.x];
    }
    return total;
  }

 private:
  __device__ __forceinline__ const float* State(uint32_t i) const {
    return states_ + uint64_t{i} * StateFloats(kValueDim);
  }
  const float* const states_;
  Memory* const memory_;
};

// The floor under an output's norm, relative to `max`: zones by their merged state (sum, squared
// norm of their values), clusters by their estimates.
__device__ __forceinline__ float LeastNorm(float zone_sum, float zone_norm2, float moments,
                                           float cluster_sum) {
  const float zone_moment = zone_sum > 0 ? zone_norm2 / zone_sum : 0.0f;
  const float total = zone_sum + cluster_sum;
  return fmaxf(kLeastNormShare * sqrtf((moments + zone_moment) / total), FLT_MIN);
}

// ---- kernels ----

// One block answers one lane of one tile.
template <int kValueDim>
__global__ void __launch_bounds__(kMergeWarps * 32)
    MergeKernel(const __grid_constant__ StepHeader step) {
  __shared__ __align__(16) typename LaneMerger<kValueDim>::Memory memory;
  const uint32_t tile_number = blockIdx.x / kLanes, lane = blockIdx.x % kLanes;
  const uint32_t unit_number = tile_number / step.tiles_max, tile = tile_number % step.tiles_max;
  const RowRef* row = RowOfUnit(step, unit_number);
  const UnitPlace unit(step, row, unit_number - row->first_unit);
  const LanePlace place(step, unit, tile, lane);
  if (!place.used) return;

  const float* states = TileStates(step, unit, tile, StateFloats(kValueDim));
  LaneMerger<kValueDim> merger(states, lane, &memory);
  const bool clusters = row->kind == UnitKind::kClusters;
  const uint32_t zones = row->read_pieces;
  const uint32_t estimates = zones + row->estimate_pieces;
  const uint32_t end =
      estimates + (clusters ? step.unit_results[unit.unit].chosen_pieces : 0);
  LaneScale scale = {};
  scale.max = -INFINITY;
  if (clusters) scale = step.lane_scales[uint64_t{tile_number} * kLanes + lane];
  const float max = fmaxf(merger.Max(0, end), scale.max);

  float zone_value, other_value;
  const float zone_sum = merger.Add(0, zones, max, &zone_value);
  const float other_sum = merger.Add(zones, end, max, &other_value);
  const float sum = zone_sum + other_sum;
  const float value = sum > 0 ? (zone_value + other_value) / sum : 0.0f;
  const uint32_t channel = threadIdx.x;
  if (channel < kValueDim) step.out[place.slot * kValueDim + channel] = value;

  LaneResult result = {1, 1, 0, 0};
  if (clusters && sum > 0) {
    const float factor = Weight(scale.max, max);
    const float estimated = merger.HeadSum(zones, estimates, 1) * factor;
    const float dropped = merger.HeadSum(zones, estimates, 4) * factor;
    const float total = sum + dropped;
    result.covered_mass = sum / total;
    result.exact_mass = fmaxf(0.0f, sum - estimated) / total;
    if (row->second_order != 0) {
      const float moments = merger.HeadSum(zones, estimates, 3) * factor;
      const float errors = merger.HeadSum(zones, estimates, 2);
      const float zone_norm2 =
          BlockSum(channel < kValueDim ? zone_value * zone_value : 0.0f, memory.reduce);
      const float norm2 = BlockSum(channel < kValueDim ? value * value : 0.0f, memory.reduce);
      const float norm =
          fmaxf(sqrtf(norm2), LeastNorm(zone_sum, zone_norm2, moments, scale.sum * factor));
      result.predicted_error = errors > 0 ? sqrtf(errors) * factor / sum / norm : 0.0f;
    }
  }
  if (threadIdx.x == 0) {
    step.lse[place.slot] = sum > 0 ? (max + log2f(sum)) * kLn2 : -INFINITY;
    step.lane_results[place.slot] = result;
  }
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_MERGE_CUH_
