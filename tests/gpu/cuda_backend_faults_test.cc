// SPDX-License-Identifier: Apache-2.0
//
// Goal: a device that is too small, runs out of memory or fails at any moment costs speed and
// nothing else: every step is answered, with the answers of a device that has room or, where the
// CPU takes its place, the CPU's own bits; and health and statistics say so. Method: the fake
// device fails on demand, at each of its calls in turn.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/agreement.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

// More than kDeviceMemoryBytesMin holds.
constexpr uint64_t kManySequences = 40;

using absl::StatusCode;
using attention::BackendStats;
using attention::StepRequest;
using attention::StepRow;
using attention::test::MakeRow;
using attention::test::MakeSequence;
using attention::test::MakeShape;
using attention::test::RunStep;
using attention::test::SequenceSpec;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSeed;
using attention::test::TestSequence;
using testing::HasSubstr;

// 512 tokens in a segment and 100 behind it, two layers: 0.6 MiB of device copies.
TestSequence SmallSequence(uint64_t seed) {
  SequenceSpec spec;
  spec.shape = MakeShape(4, 2, 64, 64, DType::kBf16, 2);
  spec.segment_tokens = {512};
  spec.tail_tokens = 100;
  spec.seed = TestSeed() + seed;
  return MakeSequence(spec);
}

// A row of each policy that matters to memory.
std::vector<TestRow> RowsOf(TestSequence* sequence, uint32_t layer) {
  std::vector<TestRow> rows;
  for (const char* preset : {"dense", "streaming", "clusters-top-k", "error-target"}) {
    rows.push_back(MakeRow(sequence, Parse(preset), sequence->spec.tokens() - 3, 3, false,
                           DType::kBf16, layer, TestSeed() + rows.size()));
  }
  return rows;
}

void ExpectSameBits(const StepResult& a, const StepResult& b) {
  ASSERT_TRUE(a.status.ok()) << a.status;
  ASSERT_TRUE(b.status.ok()) << b.status;
  for (size_t r = 0; r < a.rows.size(); ++r) {
    EXPECT_TRUE(SameBits(a.rows[r], b.rows[r])) << "row " << r;
  }
}

class CudaBackendFaults : public testing::Test {
 protected:
  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  TestSequence sequence_ = SmallSequence(0);
  const std::vector<TestRow> rows_ = RowsOf(&sequence_, 0);
  const std::unique_ptr<attention::Backend> cpu_ = MakeCpu();
};

TEST_F(CudaBackendFaults, RepeatedStepsUploadNothingAgain) {
  const FakeBackend fake = MakeFakeBackend();
  const StepResult first = RunStep(fake.backend.get(), 0, rows_);
  const uint64_t sent = fake.backend->stats().bytes_to_device;
  const uint64_t uploaded = fake.control->uploads();
  const StepResult second = RunStep(fake.backend.get(), 0, rows_);
  ExpectSameBits(first, second);
  EXPECT_LT(fake.backend->stats().bytes_to_device - sent, 40000u);  // references and queries
  EXPECT_EQ(fake.control->uploads(), uploaded);
}

TEST_F(CudaBackendFaults, WhatABatchIsChangesNoRow) {
  const FakeBackend fake = MakeFakeBackend();
  const StepResult together = RunStep(fake.backend.get(), 0, rows_);
  for (size_t r = 0; r < rows_.size(); ++r) {
    const StepResult alone = RunStep(fake.backend.get(), 0, {&rows_[r], 1});
    ASSERT_TRUE(alone.status.ok());
    EXPECT_TRUE(SameBits(alone.rows[0], together.rows[r])) << "row " << r;
  }
}

TEST_F(CudaBackendFaults, LargeStepsAreAnsweredInWaves) {
  TestRow row = MakeRow(&sequence_, Parse("error-target"), sequence_.spec.tokens() - 60, 60, false,
                        DType::kFp32, 0, seed_);
  TestRow dense = MakeRow(&sequence_, Parse("dense"), sequence_.spec.tokens() - 61, 61, false,
                          DType::kFp32, 0, seed_ + 1);
  const std::vector<TestRow> rows = {row, rows_[0], dense};
  const FakeBackend large = MakeFakeBackend();
  CudaBackendOptions options = SmallOptions();
  options.scratch_bytes = uint64_t{1} << 20;
  options.input_bytes = uint64_t{1} << 18;
  options.result_bytes = uint64_t{1} << 17;
  const FakeBackend small = MakeFakeBackend(options);
  const StepResult in_waves = RunStep(small.backend.get(), 0, rows);
  EXPECT_GT(small.control->steps(), 3u);
  EXPECT_EQ(small.backend->stats().fallback_steps, 0u);
  ExpectSameBits(in_waves, RunStep(large.backend.get(), 0, rows));
  EXPECT_TRUE(Agree(in_waves, RunStep(cpu_.get(), 0, rows), rows));
}

