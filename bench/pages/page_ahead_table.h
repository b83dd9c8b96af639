// SPDX-License-Identifier: Apache-2.0
//
// The tables of page_replay about pages that are asked for ahead (page_ahead.h).
#ifndef ATTND_BENCH_PAGES_PAGE_AHEAD_TABLE_H_
#define ATTND_BENCH_PAGES_PAGE_AHEAD_TABLE_H_

#include <array>
#include <cstdint>
#include <vector>

#include "bench/pages/page_cases.h"
#include "bench/pages/page_trace_file.h"

namespace attnd::bench {

struct AheadLink {
  // Until a step has chosen: from when the layer before has attended, and from its moments on.
  double lag1_us = 0;
  std::array<double, kEarlyMoments> lag0_us = {};
  double gb_s = 1;  // of 10^9 bytes
  uint32_t page_bytes = 0;
  uint32_t rows = 1;  // of a step, which share the link and are alike
};

// A table for each pool of the GPU's cache, in shares of all pages, and one for the pools that keep
// a last step alone. Medians over the cases.
void PrintAhead(const std::vector<const PageCase*>& cases, const std::vector<double>& pool_shares,
                const AheadLink& link);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_AHEAD_TABLE_H_
