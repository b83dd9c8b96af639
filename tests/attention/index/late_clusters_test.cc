// SPDX-License-Identifier: Apache-2.0
//
// Goal: k-means with late clusters makes those of the definition (docs/POLICIES.md, "Clusters with
// a regression"). Method: separated points, whose clusters are the oracle's where no call was
// close, gaussian ones, whose inertia is, and cases by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/index/kmeans.h"
#include "attention/index/regression_describer.h"
#include "tests/attention/segment_support.h"
#include "tests/oracle/joint_kmeans.h"

namespace attnd::attention::test {
namespace {

struct Clustered {
  std::vector<size_t> assignment;  // after empty clusters were dropped
  size_t count = 0;
};

Clustered DropEmpty(const KMeans& kmeans) {
  Clustered result;
  std::vector<size_t> number;
  for (const uint32_t size : kmeans.sizes()) number.push_back(size == 0 ? 0 : result.count++);
  for (const uint32_t cluster : kmeans.assignment()) result.assignment.push_back(number[cluster]);
  return result;
}

// KMeans over the oracle's features, rounded to float32.
Clustered RunKMeans(KMeans* kmeans, const Matrix& features, size_t clusters, size_t late) {
  std::vector<float> points;
  for (const oracle::Vector& row : features) {
    for (const double x : row) points.push_back(static_cast<float>(x));
  }
  kmeans->Start(points, features.size(), features[0].size(), clusters, late);
  while (kmeans->RunChunk()) {
  }
  return DropEmpty(*kmeans);
}

TEST(LateClusters, EqualAssignmentWhereNoCallIsClose) {
  KMeans kmeans;  // one for all: memory of earlier points must not matter
  int compared = 0;
  for (uint64_t round = 0; round < 60; ++round) {
    const uint64_t seed = TestSeed() + round;
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    const size_t tokens = 70 + random.Below(250);
    const TokenRows rows = SeparatedRows(tokens, 3 + random.Below(8), 32, 16, &random);
    const double split = round % 3 == 0 ? 0.5 : kLateShare;
    const double share = round % 2 == 0 ? kValueShare : 1.5;
    const oracle::JointClusters expected =
        oracle::ClusterJointly(rows.keys, rows.values, {kClusterTokens, split, share});
    if (expected.margin < kClearCall) continue;
    ++compared;
    const size_t clusters = (tokens + kClusterTokens - 1) / kClusterTokens;
    const auto late = static_cast<size_t>(split * static_cast<double>(clusters));
    ASSERT_GE(late, 1u);
    const Clustered actual =
        RunKMeans(&kmeans, oracle::JointFeatures(rows.keys, rows.values, share), clusters, late);
    EXPECT_EQ(actual.count, expected.count);
    EXPECT_EQ(actual.assignment, expected.assignment);
  }
  EXPECT_GE(compared, 15);
}

TEST(LateClusters, AsGoodAsTheOracles) {
  for (uint64_t round = 0; round < 6; ++round) {
    const uint64_t seed = TestSeed() + round;
    Random random(seed);
    const size_t tokens = 400 + random.Below(500);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", tokens " << tokens);
    const Matrix keys = Rows(random.Normals(tokens * 48), 48, 0, tokens);
    const Matrix values = Rows(random.Normals(tokens * 16), 16, 0, tokens);
    const Matrix features = oracle::JointFeatures(keys, values, kValueShare);
    const oracle::JointClusters expected =
        oracle::ClusterJointly(keys, values, {kClusterTokens, kLateShare, kValueShare});
    KMeans kmeans;
    const size_t clusters = (tokens + kClusterTokens - 1) / kClusterTokens;
    const Clustered actual = RunKMeans(&kmeans, features, clusters, clusters / 4);
    EXPECT_NEAR(InertiaOf(features, actual.assignment, actual.count),
                InertiaOf(features, expected.assignment, expected.count),
                0.01 * InertiaOf(features, expected.assignment, expected.count));
  }
}

// What is not wide gives no late cluster, and the others give theirs in the order of their width,
// at the farthest members.
TEST(LateClusters, OnlyWideClustersGiveOneAndTheWidestFirst) {
  // Eight clusters, four late: the first four begin at points 0, 4, 8, 12.
  Matrix features(16, oracle::Vector(16, 0.0));
  for (size_t i = 0; i < 16; ++i) features[i][0] = 100.0 * static_cast<double>(i / 4);
  features[6][1] = 5;   // of the second four: q = 25 (3/4)^2 + 3 (5/4)^2 = 18.75
  features[13][2] = 9;  // of the fourth: q = 60.75
  KMeans kmeans;
  const Clustered actual = RunKMeans(&kmeans, features, 8, 4);
  EXPECT_EQ(actual.count, 6u);
  EXPECT_EQ(actual.assignment,
            std::vector<size_t>({0, 0, 0, 0, 1, 1, 5, 1, 2, 2, 2, 2, 3, 4, 3, 3}));
}

// Of members that are equally far the first one gives the centre.
TEST(LateClusters, TheFirstOfEquallyFarMembers) {
  // Four clusters, one late: the first three begin at points 0, 5, 10.
  Matrix features(16, oracle::Vector(16, 0.0));
  for (size_t i = 0; i < 16; ++i) features[i][0] = i < 5 ? 0 : i < 10 ? 100 : 200;
  features[7][1] = -4;  // their mean stays where it was
  features[8][1] = 4;
  KMeans kmeans;
  EXPECT_EQ(RunKMeans(&kmeans, features, 4, 1).assignment,
            std::vector<size_t>({0, 0, 0, 0, 0, 1, 1, 3, 1, 1, 2, 2, 2, 2, 2, 2}));
}

// A cluster without members has no farthest one, and gives none.
TEST(LateClusters, EmptyClustersGiveNone) {
  // Eight clusters, four late: the first four begin at points 0, 4, 8, 12, and the last of them has
  // the place of the third.
  Matrix features(16, oracle::Vector(16, 0.0));
  for (size_t i = 0; i < 16; ++i) features[i][0] = i < 4 ? 0 : i < 8 ? 100 : 200;
  features[0][1] = 3;  // 4.5 from the mean -1.5 of the first cluster
  features[3][1] = -9;
  KMeans kmeans;
  EXPECT_EQ(RunKMeans(&kmeans, features, 8, 4).assignment,
            std::vector<size_t>({0, 0, 0, 3, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2}));
}

}  // namespace
}  // namespace attnd::attention::test
