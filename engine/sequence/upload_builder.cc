// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/upload_builder.h"

#include <algorithm>
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

std::optional<BegunSegment> UploadBuilder::Take(const Sequence& sequence, const SegmentJob& job) {
  MutexLock lock(mutex_);
  while (building_ == sequence.id()) changed_.Wait(mutex_);
  const auto found = uploads_.find(sequence.id());
  if (found == uploads_.end()) return std::nullopt;
  found->second.begins = false;
  Segments& segments = found->second.segments;
  const auto begun = std::find_if(segments.begin(), segments.end(),
                                  [&](const BegunSegment& one) { return IsOf(one, job); });
  if (begun == segments.end()) return std::nullopt;
  BegunSegment taken = std::move(*begun);
  segments.erase(begun);
  return taken;
}

void UploadBuilder::Forget(const Sequence& sequence) {
  Segments dropped;  // dies after the lock
  MutexLock lock(mutex_);
  while (building_ == sequence.id()) changed_.Wait(mutex_);
  const auto found = uploads_.find(sequence.id());
  if (found == uploads_.end()) return;
  dropped.swap(found->second.segments);
  uploads_.erase(found);
  changed_.NotifyAll();
}

bool UploadBuilder::DropAll() {
  Segments dropped;  // dies after the lock
  MutexLock lock(mutex_);
  const bool building = building_.has_value();
  drop_.store(building, std::memory_order_relaxed);
  for (auto& [id, upload] : uploads_) {
    upload.begins = false;
    upload.dropped = true;
    dropped.splice(dropped.end(), upload.segments);
  }
  while (building_.has_value()) changed_.Wait(mutex_);
  drop_.store(false, std::memory_order_relaxed);
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
  return std::find_if(uploads_.begin(), uploads_.end(),
                      [](const auto& upload) { return upload.second.has_grown; });
}

UploadBuilder::Segments UploadBuilder::TakeIdle() {
  Segments idle;
  const auto latest = Clock::now() - kIdleMax;
  for (auto upload = uploads_.begin(); upload != uploads_.end();) {
    const auto sequence = upload->second.sequence.lock();
    const bool wanted = sequence != nullptr && !sequence->closed();
    if (wanted && upload->second.grown_at > latest) {
      ++upload;
      continue;
    }
    idle.splice(idle.end(), upload->second.segments);
    upload = uploads_.erase(upload);
  }
  return idle;
}

void UploadBuilder::Loop() {
  while (true) {
    Segments idle;  // dies behind the lock, as the next two
    std::shared_ptr<Sequence> sequence;
    Segments segments;
    uint64_t id = 0;
    uint64_t prompt_tokens = 0;
    bool begins = false;
    {
      MutexLock lock(mutex_);
      Uploads::iterator next = uploads_.end();
      while (!stopping() && (next = NextGrown()) == uploads_.end() && idle.empty()) {
        if (uploads_.empty()) {
          changed_.Wait(mutex_);
        } else {
          changed_.WaitFor(mutex_, kIdlePoll);
          idle = TakeIdle();
        }
      }
      if (stopping()) return;
      if (next == uploads_.end()) continue;
      Upload& upload = next->second;
      upload.has_grown = false;
      sequence = upload.sequence.lock();
      if (sequence == nullptr) {
        changed_.NotifyAll();  // perhaps none has grown now
        continue;
      }
      id = next->first;
      begins = upload.begins;
      upload.dropped = false;
      segments.swap(upload.segments);
      // The last one may end where the prompt was said to end.
      if (upload.begun_for != upload.prompt_tokens && !segments.empty()) segments.pop_back();
      prompt_tokens = upload.begun_for = upload.prompt_tokens;
      building_ = id;
    }
    if (begins) begins = Begin(sequence.get(), prompt_tokens, &segments);
    begins &= Build(sequence.get(), &segments);
    EndBuilding(id, begins, &segments);
  }
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

bool UploadBuilder::Build(Sequence* sequence, Segments* segments) {
  auto next = segments->begin();
  try {
    while (next != segments->end() && BuildCome(sequence, &*next).ok()) ++next;
  } catch (const std::bad_alloc&) {  // as any other failure
  }
  const bool all = next == segments->end();
  segments->erase(next, segments->end());
  return all;
}

absl::Status UploadBuilder::BuildCome(Sequence* sequence, BegunSegment* begun) {
  const uint32_t all = sequence->shape().layers;
  const uint32_t come = sequence->LayersWith(begun->job);
  if (come < begun->layers || come == 0) return absl::AbortedError("the tokens have changed");
  while (begun->layers < all && (come == all || come >= begun->layers + kLayersAtOnce)) {
    ATTND_RETURN_IF_ERROR(BuildLayers(*sequence, begun));
  }
  return absl::OkStatus();
}

bool UploadBuilder::Begin(Sequence* sequence, uint64_t prompt_tokens,
                          Segments* segments) {
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

absl::Status UploadBuilder::BuildLayers(const Sequence& sequence, BegunSegment* begun) {
  const auto start = Clock::now();
  const uint32_t end = std::min(begun->layers + kLayersAtOnce, sequence.shape().layers);
  const auto proceed = [&] {
    gate_->YieldToSteps();
    return Wanted(sequence);
  };
  const attention::SegmentPart part{begun->layers, end, /*awaited=*/true};
  ATTND_RETURN_IF_ERROR(backend_->BuildSegment(begun->builder.get(), part, proceed));
  begun->layers = end;
  begun->time_spent += Clock::now() - start;
  return Wanted(sequence);
}

absl::Status UploadBuilder::Wanted(const Sequence& sequence) const {
  const bool dropped = drop_.load(std::memory_order_relaxed);
  if (!dropped && !sequence.closed() && !stopping()) return absl::OkStatus();
  return absl::CancelledError("what was built of an upload is not wanted any more");
}

}  // namespace attnd::engine
