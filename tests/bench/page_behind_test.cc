// SPDX-License-Identifier: Apache-2.0
//
// Counts of what steps find neither in the GPU's cache nor in the pool behind it, and of guesses at
// it, beside a reference that works on sets, from the definitions alone.
#include "bench/pages/page_behind.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "bench/pages/page_pool_rules.h"
#include "tests/bench/random_trace.h"

namespace attnd::bench {
namespace {

using Traces = std::vector<const PageTrace*>;

// The pages that are in neither pool.
Pages InNoMemory(const Pages& pages, const PagePool& cache, const PagePool& pool) {
  Pages found;
  for (const uint32_t page : pages) {
    if (!cache.resident(page) && !pool.resident(page)) found.insert(page);
  }
  return found;
}

uint64_t InBoth(const Pages& a, const Pages& b) {
  std::vector<uint32_t> both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return both.size();
}

class Reference {
 public:
  Reference(const Traces& traces, PagePool* cache, PagePool* pool)
      : traces_(traces), page_case_(CaseOf(traces)), cache_(cache), pool_(pool) {}

  BehindCounts Run() {
    for (uint32_t token = 0; token < kTokens; ++token) {
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        for (uint32_t sequence = 0; sequence < traces_.size(); ++sequence) {
          ReadStep(token, layer, sequence);
        }
      }
    }
    return counts_;
  }

 private:
  // Pages of the case: the sequences' lie one behind the other.
  Pages PagesOf(uint32_t token, uint32_t layer, uint32_t sequence) const {
    Pages pages;
    for (const uint32_t page : Read(*traces_[sequence], token, layer)) {
      pages.insert(sequence * traces_[0]->pages() + page);
    }
    return pages;
  }

  void ReadStep(uint32_t token, uint32_t layer, uint32_t sequence) {
    const Pages read = PagesOf(token, layer, sequence);
    Pages missed;
    for (const uint32_t page : read) {
      if (!cache_->resident(page)) missed.insert(page);
    }
    Pages& brought = brought_[{layer, sequence}];
    if (token >= kWarm) Count(read, missed, brought, PagesOf(token - 1, layer, sequence));
    brought = missed;
    known_.insert(read.begin(), read.end());
    Step step = page_case_.steps[number_];
    cache_->Read(step, number_);
    step.pages.assign(missed.begin(), missed.end());
    pool_->Read(step, number_++);
  }

  void Count(const Pages& read, const Pages& missed, const Pages& brought, const Pages& selected) {
    const Pages nowhere = InNoMemory(read, *cache_, *pool_);
    counts_.cache_misses += missed.size();
    counts_.misses += nowhere.size();
    counts_.first += nowhere.size() - InBoth(nowhere, known_);
    const Pages guesses[] = {InNoMemory(brought, *cache_, *pool_),
                             InNoMemory(selected, *cache_, *pool_)};
    for (size_t guess = 0; guess < 2; ++guess) {
      counts_.guessed[guess] += guesses[guess].size();
      counts_.right[guess] += InBoth(guesses[guess], read);
    }
  }

  const Traces& traces_;
  const PageCase page_case_;
  PagePool* const cache_;
  PagePool* const pool_;
  uint32_t number_ = 0;
  Pages known_;
  std::map<std::pair<uint32_t, uint32_t>, Pages> brought_;  // by layer and sequence
  BehindCounts counts_;
};

void ExpectCounts(const BehindCounts& counts, const BehindCounts& expected) {
  EXPECT_EQ(counts.cache_misses, expected.cache_misses);
  EXPECT_EQ(counts.misses, expected.misses);
  EXPECT_EQ(counts.first, expected.first);
  EXPECT_EQ(counts.guessed, expected.guessed);
  EXPECT_EQ(counts.right, expected.right);
}

TEST(PageBehind, CountsAreThoseOfTheDefinitions) {
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    const PageTrace first = RandomTrace(seed), second = RandomTrace(seed + 100);
    for (const Traces& traces : {Traces{&first}, Traces{&first, &second}}) {
      for (const uint32_t cache_pages : {1u, 6u, 20u}) {
        for (const uint32_t pool_pages : {1u, 10u, 60u}) {
          SCOPED_TRACE(testing::Message()
                       << "seed " << seed << ", " << traces.size() << " sequences, " << cache_pages
                       << " and " << pool_pages << " pages");
          const PageCase page_case = CaseOf(traces);
          const PoolRule lru = Lru("");
          const auto make = [&](uint32_t pages) { return lru.make(page_case.pages, pages); };
          const auto cache = make(cache_pages), pool = make(pool_pages);
          const auto same_cache = make(cache_pages), same_pool = make(pool_pages);
          const BehindCounts expected = Reference(traces, same_cache.get(), same_pool.get()).Run();
          ExpectCounts(CountBehind(page_case, cache.get(), pool.get()), expected);
        }
      }
    }
  }
}

TEST(PageBehind, ADenseStepInBetweenIsNoLastStep) {
  const PageTrace trace = RandomTrace(5);
  PageCase page_case = CaseOf({&trace});
  NoPool cache(page_case.pages, 1), pool(page_case.pages, 1);
  BehindCounts without = CountBehind(page_case, &cache, &pool);
  AddDenseStep(&page_case);
  const BehindCounts with = CountBehind(page_case, &cache, &pool);
  EXPECT_LE(with.first, without.first);
  without.first = with.first;  // it has read pages, too
  ExpectCounts(with, without);
}

}  // namespace
}  // namespace attnd::bench