TEST_F(CudaBackendFaults, ARowWithoutRoomIsTheCpus) {
  CudaBackendOptions options = SmallOptions();
  options.scratch_bytes = uint64_t{1} << 16;  // less than a unit of clusters takes
  const FakeBackend fake = MakeFakeBackend(options);
  const StepResult step = RunStep(fake.backend.get(), 0, rows_);
  const StepResult expected = RunStep(cpu_.get(), 0, rows_);
  EXPECT_TRUE(Agree(step, expected, rows_));
  EXPECT_EQ(fake.backend->stats().fallback_steps, 1u);
  EXPECT_EQ(step.rows[1].stats.host_tokens, 0u);
  EXPECT_EQ(step.rows[3].stats.hbm_tokens, 0u);
  EXPECT_TRUE(SameBits(step.rows[3], expected.rows[3]));
  EXPECT_TRUE(fake.backend->Health().ok());
}

TEST_F(CudaBackendFaults, AFullDeviceEvictsWhatWasUsedLast) {
  CudaBackendOptions options = SmallOptions();
  options.device_memory_bytes = kDeviceMemoryBytesMin;
  std::vector<TestSequence> sequences;
  for (uint64_t s = 0; s < kManySequences; ++s) sequences.push_back(SmallSequence(s));
  const FakeBackend fake = MakeFakeBackend(options);
  for (int round = 0; round < 2; ++round) {
    for (TestSequence& sequence : sequences) {
      const std::vector<TestRow> rows = RowsOf(&sequence, 1);
      EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 1, rows), RunStep(cpu_.get(), 1, rows), rows));
    }
  }
  const BackendStats stats = fake.backend->stats();
  EXPECT_GT(stats.evictions, kManySequences);
  EXPECT_EQ(stats.fallback_steps, 0u);
  EXPECT_LE(stats.pages.used_bytes, stats.pages.capacity_bytes);
  sequences.clear();
  EXPECT_EQ(fake.backend->stats().pages.used_bytes, 0u) << "device copies outlive their blocks";
  EXPECT_EQ(fake.backend->stats().index.used_bytes, 0u);
}

// More sequences in one step than the device holds: they take turns.
TEST_F(CudaBackendFaults, AStepBeyondTheDeviceIsAnsweredInTurns) {
  CudaBackendOptions options = SmallOptions();
  options.device_memory_bytes = kDeviceMemoryBytesMin;
  std::vector<TestSequence> sequences;
  for (uint64_t s = 0; s < kManySequences; ++s) sequences.push_back(SmallSequence(s));
  std::vector<TestRow> rows;
  for (TestSequence& sequence : sequences) {
    rows.push_back(RowsOf(&sequence, 0)[rows.size() % 4]);
  }
  const FakeBackend fake = MakeFakeBackend(options);
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(cpu_.get(), 0, rows), rows));
  EXPECT_GT(fake.control->steps(), 1u);
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

TEST_F(CudaBackendFaults, ASegmentBeyondTheDeviceIsTheCpus) {
  SequenceSpec spec;
  spec.shape = MakeShape(4, 4, 64, 64, DType::kBf16, 16);
  spec.segment_tokens = {1024, 600};  // the first takes 16 MiB
  spec.tail_tokens = 10;
  spec.seed = seed_;
  TestSequence large = MakeSequence(spec);
  CudaBackendOptions options = SmallOptions();
  options.device_memory_bytes = kDeviceMemoryBytesMin;
  const FakeBackend fake = MakeFakeBackend(options);
  std::vector<TestRow> rows = {rows_[0]};
  for (const TestRow& row : RowsOf(&large, 0)) rows.push_back(row);
  const StepResult step = RunStep(fake.backend.get(), 0, rows);
  const StepResult expected = RunStep(cpu_.get(), 0, rows);
  EXPECT_TRUE(Agree(step, expected, rows));
  for (size_t r = 1; r < rows.size(); ++r) {
    EXPECT_TRUE(SameBits(step.rows[r], expected.rows[r])) << "row " << r;
  }
  EXPECT_EQ(step.rows[0].stats.host_tokens, 0u);
  EXPECT_EQ(fake.backend->stats().fallback_steps, 1u);
}

