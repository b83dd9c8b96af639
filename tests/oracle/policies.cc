// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/policies.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/oracle/infinity.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

namespace {

constexpr double kSpreadCap = 8.0;  // of d2_i, where it becomes a mass or an error
// |o| is taken as at least this share of the values' root mean square.
constexpr double kNormGuard = 1e-3;
constexpr double kTiny = 0x1p-126;       // the least normal float
constexpr double kRoundingSlack = 1e-9;  // relative, of fraction * count

std::vector<const Cluster*> AllClusters(const PolicyInput& input) {
  std::vector<const Cluster*> all;
  for (const auto& segment : input.segments) {
    for (const Cluster& cluster : segment) all.push_back(&cluster);
  }
  return all;
}

// ---- Rankings and cuts ----

std::vector<std::size_t> DescendingOrder(const Vector& scores) {
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  return order;
}

// The cut takes `taken` clusters; with sums off by the margin it may take `fewest` to `most`.
Cut MakeCut(const std::string& name, const Vector& scores, std::size_t fewest, std::size_t taken,
            std::size_t most, double margin) {
  Require(fewest <= taken && taken <= most && most <= scores.size(), "cuts in order");
  Cut cut{name, scores, DescendingOrder(scores), taken, {}, {}};
  const std::size_t count = scores.size();
  // Scores of the best cluster that the smallest cut leaves out, and of the worst that the largest
  // takes.
  const double outside = fewest < count ? scores[cut.order[fewest]] : -kInfinity;
  const double inside = most > 0 ? scores[cut.order[most - 1]] : kInfinity;
  cut.must.resize(count);
  cut.may.resize(count);
  for (std::size_t rank = 0; rank < count; ++rank) {
    const std::size_t i = cut.order[rank];
    cut.must[i] = rank < fewest && (fewest == count || scores[i] > outside * (1.0 + margin));
    cut.may[i] = rank < most || scores[i] >= inside * (1.0 - margin);
  }
  return cut;
}

Cut TopCount(const std::string& name, const Vector& scores, std::size_t taken, double margin) {
  return MakeCut(name, scores, taken, taken, taken, margin);
}

// Length of the shortest prefix of the ranking whose sum reaches p.
std::size_t PrefixToMass(const Vector& scores, const std::vector<std::size_t>& order, double p) {
  if (p >= 1.0) return order.size();
  double sum = 0.0;
  for (std::size_t rank = 0; rank < order.size(); ++rank) {
    sum += scores[order[rank]];
    if (sum >= p) return rank + 1;
  }
  return order.size();
}

Cut TopMass(const std::string& name, const Vector& scores, double p, double margin) {
  const std::vector<std::size_t> order = DescendingOrder(scores);
  const std::size_t taken = PrefixToMass(scores, order, p);
  if (p >= 1.0) return TopCount(name, scores, taken, margin);
  return MakeCut(name, scores, PrefixToMass(scores, order, p * (1.0 - margin)), taken,
                 PrefixToMass(scores, order, p * (1.0 + margin)), margin);
}

// Length of the shortest prefix whose remainder sums to at most the budget, summed from the
// smallest upward.
std::size_t PrefixToRemainder(const Vector& scores, const std::vector<std::size_t>& order,
                              double budget) {
  double remainder = 0.0;
  for (std::size_t rank = order.size(); rank > 0; --rank) {
    remainder += scores[order[rank - 1]];
    if (remainder > budget) return rank;
  }
  return 0;
}

Cut ErrorBudget(const std::string& name, const Vector& scores, double tolerance, double margin) {
  if (tolerance == 0.0) return TopCount(name, scores, scores.size(), margin);
  const std::vector<std::size_t> order = DescendingOrder(scores);
  const double budget = tolerance * tolerance;
  return MakeCut(name, scores, PrefixToRemainder(scores, order, budget * (1.0 + margin)),
                 PrefixToRemainder(scores, order, budget),
                 PrefixToRemainder(scores, order, budget * (1.0 - margin)), margin);
}

// ---- Scores ----

// a q . C_i + ln s_i + 2 sqrt(d2_i)
Vector OptimisticLogMass(const PolicyInput& input, const Vector& query) {
  Vector result = LogMass(input, query, MassEstimate::kFirstOrder);
  const Vector spread = LogitSpread(input, query);
  for (std::size_t i = 0; i < result.size(); ++i) result[i] += 2.0 * std::sqrt(spread[i]);
  return result;
}

SoftmaxState ZoneState(const PolicyInput& input, const Vector& query) {
  SoftmaxState state(input.value_dim);
  for (std::size_t j = 0; j < input.zone_keys.size(); ++j) {
    state.Add(input.scale * Dot(query, input.zone_keys[j]), input.zone_values[j]);
  }
  return state;
}

// The e_i of all clusters, relative to an output of norm `norm` and log mass `lse`.
Vector Errors(const PolicyInput& input, const Vector& query, MassEstimate mass, double lse,
              double norm) {
  const std::vector<const Cluster*> clusters = AllClusters(input);
  const Vector log_mass = LogMass(input, query, mass);
  const Vector spread = LogitSpread(input, query);

  double mean_square = 0.0;  // sum_i p_i |V_i|^2
  for (std::size_t i = 0; i < clusters.size(); ++i) {
    mean_square += std::exp(log_mass[i] - lse) * SquaredNorm(clusters[i]->mean_value);
  }
  for (std::size_t j = 0; j < input.zone_keys.size(); ++j) {
    const double logit = input.scale * Dot(query, input.zone_keys[j]);
    mean_square += std::exp(logit - lse) * SquaredNorm(input.zone_values[j]);
  }
  const double denominator = std::max({norm, kNormGuard * std::sqrt(mean_square), kTiny});

  Vector errors;
  for (std::size_t i = 0; i < clusters.size(); ++i) {
    const double deviation = std::sqrt(std::expm1(std::min(spread[i], kSpreadCap)));
    const double numerator = deviation * std::sqrt(clusters[i]->value_spread);
    errors.push_back(numerator == 0.0 ? 0.0
                                      : std::exp(log_mass[i] - lse) * numerator / denominator);
  }
  return errors;
}

// ---- Selection of each preset ----

void SelectErrorTarget(const PolicyInput& input, const Policy& policy, double margin,
                       Selection& selection) {
  const std::size_t count = AllClusters(input).size();
  const auto group = static_cast<double>(input.queries.size());
  Vector mean_squared_errors(count, 0.0);
  std::vector<Vector> optimistic;
  for (const Vector& query : input.queries) {
    const Vector errors = FirstPassErrors(input, query, policy.mass);
    for (std::size_t i = 0; i < count; ++i) mean_squared_errors[i] += errors[i] * errors[i] / group;
    optimistic.push_back(OptimisticLogMass(input, query));
  }
  selection.cuts.push_back(
      ErrorBudget("error budget", mean_squared_errors, policy.tolerance, margin));
  selection.cuts.push_back(
      TopCount("floor", GroupImportance(optimistic), FractionCount(policy.floor, count), margin));
}

void SelectByMass(const PolicyInput& input, const Policy& policy, double margin,
                  Selection& selection) {
  std::vector<Vector> log_masses;
  for (const Vector& query : input.queries) {
    log_masses.push_back(LogMass(input, query, policy.mass));
  }
  const Vector importance = GroupImportance(log_masses);
  if (policy.preset == Preset::kDoubleP) {
    selection.cuts.push_back(TopMass("p2", importance, policy.p2, margin));
    selection.cuts.push_back(TopMass("p1", importance, policy.p1, margin));
    return;
  }
  const std::size_t count = importance.size();
  const std::size_t exact = FractionCount(policy.exact_fraction, count);
  const std::size_t estimated = FractionCount(policy.estimated_fraction, count);
  selection.cuts.push_back(TopCount("exact", importance, exact, margin));
  selection.cuts.push_back(
      TopCount("covered", importance, std::min(exact + estimated, count), margin));
}

std::vector<bool> Taken(const Cut& cut) {
  std::vector<bool> taken(cut.scores.size(), false);
  for (std::size_t rank = 0; rank < cut.taken; ++rank) taken[cut.order[rank]] = true;
  return taken;
}

std::vector<bool> Either(const std::vector<bool>& a, const std::vector<bool>& b) {
  std::vector<bool> result(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) result[i] = a[i] || b[i];
  return result;
}

Plan MakePlan(const std::vector<bool>& exact, const std::vector<bool>& covered) {
  Plan plan;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    if (exact[i]) {
      plan.exact.push_back(i);
    } else if (covered[i]) {
      plan.estimated.push_back(i);
    }
  }
  return plan;
}

