// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>
#include <vector>

#include "bench/pages/page_pool_rules.h"
#include "gpu/layout/page_cache.h"

namespace attnd::bench {
namespace {

struct OneThread {
  template <typename T>
  static T Load(const T* from) {
    return *from;
  }
  template <typename T>
  static void Store(T* to, T value) {
    *to = value;
  }
  static uint64_t Swap(uint64_t* at, uint64_t from, uint64_t to) {
    const uint64_t before = *at;
    if (before == from) *at = to;
    return before;
  }
};

// A page that finds no frame is read where it lies, and so is not resident after its step.
class DeviceCachePool : public PagePool {
 public:
  DeviceCachePool(uint32_t pages, uint32_t capacity)
      : PagePool(pages, capacity),
        sets_(std::max(capacity / gpu::kCacheWays, 1u)),
        held_(sets_.size() * gpu::kCacheWays, kNever) {
    cache_.sets = sets_.data();
    cache_.set_count = static_cast<uint32_t>(sets_.size());
  }

  void Read(const Step& step, uint32_t /*now*/) override {
    for (const uint32_t page : step.pages) {
      const auto [frame, fetch] = gpu::FindFrame<OneThread>(cache_, clock_, uint64_t{page} + 1);
      if (!fetch) continue;
      gpu::SetFilled<OneThread>(cache_, clock_, uint64_t{page} + 1, frame);
      if (held_[frame] != kNever) resident_[held_[frame]] = false;
      held_[frame] = page;
      resident_[page] = true;
    }
    clock_.run = (clock_.run + 1) % (uint32_t{1} << gpu::kNumberBits);
    clock_.first = clock_.oldest = clock_.run;
    uses_ += step.pages.size();
    const double half_life = double{1} * gpu::kCacheHalfLife * static_cast<double>(held_.size());
    clock_.age = static_cast<float>(static_cast<double>(uses_) / half_life);
  }

  // It has none.
  void Prefetch(std::span<const uint32_t> /*pages*/, uint32_t /*now*/) override {}

 private:
  std::vector<gpu::CacheSet> sets_;
  std::vector<uint32_t> held_;  // page by frame
  gpu::PageCacheRef cache_{};
  gpu::CacheClock clock_{};
  uint64_t uses_ = 0;
};

}  // namespace

PoolRule DeviceCache(std::string name) { return MakeRule<DeviceCachePool>(std::move(name)); }

}  // namespace attnd::bench
