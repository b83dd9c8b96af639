// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/metrics.h"

#include <algorithm>

#include "common/process_memory.h"
#include "glog/logging.h"

namespace attnd::server {
namespace {

using Buckets = FiniteHistogram::Buckets;

const char* const kRejectionNames[kRejections] = {"queue",         "streams",       "sequences",
                                                  "memory",        "tokens",        "message",
                                                  "reply_timeout", "client_memory", "shutdown"};
const char* const kStageNames[kStages] = {"queue",  "validate", "score",  "select", "fetch",
                                          "attend", "merge",    "engine", "rpc"};

constexpr char kLookupHelp[] = "Pages looked up in a tier";
constexpr char kHitHelp[] = "Pages found in a tier";
const char* const kFallbackNames[attention::kFallbacks] = {"failed", "indexes", "pages", "scratch",
                                                           "paged"};
const char* const kArenaNames[] = {"pages", "index", "scratch"};

Buckets StageBuckets() {
  return {1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3,
          0.01, 0.02, 0.05, 0.1,  0.2,  0.5,  1,    2,    5};
}
Buckets PredictedErrorBuckets() { return {0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2}; }
Buckets BuildBuckets() { return {0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 50, 100}; }

double Seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

// Brings a counter up to a total that is counted elsewhere.
void Follow(prometheus::Counter* counter, uint64_t total) {
  const double more = static_cast<double>(total) - counter->Value();
  if (more > 0) counter->Increment(more);
}

}  // namespace

Metrics::Metrics()
    : registry_(std::make_shared<prometheus::Registry>()), audit_metrics_(registry_.get()) {
  steps_ = AddCodes("attnd_steps_total", "Decode messages answered, by gRPC status code");
  rows_ = AddCodes("attnd_rows_total", "Rows of Decode messages, by gRPC status code");
  zone_tokens_ = AddCounter("attnd_zone_tokens_total",
                            "Tokens read exactly because they are sink, window or tail");
  exact_tokens_ = AddCounter("attnd_exact_tokens_total", "Tokens of the middle read exactly");
  estimated_tokens_ = AddCounter("attnd_estimated_tokens_total",
                                 "Tokens of the middle estimated from their clusters");
  dropped_tokens_ = AddCounter("attnd_dropped_tokens_total", "Tokens of the middle left out");
  missed_tokens_ = AddCounter("attnd_missed_tokens_total",
                              "Tokens estimated because their pages were not in memory in time");
  // Families are read in this order. Steps raise look-ups first: a page of metrics that is read
  // meanwhile must not have more hits than look-ups.
  const std::string hit = "attnd_tier_hit_tokens_total";
  const std::string hit_help = "Tokens found in a tier";
  ssd_hit_tokens_ = AddCounter(hit, hit_help, {{"tier", "ssd"}});
  host_hit_tokens_ = AddCounter(hit, hit_help, {{"tier", "host"}});
  hbm_hit_tokens_ = AddCounter(hit, hit_help, {{"tier", "hbm"}});
  const std::string lookup = "attnd_tier_lookup_tokens_total";
  const std::string lookup_help = "Tokens looked up in a tier";
  ssd_lookup_tokens_ = AddCounter(lookup, lookup_help, {{"tier", "ssd"}});
  host_lookup_tokens_ = AddCounter(lookup, lookup_help, {{"tier", "host"}});
  hbm_lookup_tokens_ = AddCounter(lookup, lookup_help, {{"tier", "hbm"}});
  for (size_t i = 0; i < kStages; ++i) {
    stages_[i] = AddHistogram("attnd_stage_seconds",
                              "Time of a step's stages; score, select, attend and merge are "
                              "processor time summed over threads",
                              {{"stage", kStageNames[i]}}, StageBuckets());
  }
  covered_mass_ =
      AddHistogram("attnd_covered_mass", "Share of a row's softmax mass that was read or estimated",
                   {}, MassBuckets());
  predicted_error_ = AddHistogram("attnd_predicted_error",
                                  "Predicted relative error of a row, mean over its heads", {},
                                  PredictedErrorBuckets());
  resident_bytes_ =
      AddGauge("attnd_resident_bytes", "Bytes of the memory budget in use", {{"tier", "host"}});
  capacity_bytes_ =
      AddGauge("attnd_capacity_bytes", "Bytes that a tier may hold", {{"tier", "host"}});
  sequences_ = AddGauge("attnd_sequences", "Open sequences");
  leased_sequences_ = AddGauge("attnd_leased_sequences", "Open sequences that have a lease");
  leases_ended_ = AddCounter("attnd_leases_ended_total",
                             "Sequences closed because no call named them for their lease");
  streams_ = AddGauge("attnd_streams", "Open Decode and AppendKv streams");
  queue_depth_ = AddGauge("attnd_queue_depth", "Steps that wait for a worker");
  queued_calls_ = AddGauge("attnd_queued_calls", "Unary calls that wait for a worker");
  process_bytes_ =
      AddGauge("attnd_process_resident_memory_bytes", "Resident memory of the process");
  AddClientMemoryMetrics();
  AddDeviceMetrics();
  AddArchiveCounters();
  AddPageMetrics();
  const std::string appended = "attnd_appended_tokens_total";
  const std::string appended_help = "Tokens appended to a layer of a sequence";
  appended_tokens_ = {AddCounter(appended, appended_help, {{"path", "decode"}}),
                      AddCounter(appended, appended_help, {{"path", "prefill"}})};
  const std::string built = "attnd_segments_built_total";
  const std::string built_help = "Segments built";
  segments_built_ = {AddCounter(built, built_help, {{"trigger", "prefill"}}),
                     AddCounter(built, built_help, {{"trigger", "background"}}),
                     AddCounter(built, built_help, {{"trigger", "early"}})};
  segment_build_seconds_ =
      AddHistogram("attnd_segment_build_seconds", "Time to build one segment", {}, BuildBuckets());
  segment_build_failures_ =
      AddCounter("attnd_segment_build_failures_total", "Segments that could not be built");
  for (size_t i = 0; i < kRejections; ++i) {
    rejections_[i] = AddCounter("attnd_rejections_total", "Requests refused at a limit",
                                {{"reason", kRejectionNames[i]}});
  }
  rpcs_ = &prometheus::BuildCounter()
               .Name("attnd_rpcs_total")
               .Help("Calls that ended, by method and gRPC status code")
               .Register(*registry_);
}

void Metrics::AddClientMemoryMetrics() {
  memory_regions_ =
      AddGauge("attnd_memory_regions", "Regions of memory that clients share with the server");
  memory_region_bytes_ = AddGauge("attnd_memory_region_bytes", "Bytes of these regions");
  memory_twin_bytes_ =
      AddGauge("attnd_memory_twin_bytes", "Bytes of GPU memory that clients share with the server");
  memory_passes_ = AddGauge("attnd_memory_passes", "Passes over such memory under way");
}

void Metrics::AddDeviceMetrics() {
  for (size_t i = 0; i < device_bytes_.size(); ++i) {
    device_bytes_[i] = AddGauge("attnd_device_bytes", "Bytes of GPU memory in use, by arena",
                                {{"arena", kArenaNames[i]}});
    device_capacity_bytes_[i] =
        AddGauge("attnd_device_capacity_bytes", "Bytes of GPU memory that an arena has",
                 {{"arena", kArenaNames[i]}});
  }
  const std::string pcie = "attnd_pcie_bytes_total";
  const std::string pcie_help = "Bytes moved between host and GPU";
  pcie_bytes_ = {AddCounter(pcie, pcie_help, {{"direction", "to_device"}, {"path", "copy"}}),
                 AddCounter(pcie, pcie_help, {{"direction", "to_host"}, {"path", "copy"}}),
                 AddCounter(pcie, pcie_help, {{"direction", "to_device"}, {"path", "fetch"}})};
  const std::string link = "attnd_device_link_bytes_per_second";
  const std::string link_help =
      "What the GPU's PCIe link carries, of all processes, as NVML measures it; 0 where it cannot";
  link_rates_ = {AddGauge(link, link_help, {{"direction", "to_device"}}),
                 AddGauge(link, link_help, {{"direction", "to_host"}})};
  // Hits come first on the page: who reads them before look-ups never sees more hits than these.
  device_hit_pages_ = AddCounter("attnd_tier_hit_pages_total", kHitHelp, {{"tier", "hbm"}});
  device_lookup_pages_ =
      AddCounter("attnd_tier_lookup_pages_total", kLookupHelp, {{"tier", "hbm"}});
  device_pages_in_place_ =
      AddCounter("attnd_device_pages_in_place_total",
                 "Pages without room in the GPU's cache, read where they lie in host memory");
  device_missed_page_tokens_ =
      AddCounter("attnd_device_missed_page_tokens_total",
                 "Chosen tokens, of a KV head, of pages that the GPU's cache did not have");
  const std::string file_pages = "attnd_device_file_pages_total";
  const std::string file_pages_help =
      "Pages of files that the host handed to steps on the GPU, by where it had them";
  device_file_pages_ = {AddCounter(file_pages, file_pages_help, {{"tier", "host"}}),
                        AddCounter(file_pages, file_pages_help, {{"tier", "ssd"}})};
  const std::string file_runs = "attnd_device_file_runs_total";
  const std::string file_runs_help =
      "Runs of steps' parts over files on the GPU: answered, or to run again with more pages";
  device_file_runs_ = {AddCounter(file_runs, file_runs_help, {{"outcome", "answered"}}),
                       AddCounter(file_runs, file_runs_help, {{"outcome", "again"}})};
  device_cache_bytes_ = AddGauge("attnd_device_cache_bytes",
                                 "Bytes of GPU memory that are a cache of pages; 0: all fit");
  device_evictions_ = AddCounter("attnd_device_evictions_total",
                                 "Copies of segments and tail blocks given up to make room");
  fallback_steps_ = AddCounter("attnd_backend_fallback_steps_total",
                               "Steps with a row that the CPU answered in the GPU's place");
  for (size_t i = 0; i < fallback_rows_.size(); ++i) {
    fallback_rows_[i] = AddCounter("attnd_backend_fallback_rows_total",
                                   "Rows that the CPU answered in the GPU's place, by why",
                                   {{"reason", kFallbackNames[i]}});
  }
  index_missing_bytes_ =
      AddGauge("attnd_device_index_missing_bytes",
               "Bytes of GPU memory that the indexes of one sequence lack at most; 0: all fit");
  graph_launches_ = AddCounter("attnd_backend_graph_launches_total",
                               "Launches of a step, or of a part of one, from a CUDA graph");
  const std::string ahead = "attnd_backend_steps_ahead_total";
  const std::string ahead_help = "Steps launched before their queries were there, by what came";
  steps_ahead_ = {AddCounter(ahead, ahead_help, {{"outcome", "answered"}}),
                  AddCounter(ahead, ahead_help, {{"outcome", "told"}}),
                  AddCounter(ahead, ahead_help, {{"outcome", "in_vain"}})};
  time_slices_ = AddGauge("attnd_gpu_time_slices",
                          "1 if processes on the GPU get time slices, as the server does not run "
                          "under MPS; 0: under MPS, or no GPU");
  round_trip_ = AddHistogram("attnd_round_trip_seconds",
                             "An empty kernel of the server while a client's stream waited for it, "
                             "from launch to end; the least of a measurement's turns",
                             {}, StageBuckets());
  const std::string trips = "attnd_round_trips_total";
  const std::string trips_help = "Round trips that clients' streams measured, by what they found";
  round_trips_ = {AddCounter(trips, trips_help, {{"outcome", "side_by_side"}}),
                  AddCounter(trips, trips_help, {{"outcome", "time_slices"}}),
                  AddCounter(trips, trips_help, {{"outcome", "failed"}})};
  degraded_ = AddGauge("attnd_backend_degraded", "1 if the CPU answers because the GPU has failed");
}

void Metrics::SetBuildInfo(absl::string_view version, absl::string_view simd_target) {
  AddGauge("attnd_build_info", "1; the labels say what runs",
           {{"version", std::string(version)}, {"simd_target", std::string(simd_target)}})
      ->Set(1);
}

void Metrics::SetTimeSlices(bool time_slices) { time_slices_->Set(time_slices ? 1 : 0); }

Rejection TokensRejection(uint64_t position, uint64_t tokens, uint64_t max_sequence_tokens) {
  const bool fits = position <= max_sequence_tokens && tokens <= max_sequence_tokens - position;
  return fits ? Rejection::kMemory : Rejection::kTokens;
}

void Metrics::OnStep(absl::StatusCode code, const engine::DecodeResult* result,
                     const StepRows& rows) {
  steps_[static_cast<size_t>(code) % kCodes]->Increment();
  if (result == nullptr) return;
  attention::StageNanos total;
  for (size_t i = 0; i < result->rows.size(); ++i) {
    const engine::DecodeRowResult& row = result->rows[i];
    if (row.told_before) continue;  // counted when it left its pass
    OnRow(row, i < rows.rows.size() && !rows.rows[i].query_only
                   ? TokensRejection(rows.rows[i].position, rows.rows[i].query_tokens,
                                     rows.max_sequence_tokens)
                   : Rejection::kMemory);
    total.score += row.stats.stages.score;
    total.select += row.stats.stages.select;
    total.fetch = std::max(total.fetch, row.stats.stages.fetch);  // rows wait together
    total.attend += row.stats.stages.attend;
    total.merge += row.stats.stages.merge;
  }
  OnStage(Stage::kValidate, result->validate_time);
  // A device's time is measured in some steps only.
  if (has_device_ && total.score + total.select + total.attend + total.merge == 0) return;
  OnStage(Stage::kScore, std::chrono::nanoseconds(total.score));
  OnStage(Stage::kSelect, std::chrono::nanoseconds(total.select));
  if (total.fetch > 0) OnStage(Stage::kFetch, std::chrono::nanoseconds(total.fetch));
  OnStage(Stage::kAttend, std::chrono::nanoseconds(total.attend));
  OnStage(Stage::kMerge, std::chrono::nanoseconds(total.merge));
}

void Metrics::OnRow(const engine::DecodeRowResult& row, Rejection limit) {
  rows_[static_cast<size_t>(row.status.code()) % kCodes]->Increment();
  if (!row.status.ok()) {
    if (absl::IsResourceExhausted(row.status)) OnRejected(limit);
    return;
  }
  const attention::RowStats& stats = row.stats;
  zone_tokens_->Increment(static_cast<double>(stats.zone_tokens));
  exact_tokens_->Increment(static_cast<double>(stats.exact_tokens));
  estimated_tokens_->Increment(static_cast<double>(stats.estimated_tokens));
  dropped_tokens_->Increment(static_cast<double>(stats.dropped_tokens));
  // What the device does not have is looked for in host memory.
  const uint64_t read = stats.zone_tokens + stats.exact_tokens;
  if (has_device_) hbm_lookup_tokens_->Increment(static_cast<double>(read));
  hbm_hit_tokens_->Increment(static_cast<double>(stats.hbm_tokens));
  host_lookup_tokens_->Increment(static_cast<double>(read - stats.hbm_tokens));
  host_hit_tokens_->Increment(static_cast<double>(stats.host_tokens));
  ssd_lookup_tokens_->Increment(static_cast<double>(stats.ssd_tokens + stats.missed_tokens));
  ssd_hit_tokens_->Increment(static_cast<double>(stats.ssd_tokens));
  missed_tokens_->Increment(static_cast<double>(stats.missed_tokens));
  if (stats.covered_mass) covered_mass_.Observe(*stats.covered_mass);
  if (stats.predicted_error_mean) predicted_error_.Observe(*stats.predicted_error_mean);
}

void Metrics::OnStage(Stage stage, std::chrono::nanoseconds time) {
  stages_[static_cast<size_t>(stage)].Observe(Seconds(time));
}

void Metrics::OnRejected(Rejection reason) {
  rejections_[static_cast<size_t>(reason)]->Increment();
}

void Metrics::OnRoundTrip(std::chrono::nanoseconds least, bool time_slices) {
  round_trip_.Observe(Seconds(least));
  round_trips_[time_slices ? 1 : 0]->Increment();
}

void Metrics::OnRoundTripFailed() { round_trips_[2]->Increment(); }

void Metrics::OnRpc(absl::string_view method, absl::StatusCode code) {
  rpcs_->Add({{"method", std::string(method)}, {"code", absl::StatusCodeToString(code)}})
      .Increment();
}

void Metrics::OnAppended(uint64_t tokens, bool prefill) {
  appended_tokens_[prefill ? 1 : 0]->Increment(static_cast<double>(tokens));
}

void Metrics::OnSegmentBuilt(BuildTrigger trigger, uint64_t, std::chrono::nanoseconds time) {
  segments_built_[static_cast<size_t>(trigger)]->Increment();
  segment_build_seconds_.Observe(Seconds(time));
}

void Metrics::OnSegmentBuildFailed(BuildTrigger trigger, const absl::Status& status) {
  segment_build_failures_->Increment();
  LOG_EVERY_T(WARNING, 1) << "a segment of "
                          << (trigger == BuildTrigger::kPrefill ? "a prompt" : "generated tokens")
                          << " could not be built: " << status;
}

void Metrics::OnDiskFault(const absl::Status& status) {
  LOG_EVERY_T(WARNING, 1) << "a call or row was refused for a fault of the disk: " << status;
}

void Metrics::OnLeaseEnded(uint64_t sequence_id, std::chrono::seconds lease) {
  leases_ended_->Increment();
  LOG_EVERY_T(INFO, 1) << "sequence " << sequence_id
                       << " was closed: no call named it for its lease, " << lease.count() << " s";
}

void Metrics::SetSources(GaugeSources sources) {
  sources_ = std::move(sources);
  has_device_ = sources_.backend && sources_.backend().pages.capacity_bytes > 0;
}

void Metrics::CollectBackend(const attention::BackendStats& stats) const {
  const attention::BackendStats::Arena arenas[] = {stats.pages, stats.index, stats.scratch};
  for (size_t i = 0; i < device_bytes_.size(); ++i) {
    device_bytes_[i]->Set(static_cast<double>(arenas[i].used_bytes));
    device_capacity_bytes_[i]->Set(static_cast<double>(arenas[i].capacity_bytes));
  }
  MutexLock lock(collect_mutex_);
  Follow(pcie_bytes_[0], stats.bytes_to_device);
  Follow(pcie_bytes_[1], stats.bytes_to_host);
  Follow(pcie_bytes_[2], stats.cache.fetched_bytes);
  Follow(device_lookup_pages_, stats.cache.lookups);
  Follow(device_hit_pages_,
         stats.cache.lookups - stats.cache.fetched - stats.cache.in_place - stats.cache.carried);
  Follow(device_pages_in_place_, stats.cache.in_place);
  Follow(device_missed_page_tokens_, stats.cache.host_tokens);
  Follow(device_file_pages_[0], stats.files.pages - stats.files.disk_pages);
  Follow(device_file_pages_[1], stats.files.disk_pages);
  Follow(device_file_runs_[0], stats.files.waves);
  Follow(device_file_runs_[1], stats.files.runs_again);
  device_cache_bytes_->Set(static_cast<double>(stats.cache.bytes));
  Follow(device_evictions_, stats.evictions);
  Follow(fallback_steps_, stats.fallback_steps);
  for (size_t i = 0; i < fallback_rows_.size(); ++i) {
    Follow(fallback_rows_[i], stats.fallback_rows[i]);
  }
  index_missing_bytes_->Set(static_cast<double>(stats.index_missing_bytes));
  Follow(graph_launches_, stats.graph_launches);
  Follow(steps_ahead_[0], stats.steps_ahead - stats.steps_told);
  Follow(steps_ahead_[1], stats.steps_told);
  Follow(steps_ahead_[2], stats.steps_in_vain);
}

void Metrics::AddArchiveCounters() {
  using engine::ArchiveStats;
  const auto add = [this](uint64_t ArchiveStats::*total, const char* name, const char* help,
                          const std::map<std::string, std::string>& labels = {}) {
    archive_counters_.push_back({total, AddCounter(name, help, labels)});
  };
  const char* const ssd = "attnd_ssd_bytes_total";
  const char* const ssd_help = "Bytes of segment files read and written";
  add(&ArchiveStats::read_bytes, ssd, ssd_help, {{"direction", "read"}});
  add(&ArchiveStats::written_bytes, ssd, ssd_help, {{"direction", "written"}});
  add(&ArchiveStats::sealed_sequences, "attnd_sealed_sequences_total", "Sequences sealed");
  add(&ArchiveStats::resumed_sequences, "attnd_resumed_sequences_total",
      "Sequences opened with what was sealed");
  add(&ArchiveStats::reused_tokens, "attnd_reused_tokens_total",
      "Tokens of prompts that were known, on disk or of another sequence, and need no upload");
  add(&ArchiveStats::written_segments, "attnd_segments_sealed_total", "Segments written to disk");
  add(&ArchiveStats::loaded_segments, "attnd_segments_loaded_total", "Segments read from disk");
  add(&ArchiveStats::paged_out_segments, "attnd_segments_paged_out_total",
      "Segments moved to disk to make room");
  add(&ArchiveStats::paged_in_segments, "attnd_segments_paged_in_total",
      "Segments moved back from disk, as memory has room again");
  add(&ArchiveStats::failed_page_outs, "attnd_page_out_failures_total",
      "Segments that could not be moved to disk");
  add(&ArchiveStats::retired_sequences, "attnd_sealed_sequences_retired_total",
      "Sealed sequences dropped by the limits of retention");
  add(&ArchiveStats::quarantined_files, "attnd_quarantined_files_total",
      "Files found damaged and put out of the way");
  add(&ArchiveStats::orphan_files, "attnd_orphan_files_total",
      "Files that no record named at the start, as a crash leaves them, moved aside");
}

void Metrics::AddPageMetrics() {
  using storage::PageCacheStats;
  const auto count = [this](uint64_t PageCacheStats::*total, const char* name, const char* help,
                            const prometheus::Labels& labels = {}) {
    page_counters_.push_back({total, AddCounter(name, help, labels)});
  };
  // Read first and raised last, as those of tokens.
  const std::string hit = "attnd_tier_hit_pages_total";
  AddCounter(hit, kHitHelp, {{"tier", "host"}});
  count(&PageCacheStats::lookups, "attnd_tier_lookup_pages_total", kLookupHelp, {{"tier", "host"}});
  count(&PageCacheStats::hits, hit.c_str(), kHitHelp, {{"tier", "host"}});
  count(&PageCacheStats::late, "attnd_pages_late_total",
        "Pages that were being read already when a step asked for them");
  count(&PageCacheStats::read_pages, "attnd_pages_read_total", "Pages read from disk");
  count(&PageCacheStats::failed_reads, "attnd_page_read_failures_total",
        "Reads of pages that failed");
  const char* const prefetched = "attnd_prefetched_pages_total";
  const char* const help = "Pages that were to be read ahead, by what became of them";
  count(&PageCacheStats::prefetched_pages, prefetched, help, {{"outcome", "issued"}});
  count(&PageCacheStats::prefetched_used, prefetched, help, {{"outcome", "used"}});
  count(&PageCacheStats::prefetched_wasted, prefetched, help, {{"outcome", "wasted"}});
  count(&PageCacheStats::prefetches_refused, prefetched, help, {{"outcome", "refused"}});
  count(&PageCacheStats::evictions, "attnd_page_evictions_total",
        "Pages given up to make room for others");
  const auto gauge = [this](uint64_t PageCacheStats::*value, const char* state) {
    page_gauges_.push_back({value, AddGauge("attnd_page_memory_bytes",
                                            "Memory for pages of segments on disk: taken, holding "
                                            "pages, pinned by steps",
                                            {{"state", state}})});
  };
  gauge(&PageCacheStats::slab_bytes, "taken");
  gauge(&PageCacheStats::resident_bytes, "resident");
  gauge(&PageCacheStats::pinned_bytes, "pinned");
  page_gauges_.push_back(
      {&PageCacheStats::waiting_pages,
       AddGauge("attnd_pages_waiting", "Pages that steps wait for and no reader has begun")});
  page_read_seconds_ = AddHistogram("attnd_page_read_seconds",
                                    "Time from asking for pages to having read them, up to 64 "
                                    "pages at a time",
                                    {}, StageBuckets());
}

void Metrics::OnPagesRead(uint64_t, std::chrono::nanoseconds time) {
  page_read_seconds_.Observe(Seconds(time));
}

void Metrics::CollectArchive(const engine::ArchiveStats& stats) const {
  for (const auto& [value, gauge] : page_gauges_) {
    gauge->Set(static_cast<double>(stats.pages.*value));
  }
  MutexLock lock(collect_mutex_);
  for (const auto& [total, counter] : page_counters_) Follow(counter, stats.pages.*total);
  for (const auto& [total, counter] : archive_counters_) Follow(counter, stats.*total);
}

std::vector<prometheus::MetricFamily> Metrics::Collect() const {
  if (sources_.usage) {
    const engine::Usage usage = sources_.usage();
    resident_bytes_->Set(static_cast<double>(usage.resident_bytes));
    capacity_bytes_->Set(static_cast<double>(usage.capacity_bytes));
    sequences_->Set(static_cast<double>(usage.sequences));
    leased_sequences_->Set(static_cast<double>(usage.leased_sequences));
  }
  if (sources_.streams) streams_->Set(static_cast<double>(sources_.streams()));
  if (sources_.queue_depth) queue_depth_->Set(static_cast<double>(sources_.queue_depth()));
  if (sources_.queued_calls) queued_calls_->Set(static_cast<double>(sources_.queued_calls()));
  if (sources_.client_memory) {
    const ClientMemoryUsage usage = sources_.client_memory();
    memory_regions_->Set(static_cast<double>(usage.regions));
    memory_region_bytes_->Set(static_cast<double>(usage.bytes));
    memory_twin_bytes_->Set(static_cast<double>(usage.device_bytes));
    memory_passes_->Set(static_cast<double>(usage.passes));
  }
  if (sources_.backend) CollectBackend(sources_.backend());
  if (sources_.link_rates) {
    const absl::StatusOr<attention::LinkRates> rates = sources_.link_rates();
    link_rates_[0]->Set(rates.ok() ? rates->to_device : 0);
    link_rates_[1]->Set(rates.ok() ? rates->to_host : 0);
    if (has_device_ && !rates.ok()) {
      LOG_FIRST_N(INFO, 1) << "nothing tells what the GPU's link carries: " << rates.status();
    }
  }
  if (sources_.degraded) degraded_->Set(sources_.degraded() ? 1 : 0);
  if (sources_.archive) CollectArchive(sources_.archive());
  process_bytes_->Set(static_cast<double>(ResidentBytes()));
  return registry_->Collect();
}

Metrics::CodeCounters Metrics::AddCodes(const std::string& name, const std::string& help) {
  CodeCounters counters;
  for (size_t code = 0; code < kCodes; ++code) {
    counters[code] = AddCounter(
        name, help, {{"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))}});
  }
  return counters;
}

prometheus::Counter* Metrics::AddCounter(const std::string& name, const std::string& help,
                                         const prometheus::Labels& labels) {
  return &prometheus::BuildCounter().Name(name).Help(help).Register(*registry_).Add(labels);
}

prometheus::Gauge* Metrics::AddGauge(const std::string& name, const std::string& help,
                                     const prometheus::Labels& labels) {
  return &prometheus::BuildGauge().Name(name).Help(help).Register(*registry_).Add(labels);
}

FiniteHistogram Metrics::AddHistogram(const std::string& name, const std::string& help,
                                      const prometheus::Labels& labels, const Buckets& buckets) {
  auto& family = prometheus::BuildHistogram().Name(name).Help(help).Register(*registry_);
  return {&family, labels, buckets, registry_.get()};
}

}  // namespace attnd::server
