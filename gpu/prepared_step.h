// SPDX-License-Identifier: Apache-2.0
//
// PreparedDeviceStep: a step whose queries are still to come, with a stream of its own.
#ifndef ATTND_GPU_PREPARED_STEP_H_
#define ATTND_GPU_PREPARED_STEP_H_

#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "gpu/lease_pool.h"
#include "gpu/memory/device_copy_store.h"
#include "gpu/step/device_step.h"
#include "gpu/step/stream_context.h"

namespace attnd::gpu {

// One thread at a time. `store` and the lease's pool must outlive it. Its destructor gives it up.
class PreparedDeviceStep final : public attention::PreparedStep {
 public:
  PreparedDeviceStep(const attention::StepRequest& expected, DeviceCopyStore* store,
                     LeasePool<StreamContext>::Lease context, bool cooperative_groups);

  // False: the step cannot be prepared. Errors are the device's.
  absl::StatusOr<bool> Prepare(const attention::ClientTurn* turn);
  bool takes_turn() const override { return takes_turn_; }
  bool HasBegunWith(std::span<const attention::RowTokens> rows) override;
  bool has_told() const override { return step_.has_value() && step_->has_told(); }
  // Behind a Run that has failed.
  bool may_have_told() const { return step_.has_value() && step_->may_have_told(); }
  void GiveUp() override;

  // Whether the request is for the step that was expected, with all that was open then, and, if it
  // takes its client's turn, with the tokens of the last HasBegunWith, which was true; and it was
  // not given up.
  bool IsFor(const attention::StepRequest& request) const;
  // Answers such a request, once; errors as DeviceStep::Run's. What came of it is in step().
  absl::Status Run(const attention::StepRequest& request);
  DeviceStep* step() { return &*step_; }

 private:
  bool takes_turn_ = false;
  const std::byte* client_out_ = nullptr;                   // of the turn
  std::vector<attention::StepRow> rows_;                    // their queries: from HasBegunWith on
  attention::StepRequest request_;                          // of rows_
  std::optional<LeasePool<StreamContext>::Lease> context_;  // none once it was given up
  std::optional<DeviceStep> step_;                          // last: it uses all of them
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_PREPARED_STEP_H_
