// SPDX-License-Identifier: Apache-2.0
//
// How a row is divided: from its description to the RowRef that the kernels read. Division follows
// from the row's own lengths alone (step_layout.h), so that its answer's bits do.
#ifndef ATTND_GPU_STEP_ROW_PLAN_H_
#define ATTND_GPU_STEP_ROW_PLAN_H_

#include <cstdint>

#include "gpu/layout/step_layout.h"
#include "gpu/step/row_description.h"

namespace attnd::gpu {

// Whether the row's own numbers are within what a RowRef holds and selection counts.
bool HasPlan(const RowDescription& row);

// The row's query tokens [first_token, first_token + tokens), everything but places in the wave.
// cooperative_groups: whether the device has them.
RowRef PlanRow(const RowDescription& row, uint32_t first_token, uint32_t tokens,
               bool cooperative_groups);

uint32_t TokensPerUnit(const RowDescription& row);
// Units of `tokens` query tokens of the row.
uint64_t UnitsOf(const RowDescription& row, uint32_t tokens);
// Tail blocks, from the first one on, that the row's query tokens see.
uint64_t TailBlocksSeen(const RowDescription& row);

// Segment number s as the row's part in the wave has it, following `before`, the one before it or
// null.
SegmentRef PlanSegment(const RowRef& row, const SegmentDescription& segment,
                       const RowMemory::SegmentPlace& place, const SegmentRef* before);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_ROW_PLAN_H_
