// SPDX-License-Identifier: Apache-2.0
//
// PageCase: sequences whose steps share one pool, in the order in which a server sees them.
#ifndef ATTND_BENCH_PAGES_PAGE_CASES_H_
#define ATTND_BENCH_PAGES_PAGE_CASES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "bench/pages/page_pools.h"
#include "bench/pages/page_trace_file.h"

namespace attnd::bench {

enum class Order {
  kBatch,  // all sequences decode a token together, layer by layer
  kTurns,  // one sequence decodes some tokens, then the next
};

struct CaseOptions {
  Order order = Order::kBatch;
  uint32_t turn_tokens = 8;   // kTurns
  uint32_t warm_tokens = 32;  // tokens of each sequence that are not counted
  uint32_t scan_every = 0;    // every so many tokens one more reads every page, and does not count
};

// The traces outlive the case.
struct PageCase {
  uint32_t pages = 0;           // of all sequences
  uint32_t counted_tokens = 0;  // of all sequences
  std::vector<Step> steps;
};

// Traces must have the same sizes but for layer_pages.
PageCase MakeCase(std::span<const PageTrace* const> traces, const CaseOptions& options);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_CASES_H_
