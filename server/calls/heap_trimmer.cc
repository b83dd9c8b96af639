// SPDX-License-Identifier: Apache-2.0
#include "server/calls/heap_trimmer.h"

#include <malloc.h>

namespace attnd::server {
namespace {

// Smaller messages are the allocator's everyday business.
constexpr size_t kLargeMessageBytes = size_t{256} << 10;

}  // namespace

HeapTrimmer::HeapTrimmer() {
  thread_ = std::thread([this] { Main(); });
}

HeapTrimmer::~HeapTrimmer() {
  {
    const MutexLock lock(mutex_);
    ending_ = true;
  }
  work_.NotifyAll();
  thread_.join();
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
