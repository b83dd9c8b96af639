// SPDX-License-Identifier: Apache-2.0
#include "gpu/memory/page_cache.h"

#include <glog/logging.h>

#include <algorithm>

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

CacheClock PageCache::Use::clock() const {
  constexpr uint64_t kSteps = uint64_t{1} << kStepBits;
  const double half_life = double{1} * kCacheHalfLife * static_cast<double>(cache_->frames());
  const uint64_t wave = cache_->steps_ % (uint64_t{1} << kWaveBits);
  return {static_cast<uint32_t>(cache_->steps_ % kSteps),
          static_cast<float>(static_cast<double>(cache_->uses_) / half_life),
          static_cast<uint32_t>(wave << (kSourceBits + kRunBits))};
}

void PageCache::Use::Finish(uint64_t pages) const {
  ++cache_->steps_;
  cache_->uses_ += pages;
}

}  // namespace attnd::gpu
