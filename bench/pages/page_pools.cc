// SPDX-License-Identifier: Apache-2.0
#include "bench/pages/page_pools.h"

#include "bench/pages/page_pool_rules.h"

namespace attnd::bench {

std::vector<PoolRule> PoolRules() {
  return {
      Lru("LRU"),
      Clock("CLOCK", 1, 1),
      Clock("CLOCK, newcomers at 0", 1, 0),
      Clock("GCLOCK, 2 bits", 3, 1),
      Clock("GCLOCK, 2 bits, newcomers at 0", 3, 0),
      Clock("GCLOCK, 4 bits, newcomers at 0", 15, 0),
      TwoQueue("2Q"),
      S3Fifo("S3-FIFO"),
      SampledLfu("random", 1u, 4.0),
      ByScore("by last score"),
      AgedLfu("LFU, half-life 4", 4.0),
      SampledLfu("LFU of 8, half-life 1", 8u, 1.0),
      SampledLfu("LFU of 8, half-life 4", 8u, 4.0),
      StoragePool("attnd's own pool"),
      DeviceCache("attnd's cache on a GPU"),
      SampledLfu("LFU of 8, half-life 16", 8u, 16.0),
      SampledLfu("LFU of 16, half-life 4", 16u, 4.0),
      ForgettingLfu("LFU of 8, half-life 4, forgetting", 8u, 4.0),
      AdmittingLfu("LFU of 8, half-life 4, admitting", 8u, 4.0),
      Belady("Belady"),
  };
}

}  // namespace attnd::bench
