// SPDX-License-Identifier: Apache-2.0
//
// Goal: building segments survives what it cannot have (threads, memory, budget) and what ends
// meanwhile, says which it was, and lets prefills take turns. Method: Segmenter and Engine in a
// program whose thread creation and operator new refuse on demand, each allocation of a build in
// turn; afterwards the same build must succeed and every answer equal the oracle's.
#include "engine/sequence/segmenter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "common/mutex.h"
#include "tests/engine/support.h"
#include "tests/system_faults.h"

namespace attnd::engine::test {
namespace {

using attnd::test::AllocationRefused;
using attnd::test::ThreadsRefused;

using absl::StatusCode;
using testing::HasSubstr;

// Lists what was built and what failed.
class RecordingObserver : public EventListener {
 public:
  void OnSegmentBuilt(BuildTrigger, uint64_t tokens, std::chrono::nanoseconds) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    built_.push_back(tokens);
  }
  void OnSegmentBuildFailed(BuildTrigger, const absl::Status&) override { ++failed; }
  size_t built() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return built_.size();
  }
  std::vector<uint64_t> runs() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return built_;
  }
  std::atomic<uint64_t> failed{0};

 private:
  std::mutex mutex_;
  std::vector<uint64_t> built_;
};

TEST(SegmenterTest, WithoutItsThreadThereIsNoEngine) {
  for (const bool refused : {true, false}) {
    auto backend = attention::MakeCpuBackend({.threads = 1});
    absl::StatusOr<std::unique_ptr<Engine>> engine = absl::UnknownError("");
    if (refused) {
      const ThreadsRefused no_threads;
      engine = Engine::Create(SmallOptions(), std::move(backend), nullptr);
      EXPECT_EQ(no_threads.refused(), 1u);
      EXPECT_EQ(engine.status().code(), StatusCode::kResourceExhausted);
      EXPECT_THAT(std::string(engine.status().message()), HasSubstr("thread"));
    } else {
      engine = Engine::Create(SmallOptions(), std::move(backend), nullptr);
      EXPECT_TRUE(engine.ok()) << engine.status();
    }
  }
}

// Fewer threads than were asked for build the same segments.
TEST(SegmenterTest, APrefillMakesDoWithTheThreadsItGets) {
  Random random(TestSeed());
  EngineOptions options = SmallOptions();
  options.index_threads = 4;
  const auto engine = MakeEngine(options);
  for (const uint64_t allowed : {0u, 1u, 2u}) {
    TestSequence sequence = OpenSequence(engine.get(), MakeShape(2, 4, 2, 16, 16, DType::kFp32));
    Prefill(&sequence, 1200, &random);
    {
      const ThreadsRefused few(allowed);
      EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, 1024u);
      EXPECT_GE(few.refused(), 1u);
    }
    EXPECT_TRUE(MatchesModel(&sequence, &random));
  }
}

// Every allocation of segmenting a prefill is refused in turn, whatever thread makes it: an error,
// and the next prefill goes on where it ended.
TEST(SegmenterTest, APrefillSurvivesEveryRefusedAllocation) {
  Random random(TestSeed());
  RecordingObserver observer;
  EngineOptions options = SmallOptions();
  options.index_threads = 3;
  const auto engine = MakeEngine(options, &observer);
  bool refused = true;
  uint64_t failures = 0;
  for (uint64_t allocation = 0; refused; ++allocation) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << " allocation " << allocation);
    TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 3, 3, 16, 16, DType::kBf16));
    Prefill(&sequence, 600, &random, false);
    const uint64_t before = engine->usage().resident_bytes;
    absl::Status status;
    {
      const AllocationRefused one(allocation);
      status = engine->FinishPrefill(kTenant, kWriter, sequence.id, nullptr).status();
      refused = one.refused();
    }
    if (!status.ok()) {
      ++failures;
      EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status;
      // Refused behind the installed segment (the reply's lengths): it stays.
      if (sequence.Info().segments == 0) {
        EXPECT_EQ(engine->usage().resident_bytes, before);
      }
    }
    ASSERT_EQ(FinishPrefill(&sequence).segmented_tokens, 512u);
    ASSERT_TRUE(MatchesModel(&sequence, &random));
    ASSERT_TRUE(engine->Close(kTenant, sequence.id).ok());
    ASSERT_LT(allocation, 2000u);
  }
  EXPECT_GT(failures, 10u);
  EXPECT_GT(observer.failed.load(), 5u);
  EXPECT_EQ(engine->usage().resident_bytes, 0u);
}

