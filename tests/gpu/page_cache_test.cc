// SPDX-License-Identifier: Apache-2.0
//
// Goal: segments that the device has no room for are answered from where they lie in host memory,
// with the bits of a device that has room, and whatever becomes of device and host memory
// meanwhile; a cache's frames hold what their owner words say. Method: the look-up itself, which
// host and device share, against a map, by one thread and by several; steps over a fake device that
// is too small, which checks every address that it is told.
#include "gpu/layout/page_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "tests/gpu/agreement.h"
#include "tests/gpu/fetch_reference.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::kTreeIndexes;
using attention::test::MakeRow;
using attention::test::Random;
using attention::test::RunStep;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSeed;
using attention::test::TestSequence;

// ---- the look-up ----

class PageCacheLookUp : public testing::Test {
 protected:
  static constexpr uint32_t kSets = 32, kFrames = kSets * kCacheWays;
  static constexpr uint32_t kOfSets = kCacheChoices * kCacheWays;  // frames that a page may lie in

  FoundFrame Find(uint64_t page) {
    const FoundFrame found = FindFrame<HostMemory>(ref_, clock_, page);
    if (found.fetch) {
      content_[found.frame] = page;
      SetFilled<HostMemory>(ref_, clock_, page, found.frame);
    }
    return found;
  }
  // Pages of these two sets, one more than they hold.
  static std::vector<uint64_t> PagesOfSets(uint32_t first, uint32_t second) {
    std::vector<uint64_t> pages;
    for (uint64_t page = 1; pages.size() <= kOfSets; ++page) {
      if (CacheSetOf(page, 0, kSets) == first && CacheSetOf(page, 1, kSets) == second) {
        pages.push_back(page);
      }
    }
    return pages;
  }
  void NextStep(double age = 0.01) {
    clock_.run = clock_.first = clock_.oldest = (clock_.run + 1) % (1u << kNumberBits);
    clock_.age += static_cast<float>(age);
  }

  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  std::vector<CacheSet> sets_ = std::vector<CacheSet>(kSets);
  PageCacheRef ref_ = {nullptr, sets_.data(), nullptr, kSets, 4096};
  CacheClock clock_ = {};
  std::map<uint32_t, uint64_t> content_;  // page by frame, as filled
};

TEST_F(PageCacheLookUp, FramesHoldWhatWasAskedFor) {
  Random random(seed_);
  uint64_t hits = 0, misses = 0, in_place = 0;
  for (int step = 0; step < 2000; ++step, NextStep()) {
    std::map<uint64_t, uint32_t> own;  // frame by page, of this step
    std::set<uint32_t> frames;
    for (uint32_t i = 0; i < 60; ++i) {
      // Pages of small numbers are asked for more often.
      const auto page = static_cast<uint64_t>(std::exp(random.Uniform() * 7));
      const FoundFrame found = Find(page);
      if (const auto before = own.find(page); before != own.end()) {
        if (before->second == kNoFrame) continue;  // another page's frame stayed in use
        EXPECT_EQ(found.frame, before->second) << "a page moved within a step";
        EXPECT_FALSE(found.fetch);
        continue;
      }
      own[page] = found.frame;
      if (found.frame == kNoFrame) {
        ++in_place;
        continue;
      }
      ++(found.fetch ? misses : hits);
      ASSERT_LT(found.frame, kFrames);
      EXPECT_EQ(content_.at(found.frame), page);
      EXPECT_TRUE(frames.insert(found.frame).second) << "two pages of a step share a frame";
    }
  }
  EXPECT_GT(hits, misses);
  EXPECT_GT(misses, 1000u);
  EXPECT_LT(in_place, misses / 10);
}

TEST_F(PageCacheLookUp, WhatAStepUsesStays) {
  const std::vector<uint64_t> pages = PagesOfSets(3, 9);
  for (uint32_t i = 0; i < kOfSets; ++i) {
    const FoundFrame found = Find(pages[i]);
    EXPECT_TRUE(found.fetch);
    EXPECT_THAT(found.frame / kCacheWays, testing::AnyOf(3, 9));
  }
  EXPECT_EQ(Find(pages[kOfSets]).frame, kNoFrame);
  NextStep();
  EXPECT_TRUE(Find(pages[kOfSets]).fetch);
}

TEST_F(PageCacheLookUp, ThePageOfLeastWorthGoes) {
  const std::vector<uint64_t> pages = PagesOfSets(0, 15);
  for (uint32_t i = 0; i < kOfSets; ++i) Find(pages[i]);
  for (int round = 0; round < 3; ++round) {  // all but number 5 again
    NextStep();
    for (uint32_t i = 0; i < kOfSets; ++i) {
      if (i != 5) {
        EXPECT_FALSE(Find(pages[i]).fetch);
      }
    }
  }
  NextStep();
  EXPECT_TRUE(Find(pages[kOfSets]).fetch);
  NextStep();
  EXPECT_TRUE(Find(pages[5]).fetch);
  // It took the place of the one that had come last: one use, if a recent one, for its four.
  NextStep();
  EXPECT_TRUE(Find(pages[kOfSets]).fetch);
  // Long ago, many uses are worth less than one now.
  NextStep(/*age=*/20);
  EXPECT_TRUE(Find(pages[5]).fetch);
  NextStep();
  EXPECT_FALSE(Find(pages[5]).fetch);
}

