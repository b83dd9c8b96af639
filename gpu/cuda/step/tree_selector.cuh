// SPDX-License-Identifier: Apache-2.0
//
// What of a unit's tree is opened, and what is read exactly (docs/POLICIES.md, "error-target"): one
// thread block works on one unit, as a cut needs all of the unit's scores.
#ifndef ATTND_GPU_CUDA_STEP_TREE_SELECTOR_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_SELECTOR_CUH_

#include <cfloat>
#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/merge.cuh"
#include "gpu/cuda/step/tree_block.cuh"
#include "gpu/cuda/step/tree_cut.cuh"
#include "gpu/cuda/step/tree_sums.cuh"
#include "gpu/cuda/step/unit_selector.cuh"

namespace attnd::gpu {

// A row of a tree's part: a group or a leaf.
struct TreeRow {
  const std::byte* head;
  const TreePart* part;
  uint32_t row;
  bool there;

  __device__ __forceinline__ float Float(uint32_t offset) const {
    return __ldg(reinterpret_cast<const float*>(head + offset) + row);
  }
  __device__ __forceinline__ uint32_t Word(uint32_t offset, uint32_t more = 0) const {
    return __ldg(reinterpret_cast<const uint32_t*>(head + offset) + row + more);
  }
  __device__ __forceinline__ uint32_t start() const { return Word(part->starts); }
  __device__ __forceinline__ uint32_t tokens() const {
    return Word(part->starts, 1) - Word(part->starts);
  }
};

// A unit's rows of one level: what is ranked.
struct TreeLevel {
  uint32_t count;
  uint32_t stride;  // of lanes
  const float* log_mass;
  const float* d2;
  uint32_t* keys;
  float* errors;  // each row's squared error, mean over the group
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

struct TreeSelectMemory {
  CutMemory cut;
  TreeLane lanes[kTreeLanesMax];
  TreeLaneScale scales[kTreeLanesMax];
  float4 sums[kTreeLanesMax];  // max and sum of masses, max and sum of optimistic masses
  float moments[kTreeLanesMax];
  float norms[kTreeLanesMax][2][8];  // parts of squared norms: output, zones
  uint32_t first_piece;
};

class TreeSelector {
 public:
  __device__ TreeSelector(const StepHeader& step, const UnitPlace& unit, TreeSelectMemory* memory)
      : step_(step),
        unit_(unit),
        row_(*unit.row),
        memory_(memory),
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
  __device__ __forceinline__ const SegmentRef& SegmentAt(uint32_t segment) const {
    return step_.segments[row_.segments_begin + segment];
  }
  __device__ __forceinline__ const std::byte* HeadOf(uint32_t segment) const {
    return SegmentAt(segment).index + unit_.kv_head * SegmentAt(segment).index_head_bytes;
  }
  __device__ __forceinline__ uint32_t SegmentOfGroup(uint32_t slot) const {
    return LastNotAfter(row_.segment_count, slot,
                        [&](uint32_t s) { return Tree(s).first_group_slot; });
  }
  __device__ __forceinline__ TreeRow GroupAt(uint32_t slot) const {
    const uint32_t segment = SegmentOfGroup(slot);
    TreeRow row;
    row.head = HeadOf(segment);
    row.part = &Tree(segment).offsets.groups;
    row.row = slot - Tree(segment).first_group_slot;
    row.there = row.row < *reinterpret_cast<const uint32_t*>(row.head + row.part->count);
    return row;
  }
  __device__ __forceinline__ TreeRow LeafAt(uint32_t item) const {
    const uint32_t word = items()[item];
    return {HeadOf(word >> 16), &Tree(word >> 16).offsets.leaves, word & 0xFFFF, true};
  }
  __device__ __forceinline__ uint8_t& GroupFate(uint32_t slot) const {
    return fates_[row_.slots + slot];
  }
  __device__ __forceinline__ uint8_t& LeafFate(uint32_t item) const {
    const uint32_t word = items()[item];
    return fates_[SegmentAt(word >> 16).first_slot + (word & 0xFFFF)];
  }
  __device__ __forceinline__ uint64_t ItemNumber(uint32_t tile, uint32_t segment) const {
    return row_.first_tree_item +
           (uint64_t{unit_.in_row} * row_.tiles_per_unit + tile) * row_.segment_count + segment;
  }
  // What the groups stage left of a segment.
  __device__ __forceinline__ const float* StateOfGroups(uint32_t tile, uint32_t segment) const {
    return step_.tree_states + ItemNumber(tile, segment) * TreeStateFloats(step_.value_dim);
  }
  __device__ TreeLevel Groups() const;
  __device__ TreeLevel Leaves() const;
  __device__ __forceinline__ bool limited() const { return row_.tolerance < INFINITY; }

  __device__ void CombineStates();
  __device__ void CombinePartials();
  __device__ void MeasureOutputs();
  __device__ void SetScales(bool limited);

  template <typename RowAt>
  __device__ void RankByBest(const TreeLevel& level, RowAt row_at);
  template <typename RowAt>
  __device__ void RankByError(const TreeLevel& level, RowAt row_at);
  __device__ float ErrorOf(const TreeLevel& level, uint32_t i, const TreeRow& row) const;
  template <typename RowAt, typename FateOf>
  __device__ void MarkBest(const TreeLevel& level, uint32_t wanted, RowAt row_at, FateOf fate_of);
  template <typename FateOf>
  __device__ void MarkErrors(const TreeLevel& level, double tolerance, CutWeight spent,
                             FateOf fate_of);
  __device__ uint32_t CountRows(bool groups);
  __device__ void NumberItems();
  __device__ CutWeight ClosedErrors();
  __device__ uint32_t ListTokens(uint32_t count);

  const StepHeader& step_;
  const UnitPlace& unit_;
  const RowRef& row_;
  TreeSelectMemory* const memory_;
  const TreeScores places_;
  float* const scores_;
  uint8_t* const fates_;
  uint32_t* const words_;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_SELECTOR_CUH_
