// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/upload_builder.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

#include "common/start_thread.h"
#include "common/status.h"

namespace attnd::engine {
namespace {

// Between two looks for uploads that nobody goes on with.
constexpr std::chrono::milliseconds kIdlePoll{500};

using Clock = std::chrono::steady_clock;

uint64_t EndOf(const SegmentJob& job) { return job.view->tail_begin + job.tokens; }

bool IsOf(const BegunSegment& begun, const SegmentJob& job) {
  return begun.job.view->tail_begin == job.view->tail_begin && begun.job.tokens == job.tokens &&
         begun.job.unclustered == job.unclustered;
}

}  // namespace

UploadBuilder::UploadBuilder(const Options& options, attention::Backend* backend,
                             MemoryBudget* budget, StepGate* gate,
                             std::atomic<uint64_t>* next_segment_id)
    : options_(options),
      backend_(backend),
      budget_(budget),
      gate_(gate),
      next_segment_id_(next_segment_id) {}

absl::Status UploadBuilder::Start() {
  ATTND_ASSIGN_OR_RETURN(thread_,
                         StartThread("that builds segments during uploads", [this] { Loop(); }));
  return absl::OkStatus();
}

void UploadBuilder::OnUploaded(const std::shared_ptr<Sequence>& sequence, uint64_t prompt_tokens) {
  if (!sequence->on_device()) return;
  MutexLock lock(mutex_);
  try {
    Upload& upload = uploads_[sequence->id()];
    upload.sequence = sequence;
    upload.prompt_tokens = prompt_tokens;
    upload.grown_at = Clock::now();
    upload.has_grown = true;
  } catch (const std::bad_alloc&) {
    return;  // the next tokens ask again
  }
  changed_.NotifyAll();
}

std::optional<BegunSegment> UploadBuilder::Take(const Sequence& sequence, const SegmentJob& job,
                                                const std::atomic<bool>* cancelled) {
  MutexLock lock(mutex_);
  if (const auto found = uploads_.find(sequence.id()); found != uploads_.end()) {
    found->second.ending = true;
  }
  while (building_ == sequence.id()) {
    if (cancelled != nullptr && cancelled->load(std::memory_order_relaxed)) return std::nullopt;
    changed_.WaitFor(mutex_, kCancelPoll);
  }
  const auto found = uploads_.find(sequence.id());
  if (found == uploads_.end()) return std::nullopt;
  Segments& segments = found->second.segments;
  const auto begun = std::find_if(segments.begin(), segments.end(),
                                  [&](const BegunSegment& one) { return IsOf(one, job); });
  if (begun == segments.end()) return std::nullopt;
  BegunSegment taken = std::move(*begun);
  segments.erase(begun);
  return taken;
}

void UploadBuilder::Forget(const Sequence& sequence) {
  Uploads forgotten;  // dies after the lock
  MutexLock lock(mutex_);
  forgotten.insert(uploads_.extract(sequence.id()));
  changed_.NotifyAll();
}

bool UploadBuilder::DropAll() {
  Segments dropped;  // dies after the lock
  MutexLock lock(mutex_);
  for (auto& [id, upload] : uploads_) {
    upload.begins = false;
    upload.dropped = true;
    dropped.splice(dropped.end(), upload.segments);
  }
  const bool building = building_.has_value();
  const uint64_t work = work_;
  if (building) drop_.store(work, std::memory_order_relaxed);
  while (building_.has_value() && work_ == work) changed_.Wait(mutex_);
  return building || !dropped.empty();
}

void UploadBuilder::WaitUntilIdle() {
  MutexLock lock(mutex_);
  while (!stopping() && (building_.has_value() || NextGrown() != uploads_.end())) {
    changed_.Wait(mutex_);
  }
}

void UploadBuilder::Shutdown() {
  std::thread thread;
  {
    MutexLock lock(mutex_);
    stopping_.store(true, std::memory_order_relaxed);
    changed_.NotifyAll();
    thread.swap(thread_);
  }
  if (thread.joinable()) thread.join();
}

UploadBuilder::Uploads::iterator UploadBuilder::NextGrown() {
  return std::find_if(uploads_.begin(), uploads_.end(), [](const auto& upload) {
    return upload.second.has_grown && !upload.second.ending;
  });
}

UploadBuilder::Uploads UploadBuilder::TakeIdle() {
  Uploads idle;
  const auto now = Clock::now();
  if (now < idle_looked_ + kIdlePoll) return idle;
  idle_looked_ = now;
  for (auto upload = uploads_.begin(); upload != uploads_.end();) {
    const auto next = std::next(upload);
    const bool paused = upload->second.grown_at < now - kIdleMax;
    if (paused || upload->second.sequence.expired()) idle.insert(uploads_.extract(upload));
    upload = next;
  }
  if (!idle.empty()) changed_.NotifyAll();
  return idle;
}

UploadBuilder::Work UploadBuilder::TakeWork() {
  Work work;
  const auto next = NextGrown();
  if (next == uploads_.end()) return work;
  Upload& upload = next->second;
  upload.has_grown = false;
  work.sequence = upload.sequence.lock();
  if (work.sequence == nullptr) {
    changed_.NotifyAll();  // perhaps none has grown now
    return work;
  }
  work.id = next->first;
  work.begins = upload.begins;
  work.segments.swap(upload.segments);
  const bool moved = upload.begun_for != upload.prompt_tokens;
  if (moved && !work.segments.empty() && work.segments.back().job.cut) {
    work.dropped.splice(work.dropped.end(), work.segments, std::prev(work.segments.end()));
  }
  work.prompt_tokens = upload.begun_for = upload.prompt_tokens;
  upload.dropped = false;
  building_ = work.id;
  ++work_;
  return work;
}

void UploadBuilder::Loop() {
  while (true) {
    Uploads idle;  // dies after the lock
    Work work;
    uint64_t number = 0;
    {
      MutexLock lock(mutex_);
      if (stopping()) return;
      idle = TakeIdle();
      if (idle.empty()) work = TakeWork();
      number = work_;
      if (idle.empty() && work.sequence == nullptr && NextGrown() == uploads_.end()) {
        if (uploads_.empty()) {
          changed_.Wait(mutex_);
        } else {
          changed_.WaitFor(mutex_, kIdlePoll);
        }
      }
    }
    if (work.sequence == nullptr) continue;
    work.dropped.clear();
    Sequence* const sequence = work.sequence.get();
    bool begins = work.begins && Begin(sequence, work.prompt_tokens, &work.segments);
    begins &= Build(sequence, number, &work.segments);
    EndBuilding(work.id, begins, &work.segments);
  }
}

bool UploadBuilder::IsEnding(uint64_t id) {
  MutexLock lock(mutex_);
  const auto found = uploads_.find(id);
  return found == uploads_.end() || found->second.ending;
}

void UploadBuilder::EndBuilding(uint64_t id, bool begins, Segments* segments) {
  {
    MutexLock lock(mutex_);
    const auto found = uploads_.find(id);
    if (found != uploads_.end()) found->second.begins &= begins;
    if (found != uploads_.end() && !found->second.dropped) found->second.segments.swap(*segments);
    if (segments->empty()) {
      building_.reset();
      changed_.NotifyAll();
      return;
    }
  }
  segments->clear();  // before anyone hears that it has ended: DropAll promises their memory
  MutexLock lock(mutex_);
  building_.reset();
  changed_.NotifyAll();
}

bool UploadBuilder::Build(Sequence* sequence, uint64_t work, Segments* segments) {
  auto next = segments->begin();
  try {
    while (next != segments->end() && BuildCome(sequence, work, &*next).ok()) ++next;
  } catch (const std::bad_alloc&) {  // as any other failure
  }
  const bool all = next == segments->end();
  segments->erase(next, segments->end());
  return all;
}

absl::Status UploadBuilder::BuildCome(Sequence* sequence, uint64_t work, BegunSegment* begun) {
  const uint32_t all = sequence->shape().layers;
  const uint32_t come = sequence->LayersWith(begun->job);
  if (come < begun->layers || come == 0) return absl::AbortedError("the tokens have changed");
  while (begun->layers < all && (come == all || come >= begun->layers + kLayersAtOnce) &&
         !IsEnding(sequence->id())) {
    ATTND_RETURN_IF_ERROR(BuildLayers(*sequence, work, begun));
  }
  return absl::OkStatus();
}

bool UploadBuilder::Begin(Sequence* sequence, uint64_t prompt_tokens, Segments* segments) {
  try {
    while (allowed()) {
      std::optional<uint64_t> begin;
      if (!segments->empty()) begin = EndOf(segments->back().job);
      const auto job = sequence->UploadedRun(begin, options_.segment_tokens, prompt_tokens);
      if (!job.has_value()) return true;
      const uint64_t number = next_segment_id_->fetch_add(1, std::memory_order_relaxed);
      absl::StatusOr<BegunSegment> begun = BeginSegment(*sequence, *job, number, budget_);
      if (!begun.ok() || !allowed()) break;  // with it there would be too little memory
      segments->push_back(*std::move(begun));
    }
  } catch (const std::bad_alloc&) {  // likewise
  }
  return false;
}

absl::Status UploadBuilder::BuildLayers(const Sequence& sequence, uint64_t work,
                                        BegunSegment* begun) {
  const auto start = Clock::now();
  const uint32_t end = std::min(begun->layers + kLayersAtOnce, sequence.shape().layers);
  const auto proceed = [&] {
    gate_->YieldToSteps();
    return Wanted(sequence, work);
  };
  const attention::SegmentPart part{begun->layers, end, /*awaited=*/true};
  ATTND_RETURN_IF_ERROR(backend_->BuildSegment(begun->builder.get(), part, proceed));
  begun->layers = end;
  begun->time_spent += Clock::now() - start;
  return Wanted(sequence, work);
}

absl::Status UploadBuilder::Wanted(const Sequence& sequence, uint64_t work) const {
  const bool dropped = drop_.load(std::memory_order_relaxed) == work;
  if (!dropped && !sequence.closed() && !stopping()) return absl::OkStatus();
  return absl::CancelledError("what was built of an upload is not wanted any more");
}

}  // namespace attnd::engine
