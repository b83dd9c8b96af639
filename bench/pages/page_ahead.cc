// SPDX-License-Identifier: Apache-2.0
#include "bench/pages/page_ahead.h"

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "bench/pages/page_pool_rules.h"

namespace attnd::bench {
namespace {

using Source = AheadRule::Source;

class AheadCounter {
 public:
  AheadCounter(const AheadRule& rule, const AheadRoom& room, PagePool* pool)
      : rule_(rule), room_(room), pool_(pool) {}

  void Count(const Step& step) {
    // A dense step in between says nothing about the next one.
    if (!step.counted && step.pages.size() == step.ranks.size()) return;
    Named& last = last_[{step.sequence, step.layer}];
    std::vector<uint32_t> named = Name(step, last);
    if (step.counted) CountPages(step, ToAskFor(named, last));
    std::sort(named.begin(), named.end());
    last = {std::move(named), step.pages};
  }
  const AheadCounts& counts() const { return counts_; }

 private:
  // Of a layer's last step, both ascending.
  struct Named {
    std::vector<uint32_t> by_rule, read;
  };

  // The pages that the rule names, likeliest first.
  std::vector<uint32_t> Name(const Step& step, const Named& last) const {
    switch (rule_.source) {
      case Source::kNothing:
        return {};
      case Source::kLastSelection:
        return last.read;
      case Source::kOpened:
        return InOrder(step, kOpened);
      case Source::kScored:
        return InOrder(step, kScored);
      case Source::kReadAtOpened:
      case Source::kReadAtScored:
        return step.pages;
    }
    return {};
  }

  std::vector<uint32_t> InOrder(const Step& step, EarlyMoment moment) const {
    const std::span<const EarlyRank> ranks = step.early[moment];
    const double limit = rule_.share * kEarlyRankUnit;
    std::vector<uint32_t> pages;
    for (uint32_t i = 0; i < ranks.size(); ++i) {
      if (ranks[i] != kNotLikely && ranks[i] < limit) pages.push_back(step.first_page + i);
    }
    std::stable_sort(pages.begin(), pages.end(), [&](uint32_t a, uint32_t b) {
      return ranks[a - step.first_page] < ranks[b - step.first_page];
    });
    return pages;
  }

  std::vector<uint32_t> ToAskFor(std::vector<uint32_t> named, const Named& last) const {
    std::erase_if(named, [&](uint32_t page) {
      return pool_->resident(page) ||
             (rule_.changed_only &&
              std::binary_search(last.by_rule.begin(), last.by_rule.end(), page));
    });
    return named;
  }

  void CountPages(const Step& step, const std::vector<uint32_t>& asked) {
    const auto reads = [&](uint32_t page) {
      return std::binary_search(step.pages.begin(), step.pages.end(), page);
    };
    counts_.read += step.pages.size();
    counts_.missed +=
        static_cast<uint64_t>(std::count_if(step.pages.begin(), step.pages.end(),
                                            [&](uint32_t page) { return !pool_->resident(page); }));
    counts_.asked += asked.size();
    const size_t sent = std::min<uint64_t>(asked.size(), Room());
    const auto useful = static_cast<uint64_t>(
        std::count_if(asked.begin(), asked.begin() + static_cast<ptrdiff_t>(sent), reads));
    counts_.in_time += useful;
    counts_.wasted += sent - useful;
    counts_.late += static_cast<uint64_t>(
        std::count_if(asked.begin() + static_cast<ptrdiff_t>(sent), asked.end(), reads));
  }

  uint64_t Room() const {
    switch (rule_.source) {
      case Source::kNothing:
        return 0;
      case Source::kLastSelection:
        return room_.lag1;
      case Source::kOpened:
      case Source::kReadAtOpened:
        return room_.lag0[kOpened];
      case Source::kScored:
      case Source::kReadAtScored:
        return room_.lag0[kScored];
    }
    return 0;
  }

  const AheadRule& rule_;
  const AheadRoom room_;
  PagePool* const pool_;
  std::map<std::pair<uint32_t, uint32_t>, Named> last_;  // by (sequence, layer)
  AheadCounts counts_;
};

// Keeps a layer's last step, whatever its capacity.
class LastStepPool : public PagePool {
 public:
  LastStepPool(uint32_t pages, uint32_t capacity, bool opened)
      : PagePool(pages, capacity), opened_(opened) {}

  void Read(const Step& step, uint32_t /*now*/) override {
    for (size_t i = 0; i < step.ranks.size(); ++i) {
      resident_[step.first_page + i] = opened_ && step.early[kOpened][i] != kNotLikely;
    }
    for (const uint32_t page : step.pages) resident_[page] = true;
  }
  void Prefetch(std::span<const uint32_t> /*pages*/, uint32_t /*now*/) override {}

 private:
  const bool opened_;
};

}  // namespace

AheadCounts CountAhead(const PageCase& page_case, const AheadRule& rule, const AheadRoom& room,
                       PagePool* pool) {
  AheadCounter counter(rule, room, pool);
  for (uint32_t i = 0; i < page_case.steps.size(); ++i) {
    counter.Count(page_case.steps[i]);
    pool->Read(page_case.steps[i], i);
  }
  return counter.counts();
}

PoolRule LastRead(std::string name) { return MakeRule<LastStepPool>(std::move(name), false); }
PoolRule LastOpened(std::string name) { return MakeRule<LastStepPool>(std::move(name), true); }

}  // namespace attnd::bench
