// SPDX-License-Identifier: Apache-2.0
//
// Goal: the oracles of 4-bit codes and of token labels are right. Method: cases small enough to
// compute by hand, stated beside the expectation; what codes may lose, and what labels of all
// channels must find, over seeded random inputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/oracle/draws.h"
#include "tests/oracle/int4.h"
#include "tests/oracle/labels.h"

namespace attnd::oracle {
namespace {

// ---- int4 ----

TEST(Int4, HandComputed) {
  const Int4Row row = EncodeInt4({-3.0, 27.0, 0.0, 12.0, 1.0});
  EXPECT_EQ(row.min, -3.0);
  EXPECT_EQ(row.scale, 2.0);
  EXPECT_EQ(row.codes, std::vector<int>({0, 15, 2, 8, 2}));  // levels 0, 15, 1.5, 7.5, 2
  EXPECT_EQ(row.Dequantised(), Vector({-3.0, 27.0, 1.0, 13.0, 1.0}));
  EXPECT_EQ(row.margin, 0.0);  // 1.5 and 7.5 are halves
  EXPECT_EQ(EncodeInt4({0.0, 15.0, 4.25}).margin, 0.25);
}

TEST(Int4, ConstantRows) {
  for (const Int4Rounding rounding : {Int4Rounding::kNone, Int4Rounding::kFloat32}) {
    const Int4Row row = EncodeInt4({2.5, 2.5}, rounding);
    EXPECT_EQ(row.scale, 0.0);
    EXPECT_EQ(row.codes, std::vector<int>({0, 0}));
    EXPECT_EQ(row.Dequantised(), Vector({2.5, 2.5}));
  }
  // A spread that float32 cannot hold is none.
  EXPECT_EQ(EncodeInt4({0.0, 1e-60}, Int4Rounding::kFloat32).codes, std::vector<int>({0, 0}));
  EXPECT_EQ(EncodeInt4({0.0, 1e-60}).codes, std::vector<int>({0, 15}));
  EXPECT_EQ(EncodeInt4({7.0}).Dequantised(), Vector({7.0}));
}

TEST(Int4, CodesOfAGivenMinAndScaleAreHeldInRange) {
  EXPECT_EQ(EncodeInt4With({-1.0, 0.4, 0.5, 99.0}, 0.0, 1.0).codes,
            std::vector<int>({0, 0, 1, 15}));
}

TEST(Int4, RoundedToFloat32) {
  const Vector numbers = {0.1, 1.3, 0.69999999};
  const Int4Row row = EncodeInt4(numbers, Int4Rounding::kFloat32);
  EXPECT_EQ(row.min, static_cast<double>(0.1f));
  EXPECT_EQ(row.scale, static_cast<double>(static_cast<float>(1.2 / 15.0)));
  // The last level is 7.50000002 with the rounded min and scale, and 7.49999988 without.
  EXPECT_EQ(row.codes, std::vector<int>({0, 15, 8}));
  EXPECT_NEAR(row.margin, 2.4e-8, 1e-9);
  EXPECT_EQ(EncodeInt4(numbers).codes, std::vector<int>({0, 15, 7}));
}

TEST(Int4, LosesAtMostHalfAStep) {
  ForSeeds(200, [](Draws& draws) {
    Vector row = draws.NormalVector(draws.Between(1, 64));
    if (draws.Chance(0.2)) row[0] = 1e4;
    for (const Int4Rounding rounding : {Int4Rounding::kNone, Int4Rounding::kFloat32}) {
      const Int4Row code = EncodeInt4(row, rounding);
      const Vector back = code.Dequantised();
      const double rounded = rounding == Int4Rounding::kFloat32 ? 1e-6 * code.scale * 15.0 : 0.0;
      for (std::size_t i = 0; i < row.size(); ++i) {
        EXPECT_GE(code.codes[i], 0);
        EXPECT_LE(code.codes[i], 15);
        EXPECT_NEAR(back[i], row[i], code.scale * (0.5 + kClose) + rounded + 1e-6);
      }
      EXPECT_EQ(code.codes[static_cast<std::size_t>(std::min_element(row.begin(), row.end()) -
                                                    row.begin())],
                0);
    }
  });
}

// ---- labels ----

TEST(ChooseChannels, HandComputed) {
  // max |k| = 4, 3, 1, 2. Heads' max |q|: 1, 2, 3, 0 and 1, 0, 9, 2; means 1, 1, 6, 1.
  const std::vector<Vector> keys = {{-4.0, 1.0, 1.0, 2.0}, {0.0, -3.0, 0.5, -2.0}};
  const std::vector<std::vector<Vector>> queries = {{{1.0, 0.0, -3.0, 0.0}, {0.0, 2.0, 1.0, 0.0}},
                                                    {{-1.0, 0.0, 9.0, 2.0}}};
  EXPECT_EQ(ChannelImportance(queries, keys), Vector({4.0, 3.0, 6.0, 2.0}));
  EXPECT_EQ(ChooseChannels(queries, keys, 2).taken, Indices({0, 2}));
  EXPECT_EQ(ChannelImportance({}, keys), Vector({4.0, 3.0, 1.0, 2.0}));
  EXPECT_EQ(ChooseChannels({}, keys, 2).taken, Indices({0, 1}));
  EXPECT_EQ(ChooseChannels({}, {{1.0, 1.0, 1.0}}, 2).taken, Indices({0, 1}));  // ties
}

TEST(Labels, HoldTheChosenChannelsAlone) {
  // Coded from channels 1 and 2, whatever channel 0 holds.
  const Labels labels = MakeLabels({{500.0, 1.0, 16.0}, {-500.0, 3.0, 3.0}}, {1, 2});
  EXPECT_EQ(labels.rows, std::vector<Vector>({{1.0, 16.0}, {3.0, 3.0}}));
}

TEST(SelectByLabels, HandComputed) {
  // One channel of each token counts; labels of one channel are exact.
  const std::vector<Vector> keys = {{0, 9}, {std::log(2), -9}, {std::log(4), 0}, {std::log(2), 5}};
  const Labels labels = MakeLabels(keys, {0});
  const std::vector<Vector> queries = {{1.0, 7.0}, {2.0, -7.0}};
  // Weights 1, 2, 4, 2 over 9 and 1, 4, 16, 4 over 25.
  ExpectNear(LabelWeights(queries, labels, Range(0, 4), 1.0),
             {(1 / 9.0 + 1 / 25.0) / 2, (2 / 9.0 + 4 / 25.0) / 2, (4 / 9.0 + 16 / 25.0) / 2,
              (2 / 9.0 + 4 / 25.0) / 2},
             kClose);
  const auto taken = [&](const Indices& candidates, const Budget& budget) {
    return SelectByLabels(queries, labels, candidates, budget, 4, 1.0).taken;
  };
  EXPECT_EQ(taken(Range(0, 4), {2, std::nullopt}), Indices({1, 2}));  // 1 and 3 tie
  EXPECT_EQ(taken({0, 1, 3}, {1, std::nullopt}), Indices({1}));
  EXPECT_EQ(taken({0, 1, 3}, {0, 0.5}), Indices({1, 3}));  // half of the middle's 4
  EXPECT_EQ(taken({}, {5, std::nullopt}), Indices{});
  EXPECT_EQ(taken({3}, {5, std::nullopt}), Indices({3}));
  // Another channel: queries are projected as keys are.
  ExpectNear(LabelWeights({{7.0, 1.0}}, MakeLabels(keys, {1}), {0, 3}, std::log(3.0)),
             {81.0 / 82.0, 1.0 / 82.0}, kClose);
  // Over fewer candidates the weights are other ones.
  ExpectNear(LabelWeights({{1.0, 0.0}}, labels, {0, 3}, 1.0), {1 / 3.0, 2 / 3.0}, kClose);
}

TEST(SelectByLabels, EqualKeysAreTakenInOrder) {
  const Labels labels = MakeLabels(std::vector<Vector>(10, Vector{0.3, -1.0, 2.0}), {0, 2});
  const TopSet set =
      SelectByLabels({{1.0, 1.0, 1.0}}, labels, Range(2, 10), {3, std::nullopt}, 8, 1.0);
  EXPECT_EQ(set.taken, Indices({2, 3, 4}));
  ExpectNear(set.scores, Vector(8, 1.0 / 8.0), kClose);
}

TEST(SelectByLabels, OneHugeLogitComesFirst) {
  std::vector<Vector> keys(20, Vector{0.0, 0.0});
  keys[13] = {4000.0, 0.0};
  const TopSet set = SelectByLabels({{1.0, 0.0}}, MakeLabels(keys, {0, 1}), Range(0, 20),
                                    {1, std::nullopt}, 20, 1);
  EXPECT_EQ(set.taken, Indices({13}));
  EXPECT_EQ(set.scores[13], 1.0);
}

// Keys that 4 bits hold exactly, all channels chosen: the labels rank as attention itself does.
TEST(SelectByLabels, ExactLabelsOfAllChannelsAreAttention) {
  ForSeeds(20, [](Draws& draws) {
    std::vector<Vector> keys;
    for (int j = 0; j < 50; ++j) {
      Vector key = {0.0, 15.0};
      for (int c = 0; c < 4; ++c) key.push_back(static_cast<double>(draws.Between(0, 15)));
      keys.push_back(key);
    }
    const auto queries = draws.NormalRows(3, 6);
    const Indices candidates = draws.Subset(50, 0.5);
    const Labels labels = MakeLabels(keys, Range(0, 6));
    EXPECT_EQ(labels.rows, keys);
    ExpectNear(LabelWeights(queries, labels, candidates, 0.2),
               GroupWeights(queries, keys, candidates, 0.2), kClose);
  });
}

}  // namespace
}  // namespace attnd::oracle
