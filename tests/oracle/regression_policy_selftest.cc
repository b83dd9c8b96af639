// SPDX-License-Identifier: Apache-2.0
//
// Goal: what the oracle of error-target over `regression` indexes makes of clusters (scores,
// estimates, errors, predictions) is right. Method: cases small enough to compute by hand, stated
// beside the expectation; what estimates must be whatever the data over seeded random segments. The
// selections are in regression_selection_selftest.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/oracle/attention.h"
#include "tests/oracle/draws.h"
#include "tests/oracle/joint_kmeans.h"
#include "tests/oracle/regression_policy.h"
#include "tests/oracle/regression_policy_cases.h"
#include "tests/oracle/selftest.h"

namespace attnd::oracle {
namespace {

// Two clusters of two tokens; numbers as in regression_selftest.cc's TwoPairs, but C_1 = (1, 0).
Regression TwoPairs() {
  Regression regression;
  regression.sizes = {2.0, 2.0};
  regression.centroids = {{0.0, 0.0}, {1.0, 0.0}};
  regression.mean_values = {{2.0}, {4.5}};
  regression.axes = {{0.0, 1.0}, {1.0, 0.0}};
  regression.variances = {{0.0, 1.0}, {4.0, 0.0}};
  regression.slope = {{1.0 / 6.0, 2.0 / 3.0}};
  regression.spread = {1.0 / 9.0, 1.0 / 36.0};
  return regression;
}

TEST(RegressionScores, HandComputed) {
  const RegressionInput input{{TwoPairs()}, 1.0, 1, {}};
  // q~ = (1/2, 1): d2 = 1 and 1/4 * 4.
  const HeadScores scores = Scores(input, {1.0, 0.5});
  ExpectNear(scores.spread, {1.0, 1.0}, kClose);
  ExpectNear(scores.lift, {0.5, 0.5}, kClose);
  ExpectNear(scores.damping, {1.0, 1.0}, kClose);
  ExpectNear(scores.log_mass, {std::log(2.0) + 0.5, 1.0 + std::log(2.0) + 0.5}, kClose);

  // Capped: q~ = (0, 4), d2 = 16 and 0. With half the scale 4 and 0.
  const HeadScores capped = Scores(input, {4.0, 0.0});
  ExpectNear(capped.spread, {16.0, 0.0}, kClose);
  ExpectNear(capped.lift, {4.0, 0.0}, kClose);
  ExpectNear(capped.damping, {0.5, 1.0}, kClose);
  ExpectNear(capped.log_mass, {std::log(2.0) + 4.0, 4.0 + std::log(2.0)}, kClose);
  ExpectNear(Scores({{TwoPairs()}, 0.5, 1, {}}, {4.0, 0.0}).spread, {4.0, 0.0}, kClose);

  // Squares 1/4 and 1 in two steps of 1/2: 1/4 is half a step and rounds up to 1/2.
  ExpectNear(Scores({{TwoPairs()}, 1.0, 1, 2.0}, {1.0, 0.5}).spread, {1.0, 2.0}, kClose);

  const HeadScores zero = Scores(input, {0.0, 0.0});
  EXPECT_EQ(zero.spread, Vector({0.0, 0.0}));
  EXPECT_EQ(zero.damping, Vector({1.0, 1.0}));
}

TEST(RegressionEstimate, HandComputed) {
  // As above: Z_0 = 2 exp(1/2), Z_1 = e Z_0. Cluster 0 moves values by 1 * 1 * 2/3, cluster 1 by
  // 1/2 * 4 * 1/6 = 1/3. The same segment again adds the same again.
  const RegressionInput input{{TwoPairs(), TwoPairs()}, 1.0, 1, {}};
  EXPECT_EQ(ClusterCount(input), 4u);
  const Vector query = {1.0, 0.5};
  const double mass = 2.0 * std::exp(0.5);
  const double e = std::exp(1.0);
  const auto shift = [&](const RegressionEstimate& estimate) {
    return std::exp(estimate.state.m) * estimate.shift[0];
  };

  const RegressionEstimate both = Estimate(input, query, {0, 1});
  EXPECT_NEAR(both.state.Lse(), std::log(mass * (1.0 + e)), kClose);
  EXPECT_NEAR(shift(both), mass * (2.0 / 3.0 + e / 3.0), 1e-11);
  EXPECT_NEAR(both.state.Out()[0], (2.0 + 4.5 * e + 2.0 / 3.0 + e / 3.0) / (1.0 + e), kClose);
  EXPECT_EQ(both.shift_norm, std::fabs(both.shift[0]));

  EXPECT_NEAR(shift(Estimate(input, query, {3})), mass * e / 3.0, 1e-11);
  EXPECT_NEAR(shift(Estimate(input, query, {0, 1, 2, 3})), 2.0 * shift(both), 1e-10);
  EXPECT_NEAR(Estimate(input, query, {0, 1, 2, 3}).state.Out()[0], both.state.Out()[0], kClose);

  // Damped: q = (4, 0), f_0 = 1/2: 4 * 1/2 * 1 * 2/3, and the scale once.
  const RegressionEstimate damped = Estimate(input, {4.0, 0.0}, {0});
  EXPECT_NEAR(damped.state.Out()[0], 2.0 + 4.0 / 3.0, kClose);
  const RegressionInput halved{{TwoPairs()}, 0.5, 1, {}};  // d2 = 4, f = 1
  EXPECT_NEAR(Estimate(halved, {4.0, 0.0}, {0}).state.Out()[0], 2.0 + 0.5 * 4.0 * 2.0 / 3.0,
              kClose);

  const RegressionEstimate nothing = Estimate(input, query, {});
  EXPECT_EQ(nothing.state.Lse(), -kInfinity);
  EXPECT_EQ(nothing.shift, Vector({0.0}));
  EXPECT_EQ(nothing.shift_norm, 0.0);
}

// A query of 4: d2 = 16, sqrt(16) = 4, sqrt(8) = 2.83. A token two deviations above the mean has
// exp(2 (4 - 2.83)) times the estimate, which is all mass, and so 1 - 1 / (1 + that) of it.
TEST(RegressionErrors, HiddenMassHandComputed) {
  RegressionInput input{{OnePair()}, 1.0, 1, {}};
  const SoftmaxState none(1);
  const RegressionEstimate all = Estimate(input, {4.0}, {0});
  const auto predicted = [&] {
    return PredictedError(input, {4.0}, none, {0}, all.state.Lse(), all.state.Out());
  };
  const double without = predicted();
  for (const double deviations : {2.0, 4.0, 600.0}) {
    input.hidden_deviations = {deviations};
    const double share = 1 - 1 / (1 + std::exp(deviations * (4 - std::sqrt(8.0))));
    EXPECT_NEAR(predicted(), std::sqrt(without * without + 0.1 * share * share), kClose);
  }
  // Below the cap nothing is hidden: d2 = 1.
  const RegressionEstimate one = Estimate(input, {1.0}, {0});
  EXPECT_NEAR(PredictedError(input, {1.0}, none, {0}, one.state.Lse(), one.state.Out()),
              std::sqrt(1.44 * 13.0 / 64.0 + std::pow(0.7 / 4.0, 2)), kClose);
}

TEST(RegressionErrors, HandComputed) {
  // q = 1: d2 = 1, l = 1/2, Z = 2 exp(1/2), H = 2/3 Z, o~ = 8/3. The weights' variance is
  // min(e - 1, s - 1) = 1. e^2 = (1/9 / 2 + 1/2 * 1/4 (4 + 64/9)) / (64/9) = 13/64.
  const RegressionInput input{{OnePair()}, 1.0, 1, {}};
  const SoftmaxState none(1);
  ExpectNear(FirstPassSquaredErrors(input, {1.0}, none), {13.0 / 64.0}, kClose);
  EXPECT_EQ(FirstPassSquaredErrors(input, {0.0}, none), Vector({0.0}));

  // All alone and estimated, the answer is o~: the shift adds (0.7 * 2/3 / (8/3))^2.
  const RegressionEstimate all = Estimate(input, {1.0}, {0});
  EXPECT_NEAR(PredictedError(input, {1.0}, none, {0}, all.state.Lse(), all.state.Out()),
              std::sqrt(1.44 * 13.0 / 64.0 + std::pow(0.7 / 4.0, 2)), kClose);
  EXPECT_EQ(PredictedError(input, {1.0}, none, {}, all.state.Lse(), all.state.Out()), 0.0);
  // A zone of as much mass and value -8/3 + 2: o~ = 1, p = 1/2.
  SoftmaxState zone(1);
  zone.Add(std::log(2.0) + 0.5, {-2.0 / 3.0});
  ExpectNear(FirstPassSquaredErrors(input, {1.0}, zone),
             {0.25 * (1.0 / 18.0 + 0.125 * (4.0 + 1.0))}, kClose);

  // Small d2 is not bounded by s - 1: q = 1/2, d2 = 1/4, l = 1/8.
  // H = 1/2 * 2/3, o~ = 7/3.
  const double values = std::expm1(0.25) / 18.0;
  const double mass = 0.5 / 64.0 * (4.0 + 49.0 / 9.0);
  ExpectNear(FirstPassSquaredErrors(input, {0.5}, none), {(values + mass) * 9.0 / 49.0}, kClose);
}

TEST(RegressionErrors, GuardHandComputed) {
  // A zone of the cluster's mass and value -8/3 makes o~ = 0. r^2 = (4 + 64/9) / 2 = 50/9.
  const RegressionInput input{{OnePair()}, 1.0, 1, {}};
  SoftmaxState zone(1);
  zone.Add(std::log(2.0) + 0.5, {-8.0 / 3.0});
  const double e2 = 0.25 * (1.0 / 18.0 + 0.125 * 4.0) / (1e-6 * 50.0 / 9.0);
  const Vector errors = FirstPassSquaredErrors(input, {1.0}, zone);
  EXPECT_NEAR(errors[0], e2, 1e-9 * e2);
  // Nothing but zeros: no error, and no division by zero.
  Regression zeros = OnePair();
  zeros.mean_values = {{0.0}};
  zeros.slope = {{0.0}};
  zeros.spread = {0.0};
  EXPECT_EQ(FirstPassSquaredErrors({{zeros}, 1.0, 1, {}}, {1.0}, SoftmaxState(1)), Vector({0.0}));
  zeros.spread = {1.0};
  EXPECT_TRUE(
      std::isfinite(FirstPassSquaredErrors({{zeros}, 1.0, 1, {}}, {1.0}, SoftmaxState(1))[0]));
}

TEST(RegressionEstimate, OfClustersOfOneTokenIsDense) {
  ForSeeds(10, [](Draws& draws) {
    const auto keys = draws.NormalRows(30, 4);
    const auto values = draws.NormalRows(30, 3);
    const RegressionInput input{{Regress(keys, values, Range(0, 30))}, 0.5, 3, {}};
    const Vector query = draws.NormalVector(4);
    const RegressionEstimate estimate = Estimate(input, query, Range(0, 30));
    const HeadOutput dense = DenseHead(query, keys, values, 0.5, 3);
    ExpectNear(estimate.state.Out(), dense.out, kClose);
    EXPECT_NEAR(estimate.state.Lse(), dense.lse, kClose);
    EXPECT_EQ(FirstPassSquaredErrors(input, query, SoftmaxState(3)), Vector(30, 0.0));
    EXPECT_EQ(PredictedError(input, query, SoftmaxState(3), Range(0, 30), dense.lse, dense.out),
              0.0);
  });
}

// Two segments of clusters whose members lie at +-h times a deviation along each of the segment's
// own axes, which have nothing to do with the channels; values are linear in keys, with a slope for
// each segment. The struct holds exact second moments and the slope without its ridge.
struct LinearCase {
  RegressionInput input;
  std::vector<Vector> keys;
  std::vector<Vector> values;
};

LinearCase MakeLinearCase(uint64_t seed, double h) {
  Draws draws(seed);
  constexpr std::size_t kDim = 4;
  LinearCase result;
  result.input.scale = 0.5;
  result.input.value_dim = 3;
  for (int s = 0; s < 2; ++s) {
    const auto any = draws.NormalRows(20, kDim);
    Regression segment;
    segment.axes = Regress(any, any, Indices(20, 0)).axes;
    segment.slope = draws.NormalRows(3, kDim);
    for (int i = 0; i < 6; ++i) {
      const Vector centroid = draws.NormalVector(kDim);
      const Vector mean_value = draws.NormalVector(3);
      Vector variance;
      for (std::size_t c = 0; c < kDim; ++c) {
        const double y = h * (0.5 + draws.Uniform());
        variance.push_back(y * y / kDim);  // two of 2 kDim members have it
        for (const double sign : {1.0, -1.0}) {
          Vector key = centroid;
          Vector value = mean_value;
          for (std::size_t d = 0; d < kDim; ++d) key[d] += sign * y * segment.axes[d][c];
          for (std::size_t e = 0; e < 3; ++e) value[e] += sign * y * segment.slope[e][c];
          result.keys.push_back(key);
          result.values.push_back(value);
        }
      }
      segment.sizes.push_back(2.0 * kDim);
      segment.centroids.push_back(centroid);
      segment.mean_values.push_back(mean_value);
      segment.variances.push_back(variance);
      segment.spread.push_back(0.0);
    }
    result.input.segments.push_back(segment);
  }
  return result;
}

// Errors of estimating everything for deviations of h: of the output, of the output without the
// shift, of the log mass.
Vector LinearErrors(uint64_t seed, const Vector& query, double h) {
  LinearCase linear = MakeLinearCase(seed, h);
  const Indices all = Range(0, ClusterCount(linear.input));
  const HeadOutput dense = DenseHead(query, linear.keys, linear.values, linear.input.scale, 3);
  const auto error = [&](const RegressionEstimate& estimate) {
    Vector difference = estimate.state.Out();
    for (std::size_t e = 0; e < 3; ++e) difference[e] -= dense.out[e];
    return std::sqrt(SquaredNorm(difference));
  };
  const RegressionEstimate estimate = Estimate(linear.input, query, all);
  for (Regression& segment : linear.input.segments) {
    for (Vector& row : segment.slope) row.assign(row.size(), 0.0);
  }
  return {error(estimate), error(Estimate(linear.input, query, all)),
          std::fabs(estimate.state.Lse() - dense.lse)};
}

TEST(RegressionEstimate, OfExactSecondMomentsIsRightToTheThirdOrder) {
  // Summed over cases: in a single one the leading term may happen to be small.
  Vector wide(3, 0.0);
  Vector narrow(3, 0.0);
  ForSeeds(30, [&](Draws& draws) {
    const uint64_t seed = draws.Between(0, 1000000);
    const Vector query = draws.NormalVector(4);
    const Vector more = LinearErrors(seed, query, 0.1);
    const Vector less = LinearErrors(seed, query, 0.05);
    for (std::size_t k = 0; k < 3; ++k) {
      wide[k] += more[k];
      narrow[k] += less[k];
    }
  });
  // Half as wide: a sixteenth of the error, for odd orders vanish here; without the shift a
  // quarter.
  EXPECT_NEAR(wide[0] / narrow[0], 16.0, 1.0);
  EXPECT_NEAR(wide[1] / narrow[1], 4.0, 0.5);
  EXPECT_NEAR(wide[2] / narrow[2], 16.0, 1.0);
  EXPECT_LT(wide[0], 0.01 * wide[1]);
}

TEST(RegressionPolicy, EstimatesOfPartsAddUp) {
  ForSeeds(10, [](Draws& draws) {
    const RegressionCase random = MakeRegressionCase(draws);
    const std::size_t count = ClusterCount(random.input);
    const Indices set = draws.Subset(count, 0.5);
    Indices rest;
    for (std::size_t i = 0; i < count; ++i) {
      if (!std::binary_search(set.begin(), set.end(), i)) rest.push_back(i);
    }
    for (const Vector& query : random.queries) {
      const RegressionEstimate all = Estimate(random.input, query, Range(0, count));
      SoftmaxState sum = Estimate(random.input, query, set).state;
      sum.Merge(Estimate(random.input, query, rest).state);
      EXPECT_NEAR(sum.Lse(), all.state.Lse(), kClose);
      ExpectNear(sum.Out(), all.state.Out(), 1e-11);
    }
  });
}

TEST(RegressionPolicy, PredictionsHaveTheErrorsOfTheEstimatedAndTheShift) {
  ForSeeds(10, [](Draws& draws) {
    const RegressionCase random = MakeRegressionCase(draws);
    const Indices set = draws.Subset(ClusterCount(random.input), 0.7);
    for (std::size_t h = 0; h < random.queries.size(); ++h) {
      const RegressionEstimate estimate = Estimate(random.input, random.queries[h], set);
      SoftmaxState answer = random.zones[h];
      answer.Merge(estimate.state);
      const double norm = std::sqrt(SquaredNorm(answer.Out()));
      const double shift = 0.7 * std::sqrt(estimate.variance) * estimate.shift_norm *
                           std::exp(estimate.state.m - answer.Lse()) / norm;
      const Vector errors = SquaredErrors(random.input, random.queries[h], random.zones[h],
                                          answer.Lse(), answer.Out());
      const double predicted = PredictedError(random.input, random.queries[h], random.zones[h], set,
                                              answer.Lse(), answer.Out());
      EXPECT_NEAR(predicted * predicted, 1.44 * Sum(errors, set) + shift * shift,
                  1e-9 * predicted * predicted);
      // Twice the answer's length, or twice its mass, is half the relative shift and less error.
      Vector longer = answer.Out();
      for (double& x : longer) x *= 2.0;
      EXPECT_LT(PredictedError(random.input, random.queries[h], random.zones[h], set, answer.Lse(),
                               longer),
                predicted);
      EXPECT_NEAR(PredictedError(random.input, random.queries[h], random.zones[h], set,
                                 answer.Lse() + std::log(2.0), answer.Out()),
                  predicted / 2.0, 1e-9 * predicted);
    }
  });
}

TEST(RegressionPolicy, DegenerateInputIsFinite) {
  const std::vector<Vector> equal(40, Vector({0.1, 0.2}));
  const RegressionInput input{{Regress(equal, equal, ClusterJointly(equal, equal).assignment),
                               Regress({{1.0, 2.0}}, {{0.0, 0.0}}, {0})},
                              1.0,
                              2,
                              {}};
  for (const Vector& query : {Vector({0.0, 0.0}), Vector({1e4, -1e4}), Vector({1e-200, 0.0})}) {
    const RegressionEstimate all = Estimate(input, query, {0, 1});
    EXPECT_TRUE(std::isfinite(all.state.Lse()));
    EXPECT_EQ(all.shift, Vector({0.0, 0.0}));
    EXPECT_EQ(FirstPassSquaredErrors(input, query, SoftmaxState(2)), Vector({0.0, 0.0}));
    const auto selection = Select(input, {query}, {SoftmaxState(2)}, 0.1, 0.0);
    EXPECT_TRUE(selection.selection.plan.exact.empty());
  }
}

}  // namespace
}  // namespace attnd::oracle
