// SPDX-License-Identifier: Apache-2.0
//
// What the table of index kinds says, and sets of kinds made of it: values that files and the RPC
// hold, clusters of any form for policies of clusters, what is needed of the model's files. Method:
// each statement of the table that others rely on is written down here a second time. A segment of
// a form that cannot be stops the process.
#include "attention/segment/index_kinds.h"

#include <cstdint>

#include "attention/segment/index_set.h"
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
  const Segment segment(1, {shape, {IndexKind::kBlocks16}, 40, 0}, 0);
  EXPECT_EQ(segment.blocks(0, 0, 16).count, 2u);
  EXPECT_DEATH(static_cast<void>(segment.blocks(0, 0, 64)), "blocks of that size");
}

}  // namespace
}  // namespace attnd::attention::test
