// SPDX-License-Identifier: Apache-2.0
//
// Goal: the oracles themselves are right, as every other test leans on them.
// Method: cases small enough to compute by hand, stated beside the expectation; identities that
// hold whatever the data (a policy that may leave nothing out is dense attention) over seeded
// random inputs, the seed printed on failure.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>

#include "tests/oracle/attention.h"
#include "tests/oracle/kmeans.h"
#include "tests/oracle/policies.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kClose = 1e-12;
using Indices = std::vector<std::size_t>;

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  double Normal() { return normal_(generator_); }
  Vector NormalVector(std::size_t size) {
    Vector result(size);
    for (double& element : result) element = Normal();
    return result;
  }
  std::vector<Vector> NormalRows(std::size_t rows, std::size_t size) {
    std::vector<Vector> result;
    for (std::size_t j = 0; j < rows; ++j) result.push_back(NormalVector(size));
    return result;
  }

 private:
  std::mt19937_64 generator_;
  std::normal_distribution<double> normal_;
};

void ExpectNear(const Vector& actual, const Vector& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t c = 0; c < actual.size(); ++c) EXPECT_NEAR(actual[c], expected[c], tolerance);
}

// ---- softmax_state ----

TEST(SoftmaxState, HandComputed) {
  SoftmaxState state(1);  // weights 1 and 3 of values 0 and 4
  state.Add(std::log(1.0), {0.0});
  state.Add(std::log(3.0), {4.0});
  ExpectNear(state.Out(), {3.0}, kClose);
  EXPECT_NEAR(state.Lse(), std::log(4.0), kClose);
}

TEST(SoftmaxState, AnEstimateOfEqualTokensIsExact) {
  SoftmaxState tokens(2);
  for (int j = 0; j < 5; ++j) tokens.Add(0.7, {1.0, -2.0});
  tokens.Add(0.1, {3.0, 3.0});
  SoftmaxState estimate(2);
  estimate.Add(0.7 + std::log(5.0), {1.0, -2.0});
  estimate.Add(0.1, {3.0, 3.0});
  ExpectNear(estimate.Out(), tokens.Out(), kClose);
  EXPECT_NEAR(estimate.Lse(), tokens.Lse(), kClose);
}

TEST(SoftmaxState, EmptyIsLegalAndNeutral) {
  SoftmaxState empty(2);
  EXPECT_EQ(empty.Out(), Vector({0.0, 0.0}));
  EXPECT_EQ(empty.Lse(), -kInfinity);
  empty.Merge(SoftmaxState(2));
  empty.Add(-kInfinity, {5.0, 5.0});
  EXPECT_EQ(empty.Lse(), -kInfinity);

  SoftmaxState state(2);
  state.Add(-1000.0, {1.0, 2.0});
  SoftmaxState right = state;
  right.Merge(empty);
  SoftmaxState left = empty;
  left.Merge(state);
  for (const SoftmaxState& merged : {left, right}) {
    EXPECT_EQ(merged.Out(), state.Out());
    EXPECT_EQ(merged.Lse(), -1000.0);
  }
}

TEST(SoftmaxState, MergeIsAssociativeAndCommutative) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    std::vector<SoftmaxState> parts(3, SoftmaxState(4));
    SoftmaxState whole(4);
    for (SoftmaxState& part : parts) {
      const double centre = 300.0 * random.Normal();  // parts that drown each other, too
      for (int j = 0; j < 7; ++j) {
        const double logit = centre + 5.0 * random.Normal();
        const Vector value = random.NormalVector(4);
        part.Add(logit, value);
        whole.Add(logit, value);
      }
    }
    SoftmaxState forward = parts[0];  // (0 1) 2
    forward.Merge(parts[1]);
    forward.Merge(parts[2]);
    SoftmaxState nested = parts[1];  // (1 2) then after 0
    nested.Merge(parts[2]);
    SoftmaxState right = parts[0];
    right.Merge(nested);
    SoftmaxState backward = parts[2];  // 2 1 0
    backward.Merge(parts[1]);
    backward.Merge(parts[0]);
    for (const SoftmaxState& merged : {forward, right, backward}) {
      ExpectNear(merged.Out(), whole.Out(), kClose);
      EXPECT_NEAR(merged.Lse(), whole.Lse(), 1e-9);
    }
  }
}

