// SPDX-License-Identifier: Apache-2.0
//
// Files behind a GPU: what could be read ahead of the pages that are in no memory.
#ifndef ATTND_BENCH_PAGES_PAGE_BEHIND_H_
#define ATTND_BENCH_PAGES_PAGE_BEHIND_H_

#include <cstdint>
#include <span>

#include "bench/pages/page_cases.h"

namespace attnd::bench {

struct CaseBehind {
  const PageCase* page_case = nullptr;
  uint32_t layers = 0;
};

// For each size of the GPU's cache and of the pool of pages behind it, in shares of all pages: the
// pages a token that are in neither; how many of these each guess names that could be made before
// their layer begins, and how many pages would be read for that guess. Medians over the cases.
// Nothing is read ahead, so that all guesses are judged at the same moments.
void PrintBehind(std::span<const CaseBehind> cases, std::span<const double> cache_shares,
                 std::span<const double> pool_shares);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_BEHIND_H_
