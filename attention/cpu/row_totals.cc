// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/row_totals.h"

#include <algorithm>

#include "common/status.h"
#include "glog/logging.h"

namespace attnd::attention {
namespace {

// Tokens that the row's query tokens see, over its KV heads.
uint64_t TokensSeen(const StepRow& row) {
  const uint64_t tokens = row.query_tokens;
  const uint64_t of_row = row.query_only ? 0 : tokens * (tokens + 1) / 2;
  return (tokens * row.past_tokens + of_row) * row.view->shape.kv_heads;
}

}  // namespace

RowTotals::RowTotals(const StepRequest& request) : request_(request), sums_(request.rows.size()) {
  for (size_t r = 0; r < request.rows.size(); ++r) {
    const StepRow& row = request.rows[r];
    *row.stats = RowStats();
    if (row.want_kv_head_errors) sums_[r].kv_head_errors.resize(row.view->shape.kv_heads);
  }
}

void RowTotals::Fail(uint32_t row, const absl::Status& why) {
  absl::Status& fault = sums_[row].fault;
  if (!fault.ok()) return;
  fault = !why.ok() ? why : absl::UnavailableError("a page could not be read");
}

void RowTotals::Add(const UnitSpec& unit, const UnitReport& report) {
  RowStats& stats = *request_.rows[unit.row].stats;
  stats.zone_tokens += report.zone_tokens;
  stats.exact_tokens += report.exact_tokens;
  stats.estimated_tokens += report.estimated_tokens;
  stats.dropped_tokens += report.dropped_tokens;
  stats.missed_tokens += report.missed_tokens;
  stats.index_rows += report.index_rows;
  stats.clusters += report.clusters;
  CHECK_LE(report.ssd_tokens, report.zone_tokens + report.exact_tokens)
      << "tokens read from disk are tokens read";
  stats.ssd_tokens += report.ssd_tokens;
  stats.host_tokens += report.zone_tokens + report.exact_tokens - report.ssd_tokens;
  stats.stages.fetch += report.nanos.fetch;
  stats.stages.score += report.nanos.score;
  stats.stages.select += report.nanos.select;
  stats.stages.attend += report.nanos.attend;
  stats.stages.merge += report.nanos.merge;
  Sums& sums = sums_[unit.row];
  sums.covered_mass += report.covered_mass;
  sums.exact_mass += report.exact_mass;
  sums.error_sum += report.error_sum;
  if (!sums.kv_head_errors.empty()) sums.kv_head_errors[unit.kv_head] += report.error_sum;
  sums.error_max = std::max(sums.error_max, report.error_max);
  sums.missed_mass += report.missed_mass;
  sums.mass_known &= report.mass_known;
  sums.error_known &= report.error_known;
}

absl::Status RowTotals::Finish() {
  for (size_t r = 0; r < request_.rows.size(); ++r) {
    const StepRow& row = request_.rows[r];
    RowStats& stats = *row.stats;
    const Sums& sums = sums_[r];
    const uint64_t counted =
        stats.zone_tokens + stats.exact_tokens + stats.estimated_tokens + stats.dropped_tokens;
    CHECK(!sums.fault.ok() || counted == TokensSeen(row))
        << "every token that a query token sees counts once: " << counted << " of "
        << TokensSeen(row) << " in row " << r;
    if (row.fault != nullptr) *row.fault = sums.fault;
    const double lanes = double{1} * row.query_tokens * row.view->shape.query_heads;
    if (sums.mass_known) {
      stats.covered_mass = static_cast<float>(sums.covered_mass / lanes);
      stats.exact_mass = static_cast<float>(sums.exact_mass / lanes);
      if (row.policy->on_miss == OnMiss::kEstimate) {
        stats.missed_mass = static_cast<float>(sums.missed_mass / lanes);
      }
    }
    if (sums.error_known) {
      stats.predicted_error_mean = static_cast<float>(sums.error_sum / lanes);
      stats.predicted_error_max = static_cast<float>(sums.error_max);
      const double lanes_of_head = lanes / row.view->shape.kv_heads;
      for (const double sum : sums.kv_head_errors) {
        stats.kv_head_errors.push_back(static_cast<float>(sum / lanes_of_head));
      }
    }
    if (row.fault == nullptr) ATTND_RETURN_IF_ERROR(sums.fault);
  }
  return absl::OkStatus();
}

}  // namespace attnd::attention
