// SPDX-License-Identifier: Apache-2.0
//
// RateLimit: a limit of transfers in bytes a second.
#ifndef ATTND_STORAGE_CACHE_RATE_LIMIT_H_
#define ATTND_STORAGE_CACHE_RATE_LIMIT_H_

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "common/mutex.h"

namespace attnd::storage {

// Thread-safe. Unused time is saved up for kBurst at most.
class RateLimit {
 public:
  using Clock = std::chrono::steady_clock;

  // 0: no limit.
  explicit RateLimit(uint64_t bytes_per_s) : bytes_per_s_(bytes_per_s) {}

  // When a transfer of `bytes`, asked for now, may begin; transfers asked for later begin after it.
  Clock::time_point Book(uint64_t bytes, Clock::time_point now) {
    if (bytes_per_s_ == 0) return now;
    MutexLock lock(mutex_);
    const Clock::time_point begin = std::max(free_, now - kBurst);
    const double seconds = static_cast<double>(bytes) / static_cast<double>(bytes_per_s_);
    free_ =
        begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    return std::max(begin, now);
  }

 private:
  static constexpr std::chrono::milliseconds kBurst{10};

  const uint64_t bytes_per_s_;
  Mutex mutex_;
  Clock::time_point free_ ABSL_GUARDED_BY(mutex_);  // when the last booked transfer ends
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_CACHE_RATE_LIMIT_H_
