// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/regression_policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace attnd::oracle {

namespace {

constexpr double kSpreadCap = 8.0;  // of d2
constexpr double kMassWeight = 0.5;
constexpr double kCoherent = 0.7;
constexpr double kHiddenShare = 0.1;
constexpr double kNormGuard = 1e-3;  // share of the values' root mean square
constexpr double kTiny = 0x1p-126;   // the least normal float

// q~ = R^T q.
Vector AlongAxes(const Regression& segment, const Vector& query) {
  Require(segment.axes.size() == query.size(), "queries of the axes' size");
  Vector result(query.size(), 0.0);
  for (std::size_t d = 0; d < query.size(); ++d) {
    for (std::size_t c = 0; c < result.size(); ++c) result[c] += segment.axes[d][c] * query[d];
  }
  return result;
}

Vector Squares(const Vector& row, const std::optional<double>& steps) {
  Vector squares;
  for (const double x : row) squares.push_back(x * x);
  if (!steps.has_value()) return squares;
  const double step = *std::max_element(squares.begin(), squares.end()) / *steps;
  for (double& square : squares) square = step > 0.0 ? std::round(square / step) * step : 0.0;
  return squares;
}

// The segment and place of each cluster.
struct Place {
  const Regression* segment = nullptr;
  std::size_t i = 0;

  double Size() const { return segment->sizes[i]; }
  const Vector& MeanValue() const { return segment->mean_values[i]; }
};

std::vector<Place> Places(const RegressionInput& input) {
  std::vector<Place> places;
  for (const Regression& segment : input.segments) {
    for (std::size_t i = 0; i < segment.sizes.size(); ++i) places.push_back({&segment, i});
  }
  return places;
}

// max(|o|, guard).
double GuardedNorm(const std::vector<Place>& places, const Vector& log_mass,
                   const SoftmaxState& zones, double lse, const Vector& out) {
  double mean_square = 0.0;
  for (std::size_t i = 0; i < places.size(); ++i) {
    mean_square += std::exp(log_mass[i] - lse) * SquaredNorm(places[i].MeanValue());
  }
  if (zones.z > 0.0) mean_square += std::exp(zones.Lse() - lse) * SquaredNorm(zones.Out());
  return std::max({std::sqrt(SquaredNorm(out)), kNormGuard * std::sqrt(mean_square), kTiny});
}

// Zones and all clusters by their estimates.
SoftmaxState FirstPass(const RegressionInput& input, const Vector& query,
                       const SoftmaxState& zones) {
  SoftmaxState state = zones;
  state.Merge(Estimate(input, query, Range(0, ClusterCount(input))).state);
  return state;
}

Vector FirstPassOut(const RegressionInput& input, const Vector& query, const SoftmaxState& zones) {
  const RegressionInput& from = input.outputs_of != nullptr ? *input.outputs_of : input;
  return FirstPass(from, query, zones).Out();
}

// a q . C_i + ln s_i + optimism sqrt(d2_i)
Vector OptimisticLogMass(const RegressionInput& input, const Vector& query, double optimism) {
  const HeadScores scores = Scores(input, query);
  Vector result;
  for (std::size_t i = 0; i < scores.log_mass.size(); ++i) {
    result.push_back(scores.log_mass[i] - scores.lift[i] + optimism * std::sqrt(scores.spread[i]));
  }
  return result;
}

// The cut by the error budget: the prefix of the ranking by errors / sizes that is taken, and what
// an implementation with another rounding may take. A cluster must be inside if it and all that lie
// surely below it exceed the budget, and may be inside if it and all that do not lie surely above
// it do.
struct BudgetCut {
  std::vector<bool> taken, must, may;  // [clusters]
};

BudgetCut CutByBudget(const Vector& errors, const Vector& ranking, double tolerance,
                      double margin) {
  const std::size_t count = errors.size();
  if (tolerance == 0.0) {
    const std::vector<bool> all(count, true);
    return {all, all, all};
  }
  std::vector<bool> none(count, false);
  BudgetCut cut{none, none, none};
  const double budget = tolerance * tolerance;
  Indices order = Range(0, count);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return ranking[a] > ranking[b]; });
  double remainder = 0.0;
  for (std::size_t rank = count; rank > 0; --rank) {
    remainder += errors[order[rank - 1]];
    cut.taken[order[rank - 1]] = remainder > budget;
  }
  std::reverse(order.begin(), order.end());
  Vector sums = {0.0};  // of the errors of so many clusters, the lowest of the ranking
  for (const std::size_t i : order) sums.push_back(sums.back() + errors[i]);
  // How many clusters, from the lowest on, are `before` a place of the ranking.
  const auto so_many = [&](const auto& before) {
    return std::partition_point(order.begin(), order.end(), before) - order.begin();
  };
  for (std::size_t i = 0; i < count; ++i) {
    const auto surely_below =
        so_many([&](std::size_t j) { return ranking[j] * (1.0 + margin) < ranking[i]; });
    const auto maybe_below = so_many(  // itself, too
        [&](std::size_t j) { return ranking[j] <= ranking[i] * (1.0 + margin); });
    cut.must[i] = errors[i] + sums[surely_below] > budget * (1.0 + margin);
    cut.may[i] = sums[maybe_below] > budget * (1.0 - margin);
  }
  return cut;
}

}  // namespace

