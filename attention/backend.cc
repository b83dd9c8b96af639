// SPDX-License-Identifier: Apache-2.0
#include "attention/backend.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace attnd::attention {

bool SequenceView::paged() const {
  return std::any_of(segments.begin(), segments.end(),
                     [](const auto& segment) { return segment->paged(); });
}

StepRequest Begun(const StepRequest& request) {
  StepRequest begun = request;
  if (!begun.begun.has_value()) begun.begun = std::chrono::steady_clock::now();
  return begun;
}

absl::Status CheckAlive(const StepRequest& request) {
  if (request.cancelled != nullptr && request.cancelled->load(std::memory_order_relaxed)) {
    return absl::CancelledError("the caller has gone");
  }
  if (request.deadline.has_value() && std::chrono::steady_clock::now() > *request.deadline) {
    return absl::DeadlineExceededError("the step's deadline passed");
  }
  return absl::OkStatus();
}

absl::Status CheckAnswers(const Backend& backend, const Policy& policy, const IndexSet& indexes) {
  if (backend.Answers(policy, indexes)) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("the ", backend.name(), " backend does not run policy.preset ", policy.preset,
                   " over the indexes ", indexes.ToString()));
}

}  // namespace attnd::attention
