// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/ranking.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/oracle/infinity.h"
#include "tests/oracle/policies.h"  // FractionCount

namespace attnd::oracle {

namespace {

void RequireAscending(const Indices& candidates) {
  for (std::size_t i = 1; i < candidates.size(); ++i) {
    Require(candidates[i - 1] < candidates[i], "candidates ascending, each once");
  }
}

// Places in the list of candidates, best first.
Indices Ranking(const Vector& scores) {
  Indices places = Range(0, scores.size());
  std::stable_sort(places.begin(), places.end(),
                   [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  return places;
}

// The cut takes `taken`; with sums off by the margin it may take `fewest` to `most`.
TopSet MakeSet(const Indices& candidates, const Vector& scores, std::size_t fewest,
               std::size_t taken, std::size_t most, double margin, double slack) {
  Require(candidates.size() == scores.size(), "a score for each candidate");
  Require(fewest <= taken && taken <= most && most <= scores.size(), "cuts in order");
  RequireAscending(candidates);
  const Indices places = Ranking(scores);
  TopSet set{candidates, scores, {}, {}, {}, {}, std::nullopt};
  // The best score that the smallest cut leaves out, and the worst that the largest takes.
  const double outside = fewest < places.size() ? scores[places[fewest]] : -kInfinity;
  const double inside = most > 0 ? scores[places[most - 1]] : kInfinity;
  const double above = fewest < places.size() ? margin * std::fabs(outside) + slack : 0.0;
  const double below = most > 0 ? margin * std::fabs(inside) + slack : 0.0;
  set.must.resize(places.size());
  set.may.resize(places.size());
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    const std::size_t place = places[rank];
    set.order.push_back(candidates[place]);
    if (rank < taken) set.taken.push_back(candidates[place]);
    set.must[place] = rank < fewest && (fewest == places.size() || scores[place] > outside + above);
    set.may[place] = rank < most || (most > 0 && scores[place] >= inside - below);
  }
  std::sort(set.taken.begin(), set.taken.end());
  return set;
}

std::size_t PrefixToMass(const Vector& weights, double p) {
  if (p >= 1.0) return weights.size();
  double sum = 0.0;
  std::size_t length = 0;
  for (const std::size_t place : Ranking(weights)) {
    sum += weights[place];
    ++length;
    if (sum >= p) break;
  }
  return length;
}

}  // namespace

std::size_t TokensOf(const Budget& budget, std::size_t whole, std::size_t count) {
  const std::size_t tokens =
      budget.share.has_value() ? FractionCount(*budget.share, whole) : budget.tokens;
  return std::min(tokens, count);
}

Indices Range(std::size_t begin, std::size_t end) {
  Indices range(end > begin ? end - begin : 0);
  std::iota(range.begin(), range.end(), begin);
  return range;
}

Indices Union(const Indices& a, const Indices& b) {
  Indices all = a;
  all.insert(all.end(), b.begin(), b.end());
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

Vector HeadWeights(const Vector& query, const std::vector<Vector>& rows, const Indices& candidates,
                   double scale) {
  RequireAscending(candidates);
  Vector weights;
  double maximum = -kInfinity;
  for (const std::size_t j : candidates) {
    weights.push_back(scale * Dot(query, rows.at(j)));
    maximum = std::max(maximum, weights.back());
  }
  double sum = 0.0;
  for (double& weight : weights) {
    weight = std::exp(weight - maximum);
    sum += weight;
  }
  for (double& weight : weights) weight /= sum;
  return weights;
}

Vector GroupWeights(const std::vector<Vector>& queries, const std::vector<Vector>& rows,
                    const Indices& candidates, double scale) {
  Require(!queries.empty(), "at least one query head");
  Vector mean(candidates.size(), 0.0);
  for (const Vector& query : queries) {
    const Vector weights = HeadWeights(query, rows, candidates, scale);
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += weights[i];
  }
  for (double& weight : mean) weight /= static_cast<double>(queries.size());
  return mean;
}

TopSet TakeTop(const Indices& candidates, const Vector& scores, std::size_t count, double margin,
               double slack) {
  const std::size_t taken = std::min(count, candidates.size());
  TopSet set = MakeSet(candidates, scores, taken, taken, taken, margin, slack);
  set.size = taken;
  return set;
}

TopSet TakeMass(const Indices& candidates, const Vector& weights, double p, double margin) {
  Require(p > 0.0, "p above 0");
  const std::size_t taken = PrefixToMass(weights, p);
  const bool all = p >= 1.0;
  return MakeSet(candidates, weights, all ? taken : PrefixToMass(weights, p * (1.0 - margin)),
                 taken, all ? taken : PrefixToMass(weights, p * (1.0 + margin)), margin, 0.0);
}

Indices FittingPrefix(const Vector& scores, const std::vector<std::size_t>& sizes,
                      std::size_t limit) {
  Require(scores.size() == sizes.size(), "a size for each item");
  Indices taken;
  std::size_t sum = 0;
  for (const std::size_t item : Ranking(scores)) {
    sum += sizes[item];
    if (limit == 0 || (sum > limit && !taken.empty())) break;
    taken.push_back(item);
  }
  std::sort(taken.begin(), taken.end());
  return taken;
}

std::string CheckTaken(const TopSet& expected, const Indices& taken) {
  std::vector<bool> inside(expected.candidates.size(), false);
  for (const std::size_t number : taken) {
    const auto found =
        std::lower_bound(expected.candidates.begin(), expected.candidates.end(), number);
    const std::string name = std::to_string(number);
    if (found == expected.candidates.end() || *found != number) return name + " is no candidate";
    const auto place = static_cast<std::size_t>(found - expected.candidates.begin());
    if (inside[place]) return name + " is taken twice";
    inside[place] = true;
    if (!expected.may[place]) return name + " is taken and may not be";
  }
  for (std::size_t place = 0; place < inside.size(); ++place) {
    if (expected.must[place] && !inside[place]) {
      return std::to_string(expected.candidates[place]) + " must be taken and is not";
    }
  }
  if (expected.size.has_value() && taken.size() != *expected.size) {
    return std::to_string(taken.size()) + " are taken and not " + std::to_string(*expected.size);
  }
  return "";
}

}  // namespace attnd::oracle
