// SPDX-License-Identifier: Apache-2.0
#include "gpu/fault_watch.h"

#include <utility>

#include "common/start_thread.h"
#include "common/status.h"

namespace attnd::gpu {
namespace {

constexpr uint64_t kBytes = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<FaultWatch>> FaultWatch::Start(
    Device* device, std::chrono::milliseconds period,
    std::function<void(const absl::Status&)> on_fault) {
  std::unique_ptr<FaultWatch> watch(new FaultWatch(device, period, std::move(on_fault)));
  ATTND_RETURN_IF_ERROR(watch->Take());
  ATTND_ASSIGN_OR_RETURN(watch->thread_, StartThread("that watches the GPU for faults",
                                                     [watch = watch.get()] { watch->Loop(); }));
  return watch;
}

FaultWatch::FaultWatch(Device* device, std::chrono::milliseconds period,
                       std::function<void(const absl::Status&)> on_fault)
    : device_(device), period_(period), on_fault_(std::move(on_fault)) {}

FaultWatch::~FaultWatch() {
  // 1. No further look.
  {
    MutexLock lock(mutex_);
    stop_ = true;
  }
  stopped_.NotifyAll();
  // 2. The one that is under way.
  if (thread_.joinable()) thread_.join();
  // 3. What it has used.
  stream_.reset();
  device_->Free(on_device_);
  device_->FreePinned(pinned_);
}

absl::Status FaultWatch::Take() {
  ATTND_ASSIGN_OR_RETURN(pinned_, device_->AllocatePinned(kBytes));
  ATTND_ASSIGN_OR_RETURN(on_device_, device_->Allocate(kBytes));
  ATTND_ASSIGN_OR_RETURN(stream_, device_->NewStream(StreamUse::kBackground));
  return absl::OkStatus();
}

absl::Status FaultWatch::Look() {
  ATTND_RETURN_IF_ERROR(stream_->CopyToDevice(on_device_, pinned_, kBytes));
  return stream_->Synchronize();
}

void FaultWatch::Loop() {
  while (true) {
    {
      MutexLock lock(mutex_);
      if (!stop_) stopped_.WaitFor(mutex_, period_);  // a look too early does no harm
      if (stop_) return;
    }
    const absl::Status status = Look();
    // For want of memory nothing has failed.
    if (status.ok() || absl::IsResourceExhausted(status)) continue;
    on_fault_(status);
    return;
  }
}

}  // namespace attnd::gpu
