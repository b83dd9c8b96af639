// SPDX-License-Identifier: Apache-2.0
//
// Goal: the oracle of the policies is right. Method: cases small enough to compute by hand, stated
// beside the expectation. What holds whatever the data is in policies_invariants_selftest.cc.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/oracle/policies.h"
#include "tests/oracle/selftest.h"

namespace attnd::oracle {
namespace {

// A cluster of one token, so that its estimate is exact: mass exp(key) for the query {1}.
Cluster OneToken(double key, double value) {
  return {1.0, {key}, {value}, {0.0}, 0.0, {{key}}, {{value}}};
}

// Clusters of masses 0.5, 0.25, 0.15, 0.1 in the order 2, 0, 3, 1, over two segments; no zone.
PolicyInput FourMasses() {
  PolicyInput input;
  input.queries = {{1.0}};
  input.value_dim = 1;
  input.segments = {{OneToken(std::log(0.15), 1.0), OneToken(std::log(0.5), 2.0)},
                    {OneToken(std::log(0.1), 3.0), OneToken(std::log(0.25), 4.0)}};
  return input;
}

TEST(Policies, FractionsRoundUpWithinOneAndAll) {
  EXPECT_EQ(FractionCount(0.018, 500), 9u);
  EXPECT_EQ(FractionCount(0.018, 501), 10u);
  EXPECT_EQ(FractionCount(0.07, 100), 7u);  // 0.07 * 100 is above 7 in double
  EXPECT_EQ(FractionCount(0.018, 1), 1u);
  EXPECT_EQ(FractionCount(2.0, 10), 10u);
  EXPECT_EQ(FractionCount(0.0, 10), 0u);
  EXPECT_EQ(FractionCount(0.5, 0), 0u);
}

TEST(DoubleP, HandComputed) {
  const PolicyInput input = FourMasses();
  const Selection selection = Select(input, DoublePPolicy(0.85, 0.7));
  EXPECT_EQ(selection.plan.exact, Indices({1, 3}));   // 0.5 + 0.25 reaches 0.7
  EXPECT_EQ(selection.plan.estimated, Indices({0}));  // 0.9 reaches 0.85
  EXPECT_EQ(selection.cuts[0].order, Indices({1, 3, 0, 2}));
  const Answer answer = Attend(input, DoublePPolicy(0.85, 0.7));
  EXPECT_NEAR(answer.heads[0].covered_mass, 0.9, kClose);
  EXPECT_NEAR(answer.heads[0].exact_mass, 0.75, kClose);
  EXPECT_NEAR(answer.heads[0].lse, std::log(0.9), kClose);
  EXPECT_NEAR(answer.heads[0].out[0], (0.15 * 1 + 0.5 * 2 + 0.25 * 4) / 0.9, kClose);
  EXPECT_EQ(answer.exact_tokens, 2u);
  EXPECT_EQ(answer.estimated_tokens, 1u);
  EXPECT_EQ(answer.dropped_tokens, 1u);
}

TEST(DoubleP, TheGroupSharesOneSelectionByMeanImportance) {
  PolicyInput input = FourMasses();
  input.queries = {{1.0}, {-1.0}};  // the second head's masses are 1 / 0.15, 2, 10, 4 over 22.67
  const double sum = 1.0 / 0.15 + 2.0 + 10.0 + 4.0;
  const Selection selection = Select(input, DoublePPolicy(0.5, 0.5));
  ExpectNear(selection.cuts[0].scores,
             {(0.15 + 1.0 / 0.15 / sum) / 2, (0.5 + 2.0 / sum) / 2, (0.1 + 10.0 / sum) / 2,
              (0.25 + 4.0 / sum) / 2},
             kClose);
  EXPECT_EQ(selection.plan.exact, Indices({1, 2}));  // 0.294 + 0.271
}

TEST(DoubleP, MarginsSayWhatMayDiffer) {
  const PolicyInput input = FourMasses();
  // At p = 0.75 the running sum 0.5 + 0.25 is the threshold itself: the third may come in, no
  // other.
  const Selection selection = Select(input, DoublePPolicy(1.0, 0.75));
  const Plan two{{1, 3}, {0, 2}};
  const Plan three{{0, 1, 3}, {2}};
  EXPECT_EQ(CheckPlan(selection, two), "");
  EXPECT_EQ(CheckPlan(selection, three), "");
  EXPECT_EQ(CheckPlan(selection, Plan{{1}, {0, 2, 3}}), "cluster 3 must be exact and is not");
  EXPECT_EQ(CheckPlan(selection, Plan{{0, 1, 2, 3}, {}}), "cluster 2 is exact and may not be");
  EXPECT_EQ(CheckPlan(selection, Plan{{1, 3}, {0}}), "cluster 2 is dropped and may not be");
  EXPECT_EQ(CheckPlan(selection, Plan{{1, 3, 3}, {0, 2}}), "cluster 3 is in the plan twice");
  EXPECT_EQ(CheckPlan(selection, Plan{{1, 7}, {}}), "cluster 7 does not exist");
  // Away from the threshold there is one plan.
  EXPECT_EQ(CheckPlan(Select(input, DoublePPolicy(1.0, 0.7)), three),
            "cluster 0 is exact and may not be");
}

TEST(DoubleP, TiesGoToTheLowerClusterAndEitherIsAllowed) {
  PolicyInput input = FourMasses();
  input.segments[1][1] =
      OneToken(std::log(0.5) + 1e-6, 4.0);  // nearly equal to cluster 1, a little above
  const Selection selection = Select(input, ClustersTopKPolicy(0.25, 0.25));
  EXPECT_EQ(selection.plan.exact, Indices({3}));
  EXPECT_EQ(CheckPlan(selection, Plan{{1}, {3}}), "");
  EXPECT_EQ(CheckPlan(selection, Plan{{0}, {3}}), "cluster 0 is exact and may not be");
  input.segments[1][1] = input.segments[0][1];
  EXPECT_EQ(Select(input, ClustersTopKPolicy(0.25, 0.25)).plan.exact, Indices({1}));
}

TEST(ClustersTopK, CountsClusters) {
  const Selection selection = Select(FourMasses(), ClustersTopKPolicy(0.018, 0.5));
  EXPECT_EQ(selection.plan.exact, Indices({1}));         // ceil(0.072)
  EXPECT_EQ(selection.plan.estimated, Indices({0, 3}));  // the next two
  const Selection all = Select(FourMasses(), ClustersTopKPolicy(0.6, 0.6));
  EXPECT_EQ(all.plan.exact, Indices({0, 1, 3}));
  EXPECT_EQ(all.plan.estimated, Indices({2}));
}

// One zone token and one cluster of two tokens with logit variance ln 2, so that expm1(d2) = 1.
PolicyInput OneSpreadCluster() {
  PolicyInput input;
  input.queries = {{1.0}};
  input.value_dim = 1;
  input.zone_keys = {{0.0}};
  input.zone_values = {{1.0}};
  const double deviation = std::sqrt(std::log(2.0));
  input.segments = {
      {{2.0, {0.0}, {1.0}, {std::log(2.0)}, 4.0, {{deviation}, {-deviation}}, {{3.0}, {-1.0}}}}};
  return input;
}

TEST(ErrorTarget, HandComputedError) {
  const PolicyInput input = OneSpreadCluster();
  ExpectNear(LogitSpread(input, {1.0}), {std::log(2.0)}, kClose);
  ExpectNear(LogMass(input, {1.0}, MassEstimate::kFirstOrder), {std::log(2.0)}, kClose);
  ExpectNear(LogMass(input, {1.0}, MassEstimate::kSecondOrder), {1.5 * std::log(2.0)}, kClose);
  // Z_i sqrt(1) sqrt(4) / (Z |o~|) with o~ = 1: 2 * 2 / 3, and with Z_i = 2 sqrt 2 instead of 2.
  ExpectNear(FirstPassErrors(input, {1.0}, MassEstimate::kFirstOrder), {4.0 / 3.0}, kClose);
  const double mass = 2.0 * std::sqrt(2.0);
  const double error = 2.0 * mass / (1.0 + mass);
  ExpectNear(FirstPassErrors(input, {1.0}, MassEstimate::kSecondOrder), {error}, kClose);

  // With one cluster the floor takes it; without a floor the tolerance decides, on either side of
  // e_i.
  EXPECT_EQ(Select(input, ErrorTargetPolicy(2.0, 0.01)).plan.exact, Indices({0}));
  EXPECT_EQ(Select(input, ErrorTargetPolicy(error * 1.01, 0.0)).plan.exact, Indices());
  EXPECT_EQ(Select(input, ErrorTargetPolicy(error * 0.99, 0.0)).plan.exact, Indices({0}));
  const Answer estimated = Attend(input, ErrorTargetPolicy(2.0, 0.0));
  EXPECT_NEAR(estimated.heads[0].predicted_error, error, kClose);
  EXPECT_NEAR(estimated.heads[0].lse, std::log(1.0 + mass), kClose);
  EXPECT_NEAR(estimated.heads[0].covered_mass, 1.0, kClose);
  EXPECT_NEAR(estimated.heads[0].exact_mass, 1.0 / (1.0 + mass), kClose);
  EXPECT_EQ(Attend(input, ErrorTargetPolicy(0.1)).heads[0].predicted_error, 0.0);
}

TEST(ErrorTarget, SpreadIsCapped) {
  PolicyInput input = OneSpreadCluster();
  input.segments[0][0].variance = {100.0};
  ExpectNear(LogitSpread(input, {1.0}), {100.0}, kClose);
  ExpectNear(LogMass(input, {1.0}, MassEstimate::kSecondOrder), {std::log(2.0) + 4.0}, kClose);
  ExpectNear(FirstPassErrors(input, {1.0}, MassEstimate::kFirstOrder),
             {4.0 / 3.0 * std::sqrt(std::expm1(8.0))}, 1e-10);
}

TEST(ErrorTarget, OutputsThatCancelAreGuarded) {
  PolicyInput input = OneSpreadCluster();
  input.zone_values = {{-2.0}};  // o~ = (1 * -2 + 2 * 1) / 3 = 0; sum p |V|^2 = (4 + 2) / 3
  ExpectNear(FirstPassErrors(input, {1.0}, MassEstimate::kFirstOrder),
             {4.0 / 3.0 / (1e-3 * std::sqrt(2.0))}, 1e-9);
  input.zone_values = {{0.0}};
  input.segments[0][0].mean_value = {0.0};
  input.segments[0][0].value_spread = 0.0;
  EXPECT_EQ(FirstPassErrors(input, {1.0}, MassEstimate::kSecondOrder), Vector({0.0}));
}

TEST(ErrorTarget, FinalErrorUsesTheFinalOutput) {
  // Two equal clusters, one read: Z = 1 + 2 + (e^sd + e^-sd), |o| = n / Z.
  PolicyInput input = OneSpreadCluster();
  input.segments[0].push_back(input.segments[0][0]);
  const double sd = std::sqrt(std::log(2.0));
  const double z = 3.0 + std::exp(sd) + std::exp(-sd);
  const double o = (1.0 + 2.0 * 1.0 + 3.0 * std::exp(sd) - std::exp(-sd)) / z;
  const Answer answer = Evaluate(input, MassEstimate::kFirstOrder, {{0}, {1}});
  EXPECT_NEAR(answer.heads[0].out[0], o, kClose);
  EXPECT_NEAR(answer.heads[0].predicted_error, 2.0 * 2.0 / (z * o), kClose);
}

TEST(ErrorTarget, FloorFindsTheSpreadCluster) {
  // 200 clusters; number 70 has the same centroid as the rest, wide keys and no value spread: no
  // error, but it may hide the token that is looked for.
  PolicyInput input;
  input.queries = {{1.0}};
  input.value_dim = 1;
  input.segments.resize(1);
  for (int i = 0; i < 200; ++i) input.segments[0].push_back(OneToken(0.001 * i, 1.0));
  input.segments[0][70].variance = {4.0};
  const Selection selection = Select(input, ErrorTargetPolicy(0.1, 0.01));
  EXPECT_EQ(selection.plan.exact, Indices({70, 199}));  // ceil(1% of 200)
}

TEST(Policies, EmptyMiddleAndEmptyEverything) {
  PolicyInput input;
  input.queries = {{1.0}};
  input.value_dim = 1;
  for (const Policy& policy : {DensePolicy(), StreamingPolicy(), ClustersTopKPolicy(),
                               DoublePPolicy(), ErrorTargetPolicy()}) {
    const Answer empty = Attend(input, policy);
    EXPECT_EQ(empty.heads[0].out, Vector({0.0}));
    EXPECT_EQ(empty.heads[0].lse, -kInfinity);
    EXPECT_EQ(empty.heads[0].covered_mass, 1.0);
    EXPECT_EQ(empty.heads[0].predicted_error, 0.0);
  }
  input.zone_keys = {{0.5}};
  input.zone_values = {{7.0}};
  const Answer answer = Attend(input, ErrorTargetPolicy());
  ExpectNear(answer.heads[0].out, {7.0}, kClose);
  EXPECT_NEAR(answer.heads[0].lse, 0.5, kClose);
  EXPECT_EQ(answer.heads[0].predicted_error, 0.0);
}

}  // namespace
}  // namespace attnd::oracle
