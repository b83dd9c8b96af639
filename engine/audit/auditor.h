// SPDX-License-Identifier: Apache-2.0
//
// Auditor: measures the true error of answers. It computes a share of the answered rows again,
// densely, in the background, and gives the comparison to the EventListener.
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

// Cost. Auditing is limited by a share of processor time, not by a number of rows: dense attention
// over a long sequence costs some fifty times what error-target costs, so one row in a hundred
// would be half of a server's work. One thread of the lowest priority works in quanta of kQuantum
// of processor time and sleeps after each, so that it takes `cpu_share` of a core's time. While
// steps run the thread also waits, up to kStarvedMax, until all threads of the process together
// have had 1 / cpu_share times its time: a server that gets little of its machine does not lose a
// greater share. The auditor uses no thread of the pool that steps share. A step takes no lock of
// the auditor, as a thread of the lowest priority that is preempted while it holds a lock may hold
// it for long. A row that waits or is being computed pins nothing (DenseRow): a closed sequence is
// freed at once, and its rows count as gone.
//
// Rows over paged segments are not audited. Dense attention would read all of a sequence from disk:
// at one row in a hundred half of what error-target reads, and far more than the page cache holds,
// so that steps would have to read their pages again. The audits do not lack these rows: a
// segment's clusters are the same in memory and on disk, so that a policy has the same error over
// both, and what on_miss=estimate adds is in every reply (missed_mass).
//
// What is checked. The auditor computes on the CPU from host memory, whatever the backend, with the
// CPU's kernels for exact attention. So it checks selection, estimates, the order of a step's work
// and everything on a GPU; it does not check these kernels and the contents of host memory.
//
// Thread-safety: Offer and WaitUntilIdle from any thread, the others from the engine's owner.
class Auditor {
 public:
  // options.share must be above 0. budget, gate and listener must outlive the auditor; none is
  // null.
  Auditor(const AuditOptions& options, MemoryBudget* budget, const StepGate* gate,
          EventListener* listener);
  ~Auditor() { Shutdown(); }

  // Starts the thread; to be called before any other method. ResourceExhausted if the system
  // refuses the thread.
  absl::Status Start();

  // Whether Offer may take the row once it is answered. Such a row has no final_out: out would be
  // rounded, and may lie in memory that a client writes.
  bool Picks(uint64_t sequence_id, uint32_t layer, const attention::StepRow& row) const {
    return Picks(options_, sequence_id, layer, row.past_tokens);
  }

  // Takes a row that was answered, if the row is picked. Its buffers are read before Offer returns.
  // Never waits and never fails: if something is in the way, the row is not audited, and the
  // listener is told why, unless the row has a fault. Does nothing after Shutdown.
  void Offer(uint64_t sequence_id, uint32_t layer, const attention::StepRow& row);

  // Waits until no row is being audited and none waits; for tests and benchmarks.
  void WaitUntilIdle();
  // Drops the rows that wait, and ends the audit under way.
  void Shutdown();

  // Whether the row is one of the share.
  static bool Picks(const AuditOptions& options, uint64_t sequence_id, uint32_t layer,
                    uint64_t position);

  // Shorter than a builder's quantum: a step that begins meanwhile may share its core for so long.
  static constexpr std::chrono::microseconds kQuantum{200};
  static constexpr std::chrono::seconds kStarvedMax{1};

 private:
  using Clock = std::chrono::steady_clock;

  // A picked row: its answer, and everything needed to compute it again.
  struct Audit {
    Audit(const attention::SequenceView& view, uint32_t layer, uint64_t tokens)
        : dense(view, layer, tokens) {}

    Audit* next = nullptr;  // in offered_ or waiting_
    Reservation memory;
    DenseRow dense;
    AuditedRow found;        // without the comparison until the row has been computed
    std::vector<float> q;    // [query_heads, head_dim]
    std::vector<float> out;  // [query_heads, value_dim]
    std::vector<float> lse;  // [query_heads]
  };

  // Copies the row's query token and its answer. Throws std::bad_alloc.
  static std::unique_ptr<Audit> Copy(uint64_t sequence_id, uint32_t layer,
                                     const attention::StepRow& row, uint32_t token);
  void OfferPicked(uint64_t sequence_id, uint32_t layer, const attention::StepRow& row);
  // Takes a place of `bytes` in the queue; false if the queue is full.
  bool TakePlace(uint64_t bytes);
  void LeavePlace(uint64_t bytes);
  void Push(Audit* audit);
  void Skip(AuditSkip why) { listener_->OnAuditSkipped(why); }

  void BackgroundLoop();
  // Takes the row that was offered first out of the queue; null if there is none.
  std::unique_ptr<Audit> Pop();
  void Run(Audit* audit);
  void StartQuantum();
  // Sleeps if the quantum has been used up. False when shutting down.
  bool Rest();
  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }

  const AuditOptions options_;
  MemoryBudget* const budget_;
  const StepGate* const gate_;
  EventListener* const listener_;

  // Rows that wait or are being copied, and their bytes.
  std::atomic<uint32_t> queued_rows_{0};
  std::atomic<uint64_t> queued_bytes_{0};
  std::atomic<Audit*> offered_{nullptr};  // a list, the newest row first; owned
  std::atomic<uint64_t> pending_{0};      // rows that were offered and not reported yet
  std::atomic<bool> stopping_{false};

  Mutex mutex_;  // for sleeping only
  CondVar wake_;
  CondVar idle_;

  // Used by the auditor's thread alone, and by Shutdown after the thread has ended.
  Audit* waiting_ = nullptr;  // a list taken from offered_, the oldest row first; owned
  // When the quantum began: processor time of the thread, and of the process.
  std::chrono::nanoseconds quantum_start_{0};
  std::chrono::nanoseconds process_start_{0};

  std::thread background_;  // last: it uses everything above
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_AUDIT_AUDITOR_H_
