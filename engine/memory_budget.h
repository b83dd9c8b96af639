// SPDX-License-Identifier: Apache-2.0
//
// MemoryBudget: what sequences, their building and the answers under way may use, asked for before
// anything is allocated.
#ifndef ATTND_ENGINE_MEMORY_BUDGET_H_
#define ATTND_ENGINE_MEMORY_BUDGET_H_

#include <atomic>
#include <cstdint>
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
  explicit MemoryBudget(uint64_t capacity) : capacity_(capacity) {}

  // ResourceExhausted, naming `what`, if fewer bytes are free.
  absl::StatusOr<Reservation> Reserve(uint64_t bytes, const char* what) {
    uint64_t used = used_.load(std::memory_order_relaxed);
    do {
      if (bytes > capacity_ - used) {
        return absl::ResourceExhaustedError(
            absl::StrCat(what, " needs ", bytes, " bytes; ", capacity_ - used,
                         " of the memory budget of ", capacity_, " are free"));
      }
    } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
    return Reservation(this, bytes);
  }

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
  const uint64_t capacity_;
  std::atomic<uint64_t> used_{0};  // never above capacity_
};

Reservation::~Reservation() {
  if (budget_ != nullptr) budget_->used_.fetch_sub(bytes_, std::memory_order_relaxed);
}

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_MEMORY_BUDGET_H_
