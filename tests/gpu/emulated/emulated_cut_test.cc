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
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/emulated/cut_kernel.h"
#include "tests/test_seed.h"

namespace attnd::gpu::emulated {
namespace {

// Rows in the order of descending keys, the lower number first among equals, are taken as long as
// those before weigh less than the limit.
std::vector<uint8_t> SortedTaken(const Ranking& ranking) {
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < ranking.keys.size(); ++i) {
    if (ranking.keys[i] != 0) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return ranking.keys[a] > ranking.keys[b]; });
  const auto weight_of = [&](uint32_t i) {
    return ranking.weights.empty() ? uint64_t{1} : ranking.weights[i];
  };
  uint64_t total = 0, before = 0;
  for (const uint32_t i : order) total += weight_of(i);
  uint64_t limit = ranking.weight;
  if (!ranking.takes) limit = total > ranking.weight ? total - ranking.weight : 0;
  std::vector<uint8_t> taken(ranking.keys.size());
  for (const uint32_t i : order) {
    taken[i] = before < limit ? 1 : 0;
    before += weight_of(i);
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
    {-20, -1, kAll},  {-120, 120, kAll}, {-60, -40, kAll}, {5, 100, kAll},
    {-31, -29, kAll}, {1, 2, kAll},      {-20, -1, 3},     {-60, 20, 1},
};

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
    uint64_t total = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const bool there = random_() % 16 != 0;
      ranking.keys.push_back(there ? different[i % different.size()] : 0);
      const uint64_t weight =
          weighted ? static_cast<uint64_t>(std::exp2(35 * share(random_))) : uint64_t{1};
      if (weighted) ranking.weights.push_back(weight);
      if (there) total += weight;
    }
    ranking.weight = static_cast<uint64_t>(static_cast<double>(total) * share(random_));
    return ranking;
  }

  std::mt19937 random_{static_cast<uint32_t>(test::TestSeed())};
};

TEST_P(EmulatedCut, TakesWhatASortedListSays) {
  SCOPED_TRACE(testing::Message() << "seed " << test::TestSeed());
  for (const uint32_t count : {1u, 600u}) {
    for (const bool weighted : {false, true}) {
      for (const bool takes : {false, true}) {
        const Ranking ranking = RankingOf(count, weighted, takes);
        const std::vector<uint8_t> taken = SortedTaken(ranking);
        for (const uint32_t blocks : {2u, 7u}) {
          EXPECT_EQ(TakenOf(ranking, blocks), taken)
              << count << " rows, " << blocks << " thread blocks, weight " << ranking.weight
              << (weighted ? ", weighted" : "") << (takes ? ", taken" : ", left");
        }
      }
    }
  }
}

TEST_P(EmulatedCut, TakesNoneOrAll) {
  Ranking ranking = RankingOf(100, /*weighted=*/false, /*takes=*/true);
  for (const uint64_t weight : {uint64_t{0}, uint64_t{100}, uint64_t{1} << 40}) {
    ranking.weight = weight;
    EXPECT_EQ(TakenOf(ranking, 2), SortedTaken(ranking)) << weight;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranges, EmulatedCut, testing::ValuesIn(kKeys), [](const auto& keys) {
  const auto name = [](int power) {
    return (power < 0 ? "Minus" : "") + std::to_string(std::abs(power));
  };
  return name(keys.param.least) + "To" + name(keys.param.greatest) +
         (keys.param.different == kAll ? "" : "Of" + std::to_string(keys.param.different));
});

}  // namespace
}  // namespace attnd::gpu::emulated
