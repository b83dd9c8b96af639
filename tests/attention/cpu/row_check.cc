// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/cpu/row_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "tests/attention/cpu/tree_check.h"
#include "tests/attention/oracle_support.h"
#include "tests/oracle/regression_policy.h"

namespace attnd::attention::test {
namespace {

// Logits reach a few tens; their float32 error, some 1e-6, is the relative error of a weight.
constexpr double kOutTolerance = 2e-5;  // relative to the output's norm, or its values' size
constexpr double kLseTolerance = 2e-5;  // up to an lse of 4; a greater one has more to round
constexpr double kMassTolerance = 2e-5;

// Of a predicted error: relative, for sums of squares of differences; and absolute, as a part of it
// is what is left when sums are taken from sums, which round.
double ErrorTolerance(double error) { return 1e-3 * error + 1e-9; }

// A tolerance of nothing is dense: no clusters are looked at, so there is no plan and no prediction
// to compare.
bool LooksAtClusters(const oracle::Policy& policy) {
  return policy.preset != oracle::Preset::kDense && policy.preset != oracle::Preset::kStreaming &&
         !(policy.preset == oracle::Preset::kErrorTarget && policy.tolerance == 0);
}

// What a row's statistics must be, gathered from the oracle's answers.
struct ExpectedStats {
  size_t zone = 0, exact = 0, estimated = 0, dropped = 0, lanes = 0;
  double covered = 0, exact_mass = 0, error = 0, error_max = 0;
  std::vector<double> kv_head_errors;  // [kv_heads]

  void Add(const oracle::PolicyInput& input, uint32_t kv_head, const oracle::Answer& answer) {
    if (kv_head >= kv_head_errors.size()) kv_head_errors.resize(kv_head + 1);
    zone += input.zone_keys.size();
    exact += answer.exact_tokens;
    estimated += answer.estimated_tokens;
    dropped += answer.dropped_tokens;
    for (const oracle::HeadAnswer& head : answer.heads) {
      ++lanes;
      covered += head.covered_mass;
      exact_mass += head.exact_mass;
      error += head.predicted_error;
      error_max = std::max(error_max, head.predicted_error);
      kv_head_errors[kv_head] += head.predicted_error;
    }
  }
};

// Each KV head's predictions are the oracle's, and the row's are their mean.
void CheckKvHeadErrors(const RowStats& stats, const ExpectedStats& expected, bool wanted) {
  if (!wanted || !stats.predicted_error_mean.has_value()) {
    EXPECT_TRUE(stats.kv_head_errors.empty());
    return;
  }
  const size_t kv_heads = expected.kv_head_errors.size();
  ASSERT_EQ(stats.kv_head_errors.size(), kv_heads);
  double sum = 0;
  for (size_t h = 0; h < kv_heads; ++h) {
    const double mean = expected.kv_head_errors[h] * static_cast<double>(kv_heads) /
                        static_cast<double>(expected.lanes);
    EXPECT_NEAR(stats.kv_head_errors[h], mean, ErrorTolerance(mean)) << "KV head " << h;
    sum += stats.kv_head_errors[h];
  }
  EXPECT_FLOAT_EQ(static_cast<float>(sum / static_cast<double>(kv_heads)),
                  *stats.predicted_error_mean);
}

void CheckStats(const RowStats& stats, const ExpectedStats& expected,
                const oracle::Policy& policy) {
  EXPECT_EQ(stats.zone_tokens, expected.zone);
  EXPECT_EQ(stats.exact_tokens, expected.exact);
  EXPECT_EQ(stats.estimated_tokens, expected.estimated);
  EXPECT_EQ(stats.dropped_tokens, expected.dropped);
  EXPECT_EQ(stats.host_tokens, expected.zone + expected.exact);
  const auto lanes = static_cast<double>(expected.lanes);
  const bool middle_seen = policy.preset != oracle::Preset::kStreaming;
  ASSERT_EQ(stats.covered_mass.has_value(), middle_seen);
  ASSERT_EQ(stats.exact_mass.has_value(), middle_seen);
  if (middle_seen) {
    EXPECT_NEAR(*stats.covered_mass, expected.covered / lanes, kMassTolerance);
    EXPECT_NEAR(*stats.exact_mass, expected.exact_mass / lanes, kMassTolerance);
  }
  if (!LooksAtClusters(policy)) return;
  const bool predicts =
      expected.dropped == 0 &&
      (expected.estimated == 0 || policy.mass == oracle::MassEstimate::kSecondOrder);
  ASSERT_EQ(stats.predicted_error_mean.has_value(), predicts);
  ASSERT_EQ(stats.predicted_error_max.has_value(), predicts);
  if (!predicts) return;
  const double mean = expected.error / lanes;
  EXPECT_NEAR(*stats.predicted_error_mean, mean, ErrorTolerance(mean));
  EXPECT_NEAR(*stats.predicted_error_max, expected.error_max, ErrorTolerance(expected.error_max));
}

// A selection with no cluster that has to be exact.
oracle::Selection Relaxed(oracle::Selection selection) {
  std::fill(selection.must_exact.begin(), selection.must_exact.end(), false);
  return selection;
}

// What the policy's definition says of one (query token, KV head), over clusters of either kind.
// The first order knows nothing of a regression.
class Judge {
 public:
  // given: the backend's plan; null where it makes none.
  Judge(const TestRow& row, uint32_t layer, uint32_t token, uint32_t kv_head, const Plan* given)
      : input_(MakeInput(row, layer, token, kv_head)),
        policy_(OraclePolicy(row.policy, layer)),
        quantile_(row.policy.quantile) {
    if (given != nullptr) plan_ = NumberedPlan(*given, input_);
    if (!row.sequence->view->indexes.has_regression()) return;
    if (policy_.mass != oracle::MassEstimate::kSecondOrder || !LooksAtClusters(policy_)) return;
    regression_ = MakeRegressionInput(row, layer, kv_head);
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
    plan_ = tree_->plan;
  }