TEST(RelativeError, HandComputed) {
  EXPECT_DOUBLE_EQ(RelativeError({3.0, 4.0}, {3.0, 0.0}), 4.0 / 3.0);
  EXPECT_EQ(RelativeError({0.0}, {0.0}), 0.0);
  EXPECT_EQ(RelativeError({1.0}, {0.0}), kInfinity);
}

// ---- attention ----

TEST(DenseHead, HandComputed) {
  // Logits 0.5 * 2 * ln 3 = ln 3, and 0.
  const HeadOutput head =
      DenseHead({2.0}, {{std::log(3.0)}, {0.0}}, {{1.0, 0.0}, {5.0, 4.0}}, 0.5, 2);
  ExpectNear(head.out, {2.0, 1.0}, kClose);
  EXPECT_NEAR(head.lse, std::log(4.0), kClose);
  EXPECT_EQ(DenseHead({2.0}, {}, {}, 0.5, 2).lse, -kInfinity);
}

TEST(DenseHead, AgreesWithTheRunningState) {
  Random random(3);
  const auto keys = random.NormalRows(40, 8);
  const auto values = random.NormalRows(40, 6);
  const Vector query = random.NormalVector(8);
  SoftmaxState state(6);
  for (std::size_t j = 0; j < keys.size(); ++j) state.Add(3.0 * Dot(query, keys[j]), values[j]);
  const HeadOutput head = DenseHead(query, keys, values, 3.0, 6);
  ExpectNear(head.out, state.Out(), kClose);
  EXPECT_NEAR(head.lse, state.Lse(), 1e-11);
}

TEST(DenseAttention, CausalOffsetAndGroups) {
  // Queries of zero weigh all visible tokens alike: the output is the mean of the first past + i +
  // 1 values.
  DenseInput input;
  input.query_tokens = 2;
  input.query_heads = 4;
  input.kv_heads = 2;
  input.head_dim = 1;
  input.value_dim = 1;
  input.past = 1;
  input.q = Vector(2 * 4, 0.0);
  input.k = Vector(4 * 2, 1.0);
  input.v = {1.0, 10.0, 3.0, 30.0, 8.0, 80.0, 999.0, 999.0};  // the fourth token is nobody's to see
  const DenseOutput output = DenseAttention(input);
  ExpectNear(output.out, {2.0, 2.0, 20.0, 20.0, 4.0, 4.0, 40.0, 40.0}, kClose);
  const double two = std::log(2.0);
  const double three = std::log(3.0);
  ExpectNear(output.lse, {two, two, two, two, three, three, three, three}, kClose);
}

// ---- kmeans ----

TEST(Kmeans, HandComputed) {
  // Starts at tokens 0 and 2, so centres 0 and 1; the first assignment leaves only token 0 in the
  // first cluster.
  const std::vector<Vector> keys = {{0.0}, {10.0}, {1.0}, {11.0}};
  const std::vector<Vector> values = {{0.0}, {1.0}, {2.0}, {5.0}};
  const SegmentIndex once = BuildIndex(keys, values, {2, 1});
  EXPECT_EQ(once.assignment, Indices({0, 1, 1, 1}));
  EXPECT_NEAR(once.clusters[1].centroid[0], 22.0 / 3.0, kClose);

  const SegmentIndex index = BuildIndex(keys, values, {2, 10});
  EXPECT_EQ(index.assignment, Indices({0, 1, 0, 1}));
  ASSERT_EQ(index.clusters.size(), 2u);
  ExpectNear(index.clusters[0].centroid, {0.5}, kClose);
  ExpectNear(index.clusters[1].centroid, {10.5}, kClose);
  ExpectNear(index.clusters[1].mean_value, {3.0}, kClose);
  ExpectNear(index.clusters[1].variance, {0.25}, kClose);
  EXPECT_NEAR(index.clusters[1].value_spread, 4.0, kClose);
  EXPECT_NEAR(Inertia(keys, index), 1.0, kClose);
}

