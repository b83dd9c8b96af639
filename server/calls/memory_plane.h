// SPDX-License-Identifier: Apache-2.0
//
// MemoryPlane: what a server has for passes over memory that its clients share with it.
#ifndef ATTND_SERVER_CALLS_MEMORY_PLANE_H_
#define ATTND_SERVER_CALLS_MEMORY_PLANE_H_

#include <cstdint>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/mutex.h"
#include "plane/region_table.h"
#include "server/calls/step_executor.h"

namespace attnd::server {

// Thread-safety: Start belongs to one thread; all other methods may be called from any thread.
class MemoryPlane {
 public:
  // device: the backend's.
  MemoryPlane(const plane::RegionLimits& limits, plane::RegionDevice device, uint32_t passes_max)
      : passes_max_(passes_max),
        regions_(limits, std::move(device)),
        threads_({.workers = passes_max, .inline_slots = 0, .queue_max = passes_max}) {}

  // Before the first pass. ResourceExhausted if the system refuses a thread.
  absl::Status Start() { return threads_.Start("for passes over memory"); }

  plane::RegionTable* regions() { return &regions_; }

  // Has a thread run `pass`, which waits for its client there. False if passes_max are under way.
  // Each pass that was begun ends with EndPass.
  bool BeginPass(StepExecutor::Task* pass) {
    {
      const MutexLock lock(mutex_);
      if (passes_ >= passes_max_) return false;
      ++passes_;
    }
    return threads_.Enqueue(pass, StepExecutor::Place::kAlways);
  }
  void EndPass() {
    const MutexLock lock(mutex_);
    --passes_;
  }
  // Passes under way.
  uint32_t passes() const {
    const MutexLock lock(mutex_);
    return passes_;
  }

 private:
  const uint32_t passes_max_;
  plane::RegionTable regions_;

  mutable Mutex mutex_;
  uint32_t passes_ ABSL_GUARDED_BY(mutex_) = 0;

  // One for each pass: a pass waits for its client, and must not wait for another's.
  StepExecutor threads_;
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_MEMORY_PLANE_H_
