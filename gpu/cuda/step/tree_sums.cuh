// SPDX-License-Identifier: Apache-2.0
//
// The estimate over rows of one segment's tree, for one tile of queries: weights times mean values,
// and the slopes' correction of that sum (docs/POLICIES.md, "Clusters with a regression"). The
// correction is linear in the weighted variances, so that slopes are read once for all rows.
#ifndef ATTND_GPU_CUDA_STEP_TREE_SUMS_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_SUMS_CUH_

#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/tree_block.cuh"

namespace attnd::gpu {

// A warp's sums, spread over its threads: those without [4] are of lane g, partial over t; the
// channels of the others are in the order of SumOrder.
template <int kDim, int kValueDim>
struct TreeSums {
  float max = -INFINITY;
  float sum = 0;
  float moments = 0;
  float errors = 0;       // squared errors of values
  float mass_errors = 0;  // of masses
  float logit_variances = 0;
  float values[kValueDim / 16][4] = {};
  float variances[kDim / 16][4] = {};  // of the weights, along the axes
};

template <int kRows>
__device__ __forceinline__ void ScaleLanes(float factor, float (&values)[kRows][4]) {
  const uint32_t t = threadIdx.x % 4;
  const float even = __shfl_sync(~0u, factor, 8 * t), odd = __shfl_sync(~0u, factor, 8 * t + 4);
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    values[m][0] *= even;
    values[m][1] *= odd;
    values[m][2] *= even;
    values[m][3] *= odd;
  }
}

// Makes the sums relative to a maximum that is not below `greatest` by much.
template <int kDim, int kValueDim>
__device__ __forceinline__ void RaiseMax(float greatest, TreeSums<kDim, kValueDim>* sums) {
  greatest = MaxOverT(greatest);
  if (!__any_sync(~0u, greatest > sums->max + kLagLog2)) return;
  const float max = fmaxf(sums->max, greatest);
  const float factor = Weight(sums->max, max);
  sums->max = max;
  sums->sum *= factor;
  sums->moments *= factor;
  ScaleLanes(factor, sums->values);
  ScaleLanes(factor, sums->variances);
}

// What estimates of 16 rows of a part are made of.
template <int kDim, int kValueDim>
struct EstimateRows {
  ByteRows<kValueDim> values;
  CodeRows<kDim> codes;
  TreeNumbers scales, units;

  __device__ __forceinline__ EstimateRows(const std::byte* head, const TreePart& part,
                                          const uint32_t (&rows)[2][2])
      : values(head + part.mean_values, rows),
        codes(head + part.deviation_codes, rows),
        scales(TreeNumbers::Load(head + part.mean_value_scales, rows)),
        units(TreeNumbers::Load(head + part.variance_unit, rows)) {}
};

// Adds 16 rows with these weights; d2: of the rows.
template <int kDim, int kValueDim>
__device__ __forceinline__ void AddTreeEstimates(const EstimateRows<kDim, kValueDim>& rows,
                                                 const float (&weight)[2][2],
                                                 const float (&d2)[2][2],
                                                 TreeSums<kDim, kValueDim>* sums) {
  float of_values[2][2], of_variances[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float p = weight[n][c];
      sums->sum += p;
      of_values[n][c] = p * rows.scales.x[n][c];
      const float share = __fdividef(kVarianceCap, fmaxf(d2[n][c], kVarianceCap));
      of_variances[n][c] = p * rows.units.x[n][c] * share;
    }
  }
  rows.values.AddTo(of_values, sums->values);
  rows.codes.AddTo(of_variances, sums->variances);
}

// Where warps' sums meet.
template <int kDim, int kValueDim>
struct TreeMergeMemory {
  float heads[kTreeWarps][kLanes][kStateHead];  // TreeHead
  float factors[kTreeWarps][kLanes];            // to the greatest maximum
  float values[kTreeWarps][kLanes][kValueDim + 4];
  float variances[kTreeWarps][kLanes][kDim + 4];
};
template <int kDim, int kValueDim>
inline constexpr uint32_t kTreeSharedBytes = sizeof(TreeMergeMemory<kDim, kValueDim>);

// Heads of a tree item's state and of its leaves' partial sums.
enum TreeHead {
  kTreeMax,
  kTreeSum,
  kTreeMoments,
  kTreeBestMax,
  kTreeBestSum,
  kTreeErrors,
  kTreeMassErrors,
  kTreeLogitVariances
};

