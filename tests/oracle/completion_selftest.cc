// SPDX-License-Identifier: Apache-2.0
//
// Goal: the oracles of the feature map and of what it completes are right. Method: cases small
// enough to compute by hand, stated beside the expectation; over seeded random features the summary
// form against the direct sums, in every order of building, merging and subtracting.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tests/oracle/attention.h"
#include "tests/oracle/completion.h"
#include "tests/oracle/draws.h"
#include "tests/oracle/feature_map.h"
#include "tests/oracle/token_attention.h"

namespace attnd::oracle {
namespace {

constexpr double kEpsilon = 1e-12;

void ExpectSame(const SoftmaxState& actual, const SoftmaxState& expected, double tolerance) {
  if (expected.Lse() == -kInfinity) {
    EXPECT_EQ(actual.Lse(), -kInfinity);
  } else {
    EXPECT_NEAR(actual.Lse(), expected.Lse(), tolerance);
  }
  ExpectNear(actual.Out(), expected.Out(), tolerance);
}

Indices Without(const Indices& all, const Indices& some) {
  Indices rest;
  for (const std::size_t j : all) {
    if (std::find(some.begin(), some.end(), j) == some.end()) rest.push_back(j);
  }
  return rest;
}

// ---- feature_map ----

TEST(FeatureMap, Gelu) {
  EXPECT_EQ(Gelu(0.0), 0.0);
  EXPECT_NEAR(Gelu(1.0), 0.8413447460685429, kClose);  // the normal distribution function at 1
  EXPECT_NEAR(Gelu(-2.0), -2.0 * 0.02275013194817921, kClose);
  EXPECT_EQ(Gelu(100.0), 100.0);
  EXPECT_EQ(Gelu(-100.0), 0.0);
}

TEST(FeatureMap, HandComputed) {
  FeatureMap map;
  map.stem = {{{1.0, 2.0}, {0.0, -1.0}}, {0.5, 0.0}};  // g0 = x0 + 2 x1 + 0.5, -x1
  map.inner = {{{1.0, 1.0}}, {-3.5}};
  map.outer = {{{2.0}, {-1.0}}, {10.0, 20.0}};
  map.output = {{{1.0, 0.0}, {1.0, 1.0}, {0.0, 0.0}}, {0.0, 1.0, -7.0}};
  // x = (1, 2): g0 = (5.5, -2), the inner sum 5.5 - 2 - 3.5 = 0, GELU 0, d = (10, 20).
  EXPECT_EQ(LogFeatures(map, {1.0, 2.0}), Vector({5.5, 4.5, -7.0}));  // the gate is closed
  map.alpha = 0.5;
  EXPECT_EQ(LogFeatures(map, {1.0, 2.0}), Vector({10.5, 19.5, -7.0}));
  map.inner.bias = {-2.5};  // GELU(1): d = (10 + 2 a, 20 - a)
  const double a = Gelu(1.0);
  ExpectNear(LogFeatures(map, {1.0, 2.0}), {10.5 + a, 19.5 + a / 2.0, -7.0}, kClose);
}

// ---- completion ----

TEST(Completion, CountsAndCosts) {
  EXPECT_EQ(RetrievalCount(0.01, 16384, 4, 16), 144u);
  EXPECT_EQ(RetrievalCount(0.01, 2000, 4, 16), 0u);
  EXPECT_EQ(RetrievalCount(0.01, 2001, 4, 16), 1u);
  EXPECT_EQ(RetrievalCount(0.01, 0, 4, 16), 0u);
  EXPECT_EQ(SummaryTokens(128, 128, 128), 65.0);  // the paper's example, appendix D.5
  EXPECT_EQ(SummaryTokens(64, 64, 64), 33.0);
}

// Two features, tokens of kernel values 1 2 + 3 1 = 5 and 1 4 + 3 2 = 10 for phi_q = (1, 3).
FeatureTokens TwoTokens() {
  return {{{std::log(2.0), std::log(1.0)}, {std::log(4.0), std::log(2.0)}}, {{6.0}, {0.0}}};
}

TEST(Completion, HandComputed) {
  const Vector log_query = {std::log(1.0), std::log(3.0)};
  const FeatureTokens tokens = TwoTokens();
  const RemainderSums sums = SumRemainder(log_query, tokens, {0, 1}, 1);
  EXPECT_NEAR(sums.denominator, 15.0, kClose);
  ExpectNear(sums.numerator, {30.0}, kClose);
  ExpectNear(RemainderState(sums).Out(), {2.0}, kClose);

  const FeatureSummary summary = SummariseFeatures(tokens, {0, 1}, 2, 1);
  ExpectNear(summary.m, {std::log(4.0), std::log(2.0)}, kClose);
  ExpectNear(summary.u, {1.5, 1.5}, kClose);
  ExpectNear(summary.t[0], {3.0}, kClose);
  const SoftmaxState state = EvaluateSummary(log_query, summary);
  EXPECT_NEAR(state.Lse(), std::log(15.0), kClose);
  ExpectNear(state.Out(), {2.0}, kClose);

  const SubtractedSummary one = Subtract(summary, tokens, {1}, kEpsilon);
  ExpectNear(one.left, {1.0 / 3.0, 1.0 / 3.0}, kClose);
  EXPECT_NEAR(EvaluateSummary(log_query, one.summary).Lse(), std::log(5.0), kClose);
  ExpectNear(EvaluateSummary(log_query, one.summary).Out(), {6.0}, kClose);
}

TEST(Completion, FeaturesBelowEpsilonAreDroppedWithTheirT) {
  // Feature 0 of token 1 is all but 1e-8 of the whole; feature 1 is shared alike.
  const FeatureTokens tokens = {{{std::log(1e-8), 0.0}, {0.0, 0.0}}, {{5.0}, {7.0}}};
  const FeatureSummary full = SummariseFeatures(tokens, {0, 1}, 2, 1);
  const SubtractedSummary kept = Subtract(full, tokens, {1}, 1e-9);
  EXPECT_GT(kept.summary.u[0], 0.0);
  const SubtractedSummary dropped = Subtract(full, tokens, {1}, 1e-7);
  EXPECT_NEAR(dropped.left[0], 1e-8, 1e-14);
  EXPECT_EQ(dropped.summary.u[0], 0.0);
  EXPECT_EQ(dropped.summary.t[0], Vector({0.0}));
  EXPECT_EQ(dropped.summary.tokens, 1u);
  // What is left is feature 1 alone.
  const SoftmaxState state = EvaluateSummary({0.0, std::log(3.0)}, dropped.summary);
  EXPECT_NEAR(state.Lse(), std::log(3.0), kClose);
  ExpectNear(state.Out(), {5.0}, kClose);
}

struct RandomCase {
  FeatureTokens tokens;
  Vector log_query;
  std::size_t count = 0;
};

RandomCase MakeCase(Draws& draws, double spread = 1.5) {
  RandomCase result;
  result.count = draws.Between(2, 60);
  for (std::size_t j = 0; j < result.count; ++j) {
    Vector features = draws.NormalVector(7);
    for (double& f : features) f *= spread;
    result.tokens.log_features.push_back(features);
  }
  result.tokens.values = draws.NormalRows(result.count, 4);
  result.log_query = draws.NormalVector(7);
  return result;
}

TEST(Completion, SummaryFormEqualsDirectForm) {
  ForSeeds(100, [](Draws& draws) {
    const RandomCase random = MakeCase(draws);
    const Indices middle = draws.Subset(random.count, 0.8);
    Indices retrieved;
    for (const std::size_t j : middle) {
      if (draws.Chance(0.3)) retrieved.push_back(j);
    }
    const FeatureSummary full = SummariseFeatures(random.tokens, middle, 7, 4);
    ExpectSame(EvaluateSummary(random.log_query, full),
               RemainderState(SumRemainder(random.log_query, random.tokens, middle, 4)), 1e-11);
    // What is subtracted may be the greater part of a sum.
    const SubtractedSummary rest = Subtract(full, random.tokens, retrieved, kEpsilon);
    ExpectSame(EvaluateSummary(random.log_query, rest.summary),
               RemainderState(
                   SumRemainder(random.log_query, random.tokens, Without(middle, retrieved), 4)),
               1e-8);
  });
}

TEST(Completion, OrderOfMergingDoesNotMatter) {
  ForSeeds(100, [](Draws& draws) {
    const RandomCase random = MakeCase(draws, 60.0);  // segments that drown each other
    std::vector<FeatureSummary> parts;
    std::size_t begin = 0;
    while (begin < random.count) {
      const std::size_t end = draws.Between(begin, random.count);  // some are empty
      parts.push_back(SummariseFeatures(random.tokens, Range(begin, end), 7, 4));
      begin = end;
    }
    FeatureSummary forward = SummariseFeatures(random.tokens, {}, 7, 4);
    for (const FeatureSummary& part : parts) forward = MergeSummaries(forward, part);
    FeatureSummary backward = parts.back();
    for (std::size_t i = parts.size() - 1; i > 0; --i) {
      backward = MergeSummaries(backward, parts[i - 1]);
    }
    const FeatureSummary whole = SummariseFeatures(random.tokens, Range(0, random.count), 7, 4);
    for (const FeatureSummary* merged : {&forward, &backward}) {
      EXPECT_EQ(merged->m, whole.m);
      EXPECT_EQ(merged->tokens, whole.tokens);
      ExpectNear(merged->u, whole.u, 1e-11);
      for (std::size_t f = 0; f < 7; ++f) ExpectNear(merged->t[f], whole.t[f], 1e-11);
      ExpectSame(EvaluateSummary(random.log_query, *merged),
                 EvaluateSummary(random.log_query, whole), 1e-10);
    }
  });
}

TEST(Completion, SubtractingEverythingLeavesTheEmptyState) {
  ForSeeds(100, [](Draws& draws) {
    const RandomCase random = MakeCase(draws, 4.0);
    const Indices all = Range(0, random.count);
    Indices shuffled = all;
    for (std::size_t i = shuffled.size() - 1; i > 0; --i) {
      std::swap(shuffled[i], shuffled[draws.Between(0, i)]);
    }
    const FeatureSummary full = MergeSummaries(
        SummariseFeatures(random.tokens, Range(0, random.count / 2), 7, 4),
        SummariseFeatures(random.tokens, Range(random.count / 2, random.count), 7, 4));
    for (const double epsilon : {0.0, kEpsilon, 1e-3}) {
      const SubtractedSummary rest = Subtract(full, random.tokens, shuffled, epsilon);
      EXPECT_EQ(rest.summary.tokens, 0u);
      EXPECT_EQ(rest.summary.u, Vector(7, 0.0));
      const SoftmaxState state = EvaluateSummary(random.log_query, rest.summary);
      EXPECT_EQ(state.Lse(), -kInfinity);
      EXPECT_EQ(state.Out(), Vector(4, 0.0));
      for (const double left : rest.left) EXPECT_NEAR(left, 0.0, 1e-13);
    }
    EXPECT_EQ(RemainderState(SumRemainder(random.log_query, random.tokens, {}, 4)).Lse(),
              -kInfinity);
  });
}

TEST(Completion, EmptyMiddleAndOneToken) {
  const FeatureSummary empty = SummariseFeatures({}, {}, 2, 1);
  EXPECT_EQ(EvaluateSummary({0.0, 0.0}, empty).Lse(), -kInfinity);
  EXPECT_EQ(EvaluateSummary({0.0, 0.0}, MergeSummaries(empty, empty)).Lse(), -kInfinity);
  EXPECT_EQ(EvaluateSummary({0.0, 0.0}, Subtract(empty, {}, {}, 0.0).summary).Lse(), -kInfinity);
  const FeatureSummary one = SummariseFeatures(TwoTokens(), {0}, 2, 1);
  EXPECT_EQ(one.u, Vector({1.0, 1.0}));
  const FeatureSummary merged = MergeSummaries(empty, one);
  EXPECT_EQ(merged.u, one.u);
  EXPECT_EQ(merged.m, one.m);
  EXPECT_NEAR(EvaluateSummary({0.0, 0.0}, one).Lse(), std::log(3.0), kClose);
}

TEST(Completion, EqualTokensAndHugeFeatures) {
  // Features far beyond a double's range: the summary form holds, only relative sizes count.
  FeatureTokens tokens;
  tokens.log_features.assign(10, Vector{2000.0, -3000.0});
  tokens.values.assign(10, Vector{1.0});
  tokens.values[3] = {11.0};
  const FeatureSummary full = SummariseFeatures(tokens, Range(0, 10), 2, 1);
  EXPECT_EQ(full.u, Vector({10.0, 10.0}));
  const SoftmaxState state = EvaluateSummary({0.0, 0.0}, full);
  EXPECT_NEAR(state.Lse(), 2000.0 + std::log(10.0), 1e-9);
  ExpectNear(state.Out(), {2.0}, kClose);
  const SubtractedSummary rest = Subtract(full, tokens, {3}, kEpsilon);
  EXPECT_NEAR(EvaluateSummary({0.0, 0.0}, rest.summary).Lse(), 2000.0 + std::log(9.0), 1e-9);
  ExpectNear(EvaluateSummary({0.0, 0.0}, rest.summary).Out(), {1.0}, kClose);
}

TEST(RetrieveExhaustive, HandComputed) {
  const std::vector<Vector> keys = {{9.0}, {0.0}, {std::log(4.0)}, {std::log(2.0)}, {9.0}};
  // Over positions 1..3: 1, 4, 2 over 7 and 4, 1, 2 over 7.
  const TopSet set = RetrieveExhaustive({{1.0}, {-1.0}}, keys, Range(1, 4), 1, 1.0);
  ExpectNear(set.scores, {2.5 / 7.0, 2.5 / 7.0, 2.0 / 7.0}, kClose);
  EXPECT_EQ(RetrieveExhaustive({{1.0}, {1.0}}, keys, Range(1, 4), 2, 1.0).taken, Indices({2, 3}));
  EXPECT_TRUE(RetrieveExhaustive({{1.0}}, keys, {}, 2, 1.0).taken.empty());
}

// phi_q(q) . phi_k(k) = exp(q . k) exactly for keys that are multiples of one vector each: then
// completion is attention itself.
TEST(Completion, AnExactKernelGivesDenseAttention) {
  ForSeeds(30, [](Draws& draws) {
    constexpr std::size_t kTokens = 40;
    // One feature: q constant, ln phi_k = q . k, ln phi_q = 0.
    TokenInput input;
    input.queries = {draws.NormalVector(5)};
    input.keys = draws.NormalRows(kTokens, 5);
    input.values = draws.NormalRows(kTokens, 3);
    input.scale = 0.8;
    input.value_dim = 3;
    FeatureTokens features{{}, input.values};
    for (const Vector& key : input.keys) {
      features.log_features.push_back({input.scale * Dot(input.queries[0], key)});
    }
    const Indices middle = Range(4, kTokens - 6);
    const Indices retrieved =
        RetrieveExhaustive(input.queries, input.keys, middle, 9, input.scale).taken;
    const FeatureSummary full = SummariseFeatures(features, middle, 1, 3);
    const SoftmaxState rest =
        EvaluateSummary({0.0}, Subtract(full, features, retrieved, kEpsilon).summary);
    const Indices read = Union(Union(Range(0, 4), Range(kTokens - 6, kTokens)), retrieved);
    const TokenAnswer answer = AttendTokens(input, {read}, {rest})[0];
    const HeadOutput dense = DenseHead(input.queries[0], input.keys, input.values, 0.8, 3);
    ExpectNear(answer.out, dense.out, 1e-9);
    EXPECT_NEAR(answer.lse, dense.lse, 1e-9);
    EXPECT_LT(answer.covered_mass, 1.0);
  });
}

}  // namespace
}  // namespace attnd::oracle
