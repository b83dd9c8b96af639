// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/segmenter.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/start_thread.h"
#include "common/status.h"

namespace attnd::engine {
namespace {

using attention::HeadBuilder;
using attention::Segment;
using attention::SegmentBuilder;

// Between two looks at the gate; below the limit of 1 ms that a waiting step may be held up.
constexpr std::chrono::microseconds kQuantum{700};

// Steps go first when builders and steps want the same core: builders on a CPU are nicer than the
// thread that starts them, which has the process's own niceness. Advice only; beyond 19 the system
// takes it for 19.
constexpr int kBuilderNiceness = 10;

void LowerPriority() {
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));
  const int niceness = getpriority(PRIO_PROCESS, thread) + kBuilderNiceness;
  static_cast<void>(setpriority(PRIO_PROCESS, thread, niceness));
}

absl::Status NoMemory() {
  return absl::ResourceExhaustedError("the system refused memory for building a segment");
}

}  // namespace

Segmenter::Segmenter(const Options& options, attention::Backend* backend, MemoryBudget* budget,
                     StepGate* gate, EventListener* listener)
    : options_(options),
      backend_(backend),
      budget_(budget),
      gate_(gate),
      listener_(listener),
      uploads_({options.segment_tokens, options.copies_allowed}, backend, budget, gate,
               &next_segment_id_) {}

absl::Status Segmenter::Start() {
  ATTND_RETURN_IF_ERROR(uploads_.Start());
  ATTND_ASSIGN_OR_RETURN(background_, StartThread("that builds segments in the background",
                                                  [this] { BackgroundLoop(); }));
  return absl::OkStatus();
}

// ---- prefills ----

Segmenter::Turn::Turn(Segmenter* segmenter, const Sequence& sequence)
    : segmenter_(segmenter), sequence_(sequence) {
  MutexLock lock(segmenter_->mutex_);
  segmenter_->turns_.push_back(this);
}

Segmenter::Turn::~Turn() {
  MutexLock lock(segmenter_->mutex_);
  std::erase(segmenter_->turns_, this);
  if (segmenter_->building_turn_ == this) segmenter_->building_turn_ = nullptr;
  segmenter_->changed_.NotifyAll();
}

absl::Status Segmenter::Turn::Wait(const std::atomic<bool>* cancelled) {
  MutexLock lock(segmenter_->mutex_);
  absl::Status wanted = segmenter_->Wanted(sequence_, cancelled);
  while (wanted.ok() && segmenter_->NextTurn() != this) {
    segmenter_->changed_.WaitFor(segmenter_->mutex_, kCancelPoll);
    wanted = segmenter_->Wanted(sequence_, cancelled);
  }
  if (wanted.ok()) segmenter_->building_turn_ = this;
  return wanted;
}

const Segmenter::Turn* Segmenter::NextTurn() const {
  if (building_turn_ != nullptr) return nullptr;
  for (const Turn* turn : turns_) {
    if (&turn->sequence_ != background_builds_) return turn;
  }
  return nullptr;
}

absl::Status Segmenter::SegmentPrefill(Sequence* sequence, const std::atomic<bool>* cancelled) {
  const absl::Cleanup forget = [&] { uploads_.Forget(*sequence); };
  return SegmentInTurns(sequence, /*whole_runs=*/false, cancelled);
}

absl::Status Segmenter::SegmentWholeRuns(Sequence* sequence, const std::atomic<bool>* cancelled) {
  return SegmentInTurns(sequence, /*whole_runs=*/true, cancelled);
}

absl::Status Segmenter::SegmentInTurns(Sequence* sequence, bool whole_runs,
                                       const std::atomic<bool>* cancelled) {
  const uint32_t short_run = options_.segment_tokens;
  const uint32_t min_tokens = whole_runs ? short_run : kSegmentTokensMin;
  try {
    while (sequence->HasSegment(min_tokens)) {
      Turn turn(this, *sequence);
      ATTND_RETURN_IF_ERROR(turn.Wait(cancelled));
      const uint32_t run = whole_runs ? short_run : sequence->PromptRun(short_run);
      ATTND_RETURN_IF_ERROR(BuildNext(sequence, min_tokens, run, options_.threads,
                                      EventListener::BuildTrigger::kPrefill, cancelled)
                                .status());
    }
  } catch (const std::bad_alloc&) {
    return NoMemory();
  }
  return absl::OkStatus();
}

absl::Status Segmenter::Wanted(const Sequence& sequence, const std::atomic<bool>* cancelled) const {
  if (stopping()) return absl::UnavailableError("the server is shutting down");
  if (sequence.closed()) {
    return absl::NotFoundError(absl::StrCat("sequence_id ", sequence.id(), " has been closed"));
  }
  if (cancelled != nullptr && cancelled->load(std::memory_order_relaxed)) {
    return absl::CancelledError("segmenting was cancelled");
  }
  return absl::OkStatus();
}

// ---- background ----

