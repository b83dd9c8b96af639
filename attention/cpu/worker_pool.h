// SPDX-License-Identifier: Apache-2.0
//
// The threads that a CPU step spreads its work over.
#ifndef ATTND_ATTENTION_CPU_WORKER_POOL_H_
#define ATTND_ATTENTION_CPU_WORKER_POOL_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"

namespace attnd::attention {

// A bounded set of threads (a oneTBB arena). Several callers may use one pool at the same time and
// then share its threads; a caller works along on its own items. Thread-safe.
//
// Only this class's source file includes oneTBB. The thread sanitizer cannot look into oneTBB's
// library, where its threads synchronise; the source file therefore tells the sanitizer which
// orders ForEach promises, and no more.
class WorkerPool {
 public:
  // `threads` counts the calling thread, and is at least 1.
  explicit WorkerPool(uint32_t threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  uint32_t threads() const { return threads_; }

  // Calls run_item(0) ... run_item(items - 1), each once, in any order and at the same time. What
  // the caller did before is seen by every item, and what the items did is seen by the caller when
  // ForEach returns. An exception thrown by an item is thrown to the caller; items not yet begun
  // are then left out.
  void ForEach(size_t items, absl::FunctionRef<void(size_t)> run_item);

 private:
  struct Arena;

  const uint32_t threads_;
  const std::unique_ptr<Arena> arena_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_WORKER_POOL_H_
