// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/random_trace.h"

#include <numeric>
#include <random>

namespace attnd::bench {

PageTrace RandomTrace(uint32_t seed) {
  std::mt19937 random(seed);
  PageTrace trace{kTokens, kLayers, kLayerPages, 10, 8192, {}, {}};
  trace.ranks.assign(size_t{kTokens} * trace.pages(), kPageRankMax);
  for (auto& early : trace.early) early.assign(trace.ranks.size(), kNotLikely);
  for (size_t i = 0; i < trace.ranks.size(); ++i) {
    const size_t last = i - trace.pages();
    const bool as_last = i >= trace.pages() && random() % 2 == 0;
    trace.ranks[i] = as_last ? trace.ranks[last] : random() % 5 == 0 ? kPageRead : kPageRankMax;
    for (auto& early : trace.early) {
      const bool likely = trace.ranks[i] == kPageRead || random() % 4 == 0;
      // Places at the rules' limits, too.
      if (likely) early[i] = as_last ? early[last] : static_cast<EarlyRank>(random() % 9 * 250);
    }
  }
  return trace;
}

Pages Read(const PageTrace& trace, uint32_t token, uint32_t layer) {
  Pages pages;
  for (uint32_t i = 0; i < kLayerPages; ++i) {
    const size_t at = (size_t{token} * kLayers + layer) * kLayerPages + i;
    if (trace.ranks[at] == 0) pages.insert(layer * kLayerPages + i);
  }
  return pages;
}

PageCase CaseOf(const std::vector<const PageTrace*>& traces) {
  CaseOptions options;
  options.warm_tokens = kWarm;
  return MakeCase(traces, options);
}

void AddDenseStep(PageCase* page_case) {
  Step dense = page_case->steps[0];
  dense.counted = false;
  dense.pages.resize(kLayerPages);
  std::iota(dense.pages.begin(), dense.pages.end(), 0);
  page_case->steps.insert(page_case->steps.end() - kLayers, dense);
}

}  // namespace attnd::bench
