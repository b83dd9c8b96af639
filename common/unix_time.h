// SPDX-License-Identifier: Apache-2.0
#ifndef ATTND_COMMON_UNIX_TIME_H_
#define ATTND_COMMON_UNIX_TIME_H_

#include <time.h>

#include <chrono>
#include <cstdint>

namespace attnd {

// By the system's clock, which may be set: for records that people read, not for measuring.
inline int64_t NowUnixSeconds() {
  const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::seconds>(since_epoch).count();
}

// Since the machine was started, asleep or not; never set.
inline int64_t BootSeconds() {
  timespec since{};
  clock_gettime(CLOCK_BOOTTIME, &since);
  return since.tv_sec;
}

}  // namespace attnd

#endif  // ATTND_COMMON_UNIX_TIME_H_
