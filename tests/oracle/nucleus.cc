// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/nucleus.h"

#include <algorithm>

#include "tests/oracle/infinity.h"

namespace attnd::oracle {

namespace {

double SumFrom(const Vector& weights, double threshold) {
  double sum = 0.0;
  for (const double w : weights) sum += w >= threshold ? w : 0.0;
  return sum;
}

double LeastAbove(const Vector& weights, double bound) {
  double least = kInfinity;
  for (const double w : weights) least = w > bound ? std::min(least, w) : least;
  return least;
}

double GreatestUpTo(const Vector& weights, double bound) {
  double greatest = -kInfinity;
  for (const double w : weights) greatest = w <= bound ? std::max(greatest, w) : greatest;
  return greatest;
}

// The least weight that is kept, or a number between it and the next smaller one.
double Threshold(const Vector& weights, double p) {
  double l = 0.0;
  double r = *std::max_element(weights.begin(), weights.end());
  while (LeastAbove(weights, l) < GreatestUpTo(weights, r)) {
    const double middle = l + (r - l) / 2.0;
    if (SumFrom(weights, middle) >= p) {
      l = middle;
    } else {
      r = middle;
    }
  }
  const double v = LeastAbove(weights, l);
  return SumFrom(weights, v) >= p ? v : l;
}

}  // namespace

Indices NucleusByThreshold(const Indices& candidates, const Vector& weights, double p) {
  Require(candidates.size() == weights.size(), "a weight for each candidate");
  Require(p > 0.0, "p above 0");
  if (p >= 1.0 || candidates.empty()) return candidates;
  const double threshold = Threshold(weights, p);
  Indices kept;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] >= threshold) kept.push_back(candidates[i]);
  }
  return kept;
}

Pruned Prune(const std::vector<Vector>& queries, const std::vector<Vector>& rows,
             const Indices& candidates, double p, double scale) {
  Pruned pruned;
  for (const Vector& query : queries) {
    pruned.heads.push_back(TakeMass(candidates, HeadWeights(query, rows, candidates, scale), p));
    pruned.read = Union(pruned.read, pruned.heads.back().taken);
  }
  return pruned;
}

}  // namespace attnd::oracle