void SetAll(Selection& selection, const std::vector<bool>& exact,
            const std::vector<bool>& covered) {
  selection.plan = MakePlan(exact, covered);
  selection.must_exact = selection.may_exact = exact;
  selection.must_covered = selection.may_covered = covered;
}

}  // namespace

std::vector<Cluster> ClustersOf(const SegmentIndex& index, const std::vector<Vector>& keys,
                                const std::vector<Vector>& values) {
  std::vector<Cluster> clusters;
  for (const ClusterSummary& summary : index.clusters) {
    Cluster cluster{static_cast<double>(summary.members.size()),
                    summary.centroid,
                    summary.mean_value,
                    summary.code.Dequantised(),
                    summary.value_spread,
                    {},
                    {}};
    for (const std::size_t member : summary.members) {
      cluster.keys.push_back(keys[member]);
      cluster.values.push_back(values[member]);
    }
    clusters.push_back(cluster);
  }
  return clusters;
}

Policy DensePolicy() { return {}; }

Policy StreamingPolicy() {
  Policy policy;
  policy.preset = Preset::kStreaming;
  return policy;
}

Policy ClustersTopKPolicy(double exact_fraction, double estimated_fraction) {
  Policy policy;
  policy.preset = Preset::kClustersTopK;
  policy.exact_fraction = exact_fraction;
  policy.estimated_fraction = estimated_fraction;
  return policy;
}