std::size_t ClusterCount(const RegressionInput& input) { return Places(input).size(); }

HeadScores Scores(const RegressionInput& input, const Vector& query) {
  HeadScores scores;
  for (const Regression& segment : input.segments) {
    const Vector squares = Squares(AlongAxes(segment, query), input.square_steps);
    for (std::size_t i = 0; i < segment.sizes.size(); ++i) {
      const double spread = input.scale * input.scale * Dot(squares, segment.variances[i]);
      const double lift = std::min(spread, kSpreadCap) / 2.0;
      scores.spread.push_back(spread);
      scores.lift.push_back(lift);
      scores.damping.push_back(spread > kSpreadCap ? kSpreadCap / spread : 1.0);
      scores.log_mass.push_back(input.scale * Dot(query, segment.centroids[i]) +
                                std::log(segment.sizes[i]) + lift);
    }
  }
  return scores;
}

RegressionEstimate Estimate(const RegressionInput& input, const Vector& query, const Indices& set) {
  const std::vector<Place> places = Places(input);
  const HeadScores scores = Scores(input, query);
  RegressionEstimate estimate{SoftmaxState(input.value_dim), Vector(input.value_dim, 0.0)};
  for (const std::size_t i : set) estimate.state.Add(scores.log_mass.at(i), places[i].MeanValue());
  for (const std::size_t i : set) {
    estimate.variance += std::exp(scores.log_mass[i] - estimate.state.Lse()) *
                         std::min(scores.spread[i], kSpreadCap);
  }

  for (const Regression& segment : input.segments) {
    Vector moved(query.size(), 0.0);  // sum of Z_i f_i w_i over the set's clusters of this segment
    for (const std::size_t i : set) {
      if (places[i].segment != &segment) continue;
      const double weight = std::exp(scores.log_mass[i] - estimate.state.m) * scores.damping[i];
      const Vector& variance = segment.variances[places[i].i];
      for (std::size_t c = 0; c < moved.size(); ++c) moved[c] += weight * variance[c];
    }
    const Vector along = AlongAxes(segment, query);
    for (std::size_t c = 0; c < moved.size(); ++c) moved[c] *= along[c];
    for (std::size_t e = 0; e < input.value_dim; ++e) {
      estimate.shift[e] += input.scale * Dot(segment.slope[e], moved);
    }
  }
  for (std::size_t e = 0; e < input.value_dim; ++e) estimate.state.n[e] += estimate.shift[e];
  estimate.shift_norm = std::sqrt(SquaredNorm(estimate.shift));
  return estimate;
}