void Segmenter::OnGrown(const std::shared_ptr<Sequence>& sequence) {
  if (!sequence->DueBuild(options_.segment_tokens).has_value()) return;
  MutexLock lock(mutex_);
  for (const auto& queued : queue_) {
    if (!queued.owner_before(sequence) && !sequence.owner_before(queued)) return;
  }
  try {
    queue_.push_back(sequence);
  } catch (const std::bad_alloc&) {
    return;  // the next token asks again
  }
  changed_.NotifyAll();
}

std::shared_ptr<Sequence> Segmenter::TakeQueued() {
  for (auto queued = queue_.begin(); queued != queue_.end();) {
    std::shared_ptr<Sequence> sequence = queued->lock();
    if (sequence == nullptr) {
      queued = queue_.erase(queued);
      changed_.NotifyAll();  // the queue may be empty now
    } else if (building_turn_ != nullptr && &building_turn_->sequence_ == sequence.get()) {
      ++queued;  // its prefill holds it, too: this reference is not the last
    } else {
      queue_.erase(queued);
      return sequence;
    }
  }
  return nullptr;
}

void Segmenter::BackgroundLoop() {
  LowerPriority();
  while (true) {
    std::shared_ptr<Sequence> sequence;
    {
      MutexLock lock(mutex_);
      background_builds_ = nullptr;
      changed_.NotifyAll();
      while (!stopping() && (sequence = TakeQueued()) == nullptr) changed_.Wait(mutex_);
      if (stopping()) return;
      background_builds_ = sequence.get();
    }
    if (BuildDue(sequence.get())) OnGrown(sequence);  // behind the others, if more is due
  }
}

bool Segmenter::BuildDue(Sequence* sequence) {
  const std::optional<BuildKind> due = sequence->DueBuild(options_.segment_tokens);
  if (!due.has_value()) return false;
  const bool early = due == BuildKind::kEarly;
  if (early && options_.copies_allowed != nullptr && !options_.copies_allowed()) {
    sequence->DelayBuild(*due);
    return false;
  }
  const auto trigger =
      early ? EventListener::BuildTrigger::kEarly : EventListener::BuildTrigger::kBackground;
  const auto build = [&] {
    return BuildNext(sequence, options_.segment_tokens, options_.segment_tokens, 1, trigger,
                     /*cancelled=*/nullptr);
  };
  absl::StatusOr<bool> built = build();
  // Copies must not take the room of the segment that makes them superfluous.
  if (!early && absl::IsResourceExhausted(built.status()) && sequence->DropEarly()) built = build();
  if (!built.ok()) sequence->DelayBuild(*due);  // the tokens stay in the tail, exact
  return built.ok() && *built;
}

// ---- building ----

absl::StatusOr<bool> Segmenter::BuildNext(Sequence* sequence, uint32_t min_tokens,
                                          uint32_t max_tokens, uint32_t threads,
                                          EventListener::BuildTrigger trigger,
                                          const std::atomic<bool>* cancelled) {
  const auto start = std::chrono::steady_clock::now();
  const bool early = trigger == EventListener::BuildTrigger::kEarly;
  const bool awaited = trigger == EventListener::BuildTrigger::kPrefill;
  const auto next = [&](uint32_t most) {
    return early ? sequence->NextEarly(most) : sequence->NextSegment(min_tokens, most);
  };
  const uint32_t short_tokens =
      early ? EarlySegments::LeastTokens(sequence->shape()) : options_.segment_tokens;
  absl::StatusOr<Built> built = Built();
  try {
    std::optional<SegmentJob> job = next(max_tokens);
    if (!job.has_value()) return false;
    built = Build(sequence, *job, threads, awaited, cancelled);
    // A segment is built beside what it replaces: a shorter one may still find room.
    if (absl::IsResourceExhausted(built.status()) && job->tokens > short_tokens) {
      job = next(short_tokens);
      if (job.has_value()) built = Build(sequence, *job, threads, awaited, cancelled);
    }
  } catch (const std::bad_alloc&) {
    built = NoMemory();
  }
  // What was given up because nobody wants it has not failed, nor has a copy that found no memory.
  const bool failed = !built.ok() && !early && Wanted(*sequence, cancelled).ok();
  if (listener_ != nullptr && failed) listener_->OnSegmentBuildFailed(trigger, built.status());
  ATTND_RETURN_IF_ERROR(built.status());
  if (listener_ != nullptr && built->tokens > 0) {
    const auto now = std::chrono::steady_clock::now();
    listener_->OnSegmentBuilt(trigger, built->tokens, now - start + built->earlier);
  }
  return true;
}