// Threads of one step: whatever the order of their looks, a frame that one was told is that page's
// when all have ended.
TEST_F(PageCacheLookUp, ThreadsOfAStepAgree) {
  constexpr uint32_t kThreads = 4, kPages = 400;
  for (int step = 0; step < 200; ++step, NextStep()) {
    const std::vector<CacheSet> before = sets_;
    std::vector<std::vector<std::pair<uint64_t, FoundFrame>>> found(kThreads);
    std::vector<std::thread> threads;
    for (uint32_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        Random random(seed_ + 1000 * static_cast<uint64_t>(step) + t);
        for (int i = 0; i < 40; ++i) {
          const uint64_t page = 1 + random.Below(kPages);
          found[t].emplace_back(page, FindFrame<HostMemory>(ref_, clock_, page));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::map<uint32_t, uint32_t> fetches;  // by frame
    for (const auto& of_thread : found) {
      for (const auto& [page, frame] : of_thread) {
        if (frame.frame == kNoFrame) continue;
        if (frame.fetch) ++fetches[frame.frame];
        const FrameOwner owner = FrameOwner::Of(*OwnerWordOf(ref_, frame.frame));
        EXPECT_EQ(owner.page, page);
        EXPECT_EQ(owner.run, clock_.run);
      }
    }
    for (const auto& of_thread : found) {
      for (const auto& [page, frame] : of_thread) {
        if (frame.fetch) SetFilled<HostMemory>(ref_, clock_, page, frame.frame);
      }
    }
    for (uint32_t frame = 0; frame < kFrames; ++frame) {  // one thread fills what has changed
      const auto owner = [&](const std::vector<CacheSet>& sets) {
        return FrameOwner::Of(sets[frame / kCacheWays].owners[frame % kCacheWays]).page;
      };
      EXPECT_EQ(fetches[frame], owner(before) == owner(sets_) ? 0u : 1u) << "frame " << frame;
    }
  }
}

// ---- steps ----

// A fifth of them: where memory decides, and not the policy.
std::vector<TestRow> SomeRowsOfLayer(TestSequence* sequence, uint32_t layer) {
  std::vector<TestRow> all = RowsOfLayer(sequence, layer), some;
  for (size_t r = 0; r < all.size(); r += 5) some.push_back(std::move(all[r]));
  return some;
}

void ExpectSameOutputs(const StepResult& a, const StepResult& b) {
  ASSERT_TRUE(a.status.ok()) << a.status;
  ASSERT_TRUE(b.status.ok()) << b.status;
  ASSERT_EQ(a.rows.size(), b.rows.size());
  for (size_t r = 0; r < a.rows.size(); ++r) {
    EXPECT_EQ(a.rows[r].out, b.rows[r].out) << "row " << r;
    EXPECT_EQ(a.rows[r].lse, b.rows[r].lse) << "row " << r;
  }
}

// A page counts in a wave's last run as if no other had been before it.
TEST_F(PageCacheLookUp, ARunKnowsWhatEarlierRunsBrought) {
  const auto look = [&](uint64_t page, PageSource at_hand) {
    const FoundFrame found = FindFrame<HostMemory>(ref_, clock_, page, at_hand != kFromCache);
    EXPECT_NE(found.frame, kNoFrame);
    const PageSource source = NoteSource<HostMemory>(ref_, clock_, found, at_hand);
    if (found.fetch) SetFilled<HostMemory>(ref_, clock_, page, found.frame);
    return source;
  };
  const auto begin = [&](uint32_t wave, uint32_t run) {
    clock_.run = clock_.first = clock_.oldest = wave;
    clock_.filler = wave << (kSourceBits + kRunBits) | run << kSourceBits;
  };
  begin(1, 0);
  EXPECT_EQ(look(1, kFromHost), kFromHost);
  begin(2, 0);
  EXPECT_EQ(look(2, kFromHost), kFromHost);
  EXPECT_EQ(look(2, kFromHost), kFromCache) << "the first look-up has fetched it";
  EXPECT_EQ(look(3, kCarriedDisk), kCarriedDisk);
  EXPECT_EQ(look(4, kCarriedMemory), kCarriedMemory);
  for (const uint32_t run : {1, 2}) {
    begin(2, run);
    EXPECT_EQ(look(1, kFromHost), kFromCache) << "another wave has fetched it";
    EXPECT_EQ(look(2, kFromHost), kFromHost);
    EXPECT_EQ(look(2, kFromHost), kFromCache) << "once in each run";
    EXPECT_EQ(look(3, kCarriedDisk), kCarriedDisk);
    for (int time = 0; time < 2; ++time) {  // no longer carried
      EXPECT_EQ(look(3, kFromCache), kCarriedDisk);
      EXPECT_EQ(look(4, kFromCache), kCarriedMemory);
    }
  }
  begin(3, 1);
  for (const uint64_t page : {1, 2, 3, 4}) EXPECT_EQ(look(page, kFromCache), kFromCache);
}

class PageCacheSteps : public testing::TestWithParam<attention::IndexSet> {
 protected:
  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
};

TEST_P(PageCacheSteps, BitsAreThoseOfADeviceWithRoom) {
  TestSequence sequence = HostSequence(0, GetParam());
  const FakeBackend large = MakeFakeBackend(SmallOptions(), true);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const std::vector<TestRow> rows = RowsOfLayer(&sequence, layer);
    const StepResult resident = RunStep(large.backend.get(), layer, rows);
    EXPECT_EQ(large.control->mapped_bytes(), 0u);
    EXPECT_EQ(large.backend->stats().cache.bytes, 0u);
    // With a cache of most of the pages, and of few.
    for (const uint64_t bytes : {uint64_t{1800} << 10, kFewPages}) {
      SCOPED_TRACE(bytes);
      const FakeBackend fake = MakeFakeBackend(OfPages(bytes), true);
      const StepResult step = RunStep(fake.backend.get(), layer, rows);
      ExpectSameOutputs(step, resident);
      EXPECT_TRUE(Agree(step, RunStep(MakeCpu().get(), layer, rows), rows));
      EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
      EXPECT_GT(fake.backend->stats().cache.bytes, bytes / 2);
      EXPECT_GT(fake.control->mapped_bytes(), 0u);
      for (size_t r = 0; r < rows.size(); ++r) {
        const attention::RowStats& stats = step.rows[r].stats;
        EXPECT_EQ(stats.host_tokens + stats.hbm_tokens, stats.zone_tokens + stats.exact_tokens);
        if (rows[r].policy.selector == attention::Selector::kAll) {
          EXPECT_EQ(stats.host_tokens, 2048u * 2 * rows[r].query_tokens);
        }
      }
    }
  }
}

// The rows' own statistics say which memory tokens came from; nothing else of them differs.
TEST_P(PageCacheSteps, StepsRepeatWithOneHeader) {
  TestSequence sequence = HostSequence(0, GetParam());
  const FakeBackend fake = MakeFakeBackend(OfPages(kFewPages), true);
  std::vector<TestRow> rows = RowsOfLayer(&sequence, 0);
  rows.resize(20);  // whose queries take less than an index
  const StepResult first = RunStep(fake.backend.get(), 0, rows);
  ExpectSameOutputs(RunStep(fake.backend.get(), 0, rows), first);
  const uint64_t kinds = fake.control->kinds();
  const uint64_t sent = fake.backend->stats().bytes_to_device;
  ExpectSameOutputs(RunStep(fake.backend.get(), 0, rows), first);
  EXPECT_EQ(fake.control->kinds(), kinds) << "a graph could not launch the step again";
  EXPECT_LT(fake.backend->stats().bytes_to_device - sent, 100000u);  // no index again
}

TEST_P(PageCacheSteps, MemoryIsGivenBackWithTheSequences) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kFewPages), true);
  {
    TestSequence sequence = HostSequence(0, GetParam());
    const std::vector<TestRow> rows = RowsOfLayer(&sequence, 1);
    ASSERT_TRUE(RunStep(fake.backend.get(), 1, rows).status.ok());
    EXPECT_GT(fake.control->mapped_bytes(), 0u);
  }
  EXPECT_EQ(fake.control->mapped_bytes(), 0u);
  EXPECT_EQ(fake.backend->stats().cache.bytes, 0u);
  EXPECT_EQ(fake.backend->stats().pages.used_bytes, 0u);
  EXPECT_EQ(fake.backend->stats().index.used_bytes, 0u);
}

