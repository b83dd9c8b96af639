// SPDX-License-Identifier: Apache-2.0
//
// PageCache: its life, sources, what it holds. Leases are in page_cache_leases.cc, reading in
// page_cache_readers.cc.
#include "storage/cache/page_cache.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/start_thread.h"
#include "common/status.h"
#include "glog/logging.h"

namespace attnd::storage {

absl::StatusOr<std::shared_ptr<PageCache>> PageCache::Create(const PageCacheOptions& options) {
  if (options.guaranteed_bytes < PageCacheOptions::kBytesMin) {
    return absl::InvalidArgumentError(absl::StrCat("guaranteed_bytes is ", options.guaranteed_bytes,
                                                   "; allowed are ", PageCacheOptions::kBytesMin,
                                                   " and more"));
  }
  if (options.readers < 1 || options.readers > 64) {
    return absl::InvalidArgumentError(
        absl::StrCat("readers is ", options.readers, "; allowed are 1..64"));
  }
  std::shared_ptr<PageCache> cache(new PageCache(options));
  ATTND_RETURN_IF_ERROR(cache->Start());
  return cache;
}

PageCache::PageCache(const PageCacheOptions& options)
    : options_(options),
      pinned_bytes_max_(options.guaranteed_bytes / 4 * 3),
      prefetching_bytes_max_(options.guaranteed_bytes / 8),
      rate_(options.read_bytes_per_s),
      pool_(options.guaranteed_bytes, options.more) {}

absl::Status PageCache::Start() {
  for (uint32_t i = 0; i < options_.readers; ++i) {
    ATTND_ASSIGN_OR_RETURN(auto queue, MakeIoQueue(options_.queue));
    queues_.push_back(std::move(queue));
  }
  readers_.reserve(queues_.size());
  for (const auto& queue : queues_) {
    ATTND_ASSIGN_OR_RETURN(
        std::thread reader,
        StartThread("for reading pages", [this, queue = queue.get()] { ReadLoop(queue); }));
    readers_.push_back(std::move(reader));
  }
  return absl::OkStatus();
}

// Sources, leases and reads keep the cache alive: none is left, and so nothing that they count.
PageCache::~PageCache() {
  Stop();
  MutexLock lock(mutex_);
  CHECK_EQ(jobs_, 0u);
  CHECK_EQ(pinned_bytes_, 0u);
  CHECK_EQ(prefetching_bytes_, 0u);
  CHECK_EQ(pool_.resident_bytes(), 0u);
}

absl::Status PageCache::Stopped() {
  return absl::UnavailableError("pages are not read any more: shutting down");
}

void PageCache::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_.store(true);
    for (std::deque<Job>* queue : {&demanded_, &prefetches_}) {
      for (const Job& job : *queue) Finish(job, Stopped());
    }
    // The jobs themselves die below: a source that dies with one takes the lock.
  }
  work_.NotifyAll();
  changed_.NotifyAll();
  for (std::thread& reader : readers_) reader.join();
  readers_.clear();
  std::deque<Job> demanded, prefetches;
  MutexLock lock(mutex_);
  demanded.swap(demanded_);
  prefetches.swap(prefetches_);
}

// ---- sources ----

PageCache::Source::Source(std::shared_ptr<PageCache> cache, std::unique_ptr<const SegmentFile> file)
    : cache_(std::move(cache)),
      file_(std::move(file)),
      table_(file_->header().heads() * file_->header().pages) {}

PageCache::Source::~Source() { cache_->Forget(this); }

absl::Status PageCache::Source::status() const {
  MutexLock lock(cache_->mutex_);
  return status_;
}

absl::StatusOr<std::shared_ptr<PageCache::Source>> PageCache::Add(
    std::unique_ptr<const SegmentFile> file) {
  const uint64_t most =
      std::min(PagePool::page_bytes_max(options_.guaranteed_bytes), lease_bytes_max());
  if (file->header().page_bytes > most) {
    return absl::InvalidArgumentError(absl::StrCat("pages of ", file->header().page_bytes,
                                                   " bytes; the cache holds pages up to ", most));
  }
  return std::make_shared<Source>(shared_from_this(), std::move(file));
}

void PageCache::Forget(Source* source) {
  MutexLock lock(mutex_);
  for (const PageEntry& entry : source->table_) {
    if (entry.frame == nullptr) continue;
    CHECK_EQ(entry.frame->pins, 0u) << "leases and reads hold their sources";
    pool_.Drop(entry.frame);
  }
}

uint64_t PageCache::Shrink(uint64_t bytes) {
  MutexLock lock(mutex_);
  return pool_.Shrink(bytes);
}

uint64_t PageCache::reclaimable_bytes() const {
  MutexLock lock(mutex_);
  return pool_.slab_bytes() - std::min(pool_.slab_bytes(), pool_.guaranteed_bytes());
}

PageCacheStats PageCache::stats() const {
  MutexLock lock(mutex_);
  PageCacheStats stats = stats_;
  stats.evictions = pool_.evictions();
  stats.prefetched_wasted = pool_.wasted_prefetches();
  stats.slab_bytes = pool_.slab_bytes();
  stats.resident_bytes = pool_.resident_bytes();
  stats.pinned_bytes = pinned_bytes_;
  for (const Job& job : demanded_) stats.waiting_pages += job.frames.size();
  return stats;
}

}  // namespace attnd::storage
