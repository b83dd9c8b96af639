// SPDX-License-Identifier: Apache-2.0
//
// Goal: audits are in nobody's way: they keep to their limits, hold nothing that somebody gives up,
// end when they are told to, and do without what they cannot have. Method: an auditor so slow that
// its queue fills, budgets and systems that refuse; every picked row must be told of once, and all
// bytes must come back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <ctime>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "engine/audit/auditor.h"
#include "tests/engine/audit/audit_support.h"
#include "tests/engine/support.h"
#include "tests/system_faults.h"

namespace attnd::engine::test {
namespace {

using absl::StatusCode;
using attnd::test::AllocationRefused;
using attnd::test::ThreadsRefused;
using testing::HasSubstr;

// After a quantum of 0.2 ms it sleeps for 200: whatever comes meanwhile waits.
EngineOptions SlowOptions() {
  EngineOptions options = AuditingOptions();
  options.audit.cpu_share = AuditOptions::kCpuShareMin;
  return options;
}

class AuditorLimitsTest : public testing::Test {
 protected:
  void Start(const EngineOptions& options) { engine_ = MakeEngine(options, &observer_); }
  // A row of it takes several quanta to compute.
  TestSequence OpenLong() {
    const ModelShape shape = MakeShape(1, 16, 1, 64, 64, DType::kBf16);
    TestSequence sequence = OpenSequence(engine_.get(), shape, PolicyOf("streaming"));
    Prefill(&sequence, 20 * 512 + 64, &random_, false);
    EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, 20u * 512);
    return sequence;
  }
  void Ask(TestSequence* sequence, int times) {
    for (int i = 0; i < times; ++i) {
      const Answer answer = SendRow(QueryOnlyRow(sequence, 0, 1, &random_), 0);
      ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
    }
  }

  Random random_{TestSeed()};
  AuditRecorder observer_;
  std::unique_ptr<Engine> engine_;  // before the observer it ends
};

TEST_F(AuditorLimitsTest, AFullQueueDropsAndCounts) {
  EngineOptions options = SlowOptions();
  options.audit.queue_rows = 4;
  Start(options);
  TestSequence sequence = OpenLong();
  const uint64_t before = engine_->usage().resident_bytes;
  Ask(&sequence, 40);
  // One is computed, four wait.
  EXPECT_GE(observer_.skipped(AuditSkip::kQueueFull) + observer_.audited().size() + 5, 40u);
  EXPECT_GT(observer_.skipped(AuditSkip::kQueueFull), 0u);
  EXPECT_LE(engine_->usage().resident_bytes, before + 5 * (64 << 10));
  EXPECT_GT(engine_->usage().resident_bytes, before);
}

TEST_F(AuditorLimitsTest, BytesBoundTheQueueToo) {
  EngineOptions options = SlowOptions();
  options.audit.queue_bytes = 100 << 10;
  Start(options);
  TestSequence sequence = OpenLong();
  const uint64_t before = engine_->usage().resident_bytes;
  Ask(&sequence, 40);
  EXPECT_GT(observer_.skipped(AuditSkip::kQueueFull), 0u);
  // And the one that is computed.
  EXPECT_LE(engine_->usage().resident_bytes, before + 2 * options.audit.queue_bytes);
  engine_.reset();
  options.audit.queue_bytes = 1;  // nothing fits
  Start(options);
  TestSequence other = OpenLong();
  const uint64_t full = observer_.skipped(AuditSkip::kQueueFull);
  Ask(&other, 3);
  EXPECT_EQ(observer_.skipped(AuditSkip::kQueueFull), full + 3);
}

// However slow or busy the machine is: the thread never has more than its share of the time that
// has passed, but for the quantum at hand.
TEST_F(AuditorLimitsTest, TakesNoMoreThanItsShareOfTime) {
  struct Spent {
    std::chrono::nanoseconds thread{0};
    std::chrono::steady_clock::time_point clock;
  };
  class SpendingObserver : public AuditRecorder {
   public:
    void OnAudited(const AuditedRow& row) override {
      timespec time{};
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);  // of the calling thread
      last = {std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec),
              std::chrono::steady_clock::now()};
      if (audited().empty()) first = last;
      AuditRecorder::OnAudited(row);
    }
    Spent first, last;  // the auditor's
  };
  SpendingObserver observer;
  EngineOptions options = AuditingOptions();
  options.audit.cpu_share = 0.1;  // under the thread sanitizer a lower one takes minutes
  engine_ = MakeEngine(options, &observer);
  TestSequence sequence = OpenLong();
  Ask(&sequence, 60);
  engine_->WaitForBackground();
  const auto audits = observer.audited().size();
  ASSERT_GT(audits, 10u);
  const std::chrono::duration<double> thread = observer.last.thread - observer.first.thread;
  const std::chrono::duration<double> clock = observer.last.clock - observer.first.clock;
  const std::chrono::duration<double> quantum = Auditor::kQuantum;
  EXPECT_GT(thread, 5 * quantum) << "nothing was computed";
  // A piece may be begun before the quantum's end and end after it, on whatever machine.
  EXPECT_LE(thread.count(), 0.1 * clock.count() + 10 * quantum.count());
  engine_.reset();
}

// Nobody waits for audits when a server ends.
TEST_F(AuditorLimitsTest, ShutsDownWithAFullQueue) {
  Start(SlowOptions());
  TestSequence sequence = OpenLong();
  const uint64_t before = engine_->usage().resident_bytes;
  Ask(&sequence, 40);
  EXPECT_GT(engine_->usage().resident_bytes, before);
  engine_->Shutdown();
  EXPECT_EQ(engine_->usage().resident_bytes, before);
  EXPECT_LT(observer_.audited().size(), 40u) << "it was not slow";
  engine_.reset();
}

