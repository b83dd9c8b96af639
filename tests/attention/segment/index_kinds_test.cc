// SPDX-License-Identifier: Apache-2.0
//
// What the table of index kinds says, and sets of kinds made of it: values that files and the RPC
// hold, clusters of any form for policies of clusters, what is needed of the model's files. Method:
// each statement of the table that others rely on is written down here a second time. A segment of
// a form that cannot be stops the process.
#include "attention/segment/index_kinds.h"

#include <cstdint>
#include <string>

#include "attention/segment/index_set.h"
#include "attention/segment/run_tokens.h"
#include "attention/segment/segment.h"
#include "gtest/gtest.h"

namespace attnd::attention::test {
namespace {

TEST(IndexKinds, ValuesAndNamesAreThoseOfFiles) {
  struct Known {
    IndexKind kind;
    uint32_t value;
    const char* name;
  };
  constexpr Known kKnown[] = {
      {IndexKind::kClusters, 1, "clusters"},     {IndexKind::kBlocks16, 2, "blocks-16"},
      {IndexKind::kBlocks64, 3, "blocks-64"},    {IndexKind::kLabels, 4, "labels"},
      {IndexKind::kKeys4, 5, "keys-4bit"},       {IndexKind::kSummary, 6, "summary"},
      {IndexKind::kRegression, 7, "regression"}, {IndexKind::kTree, 8, "tree"}};
  ASSERT_EQ(std::size(kKnown), kIndexKinds.size());
  for (size_t i = 0; i < kIndexKinds.size(); ++i) {
    EXPECT_EQ(kIndexKinds[i], kKnown[i].kind);
    EXPECT_EQ(static_cast<uint32_t>(kIndexKinds[i]), kKnown[i].value);
    EXPECT_EQ(IndexName(kIndexKinds[i]), kKnown[i].name);
    EXPECT_EQ(IndexSet{kIndexKinds[i]}.bits(), 1u << kKnown[i].value);
  }
}

TEST(IndexKinds, ClustersOfAnyFormServe) {
  const IndexSet regression = {IndexKind::kRegression, IndexKind::kKeys4};
  EXPECT_EQ(regression.cluster_form(), ClusterForm::kRegression);
  EXPECT_EQ(kClusterIndexes.cluster_form(), ClusterForm::kMeans);
  EXPECT_EQ(IndexSet{IndexKind::kKeys4}.cluster_form(), std::nullopt);
  EXPECT_TRUE(regression.Serves({IndexKind::kClusters, IndexKind::kKeys4}));
  EXPECT_TRUE(kClusterIndexes.Serves(kRegressionIndexes));
  EXPECT_TRUE(kTreeIndexes.Serves(kRegressionIndexes));
  EXPECT_TRUE(kTreeIndexes.Serves(kClusterIndexes));
  EXPECT_FALSE(kClusterIndexes.Serves(regression));
  EXPECT_FALSE(IndexSet{IndexKind::kKeys4}.Serves(kClusterIndexes));
  EXPECT_TRUE(kClusterIndexes.Serves({}));
}

TEST(IndexKinds, ARegressionIsPartOfAForm) {
  EXPECT_TRUE(kRegressionIndexes.has_regression());
  EXPECT_TRUE(kTreeIndexes.has_regression());
  EXPECT_TRUE(IndexSet({IndexKind::kRegression, IndexKind::kLabels}).has_regression());
  EXPECT_FALSE(kClusterIndexes.has_regression());
  EXPECT_FALSE(IndexSet{IndexKind::kKeys4}.has_regression());
  EXPECT_FALSE(IndexSet().has_regression());
}

// ---- sizes of a tree ----

// Files hold these numbers: the default sizes' is that of a tree from before there were others.
TEST(TreeSizesTest, NumbersAreThoseOfFiles) {
  for (uint32_t leaf = 0; leaf < 3; ++leaf) {
    for (uint32_t fan = 0; fan < 3; ++fan) {
      for (uint32_t levels = 0; levels < 2; ++levels) {
        constexpr uint32_t kLeaves[] = {8, 12, 16}, kFans[] = {8, 4, 16}, kLevels[] = {3, 2};
        const TreeSizes sizes = {kLeaves[leaf], kFans[fan], kLevels[levels]};
        IndexSet set = {IndexKind::kTree, IndexKind::kLabels};
        set.set_tree_sizes(sizes);
        EXPECT_TRUE(set.Validate().ok());
        EXPECT_EQ(set.bits(), 1u << 8 | 1u << 4 | leaf << 25 | fan << 27 | levels << 29);
        const auto back = IndexSet::FromBits(set.bits());
        ASSERT_TRUE(back.has_value());
        EXPECT_EQ(*back, set);
        EXPECT_EQ(back->tree_sizes(), sizes);
        EXPECT_EQ(back->has_sections(), levels == 0);
        EXPECT_EQ(back->clusters()->tokens, sizes.leaf_tokens);
        EXPECT_EQ(back->clusters()->fan, sizes.fan);
      }
    }
  }
  for (const uint32_t unknown : {3u << 25, 3u << 27, 2u << 29, 3u << 29}) {
    EXPECT_FALSE(IndexSet::FromBits(1u << 8 | unknown).has_value()) << unknown;
  }
  EXPECT_FALSE(IndexSet::FromBits(1u << 7 | 1u << 25).has_value()) << "sizes without a tree";
}

TEST(TreeSizesTest, SetsOfOtherSizesAreOfTheSameKindsAndNotEqual) {
  IndexSet other = kTreeIndexes;
  other.set_tree_sizes({12, 16, 2});
  EXPECT_FALSE(other == kTreeIndexes);
  EXPECT_TRUE(other.HasAll(kTreeIndexes));
  EXPECT_TRUE(other.Serves(kTreeIndexes));
  EXPECT_TRUE(kTreeIndexes.Serves(other));
  EXPECT_EQ(other.ToString(), "tree of leaf_tokens 12, fan 16, levels 2");
}

TEST(TreeSizesTest, WhatIsNotAllowedIsNamed) {
  const auto wrong = [](const TreeSizes& sizes, IndexSet indexes = kTreeIndexes) {
    indexes.set_tree_sizes(sizes);
    const absl::Status status = indexes.Validate();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(wrong({9, 8, 3}), "tree.leaf_tokens is 9; allowed are 8, 12, 16");
  EXPECT_EQ(wrong({8, 5, 3}), "tree.fan is 5; allowed are 4, 8, 16");
  EXPECT_EQ(wrong({8, 8, 4}), "tree.levels is 4; allowed are 2, 3");
  EXPECT_EQ(wrong({12, 8, 3}, kRegressionIndexes),
            "tree is given, and indexes are regression: allowed is tree among them");
}

TEST(TreeSizesTest, SegmentsOfTwoLevelsWantNoSections) {
  EXPECT_TRUE(WantsSections(kTreeIndexes, 8193));
  EXPECT_FALSE(WantsSections(kTreeIndexes, 8192));
  EXPECT_FALSE(WantsSections(kRegressionIndexes, 8193));
  IndexSet two = kTreeIndexes;
  two.set_tree_sizes({8, 8, 2});
  EXPECT_FALSE(WantsSections(two, kSegmentTokensMax));
}

TEST(IndexKinds, NeedsOfTheModelsFiles) {
  EXPECT_TRUE(IndexSet{IndexKind::kSummary}.Needs(ModelPart::kFeatureMaps));
  EXPECT_FALSE(IndexSet{IndexKind::kSummary}.Needs(ModelPart::kLabelChannels));
  EXPECT_TRUE(
      IndexSet({IndexKind::kBlocks64, IndexKind::kLabels}).Needs(ModelPart::kLabelChannels));
  EXPECT_FALSE(kRegressionIndexes.Needs(ModelPart::kFeatureMaps));
}

TEST(SegmentInvariants, AFormThatCannotBeStopsTheProcess) {
  ModelShape shape;
  shape.layers = shape.query_heads = shape.kv_heads = 1;
  shape.head_dim = shape.value_dim = 16;
  shape.dtype = DType::kFp32;
  EXPECT_TRUE(Segment(1, {shape, kClusterIndexes, 20, 4}, 0).allocated());
  EXPECT_DEATH(Segment(1, {shape, kClusterIndexes, 20, 20}, 0), "unclustered < form_.tokens");
  EXPECT_DEATH(Segment(1, {shape, kClusterIndexes, 0, 0}, 0), "form_.tokens");
  const IndexSet both = {IndexKind::kClusters, IndexKind::kRegression};
  EXPECT_DEATH(Segment(1, {shape, both, 20, 4}, 0), "Validate");
  EXPECT_DEATH(Segment(1, {shape, kRegressionIndexes, 20, 4, true}, 0), "has_sections");
  const Segment segment(1, {shape, {IndexKind::kBlocks16}, 40, 0}, 0);
  EXPECT_EQ(segment.blocks(0, 0, 16).count, 2u);
  EXPECT_DEATH(static_cast<void>(segment.blocks(0, 0, 64)), "blocks of that size");
}

}  // namespace
}  // namespace attnd::attention::test
