// SPDX-License-Identifier: Apache-2.0
//
// PageCache: the host's side of the cache of pages (layout/page_cache.h): its memory, and who may
// use it.
#ifndef ATTND_GPU_MEMORY_PAGE_CACHE_H_
#define ATTND_GPU_MEMORY_PAGE_CACHE_H_

#include <cstdint>
#include <memory>
#include <set>

#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "gpu/device/device.h"
#include "gpu/layout/page_cache.h"
#include "gpu/memory/arena.h"

namespace attnd::gpu {

// Thread-safe.
class PageCache {
 public:
  // The cache for one run of a step, from before it is launched until it has ended. Several steps
  // may use it at once.
  class Use {
   public:
    // Waits while a run that came kStepsApart runs before this one has not ended.
    explicit Use(std::shared_ptr<PageCache> cache);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    // `clock` is left to the step's writer.
    PageCacheRef ref() const { return cache_->ref_; }
    // Of this run alone. Runs are numbered in the order in which they come.
    uint64_t number() const { return number_; }
    // first_run: the number of the first run of the same wave. What that one has found is spared,
    // unless it was too long ago.
    CacheClock clock(uint64_t first_run) const;
    // To be called once, when the wave has its answers. pages: those that it looked up.
    void CountPages(uint64_t pages) const;

   private:
    const std::shared_ptr<PageCache> cache_;
    uint64_t number_ = 0;
    uint64_t oldest_ = 0;  // of the runs that had not ended when this one came
    double age_ = 0;
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

  Mutex mutex_;
  CondVar run_ended_;
  std::set<uint64_t> running_ ABSL_GUARDED_BY(mutex_);
  uint64_t runs_ ABSL_GUARDED_BY(mutex_) = 0;  // so far
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;  // of pages
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_MEMORY_PAGE_CACHE_H_
