// SPDX-License-Identifier: Apache-2.0
//
// Goal: calls from many threads at once give right answers, never wait for ever, and leave nothing
// behind; run it under the thread sanitizer. Method: threads that decode, upload, truncate, fork,
// close and list at the same time while segments are built. A thread that owns its sequence checks
// its answers with the oracle; threads that share one check that each answer is either right in
// form or refused with a code that the contract names.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "engine/sequence/early_segments.h"
#include "tests/cross.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

using absl::StatusCode;

// Counts, and looks at what the engine says from all its threads.
class CountingObserver : public EventListener {
 public:
  void OnAppended(uint64_t tokens, bool prefill) override {
    (prefill ? uploaded : generated) += tokens;
  }
  void OnSegmentBuilt(BuildTrigger trigger, uint64_t tokens,
                      std::chrono::nanoseconds time) override {
    (trigger == BuildTrigger::kEarly ? early : segmented) += tokens;
    if (trigger == BuildTrigger::kEarly && tokens > EarlySegments::kTokens) ++longer;
    EXPECT_GT(time.count(), 0);
  }
  void OnSegmentBuildFailed(BuildTrigger, const absl::Status& status) override {
    ADD_FAILURE() << status;
  }
  std::atomic<uint64_t> uploaded{0}, generated{0}, segmented{0}, early{0};
  std::atomic<uint64_t> longer{0};  // early segments of more than the least length
};

// A life of one sequence after another, each checked.
void OwnLife(Engine* engine, uint64_t seed, const std::atomic<bool>* stop) {
  Random random(seed);
  for (WriterId writer = seed; !stop->load(); writer += 1000) {
    TestSequence sequence =
        OpenSequence(engine, MakeShape(2, 2, 1, 16, 16, DType::kBf16), PolicyOf("double-p"));
    sequence.writer = writer;
    Prefill(&sequence, 400 + random.Below(900), &random);
    if (random.Below(2) == 0) FinishPrefill(&sequence);
    Generate(&sequence, 100 + random.Below(300), &random);
    EXPECT_TRUE(MatchesModel(&sequence, &random));
    const auto fork = engine->Fork(kTenant, sequence.id, std::nullopt);
    ASSERT_TRUE(fork.ok()) << fork.status();
    TestSequence child(engine, fork->id, sequence.shape());
    child.writer = writer;
    child.history = sequence.history;
    Generate(&sequence, 3, &random);
    const uint64_t length = random.Below(child.history.committed());
    ASSERT_TRUE(engine->Truncate(kTenant, child.id, length).ok());
    child.history.Truncate(length);
    Generate(&child, 70, &random);
    EXPECT_TRUE(MatchesModel(&child, &random));
    EXPECT_TRUE(MatchesModel(&sequence, &random));
    ASSERT_TRUE(engine->Close(kTenant, child.id).ok());
    ASSERT_TRUE(engine->Close(kTenant, sequence.id).ok());
    engine->ReleaseWriter(writer);
  }
}

void ListAll(Engine* engine, const std::atomic<bool>* stop) {
  while (!stop->load()) {
    for (const SequenceInfo& info : engine->List(kTenant, 0, 1000)) {
      EXPECT_LE(info.segmented_tokens, info.committed_tokens);
      EXPECT_TRUE(info.args.policy.has_value());
    }
    const Usage usage = engine->usage();
    EXPECT_LE(usage.resident_bytes, usage.capacity_bytes);
    std::this_thread::yield();
  }
}

TEST(EngineConcurrencyTest, LivesSideBySide) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  CountingObserver observer;
  const auto engine = MakeEngine(SmallOptions(), &observer);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (uint64_t i = 1; i <= 3; ++i) {
    threads.emplace_back([&, i] { OwnLife(engine.get(), TestSeed() + i, &stop); });
  }
  threads.emplace_back([&] { ListAll(engine.get(), &stop); });
  std::this_thread::sleep_for(std::chrono::seconds(3));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  engine->WaitForBackground();
  EXPECT_EQ(engine->usage().resident_bytes, 0u);
  EXPECT_EQ(engine->usage().sequences, 0u);
  EXPECT_GT(observer.uploaded.load(), 0u);
  EXPECT_GT(observer.generated.load(), 0u);
  EXPECT_GT(observer.segmented.load(), 0u);
}

// One sequence in the hands of several threads. Its answers are right in form, or refused as when
// another thread was faster.
struct Shared {
  Engine* engine;
  uint64_t id;
  ModelShape shape;
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> answered{0};