Vector SquaredErrors(const RegressionInput& input, const Vector& query, const SoftmaxState& zones,
                     double lse, const Vector& out) {
  const std::vector<Place> places = Places(input);
  const HeadScores scores = Scores(input, query);
  const double norm = GuardedNorm(places, scores.log_mass, zones, lse, out);
  Vector errors;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const double weights = std::min(std::expm1(2.0 * scores.lift[i]), places[i].Size() - 1.0);
    const double of_values = weights * places[i].segment->spread[places[i].i] / places[i].Size();
    const double of_mass = kMassWeight * scores.lift[i] * scores.lift[i] *
                           (SquaredNorm(places[i].MeanValue()) + SquaredNorm(out));
    const double relative_mass = std::exp(scores.log_mass[i] - lse) / norm;
    errors.push_back(relative_mass * relative_mass * (of_values + of_mass));
  }
  return errors;
}

Vector FirstPassSquaredErrors(const RegressionInput& input, const Vector& query,
                              const SoftmaxState& zones) {
  return SquaredErrors(input, query, zones, FirstPass(input, query, zones).Lse(),
                       FirstPassOut(input, query, zones));
}

ErrorTargetSelection SelectAmong(const RegressionInput& input, const std::vector<Vector>& queries,
                                 const std::vector<SoftmaxState>& zones, double tolerance,
                                 std::size_t floor_count, const std::vector<bool>& candidates,
                                 double optimism, double margin) {
  Require(!queries.empty() && queries.size() == zones.size(),
          "a state of the zones for each query");
  Require(tolerance >= 0.0, "a tolerance of 0 or more");
  const std::vector<Place> places = Places(input);
  const std::size_t count = places.size();
  Require(candidates.size() == count, "a word on each cluster");
  ErrorTargetSelection result;
  result.errors.assign(count, 0.0);
  Indices chosen_from;
  for (std::size_t i = 0; i < count; ++i) {
    if (candidates[i]) chosen_from.push_back(i);
  }
  std::vector<Vector> optimistic;
  for (std::size_t h = 0; h < queries.size(); ++h) {
    const Vector errors = FirstPassSquaredErrors(input, queries[h], zones[h]);
    for (std::size_t i = 0; i < count; ++i) {
      result.errors[i] += errors[i] / static_cast<double>(queries.size());
    }
    const Vector all = OptimisticLogMass(input, queries[h], optimism);
    Vector& own = optimistic.emplace_back();
    for (const std::size_t i : chosen_from) own.push_back(all[i]);
  }
  const Vector importance = GroupImportance(optimistic);
  result.optimistic.assign(count, 0.0);
  for (std::size_t k = 0; k < chosen_from.size(); ++k) {
    result.optimistic[chosen_from[k]] = importance[k];
  }

  // Of the candidates, in their order.
  Vector errors, error_ranking, floor_ranking;
  for (const std::size_t i : chosen_from) {
    errors.push_back(result.errors[i]);
    error_ranking.push_back(result.errors[i] / places[i].Size());
    floor_ranking.push_back(result.optimistic[i] / places[i].Size());
  }
  double left = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    const bool counts = !candidates[i] && (input.undecided.empty() || !input.undecided[i]);
    left += counts ? result.errors[i] : 0.0;
  }
  // A budget of nothing, unlike a tolerance of nothing, leaves clusters without error.
  const double budget2 = std::max(tolerance * tolerance - left, 0.0);
  const double allowed = tolerance > 0.0 ? std::max(std::sqrt(budget2), 1e-300) : 0.0;
  const BudgetCut budget = CutByBudget(errors, error_ranking, allowed, margin);
  const std::size_t most = std::min(floor_count, chosen_from.size());
  const TopSet top = TakeTop(Range(0, chosen_from.size()), floor_ranking, most, margin);

  std::vector<bool> exact(count, false), must(count, false), may(count, false);
  for (std::size_t k = 0; k < chosen_from.size(); ++k) {
    exact[chosen_from[k]] = budget.taken[k];
    must[chosen_from[k]] = budget.must[k] || top.must[k];
    may[chosen_from[k]] = budget.may[k] || top.may[k];
  }
  for (const std::size_t k : top.taken) exact[chosen_from[k]] = true;
  Selection& selection = result.selection;
  selection.must_covered = selection.may_covered = std::vector<bool>(count, true);
  for (std::size_t i = 0; i < count; ++i) {
    (exact[i] ? selection.plan.exact : selection.plan.estimated).push_back(i);
  }
  selection.must_exact = std::move(must);
  selection.may_exact = std::move(may);
  return result;
}

