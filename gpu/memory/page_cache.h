// SPDX-License-Identifier: Apache-2.0
//
// PageCache: the host's side of the cache of pages (layout/page_cache.h): its memory, and who may
// use it.
#ifndef ATTND_GPU_MEMORY_PAGE_CACHE_H_
#define ATTND_GPU_MEMORY_PAGE_CACHE_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "gpu/device/device.h"
#include "gpu/layout/page_cache.h"
#include "gpu/memory/arena.h"

namespace attnd::gpu {

// Thread-safe.
class PageCache {
 public:
  // The cache for as long as one step uses it: others wait. The step must have ended before.
  class Use {
   public:
    explicit Use(std::shared_ptr<PageCache> cache)
        : cache_(std::move(cache)), lock_(cache_->step_mutex_) {}
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    // `clock` is left to the step's writer.
    PageCacheRef ref() const { return cache_->ref_; }
    // Of the step's first run; the same until Finish.
    CacheClock clock() const ABSL_NO_THREAD_SAFETY_ANALYSIS;
    // To be called when the step has ended. pages: those that it looked up.
    void Finish(uint64_t pages) const ABSL_NO_THREAD_SAFETY_ANALYSIS;

   private:
    const std::shared_ptr<PageCache> cache_;
    const MutexLock lock_;
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

  Mutex step_mutex_;
  uint64_t steps_ ABSL_GUARDED_BY(step_mutex_) = 0;
  uint64_t uses_ ABSL_GUARDED_BY(step_mutex_) = 0;  // of pages
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_MEMORY_PAGE_CACHE_H_
