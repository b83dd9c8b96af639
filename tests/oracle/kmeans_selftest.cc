// SPDX-License-Identifier: Apache-2.0
//
// Goal: the oracle of clustering is right. Method: cases small enough to compute by hand, stated
// beside the expectation; what shifts and further iterations must do to seeded random keys.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/oracle/kmeans.h"
#include "tests/oracle/selftest.h"

namespace attnd::oracle {
namespace {

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

}  // namespace
}  // namespace attnd::oracle
