// SPDX-License-Identifier: Apache-2.0
//
// StepGate: lets builders make way for steps.
#ifndef ATTND_ENGINE_SEQUENCE_STEP_GATE_H_
#define ATTND_ENGINE_SEQUENCE_STEP_GATE_H_

#include <atomic>
#include <chrono>
#include <cstdint>

#include "common/mutex.h"

namespace attnd::engine {

// A builder asks between quanta; while a step runs the builder waits, but never longer than
// kYieldMax, so that it also finishes under load. Thread-safe.
class StepGate {
 public:
  class Step {  // held while a step runs
   public:
    explicit Step(StepGate* gate) : gate_(gate) { gate_->Enter(); }
    ~Step() { gate_->Leave(); }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    StepGate* const gate_;
  };

  void YieldToSteps();
  // Whether a step runs. Takes no lock, for the auditor: its thread has the lowest priority, and
  // steps would wait for a lock that it holds.
  bool busy() const { return steps_.load(std::memory_order_relaxed) != 0; }

 private:
  static constexpr std::chrono::microseconds kYieldMax{4000};

  void Enter() { steps_.fetch_add(1, std::memory_order_relaxed); }
  void Leave();

  std::atomic<uint32_t> steps_{0};
  std::atomic<uint32_t> yielding_{0};
  Mutex mutex_;
  CondVar idle_;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_STEP_GATE_H_
