// SPDX-License-Identifier: Apache-2.0
#include "attention/selection.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace attnd::attention {
namespace {

// Greater score first, lower number first among equals: a total order, so every algorithm gives the
// same set.
class Descending {
 public:
  explicit Descending(std::span<const float> scores) : scores_(scores) {}
  bool operator()(uint32_t a, uint32_t b) const {
    const int32_t x = Rank(scores_[a]);
    const int32_t y = Rank(scores_[b]);
    return x != y ? x > y : a < b;
  }

 private:
  // Scores are not negative, and the bits of such floats rank as they do. NaN, of scores that
  // overflowed, has a rank too; compared as a float it would be equal to everything, and sorting by
  // that is undefined.
  static int32_t Rank(float score) { return std::bit_cast<int32_t>(score); }

  const std::span<const float> scores_;
};

void FillOrder(size_t n, OrderScratch* order) {
  order->resize(n);
  std::iota(order->begin(), order->end(), 0u);
}

// The `count` first of the order stand first, in any order among themselves.
void PartitionTop(std::span<const float> scores, size_t count, OrderScratch* order) {
  FillOrder(scores.size(), order);
  if (count < order->size()) {
    std::nth_element(order->begin(), order->begin() + static_cast<ptrdiff_t>(count), order->end(),
                     Descending(scores));
  }
}

}  // namespace

size_t ShareOf(double share, size_t n) {
  constexpr double kRounding = 1e-9;  // 0.07 * 100 is a little above 7
  const double count = std::ceil(share * static_cast<double>(n) * (1 - kRounding));
  return std::min(n, static_cast<size_t>(std::max(count, 0.0)));
}

void MarkTop(std::span<const float> scores, size_t count, OrderScratch* scratch,
             std::span<Fate> fate) {
  PartitionTop(scores, count, scratch);
  for (size_t i = 0; i < count; ++i) fate[(*scratch)[i]] = Fate::kExact;
}

void CutTopK(std::span<const float> mass, size_t exact, size_t estimated, OrderScratch* scratch,
             std::span<Fate> fate) {
  std::fill(fate.begin(), fate.end(), Fate::kDropped);
  PartitionTop(mass, exact + estimated, scratch);
  for (size_t i = 0; i < exact + estimated; ++i) fate[(*scratch)[i]] = Fate::kEstimated;
  MarkTop(mass, exact, scratch, fate);
}

void CutTopP(std::span<const float> mass, double p1, double p2, OrderScratch* scratch,
             std::span<Fate> fate) {
  FillOrder(mass.size(), scratch);
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

bool CutErrorBudget(std::span<const float> error2, double tolerance, OrderScratch* scratch,
                    std::span<Fate> fate) {
  const double budget = tolerance * tolerance;
  // Errors up to budget / n fit the budget all together, so only the greater ones need an order. In
  // double precision their sum does not depend on the order beyond 1e-16 of it, far below the
  // budget's own rounding.
  const double small = budget / static_cast<double>(std::max<size_t>(error2.size(), 1));
  double remainder = 0;
  scratch->clear();
  for (uint32_t i = 0; i < error2.size(); ++i) {
    if (error2[i] <= small) {
      remainder += error2[i];
    } else {
      scratch->push_back(i);
    }
  }
  std::sort(scratch->begin(), scratch->end(), Descending(error2));
  size_t marked = scratch->size();
  while (marked > 0 && remainder + error2[(*scratch)[marked - 1]] <= budget) {
    remainder += error2[(*scratch)[--marked]];
  }
  bool added = false;
  for (size_t i = 0; i < marked; ++i) {
    added |= fate[(*scratch)[i]] != Fate::kExact;
    fate[(*scratch)[i]] = Fate::kExact;
  }
  return added;
}

}  // namespace attnd::attention
