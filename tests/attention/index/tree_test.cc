// SPDX-License-Identifier: Apache-2.0
//
// Goal: a tree is what its definition says (docs/POLICIES.md, "A tree of clusters"): clusters of
// some eight tokens in groups, these in sections, and all levels described from the tokens that
// they have. Method: seeded random keys and values. The oracle describes the index's own clusters
// and groups in double precision, straight from the tokens, in the index's own axes; the index
// describes groups and sections from their clusters. What is stored in bytes may differ by half a
// step.
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
#include "tests/tree_indexes.h"

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

// At every level clusters hold whole clusters of the level below, and none is empty; the order
// holds every point once, and a cluster's points by their numbers.
TEST(TreeClusteringTest, LevelsAreMadeOfWholeClusters) {
  constexpr size_t kDim = 16;
  Random random(TestSeed());
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  for (const size_t n : {1u, 7u, 64u, 65u, 700u, 3000u}) {
    for (const size_t levels : {1u, 2u, 3u}) {
      SCOPED_TRACE(testing::Message() << n << " points, " << levels << " levels");
      const std::vector<float> points = random.Normals(n * kDim);
      TreeClustering::Sizes sizes{{(n + 511) / 512, (n + 63) / 64, (n + 7) / 8}, 0.25};
      sizes.levels.erase(sizes.levels.begin(), sizes.levels.end() - static_cast<int>(levels));
      TreeClustering tree, again;
      for (TreeClustering* each : {&tree, &again}) {
        each->Start(points, n, kDim, sizes);
        while (each->RunChunk()) {
        }
      }
      EXPECT_TRUE(std::ranges::equal(tree.order(), again.order()));
      EXPECT_TRUE(std::ranges::equal(tree.starts(), again.starts()));
      std::vector<uint32_t> sorted(tree.order().begin(), tree.order().end());
      std::ranges::sort(sorted);
      std::vector<uint32_t> all(n);
      std::iota(all.begin(), all.end(), 0u);
      EXPECT_EQ(sorted, all);
      std::span<const uint32_t> starts = tree.starts();
      EXPECT_LE(starts.size(), sizes.levels.back() + 1);
      EXPECT_EQ(starts.front(), 0u);
      EXPECT_EQ(starts.back(), n);
      EXPECT_TRUE(std::ranges::is_sorted(starts, std::less_equal<>()));
      for (size_t c = 0; c + 1 < starts.size(); ++c) {
        EXPECT_TRUE(std::ranges::is_sorted(
            tree.order().subspan(starts[c], starts[c + 1] - starts[c]), std::less_equal<>()));
      }
      size_t below = starts.size() - 1;
      for (size_t above = 1; above < levels; ++above) {
        const std::span<const uint32_t> first = tree.first_members(above);
        EXPECT_LE(first.size(), sizes.levels[levels - 1 - above] + 1);
        EXPECT_EQ(first.front(), 0u);
        EXPECT_EQ(first.back(), below);
        EXPECT_TRUE(std::ranges::is_sorted(first, std::less_equal<>()));
        below = first.size() - 1;
      }
    }
  }
}

// Equal points have one cluster among them, however many they could have.
TEST(TreeClusteringTest, PointsThatAreEqual) {
  constexpr size_t kDim = 16, kPoints = 500;
  const std::vector<float> points(kPoints * kDim, 1.5f);
  TreeClustering tree;
  tree.Start(points, kPoints, kDim, {{2, 8, 63}, 0.25});
  while (tree.RunChunk()) {
  }
  EXPECT_THAT(tree.starts(), testing::ElementsAre(0, kPoints));
}

class TreeIndexTest : public testing::TestWithParam<std::tuple<SegmentCase, DType>> {};

TEST_P(TreeIndexTest, PayloadAndIndex) {
  const auto& [c, dtype] = GetParam();
  ExpectBuilt(c, ShapeOf(c, dtype), kTreeIndexes, ExpectTree);
}

