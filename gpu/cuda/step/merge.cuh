// SPDX-License-Identifier: Apache-2.0
//
// The merge stage: a lane's states, its output, and what the answer was made of. States are added
// in an order that their number alone decides.
#ifndef ATTND_GPU_CUDA_STEP_MERGE_CUH_
#define ATTND_GPU_CUDA_STEP_MERGE_CUH_

#include <cfloat>
#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/answered.cuh"
#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/layout/kernel_shapes.h"

namespace attnd::gpu {

inline constexpr uint32_t kMergeWarps = 8;
inline constexpr uint32_t kMergeThreads = kMergeWarps * 32;
// States whose factors lie in shared memory at a time.
inline constexpr uint32_t kMergeBatch = 512;

// The floor under an output's norm; sums are relative to one scale: zones by their sum and the
// squared norm of their mean, clusters by the second moments and the sum of their estimates.
__device__ __forceinline__ float LeastNorm(float zone_sum, float zone_norm2, float moments,
                                           float cluster_sum) {
  const float total = zone_sum + cluster_sum;
  const float moment = moments / total + zone_sum / total * zone_norm2;
  return fmaxf(attention::kLeastNormShare * sqrtf(moment), FLT_MIN);
}

// What some states of a lane come to, as a vector for one reduction (MergedLane says what they are
// relative to). sums: of the zones, of the other states, and of estimate pieces only: sum, errors,
// moments, drops, errors of masses, variances of logits.
inline constexpr int kLaneSums = 8;
enum LaneSum {
  kZones,
  kOthers,
  kEstimated,
  kErrors,
  kMoments,
  kDropped,
  kMassErrors,
  kLogitVariances
};

// A lane's states: zones first, then estimates, then chosen tokens; where each kind of them ends.
struct LaneStates {
  const float* tile;
  uint32_t lane;  // of the tile
  uint32_t zones, estimates, end;
  const float* corrections = nullptr;  // of the tile over a tree: in the first slice's state
};

template <int kValueDim>
struct MergeLaneMemory {
  float reduce[kMergeWarps];
  float2 norms[kMergeWarps];
  float sums[kMergeWarps][kLaneSums];
  float factors[kMergeBatch];
  float values[2][kMergeWarps][kValueDim];  // of the zones, of the other states
};

// The states of one lane of one tile, merged by one thread block. Heads are read first, so that the
// values' loads wait for nothing; each warp takes every kMergeWarps-th state, and the warps' sums
// are added in their order.
template <int kValueDim>
class LaneMerger {
 public:
  static constexpr int kVectors = (kValueDim + 127) / 128;  // of 4 channels, of a thread

  __device__ LaneMerger(const LaneStates& states, MergeLaneMemory<kValueDim>* memory)
      : states_(states.tile + states.lane * (kStateHead + kValueDim)),
        zones_(states.zones),
        estimates_(states.estimates),
        end_(states.end),
        memory_(memory) {}

  // The greatest maximum of the states that hold anything.
  __device__ float Max() const {
    float max = -INFINITY;
    for (uint32_t i = threadIdx.x; i < end_; i += kMergeThreads) {
      const float2 head = *reinterpret_cast<const float2*>(State(i));
      if (head.y > 0) max = fmaxf(max, head.x);
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      max = fmaxf(max, __shfl_xor_sync(~0u, max, offset));
    }
    if (threadIdx.x % 32 == 0) memory_->reduce[threadIdx.x / 32] = max;
    __syncthreads();
    max = memory_->reduce[0];
    for (uint32_t w = 1; w < kMergeWarps; ++w) max = fmaxf(max, memory_->reduce[w]);
    return max;
  }

