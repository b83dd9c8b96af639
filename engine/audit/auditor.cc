// SPDX-License-Identifier: Apache-2.0
#include "engine/audit/auditor.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/start_thread.h"
#include "common/status.h"
#include "engine/sequence/segmenter.h"
#include "glog/logging.h"

namespace attnd::engine {
namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

// How often an idle auditor looks whether a row has come: nobody who answers a step wakes it.
constexpr microseconds kIdlePoll{50000};
// How often it looks whether steps have had their time.
constexpr microseconds kStepPoll{2000};

constexpr int kLowestPriority = 19;

void LowerPriority() {
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));
  static_cast<void>(setpriority(PRIO_PROCESS, thread, kLowestPriority));
}

nanoseconds ClockTime(clockid_t clock) {
  timespec time{};
  static_cast<void>(clock_gettime(clock, &time));
  return std::chrono::seconds(time.tv_sec) + nanoseconds(time.tv_nsec);
}

// The finaliser of splitmix64: each bit of x moves every bit of the result.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t NumberOf(const AuditOptions& options, uint64_t sequence_id, uint32_t layer,
                  uint64_t position) {
  constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;
  uint64_t number = Mix(options.seed + kStep);
  for (const uint64_t part : {sequence_id, uint64_t{layer}, position}) {
    number = Mix((number ^ part) + kStep);
  }
  return number;
}

}  // namespace

absl::Status AuditOptions::Validate() const {
  // Said so that NaN is refused.
  if (!(share >= 0 && share <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("audit_share is ", share, "; allowed are 0..1"));
  }
  if (!(cpu_share >= kCpuShareMin && cpu_share <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("audit_cpu_share is ", cpu_share, "; allowed are ", kCpuShareMin, "..1"));
  }
  return absl::OkStatus();
}

bool Auditor::Picks(const AuditOptions& options, uint64_t sequence_id, uint32_t layer,
                    uint64_t position) {
  // As many bits as a double has: below 1.
  const uint64_t number = NumberOf(options, sequence_id, layer, position);
  return static_cast<double>(number >> 11) * 0x1p-53 < options.share;
}

Auditor::Auditor(const AuditOptions& options, MemoryBudget* budget, const StepGate* gate,
                 EventListener* listener)
    : options_(options), budget_(budget), gate_(gate), listener_(listener) {}

absl::Status Auditor::Start() {
  ATTND_ASSIGN_OR_RETURN(background_,
                         StartThread("that audits answers", [this] { BackgroundLoop(); }));
  return absl::OkStatus();
}

// ---- answered rows ----

void Auditor::Offer(uint64_t sequence_id, uint32_t layer, const attention::StepRow& row) {
  if (stopping() || !Picks(options_, sequence_id, layer, row.past_tokens)) return;
  if (row.fault != nullptr && !row.fault->ok()) return;
  OfferPicked(sequence_id, layer, row);
}

void Auditor::OfferPicked(uint64_t sequence_id, uint32_t layer, const attention::StepRow& row) {
  const attention::SequenceView& view = *row.view;
  if (row.stats->estimated_tokens + row.stats->dropped_tokens == 0) return Skip(AuditSkip::kExact);
  if (view.paged()) return Skip(AuditSkip::kPaged);
  const ModelShape& shape = view.shape;
  const uint64_t lane_floats = uint64_t{shape.head_dim} + shape.value_dim + 1;
  const uint64_t bytes =
      sizeof(Audit) + shape.query_heads * lane_floats * sizeof(float) + DenseRow::Bytes(view);
  if (!TakePlace(bytes)) return Skip(AuditSkip::kQueueFull);
  // Not the number that picked it, of which small ones alone come here.
  const uint64_t number = Mix(NumberOf(options_, sequence_id, layer, row.past_tokens));
  const auto token = static_cast<uint32_t>(number % row.query_tokens);
  std::unique_ptr<Audit> audit;
  try {
    absl::StatusOr<Reservation> memory = budget_->Reserve(bytes, "an audit");
    if (memory.ok()) {
      audit = Copy(sequence_id, layer, row, token);
      audit->memory = *std::move(memory);
    }
  } catch (const std::bad_alloc&) {
    audit.reset();
  }
  if (audit != nullptr) return Push(audit.release());
  LeavePlace(bytes);
  Skip(AuditSkip::kNoMemory);
}

std::unique_ptr<Auditor::Audit> Auditor::Copy(uint64_t sequence_id, uint32_t layer,
                                              const attention::StepRow& row, uint32_t token) {
  const ModelShape& shape = row.view->shape;
  const attention::Policy& policy = *row.policy;
  const uint64_t tokens = row.query_only ? row.past_tokens : row.past_tokens + token + 1;
  auto audit = std::make_unique<Audit>(*row.view, layer, tokens);
  AuditedRow& found = audit->found;
  found.preset = policy.preset;
  found.sequence_id = sequence_id;
  found.position = row.past_tokens;
  found.layer = layer;
  found.query_token = token;
  // The prediction is the mean over a row's tokens.
  if (row.query_tokens == 1) found.predicted_error = row.stats->predicted_error_mean;
  const bool aims = layer >= policy.dense_layers && policy.cuts_clusters() &&
                    policy.cut == attention::Cut::kErrorBudget && std::isfinite(policy.tolerance);
  if (aims) found.tolerance = policy.tolerance;
  const size_t heads = shape.query_heads;
  const size_t q_floats = heads * shape.head_dim, out_floats = heads * shape.value_dim;
  audit->q.resize(q_floats);
  ToFloat(row.query_dtype, row.queries + token * q_floats * DTypeBytes(row.query_dtype), q_floats,
          audit->q.data());
  CHECK(row.final_out.written == nullptr) << "a row that Picks names was not answered in floats";
  audit->out.assign(row.out + token * out_floats, row.out + (token + 1) * out_floats);
  audit->lse.assign(row.lse + token * heads, row.lse + (token + 1) * heads);
  return audit;
}

