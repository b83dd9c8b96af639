// SPDX-License-Identifier: Apache-2.0
//
// PageCacheStats: what a PageCache has done since its start, and what it holds.
#ifndef ATTND_STORAGE_CACHE_PAGE_CACHE_STATS_H_
#define ATTND_STORAGE_CACHE_PAGE_CACHE_STATS_H_

#include <cstdint>

namespace attnd::storage {

struct PageCacheStats {
  uint64_t lookups = 0;  // pages that steps asked for
  uint64_t hits = 0;     // that were there
  uint64_t late = 0;     // that were being read already
  uint64_t read_pages = 0;
  uint64_t read_bytes = 0;
  uint64_t failed_reads = 0;
  uint64_t prefetched_pages = 0;
  uint64_t prefetched_used = 0;     // asked for afterwards
  uint64_t prefetched_wasted = 0;   // evicted before anybody asked
  uint64_t prefetches_refused = 0;  // pages, for want of room or because readers were busy
  uint64_t evictions = 0;
  uint64_t slab_bytes = 0;      // taken from the system
  uint64_t resident_bytes = 0;  // in pages
  uint64_t pinned_bytes = 0;    // leased to steps
  uint64_t waiting_pages = 0;   // to be read, for steps
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_CACHE_PAGE_CACHE_STATS_H_
