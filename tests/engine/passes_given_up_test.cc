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

}  // namespace
}  // namespace attnd::engine::test
