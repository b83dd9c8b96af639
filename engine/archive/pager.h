// SPDX-License-Identifier: Apache-2.0
//
// Pager: keeps memory and disk within their limits. It moves segments to disk when memory runs
// short, those of the sequence that was used longest ago first. The segments' indexes stay in
// memory, so that decoding goes on and reads the pages that it needs from disk. When memory has
// room again, a while after the last move, it brings segments back for backends that prefer them
// whole. The pager also drops sealed sequences beyond the limits of retention.
#ifndef ATTND_ENGINE_ARCHIVE_PAGER_H_
#define ATTND_ENGINE_ARCHIVE_PAGER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "engine/archive/archive.h"
#include "engine/memory_budget.h"
#include "engine/options.h"
#include "engine/sequence/sequence.h"

namespace attnd::engine {

// Owns a thread, which works in rounds. Above kIdleMark a round moves segments of sequences that
// nobody has used for kIdle, above kMark those of any sequence, once there are no copies to drop;
// it stops at kTarget. A round that a caller of MakeRoom waits for moves at least one segment, if
// any is whole. A round with nothing to move brings one segment back, of the sequence that was used
// last, within kIdle, and counts as used by that; not before `comes_back_after` has gone by since a
// segment was moved, or since none could come.
//
// Invariant: nobody waits for a round more than two beyond those that have ended.
class Pager {
 public:
  struct Hooks {
    std::function<std::vector<std::shared_ptr<Sequence>>()> sequences;  // all that there are
    // Gives memory back of what lies elsewhere in memory, too; false if there is none.
    std::function<bool()> drop_copies;
  };

  // archive and budget must outlive the pager, as must what the hooks use.
  Pager(Archive* archive, MemoryBudget* budget, Hooks hooks, const ArchiveOptions& options);
  ~Pager() { Shutdown(); }

  // ResourceExhausted if the system refuses the thread.
  absl::Status Start();
  // Waits until a segment has been moved, or until a round that began after the call has ended; but
  // no longer than `until`, or until `cancelled` (may be null) is set. Returns whether a segment
  // was moved.
  bool MakeRoom(std::chrono::steady_clock::time_point until, const std::atomic<bool>* cancelled);
  void Shutdown();

  static constexpr double kIdleMark = 0.80;  // the marks are shares of the budget
  static constexpr double kMark = 0.90;
  static constexpr double kTarget = Archive::kWholeShare;

 private:
  static constexpr std::chrono::seconds kIdle{10};
  static constexpr std::chrono::milliseconds kPeriod{50};
  static constexpr std::chrono::seconds kRetentionPeriod{10};
  static constexpr std::chrono::milliseconds kLookAgain{20};
  // After a failure no segment is moved unasked for kRestMin, and twice as long after each further
  // failure.
  static constexpr std::chrono::milliseconds kRestMin{1000};
  static constexpr std::chrono::milliseconds kRestMax{60000};
  static_assert(0 < kTarget && kTarget < kIdleMark && kIdleMark < kMark && kMark < 1);
  static_assert(kRestMin <= kRestMax);

  struct Candidate {
    std::chrono::steady_clock::time_point used;
    std::weak_ptr<Sequence> sequence;
  };

  void Loop();
  void RetainNow();
  bool RoundWithinMemory(bool asked);
  absl::Status Round(bool asked);
  // Ends with the first failure.
  absl::Status MoveOut(bool asked);
  // Gives way to whoever asks for room. If none comes, the next try is after comes_back_after_.
  void BringOneBack();
  bool IsAsked();  // whether anyone waits for a round
  // Sequences of which `wanted` holds, the one used longest ago first.
  std::vector<Candidate> Candidates(absl::FunctionRef<bool(const Sequence&)> wanted) const;
  // Moves the sequence's first whole segment to disk. False if the sequence has none any more.
  absl::StatusOr<bool> MoveOne(Sequence* sequence);
  // Gives a segment's other version to all sequences that have it.
  void Apply(const Swap& swap);
  absl::Status Proceed() const {
    return stopping_.load() ? absl::UnavailableError("shutting down") : absl::OkStatus();
  }
  bool Above(double mark) const {
    return static_cast<double>(HeldBytes()) > mark * static_cast<double>(budget_->capacity());
  }
  // The bytes of the budget that are in use and cannot be reclaimed at once.
  uint64_t HeldBytes() const;

  Archive* const archive_;
  MemoryBudget* const budget_;
  const Hooks hooks_;
  const RetentionLimits retention_;
  const std::chrono::milliseconds comes_back_after_;

  // Used by the pager's thread alone.
  std::chrono::steady_clock::time_point next_retention_;
  std::chrono::steady_clock::time_point next_return_;

  std::atomic<bool> stopping_{false};  // set under mutex_
  Mutex mutex_;
  CondVar asked_;
  CondVar done_;
  uint64_t asked_rounds_ ABSL_GUARDED_BY(mutex_) =
      0;                                         // greatest number of a round that is waited for
  uint64_t rounds_ ABSL_GUARDED_BY(mutex_) = 0;  // rounds that have ended
  uint64_t moves_ ABSL_GUARDED_BY(mutex_) = 0;   // segments that were moved
  std::thread thread_;                           // last: it uses everything above
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_PAGER_H_
