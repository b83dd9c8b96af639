// SPDX-License-Identifier: Apache-2.0
//
// Goal: a device builds a prompt's segments while the prompt is uploaded, and whatever comes of the
// upload (other tokens, another end, too little memory, a device that fails, nobody who goes on)
// the sequence is what it would be without. Method: as cuda_engine_test.cc; the layers that the
// fake device has built are counted before and behind the prompt's end.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "engine/engine.h"
#include "tests/engine/support.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using engine::Engine;
using engine::EngineOptions;
using engine::test::AppendNext;
using engine::test::FinishPrefill;
using engine::test::Generate;
using engine::test::kTenant;
using engine::test::MatchesModel;
using engine::test::OpenSequence;
using engine::test::PolicyOf;
using engine::test::Prefill;
using engine::test::Random;
using engine::test::RandomKv;
using engine::test::TestSeed;
using engine::test::TestSequence;

class UploadEngine : public testing::Test {
 protected:
  void Start(const EngineOptions& options = engine::test::SmallOptions()) {
    FakeBackend fake = MakeFakeBackend(SmallOptions());
    control_ = fake.control;
    auto engine = Engine::Create(options, std::move(fake.backend), nullptr);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    empty_bytes_ = engine_->usage().resident_bytes;
  }
  TestSequence Open() { return OpenSequence(engine_.get(), shape_, PolicyOf("error-target")); }
  void Append(TestSequence* sequence, uint32_t layer, uint64_t tokens) {
    const absl::Status status = AppendNext(sequence, layer, RandomKv(shape_, tokens, &random_));
    ASSERT_TRUE(status.ok()) << status;
  }
  // Layers that are built when the device has nothing more to do.
  uint64_t Builds() {
    engine_->WaitForBackground();
    return control_->builds();
  }
  // Whether the sequence is what its tokens say, in segments of so many tokens together.
  void ExpectPrompt(TestSequence* sequence, uint64_t segmented) {
    EXPECT_EQ(FinishPrefill(sequence).segmented_tokens, segmented);
    Generate(sequence, 3, &random_, /*check=*/false);
    EXPECT_TRUE(MatchesModel(sequence, &random_));
  }

  const ModelShape shape_ = engine::test::MakeShape(10, 2, 1, 64, 64, DType::kBf16);
  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  Random random_{seed_};
  std::shared_ptr<FakeControl> control_;
  std::unique_ptr<Engine> engine_;
  uint64_t empty_bytes_ = 0;
};

// 1,700 tokens are runs of 512, 512 and, but for the window, 612 tokens.
TEST_F(UploadEngine, WholeRunsAreBuiltAsLayersCome) {
  Start();
  TestSequence sequence = Open();
  for (uint32_t layer = 0; layer < 7; ++layer) Append(&sequence, layer, 1700);
  EXPECT_EQ(Builds(), 0u) << "eight layers at a time";
  Append(&sequence, 7, 1700);
  EXPECT_EQ(Builds(), 2u * 8);
  Append(&sequence, 8, 1700);
  EXPECT_EQ(Builds(), 2u * 8);
  Append(&sequence, 9, 600);
  EXPECT_EQ(Builds(), 10u + 8) << "the first run is there";
  Append(&sequence, 9, 1100);
  EXPECT_EQ(Builds(), 2u * 10);
  ExpectPrompt(&sequence, 1636);
  EXPECT_EQ(control_->builds(), 3u * 10);
}

TEST_F(UploadEngine, APromptWhoseEndIsKnownIsBuiltToItsEnd) {
  Start();
  TestSequence sequence = Open();
  sequence.prompt_tokens = 1700;
  for (uint32_t layer = 0; layer < 10; ++layer) Append(&sequence, layer, 1700);
  EXPECT_EQ(Builds(), 3u * 10);
  ExpectPrompt(&sequence, 1636);
  EXPECT_EQ(control_->builds(), 3u * 10);
}

TEST_F(UploadEngine, AnEndThatIsWrongChangesNothing) {
  for (const uint64_t said : {uint64_t{1}, uint64_t{1200}, uint64_t{1699}, ~uint64_t{0}}) {
    SCOPED_TRACE(testing::Message() << said << " tokens");
    Start();
    TestSequence sequence = Open();
    sequence.prompt_tokens = said;
    for (uint32_t layer = 0; layer < 10; ++layer) Append(&sequence, layer, 1700);
    ExpectPrompt(&sequence, 1636);
  }
}

// As a model says that reads its prompt in pieces.
TEST_F(UploadEngine, AnEndThatMovesIsFollowed) {
  Start();
  TestSequence sequence = Open();
  for (const uint64_t end : {900, 1600, 1700}) {
    sequence.prompt_tokens = end;
    for (uint32_t layer = 0; layer < 10; ++layer) {
      Append(&sequence, layer, end - sequence.history.layers[layer].tokens);
    }
    Builds();
  }
  EXPECT_EQ(Builds(), 4u * 10) << "two runs, a third that is cut after 512 tokens, after 612";
  ExpectPrompt(&sequence, 1636);
  EXPECT_EQ(control_->builds(), 4u * 10);
}

