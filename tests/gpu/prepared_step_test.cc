// SPDX-License-Identifier: Apache-2.0
//
// Goal: a step that was prepared, and launched, before its queries and its tokens were there
// answers with the bits of one that was not; whatever comes in its place is answered as if nothing
// had been prepared; and what was prepared for nothing leaves no trace on the device. Method: over
// the fake device steps are prepared while their new tokens hold rubbish, and run, given up,
// cancelled, or broken; every answer is compared.
#include "gpu/prepared_step.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "gpu/auto_backend.h"
#include "tests/gpu/agreement.h"
#include "tests/gpu/prepared_steps.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::kTailBlockTokens;
using attention::test::MakeRow;
using attention::test::PrepareStep;
using attention::test::RunPrepared;
using attention::test::RunStep;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSeed;
using attention::test::TestSequence;

class PreparedSteps : public testing::TestWithParam<attention::IndexSet> {};

// Every policy, alone and four together; some with several query tokens.
TEST_P(PreparedSteps, BitsAreThoseOfAStep) {
  const FakeBackend fake = MakeFakeBackend(PreparingOptions());
  TestSequence sequence = MakeHistory(0, GetParam());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const std::vector<TestRow> all =
        RowsOfPolicies(&sequence, layer, 3, DType::kFp32);  // of one dtype, and so one wave
    std::vector<std::vector<TestRow>> steps;
    for (const TestRow& row : all) steps.push_back({row});
    for (size_t first = 0; first + 4 <= all.size(); first += 4) {
      steps.emplace_back(all.begin() + first, all.begin() + first + 4);
    }
    RunStep(fake.backend.get(), layer,
            {{LastToken(&sequence, "dense", layer)}});  // brings the tail
    for (const std::vector<TestRow>& rows : steps) {
      const uint64_t ahead = fake.backend->stats().steps_ahead;
      const auto prepared = PrepareStep(fake.backend.get(), layer, rows);
      ASSERT_NE(prepared, nullptr);
      const StepResult found = RunPrepared(fake.backend.get(), layer, rows, prepared.get());
      ExpectSameRows(found, RunStep(fake.backend.get(), layer, rows));
      EXPECT_EQ(fake.backend->stats().steps_ahead, ahead + 1);
    }
  }
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 0u);
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

TEST_P(PreparedSteps, TokensComeAfterThePreparation) {
  LateRows step(GetParam());
  auto& [fake, sequence, late, rows] = step;
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  EXPECT_EQ(fake.control->steps_behind_gates(), 1u);
  late.PutBack();
  const StepResult found = RunPrepared(fake.backend.get(), 0, rows, prepared.get());
  ExpectSameRows(found, RunStep(fake.backend.get(), 0, rows));
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
}

// A step in vain sends nothing: what another step has brought meanwhile stays.
TEST_P(PreparedSteps, WhatIsGivenUpLeavesNoTrace) {
  LateRows step(GetParam());
  auto& [fake, sequence, late, rows] = step;
  auto prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  late.PutBack();
  const StepResult expected = RunStep(fake.backend.get(), 0, rows);
  const uint64_t uploads = fake.control->uploads(), steps = fake.control->steps();
  prepared.reset();
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 1u);
  EXPECT_EQ(fake.control->steps(), steps + 1);
  EXPECT_EQ(fake.control->uploads(), uploads);
  ExpectSameRows(RunStep(fake.backend.get(), 0, rows), expected);
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
  EXPECT_EQ(fake.control->uploads(), uploads) << "the token counts as brought";
}

// Nor does a token count as brought that only a step in vain would have brought.
TEST_P(PreparedSteps, WhatWasNotBroughtIsNotCounted) {
  const FakeBackend fake = MakeFakeBackend(PreparingOptions());
  TestSequence sequence = MakeHistory(0, GetParam());
  LateToken late(sequence);
  const std::vector<TestRow> rows = {LastToken(&sequence, "dense")};
  Bring(fake, &sequence);
  late.TakeAway();
  ASSERT_NE(PrepareStep(fake.backend.get(), 0, rows), nullptr);
  late.PutBack();
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
}

