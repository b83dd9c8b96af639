// SPDX-License-Identifier: Apache-2.0
#include "engine/archive/pager.h"

#include <glog/logging.h>

#include <algorithm>
#include <new>
#include <utility>

#include "common/start_thread.h"
#include "common/status.h"
#include "common/unix_time.h"

namespace attnd::engine {

Pager::Pager(Archive* archive, MemoryBudget* budget, Hooks hooks, const ArchiveOptions& options)
    : archive_(archive),
      budget_(budget),
      hooks_(std::move(hooks)),
      retention_(options.retention),
      comes_back_after_(options.comes_back_after),
      next_return_(std::chrono::steady_clock::now() + comes_back_after_) {}

absl::Status Pager::Start() {
  CHECK(!thread_.joinable()) << "started once";
  ATTND_ASSIGN_OR_RETURN(thread_, StartThread("for moving segments to disk", [this] { Loop(); }));
  return absl::OkStatus();
}

void Pager::Shutdown() {
  {
    MutexLock lock(mutex_);
    stopping_.store(true);
  }
  asked_.NotifyAll();
  done_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

bool Pager::MakeRoom(std::chrono::steady_clock::time_point until,
                     const std::atomic<bool>* cancelled) {
  MutexLock lock(mutex_);
  // The round under way may have looked at the sequences already: the next one counts.
  const uint64_t round = rounds_ + 2;
  const uint64_t moves = moves_;
  asked_rounds_ = std::max(asked_rounds_, round);
  // rounds_ only grows, so that no earlier call asked for a later round than this one.
  CHECK_EQ(asked_rounds_, round);
  asked_.NotifyAll();
  const auto given_up = [&] {
    return stopping_.load() || std::chrono::steady_clock::now() > until ||
           (cancelled != nullptr && cancelled->load(std::memory_order_relaxed));
  };
  while (moves_ == moves && rounds_ < round && !given_up()) {
    static_cast<void>(done_.WaitFor(mutex_, kLookAgain));
  }
  return moves_ > moves && !stopping_.load();
}

void Pager::Loop() {
  auto rest_until = std::chrono::steady_clock::time_point::min();  // after a failure
  std::chrono::milliseconds rest = kRestMin;
  while (!stopping_.load()) {
    bool asked = false;
    {
      MutexLock lock(mutex_);
      asked = rounds_ < asked_rounds_;
      if (!asked) {
        static_cast<void>(asked_.WaitFor(mutex_, kPeriod));
        asked = rounds_ < asked_rounds_;
      }
    }
    if (asked || std::chrono::steady_clock::now() >= rest_until) {
      if (RoundWithinMemory(asked)) {
        rest = kRestMin;
      } else {
        rest_until = std::chrono::steady_clock::now() + rest;
        rest = std::min(2 * rest, kRestMax);
      }
    }
    {
      MutexLock lock(mutex_);
      ++rounds_;
      CHECK_LE(asked_rounds_, rounds_ + 1) << "MakeRoom asked before this round ended";
    }
    done_.NotifyAll();
  }
}

bool Pager::RoundWithinMemory(bool asked) {
  try {
    RetainNow();
    return Round(asked).ok();
  } catch (const std::bad_alloc&) {
    return false;  // the next round may find memory
  }
}

void Pager::RetainNow() {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_retention_) return;
  next_retention_ = now + kRetentionPeriod;
  archive_->NoteUses();
  // What cannot be dropped now is tried again.
  archive_->Retain(retention_, NowUnixSeconds(), BootSeconds()).IgnoreError();
  archive_->DropOrphans();
}

uint64_t Pager::HeldBytes() const {
  const uint64_t used = budget_->used();
  return used - std::min(used, archive_->ReclaimableBytes());
}

// Steps use sequences while they are being ordered, so each time is read once; and whoever closes a
// sequence meanwhile has its memory back.
std::vector<Pager::Candidate> Pager::Candidates(
    absl::FunctionRef<bool(const Sequence&)> wanted) const {
  std::vector<Candidate> candidates;
  for (const auto& sequence : hooks_.sequences()) {
    if (wanted(*sequence)) candidates.push_back({sequence->last_used(), sequence});
  }
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.used < b.used; });
  return candidates;
}

