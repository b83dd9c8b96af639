// SPDX-License-Identifier: Apache-2.0
//
// PageCache: the host's side of the cache of pages (layout/page_cache.h): its memory, and who may
// use it.
#ifndef ATTND_GPU_MEMORY_PAGE_CACHE_H_
#define ATTND_GPU_MEMORY_PAGE_CACHE_H_

#include <cstdint>
#include <memory>
#include <set>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "gpu/device/device.h"
#include "gpu/layout/page_cache.h"
#include "gpu/memory/arena.h"

namespace attnd::gpu {

// Thread-safe.
class PageCache {
 public:
  // The cache for one run of a wave, from before it is launched until it has ended. Several may use
  // it at once.
  class Use {
   public:
    // Waits while a run that came kRunsApart runs before this one has not ended, or until `alive`,
    // which is asked now and then, says no.
    static absl::StatusOr<std::unique_ptr<const Use>> Begin(
        const std::shared_ptr<PageCache>& cache, absl::FunctionRef<absl::Status()> alive);
    // Null if it would have to wait.
    static std::unique_ptr<const Use> BeginAtOnce(const std::shared_ptr<PageCache>& cache);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    // `clock` is left to the step's writer.
    PageCacheRef ref() const { return cache_->ref_; }
    // Runs are numbered in the order in which they come.
    uint64_t number() const { return number_; }
    // first_run: the number of the first run of the same wave. What that one has found is spared,
    // unless it was too long ago.
    CacheClock clock(uint64_t first_run) const;
    // To be called once, when the wave has its answers. pages: those that it looked up.
    void CountPages(uint64_t pages) const;

   private:
    friend class PageCache;
    Use(std::shared_ptr<PageCache> cache, uint64_t number, uint64_t oldest, double age)
        : cache_(std::move(cache)), number_(number), oldest_(oldest), age_(age) {}

    const std::shared_ptr<PageCache> cache_;
    const uint64_t number_;
    const uint64_t oldest_;  // of the runs that had not ended when this one came
    const double age_;
  };

  // In all of `memory`, an allocation of the device's. The device's errors.
  static absl::StatusOr<std::shared_ptr<PageCache>> Create(Device* device, Arena::Allocation memory,
                                                           uint32_t page_bytes);

  uint32_t page_bytes() const { return ref_.page_bytes; }
  uint64_t memory_bytes() const { return memory_.bytes(); }
  uint64_t frames() const { return uint64_t{ref_.set_count} * kCacheWays; }

 private:
  PageCache(Arena::Allocation memory, const PageCacheRef& ref)
      : memory_(std::move(memory)), ref_(ref) {}

  const Arena::Allocation memory_;
  const PageCacheRef ref_;

  // Null if a run that has not ended is too far behind.
  static std::unique_ptr<const Use> NextRun(const std::shared_ptr<PageCache>& cache)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(cache->mutex_);

  Mutex mutex_;
  CondVar run_ended_;
  std::set<uint64_t> running_ ABSL_GUARDED_BY(mutex_);
  uint64_t runs_ ABSL_GUARDED_BY(mutex_) = 0;  // so far
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;  // of pages
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_MEMORY_PAGE_CACHE_H_