  // Merges everything, relative to `max`. Thread c < kValueDim gets channel c of both values; all
  // get the sums.
  __device__ void Merge(float max, float (&sums)[kLaneSums], float* zone_value,
                        float* other_value) const {
    const uint32_t warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    float own[kLaneSums] = {};
    float4 values[2][kVectors] = {};
    for (uint32_t first = 0; first < end_; first += kMergeBatch) {
      const uint32_t last = min(first + kMergeBatch, end_);
      __syncthreads();
      for (uint32_t i = first + threadIdx.x; i < last; i += kMergeThreads) {
        memory_->factors[i - first] = AddHead(i, max, own);
      }
      __syncthreads();
      AddValues(first, min(last, zones_), first, values[0]);
      AddValues(::max(first, zones_), last, first, values[1]);
    }
#pragma unroll
    for (int k = 0; k < kLaneSums; ++k) {
      for (int offset = 16; offset > 0; offset /= 2) {
        own[k] += __shfl_xor_sync(~0u, own[k], offset);
      }
      if (thread == 0) memory_->sums[warp][k] = own[k];
    }
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t channel = v * 128 + thread * 4;
        if (channel < kValueDim) {
          *reinterpret_cast<float4*>(&memory_->values[kind][warp][channel]) = values[kind][v];
        }
      }
    }
    __syncthreads();
    for (int k = 0; k < kLaneSums; ++k) {
      sums[k] = 0;
      for (uint32_t w = 0; w < kMergeWarps; ++w) sums[k] += memory_->sums[w][k];
    }
    *zone_value = *other_value = 0;
    if (threadIdx.x >= kValueDim) return;
    for (uint32_t w = 0; w < kMergeWarps; ++w) {
      *zone_value += memory_->values[0][w][threadIdx.x];
      *other_value += memory_->values[1][w][threadIdx.x];
    }
  }

 private:
  __device__ __forceinline__ const float* State(uint32_t i) const {
    return states_ + uint64_t{i} * StateFloats(kValueDim);
  }

  // Adds state i's sums; returns the factor of its values.
  __device__ __forceinline__ float AddHead(uint32_t i, float max, float (&own)[kLaneSums]) const {
    const float4 head = *reinterpret_cast<const float4*>(State(i));
    const float factor = head.y > 0 ? Exp2(head.x - max) : 0.0f;
    own[kZones] += i < zones_ ? factor * head.y : 0.0f;
    own[kOthers] += i < zones_ ? 0.0f : factor * head.y;
    if (i >= zones_ && i < estimates_) {
      own[kEstimated] += factor * head.y;
      own[kErrors] += head.z;
      own[kMoments] += head.w;
      own[kDropped] += State(i)[kHeadDropped];
      own[kMassErrors] += State(i)[kHeadMassErrors];
      own[kLogitVariances] += factor * State(i)[kHeadLogitVariances];
    }
    return factor;
  }

  __device__ __forceinline__ void AddValues(uint32_t begin, uint32_t end, uint32_t first,
                                            float4 (&values)[kVectors]) const {
    const uint32_t thread = threadIdx.x % 32;
#pragma unroll 4
    for (uint32_t i = begin + threadIdx.x / 32; i < end; i += kMergeWarps) {
      const float factor = memory_->factors[i - first];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t channel = v * 128 + thread * 4;
        if (channel >= kValueDim) continue;
        const float4 x = *reinterpret_cast<const float4*>(State(i) + kStateHead + channel);
        values[v].x += factor * x.x;
        values[v].y += factor * x.y;
        values[v].z += factor * x.z;
        values[v].w += factor * x.w;
      }
    }
  }

  const float* const states_;
  const uint32_t zones_;
  const uint32_t estimates_;
  const uint32_t end_;
  MergeLaneMemory<kValueDim>* const memory_;
};

// Sums of the squares of two numbers over the thread block's threads.
template <uint32_t kWarps>
__device__ __forceinline__ float2 SquaredNorms(float x, float y, float2 (&memory)[kWarps]) {
  float2 sum = make_float2(x * x, y * y);
  for (int offset = 16; offset > 0; offset /= 2) {
    sum.x += __shfl_xor_sync(~0u, sum.x, offset);
    sum.y += __shfl_xor_sync(~0u, sum.y, offset);
  }
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = make_float2(0, 0);
  for (uint32_t w = 0; w < kWarps; ++w) sum.x += memory[w].x, sum.y += memory[w].y;
  return sum;
}

// A lane's values, of thread c < kValueDim those of channel c, and its sums, relative to `max`; but
// errors, moments, drops and the slopes' correction are relative to the LaneScale's.
struct MergedLane {
  float max;
  float sums[kLaneSums];
  float zone_value, other_value;
  bool tree;
  float correction2;  // over trees: squared length of what slopes add to the estimates, of all
                      // threads
};

// The square of what the estimates err by, not yet relative to the answer, whose squared norm is
// given.
__device__ __forceinline__ float SquaredError(const MergedLane& lane, float norm2) {
  using attention::kCoherentShare;
  using attention::kIndependentShare;
  const float(&sums)[kLaneSums] = lane.sums;
  if (!lane.tree) return sums[kErrors];
  const float variance = sums[kEstimated] > 0 ? sums[kLogitVariances] / sums[kEstimated] : 0.0f;
  return kIndependentShare * kIndependentShare * (sums[kErrors] + sums[kMassErrors] * norm2) +
         kCoherentShare * kCoherentShare * lane.correction2 * variance;
}

