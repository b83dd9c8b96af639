// SPDX-License-Identifier: Apache-2.0
#include "bench/pages/page_behind.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace attnd::bench {
namespace {

class BehindCounter {
 public:
  BehindCounter(const PageCase& page_case, PagePool* cache, PagePool* pool)
      : case_(page_case), cache_(cache), pool_(pool), known_(page_case.pages, false) {}

  BehindCounts Run() {
    for (uint32_t i = 0; i < case_.steps.size(); ++i) {
      const Step& step = case_.steps[i];
      Step missed = step;
      std::erase_if(missed.pages, [&](uint32_t page) { return cache_->resident(page); });
      Last& last = last_[{step.sequence, step.layer}];
      if (step.counted) Count(missed, last);
      for (const uint32_t page : step.pages) known_[page] = true;
      cache_->Read(step, i);
      pool_->Read(missed, i);
      // A dense step in between says nothing about the next one.
      const bool dense = !step.counted && step.pages.size() == step.ranks.size();
      if (!dense) last = {std::move(missed.pages), step.pages};
    }
    return counts_;
  }

 private:
  // Of a layer's last step.
  struct Last {
    std::vector<uint32_t> brought, selected;
  };

  bool InNoMemory(uint32_t page) const { return !cache_->resident(page) && !pool_->resident(page); }

  void Count(const Step& missed, const Last& last) {
    counts_.cache_misses += missed.pages.size();
    for (const uint32_t page : missed.pages) {
      if (!InNoMemory(page)) continue;
      ++counts_.misses;
      counts_.first += known_[page] ? 0 : 1;
    }
    for (const uint32_t page : last.brought) Judge(kBroughtLast, page, missed);
    for (const uint32_t page : last.selected) Judge(kSelectedLast, page, missed);
  }
  void Judge(BehindGuess guess, uint32_t page, const Step& missed) {
    if (!InNoMemory(page)) return;
    ++counts_.guessed[guess];
    counts_.right[guess] +=
        std::binary_search(missed.pages.begin(), missed.pages.end(), page) ? 1 : 0;
  }

  const PageCase& case_;
  PagePool* const cache_;
  PagePool* const pool_;
  std::vector<bool> known_;                             // pages that some step has read
  std::map<std::pair<uint32_t, uint32_t>, Last> last_;  // by (sequence, layer)
  BehindCounts counts_;
};

}  // namespace

BehindCounts CountBehind(const PageCase& page_case, PagePool* cache, PagePool* pool) {
  return BehindCounter(page_case, cache, pool).Run();
}

}  // namespace attnd::bench
