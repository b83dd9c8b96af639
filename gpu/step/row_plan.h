// SPDX-License-Identifier: Apache-2.0
//
// How a row is divided into units and pieces: from its description to the RowRef that the kernels
// read. The division depends on the row's own lengths alone (step_layout.h), so that the bits of
// its answer depend on nothing else.
#ifndef ATTND_GPU_STEP_ROW_PLAN_H_
#define ATTND_GPU_STEP_ROW_PLAN_H_

#include <cstdint>

#include "gpu/layout/step_layout.h"
#include "gpu/step/row_description.h"

namespace attnd::gpu {

// Whether the row's own numbers fit the fields of a RowRef and the counters of selection.
bool HasPlan(const RowDescription& row);

// The RowRef of the row's query tokens [first_token, first_token + tokens), except for places in
// the wave. cooperative_groups: whether the device has cooperative groups.
RowRef PlanRow(const RowDescription& row, uint32_t first_token, uint32_t tokens,
               bool cooperative_groups);

uint32_t TokensPerUnit(const RowDescription& row);
// The number of units of `tokens` query tokens of the row.
uint64_t UnitsOf(const RowDescription& row, uint32_t tokens);
// Tail blocks, from the first one on, that the row's query tokens see.
uint64_t TailBlocksSeen(const RowDescription& row);

// The SegmentRef of `segment` for a part of a row in the wave. before: of the segment before it;
// null for the first.
SegmentRef PlanSegment(const RowRef& row, const SegmentDescription& segment,
                       const RowMemory::SegmentPlace& place, const SegmentRef* before);

// The same of what a tree has beside it, in a row of kTree.
TreeRef PlanTree(const RowRef& row, const SegmentDescription& segment, const TreeRef* before);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_ROW_PLAN_H_
