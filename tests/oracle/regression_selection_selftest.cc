// SPDX-License-Identifier: Apache-2.0
//
// Goal: what the oracle of error-target over `regression` indexes selects is right, and its margins
// say which other plans are. Method: cases small enough to compute by hand, stated beside the
// expectation; what selections must be whatever the data over seeded random segments.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/oracle/draws.h"
#include "tests/oracle/regression_policy.h"
#include "tests/oracle/regression_policy_cases.h"
#include "tests/oracle/selftest.h"

namespace attnd::oracle {
namespace {

// A cluster of one token of this logit for the query {1}.
void AddToken(Regression& regression, double logit, double value) {
  regression.sizes.push_back(1.0);
  regression.centroids.push_back({logit});
  regression.mean_values.push_back({value});
  regression.variances.push_back({0.0});
  regression.spread.push_back(0.0);
}

TEST(RegressionSelection, HandComputed) {
  // The pair twice, the second as half of a cluster of four with the same mass (its centroid at
  // -ln 2): each has half of Z; o~ = 8/3. e_0^2 = 13/64 / 4; of the second min(e - 1, 3) t / 4
  // takes the place of t / 2.
  Regression segment = OnePair();
  segment.sizes.push_back(4.0);
  segment.centroids.push_back({-std::log(2.0)});
  segment.mean_values.push_back({2.0});
  segment.variances.push_back({1.0});
  segment.spread.push_back(1.0 / 9.0);
  const RegressionInput input{{segment}, 1.0, 1, {}};
  const std::vector<Vector> queries = {{1.0}};
  const std::vector<SoftmaxState> zones(1, SoftmaxState(1));
  const double first = 13.0 / 256.0;
  const double second = (std::expm1(1.0) / 36.0 + 12.5 / 9.0) * 9.0 / 256.0;
  const auto exact = [&](double tolerance, double floor) {
    return Select(input, queries, zones, tolerance, floor).selection.plan.exact;
  };
  ExpectNear(Select(input, queries, zones, 0.1, 0.0).errors, {first, second}, kClose);
  // By token the first is the worse: the second alone may be left out, then both.
  EXPECT_EQ(exact(std::sqrt(second) * 0.999, 0.0), Indices({0, 1}));
  EXPECT_EQ(exact(std::sqrt(second) * 1.001, 0.0), Indices({0}));
  EXPECT_EQ(exact(std::sqrt(first + second) * 0.999, 0.0), Indices({0}));
  EXPECT_EQ(exact(std::sqrt(first + second) * 1.001, 0.0), Indices());
  EXPECT_EQ(exact(0.0, 0.0), Indices({0, 1}));
  EXPECT_EQ(exact(kInfinity, 0.0), Indices());
  // The floor: shares of 1/2 each by mass, and the first has fewer tokens.
  ExpectNear(Select(input, queries, zones, kInfinity, 0.01).optimistic, {0.5, 0.5}, kClose);
  EXPECT_EQ(exact(kInfinity, 0.01), Indices({0}));
  EXPECT_EQ(exact(kInfinity, 0.51), Indices({0, 1}));
  // Two heads, one of them blind: half the errors.
  const std::vector<SoftmaxState> two(2, SoftmaxState(1));
  ExpectNear(Select(input, {{1.0}, {0.0}}, two, 0.1, 0.0).errors, {first / 2, second / 2}, kClose);
}

TEST(RegressionSelection, MarginsSayWhatMayDiffer) {
  // The clusters above with t_1 = 6 / (e - 1), so that E_1 = (3/2 + 12.5/9) 9/256 = 26/256 is twice
  // E_0 = 13/256: a tie by token, but for a rounding of t_1. With a budget of 20/256 both are read
  // if the first ranks first (26 is too much to leave), and only the second if that does.
  Regression segment = OnePair();
  segment.sizes.push_back(4.0);
  segment.centroids.push_back({-std::log(2.0)});
  segment.mean_values.push_back({2.0});
  segment.variances.push_back({1.0});
  segment.spread.push_back(0.0);
  const auto select = [&](double rounding, double margin) {
    segment.spread[1] = 6.0 / std::expm1(1.0) * (1.0 + rounding);
    return Select({{segment}, 1.0, 1, {}}, {{1.0}}, {SoftmaxState(1)}, std::sqrt(20.0 / 256.0), 0.0,
                  margin)
        .selection;
  };
  const Plan both{{0, 1}, {}};
  const Plan second{{1}, {0}};
  EXPECT_EQ(select(-1e-5, 1e-4).plan.exact, Indices({0, 1}));
  EXPECT_EQ(select(1e-5, 1e-4).plan.exact, Indices({1}));
  for (const double rounding : {-1e-5, 1e-5}) {
    EXPECT_EQ(CheckPlan(select(rounding, 1e-4), both), "");
    EXPECT_EQ(CheckPlan(select(rounding, 1e-4), second), "");
    EXPECT_EQ(CheckPlan(select(rounding, 1e-4), {{0}, {1}}), "cluster 1 must be exact and is not");
    EXPECT_EQ(CheckPlan(select(rounding, 1e-4), {{1}, {}}), "cluster 0 is dropped and may not be");
  }
  EXPECT_EQ(CheckPlan(select(-1e-5, 1e-7), second), "cluster 0 must be exact and is not");
  EXPECT_EQ(CheckPlan(select(1e-5, 1e-7), both), "cluster 0 is exact and may not be");
}

TEST(RegressionSelection, FloorTakesDeviationsForChances) {
  // Optimistic log masses for q = 3: ln 2 + 2 sqrt(9) = 6.69 of the pair, capped nowhere, so that
  // by token it is 6 above a token of logit 0 and 0.9 below one of logit 6.9.
  Regression segment = OnePair();
  AddToken(segment, 2.2, 1.0);
  AddToken(segment, 2.3, 1.0);
  const RegressionInput input{{segment}, 1.0, 1, {}};
  const std::vector<SoftmaxState> zones(1, SoftmaxState(1));
  const auto selection = Select(input, {{3.0}}, zones, kInfinity, 0.34);  // ceil(1.02) = 2
  EXPECT_EQ(selection.selection.plan.exact, Indices({1, 2}));
  const double pair = 2.0 * std::exp(6.0);
  const double sum = pair + std::exp(6.6) + std::exp(6.9);
  ExpectNear(selection.optimistic, {pair / sum, std::exp(6.6) / sum, std::exp(6.9) / sum}, kClose);
  // Of equals the lower: two tokens of one logit.
  segment.centroids[1] = segment.centroids[2];
  EXPECT_EQ(Select({{segment}, 1.0, 1, {}}, {{3.0}}, zones, kInfinity, 0.01).selection.plan.exact,
            Indices({1}));
}

TEST(RegressionSelection, AnEmptyMiddleIsLegal) {
  const RegressionInput input{{}, 1.0, 2, {}};
  const auto selection = Select(input, {{1.0}}, {SoftmaxState(2)}, 0.1, 0.01);
  EXPECT_TRUE(selection.selection.plan.exact.empty());
  EXPECT_TRUE(selection.selection.plan.estimated.empty());
  EXPECT_EQ(CheckPlan(selection.selection, {}), "");
}

TEST(RegressionSelection, BudgetIsTheShortestPrefixAndTheFloorCounts) {
  ForSeeds(20, [](Draws& draws) {
    const RegressionCase random = MakeRegressionCase(draws);
    const std::size_t count = ClusterCount(random.input);
    Vector sizes;
    for (const Regression& segment : random.input.segments) {
      sizes.insert(sizes.end(), segment.sizes.begin(), segment.sizes.end());
    }
    for (const double tolerance : {0.01, 0.05, 0.2}) {
      const ErrorTargetSelection budget =
          Select(random.input, random.queries, random.zones, tolerance, 0.0);
      const Plan& plan = budget.selection.plan;
      EXPECT_LE(Sum(budget.errors, plan.estimated), tolerance * tolerance * (1.0 + kClose));
      // The last of the prefix goes back: too much is left. It is the exact one of least E / s, and
      // no estimated one has more.
      double least = kInfinity;
      std::size_t last = 0;
      for (const std::size_t i : plan.exact) {
        if (budget.errors[i] / sizes[i] <= least) {
          least = budget.errors[i] / sizes[i];
          last = i;
        }
      }
      for (const std::size_t i : plan.estimated) {
        EXPECT_LE(budget.errors[i] / sizes[i], least);
      }
      if (!plan.exact.empty()) {
        EXPECT_GT(Sum(budget.errors, plan.estimated) + budget.errors[last], tolerance * tolerance);
      }
      EXPECT_EQ(CheckPlan(budget.selection, plan), "");
    }
    for (const double floor : {0.01, 0.1, 0.5, 1.0}) {
      const ErrorTargetSelection top =
          Select(random.input, random.queries, random.zones, kInfinity, floor);
      EXPECT_EQ(top.selection.plan.exact.size(), FractionCount(floor, count));
      double sum = 0.0;
      for (const double share : top.optimistic) sum += share;
      EXPECT_NEAR(sum, 1.0, kClose);
      // Together with a tolerance it is the union.
      const auto budget = Select(random.input, random.queries, random.zones, 0.05, 0.0);
      const auto both = Select(random.input, random.queries, random.zones, 0.05, floor);
      EXPECT_EQ(both.selection.plan.exact,
                Union(budget.selection.plan.exact, top.selection.plan.exact));
    }
    EXPECT_EQ(
        Select(random.input, random.queries, random.zones, 0.0, 0.0).selection.plan.exact.size(),
        count);
  });
}

TEST(RegressionSelection, PlansOfNumbersWithinTheMarginAreAccepted) {
  ForSeeds(20, [](Draws& draws) {
    const RegressionCase random = MakeRegressionCase(draws);
    constexpr double kMargin = 0.1;
    for (const double tolerance : {0.02, 0.05, 0.1}) {
      const Selection selection =
          Select(random.input, random.queries, random.zones, tolerance, 0.02, kMargin).selection;
      // Spreads off by a twentieth move E_i by no more, and nothing else.
      RegressionInput other = random.input;
      for (Regression& segment : other.segments) {
        for (double& t : segment.spread) t *= 1.0 + kMargin * (0.9 * draws.Uniform() - 0.45);
      }
      const Plan plan = Select(other, random.queries, random.zones, tolerance, 0.02).selection.plan;
      EXPECT_EQ(CheckPlan(selection, plan), "");
    }
  });
}

}  // namespace
}  // namespace attnd::oracle
