// SPDX-License-Identifier: Apache-2.0
//
// Turning tails into segments: a finished prefill at once, generated tokens in the background.
#ifndef ATTND_ENGINE_SEGMENTER_H_
#define ATTND_ENGINE_SEGMENTER_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "attention/segment_builder.h"
#include "common/mutex.h"
#include "engine/engine.h"
#include "engine/memory_budget.h"
#include "engine/sequence.h"

namespace attnd::engine {

// StepGate: lets builders make way for steps. A builder asks between quanta; while a step runs or
// waits it is held back, but never longer than kYieldMax, so that it finishes under load too.
// Thread-safe.
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

 private:
  static constexpr std::chrono::microseconds kYieldMax{4000};

  void Enter() { steps_.fetch_add(1, std::memory_order_relaxed); }
  void Leave();

  std::atomic<uint32_t> steps_{0};
  std::atomic<uint32_t> yielding_{0};
  Mutex mutex_;
  CondVar idle_;
};

// Builds segments. Owns the background thread; one prefill is segmented at a time.
class Segmenter {
 public:
  struct Options {
    uint32_t segment_tokens = 8192;
    uint32_t threads = 1;  // for a finished prefill
  };

  Segmenter(const Options& options, MemoryBudget* budget, StepGate* gate, Observer* observer);
  ~Segmenter() { Shutdown(); }

  // Segments what the prefill left outside the window, in runs of segment_tokens; a rest below
  // kSegmentTokensMin stays in the tail. ResourceExhausted or Cancelled leave a shorter chain,
  // which is as valid.
  absl::Status SegmentPrefill(Sequence* sequence, const std::atomic<bool>* cancelled);

  // Tells that `sequence` has grown; queues it when a full run has left its window.
  void OnGrown(const std::shared_ptr<Sequence>& sequence);

  void WaitUntilIdle();
  void Shutdown();

  static constexpr uint32_t kSegmentTokensMin = 512;

 private:
  void BackgroundLoop();
  // One segment, its heads on `threads` threads. False if there was none to build.
  absl::StatusOr<bool> BuildNext(Sequence* sequence, uint32_t min_tokens, uint32_t threads,
                                 Observer::BuildTrigger trigger,
                                 const std::atomic<bool>* cancelled);
  absl::StatusOr<bool> BuildLocked(Sequence* sequence, uint32_t min_tokens, uint32_t threads,
                                   const std::atomic<bool>* cancelled, uint32_t* installed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(sequence->build_mutex());
  absl::Status BuildHeads(const Sequence& sequence, attention::SegmentBuilder* builder,
                          uint32_t threads, const std::atomic<bool>* cancelled);
  bool Unwanted(const Sequence& sequence, const std::atomic<bool>* cancelled) const;
  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }

  const Options options_;
  MemoryBudget* const budget_;
  StepGate* const gate_;
  Observer* const observer_;

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::weak_ptr<Sequence>> queue_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;          // the background thread builds
  bool prefill_busy_ ABSL_GUARDED_BY(mutex_) = false;  // a prefill is being segmented

  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> next_segment_id_{1};
  std::thread background_;  // last: it uses everything above
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEGMENTER_H_