// The same in the background: the thread goes on, and the tokens are segmented later.
TEST(SegmenterTest, TheBackgroundSurvivesRefusedAllocations) {
  Random random(TestSeed());
  RecordingObserver observer;
  const auto engine = MakeEngine(SmallOptions(), &observer);
  for (uint64_t allocation = 0; allocation < 120; allocation += 3) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << " allocation " << allocation);
    TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 1, 1, 16, 16, DType::kBf16));
    Prefill(&sequence, 576 + 64, &random, false);
    const Message step(0, {NextRow(&sequence, 0, 1, &random)});
    {
      const AllocationRefused one(allocation);
      AnswerVectors memory;
      DecodeResult result;
      const absl::Status status = engine->Decode(kTenant, kWriter, step.args, memory, &result);
      EXPECT_TRUE(status.ok() || one.refused());
      engine->WaitForBackground();
    }
    // Whatever was refused: the step again, then as many tokens as a failed build waits for.
    const Answer again = Send(engine.get(), step);
    ASSERT_TRUE(again.row_status(0).ok()) << again.row_status(0);
    Generate(&sequence, Sequence::kBuildDelayMin, &random);
    engine->WaitForBackground();
    EXPECT_EQ(sequence.Info().segmented_tokens, 512u);
    EXPECT_TRUE(MatchesModel(&sequence, &random));
    ASSERT_TRUE(engine->Close(kTenant, sequence.id).ok());
  }
  EXPECT_GT(observer.failed.load(), 2u);
  EXPECT_EQ(engine->usage().resident_bytes, 0u);
}

// A prompt's segments over a tree grow with what lies before them, and over other indexes do not.
// Where a long one finds no room, a short one is built in its place, and nothing has failed.
TEST(SegmenterTest, APromptsRunsGrowWhereThereIsRoom) {
  constexpr uint64_t kTokens = 16384 + 9216;
  const ModelShape shape = MakeShape(1, 1, 1, 16, 16, DType::kBf16);
  uint64_t budget = uint64_t{256} << 20;
  for (const bool tree : {true, false}) {
    for (const bool room : {true, false}) {
      Random random(TestSeed());
      SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
      RecordingObserver observer;
      EngineOptions options = SmallOptions();
      options.memory_budget_bytes = budget;
      const auto engine = MakeEngine(options, &observer);
      OpenArgs args = ArgsOf(shape, PolicyOf("dense"));
      args.indexes = tree ? attention::kTreeIndexes : attention::kClusterIndexes;
      const auto id = engine->Open(kTenant, args);
      ASSERT_TRUE(id.ok()) << id.status();
      TestSequence sequence(engine.get(), *id, args.shape);
      Prefill(&sequence, kTokens + 64, &random, false);
      if (room) budget = engine->usage().resident_bytes + (uint64_t{1} << 20);
      EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, kTokens);
      const std::vector<uint64_t> runs = observer.runs();
      if (tree && room) {
        EXPECT_THAT(runs, testing::ElementsAre(512, 512, 1024, 2048, 4096, 8192, 9216));
      } else if (tree) {
        EXPECT_THAT(runs, testing::Not(testing::Contains(testing::Ge(4096u))));
        EXPECT_THAT(runs, testing::Contains(512u));
      } else {
        EXPECT_THAT(runs, testing::Each(512u));
      }
      EXPECT_EQ(observer.failed.load(), 0u);
      EXPECT_TRUE(MatchesModel(&sequence, &random));
    }
    budget = uint64_t{256} << 20;
  }
}

// The same for early segments, of which nothing is expected but that they come in the end.
TEST(SegmenterTest, EarlySegmentsSurviveRefusedAllocations) {
  Random random(TestSeed());
  RecordingObserver observer;
  EngineOptions options = SmallOptions();
  options.segment_tokens = 2 * EarlySegments::kTokens;
  const auto engine = MakeEngine(options, &observer);
  OpenArgs args = ArgsOf(MakeShape(1, 1, 1, 16, 16, DType::kBf16), PolicyOf("dense"));
  args.indexes = attention::kTreeIndexes;
  size_t put_off = 0;
  for (uint64_t allocation = 0; allocation < 120; allocation += 3) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << " allocation " << allocation);
    const auto id = engine->Open(kTenant, args);
    ASSERT_TRUE(id.ok()) << id.status();
    TestSequence sequence(engine.get(), *id, args.shape);
    Prefill(&sequence, 600, &random, false);
    FinishPrefill(&sequence);
    DecodeNext(&sequence, 0, EarlySegments::kTokens, &random);
    const size_t built = observer.built();
    const Message step(0, {NextRow(&sequence, 0, 65, &random)});
    {
      const AllocationRefused one(allocation);
      AnswerVectors memory;
      DecodeResult result;
      const absl::Status status = engine->Decode(kTenant, kWriter, step.args, memory, &result);
      EXPECT_TRUE(status.ok() || one.refused());
      engine->WaitForBackground();
      if (status.ok() && observer.built() == built) ++put_off;
    }
    const Answer again = Send(engine.get(), step);
    ASSERT_TRUE(again.row_status(0).ok()) << again.row_status(0);
    Generate(&sequence, Sequence::kBuildDelayMin, &random);
    engine->WaitForBackground();
    EXPECT_EQ(observer.built(), built + 1);
    EXPECT_EQ(sequence.Info().segments, 1u);
    EXPECT_TRUE(MatchesModel(&sequence, &random));
    ASSERT_TRUE(engine->Close(kTenant, sequence.id).ok());
  }
  EXPECT_GT(put_off, 2u);
  EXPECT_EQ(observer.failed.load(), 0u) << "a copy that finds no memory is no failure";
  EXPECT_EQ(engine->usage().resident_bytes, 0u);
}

