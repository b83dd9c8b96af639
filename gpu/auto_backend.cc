// SPDX-License-Identifier: Apache-2.0
#include "gpu/auto_backend.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention/index/segment_builder.h"
#include "common/status.h"
#include "gpu/row_subset.h"

namespace attnd::gpu {
namespace {

using attention::Backend;
using attention::BackendStats;
using attention::IndexSet;
using attention::LinkRates;
using attention::Plan;
using attention::Policy;
using attention::PreparedStep;
using attention::SegmentBuilder;
using attention::SequenceNeeds;
using attention::SequenceView;
using attention::StepRequest;
using attention::StepRow;

class AutoBackend : public Backend {
 public:
  AutoBackend(std::unique_ptr<Backend> device, std::shared_ptr<Backend> cpu)
      : cpu_(std::move(cpu)), device_(std::move(device)) {}

  absl::string_view name() const override { return device_->name(); }
  std::vector<absl::string_view> names() const override { return {device_->name(), cpu_->name()}; }
  absl::string_view target() const override { return cpu_->target(); }
  absl::string_view device() const override { return device_->device(); }
  absl::Status Health() const override { return device_->Health(); }
  BackendStats stats() const override { return device_->stats(); }
  absl::StatusOr<LinkRates> link_rates() const override { return device_->link_rates(); }
  absl::StatusOr<std::chrono::nanoseconds> RunEmpty() const override { return device_->RunEmpty(); }

  // What the device lacks is the CPU's.
  absl::Status Supports(const Policy& policy) const override { return cpu_->Supports(policy); }
  absl::Status Supports(const ModelShape& shape) const override { return cpu_->Supports(shape); }
  absl::Status Supports(const IndexSet& indexes) const override { return cpu_->Supports(indexes); }

  const Backend& OwnerOf(const SequenceNeeds& needs) const override {
    const bool has_all =
        device_->Supports(needs.policy).ok() &&
        (needs.shape == nullptr || device_->Supports(*needs.shape).ok()) &&
        (needs.indexes == nullptr || device_->Answers(needs.policy, *needs.indexes));
    return has_all ? *device_ : *cpu_;
  }

  absl::Status Step(const StepRequest& request) override {
    std::vector<uint32_t> device_rows, cpu_rows;
    for (uint32_t number = 0; number < request.rows.size(); ++number) {
      (IsDevices(request.rows[number]) ? device_rows : cpu_rows).push_back(number);
    }
    if (cpu_rows.empty()) return device_->Step(request);
    if (request.prepared != nullptr) request.prepared->GiveUp();  // it was for the device alone
    if (device_rows.empty()) return cpu_->Step(request);
    const StepRequest begun = attention::Begun(request);
    std::vector<Plan> plans;
    ATTND_RETURN_IF_ERROR(StepRows(begun, device_rows, device_.get(), &plans));
    ATTND_RETURN_IF_ERROR(StepRows(begun, cpu_rows, cpu_.get(), &plans));
    AddInOrder(std::move(plans), request.plans);
    return absl::OkStatus();
  }

  std::shared_ptr<const void> MapMemory(std::byte* memory, uint64_t bytes) const override {
    return device_->MapMemory(memory, bytes);
  }

  std::string sharing_device() const override { return device_->sharing_device(); }
  absl::StatusOr<SharedDeviceMemory> ShareMemory(uint64_t bytes) const override {
    return device_->ShareMemory(bytes);
  }

  std::unique_ptr<PreparedStep> Prepare(const StepRequest& request,
                                        const attention::ClientTurn* turn) override {
    const bool devices = std::all_of(request.rows.begin(), request.rows.end(),
                                     [this](const StepRow& row) { return IsDevices(row); });
    return devices ? device_->Prepare(request, turn) : nullptr;
  }

  absl::Status BuildSegment(SegmentBuilder* segment, attention::SegmentPart part,
                            absl::FunctionRef<absl::Status()> proceed) override {
    Backend* const owner = HasOnDevice(segment->view()) ? device_.get() : cpu_.get();
    return owner->BuildSegment(segment, part, proceed);
  }

 private:
  bool HasOnDevice(const SequenceView& view) const { return view.owner == device_.get(); }
  // By the row alone, so that its bits do not depend on what else is in the batch.
  bool IsDevices(const StepRow& row) const {
    return HasOnDevice(*row.view) && device_->Answers(*row.policy, row.view->indexes);
  }

  const std::shared_ptr<Backend> cpu_;
  const std::unique_ptr<Backend> device_;
};

}  // namespace

std::unique_ptr<Backend> MakeAutoBackend(std::unique_ptr<Backend> device,
                                         std::shared_ptr<Backend> cpu) {
  return std::make_unique<AutoBackend>(std::move(device), std::move(cpu));
}

}  // namespace attnd::gpu
