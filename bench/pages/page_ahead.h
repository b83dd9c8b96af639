// SPDX-License-Identifier: Apache-2.0
//
// What asking for pages before a step has chosen would bring: a pool is replayed, and beside each
// step's choice stands what was asked for earlier, in the step itself (lag 0) or after the last
// token (lag 1).
#ifndef ATTND_BENCH_PAGES_PAGE_AHEAD_H_
#define ATTND_BENCH_PAGES_PAGE_AHEAD_H_

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "bench/pages/page_cases.h"
#include "bench/pages/page_pools.h"

namespace attnd::bench {

// What is asked for ahead of a step's choice, of the step's layer.
struct AheadRule {
  enum class Source {
    kNothing,
    kLastSelection,  // lag 1: what the layer read at its last token
    kOpened,         // lag 0: likely pages of kOpened, in its order
    kScored,         // lag 0: of kScored
    kReadAtOpened,   // lag 0: just what the step will read, as soon as kOpened: no rule does better
    kReadAtScored,
  };
  std::string name;
  Source source = Source::kNothing;
  // Lag 0: pages with ranks below so many times kEarlyRankUnit; infinity: all likely ones.
  double share = std::numeric_limits<double>::infinity();
  // Only pages that the same rule did not name at the layer's last token.
  bool changed_only = false;
};

// How many pages the link carries before the step has chosen, from when they are asked for.
struct AheadRoom {
  std::array<uint64_t, kEarlyMoments> lag0 = {};  // by moment
  uint64_t lag1 = 0;
};

// Pages of counted steps. What is asked for is sent in the rule's order until the step has chosen.
// What is still to come then is dropped, so that nothing goes ahead of a step's own misses.
struct AheadCounts {
  uint64_t read = 0;
  uint64_t missed = 0;   // of these, not in the pool
  uint64_t in_time = 0;  // of these, sent ahead
  uint64_t late = 0;     // of the missed ones, asked for and not sent
  uint64_t asked = 0;    // named by the rule and not in the pool
  uint64_t wasted = 0;   // sent and not read
};

// What is sent ahead lies beside the pool until its step has chosen. What is read goes into the
// pool as missed pages do, the rest is forgotten: all rules miss the same pages.
AheadCounts CountAhead(const PageCase& page_case, const AheadRule& rule, const AheadRoom& room,
                       PagePool* pool);

// Pools of no fixed size, for rules that keep nothing but a layer's last step: what it read; or
// what it might have read when groups were opened, as AsyncTLS keeps the blocks that it chose
// (section 4.2). The latter fetches all that a step names, whatever it reads then.
PoolRule LastRead(std::string name);
PoolRule LastOpened(std::string name);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_AHEAD_H_
