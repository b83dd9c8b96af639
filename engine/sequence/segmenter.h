// SPDX-License-Identifier: Apache-2.0
//
// Turning tails into segments: a finished prefill at once, generated tokens in the background.
#ifndef ATTND_ENGINE_SEQUENCE_SEGMENTER_H_
#define ATTND_ENGINE_SEQUENCE_SEGMENTER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "attention/index/segment_builder.h"
#include "common/mutex.h"
#include "engine/event_listener.h"
#include "engine/memory_budget.h"
#include "engine/sequence/sequence.h"

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
  // Whether a step runs, for those who may wait only where no step would wait for them.
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

// Builds segments. Owns the background thread. Prefills take turns: each builds one run and then
// stands behind the others that wait. No exception leaves it.
class Segmenter {
 public:
  struct Options {
    uint32_t segment_tokens = 8192;
    uint32_t threads = 1;  // for a finished prefill; fewer if the system refuses some
  };

  // `backend` builds segments where it can; it and the others must outlive the segmenter.
  Segmenter(const Options& options, attention::Backend* backend, MemoryBudget* budget,
            StepGate* gate, EventListener* listener);
  ~Segmenter() { Shutdown(); }

  // Starts the background thread, before anything else is called. ResourceExhausted if the system
  // refuses it.
  absl::Status Start();

  // Segments what the prefill left outside the window, in runs of segment_tokens; a rest below
  // kSegmentTokensMin stays in the tail. ResourceExhausted (budget or system), Unavailable
  // (Shutdown), NotFound (the sequence was closed) and Cancelled (`cancelled` was set) leave a
  // shorter chain, which is as valid.
  absl::Status SegmentPrefill(Sequence* sequence, const std::atomic<bool>* cancelled);

  // The same, of whole runs only: for a prompt that is still being uploaded and has no room left.
  // Runs are the same as SegmentPrefill's.
  absl::Status SegmentWholeRuns(Sequence* sequence, const std::atomic<bool>* cancelled);

  // Tells that `sequence` has grown; queues it when a full run has left its window and no failed
  // build holds it back (Sequence::DelayBuild).
  void OnGrown(const std::shared_ptr<Sequence>& sequence);

  void WaitUntilIdle();
  void Shutdown();

  static constexpr uint32_t kSegmentTokensMin = 512;

 private:
  // A prefill's place among those that build in turns, from construction to destruction.
  class Turn {
   public:
    Turn(Segmenter* segmenter, const Sequence& sequence);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // Until it is this one's turn to build; or why nobody wants the sequence's segments any more.
    absl::Status Wait(const std::atomic<bool>* cancelled);

   private:
    friend class Segmenter;
    Segmenter* const segmenter_;
    const Sequence& sequence_;
  };

  // The first prefill that may build now: one whose sequence the background builds lets the next
  // one go first. Null while a prefill builds.
  const Turn* NextTurn() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the first sequence out of the queue that no prefill builds now; null if there is none.
  std::shared_ptr<Sequence> TakeQueued() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void BackgroundLoop();
  absl::Status SegmentInTurns(Sequence* sequence, uint32_t min_tokens,
                              const std::atomic<bool>* cancelled);
  // One segment, its heads on `threads` threads. False if there was none to build. Nobody else may
  // build this sequence's segments meanwhile: the caller has its turn, or is the background.
  absl::StatusOr<bool> BuildNext(Sequence* sequence, uint32_t min_tokens, uint32_t threads,
                                 EventListener::BuildTrigger trigger,
                                 const std::atomic<bool>* cancelled);
  absl::StatusOr<bool> Build(Sequence* sequence, uint32_t min_tokens, uint32_t threads,
                             const std::atomic<bool>* cancelled, uint32_t* installed);
  // Builds by the backend, or else by HeadBuilders.
  absl::Status BuildSegment(const Sequence& sequence, attention::SegmentBuilder* builder,
                            uint32_t threads, const std::atomic<bool>* cancelled);
  absl::Status BuildHeads(const Sequence& sequence, attention::SegmentBuilder* builder,
                          uint32_t threads, const std::atomic<bool>* cancelled);
  // OK while somebody waits for what is being built.
  absl::Status Wanted(const Sequence& sequence, const std::atomic<bool>* cancelled) const;
  bool stopping() const { return stopping_.load(std::memory_order_relaxed); }

  const Options options_;
  attention::Backend* const backend_;
  MemoryBudget* const budget_;
  StepGate* const gate_;
  EventListener* const listener_;

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::weak_ptr<Sequence>> queue_ ABSL_GUARDED_BY(mutex_);
  std::deque<const Turn*> turns_ ABSL_GUARDED_BY(mutex_);  // in their order
  // Who builds; never both of them the same sequence.
  const Turn* building_turn_ ABSL_GUARDED_BY(mutex_) = nullptr;
  const Sequence* background_builds_ ABSL_GUARDED_BY(mutex_) = nullptr;

  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> next_segment_id_{1};
  std::thread background_;  // last: it uses everything above
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_SEGMENTER_H_