// What waits for an audit, or is computed, keeps no sequence's memory.
TEST_F(AuditorLimitsTest, AClosedSequenceIsFreedAtOnce) {
  EngineOptions options = SlowOptions();
  options.audit.queue_rows = 3;
  Start(options);
  TestSequence sequence = OpenLong();
  const uint64_t payload = engine_->usage().resident_bytes;
  Ask(&sequence, 10);
  ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  EXPECT_LT(engine_->usage().resident_bytes, payload / 4);
  engine_->WaitForBackground();
  EXPECT_GE(observer_.skipped(AuditSkip::kGone), 3u);
  EXPECT_EQ(observer_.told(), 10u);
  EXPECT_EQ(engine_->usage().resident_bytes, 0u);
}

TEST_F(AuditorLimitsTest, AFullBudgetDropsAndTheStepIsAnswered) {
  EngineOptions options = AuditingOptions();
  options.memory_budget_bytes = 2 << 20;
  Start(options);
  const ModelShape shape = MakeShape(1, 1, 1, 64, 64, DType::kBf16);
  TestSequence sequence = OpenSequence(engine_.get(), shape, PolicyOf("streaming"));
  Prefill(&sequence, 600, &random_, false);
  ASSERT_EQ(FinishPrefill(&sequence).segmented_tokens, 512u);
  Ask(&sequence, 1);
  engine_->WaitForBackground();
  EXPECT_EQ(observer_.audited().size(), 1u);
  // Down to less than a tail block, then to room for an answer (some 600 bytes), which a sequence
  // of nothing leaves, and none for an audit (some 5,000).
  TestSequence filler = OpenSequence(engine_.get(), shape);
  while (AppendNext(&filler, 0, RandomKv(shape, 64, &random_)).ok()) continue;
  std::vector<uint64_t> empty;
  for (auto id = engine_->Open(kTenant, ArgsOf(shape)); id.ok();
       id = engine_->Open(kTenant, ArgsOf(shape))) {
    empty.push_back(*id);
  }
  ASSERT_GE(empty.size(), 1u);
  ASSERT_TRUE(engine_->Close(kTenant, empty[0]).ok());
  const Usage usage = engine_->usage();
  ASSERT_LT(usage.capacity_bytes - usage.resident_bytes, 4000u);
  Ask(&sequence, 5);
  EXPECT_EQ(observer_.skipped(AuditSkip::kNoMemory), 5u);
  EXPECT_EQ(observer_.told(), 6u);
}

// ---- a system that refuses ----

TEST_F(AuditorLimitsTest, WithoutItsThreadThereIsNoEngine) {
  const ThreadsRefused no_threads;
  const auto engine =
      Engine::Create(SlowOptions(), attention::MakeCpuBackend({.threads = 1}), &observer_);
  EXPECT_EQ(engine.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(engine.status().message()), HasSubstr("audits"));
}

// Counts only: it is called while allocations are refused.
class CountingObserver : public EventListener {
 public:
  void OnAudited(const AuditedRow&) override { ++audited; }
  void OnAuditSkipped(AuditSkip why) override {
    ++(why == AuditSkip::kNoMemory ? no_memory : other);
  }
  std::atomic<uint64_t> audited{0}, no_memory{0}, other{0};
};

TEST_F(AuditorLimitsTest, EveryRefusedAllocationIsSurvived) {
  CountingObserver observer;
  engine_ = MakeEngine(AuditingOptions(), &observer);
  const ModelShape shape = MakeShape(1, 2, 1, 16, 16, DType::kFp32);
  TestSequence sequence = OpenSequence(engine_.get(), shape, PolicyOf("streaming"));
  Prefill(&sequence, 900, &random_, false);
  ASSERT_EQ(FinishPrefill(&sequence).segmented_tokens, 512u);
  const Message message(0, {QueryOnlyRow(&sequence, 0, 1, &random_)});
  const uint64_t used = engine_->usage().resident_bytes;
  uint64_t answered = 0;
  bool refused = true;
  for (uint64_t allocation = 0; refused; ++allocation) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << " allocation " << allocation);
    AnswerVectors memory;
    DecodeResult result;
    absl::Status status;
    {
      const AllocationRefused one(allocation);
      status = engine_->Decode(kTenant, kWriter, message.args, memory, &result);
      engine_->WaitForBackground();
      refused = one.refused();
    }
    if (status.ok()) status = result.rows.at(0).status;
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kResourceExhausted) << status;
    answered += status.ok() ? 1 : 0;
    ASSERT_EQ(engine_->usage().resident_bytes, used);
    ASSERT_LT(allocation, 500u);
  }
  // Those that the step itself got through: each was told of, and the last one was audited.
  EXPECT_EQ(observer.audited + observer.no_memory + observer.other, answered);
  EXPECT_GT(observer.no_memory.load(), 5u);
  EXPECT_EQ(observer.audited.load(), 1u);
  EXPECT_EQ(observer.other.load(), 0u);
}

TEST_F(AuditorLimitsTest, OptionsHaveRanges) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double share : {-0.1, 1.5, nan}) {
    EngineOptions options = SmallOptions();
    options.audit.share = share;
    EXPECT_THAT(std::string(options.Validate().message()), HasSubstr("audit_share"));
  }
  for (const double share : {0.0, 0.0009, 1.1, nan}) {
    EngineOptions options = SmallOptions();
    options.audit.cpu_share = share;
    EXPECT_THAT(std::string(options.Validate().message()), HasSubstr("audit_cpu_share"));
  }
  EXPECT_TRUE(SlowOptions().Validate().ok());
}

}  // namespace
}  // namespace attnd::engine::test
