// SPDX-License-Identifier: Apache-2.0
//
// What a step of gpu/layout/step_layout.h must give, computed by plain loops in double precision,
// and what a builder of indexes must: the reference that kernels are compared with, and the fake
// device's arithmetic. It shares no code with the kernels of attention/ or gpu/cuda/; it reads the
// structures alone, so that what the host wrote wrong shows. It divides nothing into pieces.
#ifndef ATTND_TESTS_GPU_STEP_REFERENCE_H_
#define ATTND_TESTS_GPU_STEP_REFERENCE_H_

#include <cstdint>
#include <limits>
#include <string>

#include "gpu/device/device.h"
#include "gpu/layout/index_layout.h"
#include "gpu/layout/step_layout.h"
#include "tests/gpu/fetch_reference.h"

namespace attnd::gpu::test {

// Units of a step, for planted faults.
inline constexpr uint32_t kNoUnit = std::numeric_limits<uint32_t>::max();
inline constexpr uint32_t kEveryUnit = kNoUnit - 1;

// Planted faults: this unit, if it is of clusters, reads one cluster more than its cuts say; or
// opens one group more. It is otherwise right.
struct OneMore {
  uint32_t exact = kNoUnit;
  uint32_t opened = kNoUnit;
};

// Puts the uploads in place, fills out, lse, lane_results, unit_results, last_results and fates,
// and the list of missing pages. Every address in the header can be read here. known: what is
// remembered of pages of files, or null. Empty, or what is wrong with these pages.
std::string RunStepReference(const KernelShape& shape, const StepHeader& header,
                             const OneMore& one_more = {}, KnownPages* known = nullptr);

// Builds one layer: clusters by k-means as docs/POLICIES.md says, the index, the pages in cluster
// order.
void BuildIndexReference(const KernelShape& shape, const IndexJob& job);

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_STEP_REFERENCE_H_
