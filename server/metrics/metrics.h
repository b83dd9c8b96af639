// SPDX-License-Identifier: Apache-2.0
//
// Metrics: everything that attnd tells Prometheus. Names, units and labels stand in
// docs/OPERATIONS.md.
#ifndef ATTND_SERVER_METRICS_METRICS_H_
#define ATTND_SERVER_METRICS_METRICS_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "attention/backend.h"
#include "common/mutex.h"
#include "engine/event_listener.h"
#include "engine/types.h"
#include "prometheus/collectable.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "server/metrics/audit_metrics.h"
#include "server/metrics/finite_histogram.h"

namespace attnd::server {

// Why a request was refused at a limit; the label `reason`.
enum class Rejection : uint8_t {
  kQueue,         // max_queued_steps
  kStreams,       // max_streams
  kSequences,     // max_sequences
  kMemory,        // memory_budget_bytes
  kTokens,        // max_sequence_tokens
  kMessage,       // max_message_bytes
  kReplyTimeout,  // the client did not read
  kClientMemory,  // client_memory_bytes, max_memory_regions, max_memory_clients, max_memory_passes
  kShutdown,      // the server is ending
};
inline constexpr size_t kRejections = 9;

// Where a step's time went; the label `stage`. Score to merge are processor time, summed over
// threads and rows; the others are elapsed time (kFetch: what rows waited for pages from disk).
// kRpc is the step's whole time on the server less queue and engine: conversion and writing.
enum class Stage : uint8_t {
  kQueue,
  kValidate,
  kScore,
  kSelect,
  kFetch,
  kAttend,
  kMerge,
  kEngine,
  kRpc
};
inline constexpr size_t kStages = 9;

// The limit that RESOURCE_EXHAUSTED for tokens [position, position + tokens) of a sequence means:
// the engine compares the length before it asks for memory.
Rejection TokensRejection(uint64_t position, uint64_t tokens, uint64_t max_sequence_tokens);

// The rows of a step.
struct StepRows {
  std::span<const engine::DecodeRow> rows;
  uint64_t max_sequence_tokens = std::numeric_limits<uint64_t>::max();
};

// Memory that clients share with the server.
struct ClientMemoryUsage {
  uint64_t regions = 0;
  uint64_t bytes = 0;
  uint64_t device_bytes = 0;  // of the GPU's memory: twins of regions
  uint64_t passes = 0;        // under way
};

// Values that are read when Prometheus asks. Called from the exposer's threads.
struct GaugeSources {
  std::function<engine::Usage()> usage = nullptr;
  std::function<size_t()> streams = nullptr;
  std::function<size_t()> queue_depth = nullptr;
  std::function<size_t()> queued_calls = nullptr;
  std::function<attention::BackendStats()> backend = nullptr;
  std::function<absl::StatusOr<attention::LinkRates>()> link_rates = nullptr;
  std::function<bool()> degraded = nullptr;
  std::function<engine::ArchiveStats()> archive = nullptr;
  std::function<ClientMemoryUsage()> client_memory = nullptr;
};

// Owns its registry: nothing global. Pointers to every metric of the hot path are kept, so that
// recording costs no look-up.
//
// Thread-safety: all methods may be called from any thread. As prometheus::Collectable it first
// refreshes the gauges.
class Metrics final : public engine::EventListener, public prometheus::Collectable {
 public:
  Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  void SetBuildInfo(absl::string_view version, absl::string_view simd_target);
  // Whether processes on the server's GPU get time slices. Before serving.
  void SetTimeSlices(bool time_slices);
  // Before serving; what the sources use must outlive the last Collect.
  void SetSources(GaugeSources sources);

  // A Decode message was answered with `code`; `result` is null unless it is OK. `rows` are what
  // was asked: they tell which limit a row has met.
  void OnStep(absl::StatusCode code, const engine::DecodeResult* result, const StepRows& rows = {});
  void OnStage(Stage stage, std::chrono::nanoseconds time);
  void OnRejected(Rejection reason);
  // A client's stream has measured a round trip; or could not.
  void OnRoundTrip(std::chrono::nanoseconds least, bool time_slices);
  void OnRoundTripFailed();
  // A call ended. `method` is the RPC's short name.
  void OnRpc(absl::string_view method, absl::StatusCode code);

  void OnAppended(uint64_t tokens, bool prefill) override;
  void OnSegmentBuilt(BuildTrigger trigger, uint64_t tokens,
                      std::chrono::nanoseconds time) override;
  void OnSegmentBuildFailed(BuildTrigger trigger, const absl::Status& status) override;
  void OnPagesRead(uint64_t bytes, std::chrono::nanoseconds time) override;
  void OnDiskFault(const absl::Status& status) override;
  void OnAudited(const engine::AuditedRow& row) override { audit_metrics_.OnAudited(row); }
  void OnAuditSkipped(engine::AuditSkip why) override { audit_metrics_.OnSkipped(why); }
  void OnLeaseEnded(uint64_t sequence_id, std::chrono::seconds lease) override;

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  static constexpr size_t kCodes = 17;  // gRPC status codes 0..16
  using CodeCounters = std::array<prometheus::Counter*, kCodes>;