ErrorTargetSelection SelectForHeads(const RegressionInput& input,
                                    const std::vector<Vector>& queries,
                                    const std::vector<SoftmaxState>& zones,
                                    const std::vector<double>& tolerances, std::size_t floor_count,
                                    const std::vector<bool>& candidates, double optimism,
                                    double margin) {
  Require(tolerances.size() == queries.size(), "a tolerance of each head");
  // The floor is the group's; it is that of any tolerance.
  ErrorTargetSelection all =
      SelectAmong(input, queries, zones, std::numeric_limits<double>::infinity(), floor_count,
                  candidates, optimism, margin);
  Selection& selection = all.selection;
  std::vector<bool> exact(candidates.size(), false);
  for (const std::size_t i : selection.plan.exact) exact[i] = true;
  for (std::size_t h = 0; h < queries.size(); ++h) {
    const Selection own =
        SelectAmong(input, {queries[h]}, {zones[h]}, tolerances[h], 0, candidates, optimism, margin)
            .selection;
    for (const std::size_t i : own.plan.exact) exact[i] = true;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      selection.must_exact[i] = selection.must_exact[i] || own.must_exact[i];
      selection.may_exact[i] = selection.may_exact[i] || own.may_exact[i];
    }
  }
  selection.plan = {};
  for (std::size_t i = 0; i < exact.size(); ++i) {
    (exact[i] ? selection.plan.exact : selection.plan.estimated).push_back(i);
  }
  return all;
}

double ExpectedError(const RegressionInput& input, const Vector& query, const SoftmaxState& zones,
                     const Indices& estimated) {
  return PredictedError(input, query, zones, estimated, FirstPass(input, query, zones).Lse(),
                        FirstPassOut(input, query, zones));
}

ErrorTargetSelection Select(const RegressionInput& input, const std::vector<Vector>& queries,
                            const std::vector<SoftmaxState>& zones, double tolerance, double floor,
                            double margin) {
  const std::size_t count = ClusterCount(input);
  return SelectAmong(input, queries, zones, tolerance, FractionCount(floor, count),
                     std::vector<bool>(count, true), /*optimism=*/2.0, margin);
}

// The share of all mass that tokens hidden in estimated clusters would have: a cluster beyond the
// cap has exp(k (sqrt(d2) - sqrt(cap))) times its estimate in a token k deviations above its mean.
double HiddenShare(const RegressionInput& input, const Vector& query, const Indices& estimated,
                   double lse) {
  if (input.hidden_deviations.empty()) return 0.0;
  const HeadScores scores = Scores(input, query);
  double sum = 0.0;  // of squares, as shares of the known mass; beyond any number if so
  for (const std::size_t i : estimated) {
    if (!(scores.spread[i] > kSpreadCap)) continue;
    const double above = std::sqrt(scores.spread[i]) - std::sqrt(kSpreadCap);
    sum += std::exp(2.0 * (scores.log_mass[i] + input.hidden_deviations[i] * above - lse));
  }
  const double hidden = std::sqrt(sum);
  return std::isinf(hidden) ? 1.0 : hidden / (hidden + 1.0);
}

double PredictedError(const RegressionInput& input, const Vector& query, const SoftmaxState& zones,
                      const Indices& estimated, double lse, const Vector& out) {
  if (estimated.empty()) return 0.0;
  const Vector errors = SquaredErrors(input, query, zones, lse, out);
  double sum = 0.0;
  for (const std::size_t i : estimated) sum += errors.at(i);
  const RegressionEstimate estimate = Estimate(input, query, estimated);
  const double norm = GuardedNorm(Places(input), Scores(input, query).log_mass, zones, lse, out);
  const double shift = std::exp(estimate.state.m - lse) * estimate.shift_norm / norm;
  const double coherent = kCoherent * shift * std::sqrt(estimate.variance);
  const double hidden = HiddenShare(input, query, estimated, lse);
  return std::sqrt(kIndependent * kIndependent * sum + coherent * coherent +
                   kHiddenShare * hidden * hidden);
}

}  // namespace attnd::oracle
