// SPDX-License-Identifier: Apache-2.0
//
// Goal: what the engine's own tests cannot reach from outside: swapping in a segment that no longer
// fits, the window, the budget's arithmetic, the gate between steps and builders, and the memory
// that tokens take. Method: Sequence, MemoryBudget and StepGate are driven directly; memory is what
// Engine::usage() says after a prefill.
#include "engine/sequence/sequence.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "attention/index/segment_builder.h"
#include "attention/segment/segment.h"
#include "engine/memory_budget.h"
#include "engine/sequence/magnitude.h"
#include "engine/sequence/segmenter.h"
#include "tests/engine/sequence/sequence_fixture.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

using attention::Segment;

class SequenceTest : public SequenceFixture {
 protected:
  SequenceTest() : SequenceFixture(attention::kClusterIndexes) {}
};

TEST_F(SequenceTest, ASegmentLeavesTheWindowAlone) {
  Append(512 + 63);
  EXPECT_FALSE(sequence_.NextSegment(512, 512).has_value());
  Append(1);
  const std::optional<SegmentJob> job = sequence_.NextSegment(512, 512);
  ASSERT_TRUE(job.has_value());
  EXPECT_EQ(job->tokens, 512u);
  EXPECT_EQ(job->unclustered, 4u);  // the sink, in the first segment only
  EXPECT_TRUE(BuildAndInstall(*job));
  EXPECT_EQ(sequence_.Info().segmented_tokens, 512u);
  EXPECT_FALSE(BuildAndInstall(*job));  // a second time
  Append(1000);
  const std::optional<SegmentJob> next = sequence_.NextSegment(512, 900);
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ(next->tokens, 900u);
  EXPECT_EQ(next->unclustered, 0u);
}