absl::StatusOr<Segmenter::Built> Segmenter::Build(Sequence* sequence, const SegmentJob& job,
                                                  uint32_t threads, bool awaited,
                                                  const std::atomic<bool>* cancelled) {
  const auto asked = std::chrono::steady_clock::now();
  if (auto begun = job.early ? std::nullopt : uploads_.Take(*sequence, job, cancelled);
      begun.has_value()) {
    // What was built while this waited for it counts once.
    begun->time_spent -= std::min(std::chrono::steady_clock::now() - asked, begun->time_spent);
    if (BuildRest(sequence, &*begun, awaited, cancelled).ok()) {
      return Install(sequence, *std::move(begun));
    }
    ATTND_RETURN_IF_ERROR(Wanted(*sequence, cancelled));
  }  // its memory is free again
  const uint64_t number = next_segment_id_.fetch_add(1, std::memory_order_relaxed);
  ATTND_ASSIGN_OR_RETURN(BegunSegment begun, BeginSegment(*sequence, job, number, budget_));
  ATTND_RETURN_IF_ERROR(BuildSegment(*sequence, begun.builder.get(), threads, awaited, cancelled));
  return Install(sequence, std::move(begun));
}

absl::Status Segmenter::BuildRest(Sequence* sequence, BegunSegment* begun, bool awaited,
                                  const std::atomic<bool>* cancelled) {
  const uint32_t layers = sequence->shape().layers;
  if (sequence->LayersWith(begun->job) != layers) {
    return absl::AbortedError("the tokens have changed");
  }
  if (begun->layers == layers) return absl::OkStatus();
  return BuildPart(*sequence, begun->builder.get(), {begun->layers, layers, awaited}, cancelled);
}

absl::Status Segmenter::BuildPart(const Sequence& sequence, SegmentBuilder* builder,
                                  const attention::SegmentPart& part,
                                  const std::atomic<bool>* cancelled) {
  return backend_->BuildSegment(builder, part, [&] {
    gate_->YieldToSteps();
    return Wanted(sequence, cancelled);
  });
}

absl::StatusOr<Segmenter::Built> Segmenter::Install(Sequence* sequence, BegunSegment begun) {
  const std::shared_ptr<const Segment> segment =
      HoldReservation(begun.builder->Finish(), std::move(begun.memory));
  if (!sequence->Install(begun.job, segment)) return Built();
  sequence->Expect(*segment);
  return Built{begun.job.tokens, begun.time_spent};
}

absl::Status Segmenter::BuildSegment(const Sequence& sequence, SegmentBuilder* builder,
                                     uint32_t threads, bool awaited,
                                     const std::atomic<bool>* cancelled) {
  const attention::SegmentPart all{0, sequence.shape().layers, awaited};
  absl::Status built = BuildPart(sequence, builder, all, cancelled);
  if (built.ok()) return built;
  // The backend may have room for a shorter one, which BuildNext then asks for.
  const bool is_long = builder->segment().tokens() > options_.segment_tokens;
  if (absl::IsResourceExhausted(built) && is_long) return built;
  // Whatever kept the backend from it, what is still wanted can be built here.
  ATTND_RETURN_IF_ERROR(Wanted(sequence, cancelled));
  const uint64_t scratch_bytes = HeadBuilder::ScratchBytes(builder->segment().form());
  uint32_t builders = std::min(threads, builder->heads());
  constexpr const char* kScratch = "building a segment";
  absl::StatusOr<Reservation> scratch = budget_->Reserve(builders * scratch_bytes, kScratch);
  while (!scratch.ok() && builders > 1) {  // slower, where memory is short
    builders /= 2;
    scratch = budget_->Reserve(builders * scratch_bytes, kScratch);
  }
  ATTND_RETURN_IF_ERROR(scratch.status());
  return BuildHeads(sequence, builder, builders, cancelled);
}

absl::Status Segmenter::BuildHeads(const Sequence& sequence, SegmentBuilder* builder,
                                   uint32_t threads, const std::atomic<bool>* cancelled) {
  std::atomic<uint32_t> next_head{0};
  std::atomic<bool> no_memory{false};
  const auto stop = [&] {
    return no_memory.load(std::memory_order_relaxed) || !Wanted(sequence, cancelled).ok();
  };
  const auto build = [&] {
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
  const auto work = [&] {  // on threads of its own: lets no exception out
    try {
      build();
    } catch (const std::bad_alloc&) {
      no_memory.store(true, std::memory_order_relaxed);
    }
  };
  {
    std::vector<std::jthread> helpers;
    helpers.reserve(threads);
    for (uint32_t i = 1; i < threads; ++i) {
      try {
        helpers.emplace_back([&] {
          LowerPriority();
          work();
        });
      } catch (const std::exception&) {  // no thread, or no memory for one
        break;                           // those that there are take all heads
      }
    }
    work();
  }
  ATTND_RETURN_IF_ERROR(Wanted(sequence, cancelled));
  return no_memory.load(std::memory_order_relaxed) ? NoMemory() : absl::OkStatus();
}

void Segmenter::WaitUntilIdle() {
  uploads_.WaitUntilIdle();
  MutexLock lock(mutex_);
  while (!stopping() && (background_builds_ != nullptr || !queue_.empty())) changed_.Wait(mutex_);
}

void Segmenter::Shutdown() {
  uploads_.Shutdown();
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
