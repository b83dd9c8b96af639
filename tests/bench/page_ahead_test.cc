// SPDX-License-Identifier: Apache-2.0
//
// Counts of pages that are asked for ahead of a step's choice, beside a reference that works on
// sets, from the rules' definitions alone.
#include "bench/pages/page_ahead.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "bench/pages/page_pool_rules.h"
#include "bench/pages/page_trace_file.h"
#include "tests/bench/random_trace.h"
#include "tests/temporary_folder.h"

namespace attnd::bench {
namespace {

using Source = AheadRule::Source;
// What the rule names in a step of the trace, by place; pages are those of the case.
std::vector<uint32_t> Named(const PageTrace& trace, const AheadRule& rule, uint32_t token,
                            uint32_t layer) {
  std::vector<std::pair<uint32_t, uint32_t>> places;  // (place, page)
  for (uint32_t i = 0; i < kLayerPages; ++i) {
    const size_t at = (size_t{token} * kLayers + layer) * kLayerPages + i;
    const uint32_t page = layer * kLayerPages + i;
    const bool read = trace.ranks[at] == 0;
    const bool read_last = token > 0 && trace.ranks[at - trace.pages()] == 0;
    const EarlyRank opened = trace.early[0][at], scored = trace.early[1][at];
    const auto within = [&](EarlyRank rank) { return rank != 0xffff && rank < 1000 * rule.share; };
    if (rule.source == Source::kLastSelection && read_last) places.push_back({0, page});
    if (rule.source == Source::kReadAtOpened && read) places.push_back({0, page});
    if (rule.source == Source::kReadAtScored && read) places.push_back({0, page});
    if (rule.source == Source::kOpened && within(opened)) places.push_back({opened, page});
    if (rule.source == Source::kScored && within(scored)) places.push_back({scored, page});
  }
  std::sort(places.begin(), places.end());
  std::vector<uint32_t> pages;
  for (const auto& [place, page] : places) pages.push_back(page);
  return pages;
}

uint64_t RoomFor(const AheadRule& rule, const AheadRoom& room) {
  if (rule.source == Source::kLastSelection) return room.lag1;
  const bool opened = rule.source == Source::kOpened || rule.source == Source::kReadAtOpened;
  return room.lag0[opened ? 0 : 1];
}

AheadCounts Reference(const PageTrace& trace, const PageCase& page_case, const AheadRule& rule,
                      const AheadRoom& room, PagePool* pool) {
  AheadCounts counts;
  uint32_t number = 0;
  for (uint32_t token = 0; token < kTokens; ++token) {
    for (uint32_t layer = 0; layer < kLayers; ++layer, ++number) {
      const Pages read = Read(trace, token, layer);
      Pages before;
      if (rule.changed_only && token > 0) {
        for (const uint32_t page : Named(trace, rule, token - 1, layer)) before.insert(page);
      }
      uint64_t sent = 0;
      Pages missed;
      for (const uint32_t page : read) {
        if (!pool->resident(page)) missed.insert(page);
      }
      AheadCounts of_step;
      for (const uint32_t page : Named(trace, rule, token, layer)) {
        if (pool->resident(page) || before.contains(page)) continue;
        ++of_step.asked;
        const bool in_time = sent < RoomFor(rule, room);
        sent += in_time;
        if (missed.contains(page)) {
          ++(in_time ? of_step.in_time : of_step.late);
        } else {
          of_step.wasted += in_time;
        }
      }
      if (token >= kWarm) {
        counts.read += read.size();
        counts.missed += missed.size();
        counts.asked += of_step.asked;
        counts.in_time += of_step.in_time;
        counts.late += of_step.late;
        counts.wasted += of_step.wasted;
      }
      pool->Read(page_case.steps[number], number);
    }
  }
  return counts;
}

void ExpectCounts(const AheadCounts& counts, const AheadCounts& expected) {
  EXPECT_EQ(counts.read, expected.read);
  EXPECT_EQ(counts.missed, expected.missed);
  EXPECT_EQ(counts.in_time, expected.in_time);
  EXPECT_EQ(counts.late, expected.late);
  EXPECT_EQ(counts.asked, expected.asked);
  EXPECT_EQ(counts.wasted, expected.wasted);
}

TEST(PageAhead, CountsAreThoseOfTheDefinitions) {
  const AheadRoom rooms[] = {{{3, 2}, 1}, {{1000, 1000}, 1000}, {{0, 0}, 0}};
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    const PageTrace trace = RandomTrace(seed);
    const PageCase page_case = CaseOf({&trace});
    for (const Source source : {Source::kNothing, Source::kLastSelection, Source::kOpened,
                                Source::kScored, Source::kReadAtOpened, Source::kReadAtScored}) {
      for (const double share : {0.5, 1.0, std::numeric_limits<double>::infinity()}) {
        for (const bool changed_only : {false, true}) {
          for (const AheadRoom& room : rooms) {
            const AheadRule rule{"", source, share, changed_only};
            SCOPED_TRACE(testing::Message()
                         << "seed " << seed << " source " << static_cast<int>(source) << " share "
                         << share << " changed " << changed_only);
            const PoolRule lru = Lru("");
            const auto pool = lru.make(page_case.pages, 20);
            const auto same = lru.make(page_case.pages, 20);
            ExpectCounts(CountAhead(page_case, rule, room, pool.get()),
                         Reference(trace, page_case, rule, room, same.get()));
          }
        }
      }
    }
  }
}

TEST(PageAhead, ADenseStepInBetweenIsNoLastStep) {
  const PageTrace trace = RandomTrace(5);
  PageCase page_case = CaseOf({&trace});
  const AheadRule rule{"", Source::kLastSelection, 1, false};
  const AheadRoom room{{0, 0}, 1000};
  NoPool pool(page_case.pages, 1);
  const AheadCounts without = CountAhead(page_case, rule, room, &pool);

  AddDenseStep(&page_case);
  ExpectCounts(CountAhead(page_case, rule, room, &pool), without);
}

TEST(PageAhead, PoolsOfALastStepKeepThatAlone) {
  const PageTrace trace = RandomTrace(6);
  const PageCase page_case = CaseOf({&trace});
  for (const bool opened : {false, true}) {
    const auto pool = (opened ? LastOpened("") : LastRead("")).make(page_case.pages, 1);
    for (uint32_t i = 0; i < page_case.steps.size(); ++i) {
      pool->Read(page_case.steps[i], i);
      const uint32_t token = i / kLayers, layer = i % kLayers;
      Pages kept = Read(trace, token, layer);
      const AheadRule all{"", Source::kOpened, std::numeric_limits<double>::infinity(), false};
      if (opened) {
        for (const uint32_t page : Named(trace, all, token, layer)) kept.insert(page);
      }
      for (uint32_t page = layer * kLayerPages; page < (layer + 1) * kLayerPages; ++page) {
        ASSERT_EQ(pool->resident(page), kept.contains(page)) << "step " << i << " page " << page;
      }
    }
  }
}

TEST(PageTraceFile, IsReadAsItWasWritten) {
  const test::TemporaryFolder folder;
  const std::string path = std::filesystem::path(folder.path()) / "a.trace";
  const PageTrace trace = RandomTrace(7);
  ASSERT_TRUE(WritePageTrace(path, trace).ok());
  const auto read = ReadPageTrace(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->tokens, trace.tokens);
  EXPECT_EQ(read->layers, trace.layers);
  EXPECT_EQ(read->layer_pages, trace.layer_pages);
  EXPECT_EQ(read->clusters, trace.clusters);
  EXPECT_EQ(read->page_bytes, trace.page_bytes);
  EXPECT_EQ(read->ranks, trace.ranks);
  EXPECT_EQ(read->early, trace.early);

  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  EXPECT_THAT(ReadPageTrace(path).status().message(), testing::HasSubstr("ends early"));
}

}  // namespace
}  // namespace attnd::bench
