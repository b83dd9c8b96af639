// SPDX-License-Identifier: Apache-2.0
//
// Goal: the metrics say what happened, under the names that docs/OPERATIONS.md promises. Method:
// record known events, look at the collected families.
#include "server/metrics/metrics.h"

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>

#include "gtest/gtest.h"

namespace attnd::server {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using std::chrono::milliseconds;

// name{label="value"} -> value; a histogram by its count.
std::map<std::string, double> Values(const Metrics& metrics) {
  std::map<std::string, double> values;
  for (const MetricFamily& family : metrics.Collect()) {
    for (const ClientMetric& metric : family.metric) {
      std::string key = family.name;
      for (const auto& label : metric.label) key += "{" + label.name + "=" + label.value + "}";
      values[key] = family.type == prometheus::MetricType::Counter ? metric.counter.value
                    : family.type == prometheus::MetricType::Gauge
                        ? metric.gauge.value
                        : static_cast<double>(metric.histogram.sample_count);
    }
  }
  return values;
}

TEST(Metrics, EveryPromisedNameIsThereFromTheStart) {
  Metrics metrics;
  metrics.SetBuildInfo("1.2.3", "AVX3");
  metrics.OnRpc("Decode", absl::StatusCode::kOk);
  std::set<std::string> names;
  for (const MetricFamily& family : metrics.Collect()) names.insert(family.name);
  for (const char* const name : {"build_info",
                                 "steps_total",
                                 "rows_total",
                                 "zone_tokens_total",
                                 "exact_tokens_total",
                                 "estimated_tokens_total",
                                 "dropped_tokens_total",
                                 "tier_lookup_tokens_total",
                                 "tier_hit_tokens_total",
                                 "stage_seconds",
                                 "covered_mass",
                                 "predicted_error",
                                 "resident_bytes",
                                 "capacity_bytes",
                                 "sequences",
                                 "streams",
                                 "appended_tokens_total",
                                 "segments_built_total",
                                 "segment_build_seconds",
                                 "segment_build_failures_total",
                                 "queue_depth",
                                 "queued_calls",
                                 "memory_regions",
                                 "memory_region_bytes",
                                 "memory_twin_bytes",
                                 "memory_passes",
                                 "rejections_total",
                                 "device_bytes",
                                 "device_capacity_bytes",
                                 "pcie_bytes_total",
                                 "device_link_bytes_per_second",
                                 "device_evictions_total",
                                 "backend_fallback_steps_total",
                                 "backend_fallback_rows_total",
                                 "device_index_missing_bytes",
                                 "backend_graph_launches_total",
                                 "backend_steps_ahead_total",
                                 "backend_degraded",
                                 "gpu_time_slices",
                                 "round_trip_seconds",
                                 "round_trips_total",
                                 "ssd_bytes_total",
                                 "sealed_sequences_total",
                                 "resumed_sequences_total",
                                 "reused_tokens_total",
                                 "segments_sealed_total",
                                 "segments_loaded_total",
                                 "quarantined_files_total",
                                 "orphan_files_total",
                                 "audit_rows_total",
                                 "audit_relative_error",
                                 "audit_relative_error_max",
                                 "audit_covered_mass",
                                 "audit_predicted_ratio",
                                 "audit_tolerance_ratio",
                                 "metric_values_refused_total",
                                 "rpcs_total",
                                 "process_resident_memory_bytes"}) {
    EXPECT_EQ(names.count(std::string("attnd_") + name), 1u) << name;
  }
}

TEST(Metrics, AStepIsCounted) {
  Metrics metrics;
  engine::DecodeResult result;
  result.rows.resize(2);
  attention::RowStats& stats = result.rows[0].stats;
  stats.zone_tokens = 1;
  stats.exact_tokens = 2;
  stats.estimated_tokens = 3;
  stats.dropped_tokens = 4;
  stats.host_tokens = 3;
  stats.covered_mass = 0.9f;
  result.rows[1].status = absl::ResourceExhaustedError("memory_budget_bytes");
  metrics.OnStep(absl::StatusCode::kOk, &result);
  metrics.OnStep(absl::StatusCode::kDeadlineExceeded, nullptr);
  auto values = Values(metrics);
  EXPECT_EQ(values["attnd_steps_total{code=OK}"], 1);
  EXPECT_EQ(values["attnd_steps_total{code=DEADLINE_EXCEEDED}"], 1);
  EXPECT_EQ(values["attnd_rows_total{code=OK}"], 1);
  EXPECT_EQ(values["attnd_rows_total{code=RESOURCE_EXHAUSTED}"], 1);
  EXPECT_EQ(values["attnd_zone_tokens_total"], 1);
  EXPECT_EQ(values["attnd_exact_tokens_total"], 2);
  EXPECT_EQ(values["attnd_estimated_tokens_total"], 3);
  EXPECT_EQ(values["attnd_dropped_tokens_total"], 4);
  EXPECT_EQ(values["attnd_tier_lookup_tokens_total{tier=host}"], 3);
  EXPECT_EQ(values["attnd_tier_hit_tokens_total{tier=host}"], 3);
  EXPECT_EQ(values["attnd_covered_mass"], 1);
  EXPECT_EQ(values["attnd_predicted_error"], 0);  // absent is not zero
  EXPECT_EQ(values["attnd_stage_seconds{stage=score}"], 1);
  EXPECT_EQ(values["attnd_rejections_total{reason=memory}"], 1);
}

TEST(Metrics, EventsOfTheEngine) {
  Metrics metrics;
  metrics.OnAppended(5, true);
  metrics.OnAppended(2, false);
  metrics.OnSegmentBuilt(engine::EventListener::BuildTrigger::kBackground, 8192, milliseconds(3));
  for (int i = 0; i < 2; ++i) {
    metrics.OnSegmentBuilt(engine::EventListener::BuildTrigger::kEarly, 1024, milliseconds(1));
  }
  metrics.OnSegmentBuildFailed(engine::EventListener::BuildTrigger::kPrefill,
                               absl::ResourceExhaustedError("x"));
  metrics.OnLeaseEnded(17, std::chrono::seconds(600));
  auto values = Values(metrics);
  EXPECT_EQ(values["attnd_appended_tokens_total{path=prefill}"], 5);
  EXPECT_EQ(values["attnd_appended_tokens_total{path=decode}"], 2);
  EXPECT_EQ(values["attnd_segments_built_total{trigger=background}"], 1);
  EXPECT_EQ(values["attnd_segments_built_total{trigger=prefill}"], 0);
  EXPECT_EQ(values["attnd_segments_built_total{trigger=early}"], 2);
  EXPECT_EQ(values["attnd_segment_build_seconds"], 3);
  EXPECT_EQ(values["attnd_segment_build_failures_total"], 1);
  EXPECT_EQ(values["attnd_leases_ended_total"], 1);
}

TEST(Metrics, AuditsAreToldByPolicy) {
  Metrics metrics;
  engine::AuditedRow row;
  row.preset = "error-target";
  row.error_mean = 0.1;
  row.error_max = 0.3;
  row.covered_mass = 0.97;
  row.predicted_error = 0.05;
  row.tolerance = 0.2;
  metrics.OnAudited(row);
  row.preset = "streaming";
  row.predicted_error.reset();
  row.tolerance.reset();
  metrics.OnAudited(row);
  row.preset = "what a client invents";
  metrics.OnAudited(row);
  metrics.OnAuditSkipped(engine::AuditSkip::kExact);
  metrics.OnAuditSkipped(engine::AuditSkip::kPaged);
  metrics.OnAuditSkipped(engine::AuditSkip::kGone);
  metrics.OnAuditSkipped(engine::AuditSkip::kQueueFull);
  metrics.OnAuditSkipped(engine::AuditSkip::kNoMemory);
  auto values = Values(metrics);
  EXPECT_EQ(values["attnd_audit_rows_total{outcome=audited}"], 3);
  for (const char* const outcome : {"exact", "paged", "gone", "queue_full", "no_memory"}) {
    EXPECT_EQ(values[std::string("attnd_audit_rows_total{outcome=") + outcome + "}"], 1) << outcome;
  }
  for (const char* const name : {"relative_error", "relative_error_max", "covered_mass"}) {
    const std::string family = std::string("attnd_audit_") + name;
    EXPECT_EQ(values[family + "{policy=error-target}"], 1) << name;
    EXPECT_EQ(values[family + "{policy=streaming}"], 1) << name;
    EXPECT_EQ(values[family + "{policy=double-p}"], 0) << name;
    EXPECT_EQ(values.count(family + "{policy=what a client invents}"), 0u) << name;
  }
  for (const char* const name : {"predicted_ratio", "tolerance_ratio"}) {
    const std::string family = std::string("attnd_audit_") + name;
    EXPECT_EQ(values[family + "{policy=error-target}"], 1) << name;
    EXPECT_EQ(values[family + "{policy=streaming}"], 0) << name;
  }
}

TEST(Metrics, AuditsAreToldWithTheirValues) {
  Metrics metrics;
  engine::AuditedRow row;
  row.preset = "error-target";
  row.error_mean = 0.1;
  row.error_max = 0.3;
  row.covered_mass = 0.97;
  row.predicted_error = 0.05;
  row.tolerance = 0.2;
  metrics.OnAudited(row);
  std::map<std::string, double> sums;
  for (const MetricFamily& family : metrics.Collect()) {
    for (const ClientMetric& metric : family.metric) {
      if (family.type == prometheus::MetricType::Histogram) {
        sums[family.name] += metric.histogram.sample_sum;
      }
    }
  }
  EXPECT_DOUBLE_EQ(sums["attnd_audit_relative_error"], 0.1);
  EXPECT_DOUBLE_EQ(sums["attnd_audit_relative_error_max"], 0.3);
  EXPECT_DOUBLE_EQ(sums["attnd_audit_covered_mass"], 0.97);
  EXPECT_DOUBLE_EQ(sums["attnd_audit_predicted_ratio"], 0.5);
  EXPECT_DOUBLE_EQ(sums["attnd_audit_tolerance_ratio"], 0.5);
}

// A histogram's sum would never be a number again.
TEST(Metrics, WhatIsNoNumberIsCountedAndNotTaken) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Metrics metrics;
  engine::DecodeResult result;
  result.rows.resize(2);
  result.rows[0].stats.covered_mass = kNan;
  result.rows[0].stats.predicted_error_mean = -kInfinity;
  result.rows[1].stats.covered_mass = 0.5f;
  result.rows[1].stats.predicted_error_mean = 0.25f;
  metrics.OnStep(absl::StatusCode::kOk, &result);
  engine::AuditedRow row;
  row.preset = "error-target";
  row.error_mean = kInfinity;
  row.error_max = kNan;
  row.covered_mass = kNan;
  row.predicted_error = 1;
  row.tolerance = 0.2;
  metrics.OnAudited(row);
  row.error_mean = 1e-320;  // finite itself, its ratio is not
  metrics.OnAudited(row);
  for (const MetricFamily& family : metrics.Collect()) {
    for (const ClientMetric& metric : family.metric) {
      EXPECT_TRUE(std::isfinite(metric.counter.value)) << family.name;
      EXPECT_TRUE(std::isfinite(metric.gauge.value)) << family.name;
      EXPECT_TRUE(std::isfinite(metric.histogram.sample_sum)) << family.name;
    }
  }
  auto values = Values(metrics);
  const auto refused = [&](const std::string& name) {
    return values["attnd_metric_values_refused_total{metric=attnd_" + name + "}"];
  };
  EXPECT_EQ(refused("covered_mass"), 1);
  EXPECT_EQ(refused("predicted_error"), 1);
  EXPECT_EQ(refused("audit_relative_error"), 1);
  EXPECT_EQ(refused("audit_relative_error_max"), 2);
  EXPECT_EQ(refused("audit_covered_mass"), 2);
  EXPECT_EQ(refused("audit_predicted_ratio"), 1);
  EXPECT_EQ(refused("audit_tolerance_ratio"), 1);
  EXPECT_EQ(refused("stage_seconds"), 0);
  EXPECT_EQ(values["attnd_covered_mass"], 1);
  EXPECT_EQ(values["attnd_predicted_error"], 1);
}

