// SPDX-License-Identifier: Apache-2.0
//
// Small traces of pages for the tests of what replays count.
#ifndef ATTND_TESTS_BENCH_RANDOM_TRACE_H_
#define ATTND_TESTS_BENCH_RANDOM_TRACE_H_

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "bench/pages/page_cases.h"
#include "bench/pages/page_pools.h"
#include "bench/pages/page_trace_file.h"

namespace attnd::bench {

using Pages = std::set<uint32_t>;

inline constexpr uint32_t kTokens = 24, kLayers = 2, kLayerPages = 40, kWarm = 3;

// Pages that are read, and likely, at random, half of them as at the last token.
PageTrace RandomTrace(uint32_t seed);

// What a layer reads at a token; pages are numbered as in a case of the trace alone.
Pages Read(const PageTrace& trace, uint32_t token, uint32_t layer);

// The traces' sequences decode each token together; the first kWarm tokens are not counted.
PageCase CaseOf(const std::vector<const PageTrace*>& traces);

// To a case of one trace: before the last token, a step that reads every page of layer 0 and does
// not count.
void AddDenseStep(PageCase* page_case);

// Keeps nothing.
class NoPool : public PagePool {
 public:
  using PagePool::PagePool;
  void Read(const Step& /*step*/, uint32_t /*now*/) override {}
  void Prefetch(std::span<const uint32_t> /*pages*/, uint32_t /*now*/) override {}
};

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_RANDOM_TRACE_H_