// Whose sequence the CPU answers in any case, and who is told how much is missing.
TEST_F(CudaBackendFaults, IndexesBeyondTheDeviceAreSaid) {
  CudaBackendOptions options = SmallOptions();
  options.device_memory_bytes = kDeviceMemoryBytesMin;
  options.page_memory_bytes = (uint64_t{11} << 20) + (uint64_t{990} << 10);  // 34 KiB for indexes
  const FakeBackend fake = MakeFakeBackend(options, /*maps_host_memory=*/true);
  const uint64_t capacity = fake.backend->stats().index.capacity_bytes;
  const uint64_t index = sequence_.view->segments[0]->index_block().size();
  ASSERT_GT(index, capacity);
  const StepResult expected = RunStep(cpu_.get(), 0, rows_);
  for (uint64_t step = 1; step <= 2; ++step) {
    ExpectSameBits(RunStep(fake.backend.get(), 0, rows_), expected);
    const BackendStats stats = fake.backend->stats();
    EXPECT_EQ(stats.fallback_steps, step);
    std::array<uint64_t, attention::kFallbacks> rows{};
    rows[static_cast<size_t>(attention::Fallback::kIndexes)] = step * rows_.size();
    EXPECT_EQ(stats.fallback_rows, rows);
    EXPECT_EQ(stats.index_missing_bytes, index - capacity);
  }
  EXPECT_TRUE(fake.backend->Health().ok());
}

// Every reason has its own counter.
TEST_F(CudaBackendFaults, WhyTheCpuAnswersIsCounted) {
  const auto reasons = [&](const FakeBackend& fake) {
    ExpectSameBits(RunStep(fake.backend.get(), 0, rows_), RunStep(cpu_.get(), 0, rows_));
    EXPECT_EQ(fake.backend->stats().index_missing_bytes, 0u);
    return fake.backend->stats().fallback_rows;
  };
  const auto only = [&](attention::Fallback why) {
    std::array<uint64_t, attention::kFallbacks> rows{};
    rows[static_cast<size_t>(why)] = rows_.size();
    return rows;
  };
  const FakeBackend failed = MakeFakeBackend();
  failed.control->Set({.call = 0});
  EXPECT_EQ(reasons(failed), only(attention::Fallback::kFailed));
  const FakeBackend launches = MakeFakeBackend();
  launches.control->Set({.launch = 0, .launches = 2});
  EXPECT_EQ(reasons(launches), only(attention::Fallback::kScratch));
  CudaBackendOptions options = SmallOptions();
  options.page_memory_bytes = uint64_t{1} << 16;  // less than the segment, which is not mapped
  EXPECT_EQ(reasons(MakeFakeBackend(options)), only(attention::Fallback::kPages));
}

TEST_F(CudaBackendFaults, ALaunchWithoutMemoryIsTriedOnceMore) {
  const FakeBackend fake = MakeFakeBackend();
  const StepResult expected = RunStep(cpu_.get(), 0, rows_);
  fake.control->Set({.launch = 0});
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows_), expected, rows_));
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
  fake.control->Set({.launch = 0, .launches = 2});
  ExpectSameBits(RunStep(fake.backend.get(), 0, rows_), expected);
  EXPECT_EQ(fake.backend->stats().fallback_steps, 1u);
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows_), expected, rows_));
  EXPECT_TRUE(fake.backend->Health().ok());
}

TEST_F(CudaBackendFaults, AFailureAtAnyCallLosesNothing) {
  const StepResult expected = RunStep(cpu_.get(), 0, rows_);
  for (uint64_t call = 0;; ++call) {
    SCOPED_TRACE(testing::Message() << "call " << call);
    ASSERT_LT(call, 100u);
    absl::Status told;
    CudaBackendOptions options = SmallOptions();
    options.on_degraded = [&](const absl::Status& status) { told = status; };
    TestSequence sequence = SmallSequence(0);
    const std::vector<TestRow> rows = RowsOf(&sequence, 0);
    const FakeBackend fake = MakeFakeBackend(options);
    fake.control->Set({.call = call});
    const StepResult step = RunStep(fake.backend.get(), 0, rows);
    if (fake.backend->Health().ok()) {
      EXPECT_GT(call, 4u);
      EXPECT_TRUE(Agree(step, expected, rows));
      break;
    }
    ExpectSameBits(step, expected);
    EXPECT_EQ(step.plans.size(), expected.plans.size());
    EXPECT_EQ(told.code(), StatusCode::kInternal);
    EXPECT_THAT(std::string(fake.backend->Health().message()), HasSubstr("fake device has failed"));
    ExpectSameBits(RunStep(fake.backend.get(), 0, rows), expected);
    EXPECT_EQ(fake.backend->stats().fallback_steps, 2u);
  }
}