// Adds a state's maximum and sum to others.
__device__ __forceinline__ void AddState(float max, float sum, float* max_of_all,
                                         float* sum_of_all) {
  if (!(sum > 0)) return;
  const float greater = fmaxf(*max_of_all, max);
  *sum_of_all = *sum_of_all * Weight(*max_of_all, greater) + sum * Weight(max, greater);
  *max_of_all = greater;
}

// The same over a warp's threads.
__device__ __forceinline__ void JoinStates(float* max, float* sum) {
  const float greatest = MaxOverWarp(*max);
  *sum = SumOfWarp(*sum * Weight(*max, greatest));
  *max = greatest;
}

// What some heads (TreeHead) come to, over a warp.
struct SumsOfHeads {
  float max = -INFINITY, sum = 0, moments = 0, best_max = -INFINITY, best_sum = 0;

  __device__ __forceinline__ void Add(const float* head) {
    const float before = max;
    AddState(head[kTreeMax], head[kTreeSum], &max, &sum);
    moments = moments * Weight(before, max) + head[kTreeMoments] * Weight(head[kTreeMax], max);
    AddState(head[kTreeBestMax], head[kTreeBestSum], &best_max, &best_sum);
  }
  __device__ __forceinline__ void Join() {
    const float before = max;
    JoinStates(&max, &sum);
    moments = SumOfWarp(moments * Weight(before, max));
    JoinStates(&best_max, &best_sum);
  }
};

// The thread block's sums of an item, in the order of its warps.
template <int kDim, int kValueDim>
class TreeFinisher {
 public:
  using Memory = TreeMergeMemory<kDim, kValueDim>;
  using Sums = TreeSums<kDim, kValueDim>;
  static constexpr uint32_t kLaneFloats = kStateHead + 2 * kValueDim;

  // state: of the item, in StepHeader::tree_states.
  __device__ TreeFinisher(const TreeItem& item, uint32_t lanes, float* state,
                          TreeBlock<kDim>* block)
      : item_(item), lanes_(lanes), state_(state), block_(block) {}

  // Writes the state: head, values with their base, the slopes' correction. best: this thread's
  // share of another sum of masses.
  __device__ void Run(Sums* sums, Totals best) {
    auto* memory = reinterpret_cast<Memory*>(block_memory);
    const uint32_t warp = threadIdx.x / 32;
    best.Join();
    StoreHead(*sums, best, memory);
    StoreSums<kValueDim>(sums->values, memory->values[warp]);
    StoreSums<kDim / 2>(sums->variances, memory->variances[warp]);
    const HalfRows<kValueDim> slopes(SlopesOf(warp));  // on their way while heads are merged
    __syncthreads();
    SetFactors(memory);
    __syncthreads();
    MergeHeads(*memory);
    MergeValues(*memory);
    MergeVariances(*memory);
    __syncthreads();
    MultiplySlopes(slopes, sums->values);
    StoreSums<kValueDim>(sums->values, memory->values[warp]);
    __syncthreads();
    AddCorrections(*memory);
  }

 private:
  __device__ __forceinline__ void StoreHead(const Sums& sums, const Totals& best, Memory* memory) {
    const float sum = SumOverT(sums.sum), moments = SumOverT(sums.moments);
    const float errors = SumOverT(sums.errors), mass_errors = SumOverT(sums.mass_errors);
    const float logit_variances = SumOverT(sums.logit_variances);
    if (threadIdx.x % 4 != 0) return;
    float* head = memory->heads[threadIdx.x / 32][threadIdx.x % 32 / 4];
    head[kTreeMax] = sums.max;
    head[kTreeSum] = sum;
    head[kTreeMoments] = moments;
    head[kTreeBestMax] = best.max;
    head[kTreeBestSum] = best.sum;
    head[kTreeErrors] = errors;
    head[kTreeMassErrors] = mass_errors;
    head[kTreeLogitVariances] = logit_variances;
  }

  static __device__ __forceinline__ float MaxOf(const Memory& memory, uint32_t lane, int kind) {
    float max = -INFINITY;
    for (uint32_t w = 0; w < kTreeWarps; ++w) max = fmaxf(max, memory.heads[w][lane][kind]);
    return max;
  }

  static __device__ __forceinline__ void SetFactors(Memory* memory) {
    if (threadIdx.x >= kTreeWarps * kLanes) return;
    const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    memory->factors[warp][lane] =
        Weight(memory->heads[warp][lane][kTreeMax], MaxOf(*memory, lane, kTreeMax));
  }