INSTANTIATE_TEST_SUITE_P(Indexes, PreparedSteps,
                         testing::Values(attention::kClusterIndexes, attention::kTreeIndexes),
                         [](const auto& c) {
                           return c.param == attention::kTreeIndexes ? "tree" : "clusters";
                         });

// Rows are changed where they lie, as other rows have other policies already.
TEST(PreparedStep, AnotherStepIsAnsweredAsIfNothingWere) {
  const FakeBackend fake = MakeFakeBackend(PreparingOptions());
  TestSequence sequence = MakeHistory(0), same = sequence;
  same.view = std::make_shared<attention::SequenceView>(*sequence.view);
  Bring(fake, &sequence);
  const std::vector<TestRow> original = {LastToken(&sequence, "error-target"),
                                         LastToken(&sequence, "streaming")};
  using Change = std::function<void(std::vector<TestRow>*)>;
  const std::pair<const char*, Change> changes[] = {
      {"a row less", [](auto* rows) { rows->pop_back(); }},
      {"position", [](auto* rows) { --rows->front().past_tokens; }},
      {"query only", [](auto* rows) { rows->front().query_only = true; }},
      {"errors", [](auto* rows) { rows->back().want_kv_head_errors = false; }},
      {"dtype", [](auto* rows) { rows->front().query_dtype = DType::kFp32; }},
      {"view", [&](auto* rows) { rows->back().sequence = &same; }},
      {"policies elsewhere", [](auto* rows) { *rows = std::vector<TestRow>(*rows); }},
  };
  uint64_t in_vain = 0;
  for (const auto& [what, change] : changes) {
    SCOPED_TRACE(what);
    std::vector<TestRow> rows = original;
    const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
    ASSERT_NE(prepared, nullptr);
    change(&rows);
    const size_t before = fake.control->runs_behind_gates().size();
    const StepResult found = RunPrepared(fake.backend.get(), 0, rows, prepared.get());
    EXPECT_EQ(fake.backend->stats().steps_in_vain, ++in_vain);
    const std::vector<bool> runs = fake.control->runs_behind_gates();
    EXPECT_TRUE(runs.at(before) && !runs.back()) << "in vain, before the step that came";
    ExpectSameRows(found, RunStep(fake.backend.get(), 0, rows));
  }
  {
    const auto prepared = PrepareStep(fake.backend.get(), 0, original);
    const StepResult found = RunPrepared(fake.backend.get(), 1, original, prepared.get());
    ExpectSameRows(found, RunStep(fake.backend.get(), 1, original));
  }
  EXPECT_EQ(fake.backend->stats().steps_ahead, 0u);
  EXPECT_EQ(fake.backend->stats().steps_in_vain, ++in_vain);
  const auto prepared = PrepareStep(fake.backend.get(), 0, original);
  ExpectSameRows(RunPrepared(fake.backend.get(), 0, original, prepared.get()),
                 RunStep(fake.backend.get(), 0, original));
  EXPECT_EQ(fake.backend->stats().steps_ahead, 1u) << "unchanged it is used";
}

TEST(PreparedStep, ACancelledStepFreesItsStream) {
  const FakeBackend fake = MakeFakeBackend(PreparingOptions());
  TestSequence sequence = MakeHistory(0);
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  Bring(fake, &sequence);
  const std::atomic<bool> cancelled{true};
  for (int i = 0; i < 3; ++i) {
    const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
    ASSERT_NE(prepared, nullptr);
    EXPECT_TRUE(absl::IsCancelled(
        RunPrepared(fake.backend.get(), 0, rows, prepared.get(), &cancelled).status));
  }
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 3u);
}

