// SPDX-License-Identifier: Apache-2.0
//
// Retrieval with completion. Goal: the plan is one that the definition allows, and the answer that
// of the plan's tokens and of what the oracle leaves of the summary; nothing counts twice. Method:
// random maps and sequences against the oracle in double precision, and maps that are the softmax's
// own kernel, with which every answer must be the dense one.
#include "tests/oracle/completion.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "attention/policy/policy.h"
#include "tests/attention/completion/completion_support.h"
#include "tests/attention/oracle_support.h"
#include "tests/attention/support.h"
#include "tests/oracle/token_attention.h"

namespace attnd::attention::test {
namespace {

using Parameters = std::map<std::string, std::string>;

Policy Completion(const Parameters& parameters) { return Parse("topk-completion", parameters); }

struct Answer {
  std::vector<double> out;
  double lse = 0;
};

Answer AnswerOf(const RowResult& result, size_t lane, size_t value_dim) {
  const auto begin = result.out.begin() + static_cast<ptrdiff_t>(lane * value_dim);
  return {{begin, begin + static_cast<ptrdiff_t>(value_dim)}, double{result.lse[lane]}};
}

class CompletionTest : public testing::Test {
 protected:
  TestSequence Make(const ModelShape& shape, std::vector<uint32_t> segments, uint64_t tail,
                    IndexSet indexes, double key_scale = 1) {
    SequenceSpec spec = Spec(shape, std::move(segments), tail, indexes);
    Random random(spec.seed + 1000);
    parts_ = RandomParts(shape, 32, 48, &random);
    spec.feature_maps = FeatureMaps::Make(parts_).value();
    spec.key_scale = key_scale;
    return MakeSequence(spec);
  }

  static SequenceSpec Spec(const ModelShape& shape, std::vector<uint32_t> segments, uint64_t tail,
                           IndexSet indexes) {
    SequenceSpec spec;
    spec.shape = shape;
    spec.segment_tokens = std::move(segments);
    spec.tail_tokens = tail;
    spec.seed = TestSeed();
    spec.indexes = indexes;
    return spec;
  }

  StepResult Run(const TestRow& row, uint32_t layer) {
    StepResult step = RunStep(backend_.get(), layer, {&row, 1});
    EXPECT_TRUE(step.status.ok()) << step.status;
    return step;
  }

  // Checks each (query token, KV head) of a row against the oracle.
  void RunAndCheck(const TestRow& row, uint32_t layer) {
    SCOPED_TRACE(testing::Message() << Describe(row.policy) << "; " << row.sequence->spec);
    const StepResult step = Run(row, layer);
    const ModelShape& shape = row.sequence->spec.shape;
    ASSERT_EQ(step.plans.size(), size_t{row.query_tokens} * shape.kv_heads);
    uint64_t exact = 0, estimated = 0, dropped = 0;
    for (const Plan& plan : step.plans) {
      SCOPED_TRACE(testing::Message() << "token " << plan.query_token << ", head " << plan.kv_head);
      CheckUnit(row, layer, plan, step.rows[0]);
      const uint64_t left = Middle(row).size() - plan.positions[0].size();
      exact += plan.positions[0].size();
      (AnyCompleted(row, layer, plan.kv_head) ? estimated : dropped) += left;
      if (HasFailure()) return;
    }
    EXPECT_EQ(step.rows[0].stats.exact_tokens, exact);
    EXPECT_EQ(step.rows[0].stats.estimated_tokens, estimated);
    EXPECT_EQ(step.rows[0].stats.dropped_tokens, dropped);
    EXPECT_EQ(step.rows[0].stats.predicted_error_mean.has_value(), estimated + dropped == 0);
  }

  static oracle::Indices Middle(const TestRow& row) {
    return oracle::Range(row.sequence->spec.sink, row.sequence->view->tail_begin);
  }

