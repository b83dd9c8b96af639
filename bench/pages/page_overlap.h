// SPDX-License-Identifier: Apache-2.0
//
// How much of a step's selection the tokens before knew, whatever a pool keeps.
#ifndef ATTND_BENCH_PAGES_PAGE_OVERLAP_H_
#define ATTND_BENCH_PAGES_PAGE_OVERLAP_H_

#include <cstdint>
#include <vector>

#include "bench/pages/page_trace_file.h"

namespace attnd::bench {

// Prints a table by layer, medians over the traces, which have the same layers and more than 16
// and than `warm` tokens. The first `warm` do not count.
void PrintOverlap(const std::vector<PageTrace>& traces, uint32_t warm);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_OVERLAP_H_
