// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/fake_device.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <thread>
#include <utility>
#include <vector>

#include "common/status.h"
#include "tests/gpu/fetch_reference.h"
#include "tests/gpu/step_check.h"
#include "tests/gpu/step_reference.h"
#include "tests/gpu/tree_build_reference.h"

namespace attnd::gpu::test {
namespace {

constexpr int kRubbish = 0xCD;
constexpr size_t kAlignment = 256;

absl::Status Fault() { return absl::InternalError("the fake device has failed"); }

// Everything that what a step launches follows from.
std::string KindOfStep(const StepRun& run) {
  std::string kind(reinterpret_cast<const char*>(&run.header), sizeof(run.header));
  for (const uint64_t number :
       {uint64_t{run.measure}, run.input_bytes, run.result_bytes,
        reinterpret_cast<uint64_t>(run.input), reinterpret_cast<uint64_t>(run.device_results)}) {
    kind.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }
  return kind;
}

// What the faults that are wrong answers make of a step's results.
void Spoil(const KernelShape& shape, const StepHeader& header, const Faults& faults) {
  for (uint32_t r = 0; faults.nan_output && r < header.rows; ++r) {
    const RowRef& row = header.row_refs[r];
    if (!ReadsClusters(row)) continue;
    const uint64_t lanes =
        uint64_t{header.kv_heads} * header.group * (row.first_query_token + row.query_tokens);
    const auto dtype = static_cast<DType>(header.out_dtype);
    const float nan = std::nanf("");
    FromFloat(dtype, &nan, 1,
              header.answer->out + (lanes * shape.value_dim - 1) * DTypeBytes(dtype));
    if (dtype != DType::kFp32) header.lse[lanes - 1] = nan;
  }
  for (uint32_t unit = 0; faults.miscounted && unit < header.units; ++unit) {
    ++header.last_results[unit].chosen_tokens;
  }
}

bool Inside(const std::map<const std::byte*, uint64_t>& blocks, const void* address,
            uint64_t bytes) {
  const auto* begin = static_cast<const std::byte*>(address);
  auto block = blocks.upper_bound(begin);
  if (block == blocks.begin()) return false;
  --block;
  return begin + bytes <= block->first + block->second;
}

}  // namespace

void FakeControl::Set(const Faults& faults) {
  MutexLock lock(mutex_);
  faults_ = faults;
}
uint64_t FakeControl::allocations() const {
  MutexLock lock(mutex_);
  return memory_.size() + pinned_.size();
}
uint64_t FakeControl::steps() const {
  MutexLock lock(mutex_);
  return steps_;
}
uint64_t FakeControl::steps_behind_gates() const {
  MutexLock lock(mutex_);
  return steps_behind_gates_;
}
uint64_t FakeControl::turns() const {
  MutexLock lock(mutex_);
  return turns_;
}
std::vector<bool> FakeControl::runs_behind_gates() const {
  MutexLock lock(mutex_);
  return runs_behind_gates_;
}
uint64_t FakeControl::uploads() const {
  MutexLock lock(mutex_);
  return uploads_;
}
uint64_t FakeControl::builds() const {
  MutexLock lock(mutex_);
  return builds_;
}
uint64_t FakeControl::coop_units() const {
  MutexLock lock(mutex_);
  return coop_units_;
}
uint64_t FakeControl::empty_runs() const {
  MutexLock lock(mutex_);
  return empty_runs_;
}
uint64_t FakeControl::kinds() const {
  MutexLock lock(mutex_);
  return kinds_.size();
}

absl::Status FakeControl::Call() {
  if (faults_.call != kNever && faults_.call-- == 0) {
    faults_.call = kNever;
    broken_ = true;
  }
  return broken_ ? Fault() : absl::OkStatus();
}

void FakeControl::HoldMaps(uint64_t after) {
  MutexLock lock(mutex_);
  maps_allowed_ = after;
  maps_changed_.NotifyAll();
}

void FakeControl::AwaitHeldMap() {
  MutexLock lock(mutex_);
  while (maps_held_ == 0) maps_changed_.Wait(mutex_);
}

void FakeControl::AwaitMaps() {
  ++maps_held_;
  maps_changed_.NotifyAll();
  while (maps_allowed_ == 0) maps_changed_.Wait(mutex_);
  if (maps_allowed_ != kNever) --maps_allowed_;
  --maps_held_;
}

uint64_t FakeControl::refused_maps() const {
  MutexLock lock(mutex_);
  return refused_maps_;
}
std::vector<std::thread::id> FakeControl::mappers() const {
  MutexLock lock(mutex_);
  return mappers_;
}

uint64_t FakeControl::mapped_bytes() const {
  MutexLock lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& [address, size] : mapped_) bytes += size;
  return bytes;
}