// A build that cannot succeed is tried seldom, and counted as often as it is tried; when there is
// room again it succeeds.
TEST(SegmenterTest, AFailedBackgroundBuildIsNotTriedAtEachToken) {
  Random random(TestSeed());
  RecordingObserver observer;
  EngineOptions options = SmallOptions();
  options.memory_budget_bytes = 2 << 20;
  const auto engine = MakeEngine(options, &observer);
  const ModelShape shape = MakeShape(1, 1, 1, 64, 64, DType::kBf16);
  TestSequence sequence = OpenSequence(engine.get(), shape);
  Prefill(&sequence, 600, &random, false);
  TestSequence filler = OpenSequence(engine.get(), shape);  // leaves less than a segment needs
  Prefill(&filler, 6400, &random, false);
  for (int token = 0; token < 700; ++token) {
    Generate(&sequence, 1, &random);
    engine->WaitForBackground();
  }
  // At 601, then 64, 128 and 256 tokens later.
  EXPECT_EQ(observer.failed.load(), 4u);
  EXPECT_EQ(sequence.Info().segments, 0u);
  ASSERT_TRUE(engine->Close(kTenant, filler.id).ok());
  Generate(&sequence, 512, &random);
  engine->WaitForBackground();
  EXPECT_EQ(observer.failed.load(), 4u);
  EXPECT_EQ(sequence.Info().segments, 3u);
  EXPECT_TRUE(MatchesModel(&sequence, &random));
}

// Builders are nicer than the threads of the process, whatever its own niceness is.
TEST(SegmenterTest, BuildersAreNicerThanTheProcess) {
  class NicenessObserver : public EventListener {
   public:
    void OnSegmentBuilt(BuildTrigger, uint64_t, std::chrono::nanoseconds) override {
      niceness = getpriority(PRIO_PROCESS, 0);  // of the calling thread
    }
    std::atomic<int> niceness{0};
  };
  NicenessObserver observer;
  int own = 0;
  std::thread([&] {  // only this thread and those that it starts
    Random random(TestSeed());
    own = getpriority(PRIO_PROCESS, 0);
    if (own < 14 && setpriority(PRIO_PROCESS, 0, 14) == 0) own = 14;
    const auto engine = MakeEngine(SmallOptions(), &observer);
    TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 1, 1, 16, 16, DType::kBf16));
    Prefill(&sequence, 600, &random);
    Generate(&sequence, 1, &random);
    engine->WaitForBackground();
    EXPECT_EQ(sequence.Info().segments, 1u);
  })
      .join();
  EXPECT_EQ(observer.niceness.load(), std::min(own + 10, 19));
}

// Notes whose runs are built in which order: 'l' for those of the thread that constructs it. Each
// of these holds its turn until the other prefill stands in the queue, however the threads are
// scheduled.
class TurnObserver : public EventListener {
 public:
  static constexpr std::chrono::milliseconds kTimeToQueue{200};

  void OnSegmentBuilt(BuildTrigger, uint64_t, std::chrono::nanoseconds) override {
    const bool large = std::this_thread::get_id() == large_;
    {
      MutexLock lock(mutex_);
      order_.push_back(large ? 'l' : 's');
      built_.NotifyAll();
    }
    if (large && hold_.load()) std::this_thread::sleep_for(kTimeToQueue);
  }

  void WaitForOne() {
    MutexLock lock(mutex_);
    while (order_.empty()) built_.Wait(mutex_);
  }
  void StopHolding() { hold_.store(false); }
  std::string order() {
    MutexLock lock(mutex_);
    return order_;
  }

 private:
  const std::thread::id large_ = std::this_thread::get_id();
  std::atomic<bool> hold_{true};
  Mutex mutex_;
  CondVar built_;
  std::string order_ ABSL_GUARDED_BY(mutex_);
};

// A short prompt is not kept waiting until a long one's last run.
TEST(SegmenterTest, PrefillsTakeTurns) {
  Random random(TestSeed());
  TurnObserver observer;
  const auto engine = MakeEngine(SmallOptions(), &observer);
  const ModelShape shape = MakeShape(1, 2, 2, 64, 16, DType::kBf16);
  TestSequence large = OpenSequence(engine.get(), shape);
  TestSequence small = OpenSequence(engine.get(), shape);
  Prefill(&large, 40 * 512 + 64, &random, false);
  Prefill(&small, 2 * 512 + 64, &random, false);
  std::thread short_prompt([&] {
    observer.WaitForOne();
    FinishPrefill(&small);
    observer.StopHolding();
  });
  FinishPrefill(&large);
  short_prompt.join();
  EXPECT_EQ(large.Info().segments, 40u);
  EXPECT_EQ(small.Info().segments, 2u);
  // In turns it is "lsls". Two more of the large one are for a thread that took longer to queue.
  const std::string order = observer.order();
  EXPECT_LE(order.rfind('s'), 5u) << order;
}

}  // namespace
}  // namespace attnd::engine::test
