// SPDX-License-Identifier: Apache-2.0
//
// What of a unit's tree is opened, and what is read exactly (docs/POLICIES.md, "error-target"). A
// cut needs all of the unit's scores, so the thread blocks of one thread block cluster work on it:
// each ranks a range of its rows.
#ifndef ATTND_GPU_CUDA_STEP_TREE_SELECTOR_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_SELECTOR_CUH_

#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/merge.cuh"
#include "gpu/cuda/step/tree_block.cuh"
#include "gpu/cuda/step/tree_cut.cuh"
#include "gpu/cuda/step/tree_sums.cuh"
#include "gpu/cuda/step/unit_selector.cuh"

namespace attnd::gpu {

// Rows of a thread block whose ranking lies in shared memory: seven have the leaves of 128K tokens,
// and two thread blocks fit on a multiprocessor.
inline constexpr uint32_t kRankedRows = 3072;

// A unit's rows of one level, and of these the thread block's own, [begin, begin + own): what is
// ranked. Keys and errors are those of its own rows.
struct TreeLevel {
  uint32_t count;
  uint32_t begin, own;
  uint32_t stride;  // of lanes
  const float* log_mass;
  const float* d2;
  const TreeRowInfo* info;
  uint32_t* best_keys;
  uint32_t* error_keys;
  float* errors;
  float optimism;
};

// For each lane, of one level's rows.
struct TreeLaneScale {
  float max;         // of the logarithms of mass
  float best_max;    // of the optimistic ones
  float best_share;  // what a weight to that maximum counts in the mean over the group
  float error_unit;  // makes a weight a share of the output's mass over the output's length
  float mass_unit;   // a share of the mass
  float mass_share2;
};

// A warp's channels of an output.
inline constexpr uint32_t kOutputChannels = 32;
inline constexpr uint32_t kOutputChunksMax = 8;  // of a lane

struct TreeSelectMemory {
  CutMemory cut;
  uint32_t best_keys[kRankedRows];
  uint32_t error_keys[kRankedRows];
  float errors[kRankedRows];
  TreeLane lanes[kTreeLanesMax];
  TreeLaneScale scales[kTreeLanesMax];
  float4 sums[kTreeLanesMax];    // max and sum of masses, max and sum of optimistic masses
  float moments[kTreeLanesMax];  // second moments of values, by mass
  float outputs[kCutWarps][2][kOutputChannels];  // parts of sums: of zones, of groups
  // Squared lengths of an output's channels (low half) and of the zones' mean.
  CutWeight norms[kTreeLanesMax * kOutputChunksMax];
  uint32_t first_piece;
};

class TreeSelector {
 public:
  __device__ TreeSelector(const StepHeader& step, const UnitPlace& unit, TreeSelectMemory* memory)
      : step_(step),
        unit_(unit),
        row_(*unit.row),
        memory_(memory),
        exchange_(&memory->cut),
        places_(TreeScoresOf(row_, step.group)),
        scores_(UnitScores(step, unit)),
        fates_(UnitFates(step, unit)),
        words_(UnitTreeWords(step, unit)) {}

  // The open stage.
  __device__ void Open();
  // The choose stage.
  __device__ void Choose();

 private:
  __device__ __forceinline__ uint32_t* first_items() const { return words_ + kTreeLaneWords; }
  __device__ __forceinline__ uint32_t* items() const { return words_ + TreeItems(row_); }
  __device__ __forceinline__ const TreeRef& Tree(uint32_t segment) const {
    return step_.trees[row_.trees_begin + segment];
  }
  __device__ __forceinline__ const std::byte* HeadOf(uint32_t segment) const {
    const SegmentRef& ref = step_.segments[row_.segments_begin + segment];
    return ref.index + unit_.kv_head * ref.index_head_bytes;
  }
  __device__ __forceinline__ uint32_t SegmentOfGroup(uint32_t slot) const {
    return LastNotAfter(row_.segment_count, slot,
                        [&](uint32_t s) { return Tree(s).first_group_slot; });
  }
  __device__ __forceinline__ uint8_t& GroupFate(uint32_t slot) const {
    return fates_[row_.slots + slot];
  }
  __device__ __forceinline__ uint8_t& LeafFate(uint32_t item) const { return fates_[item]; }
  __device__ __forceinline__ uint64_t ItemNumber(uint32_t tile, uint32_t slice) const {
    return row_.first_tree_item +
           (uint64_t{unit_.in_row} * row_.tiles_per_unit + tile) * row_.tree_slices + slice;
  }
  // What the groups stage left of a slice.
  __device__ __forceinline__ const float* StateOfGroups(uint32_t tile, uint32_t slice) const {
    return step_.tree_states + ItemNumber(tile, slice) * TreeStateFloats(step_.value_dim);
  }
  __device__ TreeLevel Groups() const;
  __device__ TreeLevel Leaves() const;
  __device__ __forceinline__ bool limited() const { return row_.tolerance < INFINITY; }

  __device__ void CombineStates();
  __device__ void CombinePartials();
  __device__ void MeasureOutputs();
  __device__ CutWeight OutputPart(uint32_t lane, uint32_t chunk);
  __device__ void SetScales();

  __device__ TreeLevel LevelOf(const TreeLevelScores& places, uint32_t count, uint32_t stride,
                               float optimism) const;
  __device__ void Rank(const TreeLevel& level);
  __device__ float2 ScoreOf(const TreeLevel& level, uint32_t i, const TreeRowInfo& info) const;
  template <typename FateOf, typename SizeOf>
  __device__ uint32_t Mark(const TreeLevel& level, uint32_t wanted, double tolerance,
                           CutWeight spent, FateOf fate_of, SizeOf size_of);
  template <typename Put>
  __device__ uint32_t List(const TreeLevel& level, uint32_t size, Put put);
  __device__ uint32_t OwnCounts(bool groups) const;
  __device__ uint32_t SumOfBlock(uint32_t x);
  __device__ void NumberItems(const TreeLevel& level, uint32_t leaves);
  __device__ CutWeight ClosedErrors();
  __device__ uint32_t ListTokens(const TreeLevel& level, uint32_t tokens);

  const StepHeader& step_;
  const UnitPlace& unit_;
  const RowRef& row_;
  TreeSelectMemory* const memory_;
  CutExchange exchange_;
  const TreeScores places_;
  float* const scores_;
  uint8_t* const fates_;
  uint32_t* const words_;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_SELECTOR_CUH_
