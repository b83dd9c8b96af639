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
// Thread blocks that a multiprocessor should hold: a batch has more than the device has at once,
// and 256 channels of values need more registers a thread.
template <int kValueDim>
inline constexpr int kMergeBlocks = kValueDim <= 128 ? 4 : 2;
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
  const float* slices = nullptr;  // over a tree: the estimates' states with the slopes' correction

  __device__ __forceinline__ bool tree() const { return slices != nullptr; }
};

__device__ __forceinline__ void AddScaled(float factor, const float4& x, float4* sum) {
  sum->x += factor * x.x;
  sum->y += factor * x.y;
  sum->z += factor * x.z;
  sum->w += factor * x.w;
}

// Values of a lane, a number for each channel: of the zones, of the other states, and what slopes
// add to the estimates.
inline constexpr int kValueKinds = 3;
enum ValueKind { kOfZones, kOfOthers, kOfSlopes };

// Squared lengths: of the answer, of the zones' mean, and of what slopes add to the estimates.
struct SquaredLengths {
  float answer, zones, slopes;
};

template <int kValueDim>
struct MergeLaneMemory {
  float reduce[kMergeWarps];
  SquaredLengths lengths[kMergeWarps];
  float sums[kMergeWarps][kLaneSums];
  float factors[kMergeBatch];
  float values[kValueKinds][kMergeWarps][kValueDim];
};

// The states of one lane of one tile, merged by one thread block. Values are asked for before
// heads: those of a warp's first states wait in registers until their factors are known. Each warp
// takes every kMergeWarps-th state, and the warps' sums are added in their order.
template <int kValueDim>
class LaneMerger {
 public:
  __device__ LaneMerger(const LaneStates& states, MergeLaneMemory<kValueDim>* memory)
      : states_(states.tile + states.lane * (kStateHead + kValueDim)),
        slices_(states.tree() ? states.slices + states.lane * (kStateHead + 2 * kValueDim)
                              : nullptr),
        zones_(states.zones),
        estimates_(states.estimates),
        end_(states.end),
        slices_end_(states.tree() ? states.estimates - states.zones : 0),
        memory_(memory) {}

  // Merges everything; returns what sums and values are relative to, the greatest maximum of the
  // states that hold anything. Thread c < kValueDim gets channel c of the values; all get the sums.
  __device__ float Merge(float (&sums)[kLaneSums], float (&values)[kValueKinds]) const {
    const uint32_t warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    Asked asked;
    AskForValues(warp, &asked);
    const float first_max = MaxOf(threadIdx.x);  // on its way while corrections are added
    float4 fours[kValueKinds][kVectors] = {};
    AddCorrections(fours[kOfSlopes]);
    const float max = Max(first_max);
    float own[kLaneSums] = {};
    for (uint32_t first = 0; first < end_; first += kMergeBatch) {
      const uint32_t last = min(first + kMergeBatch, end_);
      __syncthreads();
      for (uint32_t i = first + threadIdx.x; i < last; i += kMergeThreads) {
        memory_->factors[i - first] = AddHead(i, max, own);
      }
      __syncthreads();
      AddValues(first, last, &asked, fours);
    }
#pragma unroll
    for (int k = 0; k < kLaneSums; ++k) {
      for (int offset = 16; offset > 0; offset /= 2) {
        own[k] += __shfl_xor_sync(~0u, own[k], offset);
      }
      if (thread == 0) memory_->sums[warp][k] = own[k];
    }
#pragma unroll
    for (int kind = 0; kind < kValueKinds; ++kind) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t channel = v * 128 + thread * 4;
        if (channel < kValueDim) {
          *reinterpret_cast<float4*>(&memory_->values[kind][warp][channel]) = fours[kind][v];
        }
      }
    }
    __syncthreads();
    for (int k = 0; k < kLaneSums; ++k) {
      sums[k] = 0;
      for (uint32_t w = 0; w < kMergeWarps; ++w) sums[k] += memory_->sums[w][k];
    }
