// SPDX-License-Identifier: Apache-2.0
//
// Goal: the rows that a cut takes are those that a sorted list says, wherever keys lie, however
// many are equal, and however many thread blocks look for it. Method: random rankings, sorted by
// the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/emulated/cut_kernel.h"
#include "tests/test_seed.h"

namespace attnd::gpu::emulated {
namespace {

uint64_t WeightOf(const Ranking& ranking, uint32_t i) {
  return ranking.weights.empty() ? 1 : ranking.weights[i];
}
// Of the rows that are there.
uint64_t TotalOf(const Ranking& ranking) {
  uint64_t total = 0;
  for (uint32_t i = 0; i < ranking.keys.size(); ++i) {
    if (ranking.keys[i] != 0) total += WeightOf(ranking, i);
  }
  return total;
}

// Rows in the order of descending keys, the lower number first among equals, are taken as long as
// those before weigh less than the limit.
std::vector<uint8_t> SortedTaken(const Ranking& ranking) {
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < ranking.keys.size(); ++i) {
    if (ranking.keys[i] != 0) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return ranking.keys[a] > ranking.keys[b]; });
  const uint64_t total = TotalOf(ranking);
  uint64_t limit = ranking.weight, before = 0;
  if (!ranking.takes) limit = total > ranking.weight ? total - ranking.weight : 0;
  std::vector<uint8_t> taken(ranking.keys.size());
  for (const uint32_t i : order) {
    taken[i] = before < limit ? 1 : 0;
    before += WeightOf(ranking, i);
  }
  return taken;
}

// Where a ranking's keys lie: powers of two, and how many different ones there are.
struct Keys {
  int least, greatest;
  uint32_t different;
};
constexpr uint32_t kAll = ~0u;
void PrintTo(const Keys& keys, std::ostream* out) { *out << keys.least << " to " << keys.greatest; }
constexpr Keys kKeys[] = {
    {-20, -1, kAll}, {-120, 120, kAll}, {-60, -40, kAll}, {5, 100, kAll}, {-31, -29, kAll},
    {1, 2, kAll},    {-20, -1, 200},    {-20, -1, 3},     {-60, 20, 1},
};

void ExpectSortedTaken(const Ranking& ranking, uint32_t blocks) {
  EXPECT_EQ(TakenOf(ranking, blocks), SortedTaken(ranking))
      << ranking.keys.size() << " rows, " << blocks << " thread blocks, weight " << ranking.weight
      << (ranking.weights.empty() ? "" : ", weighted") << (ranking.takes ? ", taken" : ", left");
}

class EmulatedCut : public testing::TestWithParam<Keys> {
 protected:
  // A key as KeyOf makes it.
  uint32_t Key() {
    const Keys& keys = GetParam();
    std::uniform_int_distribution<int> exponent(keys.least, keys.greatest);
    const uint32_t mantissa = random_() >> 9;
    return ((static_cast<uint32_t>(127 + exponent(random_)) << 23) | mantissa) + 1;
  }
  Ranking RankingOf(uint32_t count, bool weighted, bool takes) {
    Ranking ranking{.keys = {}, .weights = {}, .takes = takes, .weight = 0};
    std::vector<uint32_t> different(std::min(GetParam().different, count));
    std::ranges::generate(different, [&] { return Key(); });
    std::uniform_real_distribution<double> share(0, 1);
    for (uint32_t i = 0; i < count; ++i) {
      ranking.keys.push_back(random_() % 16 != 0 ? different[i % different.size()] : 0);
      if (!weighted) continue;
      const auto weight = static_cast<uint64_t>(std::exp2(35 * share(random_)));
      ranking.weights.push_back(random_() % 5 != 0 ? weight : 0);
    }
    const auto total = static_cast<double>(TotalOf(ranking));
    ranking.weight = static_cast<uint64_t>(total * share(random_) + .5);
    return ranking;
  }

  std::mt19937 random_{static_cast<uint32_t>(test::TestSeed())};
};

TEST_P(EmulatedCut, TakesWhatASortedListSays) {
  SCOPED_TRACE(testing::Message() << "seed " << test::TestSeed());
  for (const bool weighted : {false, true}) {
    for (const bool takes : {false, true}) {
      for (const uint32_t count : {1u, 500u}) {
        const Ranking ranking = RankingOf(count, weighted, takes);
        for (const uint32_t blocks : {2u, 7u}) ExpectSortedTaken(ranking, blocks);
      }
      // So many that a thread has several rows.
      ExpectSortedTaken(RankingOf(1300, weighted, takes), 2);
    }
  }
}

TEST_P(EmulatedCut, TakesNoneOrAll) {
  SCOPED_TRACE(testing::Message() << "seed " << test::TestSeed());
  for (const bool weighted : {false, true}) {
    for (const bool takes : {false, true}) {
      Ranking ranking = RankingOf(100, weighted, takes);
      const uint64_t total = TotalOf(ranking);
      for (const uint64_t weight : {uint64_t{0}, total, total + 1, uint64_t{1} << 58}) {
        ranking.weight = weight;
        ExpectSortedTaken(ranking, 2);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranges, EmulatedCut, testing::ValuesIn(kKeys), [](const auto& keys) {
  const auto name = [](int power) {
    return (power < 0 ? "Minus" : "") + std::to_string(std::abs(power));
  };
  return name(keys.param.least) + "To" + name(keys.param.greatest) +
         (keys.param.different == kAll ? "" : "Of" + std::to_string(keys.param.different));
});

// Keys where a digit's keys end, each some times, cut behind each row: 0, what a float can hardly
// say, 2^-30 and 3.5, where the first digit's window ends, infinity, and what is no number; and
// keys that only their last digits tell apart.
TEST(EmulatedCutEdges, AreCutBehindEachRow) {
  Ranking ranking{.keys = {}, .weights = {}, .takes = true, .weight = 0};
  for (const uint32_t middle : {2u, 0x00800001u, 0x30800000u, 0x3F800001u, 0x40600000u, 0x40680000u,
                                0x40E00000u, 0x7F800001u, 0x7FFFFFFEu}) {
    for (const uint32_t key : {middle - 1, middle, middle + 1}) {
      for (uint32_t i = 0; i <= key % 2; ++i) ranking.keys.push_back(key);
    }
  }
  std::shuffle(ranking.keys.begin(), ranking.keys.end(), std::mt19937(1));
  const auto cut_everywhere = [&] {
    for (ranking.weight = 0; ranking.weight <= TotalOf(ranking); ++ranking.weight) {
      ExpectSortedTaken(ranking, 2);
    }
  };
  cut_everywhere();
  // Rows that weigh nothing are rows, too.
  for (uint32_t i = 0; i < ranking.keys.size(); ++i) ranking.weights.push_back(i % 3);
  cut_everywhere();
}

}  // namespace
}  // namespace attnd::gpu::emulated
