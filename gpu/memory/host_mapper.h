// SPDX-License-Identifier: Apache-2.0
//
// HostMapper: maps payload for the device in the background, so that the first step over a sequence
// that is read in place does not wait for all of it.
#ifndef ATTND_GPU_MEMORY_HOST_MAPPER_H_
#define ATTND_GPU_MEMORY_HOST_MAPPER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "common/mutex.h"
#include "gpu/memory/host_pages.h"

namespace attnd::gpu {

// Thread-safe. One thread, from the first pages on, which maps one piece at a time, and none while
// a step maps. It holds no lock of its own meanwhile.
class HostMapper {
 public:
  // Held by a step that maps pages itself: no piece is begun until it is gone.
  class Pause {
   public:
    explicit Pause(HostMapper* mapper) : mapper_(mapper) { mapper_->AddPauses(1); }
    ~Pause() { mapper_->AddPauses(-1); }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    HostMapper* const mapper_;
  };

  // on_failure: told what mapping failed with; what waits to be mapped is then forgotten. Called by
  // the mapper's thread without a lock.
  explicit HostMapper(std::function<void(const absl::Status&)> on_failure)
      : on_failure_(std::move(on_failure)) {}
  ~HostMapper() { Shutdown(); }
  HostMapper(const HostMapper&) = delete;
  HostMapper& operator=(const HostMapper&) = delete;

  // Maps the pages when those before them have been. Pages that are closed are passed over.
  void Add(std::shared_ptr<HostPages> pages);

  // Shutdown: 1. no piece is begun any more, 2. the one that is being mapped ends.
  void Shutdown();

 private:
  void AddPauses(int change);
  void Loop();

  const std::function<void(const absl::Status&)> on_failure_;

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::shared_ptr<HostPages>> queue_ ABSL_GUARDED_BY(mutex_);
  int pauses_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_MEMORY_HOST_MAPPER_H_