// What a lane's sums say of its answer. norms2: of the answer, and of the zones' mean.
__device__ __forceinline__ LaneResult ResultOf(const MergedLane& lane, const LaneScale& scale,
                                               float2 norms2) {
  const float(&sums)[kLaneSums] = lane.sums;
  const float max = lane.max;
  const float sum = sums[kZones] + sums[kOthers];
  // A scale that clusters read exactly share: their estimates may lie far above what they are.
  const float shared = fmaxf(max, scale.max);
  const float exact_factor = Exp2(max - shared), factor = Exp2(scale.max - shared);
  LaneResult result = {};
  result.covered_mass = result.exact_mass = 1;
  // Only what was dropped counts by that scale, beside which all that was read may be nothing.
  const float dropped = sums[kDropped] * factor;
  if (dropped > 0) result.covered_mass = sum * exact_factor / (sum * exact_factor + dropped);
  if (sum > 0) {
    result.exact_mass = fmaxf(0.0f, sum - sums[kEstimated]) / sum * result.covered_mass;
    // Of what is estimated; if something is, scale.max is at most max.
    const float missed = scale.missed > 0 ? scale.missed * Exp2(scale.max - max) : 0.0f;
    result.missed_mass = missed / sum * result.covered_mass;
  }
  const float least =
      LeastNorm(sums[kZones] * exact_factor, norms2.y, sums[kMoments] * factor, scale.sum * factor);
  const float norm = fmaxf(sqrtf(norms2.x), least);
  const float absolute2 = SquaredError(lane, norms2.x);
  if (absolute2 > 0) {
    result.predicted_error = sqrtf(absolute2) * Exp2(scale.max - max) / sum / norm;
  }
  return result;
}

// Where out goes, and further ones of out and lse (AnswerPlaces). Looked up when a kernel begins:
// nobody waits for it then.
struct AnswerTo {
  std::byte* out;
  float* lse;
  std::byte* twin_out;
  float* twin_lse;

  __device__ explicit AnswerTo(const StepHeader& step)
      : out(step.answer->out),
        lse(step.answer->lse),
        twin_out(step.answer->twin_out),
        twin_lse(step.answer->twin_lse) {}
};

// Writes number `at` of out, rounded to nearest, ties to even.
__device__ __forceinline__ void StoreOut(uint32_t dtype, std::byte* out, uint64_t at, float value) {
  switch (dtype) {
    case static_cast<uint32_t>(DType::kBf16):
      reinterpret_cast<__nv_bfloat16*>(out)[at] = Element<__nv_bfloat16>::Pack(value, value).x;
      return;
    case static_cast<uint32_t>(DType::kFp16):
      reinterpret_cast<__half*>(out)[at] = Element<__half>::Pack(value, value).x;
      return;
    default:
      reinterpret_cast<float*>(out)[at] = value;
  }
}

// Writes a lane's answer. scale: of the clusters' weights, null without clusters. norms: shared.
// Whether lse is a number, by thread 0; others get true.
template <int kValueDim, uint32_t kWarps>
__device__ __forceinline__ bool WriteAnswer(const StepHeader& step, const AnswerTo& to,
                                            const LanePlace& place, const MergedLane& lane,
                                            const LaneScale* scale, float2 (&norms)[kWarps]) {
  static_assert(kValueDim <= kWarps * 32);
  const float sum = lane.sums[kZones] + lane.sums[kOthers];
  const float value = sum > 0 ? (lane.zone_value + lane.other_value) / sum : 0.0f;
  if (threadIdx.x < kValueDim) {
    const uint64_t at = place.slot * kValueDim + threadIdx.x;
    StoreOut(step.out_dtype, to.out, at, value);
    if (to.twin_out != nullptr) StoreOut(step.out_dtype, to.twin_out, at, value);
  }
  const float zone_mean = lane.sums[kZones] > 0 ? lane.zone_value / lane.sums[kZones] : 0.0f;
  const float2 norms2 = SquaredNorms(value, zone_mean, norms);
  bool flawless = true;
  if (threadIdx.x == 0) {
    // Values are so bounded that squares of their means are numbers if these are.
    const float of_sum = sum > 0 ? (lane.max + log2f(sum)) * kLn2 : -INFINITY;
    const float lse = norms2.x <= FLT_MAX ? of_sum : NAN;
    flawless = fabsf(lse) <= FLT_MAX;
    step.lse[place.slot] = lse;
    if (to.lse != nullptr) to.lse[place.slot] = lse;
    if (to.twin_lse != nullptr) to.twin_lse[place.slot] = lse;
    step.lane_results[place.slot] =
        scale != nullptr && sum > 0 ? ResultOf(lane, *scale, norms2) : LaneResult{1, 1, 0, 0};
  }
  __syncthreads();
  return flawless;
}

