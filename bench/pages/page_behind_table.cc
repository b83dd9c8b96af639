// SPDX-License-Identifier: Apache-2.0
#include "bench/pages/page_behind_table.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/strings/str_format.h"
#include "bench/pages/page_behind.h"
#include "bench/pages/page_pool_rules.h"
#include "bench/statistics.h"

namespace attnd::bench {
namespace {

BehindCounts Replay(const PageCase& page_case, double cache_share, double pool_share) {
  const auto make = [&](const PoolRule& rule, double share) {
    return rule.make(page_case.pages,
                     static_cast<uint32_t>(std::max(1.0, share * page_case.pages)));
  };
  const std::unique_ptr<PagePool> cache = make(DeviceCache(""), cache_share);
  const std::unique_ptr<PagePool> pool = make(StoragePool(""), pool_share);
  return CountBehind(page_case, cache.get(), pool.get());
}

void PrintLine(const std::vector<const PageCase*>& cases, double cache_share, double pool_share) {
  std::vector<BehindCounts> counts;
  for (const PageCase* page_case : cases) {
    counts.push_back(Replay(*page_case, cache_share, pool_share));
  }
  const auto median = [&](const auto& figure) {
    std::vector<double> values;
    for (size_t i = 0; i < cases.size(); ++i) {
      values.push_back(static_cast<double>(figure(counts[i])) / cases[i]->counted_tokens);
    }
    return Median(values);
  };
  std::string line =
      absl::StrFormat("| %g%%, %g%% | %.0f | %.1f | %.1f |", cache_share * 100, pool_share * 100,
                      median([](const BehindCounts& c) { return c.cache_misses; }),
                      median([](const BehindCounts& c) { return c.misses; }),
                      median([](const BehindCounts& c) { return c.first; }));
  for (const BehindGuess guess : {kBroughtLast, kSelectedLast}) {
    absl::StrAppendFormat(&line, " %.1f of %.1f |",
                          median([&](const BehindCounts& c) { return c.right[guess]; }),
                          median([&](const BehindCounts& c) { return c.guessed[guess]; }));
  }
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

}  // namespace

void PrintBehind(const std::vector<const PageCase*>& cases, const std::vector<double>& cache_shares,
                 const std::vector<double>& pool_shares) {
  std::printf(
      "\n| cache, pool | not in the cache | in no memory | of these for the first time | brought "
      "last time: right of read ahead | selected last time |\n|---|---|---|---|---|---|\n");
  for (const double cache : cache_shares) {
    for (const double pool : pool_shares) PrintLine(cases, cache, pool);
  }
}

}  // namespace attnd::bench