  bool Completed(const TestRow& row, uint32_t layer, uint32_t query_head) const {
    const attention::Completion choice = row.policy.completion;
    if (choice != attention::Completion::kMaps) return choice == attention::Completion::kOn;
    return parts_.completed[layer * row.sequence->spec.shape.query_heads + query_head] != 0;
  }
  bool AnyCompleted(const TestRow& row, uint32_t layer, uint32_t kv_head) const {
    const uint32_t group = row.sequence->spec.shape.group();
    bool any = false;
    for (uint32_t h = 0; h < group; ++h) any |= Completed(row, layer, kv_head * group + h);
    return any;
  }

  void CheckUnit(const TestRow& row, uint32_t layer, const Plan& plan, const RowResult& result) {
    const SequenceSpec& spec = row.sequence->spec;
    const ModelShape& shape = spec.shape;
    const uint32_t group = shape.group();
    const size_t seen = row.seen(plan.query_token);
    const HeadData& head = row.sequence->head(layer, plan.kv_head);
    oracle::TokenInput input;
    const size_t first = size_t{plan.query_token} * shape.query_heads + plan.kv_head * group;
    input.queries = Rows(row.queries, shape.head_dim, first, group);
    input.keys = Rows(head.keys, shape.head_dim, 0, seen);
    input.values = Rows(head.values, shape.value_dim, 0, seen);
    input.scale = double{shape.softmax_scale};
    input.value_dim = shape.value_dim;
    const oracle::Indices middle = Middle(row);
    const oracle::Indices retrieved(plan.positions[0].begin(), plan.positions[0].end());
    CheckRetrieved(row, layer, plan, input, retrieved);
    // The answer is that of the plan's tokens and of the remainder.
    oracle::FeatureTokens tokens;
    const oracle::FeatureMap key_map =
        OracleMap(parts_, parts_.key, size_t{layer} * shape.kv_heads + plan.kv_head);
    for (const auto& key : input.keys) tokens.log_features.push_back(LogFeatures(key_map, key));
    tokens.values = input.values;
    const auto full = oracle::SummariseFeatures(tokens, middle, shape.head_dim, shape.value_dim);
    const auto rest = oracle::Subtract(full, tokens, retrieved, row.policy.epsilon);
    double least_left = 1;
    for (const double left : rest.left) {
      if (std::abs(left - row.policy.epsilon) < 0.1 * row.policy.epsilon)
        return;  // may go either way
      if (left > row.policy.epsilon) least_left = std::min(least_left, left);
    }
    std::vector<oracle::SoftmaxState> extra;
    for (uint32_t h = 0; h < group; ++h) {
      const uint32_t query_head = plan.kv_head * group + h;
      const oracle::FeatureMap map =
          OracleMap(parts_, parts_.query, size_t{layer} * shape.query_heads + query_head);
      extra.push_back(
          Completed(row, layer, query_head)
              ? oracle::EvaluateSummary(LogFeatures(map, input.queries[h]), rest.summary)
              : oracle::SoftmaxState(shape.value_dim));
    }
    oracle::Indices read = oracle::Union(retrieved, oracle::Range(0, spec.sink));
    read = oracle::Union(read, oracle::Range(row.sequence->view->tail_begin, seen));
    const auto answers = oracle::AttendTokens(input, oracle::ForEachHead(input, read), extra);
    const double tolerance = 3e-5 + 1e-6 / least_left;
    for (uint32_t h = 0; h < group; ++h) {
      const Answer answer = AnswerOf(result, first + h, shape.value_dim);
      EXPECT_NEAR(answer.lse, answers[h].lse, tolerance * (1 + std::abs(answers[h].lse)));
      EXPECT_LE(oracle::RelativeError(answer.out, answers[h].out), tolerance) << "head " << h;
    }
  }

