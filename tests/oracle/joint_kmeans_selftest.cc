// SPDX-License-Identifier: Apache-2.0
//
// Goal: the oracle of clustering keys and values together is right. Method: cases small enough to
// compute by hand, stated beside the expectation; what must hold whatever the data over seeded
// random segments.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/oracle/draws.h"
#include "tests/oracle/joint_kmeans.h"
#include "tests/oracle/kmeans.h"
#include "tests/oracle/rows.h"
#include "tests/oracle/selftest.h"

namespace attnd::oracle {
namespace {

std::vector<Vector> Column(const Vector& numbers) {
  std::vector<Vector> rows;
  for (const double x : numbers) rows.push_back({x});
  return rows;
}

double JointInertia(const std::vector<Vector>& features, const JointClusters& clusters) {
  return Inertia(features,
                 SummariseAssignment(features, features, clusters.assignment, clusters.count));
}

TEST(JointKmeans, FeaturesHandComputed) {
  // Keys about their mean 2 are -2, 0, 2: rho_k = sqrt(8/3). Values about (1, 1) are (-1, -1),
  // (0, 2), (1, -1), of squares 2, 4, 2: rho_v = sqrt(8/3).
  const std::vector<Vector> keys = Column({0.0, 2.0, 4.0});
  const std::vector<Vector> values = {{0.0, 0.0}, {1.0, 3.0}, {2.0, 0.0}};
  const double rho = std::sqrt(8.0 / 3.0);
  const std::vector<Vector> features = JointFeatures(keys, values, 0.5);
  ASSERT_EQ(features.size(), 3u);
  ExpectNear(features[0], {-2.0 / rho, -0.5 / rho, -0.5 / rho}, kClose);
  ExpectNear(features[1], {0.0, 0.0, 1.0 / rho}, kClose);
  ExpectNear(features[2], {2.0 / rho, 0.5 / rho, -0.5 / rho}, kClose);
  ExpectNear(JointFeatures(keys, values, 0.0)[2], {2.0 / rho, 0.0, 0.0}, kClose);
}

TEST(JointKmeans, LateCentresHandComputed) {
  // Four clusters, one late: three begin at tokens 0, floor(8/3) = 2 and floor(16/3) = 5, keys 0,
  // 10, 20. Token 4 (14) joins 10, whose q = 2 (4/3)^2 + (8/3)^2 is the only one above 0, and is
  // its farthest member.
  const std::vector<Vector> keys = Column({0.0, 0.0, 10.0, 10.0, 14.0, 20.0, 20.0, 20.0});
  const JointClusters clusters = ClusterJointly(keys, keys, {2, 0.25, 0.0});
  EXPECT_EQ(clusters.assignment, Indices({0, 0, 1, 1, 3, 2, 2, 2}));
  EXPECT_EQ(clusters.count, 4u);

  // Two late of four: begins at tokens 0 and 4, keys 0 and 14. {0, 0} and the rest, which keeps its
  // members: mean 94/6 = 15.67; q of the first is 0, so one late centre comes, not two. Farthest is
  // 10 (5.67), token 2 of equals. Then {10, 10} against (14 + 60)/4 = 18.5: 14 is 4 from the first
  // and 1.67 from the old centre 15.67, so stays with 18.5 (4.5), then is nearer to 10 (4): it
  // changes over, and the means are 11.33 and 20.
  const JointClusters half = ClusterJointly(keys, keys, {2, 0.5, 0.0});
  EXPECT_EQ(half.assignment, Indices({0, 0, 2, 2, 2, 1, 1, 1}));
  EXPECT_EQ(half.count, 3u);
}

TEST(JointKmeans, TheWidestClustersGiveFirst) {
  // Eight clusters of one token in each on average, two late: six begin at tokens 0, 1, 2, 4, 5, 6:
  // keys 0, 1, 100, 200, 210, 300, and 102 and 304 join 100 and 300. q is 2 and 8: the late centres
  // are at 300 or 304 (equally far from 302: the lower token, 300), number 6, then at 100, number
  // 7.
  const std::vector<Vector> keys = Column({0.0, 1.0, 100.0, 102.0, 200.0, 210.0, 300.0, 304.0});
  const JointClusters clusters = ClusterJointly(keys, keys, {1, 0.25, 0.0});
  EXPECT_EQ(clusters.assignment, Indices({0, 1, 7, 2, 3, 4, 6, 5}));
  EXPECT_LT(clusters.margin, kClose);  // a pair is always a tie
}

TEST(JointKmeans, TiesGoToTheLowerClusterAndEmptyOnesAreDropped) {
  // No late centres; begins at tokens 0 and 1.
  EXPECT_EQ(
      ClusterJointly(Column({0.0, 4.0, 2.0}), Column({1.0, 1.0, 1.0}), {2, 0.0, 0.5}).assignment,
      Indices({0, 1, 0}));
  // Four centres at keys 0, 0, 5, 5: the second and fourth stay empty.
  const std::vector<Vector> keys = Column({0.0, 0.0, 5.0, 5.0});
  const JointClusters clusters = ClusterJointly(keys, keys, {1, 0.0, 0.5});
  EXPECT_EQ(clusters.assignment, Indices({0, 0, 1, 1}));
  EXPECT_EQ(clusters.count, 2u);
}

TEST(JointKmeans, ValuesPartWhatKeysCannot) {
  const std::vector<Vector> keys(8, Vector({0.1, 0.7}));  // their mean by plain sums is not 0.1
  const std::vector<Vector> values = Column({1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0});
  EXPECT_EQ(ClusterJointly(keys, values, {4, 0.25, 0.5}).assignment,
            Indices({0, 0, 0, 0, 1, 1, 1, 1}));
  const JointClusters keys_alone = ClusterJointly(keys, values, {4, 0.25, 0.0});
  EXPECT_EQ(keys_alone.assignment, Indices(8, 0));
  EXPECT_EQ(keys_alone.count, 1u);
}

TEST(JointKmeans, DegenerateSegments) {
  EXPECT_EQ(ClusterJointly({}, {}).count, 0u);
  EXPECT_EQ(ClusterJointly({{3.0}}, {{2.0}}).assignment, Indices({0}));
  const std::vector<Vector> equal(100, Vector({0.1, 0.2, 0.3}));
  const JointClusters one = ClusterJointly(equal, equal);
  EXPECT_EQ(one.assignment, Indices(100, 0));
  for (const Vector& feature : JointFeatures(equal, equal, 0.5)) {
    EXPECT_EQ(feature, Vector(6, 0.0));
  }
}

TEST(JointKmeans, WithoutLateCentresAndValuesItIsPlainKmeans) {
  ForSeeds(10, [](Draws& draws) {
    const auto keys = draws.NormalRows(draws.Between(40, 200), 3);
    const auto values = draws.NormalRows(keys.size(), 2);
    const JointClusters clusters = ClusterJointly(keys, values, {16, 0.0, 0.0});
    const SegmentIndex plain = BuildIndex(keys, values, {16, 10});
    ASSERT_GT(plain.margin, 1e-9);
    EXPECT_EQ(clusters.assignment, plain.assignment);
    EXPECT_NEAR(clusters.margin, plain.margin, 1e-6 * plain.margin);
  });
}

TEST(JointKmeans, ShiftsAndLengthsOfRowsDoNotMatter) {
  ForSeeds(10, [](Draws& draws) {
    auto keys = draws.NormalRows(150, 4);
    auto values = draws.NormalRows(150, 3);
    const JointClusters before = ClusterJointly(keys, values);
    if (before.margin < 1e-9) return;
    for (Vector& key : keys) {
      for (double& x : key) x = 7.0 * x - 20.0;
    }
    for (Vector& value : values) {
      for (double& x : value) x = 0.03 * x + 1.0;
    }
    EXPECT_EQ(ClusterJointly(keys, values).assignment, before.assignment);
  });
}

TEST(JointKmeans, NumbersAreInOrderAndClustersTight) {
  ForSeeds(10, [](Draws& draws) {
    const std::size_t tokens = draws.Between(64, 300);
    const auto keys = draws.NormalRows(tokens, 4);
    const auto values = draws.NormalRows(tokens, 3);
    // Values twice as long as keys: what keys alone find is then surely worse.
    const auto features = JointFeatures(keys, values, 2.0);
    const JointClusters clusters = ClusterJointly(keys, values, {16, 0.25, 2.0});
    ASSERT_EQ(clusters.assignment.size(), tokens);
    EXPECT_LE(clusters.count, (tokens + 15) / 16);
    std::vector<bool> seen(clusters.count, false);
    for (const std::size_t i : clusters.assignment) seen.at(i) = true;
    EXPECT_EQ(seen, std::vector<bool>(clusters.count, true));
    // In its own metric better than clusters of keys alone, and than runs of neighbours.
    const JointClusters keys_alone = ClusterJointly(keys, values, {16, 0.25, 0.0});
    EXPECT_LT(JointInertia(features, clusters), JointInertia(features, keys_alone));
    JointClusters by_place = clusters;
    for (std::size_t j = 0; j < tokens; ++j) {
      by_place.assignment[j] = j * clusters.count / tokens;
    }
    EXPECT_LT(JointInertia(features, clusters), JointInertia(features, by_place));
  });
}

}  // namespace
}  // namespace attnd::oracle
