// SPDX-License-Identifier: Apache-2.0
//
// Goal: the oracle of the two-level selection is right. Method: a case small enough to compute by
// hand, with either lag; identities (all blocks searched is a selection by labels alone) over
// seeded random inputs.
#include <gtest/gtest.h>

#include "tests/oracle/draws.h"
#include "tests/oracle/two_level.h"

namespace attnd::oracle {
namespace {

// Blocks of 2: sink 0 | 1 is alone | 2, 3 | 4, 5 | 6, 7 | 8 is alone. Keys of two channels, both
// labels; a block's bound for {1, 0} is its greater first channel.
TwoLevelInput SmallInput() {
  TwoLevelInput input;
  input.keys = {{9, 9}, {9, 9}, {5, 0}, {1, 0}, {0, 6}, {0, 3}, {4, 4}, {2, 2}, {9, 9}};
  input.labels = MakeLabels(input.keys, {0, 1});
  input.blocks = CutBlocks({9}, 1, 2);  // 0 and 4 are not full
  return input;
}

TEST(TwoLevel, HandComputed) {
  TwoLevelInput input = SmallInput();
  input.queries = {{{1, 0}}, {{0, 1}}, {{1, 0}}};
  // Bounds for {1, 0}: 5, 0, 4; for {0, 1}: 0, 6, 4.
  TwoLevelPolicy policy{1, {1, std::nullopt}, 1, std::nullopt};
  const auto lagging = SelectTwoLevel(input, policy);
  ASSERT_EQ(lagging.size(), 3u);
  EXPECT_EQ(lagging[0].blocks.taken, Indices({1}));
  EXPECT_EQ(lagging[0].searched, Indices({1}));  // nothing earlier: its own
  EXPECT_EQ(lagging[0].tokens.taken, Indices({2}));
  EXPECT_EQ(lagging[0].read, Indices({1, 2, 8}));
  EXPECT_EQ(lagging[1].blocks.taken, Indices({2}));
  EXPECT_EQ(lagging[1].searched, Indices({1}));
  EXPECT_EQ(lagging[1].tokens.taken, Indices({2}));  // 2 and 3 tie at 0
  EXPECT_EQ(lagging[2].blocks.taken, Indices({1}));
  EXPECT_EQ(lagging[2].searched, Indices({2}));
  EXPECT_EQ(lagging[2].tokens.taken, Indices({4}));  // 4 and 5 tie at 0

  policy.earlier = Indices({3});
  const auto later = SelectTwoLevel(input, policy);
  EXPECT_EQ(later[0].searched, Indices({3}));
  EXPECT_EQ(later[0].tokens.taken, Indices({6}));
  EXPECT_EQ(later[1].searched, Indices({1}));

  policy.lag = 0;
  const auto prompt = SelectTwoLevel(input, policy);
  EXPECT_EQ(prompt[0].tokens.taken, Indices({2}));
  EXPECT_EQ(prompt[1].tokens.taken, Indices({4}));
  EXPECT_EQ(prompt[2].tokens.taken, Indices({2}));
}

TEST(TwoLevel, ShareIsOfTheMiddle) {
  TwoLevelInput input = SmallInput();
  input.queries = {{{1, 0}}};
  // The middle is positions 1..8; 0.3 of 8 rounds up to 3 of the 4 tokens searched.
  const auto steps = SelectTwoLevel(input, {2, {0, 0.3}, 1, std::nullopt});
  EXPECT_EQ(steps[0].blocks.taken, Indices({1, 3}));
  EXPECT_EQ(steps[0].tokens.taken, Indices({2, 6, 7}));
}

TEST(TwoLevel, NoFullBlock) {
  TwoLevelInput input;
  input.keys = {{1}, {2}, {3}};
  input.labels = MakeLabels(input.keys, {0});
  input.blocks = CutBlocks({3}, 1, 64);
  input.queries = {{{1}}, {{2}}};
  for (const TwoLevelStep& step : SelectTwoLevel(input, {})) {
    EXPECT_TRUE(step.blocks.taken.empty());
    EXPECT_TRUE(step.tokens.taken.empty());
    EXPECT_EQ(step.read, Indices({1, 2}));
  }
  input.blocks.clear();
  EXPECT_TRUE(SelectTwoLevel(input, {})[0].read.empty());
}

// Blocks of 2, no sink: 0, 1 | 2, 3 | 4 is alone | and later others behind them.
TEST(TwoLevel, BlocksThatWereNoneCountAsChosen) {
  const std::vector<Block> before = CutBlocks({5}, 0, 2);
  EXPECT_EQ(CarriedOver(before, {1}, before), Indices({1}));
  EXPECT_EQ(CarriedOver(before, {}, before), Indices());
  // 5, 6 | 7, 8 | 9 is alone, and 10, 11: numbers 3 and 4, then 6.
  EXPECT_EQ(CarriedOver(before, {1}, CutBlocks({5, 5, 2}, 0, 2)), Indices({1, 3, 4, 6}));
  // Nothing is left of the second block but a token that is alone.
  EXPECT_EQ(CarriedOver(before, {0, 1}, CutBlocks({3}, 0, 2)), Indices({0}));
  // Cut anew: 0 is alone, and 1, 2 | 3, 4 are other blocks than there were.
  EXPECT_EQ(CarriedOver(before, {}, CutBlocks({1, 4}, 0, 2)), Indices({1, 2}));
  EXPECT_EQ(CarriedOver({}, {}, before), Indices({0, 1}));
}

TwoLevelInput RandomInput(Draws& draws) {
  TwoLevelInput input;
  const std::vector<std::size_t> segments = {draws.Between(20, 60), draws.Between(1, 60)};
  input.keys = draws.NormalRows(segments[0] + segments[1], 8);
  input.labels = MakeLabels(input.keys, {1, 6});
  input.blocks = CutBlocks(segments, 4, 8);
  for (int t = 0; t < 5; ++t) input.queries.push_back(draws.NormalRows(3, 8));
  input.scale = 0.4;
  return input;
}

TEST(TwoLevel, AllBlocksSearchedIsASelectionByLabels) {
  ForSeeds(30, [](Draws& draws) {
    const TwoLevelInput input = RandomInput(draws);
    const Budget budget{draws.Between(0, 30), std::nullopt};
    const Indices candidates = PositionsIn(input.blocks, FullBlocks(input.blocks));
    const auto steps = SelectTwoLevel(input, {1000, budget, draws.Between(0, 1), std::nullopt});
    for (std::size_t t = 0; t < steps.size(); ++t) {
      const TopSet expected =
          SelectByLabels(input.queries[t], input.labels, candidates, budget, 0, input.scale);
      EXPECT_EQ(steps[t].tokens.taken, expected.taken);
    }
  });
}

TEST(TwoLevel, ARunMayBeCutWithTheEarlierBlocksHandedOn) {
  ForSeeds(30, [](Draws& draws) {
    TwoLevelInput input = RandomInput(draws);
    TwoLevelPolicy policy{3, {7, std::nullopt}, 1, std::nullopt};
    const auto whole = SelectTwoLevel(input, policy);
    const auto queries = input.queries;
    for (std::size_t t = 0; t < queries.size(); ++t) {
      input.queries = {queries[t]};
      const auto step = SelectTwoLevel(input, policy);
      EXPECT_EQ(step[0].read, whole[t].read);
      EXPECT_EQ(step[0].blocks.taken, whole[t].blocks.taken);
      policy.earlier = step[0].blocks.taken;
    }
    // A constant query leaves nothing to lag behind.
    input.queries = {queries[0], queries[0], queries[0]};
    policy.earlier.reset();
    const auto lagging = SelectTwoLevel(input, policy);
    policy.lag = 0;
    const auto prompt = SelectTwoLevel(input, policy);
    for (std::size_t t = 0; t < 3; ++t) EXPECT_EQ(lagging[t].read, prompt[t].read);
  });
}

}  // namespace
}  // namespace attnd::oracle
