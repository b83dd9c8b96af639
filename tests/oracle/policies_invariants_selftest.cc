// SPDX-License-Identifier: Apache-2.0
//
// Goal: the oracle of the policies is right whatever the data. Method: identities (a policy that
// may leave nothing out is dense attention) over seeded random inputs, the seed a test's parameter.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/oracle/attention.h"
#include "tests/oracle/kmeans.h"
#include "tests/oracle/policies.h"
#include "tests/oracle/selftest.h"

namespace attnd::oracle {
namespace {

struct RandomCase {
  PolicyInput input;
  std::vector<Vector> keys;  // all tokens
  std::vector<Vector> values;
};

RandomCase MakeRandomCase(uint64_t seed) {
  Random random(seed);
  constexpr std::size_t kHeadDim = 6;
  constexpr std::size_t kValueDim = 5;
  RandomCase result;
  PolicyInput& input = result.input;
  input.scale = 1.0 / std::sqrt(static_cast<double>(kHeadDim));
  input.value_dim = kValueDim;
  input.queries = random.NormalRows(3, kHeadDim);
  for (Vector& query : input.queries) {
    for (double& element : query) element *= 3.0;
  }
  input.zone_keys = random.NormalRows(9, kHeadDim);
  input.zone_values = random.NormalRows(9, kValueDim);
  result.keys = input.zone_keys;
  result.values = input.zone_values;
  for (const std::size_t tokens : {150u, 83u}) {
    std::vector<Vector> keys = random.NormalRows(tokens, kHeadDim);
    const std::vector<Vector> values = random.NormalRows(tokens, kValueDim);
    input.segments.push_back(ClustersOf(BuildIndex(keys, values, {8, 10}), keys, values));
    result.keys.insert(result.keys.end(), keys.begin(), keys.end());
    result.values.insert(result.values.end(), values.begin(), values.end());
  }
  return result;
}

std::size_t ClusterCount(const PolicyInput& input) {
  std::size_t count = 0;
  for (const auto& segment : input.segments) count += segment.size();
  return count;
}

void ExpectDense(const RandomCase& random, const Answer& answer) {
  ASSERT_EQ(answer.heads.size(), random.input.queries.size());
  for (std::size_t h = 0; h < answer.heads.size(); ++h) {
    const HeadOutput dense = DenseHead(random.input.queries[h], random.keys, random.values,
                                       random.input.scale, random.input.value_dim);
    ExpectNear(answer.heads[h].out, dense.out, 1e-11);
    EXPECT_NEAR(answer.heads[h].lse, dense.lse, 1e-11);
    EXPECT_NEAR(answer.heads[h].covered_mass, 1.0, kClose);
    EXPECT_NEAR(answer.heads[h].exact_mass, 1.0, kClose);
    EXPECT_EQ(answer.heads[h].predicted_error, 0.0);
  }
}

class RandomPolicies : public testing::TestWithParam<uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, RandomPolicies, testing::Range<uint64_t>(0, 10));

TEST_P(RandomPolicies, WhateverLeavesNothingOutIsDense) {
  const RandomCase random = MakeRandomCase(GetParam());
  ExpectDense(random, Attend(random.input, DensePolicy()));
  ExpectDense(random, Attend(random.input, DoublePPolicy(1.0, 1.0)));
  ExpectDense(random, Attend(random.input, ErrorTargetPolicy(0.0)));
  ExpectDense(random, Attend(random.input, ErrorTargetPolicy(0.2, 1.0)));
  ExpectDense(random, Attend(random.input, ClustersTopKPolicy(1.0, 0.0)));
}

TEST_P(RandomPolicies, StreamingReadsTheZones) {
  RandomCase random = MakeRandomCase(GetParam());
  const Answer answer = Attend(random.input, StreamingPolicy());
  EXPECT_EQ(answer.dropped_tokens, 150u + 83u);
  for (std::size_t h = 0; h < answer.heads.size(); ++h) {
    const HeadOutput zone =
        DenseHead(random.input.queries[h], random.input.zone_keys, random.input.zone_values,
                  random.input.scale, random.input.value_dim);
    ExpectNear(answer.heads[h].out, zone.out, kClose);
    EXPECT_NEAR(answer.heads[h].lse, zone.lse, kClose);
    EXPECT_EQ(answer.heads[h].exact_mass, answer.heads[h].covered_mass);
    EXPECT_LT(answer.heads[h].covered_mass, 1.0);
  }
}

TEST_P(RandomPolicies, ClustersOfOneTokenAreEstimatedExactly) {
  RandomCase random = MakeRandomCase(GetParam());
  random.input.segments.assign(1, {});
  const std::size_t zone = random.input.zone_keys.size();
  for (std::size_t j = zone; j < random.keys.size(); ++j) {
    random.input.segments[0].push_back({1.0,
                                        random.keys[j],
                                        random.values[j],
                                        Vector(6, 0.0),
                                        0.0,
                                        {random.keys[j]},
                                        {random.values[j]}});
  }
  const Answer answer = Attend(random.input, ErrorTargetPolicy(0.1));
  EXPECT_EQ(answer.exact_tokens, 3u);  // the floor: ceil(1% of 233)
  for (std::size_t h = 0; h < answer.heads.size(); ++h) {
    const HeadOutput dense = DenseHead(random.input.queries[h], random.keys, random.values,
                                       random.input.scale, random.input.value_dim);
    ExpectNear(answer.heads[h].out, dense.out, 1e-11);
    EXPECT_NEAR(answer.heads[h].lse, dense.lse, 1e-11);
  }
}

TEST_P(RandomPolicies, NoVarianceMeansNoError) {
  RandomCase random = MakeRandomCase(GetParam());
  for (auto& segment : random.input.segments) {
    for (Cluster& cluster : segment) cluster.variance.assign(cluster.variance.size(), 0.0);
  }
  const std::size_t count = ClusterCount(random.input);
  for (const Vector& query : random.input.queries) {
    EXPECT_EQ(FirstPassErrors(random.input, query, MassEstimate::kSecondOrder), Vector(count, 0.0));
    EXPECT_EQ(LogMass(random.input, query, MassEstimate::kSecondOrder),
              LogMass(random.input, query, MassEstimate::kFirstOrder));
  }
  EXPECT_EQ(Select(random.input, ErrorTargetPolicy(1e-9)).plan.exact.size(),
            FractionCount(0.01, count));
}

TEST_P(RandomPolicies, TheErrorBudgetIsTheShortestPrefixWithinTolerance) {
  const RandomCase random = MakeRandomCase(GetParam());
  for (const double tolerance : {0.02, 0.1, 0.3}) {
    const Selection selection = Select(random.input, ErrorTargetPolicy(tolerance, 0.0));
    const Cut& cut = selection.cuts[0];
    EXPECT_EQ(selection.plan.exact.size(), cut.taken);
    double remainder = 0.0;
    for (const std::size_t i : selection.plan.estimated) remainder += cut.scores[i];
    EXPECT_LE(remainder, tolerance * tolerance * (1.0 + kClose));
    if (cut.taken > 0) {
      EXPECT_GT(remainder + cut.scores[cut.order[cut.taken - 1]], tolerance * tolerance);
    }
    EXPECT_EQ(CheckPlan(selection, selection.plan), "");
    // Scores: e_i^2 averaged over the heads.
    Vector mean(cut.scores.size(), 0.0);
    for (const Vector& query : random.input.queries) {
      const Vector errors = FirstPassErrors(random.input, query, MassEstimate::kSecondOrder);
      for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += errors[i] * errors[i] / 3.0;
    }
    ExpectNear(cut.scores, mean, kClose);
  }
}

TEST_P(RandomPolicies, EveryPresetAcceptsItsOwnPlan) {
  const RandomCase random = MakeRandomCase(GetParam());
  for (Policy policy : {DensePolicy(), StreamingPolicy(), ClustersTopKPolicy(), DoublePPolicy(),
                        DoublePPolicy(0.99, 0.9), ErrorTargetPolicy(), ErrorTargetPolicy(0.05)}) {
    for (const MassEstimate mass : {MassEstimate::kFirstOrder, MassEstimate::kSecondOrder}) {
      policy.mass = mass;
      const Selection selection = Select(random.input, policy);
      EXPECT_EQ(CheckPlan(selection, selection.plan), "");
      const Answer answer = Evaluate(random.input, mass, selection.plan);
      EXPECT_EQ(answer.exact_tokens + answer.estimated_tokens + answer.dropped_tokens, 150u + 83u);
      for (const HeadAnswer& head : answer.heads) {
        EXPECT_LE(head.exact_mass, head.covered_mass + kClose);
        EXPECT_LE(head.covered_mass, 1.0 + kClose);
      }
    }
  }
}

TEST_P(RandomPolicies, OrderOfTheZoneDoesNotMatter) {
  RandomCase random = MakeRandomCase(GetParam());
  const Answer before = Attend(random.input, ErrorTargetPolicy(0.1));
  std::reverse(random.input.zone_keys.begin(), random.input.zone_keys.end());
  std::reverse(random.input.zone_values.begin(), random.input.zone_values.end());
  const Answer after = Attend(random.input, ErrorTargetPolicy(0.1));
  for (std::size_t h = 0; h < before.heads.size(); ++h) {
    ExpectNear(after.heads[h].out, before.heads[h].out, kClose);
    EXPECT_NEAR(after.heads[h].predicted_error, before.heads[h].predicted_error, kClose);
  }
}

}  // namespace
}  // namespace attnd::oracle