// As many as steps that wait for files may take: of two streams one, of four two.
TEST(PreparedStep, HalfTheStreamsStayForOthers) {
  const FakeBackend fake = MakeFakeBackend(PreparingOptions());
  TestSequence sequence = MakeHistory(0);
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  Bring(fake, &sequence);
  auto prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  EXPECT_EQ(PrepareStep(fake.backend.get(), 0, rows), nullptr);
  EXPECT_TRUE(RunStep(fake.backend.get(), 0, rows).status.ok());
  prepared.reset();
  EXPECT_NE(PrepareStep(fake.backend.get(), 0, rows), nullptr);

  CudaBackendOptions four = PreparingOptions();
  four.streams = 4;
  const FakeBackend larger = MakeFakeBackend(four);
  Bring(larger, &sequence);
  const auto one = PrepareStep(larger.backend.get(), 0, rows);
  const auto other = PrepareStep(larger.backend.get(), 0, rows);
  EXPECT_TRUE(one != nullptr && other != nullptr);
  EXPECT_EQ(PrepareStep(larger.backend.get(), 0, rows), nullptr);
}

// Where nothing waits behind a gate, what was prepared is launched when the queries are there.
TEST(PreparedStep, WithoutGatesItIsLaunchedLater) {
  const FakeBackend fake = MakeFakeBackend(PreparingOptions());
  fake.control->Set({.no_gates = true});
  TestSequence sequence = MakeHistory(0);
  LateToken late(sequence);
  Bring(fake, &sequence);
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  late.TakeAway();
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  late.PutBack();
  const StepResult found = RunPrepared(fake.backend.get(), 0, rows, prepared.get());
  ExpectSameRows(found, RunStep(fake.backend.get(), 0, rows));
  EXPECT_EQ(fake.control->steps_behind_gates(), 0u);
  EXPECT_EQ(fake.backend->stats().steps_ahead, 0u);
}

// A block that its last token fills, and of which nothing is on the device, is sent as a whole.
TEST(PreparedStep, TokensThatWouldBeSentAtOnceAreWaitedFor) {
  const FakeBackend fake = MakeFakeBackend(PreparingOptions());
  const uint64_t begin = 1300;
  TestSequence sequence =
      MakeHistory(0, attention::kTreeIndexes, kTailBlockTokens - begin % kTailBlockTokens);
  // The segments alone, which are uploaded by the step that first reads them.
  EXPECT_EQ(PrepareStep(fake.backend.get(), 0, {{LastToken(&sequence, "dense")}}), nullptr);
  const TestRow segments = MakeRow(&sequence, Parse("dense"), begin, 1, /*query_only=*/true,
                                   DType::kBf16, 0, TestSeed());
  ASSERT_TRUE(RunStep(fake.backend.get(), 0, {{segments}}).status.ok());
  EXPECT_NE(PrepareStep(fake.backend.get(), 0, {{segments}}), nullptr);
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  EXPECT_EQ(PrepareStep(fake.backend.get(), 0, rows), nullptr);
  EXPECT_EQ(fake.control->uploads(), 0u);
  // One of whose tokens some are there is not.
  TestRow before = rows[0];
  --before.past_tokens;
  ASSERT_TRUE(RunStep(fake.backend.get(), 0, {{before}}).status.ok());
  EXPECT_NE(PrepareStep(fake.backend.get(), 0, rows), nullptr);
}

// Two sequences of whose pages the device has not room for all.
struct SequencesOverACache {
  SequencesOverACache() = default;
  SequencesOverACache(const SequencesOverACache&) = delete;
  SequencesOverACache& operator=(const SequencesOverACache&) = delete;
  static CudaBackendOptions Options() {
    CudaBackendOptions options = OfPages(2 * kFewPages);
    options.timed_steps = 0;
    return options;
  }

  const FakeBackend fake = MakeFakeBackend(Options(), /*maps_host_memory=*/true);
  TestSequence sequence = HostSequence(0, attention::kTreeIndexes);
  TestSequence other = HostSequence(1, attention::kTreeIndexes);
};

