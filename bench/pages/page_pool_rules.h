// SPDX-License-Identifier: Apache-2.0
//
// The pools of PoolRules, one factory each.
#ifndef ATTND_BENCH_PAGES_PAGE_POOL_RULES_H_
#define ATTND_BENCH_PAGES_PAGE_POOL_RULES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "bench/pages/page_pools.h"

namespace attnd::bench {

// A PoolRule that makes Pool(pages, capacity, arguments...).
template <typename Pool, typename... Arguments>
PoolRule MakeRule(std::string name, Arguments... arguments) {
  return {std::move(name), [=](uint32_t pages, uint32_t capacity) -> std::unique_ptr<PagePool> {
            return std::make_unique<Pool>(pages, capacity, arguments...);
          }};
}

// page_keyed_pools.cc: the pool keeps the worthiest pages, exactly.
PoolRule Lru(std::string name);
// A use counts half after the pool has been read half_life times its size.
PoolRule AgedLfu(std::string name, double half_life);
PoolRule ByScore(std::string name);
PoolRule Belady(std::string name);

// page_queue_pools.cc: hands and queues.
PoolRule Clock(std::string name, uint8_t max, uint8_t first);
PoolRule TwoQueue(std::string name);
PoolRule S3Fifo(std::string name);

// page_sampled_pools.cc: LFU with ageing among `samples` frames at random.
PoolRule SampledLfu(std::string name, uint32_t samples, double half_life);
// The same, but pages that are not in the pool have no past.
PoolRule ForgettingLfu(std::string name, uint32_t samples, double half_life);
PoolRule AdmittingLfu(std::string name, uint32_t samples, double half_life);

// page_storage_pool.cc: storage::PagePool itself, so that what the tables say is what runs.
PoolRule StoragePool(std::string name);

// page_device_pool.cc: the GPU's cache of pages, by the code that its fetch stage runs.
PoolRule DeviceCache(std::string name);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_POOL_RULES_H_