const SegmentCase kCases[] = {
    {64, 64, 0, 1, 0},
    {64, 64, 0, 5, 4},
    {48, 16, 64, 16, 0},
    {128, 64, 100, 17, 0},
    {80, 80, 63, 513, 0},
    {128, 128, 0, 900, 64},
    {16, 16, 0, 5000, 0},
    {80, 64, 63, 513, 4, true},
    {48, 48, 0, 700, 0, true},
    {16, 16, 0, 1, 0, false, true},
    {16, 32, 0, 5000, 0, false, true},
    {48, 48, 5, 1700, 3, true, true},
};
INSTANTIATE_TEST_SUITE_P(Shapes, TreeIndexTest,
                         testing::ValuesIn(attnd::test::Cross<SegmentCase>(
                             kCases, {DType::kBf16, DType::kFp16, DType::kFp32})));

// Trees of other sizes: they have room for as many rows of each level as their sizes say, use
// nearly all of it, and are described as those of the default sizes are.
TEST(TreeIndexTest, OtherSizes) {
  struct Sizes {
    TreeSizes sizes;
    SegmentCase segment;
    uint32_t leaves, groups, sections;  // as POLICIES.md has them
  };
  const Sizes cases[] = {
      {{12, 8, 3}, {16, 32, 0, 2000, 0, false, true}, 167, 21, 3},
      {{16, 16, 3}, {32, 16, 5, 1700, 4, false, true}, 106, 7, 1},
      {{16, 4, 3}, {48, 48, 0, 1000, 0, true, true}, 63, 16, 4},
      {{8, 4, 2}, {16, 16, 0, 900, 0}, 113, 29, 0},
      {{12, 16, 2}, {64, 64, 0, 1500, 64}, 120, 8, 0},
      {{8, 16, 3}, {16, 16, 0, 1, 0, false, true}, 1, 1, 1},
  };
  for (const Sizes& c : cases) {
    const IndexSet indexes = attnd::test::TreeOf(c.sizes);
    SCOPED_TRACE(indexes.ToString());
    ExpectBuilt(
        c.segment, ShapeOf(c.segment, DType::kFp32), indexes,
        [&](const Segment& segment, uint32_t layer, uint32_t kv_head, const HeadData& data) {
          ExpectTree(segment, layer, kv_head, data);
          for (const auto& [level, rows] :
               {std::pair(kLeaves, c.leaves), std::pair(kGroups, c.groups),
                std::pair(kSections, c.sections)}) {
            EXPECT_EQ(segment.layout().level(level).room, rows);
            EXPECT_GE(segment.level(level, layer, kv_head).clusters, rows - rows / 8);
          }
        });
  }
}

// What comes from elsewhere than a builder is looked at.
TEST(TreeIndexTest, ATreeThatHoldsOtherClustersIsRefused) {
  const ModelShape shape = MakeShape(1, 1, 32, 16, DType::kFp32);
  Random random(TestSeed());
  constexpr size_t kTokens = 1600;
  const HeadData data{random.Normals(kTokens * 32), random.Normals(kTokens * 16)};
  const auto segment = BuildSegment(MakeTailView(shape, kTokens, {data}, kTreeIndexes), kTokens, 0,
                                    1, kBuildQuantumUs, /*sections=*/true);
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
  const IndexLayout::Clusters& sections = segment->layout().sections;
  ASSERT_GT(segment->level(kSections, 0, 0).clusters, 2u);
  refused(sections.count, 0, uint32_t{0}, "number of sections");
  refused(sections.count, 0, sections.room + 1, "number of sections");
  refused(sections.first_members, 0, uint32_t{1}, "sections that do not hold its groups");
  refused(sections.first_members, 1, uint32_t{0}, "section without groups");
  refused(sections.first_members, 1, ~uint32_t{0}, "sections that do not hold its tokens");
  refused(sections.starts, 1, uint32_t{0}, "sections that do not hold its tokens");
  for (const float damage : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    refused(groups.centroid_scales, 0, damage, "means");
    refused(sections.mean_value_scales, 0, damage, "means");
    refused(segment->layout().clusters.mean_value_scales, 1, damage, "means");
    refused(segment->layout().key_base, 3, damage, "means");
    refused(segment->layout().axes, 0, uint16_t{0x7fc0}, "regression");
  }
}

}  // namespace
}  // namespace attnd::attention::test
