// SPDX-License-Identifier: Apache-2.0
//
// Goal: cuts take what docs/POLICIES.md says: the right clusters, the lower number on a tie, the
// right counts at the edges of shares, thresholds and budgets; and scores that overflowed cannot
// make them leave their memory. Method: brute force from the definitions over random scores of
// every shape: with many ties, over 60 orders of magnitude, all equal, all zero.
#include "attention/cpu/selection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/attention/support.h"

namespace attnd::attention::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<uint32_t> Ranked(const std::vector<float>& scores) {
  std::vector<uint32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
  return order;
}

// Scores of one of several shapes, none negative.
std::vector<float> RandomScores(Random* random, size_t n, uint64_t shape) {
  std::vector<float> scores(n);
  for (float& score : scores) {
    switch (shape % 5) {
      case 0:
        score = static_cast<float>(random->Uniform());
        break;
      case 1:
        score = static_cast<float>(random->Below(4));  // many ties
        break;
      case 2:
        score = std::pow(10.0f, static_cast<float>(60 * random->Uniform() - 40));
        break;
      case 3:
        score = 0.25f;
        break;
      case 4:
        score = random->Below(3) == 0 ? 1.0f : 0.0f;
        break;
    }
  }
  return scores;
}

std::vector<float> Normalised(std::vector<float> scores) {
  const double sum = std::accumulate(scores.begin(), scores.end(), 0.0);
  for (float& score : scores) {
    score = sum > 0 ? static_cast<float>(score / sum) : 1 / static_cast<float>(scores.size());
  }
  return scores;
}

class SelectionTest : public testing::Test {
 protected:
  // Calls f(scores) for many random scores.
  template <typename F>
  void ForRandomScores(const F& f) {
    for (uint64_t round = 0; round < 400; ++round) {
      const uint64_t seed = TestSeed() + round;
      Random random(seed);
      const size_t n = round < 40 ? round : random.Below(600);
      SCOPED_TRACE(testing::Message() << "seed " << seed << ", shape " << round % 5 << ", n " << n);
      f(RandomScores(&random, n, round), &random);
      if (HasFailure()) return;
    }
  }

  OrderScratch scratch_;
};

TEST(ShareOf, RoundsUpAndStaysInRange) {
  EXPECT_EQ(ShareOf(0.018, 1000), 18u);
  EXPECT_EQ(ShareOf(0.018, 1001), 19u);
  EXPECT_EQ(ShareOf(0.01, 1), 1u);
  EXPECT_EQ(ShareOf(1e-300, 5), 1u);
  EXPECT_EQ(ShareOf(0, 5), 0u);
  EXPECT_EQ(ShareOf(1, 5), 5u);
  EXPECT_EQ(ShareOf(2, 5), 5u);
  EXPECT_EQ(ShareOf(0.5, 0), 0u);
}

// 0.07 * 100 is 7.000000000000001 in double: still seven.
TEST(ShareOf, ProductsThatExceedAWholeNumberOnlyByRounding) {
  EXPECT_EQ(ShareOf(0.07, 100), 7u);
  EXPECT_EQ(ShareOf(0.14, 50), 7u);
  for (size_t n = 100; n <= 100000; n += 100) {
    for (size_t percent = 1; percent <= 100; ++percent) {
      ASSERT_EQ(ShareOf(static_cast<double>(percent) / 100, n), n / 100 * percent)
          << percent << "% of " << n;
    }
  }
}

TEST_F(SelectionTest, MarkTop) {
  ForRandomScores([&](const std::vector<float>& scores, Random* random) {
    const size_t count = random->Below(scores.size() + 1);
    std::vector<Fate> fate(scores.size(), Fate::kEstimated);
    MarkTop(scores, count, &scratch_, fate);
    std::vector<Fate> expected(scores.size(), Fate::kEstimated);
    const std::vector<uint32_t> order = Ranked(scores);
    for (size_t i = 0; i < count; ++i) expected[order[i]] = Fate::kExact;
    EXPECT_EQ(fate, expected) << "count " << count;
  });
}

