// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/selection.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>

#include "attention/policy/estimate_limits.h"

namespace attnd::attention {
namespace {

// The bits of floats have their order, those of negative ones backwards. NaN, of scores that
// overflowed, has a place too; compared as a float it would be equal to everything, and sorting by
// that is undefined.
constexpr uint32_t kSign = 1u << 31;
uint32_t Rank(float score) {
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 is 0
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}
// The score of a rank, if that was not negative.
float ScoreOf(uint32_t rank) { return std::bit_cast<float>(rank ^ kSign); }

// Greater score first, lower number first among equals: a total order, so every algorithm gives the
// same set.
class Descending {
 public:
  explicit Descending(std::span<const float> scores) : scores_(scores) {}
  bool operator()(uint32_t a, uint32_t b) const {
    const uint32_t x = Rank(scores_[a]);
    const uint32_t y = Rank(scores_[b]);
    return x != y ? x > y : a < b;
  }

 private:
  const std::span<const float> scores_;
};

// Ranks are looked at by digits, from the highest: histograms cost a fixed time, where a comparison
// sort is bound by mispredictions.
constexpr uint32_t kDigitBits = 11;
constexpr uint32_t kDigits = 1u << kDigitBits;
constexpr int kFirstShift = 32 - int{kDigitBits};
int NextShift(int shift) { return std::max(0, shift - int{kDigitBits}); }
uint32_t DigitOf(uint32_t rank, int shift) { return rank >> shift & (kDigits - 1); }

// The rank of the `count`-th greatest score, 1 <= count <= ranks->size(). *above: how many
// scores rank above it. Uses up *ranks.
uint32_t NthRank(OrderScratch* ranks, size_t count, size_t* above) {
  *above = 0;
  for (int shift = kFirstShift;; shift = NextShift(shift)) {
    std::array<uint32_t, kDigits> histogram{};
    for (const uint32_t rank : *ranks) ++histogram[DigitOf(rank, shift)];
    uint32_t digit = kDigits - 1;
    while (*above + histogram[digit] < count) *above += histogram[digit--];
    std::erase_if(*ranks, [&](uint32_t rank) { return DigitOf(rank, shift) != digit; });
    if (shift == 0) return ranks->front();
  }
}

// Where the sum of the greatest scores, none negative, reaches a target.
struct Crossing {
  uint32_t rank = 0;  // of the last score that it takes
  double above = 0;   // sum of those that rank above it
};
// The same digit by digit, with sums in place of counts. Uses up *ranks, which is not empty.
Crossing RankAtSum(OrderScratch* ranks, double target) {
  Crossing crossing;
  for (int shift = kFirstShift;; shift = NextShift(shift)) {
    std::array<double, kDigits> sums{};
    std::array<uint32_t, kDigits> counts{};
    uint32_t least = kDigits - 1;  // sums' own rounding may keep them all from reaching the target
    for (const uint32_t rank : *ranks) {
      const uint32_t digit = DigitOf(rank, shift);
      sums[digit] += ScoreOf(rank);
      ++counts[digit];
      least = std::min(least, digit);
    }
    uint32_t digit = kDigits - 1;
    while (digit > least && (counts[digit] == 0 || crossing.above + sums[digit] < target)) {
      crossing.above += sums[digit--];
    }
    std::erase_if(*ranks, [&](uint32_t rank) { return DigitOf(rank, shift) != digit; });
    if (shift == 0) {
      crossing.rank = ranks->front();
      return crossing;
    }
  }
}

// What errors may be left out: those of lower rank, and of that rank those from first_equal on.
struct LeftOut {
  uint32_t rank = 0;
  uint32_t first_equal = 0;
};
// As many of the lowest ranks as sum to at most a budget, digit by digit like RankAtSum, and of
// equals the last ones. Fills *scratch; error2 is not empty.
template <typename RankOf>
LeftOut LeaveOut(std::span<const float> error2, const RankOf& rank, double budget,
                 OrderScratch* scratch) {
  scratch->resize(error2.size());
  std::iota(scratch->begin(), scratch->end(), 0u);
  double left = 0;
  for (int shift = kFirstShift;; shift = NextShift(shift)) {
    std::array<double, kDigits> sums{};
    uint32_t most = 0;
    for (const uint32_t i : *scratch) {
      const uint32_t digit = DigitOf(rank(i), shift);
      sums[digit] += error2[i];
      most = std::max(most, digit);
    }
    uint32_t digit = 0;
    while (digit < most && left + sums[digit] <= budget) left += sums[digit++];
    std::erase_if(*scratch, [&](uint32_t i) { return DigitOf(rank(i), shift) != digit; });
    if (shift == 0) break;
  }
  size_t exact = scratch->size();
  while (exact > 0 && left + error2[(*scratch)[exact - 1]] <= budget) {
    left += error2[(*scratch)[--exact]];
  }
  const bool all = exact == scratch->size();
  return {rank(scratch->front()), all ? scratch->back() + 1 : (*scratch)[exact]};
}

// fate = `mark` for the `count` greatest scores.
void MarkGreatest(std::span<const float> scores, size_t count, Fate mark, OrderScratch* scratch,
                  std::span<Fate> fate) {
  if (count == 0) return;
  scratch->resize(scores.size());
  for (size_t i = 0; i < scores.size(); ++i) (*scratch)[i] = Rank(scores[i]);
  size_t above = 0;
  const uint32_t least = NthRank(scratch, count, &above);
  size_t equals = count - above;
  for (size_t i = 0; i < scores.size(); ++i) {
    const uint32_t rank = Rank(scores[i]);
    if (rank < least) continue;
    if (rank == least) {
      if (equals == 0) continue;
      --equals;
    }
    fate[i] = mark;
  }
}

}  // namespace

size_t ShareOf(double share, size_t n) {
  const double count = std::ceil(share * static_cast<double>(n) * (1 - kShareRounding));
  return std::min(n, static_cast<size_t>(std::max(count, 0.0)));
}

void MarkFitting(std::span<const float> scores, std::span<const uint32_t> sizes, uint64_t limit,
                 OrderScratch* scratch, std::span<Fate> fate) {
  scratch->resize(scores.size());
  std::iota(scratch->begin(), scratch->end(), 0u);
  std::sort(scratch->begin(), scratch->end(), Descending(scores));
  uint64_t taken = 0;
  for (const uint32_t i : *scratch) {
    if (taken > 0 && taken + sizes[i] > limit) return;
    taken += sizes[i];
    fate[i] = Fate::kExact;
  }
}

double MarkNucleus(const NucleusArgs& args, OrderScratch* scratch) {
  const auto weight = [&](size_t i) { return args.weights[i * args.stride]; };
  const auto mark = [&](size_t i) {
    args.marks[i * args.marks_stride] |= static_cast<uint8_t>(1u << args.lane);
  };
  scratch->resize(args.count);
  double total = 0;
  for (size_t i = 0; i < args.count; ++i) {
    (*scratch)[i] = Rank(weight(i));
    total += weight(i);
  }
  if (args.p >= 1 || args.count == 0) {
    for (size_t i = 0; i < args.count; ++i) mark(i);
    return 0;
  }
  const double target = args.p * total;
  const Crossing crossing = RankAtSum(scratch, target);
  // Of equals only as many as it takes, the first ones, and one at least.
  const double each = ScoreOf(crossing.rank);
  double equals = each > 0 ? std::max(1.0, std::ceil((target - crossing.above) / each)) : 1;
  double outside = 0;
  for (size_t i = 0; i < args.count; ++i) {
    const uint32_t rank = Rank(weight(i));
    const bool equal = rank == crossing.rank && equals > 0;
    if (rank > crossing.rank || equal) {
      mark(i);
      equals -= equal ? 1 : 0;
    } else {
      outside += weight(i);
    }
  }
  return outside;
}

void MarkTop(std::span<const float> scores, size_t count, OrderScratch* scratch,
             std::span<Fate> fate) {
  MarkGreatest(scores, count, Fate::kExact, scratch, fate);
}

void CutTopK(std::span<const float> mass, size_t exact, size_t estimated, OrderScratch* scratch,
             std::span<Fate> fate) {
  std::fill(fate.begin(), fate.end(), Fate::kDropped);
  MarkGreatest(mass, exact + estimated, Fate::kEstimated, scratch, fate);
  MarkGreatest(mass, exact, Fate::kExact, scratch, fate);
}

void CutTopP(std::span<const float> mass, double p1, double p2, OrderScratch* scratch,
             std::span<Fate> fate) {
  scratch->resize(mass.size());
  std::iota(scratch->begin(), scratch->end(), 0u);
  std::sort(scratch->begin(), scratch->end(), Descending(mass));
  double before = 0;  // mass of the clusters ahead in the order
  for (const uint32_t cluster : *scratch) {
    if (p2 >= 1 || before < p2) {
      fate[cluster] = Fate::kExact;
    } else if (p1 >= 1 || before < p1) {
      fate[cluster] = Fate::kEstimated;
    } else {
      fate[cluster] = Fate::kDropped;
    }
    before += mass[cluster];
  }
}

bool CutErrorBudget(std::span<const float> error2, std::span<const float> size, double tolerance,
                    OrderScratch* scratch, std::span<Fate> fate) {
  if (error2.empty()) return false;
  const double budget = tolerance * tolerance;
  const auto rank = [&](uint32_t i) {
    return Rank(size.empty() ? error2[i] : error2[i] / size[i]);
  };
  const LeftOut left = LeaveOut(error2, rank, budget, scratch);
  bool added = false;
  for (uint32_t i = 0; i < error2.size(); ++i) {
    const uint32_t own = rank(i);
    if (own < left.rank || (own == left.rank && i >= left.first_equal)) continue;
    added |= fate[i] != Fate::kExact;
    fate[i] = Fate::kExact;
  }
  return added;
}

}  // namespace attnd::attention
