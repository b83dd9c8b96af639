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
#include "tests/attention/segment_support.h"
#include "tests/attention/support.h"
#include "tests/attention/tree_support.h"
#include "tests/cross.h"

namespace attnd::attention::test {
namespace {

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
