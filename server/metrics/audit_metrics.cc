// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/audit_metrics.h"

#include "attention/policy/policy.h"
#include "glog/logging.h"

namespace attnd::server {
namespace {

using Buckets = FiniteHistogram::Buckets;

// Below 0.001 all policies are as good as dense; at 1 an answer of nothing is as good.
Buckets TrueErrorBuckets() {
  return {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2};
}
Buckets RatioBuckets() { return {0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 5, 10}; }

// An error of so many times the tolerance is told in the log, with the row's name.
constexpr double kToldRatio = 2;

const char* const kSkipNames[engine::kAuditSkips] = {"exact", "paged", "gone", "queue_full",
                                                     "no_memory"};

}  // namespace

AuditMetrics::AuditMetrics(prometheus::Registry* registry) {
  const auto family = [&](const char* name, const char* help) {
    return &prometheus::BuildHistogram().Name(name).Help(help).Register(*registry);
  };
  auto* const error = family("attnd_audit_relative_error",
                             "|o - o_dense| / |o_dense| of audited rows, mean over query heads");
  auto* const error_max =
      family("attnd_audit_relative_error_max", "The same, of the query head with the greatest");
  auto* const mass = family(
      "attnd_audit_covered_mass",
      "exp(lse - lse_dense) of audited rows, at most 1 a head, mean over query heads: the share of "
      "the true softmax mass that the answer has; what a policy dropped is missing, what it "
      "estimated counts by its estimate");
  auto* const predicted =
      family("attnd_audit_predicted_ratio",
             "Predicted relative error over the true one, of audited rows of one query token");
  auto* const tolerance = family("attnd_audit_tolerance_ratio",
                                 "True relative error over the tolerance that the policy aims at");
  for (const attention::Policy& policy : attention::PresetPolicies()) {
    if (policy.selector == attention::Selector::kAll) continue;
    const prometheus::Labels labels = {{"policy", policy.preset}};
    Histograms& of = policies_[policy.preset];
    of.relative_error = {error, labels, TrueErrorBuckets(), registry};
    of.relative_error_max = {error_max, labels, TrueErrorBuckets(), registry};
    of.covered_mass = {mass, labels, MassBuckets(), registry};
    of.predicted_ratio = {predicted, labels, RatioBuckets(), registry};
    of.tolerance_ratio = {tolerance, labels, RatioBuckets(), registry};
  }
  auto* const rows = &prometheus::BuildCounter()
                          .Name("attnd_audit_rows_total")
                          .Help("Rows picked to be audited, by what became of them")
                          .Register(*registry);
  audited_ = &rows->Add({{"outcome", "audited"}});
  for (size_t i = 0; i < skipped_.size(); ++i) {
    skipped_[i] = &rows->Add({{"outcome", kSkipNames[i]}});
  }
}

void AuditMetrics::OnAudited(const engine::AuditedRow& row) {
  audited_->Increment();
  const auto found = policies_.find(row.preset);
  if (found == policies_.end()) return;
  const Histograms& of = found->second;
  of.relative_error.Observe(row.error_mean);
  of.relative_error_max.Observe(row.error_max);
  of.covered_mass.Observe(row.covered_mass);
  if (row.predicted_error.has_value() && row.error_mean > 0) {
    of.predicted_ratio.Observe(*row.predicted_error / row.error_mean);
  }
  if (!row.tolerance.has_value() || *row.tolerance <= 0) return;
  const double ratio = row.error_mean / *row.tolerance;
  of.tolerance_ratio.Observe(ratio);
  if (ratio <= kToldRatio) return;
  LOG_EVERY_T(WARNING, 60) << "an audit found an error of " << row.error_mean << " where "
                           << row.preset << " aims at " << *row.tolerance << ": sequence "
                           << row.sequence_id << ", layer " << row.layer << ", position "
                           << row.position << ", query token " << row.query_token;
}

void AuditMetrics::OnSkipped(engine::AuditSkip why) {
  skipped_[static_cast<size_t>(why)]->Increment();
}

}  // namespace attnd::server