TEST(Metrics, ADeviceIsATierAndHasArenas) {
  Metrics metrics;
  attention::BackendStats backend;
  backend.pages = {100, 10};
  backend.index = {200, 20};
  backend.scratch = {300, 30};
  backend.bytes_to_device = 5;
  backend.bytes_to_host = 6;
  backend.evictions = 7;
  backend.fallback_steps = 8;
  backend.fallback_rows = {1, 2, 3, 4, 5};
  backend.index_missing_bytes = 77;
  backend.graph_launches = 9;
  backend.steps_ahead = 10;
  backend.steps_told = 4;
  backend.steps_in_vain = 11;
  absl::StatusOr<attention::LinkRates> rates = absl::UnavailableError("no NVML");
  metrics.SetSources({.backend = [&] { return backend; },
                      .link_rates = [&] { return rates; },
                      .degraded = [] { return true; }});
  EXPECT_EQ(Values(metrics)["attnd_device_link_bytes_per_second{direction=to_host}"], 0);
  rates = attention::LinkRates{.to_device = 1e9, .to_host = 2e6};
  engine::DecodeResult result;
  result.rows.resize(1);
  attention::RowStats& stats = result.rows[0].stats;
  stats.zone_tokens = 9;
  stats.hbm_tokens = 7;
  stats.host_tokens = 2;
  metrics.OnStep(absl::StatusCode::kOk, &result);
  stats.stages.attend = 1000;
  metrics.OnStep(absl::StatusCode::kOk, &result);
  Values(metrics);
  backend.bytes_to_device = 50;
  backend.cache = {.lookups = 20,
                   .fetched = 4,
                   .in_place = 2,
                   .carried = 3,
                   .host_tokens = 30,
                   .fetched_bytes = 4096,
                   .bytes = 8192};
  backend.files = {.waves = 6, .runs_again = 5, .pages = 9, .disk_pages = 2, .bytes = 1024};
  auto values = Values(metrics);
  EXPECT_EQ(values["attnd_tier_lookup_tokens_total{tier=hbm}"], 18);
  EXPECT_EQ(values["attnd_tier_hit_tokens_total{tier=hbm}"], 14);
  EXPECT_EQ(values["attnd_tier_lookup_tokens_total{tier=host}"], 4);
  EXPECT_EQ(values["attnd_tier_hit_tokens_total{tier=host}"], 4);
  EXPECT_EQ(values["attnd_stage_seconds{stage=attend}"], 1) << "only where it was measured";
  EXPECT_EQ(values["attnd_device_bytes{arena=pages}"], 10);
  EXPECT_EQ(values["attnd_device_bytes{arena=index}"], 20);
  EXPECT_EQ(values["attnd_device_capacity_bytes{arena=scratch}"], 300);
  EXPECT_EQ(values["attnd_pcie_bytes_total{direction=to_device}{path=copy}"], 50);
  EXPECT_EQ(values["attnd_pcie_bytes_total{direction=to_host}{path=copy}"], 6);
  EXPECT_EQ(values["attnd_pcie_bytes_total{direction=to_device}{path=fetch}"], 4096);
  EXPECT_EQ(values["attnd_device_link_bytes_per_second{direction=to_device}"], 1e9);
  EXPECT_EQ(values["attnd_device_link_bytes_per_second{direction=to_host}"], 2e6);
  EXPECT_EQ(values["attnd_tier_lookup_pages_total{tier=hbm}"], 20);
  EXPECT_EQ(values["attnd_tier_hit_pages_total{tier=hbm}"], 11);
  EXPECT_EQ(values["attnd_device_file_pages_total{tier=host}"], 7);
  EXPECT_EQ(values["attnd_device_file_pages_total{tier=ssd}"], 2);
  EXPECT_EQ(values["attnd_device_file_runs_total{outcome=answered}"], 6);
  EXPECT_EQ(values["attnd_device_file_runs_total{outcome=again}"], 5);
  EXPECT_EQ(values["attnd_device_pages_in_place_total"], 2);
  EXPECT_EQ(values["attnd_device_missed_page_tokens_total"], 30);
  EXPECT_EQ(values["attnd_device_cache_bytes"], 8192);
  EXPECT_EQ(values["attnd_device_evictions_total"], 7);
  EXPECT_EQ(values["attnd_backend_fallback_steps_total"], 8);
  int rows = 0;
  for (const char* const reason : {"failed", "indexes", "pages", "scratch", "paged"}) {
    EXPECT_EQ(values[std::string("attnd_backend_fallback_rows_total{reason=") + reason + "}"],
              ++rows);
  }
  EXPECT_EQ(values["attnd_device_index_missing_bytes"], 77);
  EXPECT_EQ(values["attnd_backend_graph_launches_total"], 9);
  EXPECT_EQ(values["attnd_backend_steps_ahead_total{outcome=answered}"], 6);
  EXPECT_EQ(values["attnd_backend_steps_ahead_total{outcome=told}"], 4);
  EXPECT_EQ(values["attnd_backend_steps_ahead_total{outcome=in_vain}"], 11);
  EXPECT_EQ(values["attnd_backend_degraded"], 1);
  EXPECT_EQ(values["attnd_gpu_time_slices"], 0);
  metrics.SetTimeSlices(true);
  EXPECT_EQ(Values(metrics)["attnd_gpu_time_slices"], 1);
}

