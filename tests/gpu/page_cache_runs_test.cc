// SPDX-License-Identifier: Apache-2.0
//
// Goal: several runs of steps may use a page cache at once: what one has found stays until it has
// ended, whatever the others look up and in whatever order, and nobody reads a frame that another
// one is filling. Method: runs whose look-ups, copies and ends come in random turns, or from
// several threads, against the bytes that a page has, over more runs than there are numbers for.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/memory/arena.h"
#include "gpu/memory/page_cache.h"
#include "tests/gpu/fetch_reference.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::test::Random;
using attention::test::TestSeed;

constexpr uint32_t kPageBytes = 64;
using PageBytes = std::array<uint64_t, kPageBytes / sizeof(uint64_t)>;

PageBytes BytesOf(uint64_t page) {
  PageBytes bytes;
  bytes.fill(page);
  return bytes;
}

class PageCacheRuns : public testing::Test {
 protected:
  static constexpr uint64_t kSets = 16;

  void SetUp() override {
    const uint64_t bytes = kSets * (sizeof(CacheSet) + kCacheWays * kPageBytes);
    FakePair fake = MakeFakeDevice(bytes + (uint64_t{1} << 20), true);
    control_ = fake.control;
    device_ = std::move(fake.device);
    auto arena = Arena::Create(device_.get(), "page", bytes);
    ASSERT_TRUE(arena.ok());
    arena_ = *std::move(arena);
    auto memory = arena_->Allocate(bytes);
    ASSERT_TRUE(memory.ok());
    auto cache = PageCache::Create(device_.get(), *std::move(memory), kPageBytes);
    ASSERT_TRUE(cache.ok());
    cache_ = *std::move(cache);
  }

  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  std::shared_ptr<FakeControl> control_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Arena> arena_;
  std::shared_ptr<PageCache> cache_;
};

// A run, as a step over the cache makes it.
class CacheRun {
 public:
  explicit CacheRun(const std::shared_ptr<PageCache>& cache)
      : use_(PageCache::Use::Begin(cache, [] { return absl::OkStatus(); }).value()),
        cache_(use_->ref()),
        clock_(use_->clock(use_->number())) {}

  const PageCache::Use& use() const { return *use_; }
  // Asks for a page. What it must fill is filled later.
  FoundFrame LookUp(uint64_t page) {
    const FoundFrame found = FindFrame<HostMemory>(cache_, clock_, page);
    if (found.frame == kNoFrame) return found;
    read_.emplace_back(page, found.frame);
    if (found.fetch) to_fill_.emplace_back(page, found.frame);
    return found;
  }
  void FillOne() {
    if (to_fill_.empty()) return;
    const auto [page, frame] = to_fill_.back();
    to_fill_.pop_back();
    const PageBytes bytes = BytesOf(page);
    std::memcpy(BytesAt(frame), bytes.data(), kPageBytes);
    SetFilled<HostMemory>(cache_, clock_, page, frame);
  }
  // The end of its fetch stage, and its reading.
  void FillAndRead() {
    while (!to_fill_.empty()) FillOne();
    for (const auto& [page, frame] : read_) {
      PageBytes bytes;
      std::memcpy(bytes.data(), BytesAt(frame), kPageBytes);
      EXPECT_EQ(bytes, BytesOf(page)) << "frame " << frame;
    }
  }

 private:
  std::byte* BytesAt(uint32_t frame) const {
    return cache_.frames + uint64_t{frame} * cache_.page_bytes;
  }

  const std::unique_ptr<const PageCache::Use> use_;
  const PageCacheRef cache_;
  const CacheClock clock_;
  std::vector<std::pair<uint64_t, uint32_t>> read_, to_fill_;  // pages and frames
};

// Pages of small numbers are asked for more often.
uint64_t SomePage(Random* random) { return static_cast<uint64_t>(std::exp(random->Uniform() * 6)); }

