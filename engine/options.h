// SPDX-License-Identifier: Apache-2.0
//
// EngineOptions: the options of an engine, with those of its archive on disk.
#ifndef ATTND_ENGINE_OPTIONS_H_
#define ATTND_ENGINE_OPTIONS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "attention/policy/policy.h"
#include "engine/audit/audit.h"
#include "engine/lease.h"

namespace attnd::engine {

// Limits on the sealed sequences that are kept; 0: no limit.
struct RetentionLimits {
  uint64_t bytes_max = 0;  // of all segment and tail files
  uint64_t age_max_s = 0;  // since a sequence was sealed, resumed or begun with
};

// Where sealed sequences lie.
struct ArchiveOptions {
  std::string data_dir;  // empty: nothing can be sealed
  enum class Io { kAuto, kUring, kThreads };
  Io io = Io::kAuto;  // kAuto: io_uring, or threads where it is refused
  // The part of the memory budget that is kept for pages of segments on disk. Pages also take the
  // part of the budget that is free. 0: an eighth of the budget, 256 MiB at most.
  uint64_t page_memory_bytes = 0;
  uint32_t page_readers = 4;      // threads that read pages, each with 64 transfers under way
  uint64_t read_bytes_per_s = 0;  // of all readers; 0: no limit
  RetentionLimits retention;
  bool prefetch = false;  // of the pages that the last step over the next layer read
  // How long after the last move to disk segments come back, if memory has room for them and the
  // backend prefers whole ones.
  std::chrono::milliseconds comes_back_after{10'000};
  // Set by the engine: EventListener::OnPagesRead. May be empty.
  std::function<void(uint64_t bytes, std::chrono::nanoseconds time)> on_pages_read;
  // Set by the engine: EventListener::OnDiskFault. May be empty.
  std::function<void(const absl::Status&)> on_disk_fault;

  uint64_t PageMemoryBytes(uint64_t memory_budget_bytes) const;
};

struct EngineOptions {
  // For sequences (KV, indexes, token ids), segments being built, and answers under way.
  uint64_t memory_budget_bytes = uint64_t{1} << 30;
  uint32_t max_sequences = 4096;
  uint64_t max_sequence_tokens = uint64_t{4} << 20;
  uint32_t max_rows = 1024;          // of one step
  uint32_t max_query_tokens = 4096;  // of one step, all rows together
  // Length of a segment: of a prompt's runs, and of generated tokens that have left the window.
  uint32_t segment_tokens = 8192;
  // Threads that segment a finished prefill; a quarter as many, up to Engine::kAppendThreadsMax,
  // write an upload.
  uint32_t index_threads = 1;
  attention::Policy default_policy;  // of sequences that choose none
  ArchiveOptions archive;
  AuditOptions audit;
  // Files of feature maps, one for each model that has any (engine/models/feature_map_files.h).
  std::vector<std::string> feature_maps;
  // Files of label channels, likewise (engine/models/label_channel_files.h).
  std::vector<std::string> label_channels;
  // The time by which leases count; empty: the machine's steady clock.
  Lease::Clock lease_clock;

  // InvalidArgument names the option and its range.
  absl::Status Validate() const;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_OPTIONS_H_
