// SPDX-License-Identifier: Apache-2.0
//
// Goal: under every policy, shape and dtype the CPU backend reads what the policy's definition
// says, and answers what that plan must give, with true statistics. Method: random sequences with
// segments. The oracle judges the backend's plan (CheckPlan: it may differ only within 1e-4 of a
// cut) and then evaluates that same plan in double precision over what the index stores and the
// payload holds. Both sides see keys, values, centroids and queries as rounded to their dtypes, so
// what is left between them is float32 arithmetic, and one tolerance holds for all dtypes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "attention/cpu/cpu_backend.h"
#include "tests/attention/cpu/row_check.h"
#include "tests/attention/oracle_support.h"
#include "tests/attention/support.h"
#include "tests/cross.h"
#include "tests/oracle/attention.h"

namespace attnd::attention::test {
namespace {

struct Case {
  uint32_t query_heads, kv_heads, head_dim, value_dim;
  std::vector<uint32_t> segments;
  uint64_t tail;
  bool latent = false;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.query_heads << "/" << c.kv_heads << " heads, " << c.head_dim << "/" << c.value_dim
       << (c.latent ? " latent, " : ", ") << c.segments.size() << " segments";
}

// Groups 1, 2, 3, 4, 5, 8 and 9; dims that are odd multiples of 16; an MLA-like shape, and latent
// ones.
const Case kCases[] = {
    {1, 1, 16, 16, {700}, 70},       {2, 2, 64, 64, {1024, 640}, 90},
    {2, 1, 32, 80, {900}, 64},       {6, 2, 48, 16, {800, 555, 613}, 1},
    {4, 1, 112, 128, {1500}, 200},   {8, 2, 128, 128, {1024, 700}, 77},
    {5, 1, 80, 64, {1111}, 130},     {16, 2, 64, 96, {650, 800}, 100},
    {9, 1, 256, 32, {900}, 65},      {4, 1, 512, 512, {600}, 40},
    {16, 1, 576, 512, {600}, 40},    {16, 1, 80, 64, {650, 800}, 100, true},
    {3, 1, 48, 48, {900}, 65, true},
};

class CpuBackendPolicies : public testing::TestWithParam<std::tuple<Case, DType>> {};

TEST_P(CpuBackendPolicies, PlanAnswerAndStatisticsAreTheOracles) {
  const auto& [shape, dtype] = GetParam();
  SequenceSpec spec;
  spec.shape = MakeShape(shape.query_heads, shape.kv_heads, shape.head_dim, shape.value_dim, dtype);
  spec.shape.latent = shape.latent;
  spec.segment_tokens = shape.segments;
  spec.tail_tokens = shape.tail;
  spec.seed = TestSeed() + shape.head_dim + shape.query_heads;
  SCOPED_TRACE(testing::Message() << spec);
  TestSequence sequence = MakeSequence(spec);
  std::vector<TestRow> rows;
  for (const DType query_dtype : {DType::kFp32, dtype}) {
    for (const Policy& policy : ClusterPolicies()) {
      // The tail's last token is the query's own.
      rows.push_back(MakeRow(&sequence, policy, spec.tokens() - 1, 1, false, query_dtype, 0,
                             spec.seed + rows.size()));
    }
  }
  const std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 2});
  const StepResult step = RunStep(backend.get(), 0, rows);
  ASSERT_TRUE(step.status.ok()) << step.status;
  auto plan = step.plans.begin();
  for (size_t r = 0; r < rows.size(); ++r) {
    SCOPED_TRACE(testing::Message() << "row " << r << ": " << Describe(rows[r].policy));
    CheckRow(step, r, rows[r], 0, &plan);
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(plan, step.plans.end());
}

INSTANTIATE_TEST_SUITE_P(Shapes, CpuBackendPolicies,
                         testing::ValuesIn(attnd::test::Cross<Case>(
                             kCases, {DType::kBf16, DType::kFp16, DType::kFp32}, {1, 3, 7})));

class CpuBackendRows : public testing::Test {
 protected:
  // Four query heads on two KV heads, two layers.
  TestSequence Make(std::vector<uint32_t> segments, uint64_t tail, uint32_t sink = 4,
                    DType dtype = DType::kBf16) {
    SequenceSpec spec;
    spec.shape = MakeShape(4, 2, 64, 48, dtype, 2);
    spec.segment_tokens = std::move(segments);
    spec.tail_tokens = tail;
    spec.sink = sink;
    spec.seed = TestSeed();
    return MakeSequence(spec);
  }

