// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/step_totals.h"

#include <glog/logging.h>

#include <algorithm>
#include <cstring>

namespace attnd::gpu {
namespace {

using attention::Plan;
using attention::RowStats;
using attention::Segment;
using attention::StepRow;

template <typename T>
const T* At(const std::byte* results, uint64_t offset) {
  return reinterpret_cast<const T*>(results + offset);
}

// Clusters [begin, end) of segment s; fate: of `begin`.
void AddClusters(uint32_t s, uint32_t begin, uint32_t end, const uint8_t* fate, Plan* plan) {
  for (uint32_t c = begin; c < end; ++c, ++fate) {
    if (*fate == kFateExact) plan->exact.push_back({s, c});
    if (*fate == kFateEstimated) plan->estimated.push_back({s, c});
  }
}

// A tree's. leaf_fate: of the leaves of its opened groups, one after another. Returns where the
// next segment's begin.
const uint8_t* AddGroups(const attention::ClusterIndex& groups, uint32_t s,
                         const uint8_t* leaf_fate, const uint8_t* group_fate, Plan* plan) {
  for (uint32_t g = 0; g < groups.clusters; ++g) {
    if (group_fate[g] == kFateExact) {
      const uint32_t begin = groups.first_members[g], end = groups.first_members[g + 1];
      AddClusters(s, begin, end, leaf_fate, plan);
      leaf_fate += end - begin;
    } else {
      plan->closed.push_back({s, g});
    }
  }
  return leaf_fate;
}

}  // namespace

StepTotals::StepTotals(const attention::StepRequest& request)
    : request_(request), rows_(request.rows.size()) {
  for (size_t r = 0; r < rows_.size(); ++r) {
    const StepRow& row = request.rows[r];
    if (row.want_kv_head_errors) rows_[r].kv_head_errors.resize(row.view->shape.kv_heads);
  }
}

void StepTotals::AddWave(const StepWriter& writer, const std::byte* results, bool out_is_there) {
  for (const RowPart& part : writer.parts()) {
    if (!out_is_there) CopyOut(writer, part, results);
    CopyLse(writer, part, results);
    Row& totals = rows_[part.number];
    totals.query_tokens += part.tokens;
    AddZones(part, &totals);
    if (!ReadsClusters(part.ref)) continue;
    AddUnits(writer, part, results, &totals);
    AddLanes(writer, part, results, &totals);
    if (request_.plans != nullptr) AddPlans(writer, part, results);
  }
}

void StepTotals::AddUnfinishedWave(const StepWriter& writer, const std::byte* results) {
  const auto* units = At<UnitResult>(results, writer.results().unit_results);
  for (uint32_t unit = 0; unit < writer.header().units; ++unit) {
    pages_.fetched_bytes += uint64_t{units[unit].missed_pages} * writer.header().cache.page_bytes;
  }
}

void StepTotals::CopyOut(const StepWriter& writer, const RowPart& part,
                         const std::byte* results) const {
  const StepRow& row = request_.rows[part.number];
  const DType dtype = writer.shape().out_dtype;
  auto* const out =
      dtype == DType::kFp32 ? reinterpret_cast<std::byte*>(row.out) : row.final_out.to;
  const uint64_t token_bytes =
      uint64_t{writer.shape().query_heads()} * writer.shape().kernel.value_dim * DTypeBytes(dtype);
  std::memcpy(out + part.first_token * token_bytes,
              results + writer.results().out + part.ref.first_query_token * token_bytes,
              part.tokens * token_bytes);
}

void StepTotals::CopyLse(const StepWriter& writer, const RowPart& part,
                         const std::byte* results) const {
  const uint64_t heads = writer.shape().query_heads();
  std::memcpy(request_.rows[part.number].lse + part.first_token * heads,
              At<float>(results, writer.results().lse) + part.ref.first_query_token * heads,
              part.tokens * heads * sizeof(float));
}

// What is known without the device: zones, and the middle of units that look at no clusters.
void StepTotals::AddZones(const RowPart& part, Row* totals) {
  const RowDescription& row = *part.row;
  const uint64_t kv_heads = row.shape.kv_heads;
  uint64_t zone = 0;
  for (uint64_t i = part.first_token; i < part.first_token + part.tokens; ++i) {
    zone += row.history_unclustered() + row.TailLimit(i) - row.tail_begin;
  }
  totals->stats.zone_tokens += zone * kv_heads;
  totals->stats.host_tokens += part.host_unclustered * part.tokens * kv_heads;
  const uint64_t clustered = row.history_clustered;
  const uint64_t middle = clustered * part.tokens * kv_heads;
  if (ReadsClusters(part.ref)) return;
  const double lanes = double{1} * part.tokens * row.shape.query_heads();
  totals->covered_mass += lanes;
  totals->exact_mass += lanes;
  if (part.ref.kind == UnitKind::kDense) {
    totals->stats.exact_tokens += middle;
    totals->stats.host_tokens +=
        (part.host_tokens - part.host_unclustered) * part.tokens * kv_heads;
  } else if (middle > 0) {
    totals->stats.dropped_tokens += middle;
    totals->mass_known = totals->error_known = false;
  }
}

void StepTotals::AddUnits(const StepWriter& writer, const RowPart& part, const std::byte* results,
                          Row* totals) {
  const UnitResult* unit =
      At<UnitResult>(results, writer.results().unit_results) + part.ref.first_unit;
  const bool counted = writer.CountsPages(part);
  for (uint64_t i = 0; i < part.units; ++i, ++unit) {
    if (counted) {
      pages_.lookups += unit->pages;
      pages_.fetched += unit->missed_pages + unit->earlier_pages;
      pages_.fetched_bytes += uint64_t{unit->missed_pages} * writer.header().cache.page_bytes;
      pages_.in_place += unit->host_pages;
      pages_.carried += unit->carried_pages;
      pages_.host_tokens += unit->host_tokens;
      totals->stats.host_tokens += unit->host_tokens - unit->disk_tokens;
      totals->stats.ssd_tokens += unit->disk_tokens;
    } else if (part.ref.off_device != 0) {  // at most
      totals->stats.host_tokens += unit->chosen_tokens;
    }
    totals->stats.exact_tokens += unit->chosen_tokens;
    totals->stats.estimated_tokens += unit->estimated_tokens;
    totals->stats.dropped_tokens += unit->dropped_tokens;
    totals->stats.missed_tokens += unit->missed_tokens;
    const bool predicted =
        unit->dropped_tokens == 0 && (unit->estimated_tokens == 0 || part.ref.second_order != 0);
    if (!predicted) totals->error_known = false;
  }
}

void StepTotals::AddLanes(const StepWriter& writer, const RowPart& part, const std::byte* results,
                          Row* totals) {
  const uint64_t heads = writer.shape().query_heads();
  const LaneResult* lane =
      At<LaneResult>(results, writer.results().lane_results) + part.ref.first_query_token * heads;
  for (uint64_t i = 0; i < part.tokens * heads; ++i, ++lane) {
    totals->covered_mass += lane->covered_mass;
    totals->exact_mass += lane->exact_mass;
    totals->missed_mass += lane->missed_mass;
    totals->error_sum += lane->predicted_error;
    totals->error_max = std::max(totals->error_max, double{lane->predicted_error});
    if (totals->kv_head_errors.empty()) continue;
    totals->kv_head_errors[i % heads / writer.shape().group] += lane->predicted_error;
  }
}

void StepTotals::AddPlans(const StepWriter& writer, const RowPart& part, const std::byte* results) {
  const StepRow& row = request_.rows[part.number];
  const uint32_t kv_heads = writer.shape().kv_heads;
  const uint8_t* fate = At<uint8_t>(results, writer.results().fates) + part.ref.first_fate;
  for (uint32_t unit = 0; unit < part.units; ++unit) {
    Plan& plan = plans_.emplace_back();
    plan.row = part.number;
    plan.query_token = part.first_token + unit / kv_heads;
    plan.kv_head = unit % kv_heads;
    const uint8_t* own_fate = fate;
    const uint8_t* group_fate = fate + part.ref.slots;
    for (uint32_t s = 0; s < row.view->segments.size(); ++s) {
      const Segment& segment = *row.view->segments[s];
      if (part.ref.kind == UnitKind::kTree) {
        const auto groups = segment.groups(request_.layer, plan.kv_head);
        own_fate = AddGroups(groups, s, own_fate, group_fate, &plan);
        group_fate += GroupSlotsFor(segment.layout().groups.room);
      } else {
        const uint32_t clusters = segment.clusters(request_.layer, plan.kv_head).clusters;
        AddClusters(s, 0, clusters, own_fate, &plan);
        own_fate += SlotsFor(segment.layout().clusters.room);
      }
    }
    fate += FatesPerUnit(part.ref);
  }
}

void StepTotals::AddStages(const StepWriter& writer, const StageSeconds& seconds) {
  const double units = writer.header().units;
  for (const RowPart& part : writer.parts()) {
    const double share = static_cast<double>(part.units) / units;
    const auto nanos = [share](double s) { return static_cast<uint64_t>(s * share * 1e9); };
    attention::StageNanos& stages = rows_[part.number].stats.stages;
    stages.score += nanos(seconds.score);
    stages.select += nanos(seconds.select);
    stages.attend += nanos(seconds.attend);
    stages.merge += nanos(seconds.merge);
  }
}

void StepTotals::FinishRow(uint32_t number) const {
  const StepRow& row = request_.rows[number];
  const Row& totals = rows_[number];
  CHECK_EQ(totals.query_tokens, row.query_tokens) << "parts of the row are missing, or came twice";
  if (row.final_out.dtype != DType::kFp32) {
    CHECK(row.final_out.written != nullptr) << "a place for out, and nobody to tell";
    *row.final_out.written = true;
  }
  RowStats& stats = *row.stats = totals.stats;
  const uint64_t off_device = stats.host_tokens + stats.ssd_tokens;
  CHECK_LE(off_device, stats.zone_tokens + stats.exact_tokens);
  stats.hbm_tokens = stats.zone_tokens + stats.exact_tokens - off_device;
  const double lanes = double{1} * row.query_tokens * row.view->shape.query_heads;
  if (totals.mass_known) {
    stats.covered_mass = static_cast<float>(totals.covered_mass / lanes);
    stats.exact_mass = static_cast<float>(totals.exact_mass / lanes);
    if (row.policy->on_miss == attention::OnMiss::kEstimate) {
      stats.missed_mass = static_cast<float>(totals.missed_mass / lanes);
    }
  }
  if (totals.error_known) {
    stats.predicted_error_mean = static_cast<float>(totals.error_sum / lanes);
    stats.predicted_error_max = static_cast<float>(totals.error_max);
    const double lanes_of_head = lanes / row.view->shape.kv_heads;
    for (const double sum : totals.kv_head_errors) {
      stats.kv_head_errors.push_back(static_cast<float>(sum / lanes_of_head));
    }
  }
}

}  // namespace attnd::gpu
