// SPDX-License-Identifier: Apache-2.0
//
// The whole stage, of units over trees that look at all leaves: one tree item's queries along the
// axes, and its leaves' numbers.
#ifndef ATTND_GPU_CUDA_STEP_TREE_WHOLE_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_WHOLE_CUH_

#include <cstdint>

#include "gpu/cuda/step/tree_block.cuh"

namespace attnd::gpu {

// Leaves of the item's KV head in the row's segments before its own. Every thread.
__device__ __forceinline__ uint32_t LeavesBefore(const StepHeader& step, const TreeItem& item) {
  uint32_t leaves = 0;
  for (uint32_t s = threadIdx.x % 32; s < item.segment; s += 32) {
    const SegmentRef& ref = step.segments[item.row->segments_begin + s];
    const TreeRef& tree = step.trees[item.row->trees_begin + s];
    const std::byte* head = ref.index + item.unit.kv_head * ref.index_head_bytes;
    leaves += __ldg(reinterpret_cast<const uint32_t*>(head + tree.offsets.leaves.count));
  }
  return __reduce_add_sync(~0u, leaves);
}

// Opens the slice's groups and numbers their leaves, as the open stage does.
__device__ __forceinline__ void OpenWhole(const StepHeader& step, const TreeItem& item) {
  if (item.tile != 0) return;
  const TreePart& part = item.offsets->groups;
  const uint32_t groups = *reinterpret_cast<const uint32_t*>(item.head + part.count);
  const auto* members = reinterpret_cast<const uint32_t*>(item.head + part.first_members);
  const uint32_t first_group = item.first_group, groups_end = item.groups_end;
  const uint32_t begin = __ldg(members + min(first_group, groups));
  const uint32_t end = __ldg(members + min(groups_end, groups));
  const uint32_t before = LeavesBefore(step, item);
  uint32_t* first_items = item.words + kTreeLaneWords;
  uint32_t* items = item.words + TreeItems(*item.row) + before;
  for (uint32_t i = begin + threadIdx.x; i < end; i += kTreeThreads) {
    items[i] = item.segment << 16 | i;
  }
  uint8_t* fates = UnitFates(step, item.unit) + item.row->slots + item.first_group_slot;
  for (uint32_t g = first_group + threadIdx.x; g < groups_end; g += kTreeThreads) {
    fates[g] = kFateExact;
  }
  if (threadIdx.x != 0) return;
  first_items[item.slice] = before + begin;
  if (item.slice + 1 == item.row->tree_slices) first_items[item.slice + 1] = before + end;
}

template <int kDim>
__global__ void __launch_bounds__(kTreeThreads)
    TreeWholeKernel(const __grid_constant__ StepHeader step) {
  __shared__ __align__(16) TreeQueries<kDim> queries;
  __shared__ typename TreeQueryMaker<kDim>::Memory making;
  const TreeItem item = FindItem(step, blockIdx.x);
  if (item.choice != TreeChoice::kByMass) return;
  StoreItem(step, item);
  TreeQueryMaker<kDim> maker(step, item);
  const auto x = maker.QueryOf(step, item);
  OpenWhole(step, item);
  maker.Make(x, /*rotates=*/item.row->second_order != 0, &making, &queries);
  StoreQueries<kDim>(step, queries);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_WHOLE_CUH_
