// SPDX-License-Identifier: Apache-2.0
#include "gpu/memory/page_cache.h"

#include <glog/logging.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/memory/memory.h"
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

std::unique_ptr<const PageCache::Use> PageCache::NextRun(const std::shared_ptr<PageCache>& cache) {
  std::set<uint64_t>& running = cache->running_;
  if (!running.empty() && cache->runs_ - *running.begin() >= kRunsApart) return nullptr;
  const uint64_t number = cache->runs_++;
  running.insert(number);
  const double half_life = double{1} * kCacheHalfLife * static_cast<double>(cache->frames());
  return absl::WrapUnique(
      new Use(cache, number, *running.begin(), static_cast<double>(cache->uses_) / half_life));
}

std::unique_ptr<const PageCache::Use> PageCache::Use::BeginAtOnce(
    const std::shared_ptr<PageCache>& cache) {
  MutexLock lock(cache->mutex_);
  return NextRun(cache);
}

absl::StatusOr<std::unique_ptr<const PageCache::Use>> PageCache::Use::Begin(
    const std::shared_ptr<PageCache>& cache, absl::FunctionRef<absl::Status()> alive) {
  constexpr std::chrono::microseconds kPoll{2000};
  while (true) {
    {
      MutexLock lock(cache->mutex_);
      auto use = NextRun(cache);
      if (use != nullptr) return use;
      cache->run_ended_.WaitFor(cache->mutex_, kPoll);
    }
    ATTND_RETURN_IF_ERROR(alive());
  }
}

PageCache::Use::~Use() {
  MutexLock lock(cache_->mutex_);
  cache_->running_.erase(number_);
  cache_->run_ended_.NotifyAll();
}

CacheClock PageCache::Use::clock(uint64_t first_run) const {
  CHECK_LE(first_run, number_);
  const uint64_t oldest = number_ - first_run < kRunsApart ? std::min(oldest_, first_run) : oldest_;
  const auto modulo = [](uint64_t number, uint32_t bits) {
    return static_cast<uint32_t>(number % (uint64_t{1} << bits));
  };
  return {.run = modulo(number_, kNumberBits),
          .first = modulo(first_run, kNumberBits),
          .oldest = modulo(oldest, kNumberBits),
          .age = static_cast<float>(age_),
          .filler = modulo(first_run, kWaveBits) << (kSourceBits + kRunBits),
          .only_looks = 0};
}

void PageCache::Use::CountPages(uint64_t pages) const {
  MutexLock lock(cache_->mutex_);
  cache_->uses_ += pages;
}

}  // namespace attnd::gpu