// The newest step stays in the tail until its writer, and nobody else, says that the prompt is
// whole.
TEST_F(SequenceTest, AWholePromptNeedsNoRepeats) {
  const Kv kv = RandomKv(shape_, 700, &random_);
  ASSERT_TRUE(sequence_.AppendAndRead(kWriter, StepTokensOf(0, kv), 1.0f).ok());
  EXPECT_FALSE(sequence_.HasSegment(512));
  EXPECT_EQ(sequence_.CompletePrefill(kWriter + 1).code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(sequence_.HasSegment(512));
  EXPECT_TRUE(sequence_.CompletePrefill(kWriter).ok());
  EXPECT_TRUE(sequence_.HasSegment(512));
  ASSERT_TRUE(
      sequence_.AppendAndRead(kWriter, StepTokensOf(0, kv), 1.0f).ok());  // still in the tail
  EXPECT_FALSE(sequence_.HasSegment(512));
}

// A segment made from tokens that a truncation has taken away since must not come in, whatever has
// been appended.
TEST_F(SequenceTest, ASegmentOfOtherTokensIsRefused) {
  for (const uint64_t length : {0u, 1u, 64u, 511u, 512u, 560u}) {
    ASSERT_TRUE(sequence_.Truncate(0).ok());
    Append(640);
    const std::optional<SegmentJob> job = sequence_.NextSegment(512, 512);
    ASSERT_TRUE(job.has_value());
    const auto segment = Build(*job);
    ASSERT_TRUE(sequence_.Truncate(length).ok());
    EXPECT_FALSE(sequence_.Install(*job, segment)) << length;  // too short now
    Append(640 - length);
    const bool unchanged = length >= 512;  // what the segment holds was not touched
    const bool installed = sequence_.Install(*job, segment);
    EXPECT_TRUE(!installed || unchanged) << length;
  }
}

// What comes in is the segment of its job, and nothing else: a builder that mixes them up must not
// answer.
TEST_F(SequenceTest, ASegmentOfAnotherJobStopsTheProcess) {
  Append(1300);
  const std::optional<SegmentJob> job = sequence_.NextSegment(512, 512);
  const std::optional<SegmentJob> longer = sequence_.NextSegment(512, 600);
  ASSERT_TRUE(job.has_value() && longer.has_value());
  const auto segment = Build(*job);
  EXPECT_DEATH(sequence_.Install(*longer, segment), "segment->tokens");
}

// Segments may come from files, so that a chain that is none is an error.
TEST_F(SequenceTest, WhatIsNoChainIsNotRestored) {
  Append(1300);
  const std::optional<SegmentJob> job = sequence_.NextSegment(512, 512);
  ASSERT_TRUE(job.has_value());
  const auto segment = Build(*job);
  ASSERT_TRUE(sequence_.Install(*job, segment));
  const std::optional<SegmentJob> next = sequence_.NextSegment(512, 512);
  ASSERT_TRUE(next.has_value());
  const auto second = Build(*next);
  const auto restore = [&](std::vector<std::shared_ptr<const Segment>> segments, size_t bounds) {
    Sequence fresh(2, "", ArgsFor(PolicyOf("dense")), 1 << 20, &budget_);
    RestoredSegments restored;
    restored.segments = std::move(segments);
    restored.key_bounds.resize(bounds, 1.0f);
    return fresh.Restore(std::move(restored));
  };
  EXPECT_TRUE(restore({segment, second}, 2).ok());
  EXPECT_TRUE(absl::IsDataLoss(restore({second}, 1)));
  EXPECT_TRUE(absl::IsDataLoss(restore({segment, segment}, 2)));
  EXPECT_TRUE(absl::IsDataLoss(restore({segment, second}, 1)));
}

// The same for any truncations and appends between a job and its installation: what comes in holds
// the history's tokens, bit for bit, and the same again beside an older step that is repeated.
TEST_F(SequenceTest, WhateverIsInstalledHoldsTheHistory) {
  int installed = 0, refused = 0;
  for (const char* window : {"0", "64"}) {
    Sequence sequence(2, "", ArgsFor(PolicyOf("dense", {{"window", window}})), 1 << 20, &budget_);
    History history(shape_);
    for (int round = 0; round < 120; ++round) {
      SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << " round " << round);
      AppendTo(&sequence, &history, 900 + random_.Below(200));
      const std::optional<SegmentJob> job =
          sequence.NextSegment(512, static_cast<uint32_t>(512 + random_.Below(300)));
      ASSERT_TRUE(job.has_value());
      const auto segment = Build(*job);
      for (uint64_t change = random_.Below(4); change > 0; --change) {
        const uint64_t committed = history.committed();
        uint64_t length = job->view->tail_begin + random_.Below(1100);  // in or behind the job
        if (random_.Below(2) == 0) length = length / 64 * 64;
        if (length > committed) length = committed;
        ASSERT_TRUE(sequence.Truncate(length).ok());
        history.Truncate(length);
        AppendTo(&sequence, &history, committed - length + random_.Below(3));
      }
      ++(sequence.Install(*job, segment) ? installed : refused);
      const auto snapshot = sequence.Read(0, history.committed(), 1.0f);
      ASSERT_TRUE(snapshot.ok());
      ASSERT_TRUE(Holds(*snapshot->view, history));
      if (history.committed() < 5000) continue;
      ASSERT_TRUE(sequence.Truncate(0).ok());
      history.Truncate(0);
    }
  }
  EXPECT_GT(installed, 30);
  EXPECT_GT(refused, 30);
}

// A step that was asked for again while a segment of its tokens was being built can be asked for
// again in its other layers.
TEST_F(SequenceTest, ASegmentWaitsForARepeatedStep) {
  Sequence sequence(2, "", ArgsFor(PolicyOf("dense", {{"window", "0"}})), 1 << 20, &budget_);
  History history(shape_);
  AppendTo(&sequence, &history, 500);
  const Kv step = RandomKv(shape_, 100, &random_);
  ASSERT_TRUE(sequence.AppendAndRead(kWriter, StepTokensOf(500, step), 1.0f).ok());
  const Kv next = RandomKv(shape_, 1, &random_);
  ASSERT_TRUE(sequence.AppendAndRead(kWriter, StepTokensOf(600, next), 1.0f).ok());
  const std::optional<SegmentJob> job = sequence.NextSegment(512, 600);
  ASSERT_TRUE(job.has_value());
  const auto segment = Build(*job);
  ASSERT_TRUE(sequence.AppendAndRead(kWriter, StepTokensOf(500, step), 1.0f).ok());
  EXPECT_FALSE(sequence.Install(*job, segment));
  EXPECT_TRUE(sequence.AppendAndRead(kWriter, StepTokensOf(500, step), 1.0f).ok());
  ASSERT_TRUE(sequence.AppendAndRead(kWriter, StepTokensOf(600, next), 1.0f).ok());
  EXPECT_TRUE(sequence.Install(*job, segment));
}

