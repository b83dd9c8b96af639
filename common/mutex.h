// SPDX-License-Identifier: Apache-2.0
//
// Mutex, MutexLock and CondVar: std::mutex and std::condition_variable_any with clang's
// thread-safety annotations. std types because the thread sanitizer sees them; the distribution's
// absl::Mutex is invisible to it.
#ifndef ATTND_COMMON_MUTEX_H_
#define ATTND_COMMON_MUTEX_H_

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"

namespace attnd {

class ABSL_LOCKABLE Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) {
    mutex_.lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits are in a loop around the caller's condition, as spurious wake-ups happen.
class CondVar {
 public:
  // Returns once a second without a notification: in glibc before 2.41 (Debian 12, Ubuntu 24.04) a
  // notification is lost on rare occasions (sourceware.org bug 25847), and a thread that nobody
  // notifies again would then wait for ever.
  void Wait(Mutex& mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { WaitFor(mutex, kWaitMax); }
  // False if the time passed without a notification.
  bool WaitFor(Mutex& mutex, std::chrono::microseconds time) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return condition_.wait_for(mutex, time) == std::cv_status::no_timeout;
  }
  void NotifyOne() { condition_.notify_one(); }
  void NotifyAll() { condition_.notify_all(); }

 private:
  static constexpr std::chrono::microseconds kWaitMax{1000000};
  std::condition_variable_any condition_;
};

}  // namespace attnd

#endif  // ATTND_COMMON_MUTEX_H_
