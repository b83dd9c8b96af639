// SPDX-License-Identifier: Apache-2.0
//
// The table of page_replay about files behind a GPU (page_behind.h).
#ifndef ATTND_BENCH_PAGES_PAGE_BEHIND_TABLE_H_
#define ATTND_BENCH_PAGES_PAGE_BEHIND_TABLE_H_

#include <vector>

#include "bench/pages/page_cases.h"

namespace attnd::bench {

// A line for each size of the GPU's cache and of the pool of pages behind it, in shares of all
// pages. Pages a token; medians over the cases.
void PrintBehind(const std::vector<const PageCase*>& cases, const std::vector<double>& cache_shares,
                 const std::vector<double>& pool_shares);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_BEHIND_TABLE_H_
