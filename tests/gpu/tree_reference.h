// SPDX-License-Identifier: Apache-2.0
//
// What a unit of UnitKind::kTree must give (docs/POLICIES.md, "error-target", over a `tree`; of
// policies that rank by mass, "Clusters"), by plain loops over the index bytes.
#ifndef ATTND_TESTS_GPU_TREE_REFERENCE_H_
#define ATTND_TESTS_GPU_TREE_REFERENCE_H_

#include <cstdint>

#include "gpu/layout/step_layout.h"
#include "tests/gpu/tree_index_reference.h"
#include "tests/gpu/unit_reference.h"

namespace attnd::gpu::test {

// Fills the unit's part of out, lse and lane_results, `result`, and its fates: of leaves whose
// groups are opened, and behind them of groups. Planted faults: one leaf more is read, or one
// group more opened, than the cuts say.
void RunTreeReference(const reference::Unit& unit, bool one_more_exact, bool one_more_opened,
                      reference::TreesOfStep* trees, UnitResult* result, uint8_t* fates);

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_TREE_REFERENCE_H_
