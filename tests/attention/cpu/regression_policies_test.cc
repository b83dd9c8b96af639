// SPDX-License-Identifier: Apache-2.0
//
// Goal: over clusters with a regression, error-target and the other cluster policies read what
// their definitions say, and answer and predict what that plan must give. Method: as
// cpu_backend_policies_test.cc has it, with the oracle of the regression filled with what the
// engine's index stores: its own centroids, axes, codes and slopes. So what is left between both is
// float32 arithmetic: of queries along axes, of sums over clusters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "attention/cpu/cpu_backend.h"
#include "tests/attention/cpu/paged_support.h"
#include "tests/attention/cpu/row_check.h"
#include "tests/attention/oracle_support.h"
#include "tests/attention/support.h"
#include "tests/cross.h"
#include "tests/oracle/regression_policy.h"
#include "tests/tree_indexes.h"

namespace attnd::attention::test {
namespace {

struct Case {
  uint32_t query_heads, kv_heads, head_dim, value_dim;
  std::vector<uint32_t> segments;
  uint64_t tail;
  bool latent = false;
  IndexSet indexes = kRegressionIndexes;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.query_heads << "/" << c.kv_heads << " heads, " << c.head_dim << "/" << c.value_dim
       << (c.latent ? " latent, " : ", ") << c.segments.size() << " segments, "
       << c.indexes.ToString();
}

// Groups 1, 2, 3, 8 and 12; dims that are odd multiples of 16; latent ones; with labels. Trees of
// more than kOpenedLeast groups, and of fewer, of which all are opened.
const Case kCases[] = {
    {1, 1, 16, 16, {700}, 70},
    {2, 2, 64, 64, {1024, 640}, 90},
    {2, 1, 32, 80, {900}, 64},
    {6, 2, 48, 16, {800, 555, 613}, 1},
    {16, 2, 128, 128, {1024, 700}, 77},
    {12, 1, 80, 64, {1111, 40}, 130, false, {IndexKind::kRegression, IndexKind::kLabels}},
    {8, 1, 256, 32, {900}, 65},
    {12, 1, 80, 64, {650, 800}, 100, true},
    {3, 1, 48, 48, {900, 17}, 65, true},
    {1, 1, 16, 16, {700}, 70, false, kTreeIndexes},
    {6, 2, 48, 16, {2100, 555, 1613}, 1, false, kTreeIndexes},
    {16, 2, 128, 128, {1024, 700}, 77, false, kTreeIndexes},
    {12, 1, 80, 64, {2611, 40}, 130, false, {IndexKind::kTree, IndexKind::kLabels}},
    {3, 1, 48, 48, {900, 17}, 65, true, kTreeIndexes},
};

// Trees of other sizes.
const std::tuple<Case, DType> kSizedCases[] = {
    {{6, 2, 48, 16, {1600, 555, 613}, 1, false, attnd::test::TreeOf({12, 4, 3})}, DType::kBf16},
    {{12, 1, 80, 64, {2611, 40}, 130, true, attnd::test::TreeOf({16, 4, 2})}, DType::kFp32},
    {{4, 1, 32, 32, {4500, 640}, 66, false, attnd::test::TreeOf({8, 16, 2})}, DType::kFp16},
};

std::vector<Policy> Policies() {
  std::vector<Policy> policies = ClusterPolicies();
  for (const auto& [tolerance, floor] :
       std::vector<std::pair<std::string, std::string>>{{"0.02", "0.05"},
                                                        {"0.3", "0"},
                                                        {"0.1", "1"},
                                                        {"off", "1"},
                                                        {"1e-9", "0"},
                                                        {"100", "0"}}) {
    policies.push_back(Parse("error-target", {{"tolerance", tolerance}, {"floor", floor}}));
  }
  for (const auto& [tolerance, quantile] : std::vector<std::pair<std::string, std::string>>{
           {"0.3", "0.5"}, {"0.1", "0.95"}, {"0.01", "0.99"}}) {
    policies.push_back(Parse("error-target", {{"tolerance", tolerance}, {"quantile", quantile}}));
  }
  return policies;
}

class RegressionPolicies : public testing::TestWithParam<std::tuple<Case, DType>> {};

TEST_P(RegressionPolicies, PlanAnswerAndStatisticsAreTheOracles) {
  const auto& [shape, dtype] = GetParam();
  SequenceSpec spec;
  spec.shape = MakeShape(shape.query_heads, shape.kv_heads, shape.head_dim, shape.value_dim, dtype);
  spec.shape.latent = shape.latent;
  spec.segment_tokens = shape.segments;
  spec.tail_tokens = shape.tail;
  spec.indexes = shape.indexes;
  spec.seed = TestSeed() + shape.head_dim + shape.query_heads;
  TestSequence sequence = MakeSequence(spec);
  std::vector<TestRow> rows;
  for (const DType query_dtype : {DType::kFp32, dtype}) {
    for (const Policy& policy : Policies()) {
      rows.push_back(MakeRow(&sequence, policy, spec.tokens() - 1, 1, false, query_dtype, 0,
                             spec.seed + rows.size()));
    }
  }
  RunAndCheckRows(MakeCpuBackend({.threads = 2}).get(), 0, rows);
}

INSTANTIATE_TEST_SUITE_P(Shapes, RegressionPolicies,
                         testing::ValuesIn(attnd::test::Cross<Case>(
                             kCases, {DType::kBf16, DType::kFp16, DType::kFp32}, {1, 3})));
INSTANTIATE_TEST_SUITE_P(Sizes, RegressionPolicies, testing::ValuesIn(kSizedCases));

class RegressionRows : public testing::Test {
 protected:
  // Six query heads on two KV heads, two layers.
  static SequenceSpec Spec(std::vector<uint32_t> segments, uint64_t tail, uint32_t sink = 4,
                           DType dtype = DType::kBf16) {
    SequenceSpec spec;
    spec.shape = MakeShape(6, 2, 64, 48, dtype, 2);
    spec.segment_tokens = std::move(segments);
    spec.tail_tokens = tail;
    spec.sink = sink;
    spec.seed = TestSeed();
    spec.indexes = kRegressionIndexes;
    return spec;
  }