TEST_F(PageCacheRuns, WhatARunFindsStaysUntilItsEnd) {
  constexpr uint64_t kRuns = (uint64_t{1} << kNumberBits) + 3000;
  constexpr uint64_t kAtOnce = 5;
  Random random(seed_);
  std::vector<std::unique_ptr<CacheRun>> running;
  uint64_t begun = 0, hits = 0, fetches = 0, in_place = 0;
  while (begun < kRuns || !running.empty()) {
    const uint64_t what = random.Below(20);
    if (running.empty() || (what < 4 && running.size() < kAtOnce && begun < kRuns)) {
      running.push_back(std::make_unique<CacheRun>(cache_));
      ++begun;
      continue;
    }
    // The first one may run while hundreds come and go, but no more than may be apart.
    const bool first_is_old =
        running.back()->use().number() - running.front()->use().number() > kRunsApart / 2;
    const bool the_first = first_is_old || running.size() == 1 || random.Below(50) == 0;
    const size_t at = the_first ? 0 : 1 + random.Below(running.size() - 1);
    CacheRun& run = *running[at];
    if (what < 16 && !first_is_old) {
      const FoundFrame found = run.LookUp(SomePage(&random));
      ++(found.frame == kNoFrame ? in_place : found.fetch ? fetches : hits);
      if (random.Below(2) == 0) run.FillOne();
    } else {
      run.FillAndRead();
      running.erase(running.begin() + static_cast<int64_t>(at));
    }
  }
  EXPECT_GT(hits, kRuns / 2);
  EXPECT_GT(fetches, kRuns / 4);
  EXPECT_LT(in_place, hits);
}

TEST_F(PageCacheRuns, WhatAnotherRunFillsIsNotRead) {
  CacheRun first(cache_), second(cache_);
  const FoundFrame found = first.LookUp(7);
  EXPECT_TRUE(found.fetch);
  EXPECT_EQ(first.LookUp(7).frame, found.frame) << "its own fetch stage waits for it";
  EXPECT_EQ(second.LookUp(7).frame, kNoFrame);
  first.FillOne();
  EXPECT_EQ(second.LookUp(7).frame, found.frame);
  EXPECT_FALSE(second.LookUp(7).fetch);
}

// A page that an earlier run uses, too, has the later one's number, and stays for both.
TEST_F(PageCacheRuns, APageStaysForTheLastOfItsRuns) {
  constexpr uint64_t kMany = 20 * kSets * kCacheWays;
  auto first = std::make_unique<CacheRun>(cache_), second = std::make_unique<CacheRun>(cache_);
  ASSERT_TRUE(second->LookUp(5).fetch);
  second->FillOne();
  ASSERT_NE(first->LookUp(5).frame, kNoFrame);  // after the later run
  first->FillAndRead();
  first.reset();
  CacheRun third(cache_);
  for (uint64_t page = 100; page < 100 + kMany; ++page) third.LookUp(page);
  third.FillAndRead();
  second->FillAndRead();
}

// A wave that runs again spares what its first run has found.
TEST_F(PageCacheRuns, ALaterRunOfAWaveSparesTheFirstOnes) {
  uint64_t first_run = 0;
  std::vector<std::pair<uint64_t, uint32_t>> found;
  {
    CacheRun first(cache_);
    first_run = first.use().number();
    for (uint64_t page = 1; page <= 20; ++page) found.emplace_back(page, first.LookUp(page).frame);
    first.FillAndRead();
  }
  {
    const CacheRun again(cache_);
    const CacheClock clock = again.use().clock(first_run);
    EXPECT_EQ(RunsFrom(clock.oldest, clock.run), 1u);
    for (uint64_t page = 100; page < 2000; ++page) {
      const FoundFrame other = FindFrame<HostMemory>(again.use().ref(), clock, page);
      if (other.fetch) SetFilled<HostMemory>(again.use().ref(), clock, page, other.frame);
    }
    for (const auto& [page, frame] : found) {
      if (frame == kNoFrame) continue;
      EXPECT_EQ(FindFrame<HostMemory>(again.use().ref(), clock, page, /*may_take=*/false).frame,
                frame);
    }
  }
  // A use by both counts once.
  const auto worth_of = [&](uint32_t frame) {
    const CacheRun any(cache_);
    return any.use().ref().sets[frame / kCacheWays].worths[frame % kCacheWays];
  };
  const auto [page, frame] = found.front();
  ASSERT_NE(frame, kNoFrame);
  const float once = worth_of(frame);
  EXPECT_EQ(once, 0) << "log2 of one use, at the cache's beginning";
  CacheRun(cache_).LookUp(page);
  EXPECT_GT(worth_of(frame), once);
  // But not for ever.
  for (uint32_t i = 0; i < kRunsApart; ++i) const CacheRun other(cache_);
  const CacheRun late(cache_);
  const CacheClock last = late.use().clock(first_run);
  EXPECT_EQ(last.oldest, last.run);
}