absl::Status Pager::Round(bool asked) {
  if (asked || Above(kIdleMark)) return MoveOut(asked);
  if (std::chrono::steady_clock::now() >= next_return_) BringOneBack();
  return absl::OkStatus();
}

absl::Status Pager::MoveOut(bool asked) {
  const auto whole = [](const Sequence& sequence) { return sequence.has_whole_segments(); };
  while (!stopping_.load() && Above(kMark) && hooks_.drop_copies()) {
  }
  const auto idle_since = std::chrono::steady_clock::now() - kIdle;
  bool moved = false;
  for (const Candidate& candidate : Candidates(whole)) {
    // Whoever asked gets at least one segment's room.
    while (!stopping_.load() && ((asked && !moved) || Above(kTarget))) {
      if (!asked && !Above(kMark) && candidate.used > idle_since) return absl::OkStatus();
      const std::shared_ptr<Sequence> sequence = candidate.sequence.lock();
      if (sequence == nullptr || sequence->closed() || !sequence->has_whole_segments()) break;
      ATTND_ASSIGN_OR_RETURN(const bool one, MoveOne(sequence.get()));
      if (!one) break;  // what it had has gone meanwhile: the next one's turn
      moved = true;
    }
  }
  return absl::OkStatus();
}

bool Pager::IsAsked() {
  MutexLock lock(mutex_);
  return rounds_ < asked_rounds_;
}

void Pager::BringOneBack() {
  next_return_ = std::chrono::steady_clock::now() + comes_back_after_;  // unless one comes
  const auto proceed = [this]() -> absl::Status {
    ATTND_RETURN_IF_ERROR(Proceed());
    if (!IsAsked() && !Above(kIdleMark)) return absl::OkStatus();
    return absl::CancelledError("others want the memory");
  };
  const auto idle_since = std::chrono::steady_clock::now() - kIdle;
  const std::vector<Candidate> candidates = Candidates([&](const Sequence& sequence) {
    const attention::Backend* backend = sequence.args().backend;
    return sequence.has_paged_segments() && sequence.last_used() > idle_since &&
           backend != nullptr && backend->PrefersWhole();
  });
  for (auto candidate = candidates.rbegin(); candidate != candidates.rend(); ++candidate) {
    const std::shared_ptr<Sequence> sequence = candidate->sequence.lock();
    if (sequence == nullptr || sequence->closed()) continue;
    const auto swap = archive_->WholeVersionFor(sequence.get(), proceed);
    if (absl::IsCancelled(swap.status()) || absl::IsResourceExhausted(swap.status())) return;
    if (!swap.ok() || !swap->has_value()) continue;  // another one may be readable, or have room
    CHECK((*swap)->before->paged() && !(*swap)->after->paged()) << "a paged segment comes back";
    Apply(**swap);
    archive_->CountPageIn();
    next_return_ = std::chrono::steady_clock::now();
    return;
  }
}

void Pager::Apply(const Swap& swap) {
  for (const auto& other : hooks_.sequences()) other->SwapSegments({&swap, 1});
}

absl::StatusOr<bool> Pager::MoveOne(Sequence* sequence) {
  next_return_ = std::chrono::steady_clock::now() + comes_back_after_;
  const auto swap = archive_->PageOut(sequence, [this] { return Proceed(); });
  if (!swap.ok()) archive_->CountFailedPageOut();
  ATTND_RETURN_IF_ERROR(swap.status());
  if (!swap->has_value()) return false;
  CHECK(!(*swap)->before->paged() && (*swap)->after->paged()) << "a whole segment moves to disk";
  Apply(**swap);  // forks share segments: their memory is free when the last one lets them go
  MutexLock lock(mutex_);
  ++moves_;
  done_.NotifyAll();
  return true;
}

}  // namespace attnd::engine
