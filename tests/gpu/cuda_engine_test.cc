// SPDX-License-Identifier: Apache-2.0
//
// Goal: an engine on the CUDA backend keeps every promise that one on the CPU backend keeps:
// histories that fork, shrink, are repeated and are segmented by the device answer as local
// attention over the same tokens does, also while the device runs out of room or fails. Method: the
// engine's own test support, its plain model of histories in double precision, over the fake
// device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "gpu/device/device.h"
#include "tests/engine/random_passes.h"
#include "tests/engine/support.h"
#include "tests/gpu/support.h"
#include "tests/tree_indexes.h"

namespace attnd::gpu::test {
namespace {

using attention::BackendStats;
using engine::Engine;
using engine::EventListener;
using engine::test::AnswersDense;
using engine::test::ArgsOf;
using engine::test::DecodeNext;
using engine::test::FinishPrefill;
using engine::test::Generate;
using engine::test::kTenant;
using engine::test::kWriter;
using engine::test::MatchesModel;
using engine::test::OpenSequence;
using engine::test::PolicyOf;
using engine::test::Prefill;
using engine::test::Random;
using engine::test::TestSeed;
using engine::test::TestSequence;
using testing::HasSubstr;

#if defined(__SANITIZE_THREAD__) && !defined(ATTND_FULL)
constexpr int kHistoryRounds = 6;  // the fake device's loops are slow there
#else
constexpr int kHistoryRounds = 25;
#endif

class CudaEngine : public testing::Test {
 protected:
  void Start(const CudaBackendOptions& options = SmallOptions(), bool maps_host_memory = false) {
    FakeBackend fake = MakeFakeBackend(options, maps_host_memory);
    control_ = fake.control;
    auto engine = Engine::Create(engine::test::SmallOptions(), std::move(fake.backend), nullptr);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }
  BackendStats stats() const { return engine_->backend().stats(); }
  TestSequence Open(const std::optional<attention::Policy>& policy = std::nullopt) {
    return OpenSequence(engine_.get(), shape_, policy);
  }
  // A sequence of the other that has what `source` has.
  absl::StatusOr<TestSequence> Fork(const TestSequence& source,
                                    std::optional<uint64_t> length = std::nullopt) {
    const auto info = engine_->Fork(kTenant, source.id, length);
    if (!info.ok()) return info.status();
    TestSequence fork(engine_.get(), info->id, shape_);
    fork.writer = source.writer + 1;
    fork.history = source.history;
    if (length.has_value()) fork.history.Truncate(*length);
    return fork;
  }
  void Truncate(TestSequence* sequence, uint64_t length) {
    ASSERT_TRUE(engine_->Truncate(kTenant, sequence->id, length).ok());
    sequence->history.Truncate(length);
  }

