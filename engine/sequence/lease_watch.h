// SPDX-License-Identifier: Apache-2.0
//
// LeaseWatch: closes the sequences whose leases have ended.
#ifndef ATTND_ENGINE_SEQUENCE_LEASE_WATCH_H_
#define ATTND_ENGINE_SEQUENCE_LEASE_WATCH_H_

#include <chrono>
#include <thread>

#include "absl/status/status.h"
#include "common/mutex.h"
#include "engine/event_listener.h"
#include "engine/sequence/sequence_table.h"

namespace attnd::engine {

// Owns a thread that asks the table every kPeriod. The table knows the next lease that could end,
// so that a round in which none has ended costs one lock.
//
// Thread-safety: Start and Shutdown belong to one thread.
class LeaseWatch {
 public:
  // A sequence is closed at most so long after its lease's end, if the thread gets to run.
  static constexpr std::chrono::milliseconds kPeriod{100};

  // Both must outlive the watch; listener may be null.
  LeaseWatch(SequenceTable* table, EventListener* listener) : table_(table), listener_(listener) {}
  ~LeaseWatch() { Shutdown(); }

  // ResourceExhausted if the system refuses the thread.
  absl::Status Start();
  // No sequence is closed afterwards.
  void Shutdown();

 private:
  void Loop();
  // False once Shutdown has been called.
  bool WaitForRound();
  void CloseEnded();

  // Constant.
  SequenceTable* const table_;
  EventListener* const listener_;

  Mutex mutex_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_LEASE_WATCH_H_
