// SPDX-License-Identifier: Apache-2.0
#ifndef ATTND_ATTENTION_CPU_STAGE_TIMER_H_
#define ATTND_ATTENTION_CPU_STAGE_TIMER_H_

#include <chrono>
#include <cstdint>

namespace attnd::attention {

// Adds the nanoseconds from construction to destruction to a counter.
class StageTimer {
 public:
  explicit StageTimer(uint64_t* nanos) : nanos_(nanos), start_(Clock::now()) {}
  ~StageTimer() {
    *nanos_ += static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_).count());
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  uint64_t* const nanos_;
  const Clock::time_point start_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_STAGE_TIMER_H_
