// SPDX-License-Identifier: Apache-2.0
//
// Goal: the oracle of blocks is right. Method: cases small enough to compute by hand, stated beside
// the expectation; what a bound must be over seeded random keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tests/oracle/blocks.h"
#include "tests/oracle/draws.h"

namespace attnd::oracle {
namespace {

// ---- where blocks lie ----

TEST(CutBlocks, AlignedToEachSegmentsOwnTokens) {
  // Segments at positions 0..9 and 10..15 of blocks of 4, the first 2 tokens sink.
  const std::vector<Block> blocks = CutBlocks({10, 6}, 2, 4);
  ASSERT_EQ(blocks.size(), 5u);
  const std::vector<std::array<std::size_t, 4>> expected = {
      {0, 2, 4, 0}, {0, 4, 8, 1}, {0, 8, 10, 0}, {1, 10, 14, 1}, {1, 14, 16, 0}};
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(blocks[i].segment, expected[i][0]);
    EXPECT_EQ(blocks[i].begin, expected[i][1]);
    EXPECT_EQ(blocks[i].end, expected[i][2]);
    EXPECT_EQ(blocks[i].full, expected[i][3] == 1);
  }
  EXPECT_EQ(FullBlocks(blocks), Indices({1, 3}));
  EXPECT_EQ(PositionsIn(blocks, PartialBlocks(blocks)), Indices({2, 3, 8, 9, 14, 15}));
}

TEST(CutBlocks, ABlockOfSinkTokensAloneKeepsItsNumber) {
  const std::vector<Block> blocks = CutBlocks({3, 12}, 8, 4);
  // Positions 0..2 | 3..6, 7..10, 11..14: the sink ends in the second segment.
  ASSERT_EQ(blocks.size(), 4u);
  for (const std::size_t i : {0u, 1u}) {
    EXPECT_EQ(blocks[i].begin, blocks[i].end);
    EXPECT_FALSE(blocks[i].full);
  }
  EXPECT_EQ(blocks[2].begin, 8u);
  EXPECT_FALSE(blocks[2].full);
  EXPECT_TRUE(blocks[3].full);
  EXPECT_EQ(PositionsIn(blocks, Range(0, 4)), Range(8, 15));
}

TEST(CutBlocks, NoSegmentsNoBlocks) {
  EXPECT_TRUE(CutBlocks({}, 4, 16).empty());
  const BlockSelection selection = SelectBlocks({{1.0}}, {}, {}, 3);
  EXPECT_TRUE(selection.top.taken.empty());
  EXPECT_TRUE(selection.read.empty());
}

TEST(CutBlocks, EveryMiddleTokenIsInOneBlock) {
  ForSeeds(50, [](Draws& draws) {
    std::vector<std::size_t> segments;
    std::size_t covered = 0;
    for (std::size_t i = draws.Between(0, 4); i > 0; --i) {
      segments.push_back(draws.Between(1, 60));
      covered += segments.back();
    }
    const std::size_t sink = draws.Between(0, 20);
    const std::vector<Block> blocks = CutBlocks(segments, sink, draws.Between(1, 17));
    EXPECT_EQ(PositionsIn(blocks, Range(0, blocks.size())), Range(sink, covered));
  });
}

TEST(BlocksOf, BudgetsRoundUpToBlocks) {
  EXPECT_EQ(BlocksOf({1024, std::nullopt}, 16, 1000), 64u);
  EXPECT_EQ(BlocksOf({1025, std::nullopt}, 16, 1000), 65u);
  EXPECT_EQ(BlocksOf({1, std::nullopt}, 16, 1000), 1u);
  EXPECT_EQ(BlocksOf({0, std::nullopt}, 16, 1000), 0u);
  EXPECT_EQ(BlocksOf({1024, std::nullopt}, 16, 5), 5u);
  EXPECT_EQ(BlocksOf({0, 0.1}, 16, 41), 5u);
  EXPECT_EQ(BlocksOf({0, 0.001}, 16, 41), 1u);
  EXPECT_EQ(BlocksOf({0, 1.0}, 16, 41), 41u);
  EXPECT_EQ(BlocksOf({0, 0.5}, 16, 0), 0u);
}

// ---- scores ----

TEST(BoundScore, HandComputed) {
  const std::vector<Vector> keys = {{1.0, -4.0}, {3.0, 2.0}};
  const BlockBounds bounds = BoundsOf(keys, {0, 0, 2, true});
  EXPECT_EQ(bounds.minimum, Vector({1.0, -4.0}));
  EXPECT_EQ(bounds.maximum, Vector({3.0, 2.0}));
  EXPECT_EQ(BoundScore({{2.0, -1.0}}, bounds), 10.0);  // 2 * 3 + -1 * -4
  EXPECT_EQ(BoundScore({{-2.0, 1.0}}, bounds), 0.0);   // -2 * 1 + 1 * 2
  EXPECT_EQ(BoundScore({{2.0, -1.0}, {-2.0, 1.0}}, bounds), 10.0);
  EXPECT_EQ(BoundMagnitude({{-2.0, 1.0}}, bounds), 4.0);
  EXPECT_EQ(BoundScore({{0.0, 0.0}}, bounds), 0.0);
}

TEST(BoundScore, IsTheSumOfGreaterProductsAndBoundsEveryKey) {
  ForSeeds(50, [](Draws& draws) {
    const std::size_t tokens = draws.Between(1, 16);
    const auto queries = draws.NormalRows(4, 8);
    const auto keys = draws.NormalRows(tokens, 8);
    const BlockBounds bounds = BoundsOf(keys, {0, 0, tokens, true});
    const double score = BoundScore(queries, bounds);
    double greater = 0.0;  // AsyncTLS's first form
    for (const Vector& query : queries) {
      for (std::size_t c = 0; c < 8; ++c) {
        greater += std::max(query[c] * bounds.minimum[c], query[c] * bounds.maximum[c]);
      }
    }
    EXPECT_NEAR(score, greater, kClose);
    EXPECT_GE(BoundMagnitude(queries, bounds), std::abs(score) - kClose);
    for (const Vector& key : keys) {
      double sum = 0.0;
      for (const Vector& query : queries) sum += Dot(query, key);
      EXPECT_LE(sum, score + kClose);
      if (tokens == 1) {
        EXPECT_NEAR(sum, score, kClose);
      }
    }
  });
}

// ---- selections ----

// Blocks of 2 of one channel: scores for the query {1} are the greater keys.
TEST(SelectBlocks, TheBestFullBlocksAndAllThatAreNotFull) {
  const std::vector<Vector> keys = {{9}, {9}, {9}, {1}, {5}, {0}, {9}, {7}, {7}, {5}, {2}};
  const std::vector<Block> blocks = CutBlocks({7, 4}, 1, 2);
  // 0: sink and 1 | 1: 2, 3 (9) | 2: 4, 5 (5) | 3: 6 | 4: 7, 8 (7) | 5: 9, 10 (5)
  const BlockSelection two = SelectBlocks({{1.0}}, keys, blocks, 2);
  EXPECT_EQ(two.top.candidates, Indices({1, 2, 4, 5}));
  EXPECT_EQ(two.top.scores, Vector({9, 5, 7, 5}));
  EXPECT_EQ(two.top.taken, Indices({1, 4}));
  EXPECT_EQ(two.read, Indices({1, 2, 3, 6, 7, 8}));
  // Blocks 2 and 5 tie; the lower comes first.
  EXPECT_EQ(SelectBlocks({{1.0}}, keys, blocks, 3).top.taken, Indices({1, 2, 4}));
  EXPECT_EQ(SelectBlocks({{1.0}}, keys, blocks, 9).read, Range(1, 11));
  EXPECT_EQ(SelectBlocks({{1.0}}, keys, blocks, 0).read, Indices({1, 6}));
}

TEST(SelectBlocks, EqualKeysAreTakenInOrder) {
  const std::vector<Vector> keys(64, Vector{0.3, -0.7});
  const BlockSelection selection =
      SelectBlocks({{1.0, 2.0}, {-3.0, 0.5}}, keys, CutBlocks({64}, 0, 16), 2);
  EXPECT_EQ(selection.top.taken, Indices({0, 1}));
  EXPECT_EQ(selection.read, Range(0, 32));
}

TEST(SelectBlocks, OneHugeKeyIsFound) {
  std::vector<Vector> keys(64, Vector{0.0});
  keys[37] = {1e6};
  const std::vector<Block> blocks = CutBlocks({64}, 0, 16);
  EXPECT_EQ(SelectBlocks({{1.0}}, keys, blocks, 1).top.taken, Indices({2}));
  // For the opposite query its block is bounded by its other keys: all tie.
  EXPECT_EQ(SelectBlocks({{-1.0}}, keys, blocks, 1).top.taken, Indices({0}));
}

TEST(SelectBlocks, CancelledScoresAreCloseByFloatRounding) {
  // Scores 0 and 1e-4 of terms of 1000: a float sum cannot tell them apart.
  const std::vector<Vector> keys = {{1000.0, -1000.0}, {1000.0001, -1000.0}};
  const BlockSelection selection = SelectBlocks({{1.0, 1.0}}, keys, CutBlocks({2}, 0, 1), 1);
  EXPECT_EQ(selection.top.taken, Indices({1}));
  EXPECT_EQ(CheckTaken(selection.top, {0}), "");
}

}  // namespace
}  // namespace attnd::oracle
