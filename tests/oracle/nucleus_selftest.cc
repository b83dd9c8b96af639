// SPDX-License-Identifier: Apache-2.0
//
// Goal: the oracle of the top-p pruner is right, and its two forms differ in nothing but ties as
// its header says. Method: cases small enough to compute by hand, stated beside the expectation;
// both forms over seeded random weights with many ties, all of them multiples of 2^-20, so that
// every sum is exact.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/oracle/draws.h"
#include "tests/oracle/int4.h"
#include "tests/oracle/nucleus.h"

namespace attnd::oracle {
namespace {

TEST(TakeMass, HandComputed) {
  const Vector weights = {0.125, 0.5, 0.25, 0.125};
  const Indices candidates = {2, 4, 6, 8};
  const auto taken = [&](double p) { return TakeMass(candidates, weights, p).taken; };
  EXPECT_EQ(taken(0.5), Indices({4}));
  EXPECT_EQ(taken(0.5001), Indices({4, 6}));
  EXPECT_EQ(taken(0.75), Indices({4, 6}));
  EXPECT_EQ(taken(0.8), Indices({2, 4, 6}));  // 2 and 8 tie
  EXPECT_EQ(taken(0.9), candidates);
  EXPECT_EQ(taken(1.0), candidates);
  EXPECT_EQ(taken(1e-9), Indices({4}));
  EXPECT_EQ(TakeMass({}, {}, 0.5).taken, Indices{});
  EXPECT_EQ(TakeMass({1, 2}, {1.0, 0.0}, 1.0).taken, Indices({1, 2}));
  // By rounding no prefix reaches p: all.
  EXPECT_EQ(TakeMass({1, 2}, {0.5, 0.4}, 0.95).taken, Indices({1, 2}));
}

TEST(TakeMass, Margins) {
  const Vector weights = {0.5, 0.45, 0.03, 0.02};
  const TopSet set = TakeMass(Range(0, 4), weights, 0.95 * (1.0 + 1e-6));
  EXPECT_EQ(set.taken, Indices({0, 1, 2}));
  EXPECT_EQ(set.must, std::vector<bool>({true, true, false, false}));
  EXPECT_EQ(CheckTaken(set, {0, 1}), "");
  EXPECT_EQ(CheckTaken(set, {0, 1, 3}), "3 is taken and may not be");
  EXPECT_EQ(CheckTaken(set, {0, 2}), "1 must be taken and is not");
}

TEST(NucleusByThreshold, HandComputed) {
  const Vector weights = {0.125, 0.5, 0.25, 0.125};
  const Indices candidates = {2, 4, 6, 8};
  EXPECT_EQ(NucleusByThreshold(candidates, weights, 0.5), Indices({4}));
  EXPECT_EQ(NucleusByThreshold(candidates, weights, 0.75), Indices({4, 6}));
  EXPECT_EQ(NucleusByThreshold(candidates, weights, 0.8), candidates);  // 2 and 8 tie
  EXPECT_EQ(NucleusByThreshold(candidates, weights, 0.9), candidates);
  EXPECT_EQ(NucleusByThreshold(candidates, weights, 1.0), candidates);
  EXPECT_EQ(NucleusByThreshold({}, {}, 0.5), Indices{});
  EXPECT_EQ(NucleusByThreshold({5}, {1.0}, 0.5), Indices({5}));
  EXPECT_EQ(NucleusByThreshold({5, 6, 7}, {0.0, 1.0, 0.0}, 0.999), Indices({6}));
  EXPECT_EQ(NucleusByThreshold(Range(0, 4), Vector(4, 0.25), 0.3), Range(0, 4));
}

// l becomes 0.5, the weight at the cut, while 0.875 and 1 lie above it; then r becomes 0.75 and no
// weight lies between. min{w > l} = 0.875 and max{w <= r} = 0.5 never meet.
TEST(NucleusByThreshold, EndsWhereABoundHitsTheWeightAtTheCut) {
  const Vector weights = {1.0 / 8, 0.5 / 8, 0.875 / 8, 0.5 / 8};
  EXPECT_EQ(NucleusByThreshold(Range(0, 4), weights, 2.8 / 8), Range(0, 4));
  EXPECT_EQ(NucleusByThreshold(Range(0, 4), weights, 1.875 / 8), Indices({0, 2}));
}

TEST(NucleusByThreshold, TinyWeightsBesideAHugeOne) {
  const Vector weights = {1e-300, 1.0 - 1e-9, 1e-9, 2e-300};
  EXPECT_EQ(NucleusByThreshold(Range(0, 4), weights, 0.9), Indices({1}));
  EXPECT_EQ(NucleusByThreshold(Range(0, 4), weights, 1.0 - 5e-10), Indices({1, 2}));
}

// Integers over 2^20 that sum to 1: few different ones, zeros among them.
Vector TiedWeights(Draws& draws) {
  constexpr std::size_t kTotal = std::size_t{1} << 20;
  const std::size_t kinds = draws.Between(1, 5);
  Indices levels;
  for (std::size_t i = 0; i < kinds; ++i) levels.push_back(draws.Between(0, 2000));
  if (draws.Chance(0.5)) levels.push_back(1024);  // bounds hit powers of two
  Indices counts;
  std::size_t sum = 0;
  for (std::size_t i = draws.Between(1, 200); i > 0; --i) {
    counts.push_back(levels[draws.Between(0, levels.size() - 1)]);
    sum += counts.back();
  }
  counts[draws.Between(0, counts.size() - 1)] += kTotal - sum;  // one great weight
  Vector weights;
  for (const std::size_t count : counts) weights.push_back(static_cast<double>(count) / kTotal);
  return weights;
}

TEST(Nucleus, TheThresholdKeepsWhatTheRankingKeepsAndItsTies) {
  int agreements = 0;
  int ties = 0;
  ForSeeds(2000, [&](Draws& draws) {
    const Vector weights = TiedWeights(draws);
    const Indices candidates = Range(0, weights.size());
    double p = std::max(draws.Uniform(), 0x1p-30);
    if (draws.Chance(0.5)) {  // p is exactly a sum of the greatest
      Vector descending = weights;
      std::sort(descending.begin(), descending.end(), std::greater<>());
      p = 0.0;
      for (std::size_t i = draws.Between(1, weights.size()); i > 0; --i) {
        p += descending[i - 1];
      }
      p = std::max(p, 0x1p-30);
    }
    const Indices ranked = TakeMass(candidates, weights, p).taken;
    const Indices searched = NucleusByThreshold(candidates, weights, p);

    double least = kInfinity;  // v*
    double sum = 0.0;
    for (const std::size_t j : ranked) {
      least = std::min(least, weights[j]);
      sum += weights[j];
    }
    // The ranking is minimal.
    EXPECT_GE(sum, p);
    if (p < 1.0) {
      EXPECT_LT(sum - least, p);
    }
    Indices expected;
    double above = 0.0;
    double tied = 0.0;
    for (const std::size_t j : candidates) {
      if (weights[j] >= least) expected.push_back(j);
      if (weights[j] > least) above += weights[j];
      if (weights[j] == least) ++tied;
    }
    EXPECT_EQ(searched, expected);
    const bool agree = p >= 1.0 || above + (tied - 1.0) * least < p;
    EXPECT_EQ(searched == ranked, agree);
    ++(agree ? agreements : ties);
    EXPECT_EQ(CheckTaken(TakeMass(candidates, weights, p), searched), "");
  });
  // Both kinds were really tried.
  EXPECT_GT(agreements, 200);
  EXPECT_GT(ties, 200);
}

TEST(Nucleus, BothFormsAgreeOnWeightsWithoutTies) {
  ForSeeds(300, [](Draws& draws) {
    const Indices candidates = Range(0, draws.Between(1, 300));
    const auto rows = draws.NormalRows(candidates.size(), 4);
    const Vector weights =
        HeadWeights(draws.NormalVector(4), rows, candidates, draws.Uniform() * 9);
    for (const double p : {0.3, 0.85, 0.95, 0.999}) {
      EXPECT_EQ(NucleusByThreshold(candidates, weights, p), TakeMass(candidates, weights, p).taken);
    }
  });
}

// ---- Prune ----

TEST(Prune, EachHeadHasItsOwnSet) {
  // Weights 1, 2, 5 over 8 for the first head, 10, 5, 2 over 17 for the second.
  std::vector<Vector> rows(10, Vector{99.0});
  rows[3] = {0.0};
  rows[5] = {std::log(2.0)};
  rows[9] = {std::log(5.0)};
  const Pruned pruned = Prune({{1.0}, {-1.0}}, rows, {3, 5, 9}, 0.6, 1.0);
  EXPECT_EQ(pruned.heads[0].taken, Indices({9}));     // 0.625
  EXPECT_EQ(pruned.heads[1].taken, Indices({3, 5}));  // 0.588, 0.882
  EXPECT_EQ(pruned.read, Indices({3, 5, 9}));
  ExpectNear(pruned.heads[0].scores, {0.125, 0.25, 0.625}, kClose);
  EXPECT_EQ(Prune({{1.0}, {-1.0}}, rows, {3, 5, 9}, 1.0, 1.0).heads[0].taken, Indices({3, 5, 9}));
  EXPECT_EQ(Prune({{1.0}, {-1.0}}, rows, {}, 0.9, 1.0).read, Indices{});
}

TEST(Prune, EqualKeysAreKeptInOrder) {
  const auto rows = ThroughInt4(std::vector<Vector>(20, Vector{0.5, 0.5, 0.5}));
  const Pruned pruned = Prune({{1.0, 2.0, 3.0}}, rows, Range(0, 20), 0.52, 1.0);
  EXPECT_EQ(pruned.read, Range(0, 11));  // 10 / 20 is less than 0.52
}

TEST(Prune, OneHugeLogitIsEnough) {
  std::vector<Vector> rows(20, Vector{0.0});
  rows[7] = {1e5};
  EXPECT_EQ(Prune({{1.0}}, rows, Range(0, 20), 0.999999, 1.0).read, Indices({7}));
}

}  // namespace
}  // namespace attnd::oracle
