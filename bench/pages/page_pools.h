// SPDX-License-Identifier: Apache-2.0
//
// PagePool: simulated pools of a fixed number of pages, one for each eviction rule. They keep page
// numbers, not pages.
#ifndef ATTND_BENCH_PAGES_PAGE_POOLS_H_
#define ATTND_BENCH_PAGES_PAGE_POOLS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/pages/page_trace_file.h"

namespace attnd::bench {

inline constexpr uint32_t kNever = 0xffffffff;

// One layer of one token of one sequence. Pages are numbered over the whole case.
struct Step {
  uint32_t token = 0;  // tokens of the case before it
  uint32_t sequence = 0;
  uint32_t layer = 0;
  uint32_t first_page = 0;                                      // of the layer
  std::span<const PageRank> ranks;                              // of the layer's pages
  std::array<std::span<const EarlyRank>, kEarlyMoments> early;  // likewise
  std::vector<uint32_t> pages;                                  // that it reads, ascending
  std::vector<uint32_t> next;  // [pages] step that reads each next, or kNever
  bool counted = true;         // false: warms the pool, or reads everything once
};

// Used by one thread. A step reads in two parts, as an engine does: what is resident is pinned
// first, then what is missing comes in.
class PagePool {
 public:
  // pages: of the case; capacity: at least 1.
  PagePool(uint32_t pages, uint32_t capacity) : resident_(pages, false), capacity_(capacity) {}
  virtual ~PagePool() = default;

  bool resident(uint32_t page) const { return resident_[page]; }
  uint32_t capacity() const { return capacity_; }
  // Step number `now` reads its pages.
  virtual void Read(const Step& step, uint32_t now) = 0;
  // After step `now`: `pages`, of one layer, are expected at that layer's next step. Missing ones
  // come in, and all are held until then, as far as there is room.
  virtual void Prefetch(std::span<const uint32_t> pages, uint32_t now) = 0;

 protected:
  std::vector<bool> resident_;
  const uint32_t capacity_;
};

struct PoolRule {
  std::string name;
  std::function<std::unique_ptr<PagePool>(uint32_t pages, uint32_t capacity)> make;
};

// The rules compared, in the order of the tables. Belady's optimum is the last: it knows the
// future, and may leave a page out that it has just read, so no rule can miss less.
std::vector<PoolRule> PoolRules();

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_POOLS_H_
