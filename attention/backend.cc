// SPDX-License-Identifier: Apache-2.0
#include "attention/backend.h"

namespace attnd::attention {

absl::Status CheckAlive(const StepRequest& request) {
  if (request.cancelled != nullptr && request.cancelled->load(std::memory_order_relaxed)) {
    return absl::CancelledError("the caller has gone");
  }
  if (request.deadline.has_value() && std::chrono::steady_clock::now() > *request.deadline) {
    return absl::DeadlineExceededError("the step's deadline passed");
  }
  return absl::OkStatus();
}

}  // namespace attnd::attention
