// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a pass that is given up leaves, beside others who write to and read its sequences.
// Method: the moments between a pass's steps, without threads; lengths, memory and answers are
// compared with a plain model and the dense oracle.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tests/engine/passes_support.h"

namespace attnd::engine::test {
namespace {

using absl::StatusCode;

class PassesGivenUpTest : public testing::Test {
 protected:
  Random random_{TestSeed()};
  const testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(TestSeed())};
  std::unique_ptr<Engine> engine_ = MakeEngine(SmallOptions());
  const ModelShape shape_ = MakeShape(3, 4, 2, 16, 16, DType::kBf16);
};

// A row that never appended takes nothing back: what another stream uploads meanwhile stays, also
// when that stream has ended.
TEST_F(PassesGivenUpTest, WhatAnotherStreamUploadsMeanwhileStays) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  const Layers layers = NextPass({&sequence}, 1, &random_);
  layers[0]->q.Set(0, std::nanf(""));
  layers[0]->args.q = layers[0]->q.view();
  const std::unique_ptr<Pass> pass = Begin(engine_.get(), layers, kWriter + 1);
  Prefill(&sequence, 700, &random_);
  EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, 512u);
  engine_->ReleaseWriter(kWriter);
  EXPECT_EQ(StepOf(pass.get(), *layers[0]).row_status(0).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(sequence.Info().committed_tokens, 700u);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

// A key that was given up bounds no query that only reads, and none that a prompt was observed
// with.
TEST_F(PassesGivenUpTest, AGivenUpKeyIsNoBoundForReaders) {
  for (const bool observed : {false, true}) {
    SCOPED_TRACE(observed);
    TestSequence sequence = OpenSequence(engine_.get(), shape_);
    Prefill(&sequence, 5, &random_);
    Layers layers = NextPass({&sequence}, 1, &random_);
    Row huge = layers[0]->rows[0];
    for (size_t i = 0; i < huge.kv.k.values.size(); ++i) huge.kv.k.Set(i, 1e17f);
    for (size_t i = 0; i < huge.q.values.size(); ++i) huge.q.Set(i, 1e-10f);
    const Message message(0, {huge});
    std::unique_ptr<Pass> pass = Begin(engine_.get(), layers);
    EXPECT_TRUE(StepOf(pass.get(), message).row_status(0).ok());
    pass.reset();
    if (observed) {
      const Numbers q = NumbersOf(DType::kFp32, std::vector<float>(size_t{4} * 16, 1e6f));
      ObservedChunk chunk;
      chunk.layer = 0;
      chunk.tokens = 1;
      chunk.heads = 4;
      chunk.head_dim = 16;
      chunk.queries = q.view();
      const absl::Status status = engine_->Observe(kTenant, kWriter, sequence.id, chunk);
      EXPECT_TRUE(status.ok()) << status;
    } else {
      Row large = QueryOnlyRow(&sequence, 0, 1, &random_);
      for (size_t i = 0; i < large.q.values.size(); ++i) large.q.Set(i, 1e6f);
      const Answer answer = SendRow(large, 0);
      EXPECT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
    }
    EXPECT_TRUE(MatchesModel(&sequence, &random_));
  }
}

// An upload that finds given-up tokens of its own in layer 0 and others in layer 1 copies their
// blocks alone: memory for the tail twice is not needed.
TEST_F(PassesGivenUpTest, OnlyTheirBlocksAreCopied) {
  EngineOptions options = SmallOptions();
  options.memory_budget_bytes = uint64_t{4} << 20;
  engine_ = MakeEngine(options);
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  Prefill(&sequence, 30, &random_);
  const Layers layers = NextPass({&sequence}, 3, &random_);
  std::unique_ptr<Pass> pass = Begin(engine_.get(), layers);
  for (const uint32_t layer : {0, 1}) {
    ASSERT_TRUE(StepOf(pass.get(), *layers[layer]).row_status(0).ok());
  }
  pass.reset();
  const uint64_t before = engine_->usage().resident_bytes;
  ASSERT_TRUE(AppendNext(&sequence, 0, layers[0]->rows[0].kv).ok());
  constexpr uint64_t kTokens = 7500;  // of 384 bytes in all layers
  ASSERT_TRUE(AppendNext(&sequence, 0, RandomKv(shape_, kTokens - 3, &random_)).ok());
  const uint64_t uploaded = engine_->usage().resident_bytes;
  EXPECT_GT(uploaded - before, options.memory_budget_bytes / 2) << "the test needs more tokens";
  for (const uint32_t layer : {1, 2}) {
    const absl::Status appended = AppendNext(&sequence, layer, RandomKv(shape_, kTokens, &random_));
    ASSERT_TRUE(appended.ok()) << appended;
  }
  EXPECT_LE(engine_->usage().resident_bytes, uploaded + 65'536);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

}  // namespace
}  // namespace attnd::engine::test
