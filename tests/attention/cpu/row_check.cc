// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/cpu/row_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "tests/attention/cluster_judge.h"
#include "tests/attention/oracle_support.h"

namespace attnd::attention::test {
namespace {

// Logits reach a few tens; their float32 error, some 1e-6, is the relative error of a weight.
constexpr double kOutTolerance = 2e-5;  // relative to the output's norm, or its values' size
constexpr double kLseTolerance = 2e-5;  // up to an lse of 4; a greater one has more to round
constexpr double kMassTolerance = 2e-5;

// Of a predicted error: relative, for sums of squares of differences; and absolute, as a part of it
// is what is left when sums are taken from sums, which round.
double ErrorTolerance(double error) { return 1e-3 * error + 1e-9; }

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
        EXPECT_TRUE(std::is_sorted(given->closed_sections.begin(), given->closed_sections.end()));
      }
      const ClusterJudge judge(row, layer, token, kv_head, given);
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