// As after a fault of another process under MPS.
TEST_F(CudaBackendFaults, AFailureIsNoticedWithoutAStep) {
  Mutex mutex;
  CondVar told;
  std::vector<absl::Status> faults;
  CudaBackendOptions options = SmallOptions();
  options.fault_watch_period = std::chrono::milliseconds(1);
  options.on_degraded = [&](const absl::Status& status) {
    MutexLock lock(mutex);
    faults.push_back(status);
    told.NotifyAll();
  };
  const FakeBackend fake = MakeFakeBackend(options);
  EXPECT_TRUE(fake.backend->Health().ok());
  fake.control->Set({.call = 0});
  MutexLock lock(mutex);
  for (int second = 0; faults.empty() && second < 60; ++second) {
    told.WaitFor(mutex, std::chrono::seconds(1));
  }
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_EQ(faults.front().code(), StatusCode::kInternal);
  EXPECT_EQ(fake.backend->Health().code(), StatusCode::kUnavailable);
}

TEST_F(CudaBackendFaults, AFailureMidwayLeavesNoTrace) {
  const FakeBackend fake = MakeFakeBackend();
  fake.control->Set({.step_midway = true});
  ExpectSameBits(RunStep(fake.backend.get(), 0, rows_), RunStep(cpu_.get(), 0, rows_));
  EXPECT_EQ(fake.backend->Health().code(), StatusCode::kUnavailable);
}

TEST_F(CudaBackendFaults, StartingTakesAllMemoryOrNone) {
  for (uint64_t allocation = 0;; ++allocation) {
    ASSERT_LT(allocation, 100u);
    FakePair fake = MakeFakeDevice(uint64_t{1} << 30);
    fake.control->Set({.allocation = allocation});
    const auto backend = MakeCudaBackend(SmallOptions(), std::move(fake.device), MakeCpu());
    if (backend.ok()) {
      EXPECT_GT(allocation, 4u);
      break;
    }
    EXPECT_EQ(backend.status().code(), StatusCode::kResourceExhausted);
    EXPECT_EQ(fake.control->allocations(), 0u);
  }
}

TEST_F(CudaBackendFaults, WithoutASizeItTakesWhatOthersLeft) {
  FakePair fake = MakeFakeDevice(uint64_t{1} << 30);
  const auto others = fake.device->Allocate(uint64_t{600} << 20);
  CudaBackendOptions options = SmallOptions();
  options.device_memory_bytes = 0;
  Device* const device = fake.device.get();
  auto backend = MakeCudaBackend(options, std::move(fake.device), MakeCpu());
  ASSERT_TRUE(backend.ok()) << backend.status();
  const BackendStats stats = (*backend)->stats();
  const uint64_t taken =
      stats.pages.capacity_bytes + stats.index.capacity_bytes + stats.scratch.capacity_bytes;
  EXPECT_GT(taken, uint64_t{300} << 20);
  EXPECT_LT(taken, uint64_t{424} << 20);
  device->Free(*others);
}