TEST_F(UploadEngine, ChunksOfAllLayersInAnyOrder) {
  Start();
  for (int round = 0; round < 2; ++round) {
    TestSequence sequence = Open();
    if (round % 2 == 1) sequence.prompt_tokens = 1700;
    Prefill(&sequence, 1700, &random_);
    ExpectPrompt(&sequence, 1636);
  }
}

TEST_F(UploadEngine, OtherTokensInTheirPlace) {
  Start();
  TestSequence sequence = Open();
  for (uint32_t layer = 0; layer < 10; ++layer) Append(&sequence, layer, 1700);
  Builds();
  ASSERT_TRUE(engine_->Truncate(kTenant, sequence.id, 700).ok());
  sequence.history.Truncate(700);
  for (uint32_t layer = 0; layer < 10; ++layer) Append(&sequence, layer, 1000);
  ExpectPrompt(&sequence, 1636);
}

TEST_F(UploadEngine, ADeviceThatFailsMeanwhileLosesNothing) {
  for (const uint64_t call : {0, 3, 20, 40}) {
    SCOPED_TRACE(testing::Message() << "call " << call);
    Start();
    TestSequence sequence = Open();
    sequence.prompt_tokens = 1700;
    control_->Set({.call = call});
    for (uint32_t layer = 0; layer < 10; ++layer) Append(&sequence, layer, 1700);
    Builds();
    EXPECT_FALSE(engine_->backend().Health().ok());
    ExpectPrompt(&sequence, 1636);
  }
}

// In the first part of the segments, and in the second.
TEST_F(UploadEngine, AnIndexThatIsNoneIsBuiltAnew) {
  for (const uint32_t good : {0, 8}) {
    Start();
    TestSequence sequence = Open();
    for (uint32_t layer = 0; layer < good; ++layer) Append(&sequence, layer, 1700);
    EXPECT_EQ(Builds(), 2u * good);
    control_->Set({.bad_index = true});
    for (uint32_t layer = good; layer < 10; ++layer) Append(&sequence, layer, 1700);
    EXPECT_GT(Builds(), 2u * good);
    control_->Set({});
    ExpectPrompt(&sequence, 1636);
  }
}

// What was built of other tokens is not gone on with at the prompt's end.
TEST_F(UploadEngine, AnotherPromptInItsPlace) {
  Start();
  TestSequence sequence = Open();
  for (uint32_t layer = 0; layer < 8; ++layer) Append(&sequence, layer, 1700);
  EXPECT_EQ(Builds(), 2u * 8);
  ASSERT_TRUE(engine_->Truncate(kTenant, sequence.id, 0).ok());
  sequence.history.Truncate(0);
  for (uint32_t layer = 0; layer < 10; ++layer) Append(&sequence, layer, 1700);
  ExpectPrompt(&sequence, 1636);
}

TEST_F(UploadEngine, TokensBeyondTheLastDropNothing) {
  EngineOptions options = engine::test::SmallOptions();
  options.max_sequence_tokens = 1700;
  Start(options);
  TestSequence uploaded = Open(), full = Open();
  Prefill(&full, 1700, &random_);
  FinishPrefill(&full);
  for (uint32_t layer = 0; layer < 10; ++layer) Append(&uploaded, layer, 1700);
  const uint64_t builds = Builds();
  EXPECT_FALSE(AppendNext(&full, 0, RandomKv(shape_, 1, &random_)).ok());
  EXPECT_EQ(FinishPrefill(&uploaded).segmented_tokens, 1636u);
  EXPECT_EQ(control_->builds(), builds + 10) << "the last run";
}

// A prompt has 4.4 of 11.5 MB, and what is built of it meanwhile 3.3. The second one takes the
// latter's place, as copies may only have what is left of three quarters.
TEST_F(UploadEngine, CopiesMakeRoomForTokens) {
  EngineOptions options = engine::test::SmallOptions();
  options.memory_budget_bytes = uint64_t{11} << 20;
  Start(options);
  TestSequence first = Open(), second = Open();
  for (uint32_t layer = 0; layer < 10; ++layer) Append(&first, layer, 1700);
  EXPECT_EQ(Builds(), 2u * 10);
  for (uint32_t layer = 0; layer < 10; ++layer) Append(&second, layer, 1700);
  EXPECT_EQ(Builds(), 2u * 10);
  ExpectPrompt(&first, 1636);
  ASSERT_TRUE(engine_->Close(kTenant, first.id).ok());  // indexes of few tokens take much
  ExpectPrompt(&second, 1636);
  EXPECT_EQ(control_->builds(), (2u + 3 + 3) * 10);
}

TEST_F(UploadEngine, AnUploadThatEndsLeavesNothing) {
  Start();
  for (const bool whole : {false, true}) {
    TestSequence sequence = Open();
    for (uint32_t layer = 0; layer < (whole ? 10u : 4u); ++layer) Append(&sequence, layer, 1700);
    EXPECT_EQ(Builds() > 0, whole);
    EXPECT_GT(engine_->usage().resident_bytes, empty_bytes_ + (5 << 20)) << "two segments";
    ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (engine_->usage().resident_bytes > empty_bytes_ &&
         std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(engine_->usage().resident_bytes, empty_bytes_);
}

}  // namespace
}  // namespace attnd::gpu::test