  // Of the selectors whose plans no other test has.
  static void CheckRetrieved(const TestRow& row, uint32_t layer, const Plan& plan,
                             const oracle::TokenInput& input, const oracle::Indices& retrieved) {
    const Policy& policy = row.policy;
    const oracle::Indices middle = Middle(row);
    size_t count = std::min<size_t>(policy.budget.tokens, middle.size());
    if (policy.budget.is_share()) {
      count =
          std::min(middle.size(), oracle::RetrievalCount(policy.budget.share(), input.keys.size(),
                                                         policy.sink, policy.window));
    }
    if (policy.selector == Selector::kExhaustive) {
      const auto expected =
          oracle::RetrieveExhaustive(input.queries, input.keys, middle, count, input.scale);
      EXPECT_EQ(oracle::CheckTaken(expected, retrieved), "");
    }
    if (policy.selector == Selector::kClusters) {
      EXPECT_EQ(retrieved, TokensOfBestClusters(row, layer, plan.query_token, plan.kv_head, count));
    }
  }

  std::unique_ptr<Backend> backend_ = MakeCpuBackend({});
  FeatureMapParts parts_;
};

constexpr IndexSet kTokenOrder = {IndexKind::kBlocks16, IndexKind::kBlocks64, IndexKind::kLabels,
                                  IndexKind::kSummary};
constexpr IndexSet kClusterOrder = {IndexKind::kClusters, IndexKind::kSummary};

TEST_F(CompletionTest, PlansAndAnswersAreThoseOfTheDefinition) {
  const ModelShape shapes[] = {
      MakeShape(8, 2, 64, 64, DType::kBf16, 2),
      MakeShape(10, 2, 32, 48, DType::kFp32),  // a group of more than a quad
      MakeShape(3, 3, 80, 16, DType::kFp16),
      MakeLatentShape(16, 80, 64, DType::kBf16),
  };
  const Parameters kCases[] = {
      {},
      {{"completion", "on"}},
      {{"completion", "off"}},
      {{"budget", "10%"}, {"completion", "on"}},
      {{"budget", "1"}, {"completion", "on"}, {"epsilon", "0"}},
      {{"budget", "1200"}, {"completion", "on"}},
      {{"selector", "quest"}, {"budget", "100"}, {"completion", "on"}},
      {{"selector", "quest"}, {"budget", "5%"}, {"block", "16"}},
      {{"selector", "double-sparsity"}, {"budget", "70"}, {"completion", "on"}},
      {{"selector", "asynctls"}, {"budget", "40"}, {"blocks", "4"}, {"completion", "on"}},
      {{"selector", "snapkv"}, {"completion", "on"}},
  };
  for (const ModelShape& shape : shapes) {
    TestSequence sequence = Make(shape, {700, 520, 77}, 70, kTokenOrder);
    auto view = std::make_shared<SequenceView>(*sequence.view);
    auto keep = std::make_shared<KeepSet>();
    keep->ranked_tokens = 1250;
    keep->positions = std::make_shared<KeepSet::Positions>(
        size_t{shape.layers} * shape.kv_heads, std::vector<uint32_t>{4, 5, 99, 701, 1219, 1249});
    view->state.keep = keep;
    sequence.view = view;
    for (const Parameters& parameters : kCases) {
      const uint32_t layer = shape.layers - 1;
      const TestRow row = MakeRow(&sequence, Completion(parameters), sequence.spec.tokens() - 3, 3,
                                  false, shape.dtype, layer, TestSeed());
      RunAndCheck(row, layer);
      if (HasFailure()) return;
    }
  }
}

TEST_F(CompletionTest, WorksInClusterOrder) {
  const ModelShape shape = MakeShape(8, 2, 64, 64, DType::kBf16);
  TestSequence sequence = Make(shape, {900, 512}, 40, kClusterOrder);
  const Parameters kCases[] = {
      {},
      {{"completion", "on"}},
      {{"completion", "on"}, {"selector", "clusters"}},
      {{"completion", "on"}, {"selector", "clusters"}, {"budget", "300"}},
      {{"completion", "off"}, {"selector", "clusters"}, {"budget", "20%"}},
  };
  for (const Parameters& parameters : kCases) {
    RunAndCheck(MakeRow(&sequence, Completion(parameters), sequence.spec.tokens(), 1, true,
                        shape.dtype, 0, TestSeed()),
                0);
  }
}

// With maps that are the kernel itself, every split of the middle into what is retrieved and what
// is completed gives the dense answer: nothing counts twice and nothing is lost.
TEST_F(CompletionTest, TheKernelItselfGivesTheDenseAnswer) {
  constexpr float kQ0 = 3;
  const ModelShape shape = MakeShape(4, 2, 64, 32, DType::kFp32);
  Random random(TestSeed());
  SequenceSpec spec = Spec(shape, {600, 520}, 50, kTokenOrder);
  parts_ = KernelParts(shape, kQ0);
  spec.feature_maps = FeatureMaps::Make(parts_).value();
  std::vector<HeadData> heads;
  for (uint32_t h = 0; h < shape.kv_heads; ++h) {
    HeadData& data = heads.emplace_back();
    data.keys.assign(spec.tokens() * shape.head_dim, 0);
    for (uint64_t t = 0; t < spec.tokens(); ++t) {
      data.keys[t * shape.head_dim] = static_cast<float>(4 * random.Normal());
    }
    data.values = random.Normals(spec.tokens() * shape.value_dim);
  }
  TestSequence sequence = MakeSequenceOf(spec, std::move(heads));
  TestRow row = MakeRow(&sequence, *ParsePolicy("dense"), spec.tokens(), 1, true, DType::kFp32, 0,
                        TestSeed());
  for (uint32_t h = 0; h < shape.query_heads; ++h) row.queries[h * shape.head_dim] = kQ0;
  const StepResult dense = Run(row, 0);
  for (const char* budget : {"1", "10", "144", "500", "1000", "1115", "2%", "50%"}) {
    for (const char* selector : {"exhaustive", "quest", "double-sparsity"}) {
      SCOPED_TRACE(testing::Message() << budget << " " << selector << " seed " << TestSeed());
      row.policy = Completion({{"budget", budget}, {"selector", selector}, {"completion", "on"}});
      const StepResult step = Run(row, 0);
      for (uint32_t h = 0; h < shape.query_heads; ++h) {
        const Answer answer = AnswerOf(step.rows[0], h, shape.value_dim);
        const Answer expected = AnswerOf(dense.rows[0], h, shape.value_dim);
        EXPECT_NEAR(answer.lse, expected.lse, 1e-4);
        EXPECT_LE(oracle::RelativeError(answer.out, expected.out), 5e-4);
      }
      ASSERT_TRUE(step.rows[0].stats.covered_mass.has_value());
      EXPECT_EQ(*step.rows[0].stats.covered_mass, 1);
      EXPECT_LE(*step.rows[0].stats.exact_mass, 1);
      if (HasFailure()) return;
    }
  }
}

TEST_F(CompletionTest, ReadingEverythingIsDense) {
  const ModelShape shape = MakeShape(8, 2, 64, 64, DType::kBf16);
  TestSequence sequence = Make(shape, {700, 520}, 30, kTokenOrder);
  TestRow row = MakeRow(&sequence, *ParsePolicy("dense"), sequence.spec.tokens(), 1, true,
                        shape.dtype, 0, TestSeed());
  const StepResult dense = Run(row, 0);
  row.policy = Completion({{"budget", "1073741824"}, {"completion", "on"}});
  const StepResult all = Run(row, 0);
  EXPECT_EQ(all.rows[0].stats.estimated_tokens, 0u);
  EXPECT_EQ(all.rows[0].stats.predicted_error_mean, 0.0f);
  for (uint32_t h = 0; h < shape.query_heads; ++h) {
    const Answer answer = AnswerOf(all.rows[0], h, shape.value_dim);
    const Answer expected = AnswerOf(dense.rows[0], h, shape.value_dim);
    EXPECT_LE(oracle::RelativeError(answer.out, expected.out), 1e-5);
    EXPECT_NEAR(answer.lse, expected.lse, 1e-5 * (1 + std::abs(expected.lse)));
  }
}

TEST_F(CompletionTest, WithoutAMiddleThereIsNothingToEstimate) {
  const ModelShape shape = MakeShape(4, 2, 64, 64, DType::kFp32);
  TestSequence sequence = Make(shape, {}, 90, kTokenOrder);
  TestRow row = MakeRow(&sequence, Completion({{"completion", "on"}}), 90, 1, true, shape.dtype, 0,
                        TestSeed());
  const StepResult step = Run(row, 0);
  row.policy = *ParsePolicy("dense");
  const StepResult dense = Run(row, 0);
  EXPECT_EQ(step.rows[0].out, dense.rows[0].out);
  EXPECT_EQ(step.rows[0].stats.estimated_tokens, 0u);
}

TEST_F(CompletionTest, SegmentsAddUpToOne) {
  const ModelShape shape = MakeShape(8, 2, 64, 64, DType::kFp32);
  TestSequence one = Make(shape, {1500}, 40, kTokenOrder);
  TestSequence three = Make(shape, {600, 700, 200}, 40, kTokenOrder);
  const Policy policy = Completion({{"completion", "on"}, {"budget", "50"}});
  TestRow row = MakeRow(&one, policy, one.spec.tokens(), 1, true, shape.dtype, 0, TestSeed());
  const StepResult of_one = Run(row, 0);
  row.sequence = &three;
  const StepResult of_three = Run(row, 0);
  EXPECT_EQ(of_one.plans[0].positions, of_three.plans[0].positions);
  for (uint32_t h = 0; h < shape.query_heads; ++h) {
    const Answer a = AnswerOf(of_one.rows[0], h, 64), b = AnswerOf(of_three.rows[0], h, 64);
    EXPECT_NEAR(a.lse, b.lse, 2e-5 * (1 + std::abs(b.lse)));
    EXPECT_LE(oracle::RelativeError(a.out, b.out), 3e-5);
  }
}

// Keys so large that no exponential of a feature or a logit is a number.
TEST_F(CompletionTest, HugeLogitsStayNumbers) {
  const ModelShape shape = MakeShape(4, 2, 64, 64, DType::kFp32);
  for (const double key_scale : {1e3, 1e5, 1e9}) {
    SCOPED_TRACE(testing::Message() << key_scale << ", seed " << TestSeed());
    TestSequence sequence = Make(shape, {700}, 30, kTokenOrder, key_scale);
    for (const char* selector : {"exhaustive", "quest"}) {
      const TestRow row =
          MakeRow(&sequence, Completion({{"completion", "on"}, {"selector", selector}}),
                  sequence.spec.tokens(), 1, true, shape.dtype, 0, TestSeed());
      const StepResult step = Run(row, 0);
      for (const float x : step.rows[0].out) EXPECT_TRUE(std::isfinite(x));
      for (const float x : step.rows[0].lse) EXPECT_TRUE(std::isfinite(x));
    }
  }
}

// The exhaustive selector weighs all tokens: what heads that are not completed leave out is known.
TEST_F(CompletionTest, MassesAreTrueWhereNothingIsCompleted) {
  const ModelShape shape = MakeShape(4, 2, 64, 64, DType::kFp32);
  TestSequence sequence = Make(shape, {900}, 30, kTokenOrder);
  TestRow row = MakeRow(&sequence, Completion({{"completion", "off"}}), sequence.spec.tokens(), 1,
                        true, shape.dtype, 0, TestSeed());
  const StepResult step = Run(row, 0);
  row.policy = *ParsePolicy("dense");
  const StepResult dense = Run(row, 0);
  double covered = 0;
  for (uint32_t h = 0; h < 4; ++h) {
    covered += std::exp(double{step.rows[0].lse[h]} - dense.rows[0].lse[h]) / 4;
  }
  ASSERT_TRUE(step.rows[0].stats.covered_mass.has_value());
  EXPECT_NEAR(*step.rows[0].stats.covered_mass, covered, 1e-4);
  EXPECT_EQ(step.rows[0].stats.covered_mass, step.rows[0].stats.exact_mass);
}

}  // namespace
}  // namespace attnd::attention::test