TEST_F(CudaBackendFaults, CancelledAndLateStepsEnd) {
  const FakeBackend fake = MakeFakeBackend();
  const TestRow& source = rows_[0];
  attention::RowStats stats;
  std::vector<float> out(size_t{3} * 4 * 64), lse(size_t{3} * 4);
  const std::vector<std::byte> queries = attention::test::Stored(DType::kBf16, source.queries);
  StepRow row;
  row.view = sequence_.view;
  row.policy = &source.policy;
  row.past_tokens = source.past_tokens;
  row.query_tokens = source.query_tokens;
  row.query_dtype = DType::kBf16;
  row.queries = queries.data();
  row.out = out.data();
  row.lse = lse.data();
  row.stats = &stats;
  StepRequest request;
  request.rows = {&row, 1};
  const std::atomic<bool> cancelled{true};
  request.cancelled = &cancelled;
  EXPECT_EQ(fake.backend->Step(request).code(), StatusCode::kCancelled);
  request.cancelled = nullptr;
  request.deadline = std::chrono::steady_clock::now() - std::chrono::seconds(1);
  EXPECT_EQ(fake.backend->Step(request).code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(fake.control->steps(), 0u);
  request.deadline.reset();
  EXPECT_TRUE(fake.backend->Step(request).ok());
  EXPECT_TRUE(fake.backend->Health().ok());
}

TEST_F(CudaBackendFaults, ShapesWithoutKernelsAreRefused) {
  const FakeBackend fake = MakeFakeBackend();
  const auto refusal = [&](const ModelShape& shape) {
    const absl::Status status = fake.backend->Supports(shape);
    EXPECT_TRUE(status.ok() || absl::IsUnimplemented(status)) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(refusal(MakeShape(32, 8, 128, 128, DType::kBf16)), "");
  EXPECT_EQ(refusal(MakeShape(32, 1, 64, 64, DType::kFp16)), "");
  EXPECT_THAT(refusal(MakeShape(8, 2, 128, 128, DType::kFp32)), HasSubstr("dtype is fp32"));
  EXPECT_THAT(refusal(MakeShape(8, 2, 96, 96, DType::kBf16)), HasSubstr("96/96"));
  EXPECT_THAT(refusal(MakeShape(33, 1, 64, 64, DType::kBf16)), HasSubstr("33 query heads"));
  EXPECT_THAT(refusal(attention::test::MakeLatentShape(8, 64, 64, DType::kBf16)),
              HasSubstr("latent"));
}

TEST_F(CudaBackendFaults, StageTimesAreSampled) {
  CudaBackendOptions options = SmallOptions();
  options.timed_steps = 3;
  const FakeBackend fake = MakeFakeBackend(options);
  for (int i = 0; i < 7; ++i) {
    const StepResult step = RunStep(fake.backend.get(), 0, rows_);
    uint64_t attend = 0;
    for (const auto& row : step.rows) attend += row.stats.stages.attend;
    EXPECT_EQ(attend > 0, i % 3 == 0);
  }
  EXPECT_EQ(fake.backend->stats().timed_steps, 3u);
  EXPECT_NEAR(fake.backend->stats().attend_seconds, 9e-6, 1e-9);
  EXPECT_NEAR(fake.backend->stats().fetch_seconds, 15e-7, 1e-9);
  EXPECT_EQ(fake.backend->stats().steps, 7u);
}

TEST_F(CudaBackendFaults, AnEmptyRunSaysWhatItTook) {
  const FakeBackend fake = MakeFakeBackend();
  EXPECT_EQ(*fake.backend->RunEmpty(), kEmptyRun);
  fake.control->Set({.empty_run = std::chrono::milliseconds(3)});
  EXPECT_EQ(*fake.backend->RunEmpty(), std::chrono::milliseconds(3));
  EXPECT_EQ(fake.control->empty_runs(), 2u);
  EXPECT_EQ(cpu_->RunEmpty().status().code(), StatusCode::kUnimplemented);
  // A fault degrades the backend when a step meets it.
  fake.control->Set({.call = 0});
  for (int i = 0; i < 2; ++i) {
    const absl::Status status = fake.backend->RunEmpty().status();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_EQ(status.message().find("the GPU has failed: "), 0u) << status;
    EXPECT_EQ(fake.backend->Health().ok(), i == 0);
    RunStep(fake.backend.get(), 0, rows_);
  }
}

TEST(CudaBackendOptionsTest, NamesTheOptionAndItsRange) {
  const auto refusal = [](const auto& change) {
    CudaBackendOptions options = SmallOptions();
    change(&options);
    return std::string(options.Validate().message());
  };
  EXPECT_EQ(refusal([](auto*) {}), "");
  EXPECT_THAT(refusal([](auto* o) { o->device_memory_bytes = 1; }),
              HasSubstr("device_memory_bytes is 1; allowed are 16777216.."));
  EXPECT_THAT(refusal([](auto* o) { o->streams = 0; }), HasSubstr("streams is 0; allowed"));
  EXPECT_THAT(refusal([](auto* o) { o->input_bytes = 5; }), HasSubstr("input_bytes is 5"));
}

}  // namespace
}  // namespace attnd::gpu::test