TEST_F(SequenceTest, GrowthDuringABuildDoesNotHinderIt) {
  Append(600);
  const std::optional<SegmentJob> job = sequence_.NextSegment(512, 512);
  ASSERT_TRUE(job.has_value());
  const auto segment = Build(*job);
  Append(300);
  EXPECT_TRUE(sequence_.Install(*job, segment));
  EXPECT_EQ(sequence_.Info().segments, 1u);
  EXPECT_EQ(sequence_.Info().committed_tokens, 900u);
}

TEST_F(SequenceTest, TheWindowIsUncoveredAfterTruncation) {
  Append(1300);
  for (const uint64_t length : {1300u, 1152u, 1087u, 1086u, 600u, 575u, 3u}) {
    while (const auto job = sequence_.NextSegment(512, 512)) ASSERT_TRUE(BuildAndInstall(*job));
    const uint64_t before = sequence_.Info().segmented_tokens;
    const auto segmented = sequence_.Truncate(length);
    ASSERT_TRUE(segmented.ok());
    EXPECT_TRUE(*segmented == 0 || *segmented + 64 <= length) << length;
    EXPECT_LE(*segmented, before);
    EXPECT_EQ(*segmented, length < 576 ? 0u : length < 1088 ? 512u : 1024u) << length;
  }
}

// Segments end anywhere within a block and a page: what is left in the tail begins right there.
TEST_F(SequenceTest, SegmentsEndAnywhere) {
  for (uint32_t tokens = 512; tokens <= 577; ++tokens) {
    ASSERT_TRUE(sequence_.Truncate(0).ok());
    Append(1500);
    for (int i = 0; i < 2; ++i) {
      const std::optional<SegmentJob> job = sequence_.NextSegment(512, tokens);
      ASSERT_TRUE(job.has_value());
      ASSERT_TRUE(BuildAndInstall(*job));
    }
    const auto snapshot = sequence_.Read(0, 1500, 1.0f);
    ASSERT_TRUE(snapshot.ok());
    const attention::SequenceView& view = *snapshot->view;
    EXPECT_EQ(view.tail_begin, 2u * tokens);
    EXPECT_EQ(view.tail.size(), (1500u + 63) / 64 - view.tail_begin / 64) << tokens;
  }
}

TEST(MagnitudeTest, FindsTheGreatestAndWhatIsNotFinite) {
  for (const DType dtype : {DType::kBf16, DType::kFp16, DType::kFp32}) {
    std::vector<float> values(100, 0.5f);
    const auto magnitude = [&] {
      const Numbers numbers = NumbersOf(dtype, values);
      return Magnitude(dtype, numbers.bytes.data(), values.size());
    };
    EXPECT_EQ(magnitude(), 0.5f);
    values[99] = -1024;
    EXPECT_EQ(magnitude(), 1024.0f);
    values[0] = -std::numeric_limits<float>::infinity();
    EXPECT_FALSE(std::isfinite(magnitude()));
    values[0] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_FALSE(std::isfinite(magnitude()));
    EXPECT_EQ(Magnitude(dtype, nullptr, 0), 0.0f);
  }
}

TEST(MemoryBudgetTest, NeverGivesMoreThanItHas) {
  MemoryBudget budget(100);
  auto most = budget.Reserve(99, "a");
  ASSERT_TRUE(most.ok());
  EXPECT_EQ(budget.Reserve(2, "a block").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(budget.Reserve(2, "a block").status().message()),
              testing::HasSubstr("a block needs 2 bytes"));
  EXPECT_FALSE(budget.Reserve(std::numeric_limits<uint64_t>::max(), "a").ok());
  EXPECT_TRUE(budget.Reserve(1, "a").ok());  // and given back at once
  EXPECT_EQ(budget.used(), 99u);
  Reservation moved = *std::move(most);
  Reservation second;
  second = std::move(moved);
  EXPECT_EQ(budget.used(), 99u);
  EXPECT_EQ(second.bytes(), 99u);
  second = Reservation();
  EXPECT_EQ(budget.used(), 0u);
}