// A page that nobody has asked for in a whole round of numbers has one that may look like a later
// run's. Two runs that see it from the edge of what counts as later do not lose it to a third one.
TEST_F(PageCacheRuns, APageOfTheRoundBeforeStays) {
  constexpr uint64_t kPages = 6;  // of which all find a frame
  { CacheRun first(cache_); }
  {
    CacheRun second(cache_);  // number 1
    for (uint64_t page = 1; page <= kPages; ++page) ASSERT_TRUE(second.LookUp(page).fetch);
    second.FillAndRead();
  }
  for (uint64_t ahead = 3 * kRunsApart; ahead > 0; --ahead) {
    SCOPED_TRACE(ahead);
    // As if no run had been since: the pages keep their numbers.
    const uint64_t number = 1 + (uint64_t{1} << kNumberBits) - ahead;
    const auto clock_of = [&](uint64_t run, uint64_t oldest) {
      const auto modulo = [](uint64_t n) { return static_cast<uint32_t>(n % (1u << kNumberBits)); };
      return CacheClock{.run = modulo(run),
                        .first = modulo(run),
                        .oldest = modulo(oldest),
                        .age = 1000,  // what was used long ago is worth nothing
                        .filler = 0,
                        .only_looks = 0};
    };
    const CacheRun any(cache_);
    const uint64_t page = 1 + ahead % kPages;
    const CacheClock earlier = clock_of(number, number), later = clock_of(number + 1, number);
    const CacheClock evictors[] = {
        clock_of(number + 2, number + 1),  // when the earlier one has ended
        clock_of(number + 2 - kRunsApart, number + 3 - 2 * kRunsApart),  // as old as may be
    };
    for (const CacheClock& evictor : evictors) {
      PageCacheRef cache = any.use().ref();
      std::vector<CacheSet> sets(cache.sets, cache.sets + cache.set_count);
      cache.sets = sets.data();
      const FoundFrame found = FindFrame<HostMemory>(cache, later, page);
      FindFrame<HostMemory>(cache, earlier, page);
      for (uint64_t other = 100; other < 400; ++other) {
        const FoundFrame taken = FindFrame<HostMemory>(cache, evictor, other);
        EXPECT_TRUE(found.frame == kNoFrame || taken.frame != found.frame);
      }
    }
  }
}

TEST_F(PageCacheRuns, ARunWaitsForOneThatIsFarBehind) {
  auto behind = std::make_unique<CacheRun>(cache_);
  for (uint32_t i = 1; i < kRunsApart; ++i) const CacheRun other(cache_);
  EXPECT_EQ(PageCache::Use::BeginAtOnce(cache_), nullptr);
  const auto cancelled = [] { return absl::CancelledError("nobody waits"); };
  EXPECT_TRUE(absl::IsCancelled(PageCache::Use::Begin(cache_, cancelled).status()));
  std::atomic<bool> there{false};
  std::thread next([&] {
    const auto use = PageCache::Use::Begin(cache_, [] { return absl::OkStatus(); });
    ASSERT_TRUE(use.ok());
    EXPECT_EQ((*use)->number(), kRunsApart);
    there = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(there);
  behind.reset();
  next.join();
  EXPECT_TRUE(there);
}

TEST_F(PageCacheRuns, ThreadsRunBesideEachOther) {
  constexpr uint32_t kThreads = 4, kRunsEach = 2000;
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t] {
      Random random(seed_ + 1 + t);
      for (uint32_t r = 0; r < kRunsEach; ++r) {
        CacheRun run(cache_);
        for (int i = 0; i < 8; ++i) {
          run.LookUp(SomePage(&random));
          if (random.Below(3) == 0) run.FillOne();
        }
        run.FillAndRead();
        run.use().CountPages(8);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  // What is counted ages pages.
  const double uses = 8.0 * kThreads * kRunsEach;
  const CacheRun last(cache_);
  EXPECT_NEAR(last.use().clock(last.use().number()).age,
              uses / (kCacheHalfLife * static_cast<double>(cache_->frames())), 0.01);
}

}  // namespace
}  // namespace attnd::gpu::test