TEST(Metrics, RoundTripsAreCountedByWhatTheyFound) {
  Metrics metrics;
  metrics.OnRoundTrip(std::chrono::microseconds(20), false);
  for (int i = 0; i < 2; ++i) metrics.OnRoundTrip(std::chrono::milliseconds(2), true);
  for (int i = 0; i < 3; ++i) metrics.OnRoundTripFailed();
  auto values = Values(metrics);
  EXPECT_EQ(values["attnd_round_trips_total{outcome=side_by_side}"], 1);
  EXPECT_EQ(values["attnd_round_trips_total{outcome=time_slices}"], 2);
  EXPECT_EQ(values["attnd_round_trips_total{outcome=failed}"], 3);
  EXPECT_EQ(values["attnd_round_trip_seconds"], 3);
}

TEST(Metrics, TheArchivesCountersFollowIt) {
  Metrics metrics;
  engine::ArchiveStats stats;
  stats.read_bytes = 4096;
  stats.written_bytes = 8192;
  stats.quarantined_files = 1;
  metrics.SetSources({.archive = [&] { return stats; }});
  Values(metrics);
  stats.read_bytes = 12288;
  auto values = Values(metrics);
  EXPECT_EQ(values["attnd_ssd_bytes_total{direction=read}"], 12288);
  EXPECT_EQ(values["attnd_ssd_bytes_total{direction=written}"], 8192);
  EXPECT_EQ(values["attnd_quarantined_files_total"], 1);
  EXPECT_EQ(values["attnd_sealed_sequences_total"], 0);
}