  CodeCounters AddCodes(const std::string& name, const std::string& help);
  prometheus::Counter* AddCounter(const std::string& name, const std::string& help,
                                  const prometheus::Labels& labels = {});
  prometheus::Gauge* AddGauge(const std::string& name, const std::string& help,
                              const prometheus::Labels& labels = {});
  FiniteHistogram AddHistogram(const std::string& name, const std::string& help,
                               const prometheus::Labels& labels,
                               const prometheus::Histogram::BucketBoundaries& buckets);
  void OnRow(const engine::DecodeRowResult& row, Rejection limit);
  void AddArchiveCounters();
  void AddClientMemoryMetrics();
  void AddDeviceMetrics();
  void AddPageMetrics();
  void CollectArchive(const engine::ArchiveStats& stats) const;
  void CollectBackend(const attention::BackendStats& stats) const;

  const std::shared_ptr<prometheus::Registry> registry_;
  AuditMetrics audit_metrics_;
  GaugeSources sources_;
  bool has_device_ = false;      // set with the sources
  mutable Mutex collect_mutex_;  // counters that follow the backend's are raised by one at a time

  // All constant after construction.
  CodeCounters steps_;
  CodeCounters rows_;
  prometheus::Counter* zone_tokens_;
  prometheus::Counter* exact_tokens_;
  prometheus::Counter* estimated_tokens_;
  prometheus::Counter* dropped_tokens_;
  prometheus::Counter* missed_tokens_;
  prometheus::Counter* ssd_lookup_tokens_;
  prometheus::Counter* ssd_hit_tokens_;
  prometheus::Counter* host_lookup_tokens_;
  prometheus::Counter* host_hit_tokens_;
  prometheus::Counter* hbm_lookup_tokens_;
  prometheus::Counter* hbm_hit_tokens_;
  std::array<FiniteHistogram, kStages> stages_;
  FiniteHistogram covered_mass_;
  FiniteHistogram predicted_error_;
  prometheus::Gauge* resident_bytes_;
  prometheus::Gauge* capacity_bytes_;
  prometheus::Gauge* sequences_;
  prometheus::Gauge* leased_sequences_;
  prometheus::Counter* leases_ended_;
  prometheus::Gauge* streams_;
  prometheus::Gauge* queue_depth_;
  prometheus::Gauge* queued_calls_;
  prometheus::Gauge* memory_regions_;
  prometheus::Gauge* memory_region_bytes_;
  prometheus::Gauge* memory_twin_bytes_;
  prometheus::Gauge* memory_passes_;
  prometheus::Gauge* process_bytes_;
  std::array<prometheus::Gauge*, 3> device_bytes_;           // by arena
  std::array<prometheus::Gauge*, 3> device_capacity_bytes_;  // by arena
  // Copied to the device, to the host; fetched by the device.
  std::array<prometheus::Counter*, 3> pcie_bytes_;
  std::array<prometheus::Gauge*, 2> link_rates_;  // to the device, to the host
  prometheus::Counter* device_lookup_pages_;
  prometheus::Counter* device_hit_pages_;
  prometheus::Counter* device_pages_in_place_;
  prometheus::Counter* device_missed_page_tokens_;
  std::array<prometheus::Counter*, 2> device_file_pages_;  // of the host's memory, of disk
  std::array<prometheus::Counter*, 2> device_file_runs_;   // answered, again
  prometheus::Gauge* device_cache_bytes_;
  prometheus::Counter* device_evictions_;
  prometheus::Counter* fallback_steps_;
  std::array<prometheus::Counter*, attention::kFallbacks> fallback_rows_;
  prometheus::Gauge* index_missing_bytes_;
  prometheus::Counter* graph_launches_;
  std::array<prometheus::Counter*, 3> steps_ahead_;  // answered, told, in vain
  prometheus::Gauge* time_slices_;
  FiniteHistogram round_trip_;
  std::array<prometheus::Counter*, 3> round_trips_;  // side by side, in time slices, failed
  prometheus::Gauge* degraded_;
  // Of sealed sequences on disk, each followed by its field of ArchiveStats.
  struct ArchiveCounter {
    uint64_t engine::ArchiveStats::*total;
    prometheus::Counter* counter;
  };
  std::vector<ArchiveCounter> archive_counters_;
  struct PageCounter {
    uint64_t storage::PageCacheStats::*total;
    prometheus::Counter* counter;
  };
  std::vector<PageCounter> page_counters_;
  struct PageGauge {
    uint64_t storage::PageCacheStats::*value;
    prometheus::Gauge* gauge;
  };
  std::vector<PageGauge> page_gauges_;
  FiniteHistogram page_read_seconds_;
  std::array<prometheus::Counter*, 2> appended_tokens_;  // decode, prefill
  std::array<prometheus::Counter*, 3> segments_built_;   // by BuildTrigger
  FiniteHistogram segment_build_seconds_;
  prometheus::Counter* segment_build_failures_;
  std::array<prometheus::Counter*, kRejections> rejections_;
  prometheus::Family<prometheus::Counter>* rpcs_;
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_METRICS_METRICS_H_
