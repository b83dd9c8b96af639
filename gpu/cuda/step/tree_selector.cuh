// SPDX-License-Identifier: Apache-2.0
//
// What of a unit's tree is opened, and what is read exactly (docs/POLICIES.md, "error-target").
#ifndef ATTND_GPU_CUDA_STEP_TREE_SELECTOR_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_SELECTOR_CUH_

#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/tree_unit.cuh"
#include "gpu/cuda/step/unit_selector.cuh"

namespace attnd::gpu {

class TreeSelector : public TreeUnit {
 public:
  using TreeUnit::TreeUnit;

  // The open stage.
  __device__ void Open();
  // The choose stage.
  __device__ void Choose();

 private:
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
  // What the groups stage left of a slice.
  __device__ __forceinline__ const float* StateOfGroups(uint32_t tile, uint32_t slice) const {
    return step_.tree_states + ItemNumber(tile, slice) * TreeStateFloats(step_.value_dim);
  }
  __device__ TreeLevel Groups() const;
  __device__ __forceinline__ bool limited() const { return row_.tolerance < INFINITY; }

  __device__ void CombineStates();
  __device__ void MeasureOutputs();
  __device__ CutWeight OutputPart(uint32_t lane, uint32_t chunk);
  __device__ void SetScales();

  __device__ void Rank(const TreeLevel& level);
  __device__ float2 ScoreOf(const TreeLevel& level, uint32_t i, const TreeRowInfo& info) const;
  template <typename FateOf, typename SizeOf>
  __device__ uint32_t Mark(const TreeLevel& level, uint32_t wanted, double tolerance,
                           CutWeight spent, FateOf fate_of, SizeOf size_of);
  __device__ uint32_t OwnCounts(bool groups) const;
  __device__ void NumberItems(const TreeLevel& level, uint32_t leaves);
  __device__ CutWeight ClosedErrors();
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_SELECTOR_CUH_