TEST(Metrics, GaugesAreReadWhenAsked) {
  Metrics metrics;
  size_t streams = 3;
  metrics.SetSources({.usage =
                          [] {
                            return engine::Usage{10, 20, 30};
                          },
                      .streams = [&] { return streams; },
                      .queue_depth = [] { return size_t{7}; },
                      .queued_calls = [] { return size_t{8}; },
                      .client_memory =
                          [] {
                            return ClientMemoryUsage{
                                .regions = 1, .bytes = 2, .device_bytes = 5, .passes = 3};
                          }});
  EXPECT_EQ(Values(metrics)["attnd_streams"], 3);
  streams = 4;
  auto values = Values(metrics);
  EXPECT_EQ(values["attnd_streams"], 4);
  EXPECT_EQ(values["attnd_resident_bytes{tier=host}"], 10);
  EXPECT_EQ(values["attnd_capacity_bytes{tier=host}"], 20);
  EXPECT_EQ(values["attnd_sequences"], 30);
  EXPECT_EQ(values["attnd_queue_depth"], 7);
  EXPECT_EQ(values["attnd_queued_calls"], 8);
  EXPECT_EQ(values["attnd_memory_regions"], 1);
  EXPECT_EQ(values["attnd_memory_region_bytes"], 2);
  EXPECT_EQ(values["attnd_memory_twin_bytes"], 5);
  EXPECT_EQ(values["attnd_memory_passes"], 3);
  EXPECT_GT(values["attnd_process_resident_memory_bytes"], 1e6);
}

}  // namespace
}  // namespace attnd::server