TEST_F(SelectionTest, CutTopK) {
  ForRandomScores([&](const std::vector<float>& scores, Random* random) {
    const size_t exact = random->Below(scores.size() + 1);
    const size_t estimated = random->Below(scores.size() - exact + 1);
    std::vector<Fate> fate(scores.size(), Fate::kExact);  // what was there before does not matter
    CutTopK(scores, exact, estimated, &scratch_, fate);
    std::vector<Fate> expected(scores.size(), Fate::kDropped);
    const std::vector<uint32_t> order = Ranked(scores);
    for (size_t i = 0; i < exact + estimated; ++i) {
      expected[order[i]] = i < exact ? Fate::kExact : Fate::kEstimated;
    }
    EXPECT_EQ(fate, expected) << exact << " exact, " << estimated << " estimated";
  });
}

TEST_F(SelectionTest, CutTopP) {
  ForRandomScores([&](const std::vector<float>& scores, Random* random) {
    const std::vector<float> mass = Normalised(scores);
    const double p1 = random->Below(4) == 0 ? 1 : random->Uniform();
    const double p2 = random->Below(4) == 0 ? p1 : p1 * random->Uniform();
    std::vector<Fate> fate(mass.size(), Fate::kDropped);
    CutTopP(mass, p1, p2, &scratch_, fate);
    const std::vector<uint32_t> order = Ranked(mass);
    // The shortest prefix that reaches p has everything before its last below p.
    const auto prefix = [&](double p) {
      double sum = 0;
      for (size_t taken = 0; taken < order.size(); ++taken) {
        if (sum >= p && p < 1) return taken;
        sum += mass[order[taken]];
      }
      return order.size();
    };
    std::vector<Fate> expected(mass.size(), Fate::kDropped);
    for (size_t i = 0; i < prefix(p1); ++i) expected[order[i]] = Fate::kEstimated;
    for (size_t i = 0; i < prefix(p2); ++i) expected[order[i]] = Fate::kExact;
    EXPECT_EQ(fate, expected) << "p1 " << p1 << ", p2 " << p2;
  });
}

TEST_F(SelectionTest, CutTopPOfOneTakesAllEvenWhatHasNoMass) {
  const std::vector<float> mass = {0, 0.5f, 0, 0.5f, 0};
  std::vector<Fate> fate(5);
  CutTopP(mass, 1, 0.5, &scratch_, fate);
  using enum Fate;
  EXPECT_EQ(fate, std::vector<Fate>({kEstimated, kExact, kEstimated, kEstimated, kEstimated}));
  CutTopP(mass, 1, 1, &scratch_, fate);
  EXPECT_EQ(fate, std::vector<Fate>(5, kExact));
}

// The definition itself: the shortest prefix of the ranking whose remainder, summed from the
// smallest upward, is at most tolerance^2. Long double, as sums in another order may differ in the
// last bit.
TEST_F(SelectionTest, CutErrorBudget) {
  ForRandomScores([&](const std::vector<float>& scores, Random* random) {
    const double tolerance = std::pow(10.0, 4 * random->Uniform() - 3);
    std::vector<Fate> fate(scores.size(), Fate::kEstimated);
    for (Fate& f : fate) {
      if (random->Below(4) == 0) f = Fate::kExact;
    }
    const std::vector<Fate> before = fate;
    const bool added = CutErrorBudget(scores, {}, tolerance, &scratch_, fate);
    const std::vector<uint32_t> order = Ranked(scores);
    const long double budget = static_cast<long double>(tolerance) * tolerance;
    size_t length = order.size();
    long double remainder = 0;
    bool close = false;
    while (length > 0) {
      const long double next = remainder + scores[order[length - 1]];
      close |= std::fabs(next - budget) < 1e-12L * budget;
      if (next > budget) break;
      remainder = next;
      --length;
    }
    if (close) return;  // either answer is right
    std::vector<Fate> expected = before;
    for (size_t i = 0; i < length; ++i) expected[order[i]] = Fate::kExact;
    EXPECT_EQ(fate, expected) << "tolerance " << tolerance;
    EXPECT_EQ(added, fate != before);
  });
}