Policy DoublePPolicy(double p1, double p2) {
  Policy policy;
  policy.preset = Preset::kDoubleP;
  policy.p1 = p1;
  policy.p2 = p2;
  return policy;
}

Policy ErrorTargetPolicy(double tolerance, double floor) {
  Policy policy;
  policy.preset = Preset::kErrorTarget;
  policy.mass = MassEstimate::kSecondOrder;
  policy.tolerance = tolerance;
  policy.floor = floor;
  return policy;
}

std::size_t FractionCount(double fraction, std::size_t count) {
  if (fraction <= 0.0 || count == 0) return 0;
  const double product = fraction * static_cast<double>(count);
  const double rounded = std::ceil(product * (1.0 - kRoundingSlack));
  return static_cast<std::size_t>(std::clamp(rounded, 1.0, static_cast<double>(count)));
}

Vector LogitSpread(const PolicyInput& input, const Vector& query) {
  Vector squares;
  for (const double q : query) squares.push_back(q * q);
  if (input.square_steps.has_value()) {
    const double step = *std::max_element(squares.begin(), squares.end()) / *input.square_steps;
    for (double& square : squares) square = step > 0 ? std::round(square / step) * step : 0;
  }
  Vector result;
  for (const Cluster* cluster : AllClusters(input)) {
    double sum = 0.0;
    for (std::size_t c = 0; c < query.size(); ++c) {
      sum += squares[c] * cluster->variance[c];
    }
    result.push_back(input.scale * input.scale * sum);
  }
  return result;
}

Vector LogMass(const PolicyInput& input, const Vector& query, MassEstimate mass) {
  const std::vector<const Cluster*> clusters = AllClusters(input);
  const Vector spread = LogitSpread(input, query);
  Vector result;
  for (std::size_t i = 0; i < clusters.size(); ++i) {
    double log_mass = input.scale * Dot(query, clusters[i]->centroid) + std::log(clusters[i]->size);
    if (mass == MassEstimate::kSecondOrder) log_mass += std::min(spread[i], kSpreadCap) / 2.0;
    result.push_back(log_mass);
  }
  return result;
}

Vector GroupImportance(const std::vector<Vector>& log_masses) {
  Vector importance(log_masses.at(0).size(), 0.0);
  for (const Vector& head : log_masses) {
    SoftmaxState sum(0);
    for (const double log_mass : head) sum.Add(log_mass, {});
    for (std::size_t i = 0; i < head.size(); ++i) {
      importance[i] += std::exp(head[i] - sum.Lse()) / static_cast<double>(log_masses.size());
    }
  }
  return importance;
}

Vector FirstPassErrors(const PolicyInput& input, const Vector& query, MassEstimate mass) {
  const std::vector<const Cluster*> clusters = AllClusters(input);
  const Vector log_mass = LogMass(input, query, mass);
  SoftmaxState state = ZoneState(input, query);
  for (std::size_t i = 0; i < clusters.size(); ++i) {
    state.Add(log_mass[i], clusters[i]->mean_value);
  }
  return Errors(input, query, mass, state.Lse(), std::sqrt(SquaredNorm(state.Out())));
}