  void Decode(WriterId writer, uint32_t tokens, bool query_only) {
    Random random(TestSeed() + writer);
    while (!stop.load()) {
      TestSequence mine(engine, id, shape);
      Row row =
          query_only ? QueryOnlyRow(&mine, 0, tokens, &random) : NextRow(&mine, 0, tokens, &random);
      row.position = mine.Info().layer_tokens[0];
      const Message message(0, {row});
      const Answer answer = Send(engine, message, writer);
      const absl::Status status = answer.row_status(0);
      if (status.ok()) {
        ++answered;
        for (const float lse : AnswerOf(message, answer, 0).lse) {
          EXPECT_TRUE(std::isfinite(lse) || (query_only && row.position == 0)) << lse;
        }
      } else {
        EXPECT_THAT(status.code(),
                    testing::AnyOf(StatusCode::kFailedPrecondition, StatusCode::kAlreadyExists))
            << status;
      }
    }
  }
  // Forks, and truncates to `least` tokens and more: now and then by at most `depth`, and beyond
  // `most` always, to any length.
  void ForkAndTruncate(uint64_t least, uint64_t most, uint64_t depth) {
    Random random(TestSeed());
    uint64_t answered_before = 0;
    while (!stop.load()) {
      const auto info = engine->Info(kTenant, id);
      ASSERT_TRUE(info.ok());
      const uint64_t committed = info->committed_tokens;
      // However slow steps are, they add more than truncations take.
      const bool grown = answered.load() >= answered_before + 10;
      if (committed >= least && (committed > most || (grown && random.Below(4) == 0))) {
        answered_before = answered.load();
        const uint64_t cut = std::min(committed > most ? committed : depth, committed - least);
        const uint64_t length = committed - random.Below(cut + 1);
        const absl::Status status = engine->Truncate(kTenant, id, length).status();
        EXPECT_TRUE(status.ok()) << status;
      } else {
        const auto fork = engine->Fork(kTenant, id, std::nullopt);
        ASSERT_TRUE(fork.ok()) << fork.status();
        ASSERT_TRUE(engine->Close(kTenant, fork->id).ok());
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random.Below(500)));
    }
  }
  // Lets the threads run for two seconds and closes the sequence.
  void End(std::vector<std::thread>* threads) {
    std::this_thread::sleep_for(std::chrono::seconds(2));
    stop = true;
    for (std::thread& thread : *threads) thread.join();
    EXPECT_GT(answered.load(), 0u);
    ASSERT_TRUE(engine->Close(kTenant, id).ok());
    engine->WaitForBackground();
    EXPECT_EQ(engine->usage().resident_bytes, 0u);
  }
};

