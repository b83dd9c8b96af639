// SPDX-License-Identifier: Apache-2.0
//
// EmptiedCacheDevice: another device, whose cache of pages can be made empty between two steps. The
// pages in host memory stay mapped and the indexes stay on the device: a step over the empty cache
// fetches its pages and pays for nothing else that a first step pays for.
#ifndef ATTND_BENCH_GPU_EMPTIED_CACHE_H_
#define ATTND_BENCH_GPU_EMPTIED_CACHE_H_

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/gpu/forwarding_device.h"
#include "common/mutex.h"
#include "gpu/device/device.h"

namespace attnd::bench {

// A cache begins with all its sets cleared (gpu/memory/page_cache.cc), which is the only use that
// the backend makes of Device::Clear: what was cleared last are the sets of the cache that is in
// use, and clearing them again makes the cache what it was at first.
class CacheEmptier {
 public:
  // Empties the cache; no step may be under way. FailedPrecondition if there has been none.
  absl::Status Empty() {
    const Sets sets = LastCleared();
    if (sets.at == nullptr) return absl::FailedPreconditionError("the backend has made no cache");
    return sets.device->Clear(sets.at, sets.bytes);
  }

 private:
  friend class EmptiedCacheDevice;
  struct Sets {
    gpu::Device* device = nullptr;  // outlives the steps
    std::byte* at = nullptr;
    size_t bytes = 0;
  };
  void Note(const Sets& sets) {
    MutexLock lock(mutex_);
    sets_ = sets;
  }
  Sets LastCleared() {
    MutexLock lock(mutex_);
    return sets_;
  }

  Mutex mutex_;
  Sets sets_ ABSL_GUARDED_BY(mutex_);
};

class EmptiedCacheDevice : public ForwardingDevice {
 public:
  EmptiedCacheDevice(std::unique_ptr<gpu::Device> device, std::shared_ptr<CacheEmptier> emptier)
      : ForwardingDevice(std::move(device)), emptier_(std::move(emptier)) {}

  absl::Status Clear(std::byte* memory, size_t bytes) override {
    absl::Status cleared = ForwardingDevice::Clear(memory, bytes);
    if (cleared.ok()) emptier_->Note({this, memory, bytes});
    return cleared;
  }

 private:
  const std::shared_ptr<CacheEmptier> emptier_;
};

}  // namespace attnd::bench

#endif  // ATTND_BENCH_GPU_EMPTIED_CACHE_H_