TEST_P(PageCacheSteps, WithoutPinnedMemoryTheCpuAnswers) {
  TestSequence sequence = HostSequence(0, GetParam());
  const FakeBackend fake = MakeFakeBackend(OfPages(kFewPages), true);
  fake.control->Set({.mapping = 0});
  const std::vector<TestRow> rows = RowsOfLayer(&sequence, 0);
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
  EXPECT_EQ(fake.backend->stats().fallback_steps, 1u);
  EXPECT_TRUE(fake.backend->Health().ok());
}

// Sequences that are resident make room when others do not fit; all are answered, in turns and in
// one batch.
TEST_P(PageCacheSteps, ResidentsMakeRoom) {
  const FakeBackend fake = MakeFakeBackend(OfPages(uint64_t{5} << 20), true);
  std::vector<TestSequence> sequences;
  for (uint64_t s = 0; s < 4; ++s) sequences.push_back(HostSequence(s, GetParam()));
  std::vector<StepResult> alone;
  std::vector<TestRow> all;
  for (int round = 0; round < 2; ++round) {
    for (TestSequence& sequence : sequences) {
      const std::vector<TestRow> rows = SomeRowsOfLayer(&sequence, 0);
      const StepResult step = RunStep(fake.backend.get(), 0, rows);
      EXPECT_TRUE(Agree(step, RunStep(MakeCpu().get(), 0, rows), rows));
      if (round == 0) continue;
      alone.push_back(step);
      all.insert(all.end(), rows.begin(), rows.end());
    }
  }
  EXPECT_GT(fake.backend->stats().cache.bytes, 0u);
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
  const StepResult together = RunStep(fake.backend.get(), 0, all);
  ASSERT_TRUE(together.status.ok()) << together.status;
  size_t row = 0;
  for (const StepResult& step : alone) {
    for (const auto& expected : step.rows) {
      EXPECT_EQ(together.rows[row].out, expected.out) << "row " << row;
      ++row;
    }
  }
}

