// SPDX-License-Identifier: Apache-2.0
//
// BackendTotals: what the steps of a CUDA backend came to, added up.
#ifndef ATTND_GPU_BACKEND_TOTALS_H_
#define ATTND_GPU_BACKEND_TOTALS_H_

#include <array>
#include <cstdint>

#include "attention/backend.h"
#include "common/mutex.h"
#include "gpu/device/device.h"

namespace attnd::gpu {

// Thread-safe. What belongs together is added under one lock, so that no reader sees more hits than
// look-ups.
class BackendTotals {
 public:
  using FallbackRows = std::array<uint64_t, attention::kFallbacks>;

  // Of a step, with the rows that the CPU answers.
  void AddFallback(const FallbackRows& rows);
  void AddPages(const attention::BackendStats::PageCache& pages);  // but for its bytes
  void AddFiles(const attention::BackendStats::Files& files);
  void AddTimes(const StageSeconds& seconds);  // of a timed step
  // So many bytes were missing for the indexes of one sequence; whether this is the first time.
  bool AddIndexMissing(uint64_t bytes);

  // What is counted here; all else is 0.
  attention::BackendStats stats() const;

 private:
  mutable Mutex mutex_;
  attention::BackendStats stats_ ABSL_GUARDED_BY(mutex_);  // these counts alone
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_BACKEND_TOTALS_H_