// One sequence, shortened and forked by others while it is written: a step answers or is refused,
// and never reads what is not there.
TEST(EngineConcurrencyTest, OneSequenceUnderMoreThanOneHand) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  const TestSequence sequence =
      OpenSequence(engine.get(), MakeShape(1, 2, 1, 16, 16, DType::kFp32), PolicyOf("double-p"));
  Shared shared{engine.get(), sequence.id, sequence.shape()};
  std::vector<std::thread> threads;
  threads.emplace_back([&] { shared.Decode(1, 200, false); });
  threads.emplace_back([&] { shared.Decode(1, 3, false); });
  threads.emplace_back([&] { shared.Decode(2, 2, true); });
  threads.emplace_back([&] { shared.ForkAndTruncate(0, 3000, 3000); });
  threads.emplace_back([&] {
    while (!shared.stop.load()) {
      const auto finished = engine->FinishPrefill(kTenant, 1, shared.id, nullptr);
      EXPECT_TRUE(finished.ok()) << finished.status();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  shared.End(&threads);
}

// The same while early segments are built of what is generated, and longer and full ones take their
// place.
TEST(EngineConcurrencyTest, EarlySegmentsUnderMoreThanOneHand) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  CountingObserver observer;
  EngineOptions options = SmallOptions();
  options.segment_tokens = 3000;
  const auto engine = MakeEngine(options, &observer);
  OpenArgs args = ArgsOf(MakeShape(1, 2, 1, 16, 16, DType::kFp32), PolicyOf("error-target"));
  args.indexes = attention::kTreeIndexes;
  const auto id = engine->Open(kTenant, args);
  ASSERT_TRUE(id.ok()) << id.status();
  TestSequence sequence(engine.get(), *id, args.shape);
  Random random(TestSeed());
  Prefill(&sequence, 700, &random);
  FinishPrefill(&sequence);
  Shared shared{engine.get(), *id, args.shape};
  std::vector<std::thread> threads;
  threads.emplace_back([&] { shared.Decode(kWriter, 100, false); });
  threads.emplace_back([&] { shared.Decode(kWriter, 3, false); });
  threads.emplace_back([&] { shared.Decode(2, 2, true); });
  threads.emplace_back([&] { shared.ForkAndTruncate(700, 9000, 10); });
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (observer.longer.load() == 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // long with a sanitizer
  }
  EXPECT_GT(observer.longer.load(), 0u);
  shared.End(&threads);
}

// A fork is seen complete or not at all.
TEST(EngineConcurrencyTest, ForksAppearComplete) {
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  TestSequence parent = OpenSequence(engine.get(), MakeShape(8, 8, 8, 64, 64, DType::kFp32));
  Prefill(&parent, 63, &random);
  std::atomic<bool> stop{false};
  std::thread list([&] {
    while (!stop.load()) {
      for (const SequenceInfo& info : engine->List(kTenant, parent.id, 1000)) {
        EXPECT_EQ(info.committed_tokens, 63u);
      }
    }
  });
  for (int i = 0; i < attnd::test::Repetitions(300); ++i) {
    const auto fork = engine->Fork(kTenant, parent.id, std::nullopt);
    ASSERT_TRUE(fork.ok()) << fork.status();
    ASSERT_TRUE(engine->Close(kTenant, fork->id).ok());
  }
  stop = true;
  list.join();
}

// A large segment: seconds to build on one thread.
TestSequence SlowPrefill(Engine* engine, Random* random) {
  TestSequence sequence = OpenSequence(engine, MakeShape(1, 4, 4, 128, 16, DType::kBf16));
  Prefill(&sequence, 16384 + 64, random);
  return sequence;
}

EngineOptions LargeSegments() {
  EngineOptions options = SmallOptions();
  options.segment_tokens = 16384;
  return options;
}

// The time a call takes, and what it says.
struct Timed {
  absl::Status status;
  std::chrono::steady_clock::duration time{};
};
template <typename F>
Timed Measure(const F& call) {
  const auto start = std::chrono::steady_clock::now();
  Timed timed;
  timed.status = call();
  timed.time = std::chrono::steady_clock::now() - start;
  return timed;
}

constexpr std::chrono::milliseconds kSoon{5000};  // with a sanitizer on a busy machine too
constexpr std::chrono::milliseconds kBegun{50};

TEST(EngineConcurrencyTest, AClosedSequenceIsNotBuiltToTheEnd) {
  Random random(TestSeed());
  const auto engine = MakeEngine(LargeSegments());
  const TestSequence sequence = SlowPrefill(engine.get(), &random);
  absl::Status status;
  std::thread prefill(
      [&] { status = engine->FinishPrefill(kTenant, kWriter, sequence.id, nullptr).status(); });
  std::this_thread::sleep_for(kBegun);
  ASSERT_TRUE(engine->Close(kTenant, sequence.id).ok());
  EXPECT_LT(Measure([&] {
              prefill.join();
              return absl::OkStatus();
            }).time,
            kSoon);
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_EQ(engine->usage().resident_bytes, 0u);
}

TEST(EngineConcurrencyTest, CancelledPrefills) {
  Random random(TestSeed());
  const auto engine = MakeEngine(LargeSegments());
  TestSequence first = SlowPrefill(engine.get(), &random);
  TestSequence second = SlowPrefill(engine.get(), &random);
  std::atomic<bool> cancel_first{false}, cancel_second{false};
  absl::Status first_status, second_status;
  std::thread building([&] {
    first_status = engine->FinishPrefill(kTenant, kWriter, first.id, &cancel_first).status();
  });
  std::this_thread::sleep_for(kBegun);
  std::thread waiting([&] {  // behind the first
    second_status = engine->FinishPrefill(kTenant, kWriter, second.id, &cancel_second).status();
  });
  std::this_thread::sleep_for(kBegun);
  cancel_second = true;
  EXPECT_LT(Measure([&] {
              waiting.join();
              return absl::OkStatus();
            }).time,
            kSoon);
  EXPECT_EQ(second_status.code(), StatusCode::kCancelled);
  cancel_first = true;
  EXPECT_LT(Measure([&] {
              building.join();
              return absl::OkStatus();
            }).time,
            kSoon);
  EXPECT_EQ(first_status.code(), StatusCode::kCancelled);
  EXPECT_EQ(first.Info().segments, 0u);
  Generate(&first, 1, &random);  // steps go on
}

// A prefill whose sequence the background builds lets others go first, and can be cancelled while
// it waits.
TEST(EngineConcurrencyTest, APrefillBehindABackgroundBuildOfItsSequence) {
  constexpr uint64_t kSegmentBytes = uint64_t{16384} * (128 + 16) * 2 * 4;
  Random random(TestSeed());
  const auto engine = MakeEngine(LargeSegments());
  TestSequence slow = SlowPrefill(engine.get(), &random);
  TestSequence other = OpenSequence(engine.get(), MakeShape(1, 1, 1, 16, 16, DType::kBf16));
  Prefill(&other, 600, &random);
  const uint64_t tails = engine->usage().resident_bytes;
  Generate(&slow, 1, &random);  // queues the build
  while (engine->usage().resident_bytes < tails + kSegmentBytes) std::this_thread::yield();
  std::atomic<bool> cancelled{false};
  absl::Status status;
  std::thread waiting(
      [&] { status = engine->FinishPrefill(kTenant, kWriter, slow.id, &cancelled).status(); });
  std::this_thread::sleep_for(kBegun);
  EXPECT_EQ(FinishPrefill(&other).segmented_tokens, 536u);
  EXPECT_EQ(slow.Info().segments, 0u);
  cancelled = true;
  waiting.join();
  EXPECT_EQ(status.code(), StatusCode::kCancelled);
  EXPECT_EQ(slow.Info().segments, 0u);
  ASSERT_TRUE(engine->Close(kTenant, slow.id).ok());  // not built to the end
  engine->WaitForBackground();
}

// The other way round: a sequence that a prefill builds waits in the background's queue, and both
// together build each run once.
TEST(EngineConcurrencyTest, PrefillAndBackgroundBuildOneSequence) {
  Random random(TestSeed());
  CountingObserver observer;
  const auto engine = MakeEngine(SmallOptions(), &observer);
  TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 1, 1, 64, 16, DType::kBf16));
  for (uint64_t round = 1; round <= 5; ++round) {
    Prefill(&sequence, 4 * 512, &random);
    std::thread prefill([&] { FinishPrefill(&sequence); });
    const Message repeat(0, {NextRow(&sequence, 0, 64, &random)});
    ASSERT_TRUE(Send(engine.get(), repeat).row_status(0).ok());
    prefill.join();
    engine->WaitForBackground();
    EXPECT_TRUE(MatchesModel(&sequence, &random));
  }
  EXPECT_EQ(observer.segmented.load(), sequence.Info().segmented_tokens);
}

