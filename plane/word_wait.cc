// SPDX-License-Identifier: Apache-2.0
#include "plane/word_wait.h"

#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <ctime>

namespace attnd::plane {
namespace {

using std::chrono::steady_clock;

static_assert(std::atomic_ref<uint32_t>::is_always_lock_free);

// Reads of the word between two looks at the clock.
constexpr int kSpinsPerLook = 64;

void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

timespec ToTimespec(steady_clock::duration time) {
  const auto nanos = std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  return {.tv_sec = static_cast<time_t>(nanos / 1'000'000'000),
          .tv_nsec = static_cast<long>(nanos % 1'000'000'000)};
}

// Not FUTEX_PRIVATE: the waker is another process.
void Sleep(const uint32_t* word, uint32_t seen, steady_clock::duration time) {
  const timespec wait = ToTimespec(time);
  // Woken, changed meanwhile, interrupted or late: the caller looks at the word in each case.
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &wait, nullptr, 0);
}

// While it lives the calling thread's sleeps end within a microsecond of their time, where Linux
// otherwise takes 50 more to wake several threads at once.
class PreciseSleeps {
 public:
  PreciseSleeps() : slack_nanos_(prctl(PR_GET_TIMERSLACK)) {
    if (slack_nanos_ > 0) prctl(PR_SET_TIMERSLACK, 1000ul);
  }
  ~PreciseSleeps() {
    if (slack_nanos_ > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_nanos_));
  }
  PreciseSleeps(const PreciseSleeps&) = delete;
  PreciseSleeps& operator=(const PreciseSleeps&) = delete;

 private:
  const int slack_nanos_;
};

void Look(const uint32_t* word, uint32_t seen, steady_clock::time_point limit) {
  const PreciseSleeps precise;
  const timespec period = ToTimespec(kWordLookPeriod);
  while (ReadWord(word) == seen && steady_clock::now() < limit) nanosleep(&period, nullptr);
}

}  // namespace

uint32_t ReadWord(const uint32_t* word) {
  // atomic_ref wants an object that it could write.
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word)).load(std::memory_order_acquire);
}

void WriteWord(uint32_t* word, uint32_t value) {
  std::atomic_ref<uint32_t>(*word).store(value, std::memory_order_release);
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t AwaitChange(const uint32_t* word, uint32_t seen, std::chrono::microseconds spin,
                     steady_clock::time_point limit, Waiting waiting) {
  uint32_t value = ReadWord(word);
  if (value != seen) return value;
  const auto start = steady_clock::now();
  const auto spin_end = std::min(start + spin, limit);
  auto now = start;
  while (now < spin_end) {
    for (int i = 0; i < kSpinsPerLook; ++i) {
      value = ReadWord(word);
      if (value != seen) return value;
      Relax();
    }
    now = steady_clock::now();
  }
  if (waiting == Waiting::kLooking) {
    Look(word, seen, limit);
  } else if (now < limit) {
    Sleep(word, seen, limit - now);
  }
  return ReadWord(word);
}

}  // namespace attnd::plane