// With sizes the ranking is by error for each token; what is summed stays the error.
TEST_F(SelectionTest, CutErrorBudgetBySizes) {
  ForRandomScores([&](const std::vector<float>& scores, Random* random) {
    const double tolerance = std::pow(10.0, 4 * random->Uniform() - 3);
    std::vector<float> sizes(scores.size()), densities(scores.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      sizes[i] = static_cast<float>(1 + random->Below(40));
      densities[i] = scores[i] / sizes[i];
    }
    std::vector<Fate> fate(scores.size(), Fate::kEstimated);
    CutErrorBudget(scores, sizes, tolerance, &scratch_, fate);
    const std::vector<uint32_t> order = Ranked(densities);
    const long double budget = static_cast<long double>(tolerance) * tolerance;
    size_t length = order.size();
    long double remainder = 0;
    while (length > 0 && remainder + scores[order[length - 1]] <= budget) {
      remainder += scores[order[--length]];
    }
    const long double next = length > 0 ? remainder + scores[order[length - 1]] : 2 * budget;
    if (std::fabs(next - budget) < 1e-12L * budget ||
        std::fabs(remainder - budget) < 1e-12L * budget) {
      return;  // either answer is right
    }
    for (size_t i = 0; i < order.size(); ++i) {
      EXPECT_EQ(fate[order[i]] == Fate::kExact, i < length) << i << " of " << length;
    }
  });
}

TEST_F(SelectionTest, CutErrorBudgetOfNothing) {
  const std::vector<float> error2 = {0, 1e-30f, 0};
  std::vector<Fate> fate(3, Fate::kEstimated);
  EXPECT_TRUE(CutErrorBudget(error2, {}, 0, &scratch_, fate));
  using enum Fate;
  EXPECT_EQ(fate, std::vector<Fate>({kEstimated, kExact, kEstimated}));
  EXPECT_FALSE(CutErrorBudget(error2, {}, 0, &scratch_, fate));
  EXPECT_FALSE(CutErrorBudget({}, {}, 0.1, &scratch_, {}));
}

// Finite keys may be so large that scores overflow to infinity and NaN. What is chosen then has no
// meaning, but it must be as many as asked for, and no sort may run out of its range (the address
// sanitizer watches).
TEST_F(SelectionTest, ScoresThatOverflowedAreHarmless) {
  for (uint64_t round = 0; round < 300; ++round) {
    const uint64_t seed = TestSeed() + round;
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    std::vector<float> scores = RandomScores(&random, 1 + random.Below(400), round);
    for (float& score : scores) {
      const uint64_t kind = random.Below(1 + round % 9);
      if (kind == 1) score = kNan;
      if (kind == 2) score = -kNan;
      if (kind == 3) score = kInfinity;
    }
    const size_t n = scores.size();
    for (const size_t count : {size_t{0}, n / 3, n / 2, n}) {
      std::vector<Fate> fate(n, Fate::kDropped);
      MarkTop(scores, count, &scratch_, fate);
      EXPECT_EQ(std::count(fate.begin(), fate.end(), Fate::kExact), static_cast<ptrdiff_t>(count));
      CutTopK(scores, count, n - count, &scratch_, fate);
      EXPECT_EQ(std::count(fate.begin(), fate.end(), Fate::kExact), static_cast<ptrdiff_t>(count));
      EXPECT_EQ(std::count(fate.begin(), fate.end(), Fate::kDropped), 0);
    }
    std::vector<Fate> fate(n);
    CutTopP(scores, 0.9, 0.5, &scratch_, fate);
    std::sort(scratch_.begin(), scratch_.end());
    for (uint32_t i = 0; i < n; ++i) ASSERT_EQ(scratch_[i], i);  // still a permutation
    fate.assign(n, Fate::kEstimated);
    CutErrorBudget(scores, {}, 0.1, &scratch_, fate);
    for (size_t i = 0; i < n; ++i) {
      if (!(scores[i] <= 0.01f)) {
        EXPECT_EQ(fate[i], Fate::kExact);  // an unknown error is not within the budget
      }
    }
  }
}