// Over a cache of pages, too, while others use and change it; also one in vain, which looks pages
// up for queries of zeros.
TEST(PreparedStep, StepsOverACacheArePrepared) {
  SequencesOverACache sequences;
  auto& [fake, sequence, other] = sequences;
  for (uint32_t round = 0; round < 3; ++round) {
    const uint32_t layer = round % 2;
    const std::vector<TestRow> rows = {LastToken(&sequence, "error-target", layer)};
    const std::vector<TestRow> others = {LastToken(&other, "error-target", layer)};
    RunStep(fake.backend.get(), layer, rows);  // is there already when the cache is made
    const StepResult of_others = RunStep(fake.backend.get(), layer, others);
    const StepResult expected = RunStep(fake.backend.get(), layer, rows);
    EXPECT_GT(fake.backend->stats().cache.bytes, 0u);
    auto prepared = PrepareStep(fake.backend.get(), layer, rows);
    ASSERT_NE(prepared, nullptr);
    ExpectSameRows(RunStep(fake.backend.get(), layer, others), of_others);
    if (round == 1) {
      prepared.reset();
      prepared = PrepareStep(fake.backend.get(), layer, rows);
      ASSERT_NE(prepared, nullptr);
    }
    ExpectSameRows(RunPrepared(fake.backend.get(), layer, rows, prepared.get()), expected);
    EXPECT_TRUE(Agree(RunStep(fake.backend.get(), layer, rows),
                      RunStep(MakeCpu().get(), layer, rows), rows));
  }
  EXPECT_EQ(fake.backend->stats().steps_ahead, 3u);
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 1u);
  EXPECT_EQ(fake.control->runs_that_only_look(), 1u);
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

