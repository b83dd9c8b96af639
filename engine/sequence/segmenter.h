// SPDX-License-Identifier: Apache-2.0
//
// Segmenter: turns tails into segments: finished prefills at once, for which a device has done some
// of the work while they were uploaded, generated tokens in the background, there first into early
// segments.
#ifndef ATTND_ENGINE_SEQUENCE_SEGMENTER_H_
#define ATTND_ENGINE_SEQUENCE_SEGMENTER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "attention/index/segment_builder.h"
#include "common/mutex.h"
#include "engine/event_listener.h"
#include "engine/memory_budget.h"
#include "engine/sequence/begun_segment.h"
#include "engine/sequence/segment_rules.h"
#include "engine/sequence/sequence.h"
#include "engine/sequence/step_gate.h"
#include "engine/sequence/upload_builder.h"

namespace attnd::engine {

// Builds segments. Owns the background thread. Prefills take turns: each builds one run and then
// waits behind the others. Its methods throw no exceptions.
class Segmenter {
 public:
  struct Options {
    uint32_t segment_tokens = 8192;  // of generated tokens, and at a prompt's beginning
    uint32_t threads = 1;            // for a finished prefill; fewer if the system refuses some
    // Whether there is memory for copies: early segments, and those of prompts that are uploaded;
    // null: as long as the budget gives some.
    std::function<bool()> copies_allowed;
  };

  // `backend` builds segments where it can. All arguments must outlive the segmenter.
  Segmenter(const Options& options, attention::Backend* backend, MemoryBudget* budget,
            StepGate* gate, EventListener* listener);
  ~Segmenter() { Shutdown(); }

  // Starts the background thread; to be called before any other method. ResourceExhausted if the
  // system refuses the thread.
  absl::Status Start();

  // Segments the prefill's tokens outside the window, in runs of Sequence::PromptRun, or of
  // segment_tokens where memory is short; a rest of fewer than kSegmentTokensMin tokens stays in
  // the tail. ResourceExhausted (budget or system), Unavailable (Shutdown), NotFound (the sequence
  // was closed) and Cancelled (`cancelled` was set) leave a shorter chain, which is valid, too.
  absl::Status SegmentPrefill(Sequence* sequence, const std::atomic<bool>* cancelled);

  // Only full runs of segment_tokens: for a prompt that is still being uploaded while memory is
  // short.
  absl::Status SegmentWholeRuns(Sequence* sequence, const std::atomic<bool>* cancelled);

  // To be called when tokens of a prompt have been appended (UploadBuilder).
  void OnUploaded(const std::shared_ptr<Sequence>& sequence, uint64_t prompt_tokens) {
    uploads_.OnUploaded(sequence, prompt_tokens);
  }
  // Gives the memory back of what was built of prompts that are still uploaded; whether there was
  // any.
  bool DropUploads() { return uploads_.DropAll(); }

  // To be called when `sequence` has grown. Queues the sequence when a full run, or one for an
  // early segment, has left its window and no failed build holds it back (Sequence::DueBuild).
  void OnGrown(const std::shared_ptr<Sequence>& sequence);

  void WaitUntilIdle();
  void Shutdown();

  static constexpr uint32_t kSegmentTokensMin = engine::kSegmentTokensMin;

 private:
  // A prefill's place among the prefills that take turns, from construction to destruction.
  class Turn {
   public:
    Turn(Segmenter* segmenter, const Sequence& sequence);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // Waits until it is this prefill's turn to build. An error if nobody wants the sequence's
    // segments any more.
    absl::Status Wait(const std::atomic<bool>* cancelled);

   private:
    friend class Segmenter;
    Segmenter* const segmenter_;
    const Sequence& sequence_;
  };

  // The first prefill that may build now: a prefill lets the next one go first while the background
  // builds for its sequence. Null while a prefill builds.
  const Turn* NextTurn() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the first sequence out of the queue for which no prefill builds now; null if there is
  // none.
  std::shared_ptr<Sequence> TakeQueued() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void BackgroundLoop();
  // Builds what is due; whether there was something.
  bool BuildDue(Sequence* sequence);
  absl::Status SegmentInTurns(Sequence* sequence, bool whole_runs,
                              const std::atomic<bool>* cancelled);
  // Builds one segment, its heads on `threads` threads. False if there was none to build. No other
  // thread may build this sequence's segments meanwhile: the caller has its turn, or is the
  // background.
  absl::StatusOr<bool> BuildNext(Sequence* sequence, uint32_t min_tokens, uint32_t max_tokens,
                                 uint32_t threads, EventListener::BuildTrigger trigger,
                                 const std::atomic<bool>* cancelled);
  struct Built {
    uint32_t tokens = 0;  // that were installed: all, or none if the segment no longer fits
    std::chrono::steady_clock::duration earlier{0};  // time that was spent during the upload
  };
  absl::StatusOr<Built> Build(Sequence* sequence, const SegmentJob& job, uint32_t threads,
                              bool awaited, const std::atomic<bool>* cancelled);
  // Lets the backend build the layers that are left of what it has begun.
  absl::Status BuildRest(Sequence* sequence, BegunSegment* begun, bool awaited,
                         const std::atomic<bool>* cancelled);
  // Lets the backend build a part, as long as it is wanted.
  absl::Status BuildPart(const Sequence& sequence, attention::SegmentBuilder* builder,
                         const attention::SegmentPart& part, const std::atomic<bool>* cancelled);
  absl::StatusOr<Built> Install(Sequence* sequence, BegunSegment begun);
  // Lets the backend build all, or else builds with HeadBuilders.
  absl::Status BuildSegment(const Sequence& sequence, attention::SegmentBuilder* builder,
                            uint32_t threads, bool awaited, const std::atomic<bool>* cancelled);
  absl::Status BuildHeads(const Sequence& sequence, attention::SegmentBuilder* builder,
                          uint32_t threads, const std::atomic<bool>* cancelled);
  // Why a build should end: Shutdown, a closed sequence, a cancelled call. Else OK.
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
  // The prefill that builds, and the sequence for which the background builds. Never the same
  // sequence.
  const Turn* building_turn_ ABSL_GUARDED_BY(mutex_) = nullptr;
  const Sequence* background_builds_ ABSL_GUARDED_BY(mutex_) = nullptr;

  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> next_segment_id_{1};
  UploadBuilder uploads_;
  std::thread background_;  // last: it uses everything above
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_SEGMENTER_H_