  __device__ __forceinline__ void MergeHeads(const Memory& memory) {
    if (threadIdx.x >= lanes_) return;
    const uint32_t lane = threadIdx.x;
    const float max = MaxOf(memory, lane, kTreeMax), best = MaxOf(memory, lane, kTreeBestMax);
    float head[kStateHead] = {};
    for (uint32_t w = 0; w < kTreeWarps; ++w) {
      const float* own = memory.heads[w][lane];
      const float factor = memory.factors[w][lane];
      head[kTreeSum] += factor * own[kTreeSum];
      head[kTreeMoments] += factor * own[kTreeMoments];
      head[kTreeBestSum] += Weight(own[kTreeBestMax], best) * own[kTreeBestSum];
      head[kTreeErrors] += own[kTreeErrors];
      head[kTreeMassErrors] += own[kTreeMassErrors];
      head[kTreeLogitVariances] += own[kTreeLogitVariances];
    }
    head[kTreeMax] = max;
    head[kTreeBestMax] = best;
#pragma unroll
    for (uint32_t i = 0; i < kStateHead; ++i) state_[lane * kLaneFloats + i] = head[i];
  }

  __device__ __forceinline__ void MergeValues(const Memory& memory) {
    const float* base = item_.Floats(item_.tree->offsets.value_base);
    for (uint32_t i = threadIdx.x; i < lanes_ * kValueDim; i += kTreeThreads) {
      const uint32_t lane = i / kValueDim, channel = i % kValueDim;
      float value = 0, sum = 0;
      for (uint32_t w = 0; w < kTreeWarps; ++w) {
        const float factor = memory.factors[w][lane];
        value += factor * memory.values[w][lane][channel];
        sum += factor * memory.heads[w][lane][kTreeSum];
      }
      Value(lane, channel) = value + sum * __ldg(base + channel);
    }
  }

  // What the slopes are multiplied by: the query times the weighted variance, along each axis.
  __device__ __forceinline__ void MergeVariances(const Memory& memory) {
    for (uint32_t i = threadIdx.x; i < kLanes * kDim; i += kTreeThreads) {
      const uint32_t lane = i / kDim, axis = i % kDim;
      float variance = 0;
      for (uint32_t w = 0; lane < lanes_ && w < kTreeWarps; ++w) {
        variance += memory.factors[w][lane] * memory.variances[w][lane][axis];
      }
      block_->vectors[lane][axis] = variance * block_->q.rotated[lane][axis];
    }
  }

  // The slopes of the sixteen axes of a share; of the last one's, if there are no more.
  __device__ __forceinline__ const std::byte* SlopesOf(uint32_t share) const {
    const uint32_t axis = min(share, kDim / 16u - 1) * 16;
    return item_.head + item_.tree->offsets.slopes + uint64_t{axis} * kValueDim * 2;
  }
  // Each warp takes shares of sixteen axes.
  __device__ __forceinline__ void MultiplySlopes(const HalfRows<kValueDim>& first,
                                                 float (&sum)[kValueDim / 16][4]) {
    const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < kValueDim / 16; ++m) sum[m][0] = sum[m][1] = sum[m][2] = sum[m][3] = 0;
    const auto add = [&](uint32_t share, const HalfRows<kValueDim>& slopes) {
      float weight[2][2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          weight[n][c] = block_->vectors[g][share * 16 + n * 8 + 2 * t + c];
        }
      }
      slopes.AddTo(weight, sum);
    };
    if (warp < kDim / 16) add(warp, first);
#pragma unroll 1
    for (uint32_t share = warp + kTreeWarps; share < kDim / 16; share += kTreeWarps) {
      add(share, HalfRows<kValueDim>(SlopesOf(share)));
    }
  }

  __device__ __forceinline__ void AddCorrections(const Memory& memory) {
    for (uint32_t i = threadIdx.x; i < lanes_ * kValueDim; i += kTreeThreads) {
      const uint32_t lane = i / kValueDim, channel = i % kValueDim;
      float correction = 0;
      for (uint32_t w = 0; w < kTreeWarps; ++w) correction += memory.values[w][lane][channel];
      Correction(lane, channel) = correction;
    }
  }

  __device__ __forceinline__ float& Value(uint32_t lane, uint32_t channel) {
    return state_[lane * kLaneFloats + kStateHead + channel];
  }
  __device__ __forceinline__ float& Correction(uint32_t lane, uint32_t channel) {
    return Value(lane, kValueDim + channel);
  }

  const TreeItem& item_;
  const uint32_t lanes_;
  float* const state_;
  TreeBlock<kDim>* const block_;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_SUMS_CUH_