bool FakeControl::Maps(const void* address, uint64_t bytes) const {
  const auto* at = static_cast<const std::byte*>(address);
  const std::byte* end = at + bytes;
  while (at < end) {
    auto part = mapped_.upper_bound(at);
    if (part == mapped_.begin()) return false;
    --part;
    if (at >= part->first + part->second) return false;
    at = part->first + part->second;
  }
  return true;
}

void FakeControl::TakeCache(const PageCacheRef& cache, const void* stream) {
  const auto [user, taken] = cache_users_.insert({cache.sets, stream});
  EXPECT_EQ(user->second, stream) << "two steps use one cache of pages at a time";
}

void FakeControl::ReleaseCaches(const void* stream) {
  std::erase_if(cache_users_, [&](const auto& user) { return user.second == stream; });
}

void FakeControl::UseCache(const StepHeader& header, const void* stream) {
  const uint32_t step = header.cache.clock->step;
  const auto [last, first] = cache_steps_.insert({header.cache.sets, step});
  if (header.carried != nullptr && header.carried->count > 0) {
    EXPECT_TRUE(first || stream_steps_[stream] == step) << "a wave runs again as another step";
  } else {
    const bool again = missed_.contains(stream) && stream_steps_[stream] == step;
    EXPECT_TRUE(first || last->second != step || again)
        << "two steps of a cache of pages have one number";
  }
  stream_steps_[stream] = step;
  last->second = step;
  EXPECT_EQ(FetchReference(header), "");
}

void FakeControl::CheckNumbers(const StepHeader& header) {
  for (uint32_t r = 0; r < header.rows; ++r) {
    for (uint32_t s = 0; s < header.row_refs[r].segment_count; ++s) {
      const SegmentRef& segment = header.segments[header.row_refs[r].segments_begin + s];
      if (segment.first_page == 0) continue;
      const uint64_t count = uint64_t{header.kv_heads} * segment.head_pages;
      const std::byte* const at = segment.in_file != 0 ? nullptr : segment.pages;
      const auto [own, added] = numbered_pages_.insert({segment.first_page, {count, at}});
      EXPECT_EQ(own->second.count, count);
      EXPECT_EQ(own->second.at, at) << "page " << segment.first_page;
      const auto after = std::next(own);
      EXPECT_TRUE(after == numbered_pages_.end() || own->first + count <= after->first);
      EXPECT_TRUE(own == numbered_pages_.begin() ||
                  std::prev(own)->first + std::prev(own)->second.count <= own->first);
    }
  }
}

bool FakeControl::Owns(const void* address, uint64_t bytes) const {
  return Inside(memory_, address, bytes);
}

// Work is kept until Synchronize, or AwaitAnswer.
class FakeStream : public Stream {
 public:
  explicit FakeStream(std::shared_ptr<FakeControl> control) : control_(std::move(control)) {}

