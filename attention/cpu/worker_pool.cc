// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/worker_pool.h"

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>

#ifdef ATTND_TSAN
// Set when the rest is built with thread sanitizer and this file is not (CMakeLists.txt).
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
#endif

namespace attnd::attention {
namespace {

// Tells thread sanitizer that what this thread did is seen by those that call Observe on the same
// address later.
void Publish([[maybe_unused]] char* address) {
#ifdef ATTND_TSAN
  __tsan_release(address);
#endif
}

void Observe([[maybe_unused]] char* address) {
#ifdef ATTND_TSAN
  __tsan_acquire(address);
#endif
}

}  // namespace

struct WorkerPool::Arena {
  // Initialised here and not by the first use: an arena that finds no memory at its first use
  // leaves every later one waiting for ever (oneTBB's atomic_do_once does not expect exceptions).
  explicit Arena(uint32_t threads) : tbb(static_cast<int>(threads)) { tbb.initialize(); }
  tbb::task_arena tbb;
};

WorkerPool::WorkerPool(uint32_t threads)
    : threads_(threads), arena_(std::make_unique<Arena>(threads)) {}

WorkerPool::~WorkerPool() = default;

void WorkerPool::ForEach(size_t items, absl::FunctionRef<void(size_t)> run_item) {
  char before = 0;  // They stand for the two orders that ForEach promises.
  char after = 0;
  Publish(&before);
  arena_->tbb.execute([&] {
    tbb::parallel_for(
        tbb::blocked_range<size_t>(0, items, 1),
        [&](const tbb::blocked_range<size_t>& range) {
          Observe(&before);
          for (size_t item = range.begin(); item != range.end(); ++item) run_item(item);
          Publish(&after);
        },
        tbb::simple_partitioner());
  });
  Observe(&after);
}

}  // namespace attnd::attention
