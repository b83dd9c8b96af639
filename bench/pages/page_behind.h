// SPDX-License-Identifier: Apache-2.0
//
// Files behind a GPU: what could be read ahead of the pages that are in no memory. The GPU's cache
// and the pool of pages behind it are replayed, and beside what each step finds in neither stands
// what could have been guessed of it before its layer began.
#ifndef ATTND_BENCH_PAGES_PAGE_BEHIND_H_
#define ATTND_BENCH_PAGES_PAGE_BEHIND_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "bench/pages/page_cases.h"
#include "bench/pages/page_pools.h"

namespace attnd::bench {

// Guesses at what a layer's step will find in no memory.
enum BehindGuess : size_t {
  kBroughtLast,   // what the host brought for the layer's last step: what the cache had not
  kSelectedLast,  // what the layer's last step read
};
inline constexpr size_t kBehindGuesses = 2;

// Pages of counted steps.
struct BehindCounts {
  uint64_t cache_misses = 0;  // that steps read, and the cache had not
  uint64_t misses = 0;        // of these, that the pool had not either
  uint64_t first = 0;         // of these, that no step had read before
  // By BehindGuess: pages of the guess that are in no memory, which would be read for it; of these,
  // pages that the step reads.
  std::array<uint64_t, kBehindGuesses> guessed = {}, right = {};
};

// Nothing is read ahead, so that all guesses are judged at the same moments. The pool reads what
// the cache misses.
BehindCounts CountBehind(const PageCase& page_case, PagePool* cache, PagePool* pool);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_BEHIND_H_