TEST(EngineConcurrencyTest, ShutdownDuringABackgroundBuild) {
  Random random(TestSeed());
  auto engine = MakeEngine(LargeSegments());
  TestSequence sequence = SlowPrefill(engine.get(), &random);
  Generate(&sequence, 1, &random);  // queues the build
  std::this_thread::sleep_for(kBegun);
  std::thread waiting([&] { engine->WaitForBackground(); });
  EXPECT_LT(Measure([&] {
              engine->Shutdown();
              return absl::OkStatus();
            }).time,
            kSoon);
  waiting.join();
  engine->Shutdown();  // twice is once
  EXPECT_EQ(sequence.Info().segments, 0u);
  EXPECT_EQ(engine->Open(kTenant, ArgsOf(sequence.shape())).status().code(),
            StatusCode::kUnavailable);
  Generate(&sequence, 1, &random);  // what is open is answered until the end
  EXPECT_EQ(engine->FinishPrefill(kTenant, kWriter, sequence.id, nullptr).status().code(),
            StatusCode::kUnavailable);
  engine.reset();
}

// Steps go on at their pace while a large segment is built behind them, and it comes to its end
// under their load.
TEST(EngineConcurrencyTest, StepsGoOnDuringABuild) {
  Random random(TestSeed());
  EngineOptions options = SmallOptions();
  options.segment_tokens = 4096;
  const auto engine = MakeEngine(options);
  TestSequence slow = OpenSequence(engine.get(), MakeShape(1, 2, 2, 64, 16, DType::kBf16));
  TestSequence other = OpenSequence(engine.get(), MakeShape(1, 1, 1, 16, 16, DType::kBf16));
  Prefill(&slow, 4096 + 64, &random);
  std::atomic<bool> built{false};
  std::thread prefill([&] {
    FinishPrefill(&slow);
    built = true;
  });
  uint64_t steps = 0;
  for (; !built.load() && steps < 2000000; ++steps) Generate(&other, 1, &random);
  prefill.join();
  EXPECT_GT(steps, 10u);
  EXPECT_EQ(slow.Info().segments, 1u);
}

}  // namespace
}  // namespace attnd::engine::test