TEST(Kmeans, TiesGoToTheLowerCluster) {
  const SegmentIndex index = BuildIndex({{0.0}, {1.0}, {2.0}}, {{0.0}, {0.0}, {0.0}}, {2, 1});
  EXPECT_EQ(index.clusters.size(), 2u);  // starts at tokens 0 and floor(3 / 2) = 1
  EXPECT_EQ(BuildIndex({{0.0}, {4.0}, {2.0}}, {{0.0}, {0.0}, {0.0}}, {2, 1}).assignment,
            Indices({0, 1, 0}));
  EXPECT_EQ(BuildIndex({{0.0}, {4.0}, {2.0}}, {{0.0}, {0.0}, {0.0}}, {2, 1}).margin, 0.0);
}

TEST(Kmeans, EmptyClustersAreDropped) {
  const std::vector<Vector> keys = {{0.0}, {0.0}, {5.0}, {5.0}};
  const SegmentIndex index = BuildIndex(keys, keys, {1, 10});
  EXPECT_EQ(index.assignment, Indices({0, 0, 1, 1}));
  ASSERT_EQ(index.clusters.size(), 2u);
  EXPECT_EQ(index.clusters[1].members, Indices({2, 3}));
}

TEST(Kmeans, ShiftingAllKeysShiftsCentroidsOnly) {
  Random random(11);
  std::vector<Vector> keys = random.NormalRows(100, 4);
  const auto values = random.NormalRows(100, 4);
  const SegmentIndex before = BuildIndex(keys, values, {});
  EXPECT_EQ(before.clusters.size(), 7u);  // ceil(100 / 16)
  for (Vector& key : keys) key[2] += 50.0;
  const SegmentIndex after = BuildIndex(keys, values, {});
  ASSERT_GT(before.margin, 1e-9);
  EXPECT_EQ(after.assignment, before.assignment);
  for (std::size_t i = 0; i < before.clusters.size(); ++i) {
    EXPECT_NEAR(after.clusters[i].centroid[2], before.clusters[i].centroid[2] + 50.0, 1e-9);
    ExpectNear(after.clusters[i].variance, before.clusters[i].variance, 1e-9);
  }
}

TEST(Kmeans, IterationsLessenInertia) {
  Random random(12);
  const auto keys = random.NormalRows(200, 3);
  double inertia = kInfinity;
  for (int iterations = 1; iterations <= 10; ++iterations) {
    const double next = Inertia(keys, BuildIndex(keys, keys, {16, iterations}));
    EXPECT_LE(next, inertia * (1.0 + kClose));
    inertia = next;
  }
}

TEST(VarianceCode, HandComputed) {
  const VarianceCode code =
      EncodeVariance({4.0, 1.0, 0.0, 0.01});  // 15 sigma / r = 15, 7.5, 0, 0.75
  EXPECT_EQ(code.r, 2.0);
  EXPECT_EQ(code.codes, std::vector<int>({15, 8, 0, 1}));
  ExpectNear(code.Dequantised(), {4.0, std::pow(16.0 / 15.0, 2), 0.0, std::pow(2.0 / 15.0, 2)},
             kClose);
  EXPECT_EQ(EncodeVariance({0.0, 0.0}).Dequantised(), Vector({0.0, 0.0}));
}

// ---- policies ----

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

// ---- policies: invariants over random inputs ----

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
