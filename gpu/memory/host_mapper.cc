// SPDX-License-Identifier: Apache-2.0
#include "gpu/memory/host_mapper.h"

#include <glog/logging.h>

#include <utility>

#include "absl/status/statusor.h"
#include "common/start_thread.h"

namespace attnd::gpu {

void HostMapper::Add(std::shared_ptr<HostPages> pages) {
  MutexLock lock(mutex_);
  if (stopping_) return;
  if (!thread_.joinable()) {
    absl::StatusOr<std::thread> thread =
        StartThread("that maps host memory in the background", [this] { Loop(); });
    if (!thread.ok()) {
      LOG_EVERY_T(WARNING, 60) << thread.status();
      return;  // steps map what they read
    }
    thread_ = *std::move(thread);
  }
  queue_.push_back(std::move(pages));
  changed_.NotifyAll();
}

void HostMapper::Shutdown() {
  std::thread thread;
  std::deque<std::shared_ptr<HostPages>> waiting;  // dies without the lock
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
    std::swap(waiting, queue_);
    std::swap(thread, thread_);
  }
  if (thread.joinable()) thread.join();
}

void HostMapper::AddPauses(int change) {
  MutexLock lock(mutex_);
  pauses_ += change;
  if (pauses_ == 0) changed_.NotifyAll();
}

void HostMapper::Loop() {
  while (true) {
    std::shared_ptr<HostPages> pages;                // dies without the lock
    std::deque<std::shared_ptr<HostPages>> waiting;  // likewise
    {
      MutexLock lock(mutex_);
      while (!stopping_ && (queue_.empty() || pauses_ > 0)) changed_.Wait(mutex_);
      if (stopping_) return;
      pages = std::move(queue_.front());
      queue_.pop_front();
    }
    const absl::StatusOr<bool> mapped = pages->MapPiece();
    if (!mapped.ok()) on_failure_(mapped.status());
    MutexLock lock(mutex_);
    if (!mapped.ok()) {
      std::swap(waiting, queue_);
    } else if (*mapped && !stopping_) {
      queue_.push_front(std::move(pages));
    }
  }
}

}  // namespace attnd::gpu