// Scores of blocks may be of any sign.
TEST(MarkTop, OrdersNegativeScoresToo) {
  Random random(TestSeed());
  OrderScratch scratch;
  for (int round = 0; round < 200; ++round) {
    std::vector<float> scores(1 + random.Below(300));
    for (float& score : scores) {
      score = round % 2 == 0 ? static_cast<float>(random.Normal())
                             : static_cast<float>(random.Below(5)) - 2.0f;
      if (score == 0 && random.Below(2) == 0) score = -0.0f;  // equal to 0
    }
    const size_t count = random.Below(scores.size() + 1);
    std::vector<Fate> fate(scores.size(), Fate::kDropped);
    MarkTop(scores, count, &scratch, fate);
    const std::vector<uint32_t> order = Ranked(scores);
    for (size_t place = 0; place < order.size(); ++place) {
      ASSERT_EQ(fate[order[place]] == Fate::kExact, place < count)
          << "seed " << TestSeed() << ", round " << round << ", place " << place;
    }
  }
}

// The least set that reaches p, by sorting; sums that lie within rounding of p may go either way.
TEST(MarkNucleus, TakesTheLeastSet) {
  Random random(TestSeed());
  OrderScratch scratch;
  for (int round = 0; round < 1000; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", round " << round);
    const size_t n = 1 + random.Below(400);
    const std::vector<float> weights = RandomScores(&random, n, static_cast<uint64_t>(round));
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    NucleusArgs args;
    std::vector<float> quads(4 * n, 7.0f);
    args.lane = static_cast<uint32_t>(random.Below(4));
    for (size_t i = 0; i < n; ++i) quads[4 * i + args.lane] = weights[i];
    args.weights = quads.data() + args.lane;
    args.stride = 4;
    args.count = n;
    args.p = round % 7 == 0 ? 1.0 : random.Uniform();
    std::vector<uint8_t> marks(2 * n, 0);
    args.marks = marks.data() + 1;
    args.marks_stride = 2;
    const double outside = MarkNucleus(args, &scratch);
    double sum = 0, least = kInfinity;
    size_t taken = 0;
    const std::vector<uint32_t> order = Ranked(weights);
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(marks[2 * i], 0);
      ASSERT_EQ(marks[2 * i + 1] & ~(1 << args.lane), 0);
      if (marks[2 * i + 1] == 0) continue;
      sum += weights[i];
      least = std::min(least, double{weights[i]});
      ++taken;
    }
    EXPECT_NEAR(sum + outside, total, 1e-12 * total);
    for (size_t place = 0; place < n; ++place) {
      ASSERT_EQ(marks[2 * order[place] + 1] != 0, place < taken) << "a prefix of the ranking";
    }
    if (args.p >= 1) {
      EXPECT_EQ(taken, n);
      continue;
    }
    ASSERT_GE(taken, 1u);
    EXPECT_GE(sum, args.p * total * (1 - 1e-12));
    EXPECT_TRUE(taken == 1 || sum - least < args.p * total * (1 + 1e-12)) << "one less would do";
  }
}

TEST(MarkNucleus, OddWeightsDoNoHarm) {
  OrderScratch scratch;
  for (const std::vector<float>& weights :
       {std::vector<float>{kNan, 1, 2}, std::vector<float>{kInfinity, kInfinity, 0},
        std::vector<float>{0, 0, 0}, std::vector<float>{}}) {
    std::vector<uint8_t> marks(weights.size(), 0);
    NucleusArgs args;
    args.weights = weights.data();
    args.count = weights.size();
    args.p = 0.5;
    args.marks = marks.data();
    MarkNucleus(args, &scratch);
  }
}

// What fits: counted by hand, and a prefix of the ranking whatever the scores.
TEST(MarkFitting, TakesTheLongestPrefixThatFits) {
  Random random(TestSeed());
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", round " << round);
    const size_t n = 1 + random.Below(60);
    const std::vector<float> scores = RandomScores(&random, n, round);
    std::vector<uint32_t> sizes(n);
    for (uint32_t& size : sizes) size = 1 + static_cast<uint32_t>(random.Below(30));
    const uint64_t limit = 1 + random.Below(20 * n);
    OrderScratch scratch;
    std::vector<Fate> fate(n, Fate::kDropped);
    MarkFitting(scores, sizes, limit, &scratch, fate);
    uint64_t sum = 0;
    bool ended = false;
    for (const uint32_t i : Ranked(scores)) {
      const bool fits = !ended && (sum == 0 || sum + sizes[i] <= limit);
      EXPECT_EQ(fate[i] == Fate::kExact, fits) << i;
      sum += fits ? sizes[i] : 0;
      ended = !fits;
    }
  }
}

}  // namespace
}  // namespace attnd::attention::test