// The squared length of the slopes' correction, which all slices' estimates make together.
template <int kValueDim>
__device__ __forceinline__ float Correction2(const LaneStates& states,
                                             MergeLaneMemory<kValueDim>* memory) {
  if (states.corrections == nullptr) return 0;
  const float* lane = states.corrections + states.lane * (kStateHead + 2 * kValueDim) + kStateHead +
                      kValueDim + threadIdx.x;
  float correction = 0;
  for (uint32_t s = 0; threadIdx.x < kValueDim && s < states.estimates - states.zones; ++s) {
    correction += lane[uint64_t{s} * TreeStateFloats(kValueDim)];
  }
  const float2 norms2 = SquaredNorms(correction, 0, memory->norms);
  __syncthreads();  // whoever uses that memory next
  return norms2.x;
}

// One thread block answers one query of one head. As WriteAnswer.
template <int kValueDim>
__device__ __forceinline__ bool AnswerLane(const StepHeader& step, const AnswerTo& to,
                                           const LanePlace& place, const LaneStates& states,
                                           const LaneScale* scale,
                                           MergeLaneMemory<kValueDim>* memory) {
  const LaneMerger<kValueDim> merger(states, memory);
  MergedLane lane;
  lane.max = merger.Max();
  merger.Merge(lane.max, lane.sums, &lane.zone_value, &lane.other_value);
  lane.tree = states.corrections != nullptr;
  lane.correction2 = Correction2<kValueDim>(states, memory);
  return WriteAnswer<kValueDim, kMergeWarps>(step, to, place, lane, scale, memory->norms);
}

// ---- kernels ----

// What the unit's selection came to, now that it stands.
__device__ __forceinline__ void StoreLastResult(const StepHeader& step, uint32_t unit) {
  constexpr uint32_t kWords = sizeof(UnitResult) / sizeof(uint4);
  if (threadIdx.x >= kWords) return;
  reinterpret_cast<uint4*>(step.last_results + unit)[threadIdx.x] =
      reinterpret_cast<const uint4*>(step.unit_results + unit)[threadIdx.x];
}

// A query head's query tokens, by one thread block. As WriteAnswer, of all of them.
template <int kValueDim>
__device__ __forceinline__ bool AnswerHead(const StepHeader& step, uint32_t unit_number,
                                           uint32_t head, MergeLaneMemory<kValueDim>* memory) {
  const AnswerTo to(step);
  const RowRef* row = RowOfUnit(step, unit_number);
  bool flawless = true;
  WaitForKernelBefore();  // which leaves states; places are of the input
  if (row->coop_blocks != 0) return flawless;
  const UnitPlace unit(step, row, unit_number - row->first_unit);
  const bool clusters = ReadsClusters(*row);
  const uint32_t pairs = unit.tokens * step.group;
  for (uint32_t i = head; i < pairs; i += step.group) {
    const uint32_t tile = i / kLanes, lane = i % kLanes;
    LaneStates states;
    states.tile = TileStates(step, unit, tile, StateFloats(kValueDim));
    states.lane = lane;
    states.zones = row->read_pieces;
    states.estimates = states.zones + row->estimate_pieces;
    states.end = states.estimates;
    if (row->kind == UnitKind::kTree) {
      const uint64_t item =
          row->first_tree_item + (uint64_t{unit.in_row} * step.tiles_max + tile) * row->tree_slices;
      states.corrections = step.tree_states + item * TreeStateFloats(kValueDim);
    }
    LaneScale scale;
    if (clusters) {
      states.end += step.unit_results[unit.unit].chosen_pieces;
      scale = step.lane_scales[(uint64_t{unit.unit} * step.tiles_max + tile) * kLanes + lane];
    }
    flawless &= AnswerLane<kValueDim>(step, to, LanePlace(step, unit, tile, lane), states,
                                      clusters ? &scale : nullptr, memory);
  }
  if (clusters && head == 0) StoreLastResult(step, unit_number);
  return flawless;
}

// Thread block (unit, query head).
template <int kValueDim>
__global__ void __launch_bounds__(kMergeThreads)
    MergeKernel(const __grid_constant__ StepHeader step) {
  __shared__ __align__(16) MergeLaneMemory<kValueDim> memory;
  const bool flawless =
      AnswerHead<kValueDim>(step, blockIdx.x / step.group, blockIdx.x % step.group, &memory);
  NoteAnswered(step, flawless);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_MERGE_CUH_