  absl::Status CopyToDevice(std::byte* to, const std::byte* from, size_t bytes) override {
    MutexLock lock(control_->mutex_);
    EXPECT_TRUE(Inside(control_->memory_, to, bytes));
    EXPECT_TRUE(Inside(control_->pinned_, from, bytes));
    work_.push_back([=] { std::memcpy(to, from, bytes); });
    return control_->Call();
  }
  absl::Status CopyToHost(std::byte* to, const std::byte* from, size_t bytes) override {
    MutexLock lock(control_->mutex_);
    EXPECT_TRUE(Inside(control_->pinned_, to, bytes));
    EXPECT_TRUE(Inside(control_->memory_, from, bytes));
    work_.push_back([=] { std::memcpy(to, from, bytes); });
    return control_->Call();
  }

  bool has_cooperative_groups() const override { return true; }

  absl::Status RunStep(const StepRun& run) override {
    ATTND_RETURN_IF_ERROR(CopyToDevice(run.device_input, run.input, run.input_bytes));
    ATTND_RETURN_IF_ERROR(LaunchStep(run));
    if (run.header.cache.set_count > 0) {  // so that another step that uses the cache shows
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (run.result_bytes == 0) return absl::OkStatus();
    return CopyToHost(run.results, run.device_results, run.result_bytes);
  }
  absl::StatusOr<bool> RunStepBehind(const StepRun& run, StepGate* gate) override {
    {
      MutexLock lock(control_->mutex_);
      EXPECT_TRUE(Inside(control_->pinned_, gate, sizeof(*gate)));
      EXPECT_EQ(gate->open | gate->taken | gate->allowed, 0u);
      EXPECT_TRUE(work_.empty());
      EXPECT_FALSE(run.timed);
      if (control_->faults_.no_gates) return false;
      if (gate->ring != nullptr) {
        ExpectMapped(run, *gate);
        // All but the tokens may be read from now on.
        early_input_.assign(run.input, run.input + run.input_bytes);
      }
      // Whoever waits for a step that nobody lets begin would wait for ever.
      work_.push_back([this, run, gate]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
        if (gate->ring != nullptr && Load(gate->ring) == gate->epoch) Take(run, gate);
        ASSERT_TRUE(gate->taken != 0 || Load(&gate->open) != 0);
      });
    }
    gate_ = gate;
    absl::Status status = RunStep(run);
    gate_ = nullptr;
    MutexLock lock(control_->mutex_);
    if (absl::IsResourceExhausted(status)) {
      work_.clear();
      return false;
    }
    ATTND_RETURN_IF_ERROR(status);
    ++control_->steps_behind_gates_;
    return true;
  }
  // Takes a client's tokens before the rest of the step is done.
  bool AwaitTaken(StepGate* gate) override {
    MutexLock lock(control_->mutex_);
    if (control_->faults_.takes_late || Load(gate->ring) != gate->epoch) return false;
    work_.front()();
    work_.erase(work_.begin());
    return gate->taken != 0;
  }
  bool ran_from_graph() const override { return false; }

