// SPDX-License-Identifier: Apache-2.0
#include "server/calls/heap_trimmer.h"

#include <malloc.h>

#include "common/start_thread.h"
#include "common/status.h"
#include "glog/logging.h"

namespace attnd::server {
namespace {

// Smaller messages are the allocator's everyday business.
constexpr size_t kLargeMessageBytes = size_t{256} << 10;

}  // namespace

absl::Status HeapTrimmer::Start() {
  CHECK(!thread_.joinable()) << "started once";
  ATTND_ASSIGN_OR_RETURN(thread_, StartThread("for trimming the heap", [this] { Main(); }));
  return absl::OkStatus();
}

HeapTrimmer::~HeapTrimmer() {
  {
    const MutexLock lock(mutex_);
    ending_ = true;
  }
  work_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

void HeapTrimmer::OnReleased(size_t bytes) {
  if (bytes < kLargeMessageBytes) return;
  {
    const MutexLock lock(mutex_);
    const bool known = released_bytes_ >= kWorthBytes;
    released_bytes_ += bytes;
    if (known || released_bytes_ < kWorthBytes) return;
  }
  work_.NotifyOne();
}

void HeapTrimmer::Main() {
  mutex_.lock();
  while (!ending_) {
    if (released_bytes_ < kWorthBytes) {
      work_.Wait(mutex_);
      continue;
    }
    // What is being released has been by then, and what comes meanwhile is trimmed with it.
    work_.WaitFor(mutex_, kPeriod);
    released_bytes_ = 0;
    mutex_.unlock();
    malloc_trim(0);
    mutex_.lock();
  }
  mutex_.unlock();
}

}  // namespace attnd::server
