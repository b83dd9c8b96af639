// SPDX-License-Identifier: Apache-2.0
#include "server/calls/pass_stats.h"

#include <algorithm>

#include "glog/logging.h"

namespace attnd::server {

void PassStats::Mean::Add(const std::optional<float>& value) {
  if (!value.has_value()) return;
  sum += *value;
  ++count;
}

std::optional<float> PassStats::Mean::Get() const {
  if (count == 0) return std::nullopt;
  return static_cast<float>(sum / count);
}

void PassStats::Add(const engine::DecodeResult& layer) {
  CHECK_EQ(layer.rows.size(), rows_.size());
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (layer.rows[i].status.ok()) AddLayer(layer.rows[i].stats, &rows_[i]);
  }
}

void PassStats::AddLayer(const attention::RowStats& layer, Row* row) {
  attention::RowStats& sums = row->sums;
  sums.zone_tokens += layer.zone_tokens;
  sums.exact_tokens += layer.exact_tokens;
  sums.estimated_tokens += layer.estimated_tokens;
  sums.dropped_tokens += layer.dropped_tokens;
  sums.missed_tokens += layer.missed_tokens;
  sums.host_tokens += layer.host_tokens;
  sums.ssd_tokens += layer.ssd_tokens;
  sums.hbm_tokens += layer.hbm_tokens;
  sums.index_rows += layer.index_rows;
  sums.clusters += layer.clusters;
  sums.stages.score += layer.stages.score;
  sums.stages.select += layer.stages.select;
  sums.stages.fetch += layer.stages.fetch;
  sums.stages.attend += layer.stages.attend;
  sums.stages.merge += layer.stages.merge;
  if (layer.predicted_error_max.has_value()) {
    sums.predicted_error_max =
        std::max(sums.predicted_error_max.value_or(0), *layer.predicted_error_max);
  }
  row->covered_mass.Add(layer.covered_mass);
  row->exact_mass.Add(layer.exact_mass);
  row->missed_mass.Add(layer.missed_mass);
  row->predicted_error.Add(layer.predicted_error_mean);
  row->kv_head_errors.resize(std::max(row->kv_head_errors.size(), layer.kv_head_errors.size()));
  for (size_t i = 0; i < layer.kv_head_errors.size(); ++i) {
    row->kv_head_errors[i].Add(layer.kv_head_errors[i]);
  }
}

engine::DecodeResult PassStats::Total(const engine::DecodeResult& last) const {
  CHECK_EQ(last.rows.size(), rows_.size());
  engine::DecodeResult total = last;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    attention::RowStats& stats = total.rows[i].stats;
    stats = row.sums;
    stats.covered_mass = row.covered_mass.Get();
    stats.exact_mass = row.exact_mass.Get();
    stats.missed_mass = row.missed_mass.Get();
    stats.predicted_error_mean = row.predicted_error.Get();
    for (const Mean& mean : row.kv_head_errors) {
      stats.kv_head_errors.push_back(mean.Get().value_or(0));
    }
  }
  return total;
}

}  // namespace attnd::server