  std::unique_ptr<Backend> backend_ = MakeCpuBackend({.threads = 2});
};

// Errors are relative, so the values' size does not matter.
TEST_F(CpuBackendRows, ValuesOfAnySize) {
  for (const double scale : {1e-12, 1e12}) {
    SequenceSpec spec;
    spec.shape = MakeShape(4, 2, 64, 48, DType::kFp32);
    spec.segment_tokens = {800, 600};
    spec.tail_tokens = 70;
    spec.seed = TestSeed();
    spec.value_scale = scale;
    TestSequence sequence = MakeSequence(spec);
    std::vector<TestRow> rows;
    for (const Policy& policy : ClusterPolicies()) {
      rows.push_back(MakeRow(&sequence, policy, spec.tokens() - 1, 1, false, DType::kFp32, 0,
                             spec.seed + rows.size()));
    }
    RunAndCheckRows(backend_.get(), 0, rows);
  }
}

// DeepSeek's heads: 128 that share one latent KV head.
TEST_F(CpuBackendRows, LatentAttentionOfItsRealSize) {
  SequenceSpec spec;
  spec.shape = MakeLatentShape(128, 576, 512, DType::kBf16);
  spec.segment_tokens = {530};
  spec.tail_tokens = 70;
  spec.seed = TestSeed();
  TestSequence sequence = MakeSequence(spec);
  std::vector<TestRow> rows;
  for (const char* preset : {"dense", "double-p", "error-target"}) {
    rows.push_back(MakeRow(&sequence, Parse(preset), spec.tokens() - 1, 1, false, DType::kBf16, 0,
                           spec.seed + rows.size()));
  }
  RunAndCheckRows(backend_.get(), 0, rows);
}

// Two far apart halves with the same logits and opposite values: the output is nothing, and errors
// are relative to the values' size instead. No zones, of whose values the backend takes a lower
// bound.
TEST_F(CpuBackendRows, OutputsThatCancelAreMeasuredAgainstTheValues) {
  constexpr size_t kDim = 32, kHalf = 512;
  SequenceSpec spec;
  spec.shape = MakeShape(2, 1, kDim, kDim, DType::kFp32);
  spec.segment_tokens = {2 * kHalf};
  spec.sink = 0;
  Random random(TestSeed());
  TestSequence sequence = MakeSequenceOf(spec, {OppositeHalves(kHalf, kDim, &random)});
  const Policy off = Parse("error-target", {{"tolerance", "off"}, {"floor", "0"}});
  const Policy wide = Parse("error-target", {{"tolerance", "20"}, {"floor", "0"}});
  std::vector<TestRow> rows;
  for (const Policy& policy : {off, wide}) {
    TestRow& row = rows.emplace_back(
        MakeRow(&sequence, policy, 2 * kHalf, 1, true, DType::kFp32, 0, TestSeed()));
    for (size_t i = 0; i < row.queries.size(); i += kDim) row.queries[i] = 0;  // halves look alike
  }
  RunAndCheckRows(backend_.get(), 0, {&rows[0], 1});
  const StepResult step = RunStep(backend_.get(), 0, rows);
  ASSERT_TRUE(step.status.ok()) << step.status;
  for (const float x : step.rows[0].out) EXPECT_NEAR(x, 0, 1e-5);
  EXPECT_GT(*step.rows[0].stats.predicted_error_mean, 20);
  const oracle::PolicyInput input = MakeInput(rows[1], 0, 0, 0);
  const oracle::Selection selection = oracle::Select(input, OraclePolicy(wide, 0));
  EXPECT_FALSE(step.plans[1].exact.empty());
  EXPECT_FALSE(step.plans[1].estimated.empty());
  EXPECT_EQ(oracle::CheckPlan(selection, NumberedPlan(step.plans[1], input)), "");
}

TEST_F(CpuBackendRows, SeveralQueryTokensAreCausal) {
  TestSequence sequence = Make({640, 520}, 137);
  std::vector<TestRow> rows;
  for (const Policy& policy : ClusterPolicies()) {
    for (const uint32_t tokens : {2u, 3u, 37u, 137u}) {
      if (tokens > 3 && policy.selector == Selector::kClusters) continue;  // the oracle is slow
      rows.push_back(MakeRow(&sequence, policy, sequence.spec.tokens() - tokens, tokens, false,
                             DType::kBf16, 1, TestSeed() + rows.size()));
    }
  }
  RunAndCheckRows(backend_.get(), 1, rows);
}

TEST_F(CpuBackendRows, QueryOnlySeesThePastAlike) {
  TestSequence sequence = Make({640, 520}, 70);
  TestSequence no_tail = Make({640, 520}, 0, 0);  // and no sink: clusters only
  std::vector<TestRow> rows;
  for (const Policy& policy : ClusterPolicies()) {
    for (const uint32_t tokens : {1u, 3u}) {
      rows.push_back(MakeRow(&sequence, policy, sequence.spec.tokens(), tokens, true, DType::kFp16,
                             1, TestSeed() + rows.size()));
      rows.push_back(MakeRow(&no_tail, policy, no_tail.spec.tokens(), tokens, true, DType::kFp32, 1,
                             TestSeed() + rows.size()));
    }
    // A length in the middle of the tail: later tokens are there but not seen.
    rows.push_back(MakeRow(&sequence, policy, 640 + 520 + 3, 1, true, DType::kFp32, 1,
                           TestSeed() + rows.size()));
  }
  RunAndCheckRows(backend_.get(), 1, rows);
}

TEST_F(CpuBackendRows, WithoutSegmentsEveryPolicyIsDense) {
  TestSequence sequence = Make({}, 333);
  std::vector<TestRow> rows;
  for (const Policy& policy : ClusterPolicies()) {
    rows.push_back(MakeRow(&sequence, policy, 332, 1, false, DType::kBf16, 0, rows.size()));
    rows.push_back(MakeRow(&sequence, policy, 0, 5, false, DType::kBf16, 0, rows.size()));
  }
  const StepResult step = RunStep(backend_.get(), 0, rows);
  ASSERT_TRUE(step.status.ok()) << step.status;
  EXPECT_TRUE(step.plans.empty());
  for (size_t r = 0; r < rows.size(); ++r) {
    SCOPED_TRACE(testing::Message() << "row " << r << ": " << Describe(rows[r].policy));
    const RowStats& stats = step.rows[r].stats;
    EXPECT_EQ(stats.zone_tokens, r % 2 == 0 ? 2 * 333u : 2 * (1 + 2 + 3 + 4 + 5u));
    EXPECT_EQ(stats.exact_tokens + stats.estimated_tokens + stats.dropped_tokens, 0u);
    EXPECT_EQ(stats.covered_mass, 1.0f);
    EXPECT_EQ(stats.exact_mass, 1.0f);
    for (uint32_t token = 0; token < rows[r].query_tokens; ++token) {
      for (uint32_t kv_head = 0; kv_head < 2; ++kv_head) {
        const oracle::PolicyInput input = MakeInput(rows[r], 0, token, kv_head);
        CheckHeads(step.rows[r], rows[r], token, kv_head,
                   oracle::Attend(input, oracle::DensePolicy()));
      }
    }
  }
}

TEST_F(CpuBackendRows, KvHeadsHaveErrorsOnlyWhereTheyAreWanted) {
  TestSequence sequence = Make({777, 512}, 61);
  std::vector<TestRow> rows;
  for (const Policy& policy : ClusterPolicies()) {
    for (const bool wanted : {true, false}) {
      rows.push_back(MakeRow(&sequence, policy, sequence.spec.tokens() - 3, 3, false, DType::kBf16,
                             0, TestSeed()));
      rows.back().want_kv_head_errors = wanted;
    }
  }
  const StepResult step = RunStep(backend_.get(), 0, rows);
  ASSERT_TRUE(step.status.ok()) << step.status;
  for (size_t r = 0; r < rows.size(); r += 2) {
    SCOPED_TRACE(testing::Message() << Describe(rows[r].policy));
    const RowStats &with = step.rows[r].stats, &without = step.rows[r + 1].stats;
    EXPECT_EQ(with.kv_head_errors.size(), with.predicted_error_mean.has_value() ? 2u : 0u);
    EXPECT_TRUE(without.kv_head_errors.empty());
    EXPECT_EQ(with.predicted_error_mean, without.predicted_error_mean);
  }
}

TEST_F(CpuBackendRows, DenseIsDenseAttentionOverTheOriginalTokens) {
  TestSequence sequence = Make({777, 512}, 61, 4, DType::kFp32);
  const ModelShape& shape = sequence.spec.shape;
  const uint32_t query_tokens = 3;
  const TestRow row = MakeRow(&sequence, Parse("dense"), sequence.spec.tokens() - query_tokens,
                              query_tokens, false, DType::kFp32, 1, TestSeed());
  oracle::DenseInput input;
  input.query_tokens = query_tokens;
  input.query_heads = shape.query_heads;
  input.kv_heads = shape.kv_heads;
  input.head_dim = shape.head_dim;
  input.value_dim = shape.value_dim;
  input.past = row.past_tokens;
  input.scale = shape.softmax_scale;
  input.q.assign(row.queries.begin(), row.queries.end());
  for (size_t t = 0; t < sequence.spec.tokens(); ++t) {
    for (uint32_t h = 0; h < shape.kv_heads; ++h) {
      const HeadData& data = sequence.head(1, h);
      const oracle::Vector key = Rows(data.keys, shape.head_dim, t, 1)[0];
      const oracle::Vector value = Rows(data.values, shape.value_dim, t, 1)[0];
      input.k.insert(input.k.end(), key.begin(), key.end());
      input.v.insert(input.v.end(), value.begin(), value.end());
    }
  }
  const oracle::DenseOutput expected = oracle::DenseAttention(input);
  const StepResult step = RunStep(backend_.get(), 1, std::span(&row, 1));
  ASSERT_TRUE(step.status.ok()) << step.status;
  ExpectClose(step.rows[0].out, expected.out, 0);
  for (size_t i = 0; i < expected.lse.size(); ++i) {
    EXPECT_NEAR(step.rows[0].lse[i], expected.lse[i], LseTolerance(expected.lse[i]));
  }
}

TEST_F(CpuBackendRows, DenseLayersAreDense) {
  TestSequence sequence = Make({640}, 70);
  for (const uint32_t dense_layers : {0u, 1u, 2u}) {
    std::vector<TestRow> rows;
    for (const char* preset : {"streaming", "clusters-top-k", "double-p", "error-target"}) {
      const Policy policy = Parse(preset, {{"dense_layers", std::to_string(dense_layers)}});
      rows.push_back(MakeRow(&sequence, policy, sequence.spec.tokens() - 1, 1, false, DType::kFp32,
                             1, TestSeed()));
    }
    RunAndCheckRows(backend_.get(), 1, rows);
    const StepResult step = RunStep(backend_.get(), 1, rows);
    for (const RowResult& row : step.rows) {
      EXPECT_EQ(row.stats.exact_tokens == 2 * 636, dense_layers == 2);
    }
  }
}

TEST_F(CpuBackendRows, AnEmptySequenceHasTheEmptyAnswer) {
  TestSequence sequence = Make({}, 0);
  std::vector<TestRow> rows;
  for (const Policy& policy : ClusterPolicies()) {
    rows.push_back(MakeRow(&sequence, policy, 0, 2, true, DType::kFp32, 0, TestSeed()));
  }
  const StepResult step = RunStep(backend_.get(), 0, rows);
  ASSERT_TRUE(step.status.ok()) << step.status;
  for (const RowResult& row : step.rows) {
    EXPECT_THAT(row.out, testing::Each(0.0f));
    EXPECT_THAT(row.lse, testing::Each(-std::numeric_limits<float>::infinity()));
    EXPECT_EQ(row.stats.zone_tokens, 0u);
    EXPECT_EQ(row.stats.covered_mass, 1.0f);
  }
}

}  // namespace
}  // namespace attnd::attention::test
