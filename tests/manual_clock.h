// SPDX-License-Identifier: Apache-2.0
//
// ManualClock: time that passes when a test says so.
#ifndef ATTND_TESTS_MANUAL_CLOCK_H_
#define ATTND_TESTS_MANUAL_CLOCK_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

namespace attnd::test {

// Thread-safe. A copy tells the same time.
class ManualClock {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  TimePoint now() const { return TimePoint(TimePoint::duration(ticks_->load())); }
  void Advance(TimePoint::duration by) { *ticks_ += by.count(); }
  std::function<TimePoint()> function() const {
    return [clock = *this] { return clock.now(); };
  }

 private:
  const std::shared_ptr<std::atomic<TimePoint::rep>> ticks_ =
      std::make_shared<std::atomic<TimePoint::rep>>(1);
};

}  // namespace attnd::test

#endif  // ATTND_TESTS_MANUAL_CLOCK_H_
