// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/fake_device.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

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
#include "tests/gpu/fake_memory.h"
#include "tests/gpu/fetch_reference.h"
#include "tests/gpu/step_check.h"
#include "tests/gpu/step_reference.h"
#include "tests/gpu/tree_build_reference.h"
#include "tests/gpu/turn_reference.h"

namespace attnd::gpu::test {
namespace {

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

}  // namespace

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
    if (run.header.cache.set_count > 0) {  // so that others begin, and end, meanwhile
      std::this_thread::sleep_for(std::chrono::milliseconds(3 * (launches_++ % 2)));
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
        ExpectTurn(
            run, *gate,
            {[this](const void* at, uint64_t bytes)
                 ABSL_NO_THREAD_SAFETY_ANALYSIS { return Inside(control_->mapped_, at, bytes); },
             [this](const void* at, uint64_t bytes)
                 ABSL_NO_THREAD_SAFETY_ANALYSIS { return control_->Shares(at, bytes); },
             [this](const void* at, uint64_t bytes)
                 ABSL_NO_THREAD_SAFETY_ANALYSIS { return Inside(control_->pinned_, at, bytes); }});
        // All but the tokens may be read from now on.
        early_input_.assign(run.input, run.input + run.input_bytes);
      }
      // Whoever waits for a step that nobody lets begin would wait for ever.
      work_.push_back([this, run, gate]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
        if (control_->HasRung(*gate)) {
          TakeTokens(run, early_input_, control_->AsKernelsHave(gate->tokens), gate);
        }
        ASSERT_TRUE(gate->taken != 0 || LoadWord(&gate->open) != 0);
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
    if (control_->faults_.takes_late || !control_->HasRung(*gate)) return false;
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
        scratch, count * IndexScratchBytes(shape, first_job.kv_heads, SizesOf(first_job))));
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
    control_->cache_users_.erase(this);
    const auto behind = std::exchange(control_->faults_.behind_answer, absl::StatusCode::kOk);
    if (behind == absl::StatusCode::kInternal) control_->broken_ = true;
    if (control_->broken_) return Fault();
    if (behind != absl::StatusCode::kOk) return absl::Status(behind, "planted");
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
    if (run.header.cache.set_count > 0) control_->TakeCache(run, this);
    control_->kinds_.insert(KindOfStep(run));
    const StepGate* const gate = gate_;
    work_.push_back([this, run, gate]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      control_->runs_behind_gates_.push_back(gate != nullptr);
      if (gate != nullptr && gate->taken != 0) {
        AnswerPlaces& answer = *run.header.answer;
        answer = gate->answer;
        answer.turn = control_->AsKernelsHave(answer.turn);
        answer.twin_out = control_->AsKernelsHave(answer.twin_out);
        answer.twin_lse = control_->AsKernelsHave(answer.twin_lse);
        answer.allowed = LoadWord(&gate->allowed);
        control_->turns_ += 1;
        control_->near_turns_ += gate->ring_is_near;
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
  uint64_t launches_ = 0;  // of steps over a cache
};

class FakeDevice : public Device {
 public:
  FakeDevice(uint64_t memory_bytes, bool maps_host_memory, std::shared_ptr<FakeControl> control)
      : memory_bytes_(memory_bytes),
        maps_host_memory_(maps_host_memory),
        control_(std::move(control)) {}

  const std::string& name() const override { return name_; }
  const std::string& uuid() const override { return uuid_; }
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
    return Take(bytes, &control_->memory_);
  }
  void Free(std::byte* memory) override {
    MutexLock lock(control_->mutex_);
    if (memory == nullptr) return;
    control_->allocated_bytes_ -= control_->memory_.at(memory);
    GiveBack(memory, &control_->memory_);
  }
  absl::StatusOr<std::byte*> AllocatePinned(size_t bytes) override {
    MutexLock lock(control_->mutex_);
    return Take(bytes, &control_->pinned_);
  }
  void FreePinned(std::byte* memory) override {
    MutexLock lock(control_->mutex_);
    if (memory == nullptr) return;
    GiveBack(memory, &control_->pinned_);
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
  absl::StatusOr<SharedDeviceMemory> Share(size_t bytes) override {
    EXPECT_EQ(bytes % kSharedDeviceUnitBytes, 0u);
    MutexLock lock(control_->mutex_);
    if (control_->broken_) return Fault();
    SharedDeviceMemory shared;
    shared.descriptor = OwnedFd(memfd_create("fake-device", MFD_CLOEXEC));
    const auto map = [&](int protection) {
      void* const at = mmap(nullptr, bytes, protection, MAP_SHARED, shared.descriptor.get(), 0);
      return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
    };
    if (control_->faults_.no_sharing || ftruncate(shared.descriptor.get(), bytes) != 0) {
      return absl::ResourceExhaustedError("the fake device shares no more");
    }
    shared.data = map(PROT_NONE);
    std::byte* const kernels = map(PROT_READ | PROT_WRITE);
    EXPECT_TRUE(shared.data != nullptr && kernels != nullptr);
    control_->shared_[shared.data] = {bytes, kernels};
    shared.memory = {shared.data, [control = control_, bytes, kernels](std::byte* memory) {
                       MutexLock held(control->mutex_);
                       EXPECT_EQ(control->shared_.erase(memory), 1u);
                       munmap(memory, bytes);
                       munmap(kernels, bytes);
                     }};
    return shared;
  }
  absl::Status Clear(std::byte* memory, size_t bytes) override {
    MutexLock lock(control_->mutex_);
    EXPECT_TRUE(Inside(control_->memory_, memory, bytes));
    if (control_->broken_) return Fault();
    control_->cache_runs_.erase(memory);
    std::memset(memory, 0, bytes);
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<Stream>> NewStream(StreamUse /*use*/) override {
    return std::make_unique<FakeStream>(control_);
  }

 private:
  using Blocks = std::map<const std::byte*, uint64_t>;
  static std::byte* Take(size_t bytes, Blocks* blocks) {
    std::byte* const memory = TakeMemory(bytes);
    blocks->emplace(memory, bytes);
    return memory;
  }
  static void GiveBack(std::byte* memory, Blocks* blocks) {
    const auto block = blocks->find(memory);
    ASSERT_TRUE(block != blocks->end());
    GiveBackMemory(memory, block->second);
    blocks->erase(block);
  }

  const std::string name_ = "fake", uuid_ = kFakeUuid;
  const uint64_t memory_bytes_;
  const bool maps_host_memory_;
  const std::shared_ptr<FakeControl> control_;
};

FakePair MakeFakeDevice(uint64_t memory_bytes, bool maps_host_memory) {
  auto control = std::make_shared<FakeControl>();
  return {std::make_unique<FakeDevice>(memory_bytes, maps_host_memory, control), control};
}

}  // namespace attnd::gpu::test