TEST(MemoryBudgetTest, HoldsUnderContention) {
  MemoryBudget budget(1000);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&budget] {
      for (int n = 0; n < 5000; ++n) {
        const auto held = budget.Reserve(300, "a thread");
        EXPECT_LE(budget.used(), 1000u);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.used(), 0u);
}

// A builder is held while a step runs, released when it ends, and in any case soon.
TEST(StepGateTest, HoldsBuildersForStepsButNotForLong) {
  using Clock = std::chrono::steady_clock;
  StepGate gate;
  gate.YieldToSteps();  // no step: at once
  {
    const StepGate::Step step(&gate);
    const auto start = Clock::now();
    gate.YieldToSteps();
    EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(3));
  }
  const auto start = Clock::now();
  for (int i = 0; i < 1000; ++i) gate.YieldToSteps();
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(1));
}

// The end of a step wakes the builder; it does not sleep its time out.
TEST(StepGateTest, TheEndOfAStepWakesABuilder) {
  using Clock = std::chrono::steady_clock;
  StepGate gate;
  Clock::duration least = std::chrono::hours(1);
  for (int round = 0; round < 50; ++round) {
    std::optional<StepGate::Step> step(std::in_place, &gate);
    std::thread ending([&step] {
      std::this_thread::sleep_for(std::chrono::microseconds(300));
      step.reset();
    });
    const auto start = Clock::now();
    gate.YieldToSteps();
    least = std::min(least, Clock::now() - start);
    ending.join();
  }
  EXPECT_LT(least, std::chrono::milliseconds(3));
}

TEST(StepGateTest, NeverHangs) {
  StepGate gate;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!stop.load()) {
        const StepGate::Step step(&gate);
        std::this_thread::yield();
      }
    });
  }
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      for (int n = 0; n < 200; ++n) gate.YieldToSteps();
    });
  }
  for (size_t i = 3; i < threads.size(); ++i) threads[i].join();
  stop = true;
  for (size_t i = 0; i < 3; ++i) threads[i].join();
}

// Payload, index and at most a tenth more, whatever is left in the tail.
TEST(MemoryTest, APrefillTakesAtMostATenthMore) {
  for (const uint32_t dim : {64u, 128u}) {
    for (const uint64_t tokens : {8192u, 8192u + 511u + 64u, 20001u}) {
      EngineOptions options = SmallOptions();
      options.segment_tokens = 8192;
      const auto engine = MakeEngine(options);
      Random random(TestSeed());
      TestSequence sequence =
          OpenSequence(engine.get(), MakeShape(1, 1, 1, dim, dim, DType::kBf16));
      Prefill(&sequence, tokens, &random);
      const PrefillResult prefill = FinishPrefill(&sequence);
      const double payload = static_cast<double>(tokens) * sequence.shape().token_bytes();
      uint64_t index = 0;
      for (uint64_t at = 0; at < prefill.segmented_tokens;) {
        const uint32_t run =
            static_cast<uint32_t>(std::min<uint64_t>(8192, prefill.segmented_tokens - at));
        index += Segment::IndexBytes(
            {sequence.shape(), attention::kClusterIndexes, run, at == 0 ? 4u : 0u});
        at += run;
      }
      const double used = static_cast<double>(engine->usage().resident_bytes);
      EXPECT_LE(used, 1.1 * (payload + static_cast<double>(index))) << dim << " " << tokens;
      EXPECT_LE(static_cast<double>(index), 0.1 * payload) << dim << " " << tokens;
      RecordProperty("share_" + std::to_string(dim) + "_" + std::to_string(tokens),
                     std::to_string(used / payload));
    }
  }
}

}  // namespace
}  // namespace attnd::engine::test
