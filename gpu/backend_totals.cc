// SPDX-License-Identifier: Apache-2.0
#include "gpu/backend_totals.h"

#include <algorithm>
#include <cstddef>

namespace attnd::gpu {

using attention::BackendStats;

void BackendTotals::AddFallback(const FallbackRows& rows) {
  MutexLock lock(mutex_);
  ++stats_.fallback_steps;
  for (size_t i = 0; i < rows.size(); ++i) stats_.fallback_rows[i] += rows[i];
}

void BackendTotals::AddPages(const BackendStats::PageCache& pages) {
  if (pages.lookups == 0) return;
  MutexLock lock(mutex_);
  BackendStats::PageCache& cache = stats_.cache;
  cache.lookups += pages.lookups;
  cache.fetched += pages.fetched;
  cache.in_place += pages.in_place;
  cache.carried += pages.carried;
  cache.host_tokens += pages.host_tokens;
  cache.fetched_bytes += pages.fetched_bytes;
}

void BackendTotals::AddFiles(const BackendStats::Files& files) {
  if (files.waves + files.runs_again + files.pages == 0) return;
  MutexLock lock(mutex_);
  stats_.files.waves += files.waves;
  stats_.files.runs_again += files.runs_again;
  stats_.files.pages += files.pages;
  stats_.files.disk_pages += files.disk_pages;
  stats_.files.bytes += files.bytes;
}

void BackendTotals::AddTimes(const StageSeconds& seconds) {
  MutexLock lock(mutex_);
  ++stats_.timed_steps;
  stats_.score_seconds += seconds.score;
  stats_.select_seconds += seconds.select;
  stats_.attend_seconds += seconds.attend;
  stats_.merge_seconds += seconds.merge;
  stats_.fetch_seconds += seconds.fetch;
}

bool BackendTotals::AddIndexMissing(uint64_t bytes) {
  MutexLock lock(mutex_);
  const bool first = stats_.index_missing_bytes == 0;
  stats_.index_missing_bytes = std::max(stats_.index_missing_bytes, bytes);
  return first;
}

BackendStats BackendTotals::stats() const {
  MutexLock lock(mutex_);
  return stats_;
}

}  // namespace attnd::gpu
