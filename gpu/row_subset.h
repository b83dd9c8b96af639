// SPDX-License-Identifier: Apache-2.0
//
// Some rows of a step by one backend, the others by another: what a step is made of when the CPU
// answers a part of it.
#ifndef ATTND_GPU_ROW_SUBSET_H_
#define ATTND_GPU_ROW_SUBSET_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "attention/backend.h"

namespace attnd::gpu {

// Answers the request's rows with these numbers by `backend`. If the request wants plans, theirs
// are added to `plans`, with the numbers that the rows have in the request.
absl::Status StepRows(const attention::StepRequest& request, std::span<const uint32_t> numbers,
                      attention::Backend* backend, std::vector<attention::Plan>* plans);

// Adds plans that came row by row to `out`, in StepRequest::plans' order. `out` may be null.
void AddInOrder(std::vector<attention::Plan> plans, std::vector<attention::Plan>* out);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_ROW_SUBSET_H_