  const oracle::PolicyInput& input() const { return input_; }
  // The backend's plan, numbered as the oracle does.
  const oracle::Plan& plan() const { return plan_; }
  // What is wrong with the groups that were opened.
  std::string WrongOpening() const { return tree_.has_value() ? tree_->wrong : ""; }
  // What is wrong with the plan; empty if nothing is. missed: clusters may be estimated for want of
  // their pages.
  std::string WrongPlan(bool missed) const {
    if (regression_.has_value() && quantile_ > 0 && std::isfinite(policy_.tolerance)) {
      return WrongQuantilePlan();
    }
    const oracle::Selection selection = Select();
    return oracle::CheckPlan(missed ? Relaxed(selection) : selection, plan_);
  }

  oracle::Selection Select() const {
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

  oracle::Answer Answer(const oracle::Plan& plan) const {
    if (!regression_.has_value()) return oracle::Evaluate(input_, policy_.mass, plan);
    oracle::Answer answer;
    std::vector<const oracle::Cluster*> clusters;
    for (const auto& segment : input_.segments) {
      for (const oracle::Cluster& cluster : segment) clusters.push_back(&cluster);
    }
    size_t tokens = 0;
    for (const oracle::Cluster* cluster : clusters) tokens += cluster->keys.size();
    for (const size_t i : plan.exact) answer.exact_tokens += clusters[i]->keys.size();
    for (const size_t i : plan.estimated) answer.estimated_tokens += clusters[i]->keys.size();
    answer.dropped_tokens = tokens - answer.exact_tokens - answer.estimated_tokens;
    for (size_t h = 0; h < input_.queries.size(); ++h) {
      answer.heads.push_back(HeadAnswer(h, plan, clusters));
    }
    return answer;
  }

 private:
  // A tolerance for a share of rows: the plan is that of the first try with which every head
  // expects to be within it; of three, each with half the tolerance. Where none does, all is read.
  std::string WrongQuantilePlan() const {
    constexpr double kClose = 1e-3;
    const double within = policy_.tolerance / ErrorFactor(quantile_);
    const size_t count = oracle::ClusterCount(*regression_);
    const std::vector<bool> candidates =
        tree_.has_value() ? tree_->candidates : std::vector<bool>(count, true);
    const size_t floor =
        tree_.has_value() ? tree_->floor_count : oracle::FractionCount(policy_.floor, count);
    const auto greatest = [&](const oracle::Plan& plan) {
      double error = 0;
      for (size_t h = 0; h < zones_.size(); ++h) {
        error = std::max(error, oracle::ExpectedError(*regression_, input_.queries[h], zones_[h],
                                                      plan.estimated));
      }
      return error;
    };
    // Of a tree that was opened whole it is not known which groups each try had opened.
    if (tree_.has_value() && plan_.estimated.empty()) return "";
    std::string wrong;
    for (const double share : {1.0, 0.5, 0.25}) {
      const oracle::Selection selection =
          oracle::SelectForHeads(*regression_, input_.queries, zones_, share * within, floor,
                                 candidates)
              .selection;
      wrong = oracle::CheckPlan(selection, plan_);
      if (wrong.empty() && greatest(plan_) <= within * (1 + kClose)) return "";
      if (greatest(selection.plan) <= within * (1 - kClose)) {
        return wrong.empty() ? "is not within the tolerance" : wrong;
      }
    }
    return plan_.estimated.empty() ? "" : wrong;
  }

  // The oracle of other policies has variances by channel. Behind the key's channels every segment
  // gets channels of its own, for its axes: there queries have their coordinates, means have
  // nothing, and the segment's clusters have their variances.
  oracle::PolicyInput AlongAxes() const {
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

  oracle::HeadAnswer HeadAnswer(size_t h, const oracle::Plan& plan,
                                const std::vector<const oracle::Cluster*>& clusters) const {
    const oracle::Vector& query = input_.queries[h];
    oracle::SoftmaxState state = zones_[h];
    for (const size_t i : plan.exact) {
      for (size_t t = 0; t < clusters[i]->keys.size(); ++t) {
        state.Add(input_.scale * oracle::Dot(query, clusters[i]->keys[t]), clusters[i]->values[t]);
      }
    }
    const double exact_lse = state.Lse();
    state.Merge(oracle::Estimate(*regression_, query, plan.estimated).state);
    oracle::Indices dropped;
    for (size_t i = 0; i < clusters.size(); ++i) {
      if (std::count(plan.exact.begin(), plan.exact.end(), i) == 0 &&
          std::count(plan.estimated.begin(), plan.estimated.end(), i) == 0) {
        dropped.push_back(i);
      }
    }
    oracle::SoftmaxState all = state;
    all.Merge(oracle::Estimate(*regression_, query, dropped).state);
    oracle::HeadAnswer answer;
    answer.out = state.Out();
    answer.lse = state.Lse();
    answer.covered_mass = std::exp(state.Lse() - all.Lse());
    answer.exact_mass = std::exp(exact_lse - all.Lse());
    answer.predicted_error = oracle::PredictedError(*regression_, query, zones_[h], plan.estimated,
                                                    answer.lse, answer.out);
    return answer;
  }

  oracle::PolicyInput input_;
  oracle::Policy policy_;
  double quantile_ = 0;
  std::optional<oracle::RegressionInput> regression_;
  std::vector<oracle::SoftmaxState> zones_;  // of each head
  std::optional<OpenedTree> tree_;           // error-target's, over a tree
  oracle::Plan plan_;
};

}  // namespace

std::vector<Policy> ClusterPolicies() {
  return {
      Parse("dense"),
      Parse("streaming"),
      Parse("clusters-top-k"),
      Parse("clusters-top-k", {{"exact", "0.1"}, {"estimated", "0"}}),
      Parse("clusters-top-k",
            {{"exact", "0.3"}, {"estimated", "1"}, {"estimator", "second-order"}}),
      Parse("clusters-top-k", {{"exact", "1"}}),
      Parse("double-p"),
      Parse("double-p", {{"p1", "0.99"}, {"p2", "0.8"}, {"estimator", "second-order"}}),
      Parse("double-p", {{"p1", "1"}, {"p2", "0.5"}, {"estimator", "second-order"}}),
      Parse("double-p", {{"p1", "1"}, {"p2", "1"}}),
      Parse("error-target"),
      Parse("error-target", {{"tolerance", "0.05"}}),
      Parse("error-target", {{"tolerance", "0.01"}, {"floor", "0"}}),
      Parse("error-target", {{"tolerance", "1e-9"}}),
      Parse("error-target", {{"tolerance", "0"}}),
      Parse("error-target", {{"tolerance", "off"}, {"floor", "0.02"}}),
      Parse("error-target", {{"tolerance", "off"}, {"floor", "0"}}),
  };
}

double LseTolerance(double lse) { return kLseTolerance * std::max(1.0, std::fabs(lse) / 4); }

void ExpectClose(std::span<const float> actual, const oracle::Vector& expected, double value_size) {
  ASSERT_EQ(actual.size(), expected.size());
  double difference2 = 0;
  for (size_t c = 0; c < expected.size(); ++c) {
    difference2 += std::pow(actual[c] - expected[c], 2);
  }
  const double size = std::max(std::sqrt(oracle::SquaredNorm(expected)), value_size);
  EXPECT_LE(std::sqrt(difference2), kOutTolerance * size);
}

void CheckHeads(const RowResult& result, const TestRow& row, uint32_t token, uint32_t kv_head,
                const oracle::Answer& answer) {
  const ModelShape& shape = row.sequence->spec.shape;
  for (uint32_t h = 0; h < shape.group(); ++h) {
    const size_t slot = size_t{token} * shape.query_heads + kv_head * shape.group() + h;
    SCOPED_TRACE(testing::Message() << "query head " << kv_head * shape.group() + h);
    ExpectClose(std::span(result.out).subspan(slot * shape.value_dim, shape.value_dim),
                answer.heads[h].out,
                std::sqrt(shape.value_dim) * 0.1 * row.sequence->spec.value_scale);
    if (std::isinf(answer.heads[h].lse)) {  // nothing was read: streaming without zones
      EXPECT_EQ(result.lse[slot], answer.heads[h].lse);
    } else {
      EXPECT_NEAR(result.lse[slot], answer.heads[h].lse, LseTolerance(answer.heads[h].lse));
    }
  }
}

void CheckRow(const StepResult& step, size_t r, const TestRow& row, uint32_t layer,
              std::vector<Plan>::const_iterator* plan, const CheckOptions& options) {
  const oracle::Policy policy = OraclePolicy(row.policy, layer);
  ExpectedStats expected;
  for (uint32_t token = 0; token < row.query_tokens; ++token) {
    for (uint32_t kv_head = 0; kv_head < row.sequence->spec.shape.kv_heads; ++kv_head) {
      SCOPED_TRACE(testing::Message() << "query token " << token << ", KV head " << kv_head);
      const Plan* given = nullptr;
      if (LooksAtClusters(policy) && !row.sequence->view->segments.empty()) {
        ASSERT_NE(*plan, step.plans.end());
        given = &*(*plan)++;
        ASSERT_EQ(given->row, r);
        ASSERT_EQ(given->query_token, token);
        ASSERT_EQ(given->kv_head, kv_head);
        EXPECT_TRUE(std::is_sorted(given->exact.begin(), given->exact.end()));
        EXPECT_TRUE(std::is_sorted(given->estimated.begin(), given->estimated.end()));
        EXPECT_TRUE(std::is_sorted(given->closed.begin(), given->closed.end()));
      }
      const Judge judge(row, layer, token, kv_head, given);
      const oracle::PolicyInput& input = judge.input();
      oracle::Plan numbered = given != nullptr ? judge.plan() : judge.Select().plan;
      if (given != nullptr) {
        ASSERT_EQ(judge.WrongOpening(), "");
        ASSERT_EQ(judge.WrongPlan(options.misses), "");
      }
      const oracle::Answer answer = judge.Answer(numbered);
      CheckHeads(step.rows[r], row, token, kv_head, answer);
      expected.Add(input, kv_head, answer);
    }
  }
  CheckStats(step.rows[r].stats, expected, policy);
  CheckKvHeadErrors(step.rows[r].stats, expected, row.want_kv_head_errors);
}

void RunAndCheckRows(Backend* backend, uint32_t layer, std::span<const TestRow> rows) {
  const StepResult step = RunStep(backend, layer, rows);
  ASSERT_TRUE(step.status.ok()) << step.status;
  auto plan = step.plans.begin();
  for (size_t r = 0; r < rows.size(); ++r) {
    SCOPED_TRACE(testing::Message() << "row " << r << ": " << Describe(rows[r].policy) << ", "
                                    << rows[r].sequence->spec << ", past " << rows[r].past_tokens
                                    << ", query tokens " << rows[r].query_tokens);
    CheckRow(step, r, rows[r], layer, &plan);
    if (testing::Test::HasFatalFailure()) return;
  }
  EXPECT_EQ(plan, step.plans.end());
}

}  // namespace attnd::attention::test
