// SPDX-License-Identifier: Apache-2.0
//
// FileTurns: how many steps over segments in files are under way. Such a step has a stream while it
// waits for a disk; as there are fewer turns than streams, other steps find one.
#ifndef ATTND_GPU_FILE_TURNS_H_
#define ATTND_GPU_FILE_TURNS_H_

#include <chrono>
#include <cstdint>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "common/status.h"

namespace attnd::gpu {

// Thread-safe. Must outlive its turns.
class FileTurns {
 public:
  // With one stream there is nothing to leave.
  explicit FileTurns(uint32_t streams) : free_(streams > 1 ? streams / 2 : 1) {}

  // A turn for as long as it is held.
  class Turn {
   public:
    explicit Turn(FileTurns* turns) : turns_(turns) {}
    Turn(Turn&& other) noexcept : turns_(std::exchange(other.turns_, nullptr)) {}
    ~Turn() {
      if (turns_ != nullptr) turns_->GiveBack();
    }

   private:
    FileTurns* turns_;
  };

  // Waits until there is one, or `alive`, which is asked now and then, says no.
  absl::StatusOr<Turn> Take(absl::FunctionRef<absl::Status()> alive) {
    constexpr std::chrono::microseconds kPoll{2000};
    while (true) {
      {
        MutexLock lock(mutex_);
        if (free_ == 0) changed_.WaitFor(mutex_, kPoll);
        if (free_ > 0) {
          --free_;
          return Turn(this);
        }
      }
      ATTND_RETURN_IF_ERROR(alive());
    }
  }

 private:
  void GiveBack() {
    MutexLock lock(mutex_);
    ++free_;
    changed_.NotifyOne();
  }

  Mutex mutex_;
  CondVar changed_;
  uint32_t free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_FILE_TURNS_H_
