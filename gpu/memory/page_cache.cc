// SPDX-License-Identifier: Apache-2.0
#include "gpu/memory/page_cache.h"

#include <glog/logging.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "gpu/layout/memory_split.h"

namespace attnd::gpu {

absl::StatusOr<std::shared_ptr<PageCache>> PageCache::Create(Device* device,
                                                             Arena::Allocation memory,
                                                             uint32_t page_bytes) {
  CHECK(page_bytes > 0 && page_bytes % 16 == 0);
  const uint64_t set_bytes = sizeof(CacheSet) + uint64_t{kCacheWays} * page_bytes;
  const uint64_t sets = std::min<uint64_t>(memory.bytes() / set_bytes, kFramesMax / kCacheWays - 1);
  if (sets == 0) {
    return absl::ResourceExhaustedError(absl::StrCat("a page cache of ", memory.bytes(),
                                                     " bytes holds no ", kCacheWays, " pages of ",
                                                     page_bytes, " bytes"));
  }
  PageCacheRef ref{};
  ref.sets = reinterpret_cast<CacheSet*>(memory.data());
  ref.set_count = static_cast<uint32_t>(sets);
  ref.page_bytes = page_bytes;
  // The frames follow the sets; both are aligned, as a set has 64 bytes.
  ref.frames = memory.data() + sets * sizeof(CacheSet);
  ATTND_RETURN_IF_ERROR(device->Clear(memory.data(), sets * sizeof(CacheSet)));
  return std::shared_ptr<PageCache>(new PageCache(std::move(memory), ref));
}

PageCache::Use::Use(std::shared_ptr<PageCache> cache) : cache_(std::move(cache)) {
  MutexLock lock(cache_->mutex_);
  std::set<uint64_t>& running = cache_->running_;
  while (!running.empty() && cache_->runs_ - *running.begin() >= kStepsApart) {
    cache_->run_ended_.Wait(cache_->mutex_);
  }
  number_ = cache_->runs_++;
  running.insert(number_);
  oldest_ = *running.begin();
  const double half_life = double{1} * kCacheHalfLife * static_cast<double>(cache_->frames());
  age_ = static_cast<double>(cache_->uses_) / half_life;
}

PageCache::Use::~Use() {
  MutexLock lock(cache_->mutex_);
  cache_->running_.erase(number_);
  cache_->run_ended_.NotifyAll();
}

CacheClock PageCache::Use::clock(uint64_t first_run) const {
  CHECK_LE(first_run, number_);
  const uint64_t oldest =
      number_ - first_run < kStepsApart ? std::min(oldest_, first_run) : oldest_;
  const auto modulo = [](uint64_t number, uint32_t bits) {
    return static_cast<uint32_t>(number % (uint64_t{1} << bits));
  };
  return {modulo(number_, kStepBits), modulo(oldest, kStepBits), static_cast<float>(age_),
          modulo(first_run, kWaveBits) << (kSourceBits + kRunBits)};
}

void PageCache::Use::CountPages(uint64_t pages) const {
  MutexLock lock(cache_->mutex_);
  cache_->uses_ += pages;
}

}  // namespace attnd::gpu
