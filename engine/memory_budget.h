// SPDX-License-Identifier: Apache-2.0
//
// MemoryBudget: what sequences, their building and the answers under way may use, asked for before
// anything is allocated.
#ifndef ATTND_ENGINE_MEMORY_BUDGET_H_
#define ATTND_ENGINE_MEMORY_BUDGET_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace attnd::engine {

class MemoryBudget;

// Bytes held from a budget, given back on destruction. Movable; must not outlive the budget.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept
      : budget_(std::exchange(other.budget_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Reservation& operator=(Reservation&& other) noexcept {
    std::swap(budget_, other.budget_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  inline ~Reservation();
  uint64_t bytes() const { return bytes_; }

 private:
  friend class MemoryBudget;
  Reservation(MemoryBudget* budget, uint64_t bytes) : budget_(budget), bytes_(bytes) {}
  MemoryBudget* budget_ = nullptr;
  uint64_t bytes_ = 0;
};

// Thread-safe.
class MemoryBudget {
 public:
  // Frees bytes that somebody holds for want of a better use, and says how many.
  using Reclaim = std::function<uint64_t(uint64_t bytes)>;

  explicit MemoryBudget(uint64_t capacity) : capacity_(capacity) {}

  // Whom to ask when there is no room: it may be called by whoever reserves, under any lock of
  // theirs. Before others use the budget, and with null once they have ended.
  void SetReclaim(Reclaim reclaim) { reclaim_ = std::move(reclaim); }

  // ResourceExhausted, naming `what`, if fewer bytes are free and can be made free.
  absl::StatusOr<Reservation> Reserve(uint64_t bytes, const char* what) {
    if (TakeIfFree(bytes)) return Reservation(this, bytes);
    while (bytes <= capacity_ && reclaim_ != nullptr && reclaim_(Lacking(bytes)) > 0) {
      if (TakeIfFree(bytes)) return Reservation(this, bytes);
    }
    return absl::ResourceExhaustedError(absl::StrCat(what, " needs ", bytes, " bytes; ",
                                                     Free(used()), " of the memory budget of ",
                                                     capacity_, " are free"));
  }

  // Without a Reservation: the caller gives them back. False if fewer are free.
  bool TakeIfFree(uint64_t bytes) {
    uint64_t used = used_.load(std::memory_order_relaxed);
    do {
      if (bytes > Free(used)) return false;
    } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
    return true;
  }
  // For what frees more than it takes and cannot do so first: may go beyond the capacity.
  Reservation ReserveBeyond(uint64_t bytes) {
    used_.fetch_add(bytes, std::memory_order_relaxed);
    return Reservation(this, bytes);
  }
  void Give(uint64_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }

  // Makes `held`, which is empty or of this budget, hold `bytes`. ResourceExhausted as above,
  // `held` unchanged then; never when it shrinks.
  absl::Status Resize(Reservation* held, uint64_t bytes, const char* what) {
    if (bytes > held->bytes_) {
      absl::StatusOr<Reservation> more = Reserve(bytes - held->bytes_, what);
      if (!more.ok()) return std::move(more).status();
      more->budget_ = nullptr;  // its bytes are held's from here on
      held->budget_ = this;
    } else {
      used_.fetch_sub(held->bytes_ - bytes, std::memory_order_relaxed);
    }
    held->bytes_ = bytes;
    return absl::OkStatus();
  }

  uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  uint64_t capacity() const { return capacity_; }

 private:
  friend class Reservation;
  // What is to be freed for `bytes` to fit; at least 1, as others may have taken or given some.
  uint64_t Lacking(uint64_t bytes) const {
    const uint64_t free = Free(used());
    return bytes > free ? bytes - free : 1;
  }
  uint64_t Free(uint64_t used) const { return used < capacity_ ? capacity_ - used : 0; }

  const uint64_t capacity_;
  Reclaim reclaim_;                // constant while the budget is used
  std::atomic<uint64_t> used_{0};  // above capacity_ only by what ReserveBeyond took
};

Reservation::~Reservation() {
  if (budget_ != nullptr) budget_->Give(bytes_);
}

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_MEMORY_BUDGET_H_