Selection Select(const PolicyInput& input, const Policy& policy, double margin) {
  const std::size_t count = AllClusters(input).size();
  const std::vector<bool> all(count, true);
  const std::vector<bool> none(count, false);
  Selection selection;
  if (policy.preset == Preset::kDense || count == 0) {
    SetAll(selection, all, all);
    return selection;
  }
  if (policy.preset == Preset::kStreaming) {
    SetAll(selection, none, none);
    return selection;
  }
  if (policy.preset == Preset::kErrorTarget) {
    SelectErrorTarget(input, policy, margin, selection);
    const Cut& budget = selection.cuts[0];
    const Cut& floor = selection.cuts[1];
    selection.plan = MakePlan(Either(Taken(budget), Taken(floor)), all);
    selection.must_exact = Either(budget.must, floor.must);
    selection.may_exact = Either(budget.may, floor.may);
    selection.must_covered = selection.may_covered = all;
    return selection;
  }
  SelectByMass(input, policy, margin, selection);
  const Cut& exact = selection.cuts[0];
  const Cut& covered = selection.cuts[1];
  selection.plan = MakePlan(Taken(exact), Taken(covered));
  selection.must_exact = exact.must;
  selection.may_exact = exact.may;
  selection.must_covered = covered.must;
  selection.may_covered = covered.may;
  return selection;
}

std::string CheckPlan(const Selection& selection, const Plan& plan) {
  const std::size_t count = selection.must_exact.size();
  std::vector<bool> exact(count, false);
  std::vector<bool> covered(count, false);
  for (const auto* part : {&plan.exact, &plan.estimated}) {
    for (const std::size_t i : *part) {
      if (i >= count) return "cluster " + std::to_string(i) + " does not exist";
      if (covered[i]) return "cluster " + std::to_string(i) + " is in the plan twice";
      covered[i] = true;
      if (part == &plan.exact) exact[i] = true;
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    const auto said = [&](const char* what) { return "cluster " + std::to_string(i) + what; };
    if (selection.must_exact[i] && !exact[i]) return said(" must be exact and is not");
    if (exact[i] && !selection.may_exact[i]) return said(" is exact and may not be");
    if (selection.must_covered[i] && !covered[i]) return said(" is dropped and may not be");
    if (covered[i] && !selection.may_covered[i]) return said(" must be dropped and is not");
  }
  return "";
}

Answer Evaluate(const PolicyInput& input, MassEstimate mass, const Plan& plan) {
  const std::vector<const Cluster*> clusters = AllClusters(input);
  std::vector<bool> dropped(clusters.size(), true);
  Answer answer;
  for (const std::size_t i : plan.exact) {
    dropped.at(i) = false;
    Require(clusters[i]->keys.size() == clusters[i]->Tokens(), "members of a cluster that is read");
    answer.exact_tokens += clusters[i]->Tokens();
  }
  for (const std::size_t i : plan.estimated) {
    dropped.at(i) = false;
    answer.estimated_tokens += clusters[i]->Tokens();
  }
  for (std::size_t i = 0; i < clusters.size(); ++i) {
    if (dropped[i]) answer.dropped_tokens += clusters[i]->Tokens();
  }

  for (const Vector& query : input.queries) {
    const Vector log_mass = LogMass(input, query, mass);
    SoftmaxState exact = ZoneState(input, query);
    for (const std::size_t i : plan.exact) {
      for (std::size_t j = 0; j < clusters[i]->keys.size(); ++j) {
        exact.Add(input.scale * Dot(query, clusters[i]->keys[j]), clusters[i]->values[j]);
      }
    }
    SoftmaxState covered = exact;
    for (const std::size_t i : plan.estimated) covered.Add(log_mass[i], clusters[i]->mean_value);
    SoftmaxState total = covered;
    for (std::size_t i = 0; i < clusters.size(); ++i) {
      if (dropped[i]) total.Add(log_mass[i], clusters[i]->mean_value);
    }

    HeadAnswer head;
    head.out = covered.Out();
    head.lse = covered.Lse();
    const bool empty = total.z == 0.0;
    head.covered_mass = empty ? 1.0 : std::exp(covered.Lse() - total.Lse());
    head.exact_mass = empty ? 1.0 : std::exp(exact.Lse() - total.Lse());
    if (!plan.estimated.empty()) {
      const Vector errors = Errors(input, query, mass, head.lse, std::sqrt(SquaredNorm(head.out)));
      double sum = 0.0;
      for (const std::size_t i : plan.estimated) sum += errors[i] * errors[i];
      head.predicted_error = std::sqrt(sum);
    }
    answer.heads.push_back(head);
  }
  return answer;
}

Answer Attend(const PolicyInput& input, const Policy& policy) {
  return Evaluate(input, policy.mass, Select(input, policy).plan);
}

}  // namespace attnd::oracle
