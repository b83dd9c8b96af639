// SPDX-License-Identifier: Apache-2.0
//
// FaultWatch: notices that a device has failed while no step asks it for anything. Under MPS a
// fault of one process ends all that share the GPU, and no process comes in until all of them have
// gone; a server without work would hold the GPU closed to the model server it waits for.
#ifndef ATTND_GPU_FAULT_WATCH_H_
#define ATTND_GPU_FAULT_WATCH_H_

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "gpu/device/device.h"

namespace attnd::gpu {

// Copies a few bytes to the device and waits for them, once in each period, on a stream of its own.
// What the device says when it fails is told once, by the watch's thread, which then ends. The
// destructor waits for a copy that is under way. The device outlives the watch.
class FaultWatch {
 public:
  // Errors: the device's, for memory and a stream; ResourceExhausted if the system refuses a
  // thread.
  static absl::StatusOr<std::unique_ptr<FaultWatch>> Start(
      Device* device, std::chrono::milliseconds period,
      std::function<void(const absl::Status&)> on_fault);
  ~FaultWatch();
  FaultWatch(const FaultWatch&) = delete;
  FaultWatch& operator=(const FaultWatch&) = delete;

 private:
  FaultWatch(Device* device, std::chrono::milliseconds period,
             std::function<void(const absl::Status&)> on_fault);
  absl::Status Take();
  absl::Status Look();
  void Loop();

  // Constant after Start.
  Device* const device_;
  const std::chrono::milliseconds period_;
  const std::function<void(const absl::Status&)> on_fault_;
  std::byte* pinned_ = nullptr;
  std::byte* on_device_ = nullptr;
  std::unique_ptr<Stream> stream_;
  std::thread thread_;

  Mutex mutex_;
  CondVar stopped_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_FAULT_WATCH_H_
