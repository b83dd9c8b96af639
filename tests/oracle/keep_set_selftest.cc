// SPDX-License-Identifier: Apache-2.0
//
// Goal: the oracle of the keep-sets is right. Method: cases small enough to compute by hand, stated
// beside the expectation; what the definitions must obey over seeded random inputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/oracle/attention.h"
#include "tests/oracle/draws.h"
#include "tests/oracle/keep_set.h"

namespace attnd::oracle {
namespace {

// ---- the parts ----

TEST(MiddleOfPrefill, HandComputed) {
  EXPECT_EQ(MiddleOfPrefill(1000).begin, 4u);
  EXPECT_EQ(MiddleOfPrefill(1000).end, 872u);
  for (const std::size_t prefill : {0u, 3u, 4u, 100u, 128u, 132u}) {
    EXPECT_EQ(MiddleOfPrefill(prefill).size(), 0u) << prefill;
  }
  EXPECT_EQ(MiddleOfPrefill(133).size(), 1u);
}

TEST(CausalMass, SeesItsOwnPositionAndNoneAfter) {
  const std::vector<Vector> keys = {{0.0}, {std::log(3.0)}, {100.0}};
  ExpectNear(CausalMass({1.0}, 1, keys, 1.0), {0.25, 0.75, 0.0}, kClose);
  ExpectNear(CausalMass({1.0}, 0, keys, 1.0), {1.0, 0.0, 0.0}, kClose);
}

TEST(AveragePool, HandComputed) {
  ExpectNear(AveragePool({3.0, 6.0, 0.0, 9.0}, 3), {3.0, 3.0, 5.0, 3.0}, kClose);
  ExpectNear(AveragePool({3.0, 6.0}, 21), {9.0 / 21.0, 9.0 / 21.0}, kClose);
  ExpectNear(AveragePool({3.0, 6.0}, 1), {3.0, 6.0}, kClose);
  EXPECT_EQ(AveragePool({}, 21), Vector{});
  Vector impulse(50, 0.0);
  impulse[20] = 21.0;
  const Vector pooled = AveragePool(impulse);
  for (std::size_t j = 0; j < 50; ++j) {
    EXPECT_NEAR(pooled[j], j >= 10 && j <= 30 ? 1.0 : 0.0, kClose) << j;
  }
}

// Prefill of 4, no sink, window 1: the middle is 0..2. Two observation queries at 2 and 3.
ObservedHead SmallHead() {
  return {{{{0.0}, {1.0}}}, {{0.0}, {std::log(2.0)}, {0.0}, {std::log(4.0)}}};
}

TEST(Scores, HandComputed) {
  // Masses over the middle: 1/3, 1/3, 1/3 at position 2; 1/8, 2/8, 1/8 at 3.
  const Middle middle{0, 3};
  const double a = 11.0 / 48.0;  // (1/3 + 1/8) / 2
  const double b = 14.0 / 48.0;
  ExpectNear(SnapScores(SmallHead(), middle, 1.0), Vector(3, (a + b + a) / 21.0),
             kClose);  // the kernel covers all three
  ExpectNear(AdaScores(SmallHead(), middle, 1.0), Vector(3, 1.0 / 21.0), kClose);
  // A window's own masses do not leak into the middle, nor the sink's.
  ExpectNear(SnapScores(SmallHead(), {1, 2}, 1.0), {b / 21.0}, kClose);
}

// Two queries whose masses lie on tokens 10 and 30: pooled first, the maximum between them is that
// of one; aggregated first, both count.
TEST(Scores, TheOrderOfPoolingMattersForTheMaximumAlone) {
  ObservedHead head;
  head.keys.assign(60, Vector{0.0, 0.0});
  head.keys[10] = {200.0, 0.0};
  head.keys[30] = {0.0, 200.0};
  head.queries = {{{1.0, 0.0}, {0.0, 1.0}}};
  const Middle middle{4, 50};
  const Vector after = AdaScores(head, middle, 1.0);
  const Vector before = AdaScores(head, middle, 1.0, Pooling::kBeforeAggregation);
  EXPECT_NEAR(after[20 - 4], 2.0 / 21.0, kClose);
  EXPECT_NEAR(before[20 - 4], 1.0 / 21.0, kClose);
  EXPECT_NEAR(after[19 - 4], 1.0 / 21.0, kClose);
  ForSeeds(5, [](Draws& draws) {
    const ObservedHead random{{draws.NormalRows(20, 4), draws.NormalRows(20, 4)},
                              draws.NormalRows(80, 4)};
    ExpectNear(SnapScores(random, {4, 60}, 1.0),
               SnapScores(random, {4, 60}, 1.0, Pooling::kBeforeAggregation), kClose);
  });
}

TEST(Scores, TheMeanOverQueriesIsOfDenseAttention) {
  ForSeeds(10, [](Draws& draws) {
    constexpr std::size_t kPrefill = 50;
    const ObservedHead head{{draws.NormalRows(12, 4), draws.NormalRows(12, 4)},
                            draws.NormalRows(kPrefill, 4)};
    // Values that are unit vectors make the output of attention its weights.
    std::vector<Vector> units(kPrefill, Vector(kPrefill, 0.0));
    for (std::size_t j = 0; j < kPrefill; ++j) units[j][j] = 1.0;
    Vector mean(kPrefill, 0.0);
    for (const auto& queries : head.queries) {
      for (std::size_t i = 0; i < 12; ++i) {
        const std::size_t seen = kPrefill - 12 + i + 1;
        const std::vector<Vector> keys(head.keys.begin(), head.keys.begin() + seen);
        const std::vector<Vector> values(units.begin(), units.begin() + seen);
        const HeadOutput dense = DenseHead(queries[i], keys, values, 0.9, kPrefill);
        for (std::size_t j = 0; j < kPrefill; ++j) mean[j] += dense.out[j] / 24.0;
      }
    }
    const Vector masses(mean.begin() + 4, mean.begin() + 45);
    ExpectNear(SnapScores(head, {4, 45}, 0.9), AveragePool(masses), kClose);
  });
}

TEST(Scores, DegenerateInputs) {
  // All keys equal: masses 1 / 40 each, lower only by pooling at the ends.
  ObservedHead head{{{Vector{1.0}}}, std::vector<Vector>(40, Vector{0.5})};
  const Vector scores = SnapScores(head, {0, 39}, 1.0);
  EXPECT_NEAR(scores[0], 11.0 / 21.0 / 40.0, kClose);
  EXPECT_NEAR(scores[19], 1.0 / 40.0, kClose);
  // One huge logit: its neighbourhood shares it.
  head.keys[20] = {1e5};
  EXPECT_NEAR(AdaScores(head, {0, 39}, 1.0)[10], 1.0 / 21.0, kClose);
  EXPECT_EQ(AdaScores(head, {0, 39}, 1.0)[9], 0.0);
  // An empty middle.
  EXPECT_EQ(SnapScores(head, {4, 4}, 1.0), Vector{});
  EXPECT_TRUE(KeepTop({}, {4, 4}, {100, std::nullopt}).taken.empty());
  EXPECT_TRUE(KeepAdaptive({{}, {}}, {4, 4}, {100, std::nullopt})[1].taken.empty());
}

// ---- keep-sets ----

TEST(KeepTop, HandComputed) {
  const Middle middle{4, 9};
  const Vector scores = {0.1, 0.4, 0.2, 0.4, 0.2};
  EXPECT_EQ(KeepTop(scores, middle, {3, std::nullopt}).taken, Indices({5, 6, 7}));
  EXPECT_EQ(KeepTop(scores, middle, {0, 0.2}).taken, Indices({5}));
  EXPECT_EQ(KeepTop(scores, middle, {99, std::nullopt}).taken, Range(4, 9));
}

TEST(KeepAdaptive, HandComputed) {
  const Middle middle{4, 9};
  const std::vector<Vector> scores = {{0.9, 0.8, 0.7, 0.6, 0.5}, {0.1, 0.2, 0.1, 0.6, 0.2}};
  // B = 5 of 5: everything.
  for (const TopSet& head : KeepAdaptive(scores, middle, {5, std::nullopt})) {
    EXPECT_EQ(head.taken, Range(4, 9));
    EXPECT_EQ(CheckTaken(head, Range(4, 9)), "");
  }
  // B = 3, each floor(0.6) = 0 first: the six best of all ten, 0.6 of both heads among them.
  const auto free = KeepAdaptive(scores, middle, {3, std::nullopt});
  EXPECT_EQ(free[0].taken, Range(4, 9));
  EXPECT_EQ(free[1].taken, Indices({7}));
  // B = 3, each floor(2.4) = 2 first: 7 and 5 of the second head (5 and 8 tie), then the best two
  // left.
  const auto floored = KeepAdaptive(scores, middle, {3, std::nullopt}, 0.8);
  EXPECT_EQ(floored[0].taken, Indices({4, 5, 6, 7}));
  EXPECT_EQ(floored[1].taken, Indices({5, 7}));
  // B = 2 of all to themselves: as uniform as SnapKV.
  const auto uniform = KeepAdaptive(scores, middle, {2, std::nullopt}, 1.0);
  EXPECT_EQ(uniform[0].taken, Indices({4, 5}));
  EXPECT_EQ(uniform[1].taken, Indices({5, 7}));
}

TEST(KeepAdaptive, TiesGoToTheLowerHeadThenToken) {
  const auto kept = KeepAdaptive({Vector(5, 0.3), Vector(5, 0.3), Vector(5, 0.3)}, {4, 9},
                                 {5 - 3, std::nullopt}, 0.5);
  EXPECT_EQ(kept[0].taken, Indices({4, 5, 6, 7}));  // its own 1, then the first 3 left
  EXPECT_EQ(kept[1].taken, Indices({4}));
  EXPECT_EQ(kept[2].taken, Indices({4}));
}

TEST(KeepAdaptive, FloorsThatRoundingMisses) {
  // 0.07 * 100 is above 7 in double and 0.29 * 100 below 29.
  Vector scores;
  for (int j = 0; j < 100; ++j) scores.push_back(1.0 + j);
  const Vector low(100, 1e-3);
  EXPECT_EQ(KeepAdaptive({scores, low}, {0, 100}, {50, std::nullopt}, 0.14)[1].taken.size(), 7u);
  EXPECT_EQ(KeepAdaptive({low, scores}, {0, 100}, {50, std::nullopt}, 0.58)[0].taken.size(), 29u);
  EXPECT_EQ(KeepAdaptive({scores, low}, {0, 100}, {49, std::nullopt})[1].taken.size(), 9u);
}

TEST(KeepAdaptive, KeepsTheBudgetTheFloorsAndTheBest) {
  ForSeeds(200, [](Draws& draws) {
    const std::size_t heads = draws.Between(1, 5);
    const std::size_t size = draws.Between(1, 80);
    const std::size_t budget = draws.Between(0, 100);
    std::vector<Vector> scores;
    for (std::size_t h = 0; h < heads; ++h) {
      scores.emplace_back();
      const double spread = draws.Uniform();
      for (std::size_t j = 0; j < size; ++j) {
        const double score = std::exp(spread * draws.Normal());
        scores[h].push_back(draws.Chance(0.5) ? std::round(4.0 * score) : score);  // many ties
      }
    }
    const auto kept = KeepAdaptive(scores, {4, 4 + size}, {budget, std::nullopt});
    const std::size_t uniform = std::min(budget, size);
    std::size_t total = 0;
    double worst_shared = kInfinity;
    double best_left = -kInfinity;
    for (std::size_t h = 0; h < heads; ++h) {
      total += kept[h].taken.size();
      EXPECT_EQ(CheckTaken(kept[h], kept[h].taken), "");
      // Each keeps a prefix of its own ranking, no shorter than its floor.
      Indices prefix(kept[h].order.begin(), kept[h].order.begin() + kept[h].taken.size());
      std::sort(prefix.begin(), prefix.end());
      EXPECT_EQ(kept[h].taken, prefix);
      EXPECT_GE(kept[h].taken.size(), uniform / 5);
      const std::size_t taken = kept[h].taken.size();
      if (taken > uniform / 5) {
        worst_shared = std::min(worst_shared, scores[h][kept[h].order[taken - 1] - 4]);
      }
      if (taken < size) best_left = std::max(best_left, scores[h][kept[h].order[taken] - 4]);
    }
    EXPECT_EQ(total, heads * uniform);
    EXPECT_GE(worst_shared, best_left);
  });
}

}  // namespace
}  // namespace attnd::oracle