#pragma unroll
    for (int kind = 0; kind < kValueKinds; ++kind) {
      values[kind] = 0;
      for (uint32_t w = 0; threadIdx.x < kValueDim && w < kMergeWarps; ++w) {
        values[kind] += memory_->values[kind][w][threadIdx.x];
      }
    }
    return max;
  }

 private:
  static constexpr int kVectors = (kValueDim + 127) / 128;  // of four channels, of a thread
  // Of a warp's states, kMergeWarps apart: a thread's channels.
  static constexpr uint32_t kAsked = 4;
  struct Asked {
    float4 of[kAsked][kVectors];
  };

  __device__ __forceinline__ const float* State(uint32_t i) const {
    return states_ + uint64_t{i} * StateFloats(kValueDim);
  }
  // Of states from `first` on, before `end`: values(i) are those of state i. Others are zeros.
  template <typename Values>
  static __device__ __forceinline__ void Ask(uint32_t first, uint32_t end, Values values,
                                             Asked* to) {
#pragma unroll
    for (uint32_t k = 0; k < kAsked; ++k) {
      const uint32_t i = first + k * kMergeWarps;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t channel = v * 128 + threadIdx.x % 32 * 4;
        to->of[k][v] = {};
        if (i >= end || channel >= kValueDim) continue;
        to->of[k][v] = *reinterpret_cast<const float4*>(values(i) + channel);
      }
    }
  }
  __device__ __forceinline__ void AskForValues(uint32_t first, Asked* to) const {
    Ask(
        first, end_, [this](uint32_t i) { return State(i) + kStateHead; }, to);
  }

  // Of state i, if it holds anything.
  __device__ __forceinline__ float MaxOf(uint32_t i) const {
    if (i >= end_) return -INFINITY;
    const float2 head = *reinterpret_cast<const float2*>(State(i));
    return head.y > 0 ? head.x : -INFINITY;
  }
  // The greatest maximum of the states that hold anything. max: that of the thread's first state.
  __device__ __forceinline__ float Max(float max) const {
    for (uint32_t i = threadIdx.x + kMergeThreads; i < end_; i += kMergeThreads) {
      max = fmaxf(max, MaxOf(i));
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

  // States [first, last), whose factors are there. asked: of the warp's first states.
  __device__ __forceinline__ void AddValues(uint32_t first, uint32_t last, Asked* asked,
                                            float4 (&sums)[kValueKinds][kVectors]) const {
    static_assert(kMergeBatch % (kAsked * kMergeWarps) == 0);
    for (uint32_t i = first + threadIdx.x / 32; i < last; i += kAsked * kMergeWarps) {
      if (i >= kMergeWarps) AskForValues(i, asked);
#pragma unroll
      for (uint32_t k = 0; k < kAsked; ++k) {
        const uint32_t state = i + k * kMergeWarps;
        if (state >= last) continue;
        const float factor = memory_->factors[state - first];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (state < zones_) {
            AddScaled(factor, asked->of[k][v], &sums[kOfZones][v]);
          } else {
            AddScaled(factor, asked->of[k][v], &sums[kOfOthers][v]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ void AddCorrections(float4 (&sums)[kVectors]) const {
    const auto corrections = [this](uint32_t s) {
      return slices_ + uint64_t{s} * TreeStateFloats(kValueDim) + kStateHead + kValueDim;
    };
    for (uint32_t s = threadIdx.x / 32; s < slices_end_; s += kAsked * kMergeWarps) {
      Asked asked;
      Ask(s, slices_end_, corrections, &asked);
#pragma unroll
      for (uint32_t k = 0; k < kAsked; ++k) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) AddScaled(1, asked.of[k][v], &sums[v]);
      }
    }
  }

  const float* const states_;
  const float* const slices_;
  const uint32_t zones_, estimates_, end_;
  const uint32_t slices_end_;
  MergeLaneMemory<kValueDim>* const memory_;
};

// Sums of squares over the thread block's threads.
template <uint32_t kWarps>
__device__ __forceinline__ SquaredLengths SquaresOf(float answer, float zones, float slopes,
                                                    SquaredLengths (&memory)[kWarps]) {
  SquaredLengths sum = {answer * answer, zones * zones, slopes * slopes};
  for (int offset = 16; offset > 0; offset /= 2) {
    sum.answer += __shfl_xor_sync(~0u, sum.answer, offset);
    sum.zones += __shfl_xor_sync(~0u, sum.zones, offset);
    sum.slopes += __shfl_xor_sync(~0u, sum.slopes, offset);
  }
  if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = {};
  for (uint32_t w = 0; w < kWarps; ++w) {
    sum.answer += memory[w].answer;
    sum.zones += memory[w].zones;
    sum.slopes += memory[w].slopes;
  }
  return sum;
}

// A lane's values, of thread c < kValueDim those of channel c, and its sums, relative to `max`; but
// errors, moments, drops and what slopes add are relative to the LaneScale's.
struct MergedLane {
  float max;
  float sums[kLaneSums];
  float values[kValueKinds];
  bool tree;
};

// The square of what the estimates err by, not yet relative to the answer.
__device__ __forceinline__ float SquaredError(const MergedLane& lane,
                                              const SquaredLengths& lengths2) {
  using attention::kCoherentShare;
  using attention::kIndependentShare;
  const float(&sums)[kLaneSums] = lane.sums;
  if (!lane.tree) return sums[kErrors];
  const float variance = sums[kEstimated] > 0 ? sums[kLogitVariances] / sums[kEstimated] : 0.0f;
  return kIndependentShare * kIndependentShare *
             (sums[kErrors] + sums[kMassErrors] * lengths2.answer) +
         kCoherentShare * kCoherentShare * lengths2.slopes * variance;
}

// What a lane's sums say of its answer.
__device__ __forceinline__ LaneResult ResultOf(const MergedLane& lane, const LaneScale& scale,
                                               const SquaredLengths& lengths2) {
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
  const float least = LeastNorm(sums[kZones] * exact_factor, lengths2.zones,
                                sums[kMoments] * factor, scale.sum * factor);
  const float norm = fmaxf(sqrtf(lengths2.answer), least);
  const float absolute2 = SquaredError(lane, lengths2);
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

// Writes a lane's answer. scale: of the clusters' weights, null without clusters. memory: shared.
// Whether lse is a number, by thread 0; others get true.
template <int kValueDim, uint32_t kWarps>
__device__ __forceinline__ bool WriteAnswer(const StepHeader& step, const AnswerTo& to,
                                            const LanePlace& place, const MergedLane& lane,
                                            const LaneScale* scale,
                                            SquaredLengths (&memory)[kWarps]) {
  static_assert(kValueDim <= kWarps * 32);
  const float sum = lane.sums[kZones] + lane.sums[kOthers];
  const float value = sum > 0 ? (lane.values[kOfZones] + lane.values[kOfOthers]) / sum : 0.0f;
  if (threadIdx.x < kValueDim) {
    const uint64_t at = place.slot * kValueDim + threadIdx.x;
    StoreOut(step.out_dtype, to.out, at, value);
    if (to.twin_out != nullptr) StoreOut(step.out_dtype, to.twin_out, at, value);
  }
  const float zone_mean = lane.sums[kZones] > 0 ? lane.values[kOfZones] / lane.sums[kZones] : 0.0f;
  const SquaredLengths lengths2 = SquaresOf(value, zone_mean, lane.values[kOfSlopes], memory);
  bool flawless = true;
  if (threadIdx.x == 0) {
    // Values are so bounded that squares of their means are numbers if these are.
    const float of_sum = sum > 0 ? (lane.max + log2f(sum)) * kLn2 : -INFINITY;
    const float lse = lengths2.answer <= FLT_MAX ? of_sum : NAN;
    flawless = fabsf(lse) <= FLT_MAX;
    step.lse[place.slot] = lse;
    if (to.lse != nullptr) to.lse[place.slot] = lse;
    if (to.twin_lse != nullptr) to.twin_lse[place.slot] = lse;
    step.lane_results[place.slot] =
        scale != nullptr && sum > 0 ? ResultOf(lane, *scale, lengths2) : LaneResult{1, 1, 0, 0};
  }
  __syncthreads();
  return flawless;
}

// One thread block answers one query of one head. As WriteAnswer.
template <int kValueDim>
__device__ __forceinline__ bool AnswerLane(const StepHeader& step, const AnswerTo& to,
                                           const LanePlace& place, const LaneStates& states,
                                           const LaneScale* scale,
                                           MergeLaneMemory<kValueDim>* memory) {
  MergedLane lane;
  lane.max = LaneMerger<kValueDim>(states, memory).Merge(lane.sums, lane.values);
  lane.tree = states.tree();
  return WriteAnswer<kValueDim, kMergeWarps>(step, to, place, lane, scale, memory->lengths);
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
      states.slices = step.tree_states + item * TreeStateFloats(kValueDim);
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
__global__ void __launch_bounds__(kMergeThreads, (kMergeBlocks<kValueDim>))
    MergeKernel(const __grid_constant__ StepHeader step) {
  __shared__ __align__(16) MergeLaneMemory<kValueDim> memory;
  const bool flawless =
      AnswerHead<kValueDim>(step, blockIdx.x / step.group, blockIdx.x % step.group, &memory);
  NoteAnswered(step, flawless);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_MERGE_CUH_
