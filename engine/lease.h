// SPDX-License-Identifier: Apache-2.0
//
// Lease: how long a sequence stays open that no call names.
#ifndef ATTND_ENGINE_LEASE_H_
#define ATTND_ENGINE_LEASE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "glog/logging.h"

namespace attnd::engine {

// The longest lease: a week.
inline constexpr std::chrono::seconds kLeaseMax{7 * 24 * 3600};

// The lease of one open sequence. A call that names the sequence holds the lease: it does not end
// meanwhile, and counts anew from the call's end.
//
// Thread-safety: all methods may be called from any thread. A lease only counts: its owner
// (SequenceTable) must not let a call begin while it decides that the lease has ended.
class Lease {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  // What time it is. Called from any thread, also under locks: it must not wait.
  using Clock = std::function<TimePoint()>;

  // A call under way, or nothing: a moved-from call, and a call of a sequence without a lease.
  class Call {
   public:
    Call() = default;
    explicit Call(std::shared_ptr<Lease> lease) : lease_(std::move(lease)) {
      if (lease_ != nullptr) lease_->Begin();
    }
    Call(Call&& other) noexcept = default;
    Call& operator=(Call&& other) noexcept {
      std::swap(lease_, other.lease_);
      return *this;
    }
    ~Call() { End(); }

    void End() {
      if (lease_ != nullptr) std::exchange(lease_, nullptr)->End();
    }
    // 0: no lease.
    std::chrono::seconds lease() const {
      return lease_ != nullptr ? lease_->length() : std::chrono::seconds(0);
    }

   private:
    std::shared_ptr<Lease> lease_;
  };

  // Counts from now on.
  Lease(std::chrono::seconds length, Clock clock)
      : length_(length), clock_(std::move(clock)), idle_since_(Ticks(clock_())) {}

  std::chrono::seconds length() const { return length_; }
  bool in_call() const { return calls_.load(std::memory_order_acquire) > 0; }
  // When the lease ends if no call comes before; while a call is under way, if the call ended now.
  TimePoint EndsAt(TimePoint now) const {
    if (in_call()) return now + length_;
    // Written before the last call was counted out.
    return TimePoint(TimePoint::duration(idle_since_.load(std::memory_order_relaxed))) + length_;
  }

 private:
  static TimePoint::rep Ticks(TimePoint time) { return time.time_since_epoch().count(); }

  void Begin() { calls_.fetch_add(1, std::memory_order_acquire); }
  void End() {
    // The latest end counts, whichever call comes to write its own last.
    const TimePoint::rep now = Ticks(clock_());
    TimePoint::rep known = idle_since_.load(std::memory_order_relaxed);
    while (known < now &&
           !idle_since_.compare_exchange_weak(known, now, std::memory_order_relaxed)) {
    }
    CHECK_GT(calls_.fetch_sub(1, std::memory_order_release), 0u) << "a call ends twice";
  }

  // Constant.
  const std::chrono::seconds length_;
  const Clock clock_;

  std::atomic<uint32_t> calls_{0};             // under way
  std::atomic<TimePoint::rep> idle_since_{0};  // the end of the last call
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_LEASE_H_
