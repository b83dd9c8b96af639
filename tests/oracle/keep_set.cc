// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/keep_set.h"

#include <algorithm>
#include <cmath>

#include "tests/oracle/infinity.h"

namespace attnd::oracle {

namespace {

constexpr double kRoundingSlack = 1e-9;  // relative, of min_share * B

enum class Aggregate { kMean, kMaximum };

// The masses of every query of every head over the middle: [group * observed][middle].
std::vector<Vector> MiddleMasses(const ObservedHead& head, const Middle& middle, double scale) {
  Require(middle.begin <= middle.end && middle.end <= head.keys.size(), "a middle in the prefill");
  std::vector<Vector> rows;
  for (const std::vector<Vector>& queries : head.queries) {
    Require(queries.size() <= head.keys.size(), "no more observation queries than keys");
    const std::size_t first = head.keys.size() - queries.size();
    for (std::size_t i = 0; i < queries.size(); ++i) {
      const Vector mass = CausalMass(queries[i], first + i, head.keys, scale);
      Vector row;
      for (std::size_t j = middle.begin; j < middle.end; ++j) row.push_back(mass[j]);
      rows.push_back(row);
    }
  }
  Require(!rows.empty(), "at least one observation query");
  return rows;
}

Vector Aggregated(const std::vector<Vector>& rows, Aggregate how) {
  Vector result(rows[0].size(), 0.0);  // no mass is negative
  for (const Vector& row : rows) {
    for (std::size_t j = 0; j < row.size(); ++j) {
      result[j] = how == Aggregate::kMaximum
                      ? std::max(result[j], row[j])
                      : result[j] + row[j] / static_cast<double>(rows.size());
    }
  }
  return result;
}

Vector Scores(const ObservedHead& head, const Middle& middle, double scale, Pooling pooling,
              Aggregate how) {
  std::vector<Vector> rows = MiddleMasses(head, middle, scale);
  if (pooling == Pooling::kAfterAggregation) return AveragePool(Aggregated(rows, how));
  for (Vector& row : rows) row = AveragePool(row);
  return Aggregated(rows, how);
}

bool Contains(const Indices& ascending, std::size_t number) {
  return std::binary_search(ascending.begin(), ascending.end(), number);
}

}  // namespace

Middle MiddleOfPrefill(std::size_t prefill, std::size_t sink, std::size_t window) {
  const std::size_t begin = std::min(sink, prefill);
  const std::size_t end = prefill > window ? prefill - window : 0;
  return {begin, std::max(begin, end)};
}

Vector CausalMass(const Vector& query, std::size_t position, const std::vector<Vector>& keys,
                  double scale) {
  Vector mass = HeadWeights(query, keys, Range(0, position + 1), scale);
  mass.resize(keys.size(), 0.0);
  return mass;
}

Vector AveragePool(const Vector& masses, std::size_t kernel) {
  Require(kernel % 2 == 1, "an odd kernel");
  const std::size_t half = kernel / 2;
  Vector pooled;
  for (std::size_t j = 0; j < masses.size(); ++j) {
    const std::size_t first = j > half ? j - half : 0;
    const std::size_t last = std::min(j + half, masses.size() - 1);
    double sum = 0.0;
    for (std::size_t i = first; i <= last; ++i) sum += masses[i];
    pooled.push_back(sum / static_cast<double>(kernel));
  }
  return pooled;
}

Vector SnapScores(const ObservedHead& head, const Middle& middle, double scale, Pooling pooling) {
  return Scores(head, middle, scale, pooling, Aggregate::kMean);
}

Vector AdaScores(const ObservedHead& head, const Middle& middle, double scale, Pooling pooling) {
  return Scores(head, middle, scale, pooling, Aggregate::kMaximum);
}

TopSet KeepTop(const Vector& scores, const Middle& middle, const Budget& budget) {
  return TakeTop(Range(middle.begin, middle.end), scores,
                 TokensOf(budget, middle.size(), middle.size()));
}

std::vector<TopSet> KeepAdaptive(const std::vector<Vector>& scores, const Middle& middle,
                                 const Budget& budget, double min_share, double margin) {
  Require(min_share >= 0.0 && min_share <= 1.0, "a share of 0 to 1");
  const std::size_t size = middle.size();
  const std::size_t uniform = TokensOf(budget, size, size);
  const auto own = static_cast<std::size_t>(
      std::floor(min_share * static_cast<double>(uniform) * (1.0 + kRoundingSlack)));

  // First each head's own best; what is left, numbered by head and then place, in one ranking.
  std::vector<TopSet> kept;
  Indices left;
  Vector left_scores;
  for (std::size_t h = 0; h < scores.size(); ++h) {
    kept.push_back(TakeTop(Range(middle.begin, middle.end), scores[h], own, margin));
    for (std::size_t place = 0; place < size; ++place) {
      if (Contains(kept[h].taken, middle.begin + place)) continue;
      left.push_back(h * size + place);
      left_scores.push_back(scores[h][place]);
    }
  }
  const TopSet shared = TakeTop(left, left_scores, scores.size() * (uniform - own), margin);
  double inside = kInfinity;    // the worst score that the second stage takes
  double outside = -kInfinity;  // the best that it leaves out
  for (std::size_t i = 0; i < left.size(); ++i) {
    const bool taken = Contains(shared.taken, left[i]);
    if (taken) inside = std::min(inside, left_scores[i]);
    if (!taken) outside = std::max(outside, left_scores[i]);
    if (taken) kept[left[i] / size].taken.push_back(middle.begin + left[i] % size);
  }
  for (TopSet& head : kept) {
    std::sort(head.taken.begin(), head.taken.end());
    head.size.reset();
    for (std::size_t place = 0; place < size; ++place) {
      const double score = head.scores[place];
      if (score > outside * (1.0 + margin)) head.must[place] = true;
      if (score >= inside * (1.0 - margin)) head.may[place] = true;
    }
  }
  return kept;
}

}  // namespace attnd::oracle