// What is prepared and not launched keeps nobody from the cache's memory: it is run over the cache
// that there is then.
TEST(PreparedStep, ACacheMayGoBeforeThePreparedStep) {
  SequencesOverACache sequences;
  auto& [fake, sequence, other] = sequences;
  attention::test::SequenceSpec tail = sequence.spec;
  tail.segment_tokens = {};
  tail.tail_tokens = 1000;  // more than a cache leaves
  TestSequence large_tail = attention::test::MakeSequence(tail);
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  for (int round = 0; round < 2; ++round) {
    for (TestSequence* each : {&sequence, &other}) {
      RunStep(fake.backend.get(), 0, {{LastToken(each, "error-target")}});
    }
  }
  const StepResult expected = RunStep(fake.backend.get(), 0, rows);
  const uint64_t cache_bytes = fake.backend->stats().cache.bytes;
  EXPECT_GT(cache_bytes, 0u);
  fake.control->Set({.no_gates = true});
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  const std::vector<TestRow> of_tail = {LastToken(&large_tail, "dense")};
  const StepResult answer = RunStep(fake.backend.get(), 0, of_tail);
  EXPECT_NE(fake.backend->stats().cache.bytes, cache_bytes);
  ExpectSameRows(RunPrepared(fake.backend.get(), 0, rows, prepared.get()), expected);
  ExpectSameRows(RunStep(fake.backend.get(), 0, of_tail), answer);
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

TEST(PreparedStep, TimedStepsAreNotPrepared) {
  CudaBackendOptions options = PreparingOptions();
  options.timed_steps = 4;
  const FakeBackend fake = MakeFakeBackend(options);
  TestSequence sequence = MakeHistory(0);
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  Bring(fake, &sequence);  // steps 0 and 1
  for (int step = 2; step < 14; ++step) {
    const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
    // A prepared step whose turn it is leaves that to the next one.
    EXPECT_EQ(prepared == nullptr, step % 4 == 1);
    EXPECT_TRUE(RunPrepared(fake.backend.get(), 0, rows, prepared.get()).status.ok());
  }
  EXPECT_EQ(fake.backend->stats().timed_steps, 4u);
  EXPECT_EQ(fake.backend->stats().steps_ahead, 9u);
}

TEST(PreparedStep, NothingIsPreparedUnlessAsked) {
  CudaBackendOptions options = PreparingOptions();
  options.launch_ahead = false;
  const FakeBackend fake = MakeFakeBackend(options);
  TestSequence sequence = MakeHistory(0);
  Bring(fake, &sequence);
  EXPECT_EQ(PrepareStep(fake.backend.get(), 0, {{LastToken(&sequence, "dense")}}), nullptr);
}

// Whatever call of the device fails from the preparation on, the CPU answers.
TEST(PreparedStep, ADeviceThatFailsIsReplaced) {
  TestSequence sequence = MakeHistory(0);
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  const auto cpu = MakeCpu();
  int while_prepared = 0, later = 0;
  for (uint64_t call = 0; call < 8; ++call) {
    SCOPED_TRACE(call);
    const FakeBackend fake = MakeFakeBackend(PreparingOptions());
    const StepResult devices = RunStep(fake.backend.get(), 0, rows);
    fake.control->Set({.call = call});
    const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
    const bool failed = !fake.backend->Health().ok();
    EXPECT_EQ(prepared == nullptr, failed);
    const StepResult found = RunPrepared(fake.backend.get(), 0, rows, prepared.get());
    const bool fails = !fake.backend->Health().ok();
    ExpectSameRows(found, fails ? RunStep(cpu.get(), 0, rows) : devices);
    while_prepared += failed;
    later += fails && !failed;
  }
  EXPECT_GT(while_prepared, 0);
  EXPECT_GT(later, 0);
}

TEST(PreparedStep, MemoryThatIsRefusedForTheLaunchIsAskedForAgain) {
  const FakeBackend fake = MakeFakeBackend(PreparingOptions());
  TestSequence sequence = MakeHistory(0);
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  const StepResult expected = RunStep(fake.backend.get(), 0, rows);
  fake.control->Set({.launch = 0});
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  ExpectSameRows(RunPrepared(fake.backend.get(), 0, rows, prepared.get()), expected);
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

// Rows of both backends are prepared by neither.
TEST(PreparedStep, RowsOfADeviceAloneArePrepared) {
  FakeBackend fake = MakeFakeBackend(PreparingOptions());
  const attention::Backend* const device = fake.backend.get();
  const auto both = MakeAutoBackend(std::move(fake.backend), MakeCpu());
  TestSequence sequence = MakeHistory(0), other = MakeHistory(0);
  const auto owned = [](const TestSequence& from, const attention::Backend* owner) {
    auto view = std::make_shared<attention::SequenceView>(*from.view);
    view->owner = owner;
    return view;
  };
  sequence.view = owned(sequence, device);
  other.view = owned(other, nullptr);
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  ASSERT_TRUE(RunStep(both.get(), 0, rows).status.ok());
  {
    const auto prepared = PrepareStep(both.get(), 0, rows);
    ASSERT_NE(prepared, nullptr);
    const StepResult found = RunPrepared(both.get(), 0, rows, prepared.get());
    ExpectSameRows(found, RunStep(both.get(), 0, rows));
  }
  EXPECT_EQ(both->stats().steps_ahead, 1u);
  // Of which one has become the CPU's meanwhile.
  const std::vector<TestRow> mixed = {rows[0], LastToken(&other, "error-target")};
  const auto prepared = PrepareStep(both.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  const StepResult found = RunPrepared(both.get(), 0, mixed, prepared.get());
  EXPECT_EQ(both->stats().steps_in_vain, 1u);
  ExpectSameRows(found, RunStep(both.get(), 0, mixed));
  EXPECT_EQ(PrepareStep(both.get(), 0, mixed), nullptr);
}

}  // namespace
}  // namespace attnd::gpu::test
