// SPDX-License-Identifier: Apache-2.0
//
// Goal: a row's trees are divided into slices that have every group once, whatever the segments'
// sizes, and that the row's own length alone decides; its tail into pieces that have every token.
#include "gpu/step/row_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace attnd::gpu {
namespace {

constexpr uint32_t kGroupTokens = 64;

// A row over trees of segments of so many tokens.
class Row {
 public:
  explicit Row(const std::vector<uint32_t>& tokens) {
    for (const uint32_t count : tokens) {
      SegmentDescription& segment = segments_.emplace_back();
      segment.tokens = count;
      segment.max_clusters = count / 8;
      segment.max_groups = (count + kGroupTokens - 1) / kGroupTokens;
    }
    row_.shape = {.kernel = {DType::kBf16, 128, 128}, .kv_heads = 8, .group = 4};
    row_.kind = UnitKind::kTree;
    row_.cut = CutKind::kErrorBudget;
    row_.second_order = true;
    row_.query_tokens = 1;
    row_.segments = segments_;
    ref_ = PlanRow(row_, 0, 1, /*cooperative_groups=*/true);
  }

  const RowRef& ref() const { return ref_; }
  std::vector<TreeRef> Trees() const {
    std::vector<TreeRef> trees;
    for (const SegmentDescription& segment : segments_) {
      trees.push_back(PlanTree(ref_, segment, trees.empty() ? nullptr : &trees.back()));
    }
    return trees;
  }

 private:
  std::vector<SegmentDescription> segments_;
  RowDescription row_;
  RowRef ref_;
};

void HasEveryGroupOnce(const Row& row) {
  uint32_t slices = 0, slots = 0;
  for (const TreeRef& tree : row.Trees()) {
    EXPECT_EQ(tree.first_slice, slices);
    EXPECT_EQ(tree.first_group_slot, slots);
    EXPECT_GE(tree.slices * row.ref().tree_slice_groups, tree.group_slots);
    EXPECT_LT((tree.slices - 1) * row.ref().tree_slice_groups, tree.group_slots);
    slices += tree.slices;
    slots += tree.group_slots;
  }
  EXPECT_EQ(row.ref().tree_slices, slices);
  EXPECT_EQ(row.ref().group_slots, slots);
  EXPECT_EQ(row.ref().estimate_pieces, slices);
}

TEST(RowPlan, LongSegmentsHaveSlices) {
  const Row row({8192, 8192, 16384, 32768, 32768, 32768});
  HasEveryGroupOnce(row);
  EXPECT_EQ(row.ref().tree_slice_groups, 128u);
  EXPECT_EQ(row.ref().tree_slices, 16u);
  EXPECT_EQ(row.Trees()[3].slices, 4u);
}

TEST(RowPlan, OddSegmentsHaveAShortLastSlice) {
  const Row row({8192 + 100, 777, 20000});
  HasEveryGroupOnce(row);
  EXPECT_EQ(row.Trees()[0].slices, 2u);
  EXPECT_EQ(row.Trees()[1].slices, 1u);
  EXPECT_EQ(row.Trees()[2].slices, 3u);
}

TEST(RowPlan, LongerRowsHaveLongerSlices) {
  const Row middle(std::vector<uint32_t>(16, 32768)), longest(std::vector<uint32_t>(48, 32768));
  HasEveryGroupOnce(middle);
  HasEveryGroupOnce(longest);
  EXPECT_EQ(middle.ref().tree_slice_groups, 256u);
  EXPECT_EQ(longest.ref().tree_slice_groups, kTreeSliceGroupsMax);
}

// A long row has the fewer pieces, the more KV heads it has; a short one has no shorter pieces.
TEST(RowPlan, DenseRowsHaveFewPieces) {
  const auto pieces = [](uint32_t kv_heads, const std::vector<SegmentDescription>& segments) {
    RowDescription row;
    row.shape = {.kernel = {DType::kBf16, 128, 128}, .kv_heads = kv_heads, .group = 4};
    row.query_tokens = 1;
    row.segments = segments;
    return PlanRow(row, 0, 1, /*cooperative_groups=*/true).dense_pieces;
  };
  SegmentDescription segment;
  segment.tokens = 32768;
  const std::vector<SegmentDescription> row(4, segment);
  EXPECT_EQ(pieces(1, row), 64u);
  EXPECT_EQ(pieces(4, row), 64u);
  EXPECT_EQ(pieces(8, row), 32u);
  EXPECT_EQ(pieces(16, row), 16u);
  EXPECT_EQ(pieces(64, row), 16u);
  segment.tokens = 4096;
  EXPECT_EQ(pieces(8, {segment}), 8u);
  EXPECT_EQ(pieces(8, std::vector<SegmentDescription>(40, segment)), 40u);
}

// The number of a short tail's pieces doubles; a long one, and one that many query tokens see, has
// as many as it needs.
TEST(RowPlan, ShortTailsHaveShortPieces) {
  struct Tail {
    uint32_t begin, end, piece_tokens, pieces, query_tokens = 1;
  };
  for (const Tail& tail : {Tail{0, 1, 128, 1}, Tail{0, 128, 128, 1}, Tail{63, 129, 128, 2},
                           Tail{0, 300, 128, 4}, Tail{0, 513, 128, 8}, Tail{0, 2048, 128, 16},
                           Tail{0, 2049, 512, 5}, Tail{10, 10, 128, 0}, Tail{0, 513, 512, 2, 2}}) {
    RowDescription row;
    row.shape = {.kernel = {DType::kBf16, 128, 128}, .kv_heads = 8, .group = 4};
    row.query_tokens = tail.query_tokens;
    row.tail_begin = tail.begin;
    row.tail_limit = tail.end;
    row.causal = false;
    const RowRef ref = PlanRow(row, 0, 1, /*cooperative_groups=*/false);
    EXPECT_EQ(ref.tail_piece_tokens, tail.piece_tokens) << tail.end;
    EXPECT_EQ(ref.tail_pieces, tail.pieces) << tail.end;
  }
}

}  // namespace
}  // namespace attnd::gpu
