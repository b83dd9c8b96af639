// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/cluster_judge.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "tests/attention/oracle_support.h"

namespace attnd::attention::test {
namespace {

// A selection with no cluster that has to be exact.
oracle::Selection Relaxed(oracle::Selection selection) {
  std::fill(selection.must_exact.begin(), selection.must_exact.end(), false);
  return selection;
}

}  // namespace

bool LooksAtClusters(const oracle::Policy& policy) {
  return policy.preset != oracle::Preset::kDense && policy.preset != oracle::Preset::kStreaming &&
         !(policy.preset == oracle::Preset::kErrorTarget && policy.tolerance == 0);
}

ClusterJudge::ClusterJudge(const TestRow& row, uint32_t layer, uint32_t token, uint32_t kv_head,
                           const Plan* given, bool rounded_squares)
    : input_(MakeInput(row, layer, token, kv_head, given)),
      policy_(OraclePolicy(row.policy, layer)),
      quantile_(row.policy.quantile) {
  if (!rounded_squares) input_.square_steps.reset();
  if (given != nullptr) plan_ = NumberedPlan(*given, input_);
  if (!row.sequence->view->indexes.has_regression()) return;
  if (policy_.mass != oracle::MassEstimate::kSecondOrder || !LooksAtClusters(policy_)) return;
  regression_ = MakeRegressionInput(row, layer, kv_head);
  const bool latent = row.sequence->view->shape.latent;
  if (latent) regression_->hidden_deviations.assign(oracle::ClusterCount(*regression_), 2.0);
  for (const oracle::Vector& query : input_.queries) {
    oracle::SoftmaxState& state = zones_.emplace_back(input_.value_dim);
    for (size_t t = 0; t < input_.zone_keys.size(); ++t) {
      state.Add(input_.scale * oracle::Dot(query, input_.zone_keys[t]), input_.zone_values[t]);
    }
  }
  const bool tree = row.sequence->view->indexes.Has(IndexKind::kTree);
  if (!tree || given == nullptr || policy_.preset != oracle::Preset::kErrorTarget) return;
  tree_ = OpenAsGiven(row, layer, kv_head, input_.queries, zones_, *given);
  input_.segments = tree_->segments;
  regression_ = tree_->regression;
  for (size_t i = 0; latent && i < tree_->candidates.size(); ++i) {
    regression_->hidden_deviations.push_back(tree_->candidates[i] ? 2.0 : 4.0);
  }
  plan_ = tree_->plan;
}

std::string ClusterJudge::WrongPlan(bool missed) const {
  if (regression_.has_value() && quantile_ > 0 && std::isfinite(policy_.tolerance)) {
    return WrongQuantilePlan(missed);
  }
  const oracle::Selection selection = Select();
  return oracle::CheckPlan(missed ? Relaxed(selection) : selection, plan_);
}

oracle::Selection ClusterJudge::Select() const {
  if (!regression_.has_value()) return oracle::Select(input_, policy_);
  if (policy_.preset != oracle::Preset::kErrorTarget) {
    return oracle::Select(AlongAxes(), policy_);
  }
  if (tree_.has_value()) {
    return oracle::SelectAmong(*regression_, input_.queries, zones_, policy_.tolerance,
                               tree_->floor_count, tree_->candidates)
        .selection;
  }
  return oracle::Select(*regression_, input_.queries, zones_, policy_.tolerance, policy_.floor)
      .selection;
}

oracle::Answer ClusterJudge::Answer(const oracle::Plan& plan) const {
  if (!regression_.has_value()) return oracle::Evaluate(input_, policy_.mass, plan);
  oracle::Answer answer;
  std::vector<const oracle::Cluster*> clusters;
  for (const auto& segment : input_.segments) {
    for (const oracle::Cluster& cluster : segment) clusters.push_back(&cluster);
  }
  size_t tokens = 0;
  for (const oracle::Cluster* cluster : clusters) tokens += cluster->Tokens();
  for (const size_t i : plan.exact) answer.exact_tokens += clusters[i]->Tokens();
  for (const size_t i : plan.estimated) answer.estimated_tokens += clusters[i]->Tokens();
  answer.dropped_tokens = tokens - answer.exact_tokens - answer.estimated_tokens;
  for (size_t h = 0; h < input_.queries.size(); ++h) {
    answer.heads.push_back(HeadAnswer(h, plan, clusters));
  }
  return answer;
}

std::string ClusterJudge::WrongQuantilePlan(bool missed) const {
  constexpr int kTries = 5, kTriesBesideClosed = 2;  // docs/POLICIES.md
  const std::vector<double> limits(
      zones_.size(), policy_.tolerance / ErrorFactor(quantile_) / oracle::kIndependent);
  const bool closed = tree_.has_value() && tree_->closed;
  if (!tree_.has_value() || !tree_->opened_anew) {
    return WrongTries(*regression_, closed ? kTriesBesideClosed : kTries, limits, missed);
  }
  oracle::RegressionInput whole = *regression_;
  whole.outputs_of.reset();  // found anew
  return WrongTries(whole, kTries, limits, missed);
}

std::string ClusterJudge::WrongTries(const oracle::RegressionInput& input, int tries,
                                     const std::vector<double>& limits, bool missed) const {
  constexpr double kClose = 1e-3, kSlack = 0.8;
  const double within = policy_.tolerance / ErrorFactor(quantile_);
  const size_t count = oracle::ClusterCount(input);
  const std::vector<bool> candidates =
      tree_.has_value() ? tree_->candidates : std::vector<bool>(count, true);
  const size_t floor =
      tree_.has_value() ? tree_->floor_count : oracle::FractionCount(policy_.floor, count);
  const oracle::Selection selection =
      oracle::SelectForHeads(input, input_.queries, zones_, limits, floor, candidates).selection;
  const auto expected = [&](size_t head, const oracle::Plan& plan) {
    return oracle::ExpectedError(input, input_.queries[head], zones_[head], plan.estimated);
  };
  // Limits of the next try. A head on the edge may have been taken for either.
  std::vector<double> next = limits, next_at_edges = limits;
  bool given_within = true;  // which misses cannot be held to
  for (size_t head = 0; head < zones_.size(); ++head) {
    const double error = expected(head, selection.plan);
    const double tighter = std::isfinite(error) ? limits[head] * kSlack * within / error : 0;
    if (!(error <= within * (1 + kClose))) next[head] = tighter;
    if (!(error <= within * (1 - kClose))) next_at_edges[head] = tighter;
    given_within &= missed || expected(head, plan_) <= within * (1 + kClose);
  }
  std::string wrong = oracle::CheckPlan(missed ? Relaxed(selection) : selection, plan_);
  if (wrong.empty() && given_within) return "";
  if (wrong.empty()) wrong = "is not within the tolerance";
  if (next_at_edges == limits) return wrong;
  if (tries == 1) return plan_.estimated.empty() || missed ? "" : "no try is within the tolerance";
  if (next != limits) wrong = WrongTries(input, tries - 1, next, missed);
  if (wrong.empty() || next_at_edges == next) return wrong;
  return WrongTries(input, tries - 1, next_at_edges, missed);
}

oracle::PolicyInput ClusterJudge::AlongAxes() const {
  oracle::PolicyInput turned = input_;
  const size_t dim = input_.queries[0].size();
  const size_t width = dim * (1 + input_.segments.size());
  for (oracle::Vector& query : turned.queries) {
    query.resize(width, 0.0);
    for (size_t s = 0; s < input_.segments.size(); ++s) {
      const auto& axes = regression_->segments[s].axes;
      for (size_t a = 0; a < dim; ++a) {
        for (size_t c = 0; c < dim; ++c) query[(1 + s) * dim + a] += query[c] * axes[c][a];
      }
    }
  }
  for (oracle::Vector& key : turned.zone_keys) key.resize(width, 0.0);
  for (size_t s = 0; s < turned.segments.size(); ++s) {
    for (oracle::Cluster& cluster : turned.segments[s]) {
      cluster.centroid.resize(width, 0.0);
      oracle::Vector variance(width, 0.0);
      std::copy(cluster.variance.begin(), cluster.variance.end(),
                variance.begin() + static_cast<ptrdiff_t>((1 + s) * dim));
      cluster.variance = std::move(variance);
      cluster.keys.clear();  // a selection reads none
      cluster.values.clear();
    }
  }
  turned.square_steps.reset();  // they are of each segment's own greatest
  return turned;
}

oracle::HeadAnswer ClusterJudge::HeadAnswer(
    size_t h, const oracle::Plan& plan, const std::vector<const oracle::Cluster*>& clusters) const {
  const oracle::Vector& query = input_.queries[h];
  oracle::SoftmaxState state = zones_[h];
  std::vector<bool> dropped(clusters.size(), true);
  for (const size_t i : plan.exact) {
    dropped[i] = false;
    oracle::Require(clusters[i]->keys.size() == clusters[i]->Tokens(), "members of what is read");
    for (size_t t = 0; t < clusters[i]->keys.size(); ++t) {
      state.Add(input_.scale * oracle::Dot(query, clusters[i]->keys[t]), clusters[i]->values[t]);
    }
  }
  const double exact_lse = state.Lse();
  state.Merge(oracle::Estimate(*regression_, query, plan.estimated).state);
  for (const size_t i : plan.estimated) dropped[i] = false;
  oracle::Indices left;
  for (size_t i = 0; i < clusters.size(); ++i) {
    if (dropped[i]) left.push_back(i);
  }
  oracle::SoftmaxState all = state;
  all.Merge(oracle::Estimate(*regression_, query, left).state);
  oracle::HeadAnswer answer;
  answer.out = state.Out();
  answer.lse = state.Lse();
  answer.covered_mass = std::exp(state.Lse() - all.Lse());
  answer.exact_mass = std::exp(exact_lse - all.Lse());
  answer.predicted_error = oracle::PredictedError(*regression_, query, zones_[h], plan.estimated,
                                                  answer.lse, answer.out);
  return answer;
}

}  // namespace attnd::attention::test
