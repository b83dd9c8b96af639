// SPDX-License-Identifier: Apache-2.0
#include "engine/segmenter.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "common/status.h"

namespace attnd::engine {
namespace {

using attention::HeadBuilder;
using attention::Segment;
using attention::SegmentBuilder;

// Between two looks at the gate; below the limit of 1 ms that a waiting step may be held up.
constexpr std::chrono::microseconds kQuantum{700};

// How often a prefill that waits for another looks whether it is still wanted.
constexpr std::chrono::microseconds kCancelPoll{20000};

// Steps go first when builders and steps want the same core. Advice only.
constexpr int kBuilderNiceness = 10;

void LowerPriority() {
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));
  static_cast<void>(setpriority(PRIO_PROCESS, thread, kBuilderNiceness));
}

}  // namespace

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

Segmenter::Segmenter(const Options& options, MemoryBudget* budget, StepGate* gate,
                     Observer* observer)
    : options_(options), budget_(budget), gate_(gate), observer_(observer) {
  background_ = std::thread([this] { BackgroundLoop(); });
}

absl::Status Segmenter::SegmentPrefill(Sequence* sequence, const std::atomic<bool>* cancelled) {
  {
    MutexLock lock(mutex_);
    while (prefill_busy_ && !Unwanted(*sequence, cancelled)) changed_.WaitFor(mutex_, kCancelPoll);
    if (prefill_busy_) return absl::CancelledError("waiting for another prefill was cancelled");
    prefill_busy_ = true;
  }
  absl::StatusOr<bool> built = true;
  while (built.ok() && *built) {
    built = BuildNext(sequence, kSegmentTokensMin, options_.threads,
                      Observer::BuildTrigger::kPrefill, cancelled);
  }
  MutexLock lock(mutex_);
  prefill_busy_ = false;
  changed_.NotifyAll();
  return built.status();
}

// Nobody waits for what is being built.
bool Segmenter::Unwanted(const Sequence& sequence, const std::atomic<bool>* cancelled) const {
  return stopping() || sequence.closed() ||
         (cancelled != nullptr && cancelled->load(std::memory_order_relaxed));
}

void Segmenter::OnGrown(const std::shared_ptr<Sequence>& sequence) {
  if (!sequence->NextSegment(options_.segment_tokens, options_.segment_tokens).has_value()) return;
  MutexLock lock(mutex_);
  for (const auto& queued : queue_) {
    if (!queued.owner_before(sequence) && !sequence.owner_before(queued)) return;
  }
  queue_.push_back(sequence);
  changed_.NotifyAll();
}

void Segmenter::BackgroundLoop() {
  LowerPriority();
  while (true) {
    std::shared_ptr<Sequence> sequence;
    {
      MutexLock lock(mutex_);
      busy_ = false;
      changed_.NotifyAll();
      while (queue_.empty() && !stopping()) changed_.Wait(mutex_);
      if (stopping()) return;
      sequence = queue_.front().lock();
      queue_.pop_front();
      busy_ = true;
    }
    if (sequence == nullptr) continue;
    // A failure has been reported; the tokens stay in the tail, exact, until the next run is
    // complete.
    const absl::StatusOr<bool> built =
        BuildNext(sequence.get(), options_.segment_tokens, 1, Observer::BuildTrigger::kBackground,
                  /*cancelled=*/nullptr);
    if (built.ok() && *built) OnGrown(sequence);  // behind the others, if a further run has left
  }
}

absl::StatusOr<bool> Segmenter::BuildNext(Sequence* sequence, uint32_t min_tokens, uint32_t threads,
                                          Observer::BuildTrigger trigger,
                                          const std::atomic<bool>* cancelled) {
  std::chrono::steady_clock::time_point start;
  uint32_t installed = 0;
  absl::StatusOr<bool> built = false;
  {
    MutexLock build_lock(sequence->build_mutex());
    start = std::chrono::steady_clock::now();
    built = BuildLocked(sequence, min_tokens, threads, cancelled, &installed);
  }
  if (observer_ == nullptr) return built;
  if (!built.ok() && !absl::IsCancelled(built.status())) {
    observer_->OnSegmentBuildFailed(trigger, built.status());
  }
  if (installed > 0) {
    observer_->OnSegmentBuilt(trigger, installed, std::chrono::steady_clock::now() - start);
  }
  return built;
}

absl::StatusOr<bool> Segmenter::BuildLocked(Sequence* sequence, uint32_t min_tokens,
                                            uint32_t threads, const std::atomic<bool>* cancelled,
                                            uint32_t* installed) {
  const std::optional<SegmentJob> job = sequence->NextSegment(min_tokens, options_.segment_tokens);
  if (!job.has_value()) return false;
  const ModelShape& shape = sequence->shape();
  ATTND_ASSIGN_OR_RETURN(
      Reservation memory,
      budget_->Reserve(Segment::IndexBytes(shape, job->tokens, job->unclustered) +
                           Segment::PayloadBytes(shape, job->tokens),
                       "a segment"));
  const uint32_t builders = std::min(threads, shape.layers * shape.kv_heads);
  ATTND_ASSIGN_OR_RETURN(const Reservation scratch,
                         budget_->Reserve(builders * HeadBuilder::ScratchBytes(shape, job->tokens),
                                          "building a segment"));
  SegmentBuilder builder(job->view, next_segment_id_.fetch_add(1, std::memory_order_relaxed),
                         job->tokens, job->unclustered);
  if (!builder.allocated()) {
    return absl::ResourceExhaustedError("the system refused memory for a segment");
  }
  ATTND_RETURN_IF_ERROR(BuildHeads(*sequence, &builder, builders, cancelled));
  if (sequence->Install(*job, HoldReservation(builder.Finish(), std::move(memory)))) {
    *installed = job->tokens;
  }
  return true;
}

absl::Status Segmenter::BuildHeads(const Sequence& sequence, SegmentBuilder* builder,
                                   uint32_t threads, const std::atomic<bool>* cancelled) {
  std::atomic<uint32_t> next_head{0};
  const auto stop = [&] { return Unwanted(sequence, cancelled); };
  const auto work = [&] {
    HeadBuilder heads;
    for (uint32_t head = next_head++; head < builder->heads(); head = next_head++) {
      heads.Start(builder, head);
      bool done = false;
      while (!done && !stop()) {
        gate_->YieldToSteps();
        done = heads.Advance(kQuantum);
      }
      if (!done) return;
    }
  };
  std::vector<std::thread> helpers;
  for (uint32_t i = 1; i < threads; ++i) {
    helpers.emplace_back([&] {
      LowerPriority();
      work();
    });
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  return stop() ? absl::CancelledError("building a segment was cancelled") : absl::OkStatus();
}

void Segmenter::WaitUntilIdle() {
  MutexLock lock(mutex_);
  while (!stopping() && (busy_ || !queue_.empty())) changed_.Wait(mutex_);
}

void Segmenter::Shutdown() {
  std::thread background;
  {
    MutexLock lock(mutex_);
    stopping_.store(true, std::memory_order_relaxed);
    changed_.NotifyAll();
    background.swap(background_);
  }
  if (background.joinable()) background.join();
}

}  // namespace attnd::engine