// The segments fit, and then the tail does not.
TEST_P(PageCacheSteps, ATailMakesRoom) {
  TestSequence sequence = HostSequence(0, GetParam());
  const uint64_t segments = 2048 * uint64_t{1024};  // bytes of pages
  const FakeBackend fake = MakeFakeBackend(OfPages(segments + 4096), true);
  const std::vector<TestRow> rows = RowsOfLayer(&sequence, 0);
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
  EXPECT_GT(fake.backend->stats().cache.bytes, 0u);
}

// The rows before the one that does not fit have pinned what would have to make room: they are
// answered first.
TEST_P(PageCacheSteps, ABatchThatDoesNotFitIsAnsweredInWaves) {
  const FakeBackend fake = MakeFakeBackend(OfPages(uint64_t{5} << 20), true);
  std::vector<TestSequence> sequences;
  std::vector<TestRow> rows;
  for (uint64_t s = 0; s < 4; ++s) sequences.push_back(HostSequence(s, GetParam()));
  for (TestSequence& sequence : sequences) {
    for (TestRow& row : SomeRowsOfLayer(&sequence, 0)) rows.push_back(std::move(row));
  }
  for (int round = 0; round < 2; ++round) {
    EXPECT_TRUE(
        Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
    EXPECT_GT(fake.backend->stats().cache.bytes, uint64_t{4} << 20);
    EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
  }
}

// Host memory has every byte: the CPU goes on, and what was mapped is unmapped in the end.
TEST_P(PageCacheSteps, AFailureAtAnyCallLosesNothing) {
  TestSequence sequence = HostSequence(0, GetParam());
  std::vector<TestRow> rows = RowsOfLayer(&sequence, 0);
  rows.resize(4);
  const auto cpu = MakeCpu();
  uint64_t failures = 0;
  for (uint64_t call = 0;; ++call) {
    SCOPED_TRACE(call);
    FakeBackend fake = MakeFakeBackend(OfPages(kFewPages), true);
    fake.control->Set({.call = call});
    for (int step = 0; step < 2; ++step) {
      EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(cpu.get(), 0, rows), rows));
    }
    const bool failed = !fake.backend->Health().ok();
    failures += failed ? 1 : 0;
    fake.backend.reset();
    if (!failed) break;
  }
  EXPECT_GT(failures, 4u);
}

// Of mapped memory, layer by layer.
TEST_P(PageCacheSteps, RefusedMemoryLosesNothing) {
  TestSequence sequence = HostSequence(0, GetParam());
  const auto cpu = MakeCpu();
  for (uint64_t mapping = 0; mapping < 5; ++mapping) {
    SCOPED_TRACE(mapping);
    const FakeBackend fake = MakeFakeBackend(OfPages(kFewPages), true);
    fake.control->Set({.mapping = mapping});
    for (const uint32_t layer : {0, 1, 0}) {
      const std::vector<TestRow> rows = SomeRowsOfLayer(&sequence, layer);
      EXPECT_TRUE(
          Agree(RunStep(fake.backend.get(), layer, rows), RunStep(cpu.get(), layer, rows), rows));
    }
    EXPECT_TRUE(fake.backend->Health().ok());
    if (mapping < 4) {
      EXPECT_GT(fake.backend->stats().fallback_steps, 0u);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Indexes, PageCacheSteps,
                         testing::Values(attention::kClusterIndexes, kTreeIndexes));

}  // namespace
}  // namespace attnd::gpu::test
