// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/step_gate.h"

namespace attnd::engine {

void StepGate::Leave() {
  if (steps_.fetch_sub(1, std::memory_order_seq_cst) == 1 &&
      yielding_.load(std::memory_order_seq_cst) != 0) {
    MutexLock lock(mutex_);
    idle_.NotifyAll();
  }
}

void StepGate::YieldToSteps() {
  if (steps_.load(std::memory_order_relaxed) == 0) return;
  const auto end = std::chrono::steady_clock::now() + kYieldMax;
  yielding_.fetch_add(1, std::memory_order_seq_cst);
  {
    MutexLock lock(mutex_);
    while (steps_.load(std::memory_order_seq_cst) != 0) {
      const auto left = std::chrono::duration_cast<std::chrono::microseconds>(
          end - std::chrono::steady_clock::now());
      if (left.count() <= 0) break;
      idle_.WaitFor(mutex_, left);
    }
  }
  yielding_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace attnd::engine