  const ModelShape shape_ = engine::test::MakeShape(2, 4, 2, 64, 64, DType::kBf16);
  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  Random random_{seed_};
  std::shared_ptr<FakeControl> control_;
  std::unique_ptr<Engine> engine_;
};

// The regression is the CPU backend's alone: what the server says of error-target can be opened.
TEST_F(CudaEngine, ErrorTargetHasATree) {
  Start();
  EXPECT_EQ(engine_->IndexesOf(PolicyOf("error-target")), attention::kTreeIndexes);
  EXPECT_EQ(Open(PolicyOf("error-target")).Info().args.indexes, attention::kTreeIndexes);
  const auto refusal = [&](const attention::Policy& policy, const attention::IndexSet& indexes) {
    engine::OpenArgs args = ArgsOf(shape_, policy);
    args.indexes = indexes;
    const absl::Status status = engine_->Open(kTenant, args).status();
    EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal(PolicyOf("error-target"), attention::kRegressionIndexes),
              HasSubstr("indexes are regression"));
  EXPECT_THAT(refusal(PolicyOf("error-target"), attnd::test::TreeOf({8, 4, 3})),
              HasSubstr("a tree whose groups have 64 tokens"));
}

TEST_F(CudaEngine, ARowThatLooksAtEveryLeafIsAnswered) {
  Start();
  TestSequence sequence = Open(PolicyOf("error-target"));
  Prefill(&sequence, 700, &random_);
  FinishPrefill(&sequence);
  const auto status = [&](const char* preset) {
    engine::test::Row row = QueryOnlyRow(&sequence, 0, 1, &random_);
    row.policy = PolicyOf(preset);
    return engine::test::Send(engine_.get(), engine::test::Message(0, {row})).row_status(0);
  };
  EXPECT_TRUE(status("dense").ok());
  EXPECT_TRUE(status("error-target").ok());
  EXPECT_TRUE(status("double-p").ok()) << status("double-p");
  EXPECT_TRUE(status("clusters-top-k").ok()) << status("clusters-top-k");
  EXPECT_EQ(engine_->backend().stats().fallback_steps, 0u);
}

TEST_F(CudaEngine, PrefillsAreSegmentedOnTheDevice) {
  Start();
  TestSequence sequence = Open();
  Prefill(&sequence, 1300, &random_);
  EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, 1024u);
  EXPECT_EQ(control_->builds(), 2u * shape_.layers);
  const uint64_t sent = stats().bytes_to_device;
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
  // What the build left on the device is used: of 1300 tokens only the last 276 are still to come.
  EXPECT_LT(stats().bytes_to_device - sent, uint64_t{400} * shape_.layers * shape_.kv_heads * 256);
  EXPECT_EQ(stats().fallback_steps, 0u);
  Generate(&sequence, 20, &random_, /*check=*/true);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

TEST_F(CudaEngine, SegmentsAreTheSameOnBothSides) {
  Start();
  TestSequence dense = Open();
  Prefill(&dense, 700, &random_);
  FinishPrefill(&dense);
  TestSequence fork = *Fork(dense);
  EXPECT_TRUE(MatchesModel(&fork, &random_));
  // The CPU answers from the host's copy of what the device built.
  control_->Set({.call = 0});
  EXPECT_TRUE(MatchesModel(&fork, &random_));
  EXPECT_FALSE(engine_->backend().Health().ok());
  EXPECT_TRUE(MatchesModel(&dense, &random_));
}

TEST_F(CudaEngine, HistoriesForkShrinkAndGrow) {
  Start();
  std::vector<TestSequence> sequences;
  sequences.push_back(Open());
  Prefill(&sequences[0], 900, &random_);
  FinishPrefill(&sequences[0]);
  for (int round = 0; round < kHistoryRounds; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    TestSequence& sequence = sequences[random_.Below(sequences.size())];
    const uint64_t length = sequence.history.committed();
    switch (random_.Below(4)) {
      case 0:
        Generate(&sequence, 1 + random_.Below(80), &random_);
        break;
      case 1:
        Truncate(&sequence, length - random_.Below(std::min<uint64_t>(length, 300)));
        break;
      case 2:
        if (sequences.size() < 5) {
          sequences.push_back(
              *Fork(sequence, length - random_.Below(std::min<uint64_t>(length, 200))));
        }
        break;
      default:
        Prefill(&sequence, 100 + random_.Below(300), &random_);
        FinishPrefill(&sequence);
        break;
    }
    for (TestSequence& each : sequences) ASSERT_TRUE(AnswersDense(&each, &random_));
  }
  EXPECT_EQ(stats().fallback_steps, 0u);
}

TEST_F(CudaEngine, GeneratedTokensAreSegmentedInTheBackground) {
  Start();
  TestSequence sequence = Open();
  Generate(&sequence, 640, &random_);
  engine_->WaitForBackground();
  EXPECT_EQ(sequence.Info().segmented_tokens, 512u);
  EXPECT_EQ(control_->builds(), shape_.layers);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

TEST_F(CudaEngine, WhatTheDeviceBuildsWrongIsBuiltAgain) {
  Start();
  TestSequence sequence = Open();
  Prefill(&sequence, 700, &random_);
  control_->Set({.bad_index = true});
  EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, 512u);
  control_->Set({});
  EXPECT_TRUE(engine_->backend().Health().ok());
  // The device's copy is the host's segment, not what it built itself.
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
  EXPECT_EQ(stats().fallback_steps, 0u);
}

TEST_F(CudaEngine, ADeviceThatFailsWhileBuildingLosesNothing) {
  for (const uint64_t call : {0, 3, 20}) {
    SCOPED_TRACE(testing::Message() << "call " << call);
    Start();
    TestSequence sequence = Open();
    control_->Set({.call = call});
    Prefill(&sequence, 700, &random_);
    EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, 512u);
    EXPECT_FALSE(engine_->backend().Health().ok());
    EXPECT_TRUE(MatchesModel(&sequence, &random_));
  }
}

TEST_F(CudaEngine, WithoutScratchForItTheCpuBuilds) {
  CudaBackendOptions options = SmallOptions();
  options.scratch_bytes = uint64_t{1} << 16;
  Start(options);
  const ModelShape many_heads = engine::test::MakeShape(2, 8, 8, 64, 64, DType::kBf16);
  TestSequence sequence = OpenSequence(engine_.get(), many_heads, std::nullopt);
  Prefill(&sequence, 700, &random_);
  EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, 512u);
  EXPECT_EQ(control_->builds(), 0u);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

// A prompt's segments grow: 512, 512, 1,024 tokens.
TEST_F(CudaEngine, ALongSegmentIsBuiltOnTheDevice) {
  Start();
  TestSequence sequence = Open(PolicyOf("error-target"));
  Prefill(&sequence, 2200, &random_);
  EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, 2048u);
  EXPECT_EQ(control_->builds(), 3u * shape_.layers);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

TEST_F(CudaEngine, ALongSegmentWithoutScratchIsBuiltShortOnTheDevice) {
  CudaBackendOptions options = SmallOptions();
  options.scratch_bytes =
      IndexScratchBytes(KernelShapeOf(shape_), shape_.kv_heads, {1024, 1024 / 8, 1024 / 64}) - 1;
  Start(options);
  TestSequence sequence = Open(PolicyOf("error-target"));
  Prefill(&sequence, 2200, &random_);
  EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, 3 * 512u + 600u);
  EXPECT_EQ(control_->builds(), 4u * shape_.layers) << "512 tokens and the rest for the long one";
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

TEST_F(CudaEngine, AnIndexIsFetchedInPieces) {
  CudaBackendOptions options = SmallOptions();
  options.result_bytes = uint64_t{1} << 16;  // less than eight heads' index takes
  Start(options);
  const ModelShape many_heads = engine::test::MakeShape(2, 8, 8, 64, 64, DType::kBf16);
  TestSequence sequence = OpenSequence(engine_.get(), many_heads, PolicyOf("error-target"));
  Prefill(&sequence, 700, &random_);
  EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, 512u);
  EXPECT_EQ(control_->builds(), 1u * many_heads.layers);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

// A sequence has 3 MiB of pages and more: its long segment is built a layer at a time in memory
// that is given back, and all are read where they lie.
TEST_F(CudaEngine, ASequenceMayBeLargerThanTheDevice) {
  CudaBackendOptions options = SmallOptions();
  options.page_memory_bytes = uint64_t{2700} << 10;
  Start(options, /*maps_host_memory=*/true);
  TestSequence sequence = Open(PolicyOf("error-target"));
  Prefill(&sequence, 3300, &random_);
  EXPECT_GE(FinishPrefill(&sequence).segmented_tokens, 3072u);
  EXPECT_GE(control_->builds(), 4u * shape_.layers);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
  EXPECT_GT(control_->mapped_bytes(), 0u);
  EXPECT_GT(stats().cache.bytes, 0u);
  absl::StatusOr<TestSequence> fork = Fork(sequence, 3200);
  ASSERT_TRUE(fork.ok()) << fork.status();
  for (int round = 0; round < 2; ++round) {
    Generate(&sequence, 20, &random_, /*check=*/false);
    Generate(&*fork, 20, &random_, /*check=*/false);
  }
  Truncate(&sequence, 3230);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
  EXPECT_TRUE(MatchesModel(&*fork, &random_));
  EXPECT_EQ(stats().fallback_steps, 0u);
  ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  ASSERT_TRUE(engine_->Close(kTenant, fork->id).ok());
  EXPECT_EQ(control_->mapped_bytes(), 0u);
  engine_.reset();
  EXPECT_EQ(control_->mapped_bytes(), 0u);
}

TEST_F(CudaEngine, ModelsWithoutKernelsAreRefusedWhenOpened) {
  Start();
  const auto id = engine_->Open(
      kTenant, ArgsOf(engine::test::MakeShape(2, 4, 2, 96, 96, DType::kBf16), std::nullopt));
  EXPECT_EQ(id.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(id.status().message()), HasSubstr("96/96"));
}

// Passes whose layers are prepared, or not, or for nothing, some with their client's memory, and
// which are given up, replayed and cut.
TEST_F(CudaEngine, PassesAreTheSamePrepared) {
  CudaBackendOptions options = SmallOptions();
  options.timed_steps = 16;
  Start(options, /*maps_host_memory=*/true);
  const ModelShape shape = engine::test::MakeShape(4, 4, 2, 64, 64, DType::kBf16);
  engine::test::RandomPasses passes(engine_.get(), shape, &random_);
  passes.before_layer = [&](engine::Pass* pass, const engine::ClientLayer* client) {
    EXPECT_NE(client, nullptr);
    const uint64_t what = random_.Below(4);
    if (what > 0) pass->PrepareNextLayer(what > 1 ? client : nullptr);
    if (what == 1) pass->ForgetNextLayer();
    pass->WarmNextLayer();
  };
  passes.Run(3 * kHistoryRounds);
  EXPECT_GT(stats().steps_ahead, uint64_t{kHistoryRounds});
  EXPECT_GT(stats().steps_in_vain, uint64_t{kHistoryRounds} / 2);
  EXPECT_GT(passes.told, int{kHistoryRounds} / 4);
  EXPECT_EQ(stats().fallback_steps, 0u);
}

// Several callers on sequences that share segments and blocks, on a device too small for all of
// them, which fails towards the end. For the thread sanitizer.
TEST_F(CudaEngine, CallersShareADeviceThatIsTooSmall) {
  CudaBackendOptions options = SmallOptions();
  options.device_memory_bytes = kDeviceMemoryBytesMin;
  Start(options);
  TestSequence first = Open();
  Prefill(&first, 620, &random_);
  FinishPrefill(&first);
  std::vector<TestSequence> sequences;
  for (int i = 0; i < 4; ++i) {
    sequences.push_back(*Fork(first));
    sequences.back().writer = kWriter + 10 + i;
  }
  std::vector<std::thread> callers;
  for (size_t c = 0; c < sequences.size(); ++c) {
    callers.emplace_back([this, c, &sequences] {
      Random random(seed_ + c);
      TestSequence& sequence = sequences[c];
      for (int round = 0; round < 12; ++round) {
        Generate(&sequence, 5, &random);
        EXPECT_TRUE(AnswersDense(&sequence, &random));
        if (round == 4) {
          Prefill(&sequence, 500, &random);
          FinishPrefill(&sequence);
        }
        if (round == 10 && c == 0) control_->Set({.call = 3});
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_FALSE(engine_->backend().Health().ok());
  for (TestSequence& sequence : sequences) EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

// What graphs rely on: layers and tokens change what a step finds in its input block, not what it
// launches, but for a row that grows by a piece.
TEST_F(CudaEngine, StepsOfLayersAndTokensAreOfFewKinds) {
  CudaBackendOptions options = SmallOptions();
  options.streams = 1;  // a stream's memory has its own addresses
  Start(options);
  TestSequence sequence = Open();
  Random random(seed_);
  Prefill(&sequence, 1300, &random);
  FinishPrefill(&sequence);
  Generate(&sequence, 2, &random, /*check=*/false);
  const uint64_t before = control_->kinds();
  const uint64_t steps = control_->steps();
  Generate(&sequence, 200, &random, /*check=*/false);
  EXPECT_EQ(control_->steps(), steps + 400) << "two layers";
  EXPECT_LE(control_->kinds(), before + 8);
}

}  // namespace
}  // namespace attnd::gpu::test
