// SPDX-License-Identifier: Apache-2.0
//
// Goal: rankings, cuts and their margins, and the exact softmax over an explicit set of tokens are
// right. Method: cases small enough to compute by hand, stated beside the expectation; identities
// with dense attention over seeded random inputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/oracle/attention.h"
#include "tests/oracle/draws.h"
#include "tests/oracle/ranking.h"
#include "tests/oracle/token_attention.h"

namespace attnd::oracle {
namespace {

// ---- counts and rankings ----

TEST(Ranking, BudgetsOfTokens) {
  EXPECT_EQ(TokensOf({1024, std::nullopt}, 100, 100), 100u);
  EXPECT_EQ(TokensOf({3, std::nullopt}, 100, 50), 3u);
  EXPECT_EQ(TokensOf({0, std::nullopt}, 100, 50), 0u);
  EXPECT_EQ(TokensOf({7, 0.101}, 100, 50), 11u);  // the share goes before the tokens
  EXPECT_EQ(TokensOf({0, 0.9}, 100, 50), 50u);    // 90 of the whole, 50 to be had
  EXPECT_EQ(TokensOf({0, 1e-9}, 100, 50), 1u);
  EXPECT_EQ(TokensOf({0, 0.5}, 0, 0), 0u);
}

TEST(TakeTop, LowerNumbersWinTies) {
  const TopSet set = TakeTop({3, 5, 8, 9}, {1.0, 2.0, 1.0, 2.0}, 3);
  EXPECT_EQ(set.order, Indices({5, 9, 3, 8}));
  EXPECT_EQ(set.taken, Indices({3, 5, 9}));
  EXPECT_EQ(set.must, std::vector<bool>({false, true, false, true}));
  EXPECT_EQ(set.may, std::vector<bool>({true, true, true, true}));
  EXPECT_EQ(CheckTaken(set, {9, 8, 5}), "");  // within the margin, as a tie is
}

TEST(TakeTop, MarginsAreRelativeToTheCutAndSlackIsNot) {
  // Each gap is 1e-3, the cut between -10.001 and -10.
  const Vector scores = {-9.999, -10.0, -10.001, -10.002};
  const TopSet narrow = TakeTop(Range(0, 4), scores, 2, 5e-5);
  EXPECT_EQ(narrow.must, std::vector<bool>({true, true, false, false}));
  EXPECT_EQ(narrow.may, narrow.must);
  const TopSet wide = TakeTop(Range(0, 4), scores, 2, 1.5e-4);
  EXPECT_EQ(wide.must, std::vector<bool>({true, false, false, false}));
  EXPECT_EQ(wide.may, std::vector<bool>({true, true, true, false}));
  const TopSet slack = TakeTop(Range(0, 4), scores, 2, 0.0, 1.5e-3);
  EXPECT_EQ(slack.must, wide.must);
  EXPECT_EQ(slack.may, wide.may);
}

TEST(TakeTop, AllAndNothing) {
  const TopSet all = TakeTop({1, 2}, {0.5, 0.5}, 9);
  EXPECT_EQ(all.taken, Indices({1, 2}));
  EXPECT_EQ(all.must, std::vector<bool>({true, true}));
  const TopSet nothing = TakeTop({1, 2}, {0.5, 0.5}, 0);
  EXPECT_EQ(nothing.taken, Indices{});
  EXPECT_EQ(nothing.may, std::vector<bool>({false, false}));
  const TopSet none = TakeTop({}, {}, 3);
  EXPECT_EQ(CheckTaken(none, {}), "");
}

TEST(CheckTaken, SaysWhatIsWrong) {
  const TopSet set = TakeTop({3, 5, 8, 9}, {1.0, 4.0, 2.0, 3.0}, 2);
  EXPECT_EQ(CheckTaken(set, {9, 5}), "");
  EXPECT_EQ(CheckTaken(set, {4, 5}), "4 is no candidate");
  EXPECT_EQ(CheckTaken(set, {5, 5}), "5 is taken twice");
  EXPECT_EQ(CheckTaken(set, {5, 8}), "8 is taken and may not be");
  EXPECT_EQ(CheckTaken(set, {5}), "9 must be taken and is not");
  const TopSet ties = TakeTop({0, 1, 2}, {1.0, 1.0, 1.0}, 2);
  EXPECT_EQ(CheckTaken(ties, {0}), "1 are taken and not 2");
  EXPECT_EQ(CheckTaken(ties, {0, 2}), "");
}

TEST(GroupWeights, HandComputed) {
  // Row 7 is no candidate and has no weight, however great its logit.
  std::vector<Vector> rows(8, Vector{0.0});
  rows[2] = {std::log(3.0)};
  rows[7] = {100.0};
  ExpectNear(HeadWeights({1.0}, rows, {0, 2}, 1.0), {0.25, 0.75}, kClose);
  ExpectNear(GroupWeights({{1.0}, {-1.0}}, rows, {0, 2}, 1.0), {0.5, 0.5}, kClose);
  ExpectNear(GroupWeights({{2.0}, {0.0}}, rows, {0, 2}, 0.5), {0.375, 0.625}, kClose);
  EXPECT_EQ(HeadWeights({1.0}, rows, {}, 1.0), Vector{});
  // One huge logit takes all, without overflow.
  rows[2] = {1e6};
  EXPECT_EQ(HeadWeights({1.0}, rows, {0, 2}, 1.0), Vector({0.0, 1.0}));
}

// ---- token_attention ----

TokenInput MakeTokens(Draws& draws, std::size_t tokens) {
  TokenInput input;
  input.queries = draws.NormalRows(3, 6);
  input.keys = draws.NormalRows(tokens, 6);
  input.values = draws.NormalRows(tokens, 5);
  input.scale = 0.7;
  input.value_dim = 5;
  return input;
}

TEST(AttendTokens, HandComputed) {
  // Weights 1, 2, 5 of values 0, 3, 9; the second head reads the first token alone.
  TokenInput input{{{1.0}, {1.0}}, {{0.0}, {std::log(2.0)}, {std::log(5.0)}}, {}, 1.0, 1};
  input.values = {{0.0}, {3.0}, {9.0}};
  const auto answers = AttendTokens(input, {{1, 0}, {0}});
  ExpectNear(answers[0].out, {2.0}, kClose);
  EXPECT_NEAR(answers[0].lse, std::log(3.0), kClose);
  EXPECT_NEAR(answers[0].covered_mass, 3.0 / 8.0, kClose);
  ExpectNear(answers[1].out, {0.0}, kClose);
  EXPECT_NEAR(answers[1].covered_mass, 1.0 / 8.0, kClose);

  // An estimate of the rest: mass 6 at value 8. It is not read.
  SoftmaxState estimate(1);
  estimate.Add(std::log(6.0), {8.0});
  const auto completed = AttendTokens(input, {{0, 1}, {}}, {estimate, SoftmaxState(1)});
  ExpectNear(completed[0].out, {6.0}, kClose);  // (2 * 3 + 6 * 8) / 9
  EXPECT_NEAR(completed[0].lse, std::log(9.0), kClose);
  EXPECT_NEAR(completed[0].covered_mass, 3.0 / 8.0, kClose);
  EXPECT_EQ(completed[1].out, Vector({0.0}));
  EXPECT_EQ(completed[1].lse, -kInfinity);
  EXPECT_EQ(completed[1].covered_mass, 0.0);
}

TEST(AttendTokens, NoTokenAtAll) {
  const TokenInput input{{{1.0}}, {}, {}, 1.0, 2};
  const auto answers = AttendTokens(input, {{}});
  EXPECT_EQ(answers[0].out, Vector({0.0, 0.0}));
  EXPECT_EQ(answers[0].lse, -kInfinity);
  EXPECT_EQ(answers[0].covered_mass, 1.0);
}

TEST(AttendTokens, OneHugeLogit) {
  TokenInput input{{{1.0}}, {{0.0}, {5000.0}}, {{1.0}, {2.0}}, 1.0, 1};
  EXPECT_EQ(AttendTokens(input, {{0}})[0].out, Vector({1.0}));
  EXPECT_EQ(AttendTokens(input, {{0}})[0].covered_mass, 0.0);
  EXPECT_EQ(AttendTokens(input, {{1}})[0].covered_mass, 1.0);
  EXPECT_EQ(AttendTokens(input, {{0, 1}})[0].lse, 5000.0);
}

TEST(AttendTokens, IsDenseAttentionOfWhatIsRead) {
  ForSeeds(20, [](Draws& draws) {
    const TokenInput input = MakeTokens(draws, 60);
    const std::vector<Indices> read = {draws.Subset(60, 0.4), draws.Subset(60, 0.4),
                                       draws.Subset(60, 0.4)};
    const auto answers = AttendTokens(input, read);
    for (std::size_t h = 0; h < 3; ++h) {
      std::vector<Vector> keys;
      std::vector<Vector> values;
      for (const std::size_t j : read[h]) {
        keys.push_back(input.keys[j]);
        values.push_back(input.values[j]);
      }
      const HeadOutput part = DenseHead(input.queries[h], keys, values, input.scale, 5);
      const HeadOutput all = DenseHead(input.queries[h], input.keys, input.values, input.scale, 5);
      ExpectNear(answers[h].out, part.out, kClose);
      EXPECT_NEAR(answers[h].lse, part.lse, kClose);
      EXPECT_NEAR(answers[h].covered_mass, std::exp(part.lse - all.lse), kClose);
    }
  });
}

TEST(AttendTokens, AnExactStateOfTheRestIsDenseAttention) {
  ForSeeds(20, [](Draws& draws) {
    const TokenInput input = MakeTokens(draws, 40);
    const std::size_t cut = draws.Between(0, 40);
    std::vector<SoftmaxState> rest;
    for (const Vector& query : input.queries) {
      rest.emplace_back(5);
      for (std::size_t j = cut; j < 40; ++j) {
        rest.back().Add(input.scale * Dot(query, input.keys[j]), input.values[j]);
      }
    }
    const auto answers = AttendTokens(input, ForEachHead(input, Range(0, cut)), rest);
    for (std::size_t h = 0; h < 3; ++h) {
      const HeadOutput all = DenseHead(input.queries[h], input.keys, input.values, input.scale, 5);
      ExpectNear(answers[h].out, all.out, kClose);
      EXPECT_NEAR(answers[h].lse, all.lse, kClose);
    }
  });
}

TEST(FittingPrefix, StopsAtTheFirstItemThatDoesNotFit) {
  const Vector scores = {0.1, 0.5, 0.3, 0.1};
  const std::vector<std::size_t> sizes = {2, 4, 5, 1};
  EXPECT_EQ(FittingPrefix(scores, sizes, 0), Indices{});
  EXPECT_EQ(FittingPrefix(scores, sizes, 1), Indices({1}));  // one at least
  EXPECT_EQ(FittingPrefix(scores, sizes, 8), Indices({1}));  // item 3 would fit, but ranks lower
  EXPECT_EQ(FittingPrefix(scores, sizes, 9), Indices({1, 2}));
  EXPECT_EQ(FittingPrefix(scores, sizes, 11), Indices({0, 1, 2}));  // 0 and 3 tie
  EXPECT_EQ(FittingPrefix(scores, sizes, 12), Range(0, 4));
  EXPECT_EQ(FittingPrefix({}, {}, 5), Indices{});
}

}  // namespace
}  // namespace attnd::oracle
