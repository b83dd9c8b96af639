// SPDX-License-Identifier: Apache-2.0
//
// Goal: policies that choose tokens read what their definitions say and answer accordingly,
// whatever the policy. Method: presets of all kinds over seeded sequences, against the definitions
// in double precision (token_check.h).
#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "attention/cpu/token_unit.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/attention/cpu/token_check.h"

namespace attnd::attention::test {
namespace {

class TokenPolicies : public TokenPolicyTest {};

TEST_F(TokenPolicies, PlansAndAnswersAreThoseOfTheDefinitions) {
  const ModelShape shapes[] = {
      MakeShape(4, 2, 64, 64, DType::kBf16, 2), MakeShape(8, 1, 128, 32, DType::kFp32),
      MakeShape(3, 3, 80, 16, DType::kFp16),    MakeShape(10, 2, 16, 48, DType::kFp32),
      MakeShape(8, 2, 48, 64, DType::kBf16),    MakeLatentShape(16, 80, 64, DType::kBf16),
  };
  for (const ModelShape& shape : shapes) {
    for (const uint32_t sink : {0u, 4u}) {
      TestSequence sequence = Make(shape, {1000, 520, 77}, 70, sink);
      std::vector<TestRow> rows;
      for (const Policy& policy : TokenPresets()) {
        rows.push_back(MakeRow(&sequence, policy, sequence.spec.tokens() - 1, 1, true, shape.dtype,
                               shape.layers - 1, TestSeed() + rows.size()));
        ForgetChoices(&sequence);
        RunAndCheck(shape.layers - 1, {rows.back()});
        if (HasFailure()) return;
      }
    }
  }
}

// DeepSeek's heads: 128 that share one latent KV head, with labels of 128 channels.
TEST_F(TokenPolicies, LatentAttentionOfItsRealSize) {
  TestSequence sequence = Make(MakeLatentShape(128, 576, 512, DType::kBf16), {530}, 70);
  EXPECT_EQ(sequence.view->segments[0]->labels(0, 0).channels, 128u);
  std::vector<TestRow> rows;
  for (const char* preset : {"quest", "double-sparsity", "twilight", "asynctls"}) {
    std::map<std::string, std::string> parameters = {{"budget", "100"}};
    if (std::string(preset) == "asynctls") parameters.emplace("lag", "0");
    rows.push_back(MakeRow(&sequence, Parse(preset, parameters), sequence.spec.tokens() - 1, 1,
                           false, DType::kBf16, 0, TestSeed() + rows.size()));
  }
  RunAndCheck(0, rows);
}

TEST_F(TokenPolicies, SeveralQueryTokensChooseEachForItself) {
  TestSequence sequence = Make(MakeShape(6, 2, 64, 32, DType::kFp32), {900, 300}, 80);
  for (const Policy& policy : TokenPresets()) {
    for (const uint32_t tokens : {1u, 4u}) {
      ForgetChoices(&sequence);
      RunAndCheck(0, {MakeRow(&sequence, policy, sequence.spec.tokens() - tokens, tokens, false,
                              DType::kFp32, 0, TestSeed() + tokens)});
      if (HasFailure()) return;
    }
  }
}

TEST_F(TokenPolicies, TheWholeBudgetIsDense) {
  TestSequence sequence = Make(MakeShape(4, 2, 64, 64, DType::kBf16), {1030, 513}, 66);
  for (const Policy& policy :
       {Parse("quest", {{"budget", "100%"}}), Parse("double-sparsity", {{"budget", "100%"}}),
        Parse("twilight", {{"p", "1"}, {"budget", "100%"}}),
        Parse("twilight", {{"p", "1"}, {"selector", "full"}}),
        Parse("twilight", {{"p", "1"}, {"selector", "exhaustive"}, {"budget", "100%"}}),
        Parse("twilight", {{"p", "1"}, {"selector", "asynctls"}, {"budget", "100%"}})}) {
    const auto row = [&](const Policy& p) {
      return MakeRow(&sequence, p, sequence.spec.tokens(), 1, true, DType::kFp32, 0, TestSeed());
    };
    const std::vector<TestRow> rows = {row(policy), row(Parse("dense"))};
    const StepResult step = RunStep(backend_.get(), 0, rows);
    ASSERT_TRUE(step.status.ok());
    SCOPED_TRACE(Describe(policy));
    EXPECT_EQ(step.rows[0].stats.dropped_tokens, 0u);
    EXPECT_EQ(step.rows[0].stats.covered_mass, 1.0f);
    EXPECT_EQ(step.rows[0].stats.predicted_error_mean, 0.0f);
    for (size_t i = 0; i < step.rows[0].out.size(); ++i) {
      EXPECT_NEAR(step.rows[0].out[i], step.rows[1].out[i], 1e-6);
    }
  }
}

// A unit asks for no more memory than it says, and for half of that or more.
TEST_F(TokenPolicies, UnitsSayWhatMemoryTheyTake) {
  const ModelShape shape = MakeShape(10, 2, 32, 32, DType::kFp32);
  TestSequence tokens = Make(shape, {1000, 300}, 70);
  TestSequence clusters =
      Make(shape, {1000, 300}, 70, 4, {IndexKind::kClusters, IndexKind::kKeys4});
  std::vector<Policy> policies = TokenPresets();
  for (const Policy& policy : PrunersOverClusters()) policies.push_back(policy);
  for (const Policy& policy : policies) {
    SCOPED_TRACE(Describe(policy));
    TestSequence* sequence = policy.Indexes().clustered() ? &clusters : &tokens;
    const TestRow row =
        MakeRow(sequence, policy, sequence->spec.tokens() - 1, 1, true, DType::kFp32, 0, 1);
    StepArena scratch, arena;
    UnitQuery query;
    query.view = sequence->view.get();
    query.policy = &policy;
    query.seen = sequence->spec.tokens();
    const size_t said = TokenUnit::ArenaBytes(query, /*pieces=*/0);
    const size_t dim = shape.head_dim;
    std::vector<float> quads(query.quads() * kQuad * dim, 0.0f);
    std::copy_n(row.queries.begin(), shape.group() * dim, quads.begin());
    std::vector<kernels::Queries> prepared;
    for (size_t quad = 0; quad < query.quads(); ++quad) {
      prepared.push_back(kernels::PrepareQueries(
          shape.dtype, quads.data() + quad * kQuad * dim, shape.softmax_scale, dim,
          scratch.Allocate<float>(kernels::QueriesFloats(dim)).data()));
    }
    query.queries = query.previous = quads.data();
    query.prepared = prepared;
    const TokenUnit unit(query, &arena);
    EXPECT_LE(arena.handed_out(), said);
    EXPECT_LE(said, 2 * arena.handed_out() + 4096) << "runs are once more where they are cut";
  }
}

TEST_F(TokenPolicies, DegenerateInputsHaveFiniteAnswers) {
  const ModelShape shape = MakeShape(2, 1, 16, 16, DType::kFp32);
  for (const float huge : {0.0f, 1e9f}) {
    for (const uint32_t tokens : {1u, 5u, 15u, 16u, 63u, 64u, 200u}) {
      SequenceSpec spec;
      spec.shape = shape;
      spec.segment_tokens = {tokens};
      spec.tail_tokens = 3;
      spec.sink = std::min(tokens - 1, 4u);
      spec.indexes = kAllTokenIndexes;
      HeadData data;
      data.keys.assign((tokens + 3) * 16, 0.5f);  // all keys equal, but perhaps for one
      data.values.assign((tokens + 3) * 16, 1.0f);
      data.keys[(tokens - 1) * 16] += huge;
      TestSequence sequence = MakeSequenceOf(spec, {data});
      std::vector<TestRow> rows;
      for (const Policy& policy : TokenPresets()) {
        rows.push_back(MakeRow(&sequence, policy, tokens + 3, 1, true, DType::kFp32, 0, 1));
      }
      const StepResult step = RunStep(backend_.get(), 0, rows);
      ASSERT_TRUE(step.status.ok());
      for (size_t r = 0; r < rows.size(); ++r) {
        SCOPED_TRACE(testing::Message() << tokens << " " << Describe(rows[r].policy));
        EXPECT_THAT(step.rows[r].out, testing::Each(testing::FloatNear(1, 1e-5)));
        for (const float lse : step.rows[r].lse) EXPECT_TRUE(std::isfinite(lse));
        const RowStats& stats = step.rows[r].stats;
        EXPECT_EQ(stats.exact_tokens + stats.dropped_tokens, tokens - spec.sink);
      }
    }
  }
}

}  // namespace
}  // namespace attnd::attention::test