  absl::Status BuildIndexes(const KernelShape& shape, const IndexJob& first_job,
                            const IndexJob* device_jobs, uint32_t count,
                            std::byte* scratch) override {
    EXPECT_FALSE(busy_) << "the buffers may still be in use";
    MutexLock lock(control_->mutex_);
    ATTND_RETURN_IF_ERROR(control_->Call());
    EXPECT_TRUE(control_->Owns(
        scratch, count * IndexScratchBytes(shape, first_job.kv_heads, first_job.tokens,
                                           first_job.max_groups != 0)));
    work_.push_back([this, shape, first_job, device_jobs, count]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      EXPECT_EQ(std::memcmp(&first_job, device_jobs, sizeof(first_job)), 0);
      for (uint32_t i = 0; i < count; ++i) {
        const IndexJob& job = device_jobs[i];
        EXPECT_TRUE(control_->Owns(job.index, job.kv_heads * job.index_head_bytes));
        EXPECT_TRUE(control_->Owns(job.pages, job.kv_heads * job.pages_head_bytes));
        if (job.max_groups != 0) {
          BuildTreeReference(shape, job);
        } else {
          BuildIndexReference(shape, job);
        }
        if (control_->faults_.bad_index) {  // one token twice, another not at all
          auto* positions = reinterpret_cast<uint16_t*>(job.index + job.offsets.positions);
          positions[job.tokens - 1] = positions[job.tokens - 2];
        }
        ++control_->builds_;
      }
    });
    return absl::OkStatus();
  }

  absl::Status Synchronize() override {
    MutexLock lock(control_->mutex_);
    busy_ = false;
    const absl::Status status = control_->Call();
    for (const auto& work : std::exchange(work_, {})) {
      if (!control_->broken_) work();
    }
    control_->ReleaseCaches(this);
    if (control_->broken_) return Fault();
    return status;
  }

  // The stream counts as busy until it is waited for.
  absl::Status AwaitAnswer(uint32_t* answered) override {
    absl::Status status = Synchronize();
    EXPECT_TRUE(!status.ok() || *answered == kAnswered || *answered == kAnsweredAndTold);
    busy_ = true;
    return status;
  }

  absl::StatusOr<std::chrono::nanoseconds> RunEmpty() override {
    MutexLock lock(control_->mutex_);
    EXPECT_TRUE(work_.empty());
    ATTND_RETURN_IF_ERROR(control_->Call());
    ++control_->empty_runs_;
    return control_->faults_.empty_run;
  }

  absl::StatusOr<StageSeconds> stage_seconds() override {
    EXPECT_TRUE(timed_);
    MutexLock lock(control_->mutex_);
    ATTND_RETURN_IF_ERROR(control_->Call());
    return StageSeconds{1e-6, 2e-6, 3e-6, 4e-6, 5e-7};
  }

 private:
  static uint32_t Load(const uint32_t* word) {
    return std::atomic_ref(*const_cast<uint32_t*>(word)).load(std::memory_order_acquire);
  }
  // The client's memory, as far as a step that takes its turn touches it.
  void ExpectMapped(const StepRun& run, const StepGate& gate)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(control_->mutex_) {
    const auto mapped = [&](const void* address, uint64_t bytes) {
      return Inside(control_->mapped_, address, bytes);
    };
    EXPECT_TRUE(mapped(gate.ring, sizeof(*gate.ring)));
    for (uint32_t i = 0; i < gate.moves_count; ++i) {
      EXPECT_TRUE(mapped(gate.tokens + uint64_t{gate.moves[i].from} * kMoveBytes, kMoveBytes));
      EXPECT_LE((uint64_t{gate.moves[i].to} + 1) * kMoveBytes, run.input_bytes);
    }
    EXPECT_EQ(gate.answer.taken, 1u);
    EXPECT_EQ(gate.answer.allowed, 0u);
    const StepHeader& header = run.header;
    const uint64_t lanes = uint64_t{header.query_tokens} * header.kv_heads * header.group;
    const uint64_t out_bytes =
        lanes * header.value_dim * DTypeBytes(static_cast<DType>(header.out_dtype));
    EXPECT_TRUE(mapped(gate.answer.out, out_bytes) ||
                Inside(control_->pinned_, gate.answer.out, out_bytes));
    EXPECT_TRUE(gate.answer.lse == nullptr || mapped(gate.answer.lse, lanes * sizeof(float)));
    EXPECT_TRUE(gate.answer.turn == nullptr || mapped(gate.answer.turn, sizeof(uint64_t)));
  }
  void Take(const StepRun& run, StepGate* gate) {
    std::copy(early_input_.begin(), early_input_.end(), run.input);
    for (uint32_t i = 0; i < gate->moves_count; ++i) {
      std::memcpy(run.input + uint64_t{gate->moves[i].to} * kMoveBytes,
                  gate->tokens + uint64_t{gate->moves[i].from} * kMoveBytes, kMoveBytes);
    }
    gate->taken = 1;
  }
  // The second lse, and what AnswerSignal::answered becomes.
  static uint32_t TellClient(const StepHeader& header) {
    const AnswerPlaces& places = *header.answer;
    const uint64_t lanes = uint64_t{header.query_tokens} * header.kv_heads * header.group;
    if (places.lse != nullptr) std::copy_n(header.lse, lanes, places.lse);
    const bool flawless =
        std::all_of(header.lse, header.lse + lanes, [](float lse) { return std::isfinite(lse); });
    if (places.turn == nullptr || places.allowed == 0 || !flawless) return kAnswered;
    std::atomic_ref(*places.turn).store(places.epoch, std::memory_order_release);
    return kAnsweredAndTold;
  }
  absl::Status LaunchStep(const StepRun& run) {
    EXPECT_FALSE(busy_) << "the buffers may still be in use";
    MutexLock lock(control_->mutex_);
    ATTND_RETURN_IF_ERROR(control_->Call());
    if (control_->faults_.launch != kNever) {
      if (control_->faults_.launch == 0) {
        if (--control_->faults_.launches == 0) control_->faults_.launch = kNever;
        return absl::ResourceExhaustedError("the fake device has no memory for a launch");
      }
      --control_->faults_.launch;
    }
    timed_ = run.timed;
    if (run.header.cache.set_count > 0) control_->TakeCache(run.header.cache, this);
    control_->kinds_.insert(KindOfStep(run));
    const StepGate* const gate = gate_;
    work_.push_back([this, run, gate]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      control_->runs_behind_gates_.push_back(gate != nullptr);
      if (gate != nullptr && gate->taken != 0) {
        *run.header.answer = gate->answer;
        run.header.answer->allowed = Load(&gate->allowed);
        control_->turns_ += 1;
      }
      const StepHeader& header = run.header;
      EXPECT_EQ(std::memcmp(&header, run.device_input, sizeof(header)), 0);
      EXPECT_EQ(
          CheckStep(run.shape, header, run.measure,
                    {[this](const void* address, uint64_t bytes)
                         ABSL_NO_THREAD_SAFETY_ANALYSIS { return control_->Owns(address, bytes); },
                     [this](const void* address, uint64_t bytes)
                         ABSL_NO_THREAD_SAFETY_ANALYSIS { return control_->Maps(address, bytes); },
                     [this](const void* address, uint64_t bytes) ABSL_NO_THREAD_SAFETY_ANALYSIS {
                       return Inside(control_->pinned_, address, bytes);
                     }}),
          "");
      control_->CheckNumbers(header);
      if (header.cache.set_count > 0) control_->UseCache(header, this);
      for (uint32_t u = 0; u < header.uploads; ++u) {
        control_->uploads_ += header.upload_refs[u].bytes;
      }
      StepHeader step = header;
      if (std::exchange(control_->faults_.step_midway, false)) {
        step.rows /= 2;
        control_->broken_ = true;
      }
      control_->coop_units_ += CoopUnits(header);
      EXPECT_EQ(
          RunStepReference(run.shape, step,
                           {control_->faults_.one_more_exact, control_->faults_.one_more_opened},
                           &control_->known_pages_),
          "");
      if (header.missing_count != nullptr && *header.missing_count > 0) {
        control_->missed_.insert(this);
      } else {
        control_->missed_.erase(this);
      }
      Spoil(run.shape, step, control_->faults_);
      EXPECT_EQ(*header.signal.answered, 0u);
      EXPECT_EQ(*header.signal.blocks, 0u) << "of this step";
      *header.signal.blocks = header.answer_blocks;
      if (!control_->broken_) *header.signal.answered = TellClient(header);
      ++control_->steps_;
    });
    return absl::OkStatus();
  }

  const std::shared_ptr<FakeControl> control_;
  std::vector<std::function<void()>> work_;  // runs under the control's mutex
  bool timed_ = false;
  StepGate* gate_ = nullptr;            // of what is being launched
  std::vector<std::byte> early_input_;  // of the step behind a gate with a ring
  bool busy_ = false;
};

