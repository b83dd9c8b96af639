// SPDX-License-Identifier: Apache-2.0
//
// Goal: a tree is what its definition says (docs/POLICIES.md, "A tree of clusters"): clusters of
// some eight tokens in groups, and both levels described from the tokens that they have. Method:
// seeded random keys and values. The oracle describes the index's own clusters and groups in double
// precision, straight from the tokens, in the index's own axes; the index describes groups from
// their clusters. What is stored in bytes may differ by half a step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "attention/index/tree_clustering.h"
#include "attention/segment/index_parts.h"
#include "tests/attention/oracle_support.h"
#include "tests/attention/segment_support.h"
#include "tests/attention/support.h"
#include "tests/cross.h"
#include "tests/oracle/kmeans.h"
#include "tests/oracle/regression.h"

namespace attnd::attention::test {
namespace {

using Matrix = std::vector<oracle::Vector>;

TEST(DivideAmongGroupsTest, EachFurtherClusterGoesWhereTokensAreMost) {
  Random random(TestSeed());
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  for (int round = 0; round < 200; ++round) {
    std::vector<uint32_t> sizes(1 + random.Below(20));
    for (uint32_t& size : sizes) size = 1 + static_cast<uint32_t>(random.Below(60));
    const uint32_t all = std::accumulate(sizes.begin(), sizes.end(), 0u);
    const size_t members = sizes.size() + random.Below(all);
    std::vector<uint32_t> expected(sizes.size(), 1);
    for (size_t given = sizes.size(); given < std::min<size_t>(members, all); ++given) {
      size_t best = sizes.size();
      for (size_t g = 0; g < sizes.size(); ++g) {
        if (expected[g] == sizes[g]) continue;
        const bool more =
            best == sizes.size() || sizes[g] * expected[best] > sizes[best] * expected[g];
        if (more) best = g;
      }
      ++expected[best];
    }
    EXPECT_EQ(DivideAmongGroups(sizes, members), expected);
  }
}

TEST(TreeClusteringTest, GroupsAreMadeOfWholeClustersAndNoneIsEmpty) {
  constexpr size_t kDim = 16;
  Random random(TestSeed());
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  for (const size_t n : {1u, 7u, 64u, 65u, 700u, 3000u}) {
    const std::vector<float> points = random.Normals(n * kDim);
    TreeClustering tree, again;
    const TreeClustering::Sizes sizes{(n + 63) / 64, (n + 7) / 8, 0.25};
    for (TreeClustering* each : {&tree, &again}) {
      each->Start(points, n, kDim, sizes);
      while (each->RunChunk()) {
      }
    }
    EXPECT_TRUE(std::ranges::equal(tree.assignment(), again.assignment()));
    ASSERT_EQ(tree.assignment().size(), n);
    std::vector<uint32_t> counts(tree.sizes().size());
    for (const uint32_t cluster : tree.assignment()) ++counts.at(cluster);
    EXPECT_TRUE(std::ranges::equal(tree.sizes(), counts));
    EXPECT_EQ(std::ranges::count(counts, 0u), 0);
    EXPECT_LE(counts.size(), sizes.clusters);
    EXPECT_LE(tree.first_members().size(), sizes.groups + 1);
    EXPECT_EQ(tree.first_members().front(), 0u);
    EXPECT_EQ(tree.first_members().back(), counts.size());
    EXPECT_TRUE(std::ranges::is_sorted(tree.first_members(), std::less_equal<>()));
  }
}

// Equal points have one cluster among them, however many they could have.
TEST(TreeClusteringTest, PointsThatAreEqual) {
  constexpr size_t kDim = 16, kPoints = 500;
  const std::vector<float> points(kPoints * kDim, 1.5f);
  TreeClustering tree;
  tree.Start(points, kPoints, kDim, {8, 63, 0.25});
  while (tree.RunChunk()) {
  }
  EXPECT_EQ(tree.sizes().size(), 1u);
  EXPECT_EQ(tree.sizes()[0], kPoints);
}

// A step of rows in bytes: the greatest difference from the base over 127. Half of it is rounded
// away, and a little more by float32.
void ExpectByteRow(const ByteRows& rows, size_t stride, size_t i, const oracle::Vector& mean,
                   double size) {
  for (size_t c = 0; c < mean.size(); ++c) {
    const double stored =
        double{rows.base[c]} + double{rows.scales[i]} * rows.codes[i * stride + c];
    EXPECT_NEAR(stored, mean[c], 0.5001 * rows.scales[i] + 1e-6 * size) << "channel " << c;
  }
}

void ExpectLevel(const Segment& segment, uint32_t layer, uint32_t kv_head, const Matrix& keys,
                 const Matrix& values, const std::vector<size_t>& assignment, bool groups) {
  const ModelShape& shape = segment.shape();
  const ClusterIndex index =
      groups ? segment.groups(layer, kv_head) : segment.clusters(layer, kv_head);
  const oracle::Regression stored = StoredRegression(segment, layer, kv_head, groups);
  const oracle::Regression expected = oracle::RegressInAxes(keys, values, assignment, stored.axes);
  Matrix turned;
  for (const oracle::Vector& key : keys) {
    oracle::Vector& row = turned.emplace_back(key.size(), 0.0);
    for (size_t c = 0; c < key.size(); ++c) {
      for (size_t a = 0; a < key.size(); ++a) row[a] += key[c] * stored.axes[c][a];
    }
  }
  const oracle::SegmentIndex rotated =
      oracle::SummariseAssignment(turned, values, assignment, index.clusters);
  const oracle::Vector rest =
      oracle::ValueSpread(keys, values, assignment, stored.axes, stored.slope);
  ASSERT_EQ(expected.sizes.size(), index.clusters);
  for (uint32_t i = 0; i < index.clusters; ++i) {
    SCOPED_TRACE(testing::Message() << (groups ? "group " : "cluster ") << i);
    EXPECT_EQ(stored.sizes[i], expected.sizes[i]);
    EXPECT_FLOAT_EQ(index.log_size[i], static_cast<float>(std::log(expected.sizes[i])));
    ExpectByteRow(index.byte_centroids, shape.head_dim, i, expected.centroids[i], 4);
    ExpectByteRow(index.byte_mean_values, index.mean_value_stride_bytes, i, expected.mean_values[i],
                  4);
    const double norm2 = oracle::SquaredNorm(stored.mean_values[i]);
    EXPECT_NEAR(index.value_norm2[i], norm2, 1e-5 * norm2 + 1e-9);
    const double step = std::sqrt(index.variance_unit[i]);
    for (size_t a = 0; a < shape.head_dim; ++a) {
      const double deviation = std::sqrt(rotated.clusters[i].variance[a]);
      EXPECT_NEAR(std::sqrt(stored.variances[i][a]), deviation, 0.5001 * step + 2e-5)
          << "axis " << a;
    }
    EXPECT_NEAR(index.spread[i], std::sqrt(rest[i]), 1e-4 * std::sqrt(rest[i]) + 1e-5);
    if (testing::Test::HasFailure()) return;
  }
  if (groups) return;                     // slopes are those of the clusters
  constexpr double kRoundedSlope = 4e-3;  // bf16 has 8 bits
  EXPECT_LE(oracle::SlopeError(keys, values, assignment, stored.axes, stored.slope), kRoundedSlope);
  EXPECT_LE(oracle::AxesError(keys, assignment, stored.axes).off_diagonal, kRoundedSlope);
}

void ExpectTree(const Segment& segment, uint32_t layer, uint32_t kv_head, const HeadData& data) {
  EXPECT_TRUE(CheckIndexHead(segment, layer, kv_head).ok());
  const ModelShape& shape = segment.shape();
  const size_t first = segment.first_position() + segment.unclustered();
  const Matrix keys = Rows(data.keys, shape.head_dim, first, segment.clustered());
  const Matrix values = Rows(data.values, shape.value_dim, first, segment.clustered());
  std::vector<size_t> assignment = AssignmentOf(segment, layer, kv_head);
  ExpectLevel(segment, layer, kv_head, keys, values, assignment, /*groups=*/false);
  const ClusterIndex groups = segment.groups(layer, kv_head);
  std::vector<size_t> group_of(segment.clusters(layer, kv_head).clusters);
  for (uint32_t g = 0; g < groups.clusters; ++g) {
    for (uint32_t c = groups.first_members[g]; c < groups.first_members[g + 1]; ++c) {
      group_of[c] = g;
    }
  }
  for (size_t& cluster : assignment) cluster = group_of[cluster];
  ExpectLevel(segment, layer, kv_head, keys, values, assignment, /*groups=*/true);
}

class TreeIndexTest : public testing::TestWithParam<std::tuple<SegmentCase, DType>> {};

TEST_P(TreeIndexTest, PayloadAndIndex) {
  const auto& [c, dtype] = GetParam();
  ExpectBuilt(c, ShapeOf(c, dtype), kTreeIndexes, ExpectTree);
}

const SegmentCase kCases[] = {
    {64, 64, 0, 1, 0},     {64, 64, 0, 5, 4},          {48, 16, 64, 16, 0},
    {128, 64, 100, 17, 0}, {80, 80, 63, 513, 0},       {128, 128, 0, 900, 64},
    {16, 16, 0, 5000, 0},  {80, 64, 63, 513, 4, true}, {48, 48, 0, 700, 0, true},
};
INSTANTIATE_TEST_SUITE_P(Shapes, TreeIndexTest,
                         testing::ValuesIn(attnd::test::Cross<SegmentCase>(
                             kCases, {DType::kBf16, DType::kFp16, DType::kFp32})));

// What comes from elsewhere than a builder is looked at.
TEST(TreeIndexTest, ATreeThatHoldsOtherClustersIsRefused) {
  const ModelShape shape = MakeShape(1, 1, 32, 16, DType::kFp32);
  Random random(TestSeed());
  const HeadData data{random.Normals(600 * 32), random.Normals(600 * 16)};
  const auto segment = BuildSegment(MakeTailView(shape, 600, {data}, kTreeIndexes), 600, 0);
  const IndexLayout::Clusters& groups = segment->layout().groups;
  const uint32_t count = segment->groups(0, 0).clusters;
  ASSERT_GT(count, 2u);
  const auto refused = [&](size_t offset, size_t index, auto value, absl::string_view why) {
    const absl::Status status =
        CheckAfter(*segment, [&](std::byte* indexes) { StoreAt(indexes + offset, index, value); });
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(why));
  };
  refused(groups.count, 0, uint32_t{0}, "groups");
  refused(groups.count, 0, groups.room + 1, "groups");
  refused(groups.count, 0, count - 1, "groups");
  refused(groups.first_members, 0, uint32_t{1}, "groups");
  refused(groups.first_members, 1, uint32_t{0}, "group");
  refused(groups.first_members, 1, ~uint32_t{0}, "groups");
  refused(groups.starts, 1, uint32_t{0}, "groups");
  for (const float damage : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    refused(groups.centroid_scales, 0, damage, "means");
    refused(segment->layout().clusters.mean_value_scales, 1, damage, "means");
    refused(segment->layout().key_base, 3, damage, "means");
    refused(segment->layout().axes, 0, uint16_t{0x7fc0}, "regression");
  }
}

}  // namespace
}  // namespace attnd::attention::test
