// SPDX-License-Identifier: Apache-2.0
//
// Auditor: whether answers are as good as they are meant to be. Of the rows that steps have
// answered, a share is computed again, densely, in the background, and what is found goes to the
// EventListener.
#ifndef ATTND_ENGINE_AUDIT_AUDITOR_H_
#define ATTND_ENGINE_AUDIT_AUDITOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "attention/backend.h"
#include "common/mutex.h"
#include "engine/audit/audit.h"
#include "engine/audit/dense_row.h"
#include "engine/event_listener.h"
#include "engine/memory_budget.h"

namespace attnd::engine {

class StepGate;

// What it costs is bounded by what it may take and not by the rows that there are. Dense attention
// over a long sequence takes some fifty times what error-target takes: one row in a hundred would
// be half of a server's work. So there is one thread of the lowest priority that works in quanta of
// kQuantum of processor time and sleeps after each, so that it takes `cpu_share` of a core's time.
// While steps run it also waits, up to kStarvedMax, until all threads of the process together have
// had so much more than it: a server that gets little of its machine does not lose a greater share.
// It uses no thread of the pool that steps share, and whoever answers a step takes no lock of it: a
// thread of the lowest priority that is put aside while it holds one may hold it for long. A row
// that waits or is being computed pins nothing (DenseRow): what is closed is freed at once, and the
// row counts as gone.
//
// Rows over paged segments are not audited. Dense attention would read all of a sequence from disk:
// at one row in a hundred half of what error-target reads, and by far more than what the pool of
// pages holds, which steps would then have to read again. Nothing is lost by it: a segment's
// clusters are the same in memory and on disk, so that a policy errs as much over one as over the
// other, and what on_miss=estimate adds is in every reply (missed_mass).
//
// It computes on the CPU from host memory, whatever the backend, by the CPU's kernels for exact
// attention: selection, estimates, the order of steps' work and everything of a GPU are checked by
// it; those kernels and what lies in memory are not.
//
// Thread-safety: Offer and WaitUntilIdle from any thread, the others from the engine's owner.
class Auditor {
 public:
  // options.share is above 0. `gate` and the others must outlive the auditor; no null.
  Auditor(const AuditOptions& options, MemoryBudget* budget, const StepGate* gate,
          EventListener* listener);
  ~Auditor() { Shutdown(); }

  // Starts the thread, before anything else is called. ResourceExhausted if the system refuses it.
  absl::Status Start();

  // A row that was answered, with its buffers still there; they are read before this returns. Never
  // waits and never fails: whatever is in the way, the row is not audited, and the listener is told
  // unless the row was not picked or has a fault. Nothing happens after Shutdown.
  void Offer(uint64_t sequence_id, uint32_t layer, const attention::StepRow& row);

  // Waits until no row is being audited and none waits; for tests and benchmarks.
  void WaitUntilIdle();
  // Drops what waits and ends what is being computed.
  void Shutdown();

  // Whether the row is one of the share.
  static bool Picks(const AuditOptions& options, uint64_t sequence_id, uint32_t layer,
                    uint64_t position);

  // Below what builders take at a time; a step that begins meanwhile shares a core for so long.
  static constexpr std::chrono::microseconds kQuantum{200};
  static constexpr std::chrono::seconds kStarvedMax{1};

 private:
  using Clock = std::chrono::steady_clock;

  // A picked row: its answer and what it takes to compute it again.
  struct Audit {
    Audit(const attention::SequenceView& view, uint32_t layer, uint64_t tokens)
        : dense(view, layer, tokens) {}

    Audit* next = nullptr;  // in offered_ or waiting_
    Reservation memory;
    DenseRow dense;
    AuditedRow found;        // what is known of it before it is computed
    std::vector<float> q;    // [query_heads, head_dim]
    std::vector<float> out;  // [query_heads, value_dim]
    std::vector<float> lse;  // [query_heads]
  };

  // Copies the row's query token and its answer. Throws std::bad_alloc.
  static std::unique_ptr<Audit> Copy(uint64_t sequence_id, uint32_t layer,
                                     const attention::StepRow& row, uint32_t token);
  void OfferPicked(uint64_t sequence_id, uint32_t layer, const attention::StepRow& row);
  // Takes a place among those that wait; false if there is none.
  bool TakePlace(uint64_t bytes);
  void LeavePlace(uint64_t bytes);
  void Push(Audit* audit);
  void Skip(AuditSkip why) { listener_->OnAuditSkipped(why); }

  void BackgroundLoop();
  // The one that was offered first; null if there is none.
  std::unique_ptr<Audit> Pop();
  void Run(Audit* audit);
  void StartQuantum();
  // Sleeps if a quantum has been used. False when shutting down.
  bool Rest();
  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }

  const AuditOptions options_;
  MemoryBudget* const budget_;
  const StepGate* const gate_;
  EventListener* const listener_;

  // Those that wait, and with them those that are being copied: their places.
  std::atomic<uint32_t> queued_rows_{0};
  std::atomic<uint64_t> queued_bytes_{0};
  std::atomic<Audit*> offered_{nullptr};  // the newest of a list; owned
  std::atomic<uint64_t> pending_{0};      // offered and not told of yet
  std::atomic<bool> stopping_{false};

  Mutex mutex_;  // for sleeping only
  CondVar wake_;
  CondVar idle_;

  // The thread's own, and Shutdown's when it has ended.
  Audit* waiting_ = nullptr;                   // taken from offered_, the oldest of a list; owned
  std::chrono::nanoseconds quantum_start_{0};  // of its processor time
  std::chrono::nanoseconds process_start_{0};  // of the process's, when the quantum began

  std::thread background_;  // last: it uses everything above
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_AUDIT_AUDITOR_H_
