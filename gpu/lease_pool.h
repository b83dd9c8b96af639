// SPDX-License-Identifier: Apache-2.0
//
// LeasePool: things that steps take one of for a while. Who finds none waits.
#ifndef ATTND_GPU_LEASE_POOL_H_
#define ATTND_GPU_LEASE_POOL_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "common/status.h"

namespace attnd::gpu {

// Thread-safe. Must outlive its leases.
template <typename T>
class LeasePool {
 public:
  // A thing for as long as it is held.
  class Lease {
   public:
    Lease(LeasePool* pool, std::unique_ptr<T> thing) : pool_(pool), thing_(std::move(thing)) {}
    Lease(Lease&& other) noexcept = default;
    ~Lease() {
      if (thing_ != nullptr) pool_->Add(std::move(thing_));
    }
    T* get() const { return thing_.get(); }

   private:
    LeasePool* pool_;
    std::unique_ptr<T> thing_;
  };

  void Add(std::unique_ptr<T> thing) {
    MutexLock lock(mutex_);
    free_.push_back(std::move(thing));
    changed_.NotifyAll();  // the first of those that wait is to have it
  }

  // Waits until one is free and those that came before have had theirs, or `alive`, which is asked
  // now and then, says no.
  absl::StatusOr<Lease> Take(absl::FunctionRef<absl::Status()> alive) {
    constexpr std::chrono::microseconds kPoll{2000};
    const Place place(this);
    while (true) {
      {
        MutexLock lock(mutex_);
        if (!IsFirst(place.number)) changed_.WaitFor(mutex_, kPoll);
        if (IsFirst(place.number)) return TakeLast();
      }
      ATTND_RETURN_IF_ERROR(alive());
    }
  }

  // One at once, if `others` stay free.
  std::optional<Lease> TakeIfFree(size_t others) {
    MutexLock lock(mutex_);
    if (free_.size() <= others) return std::nullopt;
    return TakeLast();
  }

 private:
  // Among those that wait.
  struct Place {
    explicit Place(LeasePool* p) : pool(p) {
      MutexLock lock(pool->mutex_);
      number = pool->next_place_++;
      pool->waiting_.push_back(number);
    }
    ~Place() {
      MutexLock lock(pool->mutex_);
      pool->waiting_.remove(number);
      pool->changed_.NotifyAll();
    }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    LeasePool* const pool;
    uint64_t number = 0;
  };

  // Whether one is free, for this place.
  bool IsFirst(uint64_t number) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !free_.empty() && waiting_.front() == number;
  }
  Lease TakeLast() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::unique_ptr<T> thing = std::move(free_.back());
    free_.pop_back();
    return Lease(this, std::move(thing));
  }

  Mutex mutex_;
  CondVar changed_;
  std::vector<std::unique_ptr<T>> free_ ABSL_GUARDED_BY(mutex_);
  std::list<uint64_t> waiting_ ABSL_GUARDED_BY(mutex_);  // in their order
  uint64_t next_place_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_LEASE_POOL_H_