  std::unique_ptr<Backend> backend_ = MakeCpuBackend({.threads = 2});
};

TEST_F(RegressionRows, SeveralQueryTokensAreCausal) {
  TestSequence sequence = MakeSequence(Spec({640, 520}, 137));
  std::vector<TestRow> rows;
  for (const Policy& policy : Policies()) {
    rows.push_back(MakeRow(&sequence, policy, sequence.spec.tokens() - 3, 3, false, DType::kBf16, 1,
                           TestSeed() + rows.size()));
  }
  RunAndCheckRows(backend_.get(), 1, rows);
}

// Without tail and sink there is nothing but clusters.
TEST_F(RegressionRows, QueryOnlySeesThePastAlike) {
  TestSequence sequence = MakeSequence(Spec({640, 520}, 70));
  TestSequence no_zones = MakeSequence(Spec({640, 520}, 0, 0));
  std::vector<TestRow> rows;
  for (const Policy& policy : Policies()) {
    for (TestSequence* each : {&sequence, &no_zones}) {
      rows.push_back(MakeRow(each, policy, each->spec.tokens(), 2, true, DType::kFp16, 1,
                             TestSeed() + rows.size()));
    }
  }
  RunAndCheckRows(backend_.get(), 1, rows);
}

TEST_F(RegressionRows, ValuesOfAnySize) {
  for (const double scale : {1e-12, 1e12}) {
    SequenceSpec spec = Spec({800, 600}, 70, 4, DType::kFp32);
    spec.value_scale = scale;
    TestSequence sequence = MakeSequence(spec);
    std::vector<TestRow> rows;
    for (const Policy& policy : Policies()) {
      rows.push_back(MakeRow(&sequence, policy, spec.tokens() - 1, 1, false, DType::kFp32, 0,
                             spec.seed + rows.size()));
    }
    RunAndCheckRows(backend_.get(), 0, rows);
  }
}

// Where values follow their keys the shift is most of an estimate: clusters of a hundred tokens
// that differ in nothing but how far they are along the query.
TEST_F(RegressionRows, ShiftsThatMatter) {
  for (const double slope : {0.3, 30.0}) {
    SequenceSpec spec = Spec({900, 700}, 40, 4, DType::kFp32);
    TestSequence sequence = MakeSequence(spec);
    std::vector<HeadData> heads = sequence.heads;
    const size_t dim = spec.shape.head_dim, value_dim = spec.shape.value_dim;
    for (HeadData& head : heads) {
      for (size_t t = 0; t < spec.tokens(); ++t) {
        for (size_t e = 0; e < value_dim; ++e) {
          head.values[t * value_dim + e] += static_cast<float>(slope * head.keys[t * dim + e]);
        }
      }
    }
    sequence = MakeSequenceOf(spec, heads);
    std::vector<TestRow> rows;
    for (const Policy& policy : Policies()) {
      rows.push_back(MakeRow(&sequence, policy, spec.tokens() - 1, 1, false, DType::kFp32, 0,
                             spec.seed + rows.size()));
    }
    RunAndCheckRows(backend_.get(), 0, rows);
    // And it does matter.
    const oracle::RegressionInput input = MakeRegressionInput(rows[0], 0, 0);
    const oracle::Vector query = Rows(rows[0].queries, dim, 0, 1)[0];
    const oracle::RegressionEstimate estimate =
        oracle::Estimate(input, query, oracle::Range(0, oracle::ClusterCount(input)));
    EXPECT_GT(estimate.shift_norm, 0.03 * std::sqrt(oracle::SquaredNorm(estimate.state.n)));
  }
}

// An estimate may be what is left of a sum when the greatest part of it is taken out again.
TEST_F(RegressionRows, OneTokenOutweighsAll) {
  for (const IndexSet& indexes : {kClusterIndexes, kRegressionIndexes, kTreeIndexes}) {
    SequenceSpec spec = Spec({2400, 700}, 40, 4, DType::kFp32);
    spec.indexes = indexes;
    TestSequence sequence = MakeSequence(spec);
    const size_t dim = spec.shape.head_dim;
    constexpr size_t kToken = 1234;
    std::vector<TestRow> rows;
    for (const Policy& policy : Policies()) {
      // The oracle has quantiles over a regression alone.
      if (policy.quantile > 0 && !indexes.has_regression()) continue;
      TestRow row = MakeRow(&sequence, policy, spec.tokens() - 1, 1, false, DType::kFp32, 0,
                            spec.seed + rows.size());
      for (const float logit : {15.0f, 60.0f}) {
        for (size_t i = 0; i < row.queries.size(); ++i) {
          const size_t kv_head = i / dim / spec.shape.group();
          const float* const key = sequence.heads[kv_head].keys.data() + kToken * dim;
          const double norm2 = oracle::SquaredNorm(oracle::Vector(key, key + dim));
          row.queries[i] =
              static_cast<float>(logit * key[i % dim] / norm2 / spec.shape.softmax_scale);
        }
        rows.push_back(row);
      }
    }
    RunAndCheckRows(backend_.get(), 0, rows);
  }
}

// Two far apart halves with the same logits and opposite values: what remains of the output is less
// than the guard, and errors are relative to that. No zones, of whose values the backend takes a
// lower bound.
TEST_F(RegressionRows, OutputsThatCancelAreMeasuredAgainstTheValues) {
  constexpr size_t kDim = 32, kHalf = 512;
  SequenceSpec spec;
  spec.shape = MakeShape(2, 1, kDim, kDim, DType::kFp32);
  spec.segment_tokens = {2 * kHalf};
  spec.sink = 0;
  spec.indexes = kRegressionIndexes;
  Random random(TestSeed());
  TestSequence sequence = MakeSequenceOf(spec, {OppositeHalves(kHalf, kDim, &random)});
  const auto row_of = [&](const std::string& tolerance) {
    const Policy policy = Parse("error-target", {{"tolerance", tolerance}, {"floor", "0"}});
    TestRow row = MakeRow(&sequence, policy, 2 * kHalf, 1, true, DType::kFp32, 0, TestSeed());
    for (size_t i = 0; i < row.queries.size(); i += kDim) row.queries[i] = 0;  // halves look alike
    return row;
  };
  const TestRow off = row_of("off");
  RunAndCheckRows(backend_.get(), 0, {&off, 1});
  const StepResult step = RunStep(backend_.get(), 0, {&off, 1});
  ASSERT_TRUE(step.status.ok()) << step.status;
  const double error = *step.rows[0].stats.predicted_error_mean;
  EXPECT_GT(error, 5);
  const TestRow some = row_of(std::to_string(0.2 * error));
  RunAndCheckRows(backend_.get(), 0, {&some, 1});
  const StepResult partly = RunStep(backend_.get(), 0, {&some, 1});
  EXPECT_FALSE(partly.plans[0].exact.empty());
  EXPECT_FALSE(partly.plans[0].estimated.empty());
}

// The error of a cluster's mass is times the output. Where that cancels to nothing, clusters of
// values that are nothing have no error, however little is known of their mass.
TEST_F(RegressionRows, MassDoesNotMatterWhereTheOutputIsNothing) {
  constexpr size_t kDim = 32, kPart = 512;
  SequenceSpec spec;
  spec.shape = MakeShape(2, 1, kDim, kDim, DType::kFp32);
  spec.segment_tokens = {3 * kPart};
  spec.sink = 0;
  spec.indexes = kRegressionIndexes;
  Random random(TestSeed());
  HeadData data;
  const std::vector<float> keys = random.Normals(kPart * kDim);
  const std::vector<float> values = random.Normals(kPart * kDim);
  for (const float side : {1.0f, -1.0f, 0.0f}) {  // the last part has no values
    for (size_t i = 0; i < keys.size(); ++i) {
      data.keys.push_back(i % kDim == 0   ? 64 * side
                          : i % kDim == 1 ? (side == 0 ? 64.0f : 0.0f)
                                          : keys[i]);
      data.values.push_back(side * values[i]);
    }
  }
  TestSequence sequence = MakeSequenceOf(spec, {data});
  TestRow row = MakeRow(&sequence, Parse("error-target", {{"tolerance", "0.001"}, {"floor", "0"}}),
                        3 * kPart, 1, true, DType::kFp32, 0, TestSeed());
  for (size_t i = 0; i < row.queries.size(); ++i) {
    if (i % kDim < 2) row.queries[i] = 0;  // parts look alike
  }
  const StepResult step = RunStep(backend_.get(), 0, {&row, 1});
  ASSERT_TRUE(step.status.ok()) << step.status;
  EXPECT_GT(step.rows[0].stats.exact_tokens, kPart);
  // Those of no values, and clusters of one token.
  EXPECT_GE(step.rows[0].stats.estimated_tokens, kPart);
  EXPECT_LT(*step.rows[0].stats.predicted_error_max, 1e-4f);
}

// And so is one that leaves nothing to estimates.
TEST_F(RegressionRows, TheToleranceZeroIsDense) {
  TestSequence sequence = MakeSequence(Spec({640, 520}, 70, 4, DType::kFp32));
  std::vector<TestRow> rows;
  for (const Policy& policy : {Parse("dense"), Parse("error-target", {{"tolerance", "0"}}),
                               Parse("error-target", {{"tolerance", "0"}, {"floor", "0"}}),
                               Parse("error-target", {{"tolerance", "1e-30"}, {"floor", "1"}})}) {
    rows.push_back(MakeRow(&sequence, policy, sequence.spec.tokens() - 1, 1, false, DType::kFp32, 0,
                           TestSeed()));
  }
  const StepResult step = RunStep(backend_.get(), 0, rows);
  ASSERT_TRUE(step.status.ok()) << step.status;
  for (const RowResult& row : step.rows) {
    EXPECT_EQ(row.stats.exact_tokens, 2 * (640 + 520 - 4u));
    if (&row != &step.rows[0] && row.stats.predicted_error_max.has_value()) {
      EXPECT_EQ(row.stats.predicted_error_max, 0.0f);
    }
    EXPECT_THAT(row.out, testing::Pointwise(testing::FloatNear(2e-6f), step.rows[0].out));
    EXPECT_THAT(row.lse, testing::Pointwise(testing::FloatNear(1e-5f), step.rows[0].lse));
  }
}

// A tolerance is kept by the sum of the clusters' errors in the first pass; the coherent part comes
// on top of it.
TEST_F(RegressionRows, LessToleranceReadsMore) {
  TestSequence sequence = MakeSequence(Spec({2000, 1500}, 70));
  std::vector<TestRow> rows;
  for (const char* tolerance : {"off", "1", "0.3", "0.1", "0.03", "0.01", "0.001"}) {
    rows.push_back(MakeRow(&sequence, Parse("error-target", {{"tolerance", tolerance}}),
                           sequence.spec.tokens() - 1, 1, false, DType::kFp32, 0, TestSeed()));
  }
  const StepResult step = RunStep(backend_.get(), 0, rows);
  ASSERT_TRUE(step.status.ok()) << step.status;
  for (size_t r = 1; r < rows.size(); ++r) {
    EXPECT_GE(step.rows[r].stats.exact_tokens, step.rows[r - 1].stats.exact_tokens);
    EXPECT_LE(*step.rows[r].stats.predicted_error_mean,
              *step.rows[r - 1].stats.predicted_error_mean * 1.0001f);
  }
  EXPECT_GT(step.rows.back().stats.exact_tokens, step.rows[0].stats.exact_tokens);
}

// Queries of a latent shape that are so long that logits within a cluster lie far apart: what
// clusters may hide counts.
TEST_F(RegressionRows, WhatClustersOfALatentShapeHideIsTold) {
  for (const IndexSet& indexes : {kRegressionIndexes, kTreeIndexes}) {
    SequenceSpec spec = Spec({6000}, 70);
    spec.shape = MakeShape(3, 1, 48, 48, DType::kFp32);
    spec.shape.latent = true;
    spec.indexes = indexes;
    TestSequence sequence = MakeSequence(spec);
    float greatest = 0;  // predicted error
    // Longer ones make a tree's groups equal: their optimistic masses are all nothing beside one.
    for (const float length : {1.0f, 3.0f, 5.0f, 8.0f, 30.0f}) {
      SCOPED_TRACE(testing::Message() << spec << ", queries " << length << " times as long");
      std::vector<TestRow> rows;
      for (const auto& parameters : std::vector<std::map<std::string, std::string>>{
               {{"tolerance", "off"}},
               {{"tolerance", "0.1"}},
               {{"tolerance", "0.2"}, {"quantile", "0.9"}}}) {
        rows.push_back(MakeRow(&sequence, Parse("error-target", parameters), spec.tokens() - 1, 1,
                               false, DType::kFp32, 0, spec.seed));
        for (float& x : rows.back().queries) x *= length;
      }
      RunAndCheckRows(backend_.get(), 0, rows);
      if (HasFatalFailure()) return;
      const StepResult step = RunStep(backend_.get(), 0, {rows.data(), 1});
      greatest = std::max(greatest, *step.rows[0].stats.predicted_error_max);
    }
    EXPECT_GT(greatest, 0.3f);
  }
}

// ---- pages that are not there ----

// What was to be read and is not there is estimated like the rest: with its shift, its part of the
// predicted error, and its share of the mass.
TEST_F(RegressionRows, MissedClustersAreEstimatedAndPredicted) {
  for (const DType dtype : {DType::kBf16, DType::kFp32}) {
    SequenceSpec spec = Spec({900, 700}, 70, 4, dtype);
    TestSequence sequence = MakeSequence(spec);
    CopyingStore store;
    store.set_was_there(true);
    store.set_in_time([](const PageWant& want) { return want.page % 2 == 0; });
    TestSequence paged = Paged(sequence, &store);
    std::vector<TestRow> there, rows;
    for (const auto& [preset, parameters] :
         std::vector<std::pair<std::string, std::map<std::string, std::string>>>{
             {"error-target", {{"tolerance", "0.001"}}},
             {"error-target", {{"tolerance", "0.05"}}},
             {"error-target", {{"tolerance", "0.05"}, {"quantile", "0.9"}}},
             {"error-target", {{"tolerance", "off"}, {"floor", "0.3"}}},
             {"double-p", {{"p1", "1"}, {"p2", "0.9"}, {"estimator", "second-order"}}}}) {
      auto with_miss = parameters;
      with_miss["on_miss"] = "estimate";
      there.push_back(MakeRow(&sequence, Parse(preset, with_miss), spec.tokens() - 1, 1, false,
                              DType::kFp32, 0, spec.seed + there.size()));
      rows.push_back(there.back());
      rows.back().sequence = &paged;
    }
    const StepResult step = RunStep(backend_.get(), 0, rows);
    ASSERT_TRUE(step.status.ok()) << step.status;
    const StepResult whole = RunStep(backend_.get(), 0, there);
    auto plan = step.plans.begin();
    for (size_t r = 0; r < rows.size(); ++r) {
      SCOPED_TRACE(testing::Message() << spec << ", row " << r << ": " << Describe(rows[r].policy));
      const RowStats& stats = step.rows[r].stats;
      EXPECT_GT(stats.missed_tokens, 0u);
      EXPECT_GT(stats.exact_tokens + stats.missed_tokens, 0u);
      EXPECT_EQ(stats.exact_tokens + stats.missed_tokens, whole.rows[r].stats.exact_tokens);
      EXPECT_GT(*stats.missed_mass, 0.0f);
      EXPECT_LE(*stats.missed_mass, 1.0f);
      EXPECT_NEAR(*stats.missed_mass + *stats.exact_mass, *whole.rows[r].stats.exact_mass, 0.1);
      EXPECT_GT(*stats.predicted_error_mean, *whole.rows[r].stats.predicted_error_mean);
      CheckRow(step, r, there[r], 0, &plan, {.misses = true});
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace attnd::attention::test