bool Auditor::TakePlace(uint64_t bytes) {
  const uint32_t rows = queued_rows_.fetch_add(1, std::memory_order_relaxed);
  const uint64_t before = queued_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  if (rows < options_.queue_rows && before + bytes <= options_.queue_bytes) return true;
  LeavePlace(bytes);
  return false;
}

void Auditor::LeavePlace(uint64_t bytes) {
  const uint32_t rows = queued_rows_.fetch_sub(1, std::memory_order_relaxed);
  const uint64_t before = queued_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  CHECK(rows >= 1 && before >= bytes) << "a place is left that was not taken";
}

void Auditor::Push(Audit* audit) {
  pending_.fetch_add(1, std::memory_order_relaxed);
  audit->next = offered_.load(std::memory_order_relaxed);
  while (!offered_.compare_exchange_weak(audit->next, audit, std::memory_order_release,
                                         std::memory_order_relaxed)) {
  }
}

// ---- background ----

void Auditor::BackgroundLoop() {
  LowerPriority();
  StartQuantum();
  while (true) {
    while (std::unique_ptr<Audit> audit = Pop()) {
      if (!stopping()) Run(audit.get());
      audit.reset();
      if (pending_.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
      MutexLock lock(mutex_);
      idle_.NotifyAll();
    }
    {
      MutexLock lock(mutex_);
      if (stopping()) return;
      if (offered_.load(std::memory_order_relaxed) == nullptr) wake_.WaitFor(mutex_, kIdlePoll);
    }
    StartQuantum();
  }
}

std::unique_ptr<Auditor::Audit> Auditor::Pop() {
  if (waiting_ == nullptr) {
    Audit* newest = offered_.exchange(nullptr, std::memory_order_acquire);
    while (newest != nullptr) {  // the oldest comes first
      Audit* const older = newest->next;
      newest->next = waiting_;
      waiting_ = newest;
      newest = older;
    }
  }
  std::unique_ptr<Audit> oldest(waiting_);
  if (oldest == nullptr) return nullptr;
  waiting_ = oldest->next;
  LeavePlace(oldest->memory.bytes());
  return oldest;
}

void Auditor::Run(Audit* audit) {
  DenseRow::Progress progress = DenseRow::Progress::kMore;
  try {
    audit->dense.Start(audit->q);
    while (progress == DenseRow::Progress::kMore) {
      if (!Rest()) return;
      progress = audit->dense.Advance();
    }
    if (progress == DenseRow::Progress::kGone) return Skip(AuditSkip::kGone);
    const Comparison found = CompareWithDense(audit->out, audit->lse, audit->dense);
    audit->found.error_mean = found.error_mean;
    audit->found.error_max = found.error_max;
    audit->found.covered_mass = found.covered_mass;
  } catch (const std::bad_alloc&) {
    return Skip(AuditSkip::kNoMemory);
  }
  listener_->OnAudited(audit->found);
}

void Auditor::StartQuantum() {
  quantum_start_ = ClockTime(CLOCK_THREAD_CPUTIME_ID);
  process_start_ = ClockTime(CLOCK_PROCESS_CPUTIME_ID);
}

bool Auditor::Rest() {
  const nanoseconds now_used = ClockTime(CLOCK_THREAD_CPUTIME_ID);
  const nanoseconds used = now_used - quantum_start_;
  if (used < kQuantum) return !stopping();
  quantum_start_ = now_used;  // what resting takes counts for the next quantum
  const auto due = std::chrono::duration_cast<nanoseconds>(used / options_.cpu_share);
  const Clock::time_point until = Clock::now() + due - used;
  const auto starved = [&] {
    return gate_->busy() && ClockTime(CLOCK_PROCESS_CPUTIME_ID) - process_start_ < due &&
           Clock::now() < until + kStarvedMax;
  };
  {
    MutexLock lock(mutex_);
    while (!stopping()) {
      const Clock::duration left = until - Clock::now();
      if (left.count() <= 0 && !starved()) break;
      wake_.WaitFor(mutex_, std::max(std::chrono::ceil<microseconds>(left), kStepPoll));
    }
  }
  process_start_ = ClockTime(CLOCK_PROCESS_CPUTIME_ID);
  return !stopping();
}

void Auditor::WaitUntilIdle() {
  MutexLock lock(mutex_);
  while (!stopping() && pending_.load(std::memory_order_acquire) != 0) {
    wake_.NotifyAll();
    idle_.WaitFor(mutex_, kIdlePoll);
  }
}

void Auditor::Shutdown() {
  std::thread background;
  {
    MutexLock lock(mutex_);
    stopping_.store(true, std::memory_order_relaxed);
    wake_.NotifyAll();
    idle_.NotifyAll();
    background.swap(background_);
  }
  if (background.joinable()) background.join();
  while (Pop() != nullptr) pending_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace attnd::engine
