// SPDX-License-Identifier: Apache-2.0
//
// OpenCalls: how many unary calls have not been answered yet, for a shutdown that waits for them.
#ifndef ATTND_SERVER_CALLS_OPEN_CALLS_H_
#define ATTND_SERVER_CALLS_OPEN_CALLS_H_

#include <chrono>
#include <cstddef>

#include "absl/base/thread_annotations.h"
#include "common/mutex.h"
#include "glog/logging.h"

namespace attnd::server {

// Thread-safety: all methods may be called from any thread.
class OpenCalls {
 public:
  void Begin() {
    const MutexLock lock(mutex_);
    ++calls_;
  }
  // The answer is on its way to the client.
  void End() {
    const MutexLock lock(mutex_);
    CHECK_GT(calls_, 0u) << "a call ends that did not begin";
    if (--calls_ == 0) none_.NotifyAll();
  }
  // False if some calls are still open after `timeout`.
  bool WaitUntilNone(std::chrono::milliseconds timeout) {
    const auto limit = std::chrono::steady_clock::now() + timeout;
    const MutexLock lock(mutex_);
    while (calls_ > 0) {
      const auto left = limit - std::chrono::steady_clock::now();
      if (left <= left.zero()) return false;
      none_.WaitFor(mutex_, std::chrono::ceil<std::chrono::microseconds>(left));
    }
    return true;
  }

 private:
  Mutex mutex_;
  CondVar none_;
  size_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_OPEN_CALLS_H_
