// SPDX-License-Identifier: Apache-2.0
//
// HeapTrimmer: gives the memory of large messages back to the system when they are gone.
//
// The allocator keeps memory that is freed between blocks in use, in the heap of each thread that
// allocated some: without trimming, the memory of one burst of large messages would stay resident
// for ever. Trimming takes the heaps' locks for some milliseconds. A thread of its own therefore
// trims once in a while, and only after much memory has been released.
#ifndef ATTND_SERVER_CALLS_HEAP_TRIMMER_H_
#define ATTND_SERVER_CALLS_HEAP_TRIMMER_H_

#include <chrono>
#include <cstddef>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/mutex.h"

namespace attnd::server {

// Thread-safety: Start belongs to one thread; all other methods may be called from any thread.
class HeapTrimmer {
 public:
  // How many released bytes make a trim worthwhile, and the least time between two trims.
  static constexpr size_t kWorthBytes = size_t{4} << 20;
  static constexpr std::chrono::milliseconds kPeriod{500};

  HeapTrimmer() = default;
  HeapTrimmer(const HeapTrimmer&) = delete;
  HeapTrimmer& operator=(const HeapTrimmer&) = delete;
  ~HeapTrimmer();

  // Without it nothing is trimmed. ResourceExhausted if the system refuses the thread.
  absl::Status Start();

  // Notes that `bytes` of a message have been, or are just being, freed.
  void OnReleased(size_t bytes);

 private:
  void Main();

  Mutex mutex_;
  CondVar work_;
  size_t released_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_HEAP_TRIMMER_H_