class FakeDevice : public Device {
 public:
  FakeDevice(uint64_t memory_bytes, bool maps_host_memory, std::shared_ptr<FakeControl> control)
      : memory_bytes_(memory_bytes),
        maps_host_memory_(maps_host_memory),
        control_(std::move(control)) {}

  const std::string& name() const override { return name_; }
  uint64_t memory_bytes() const override { return memory_bytes_; }

  absl::StatusOr<std::byte*> Allocate(size_t bytes) override {
    MutexLock lock(control_->mutex_);
    Faults& faults = control_->faults_;
    const bool refused = faults.allocation != kNever && faults.allocation-- == 0;
    if (refused) faults.allocation = kNever;
    if (refused || bytes > faults.allocation_bytes ||
        bytes > memory_bytes_ - control_->allocated_bytes_) {
      return absl::ResourceExhaustedError("the fake device has no memory left");
    }
    if (control_->broken_) return Fault();
    control_->allocated_bytes_ += bytes;
    return Make(bytes, &control_->memory_);
  }
  void Free(std::byte* memory) override {
    MutexLock lock(control_->mutex_);
    if (memory == nullptr) return;
    control_->allocated_bytes_ -= control_->memory_.at(memory);
    control_->memory_.erase(memory);
    std::free(memory);
  }
  absl::StatusOr<std::byte*> AllocatePinned(size_t bytes) override {
    MutexLock lock(control_->mutex_);
    return Make(bytes, &control_->pinned_);
  }
  void FreePinned(std::byte* memory) override {
    MutexLock lock(control_->mutex_);
    if (memory == nullptr) return;
    control_->pinned_.erase(memory);
    std::free(memory);
  }
  bool maps_host_memory() const override { return maps_host_memory_; }
  absl::Status MapHostMemory(const std::byte* memory, size_t bytes) override {
    MutexLock lock(control_->mutex_);
    Faults& faults = control_->faults_;
    control_->AwaitMaps();
    if (faults.mapping_fault != kNever && faults.mapping_fault-- == 0) control_->broken_ = true;
    if (control_->broken_) return Fault();
    if (faults.mapping == 0) {
      ++control_->refused_maps_;
      return absl::ResourceExhaustedError("the fake device maps no more");
    }
    if (faults.mapping != kNever) --faults.mapping;
    constexpr uint64_t kSystemPage = 4096;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % kSystemPage, 0u);
    EXPECT_EQ(bytes % kSystemPage, 0u);
    const auto after = control_->mapped_.lower_bound(memory);
    EXPECT_TRUE(after == control_->mapped_.end() || memory + bytes <= after->first);
    EXPECT_TRUE(after == control_->mapped_.begin() ||
                std::prev(after)->first + std::prev(after)->second <= memory);
    control_->mapped_.emplace(memory, bytes);
    control_->mappers_.push_back(std::this_thread::get_id());
    return absl::OkStatus();
  }
  void UnmapHostMemory(const std::byte* memory) override {
    MutexLock lock(control_->mutex_);
    EXPECT_EQ(control_->mapped_.erase(memory), 1u);
  }
  absl::Status Clear(std::byte* memory, size_t bytes) override {
    MutexLock lock(control_->mutex_);
    EXPECT_TRUE(Inside(control_->memory_, memory, bytes));
    if (control_->broken_) return Fault();
    control_->cache_steps_.erase(memory);
    std::memset(memory, 0, bytes);
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<Stream>> NewStream() override {
    return std::make_unique<FakeStream>(control_);
  }

 private:
  static std::byte* Make(size_t bytes, std::map<const std::byte*, uint64_t>* blocks) {
    const size_t whole = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, whole));
    std::memset(memory, kRubbish, whole);
    blocks->emplace(memory, bytes);
    return memory;
  }

  const std::string name_ = "fake";
  const uint64_t memory_bytes_;
  const bool maps_host_memory_;
  const std::shared_ptr<FakeControl> control_;
};

FakePair MakeFakeDevice(uint64_t memory_bytes, bool maps_host_memory) {
  auto control = std::make_shared<FakeControl>();
  return {std::make_unique<FakeDevice>(memory_bytes, maps_host_memory, control), control};
}

}  // namespace attnd::gpu::test
