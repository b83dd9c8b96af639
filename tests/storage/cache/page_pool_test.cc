// SPDX-License-Identifier: Apache-2.0
//
// Goal: PagePool hands no frame out twice, evicts only what is ready and unpinned, keeps its books
// exactly, and keeps what is used. Method: seeded random operations, after each of which a plain
// list of what should be there is compared with the tables, and every frame's bytes with a pattern
// of its own; single cases for what the operations would seldom meet.
#include "storage/cache/page_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "tests/storage/files/segment_samples.h"

namespace attnd::storage::test {
namespace {

using State = PageFrame::State;

constexpr uint64_t kGuaranteed = uint64_t{1} << 20;  // 16 slabs
constexpr uint64_t kSlab = uint64_t{64} << 10;
constexpr uint64_t kSlots = 2000;

// A system that gives so much and no more.
struct Budget {
  uint64_t left = 0;
  uint64_t taken = 0;
  PageMemory memory() {
    return {[this](uint64_t bytes) {
              if (bytes > left) return false;
              left -= bytes;
              taken += bytes;
              return true;
            },
            [this](uint64_t bytes) {
              EXPECT_LE(bytes, taken) << "more is given back than was taken";
              left += bytes;
              taken -= bytes;
            }};
  }
};

PageMemory NoMore() {
  return {[](uint64_t) { return false; }, [](uint64_t) { ADD_FAILURE() << "nothing was taken"; }};
}

// A page that is there, ready, and pinned by nobody.
PageFrame* Put(PagePool* pool, PageTable* table, uint64_t slot, uint32_t page_bytes) {
  PageFrame* const frame = pool->Take(page_bytes);
  if (frame == nullptr) return nullptr;
  pool->Fill(frame, table, slot);
  frame->state = State::kReady;
  pool->Use(frame);
  return frame;
}

// Of how many pages nothing is in memory. Random operations spend their time here, compiled without
// optimisation.
size_t Missing(const PageTable& table) {
  size_t missing = 0;
  const PageEntry* const end = table.data() + table.size();
  for (const PageEntry* entry = table.data(); entry != end; ++entry) {
    if (entry->frame == nullptr) ++missing;
  }
  return missing;
}

// What should be in the pool.
struct Page {
  PageFrame* frame = nullptr;
  PageTable* table = nullptr;  // null: dropped, but pinned
  uint64_t slot = 0;
  uint32_t page_bytes = 0;
  uint32_t pins = 0;
  bool ready = false;
  bool prefetched = false;
  uint64_t pattern = 0;
};

class PoolModel {
 public:
  explicit PoolModel(uint64_t seed)
      : random_(seed),
        budget_{random_.Below(20) * kSlab},
        pool_(kGuaranteed, budget_.memory()),
        tables_(3, PageTable(kSlots)) {
    const uint32_t any = 16 + random_.Below32(kSlab - 15);  // two patterns long at least
    sizes_ = {4096, 1000 + random_.Below32(20000), any};
  }

  void Step() {
    switch (random_.Below(10)) {
      case 0:
      case 1:
      case 2:
      case 3:
        return TakeOne();
      case 4:
        return OnOne([&](Page* page) { Pin(page); });
      case 5:
      case 6:
        return OnOne([&](Page* page) { Unpin(page); });
      case 7:
        return OnOne([&](Page* page) { UseOrReady(page); });
      case 8:
        return OnOne([&](Page* page) { Ready(page); });
      default:
        return random_.Below(4) == 0 ? Shrink() : OnOne([&](Page* page) { Drop(page); });
    }
  }

  // Finds out which pages the pool has evicted, and compares everything.
  void Check() {
    std::erase_if(pages_, [&](const Page& page) {
      if (!Evicted(page)) return false;
      EXPECT_EQ((*page.table)[page.slot].frame, nullptr);
      EXPECT_TRUE(page.ready && page.pins == 0) << "a page in use was evicted";
      ++evictions_;
      if (page.prefetched) ++wasted_;
      return true;
    });
    uint64_t resident = 0, torn = 0;
    for (const Page& page : pages_) {
      resident += page.page_bytes;
      if (!PatternHolds(page)) ++torn;
    }
    EXPECT_EQ(torn, 0u) << "two frames share memory";
    size_t in_tables = 0;
    for (const PageTable& table : tables_) {
      in_tables += kSlots - Missing(table);
    }
    EXPECT_EQ(in_tables,
              static_cast<size_t>(std::count_if(pages_.begin(), pages_.end(), [](const Page& page) {
                return page.table != nullptr;
              })));
    EXPECT_EQ(pool_.resident_bytes(), resident);
    EXPECT_EQ(pool_.evictions(), evictions_);
    EXPECT_EQ(pool_.wasted_prefetches(), wasted_);
    EXPECT_EQ(pool_.slab_bytes() - std::min(pool_.slab_bytes(), kGuaranteed), budget_.taken);
  }

  uint64_t evictions() const { return evictions_; }

 private:
  template <typename Do>
  void OnOne(Do what) {
    if (!pages_.empty()) what(&pages_[random_.Below(pages_.size())]);
  }

  // A page that was dropped is pinned, and stays.
  static bool Evicted(const Page& page) {
    return page.table != nullptr && (*page.table)[page.slot].frame != page.frame;
  }

  // First and last word: neighbours that overlap would meet there.
  static bool PatternHolds(const Page& page) {
    uint64_t first = 0, last = 0;
    const size_t bytes = std::min<size_t>(sizeof(first), page.page_bytes);
    std::memcpy(&first, page.frame->data, bytes);
    std::memcpy(&last, page.frame->data + page.page_bytes - bytes, bytes);
    uint64_t expected = 0;
    std::memcpy(&expected, &page.pattern, bytes);
    return first == expected && last == expected;
  }

  void TakeOne() {
    const uint32_t page_bytes = sizes_[random_.Below(sizes_.size())];
    PageTable* const table = &tables_[random_.Below(tables_.size())];
    const uint64_t slot = random_.Below(kSlots);
    if ((*table)[slot].frame != nullptr) return;
    const bool evictable = std::any_of(pages_.begin(), pages_.end(), [&](const Page& page) {
      return page.page_bytes == page_bytes && page.table != nullptr && page.ready && page.pins == 0;
    });
    PageFrame* const frame = pool_.Take(page_bytes);
    if (frame == nullptr) {
      EXPECT_FALSE(evictable) << "refused, though a page could have gone";
      EXPECT_LT(budget_.left, kSlab) << "refused, though there is memory";
      return;
    }
    ASSERT_EQ(frame->page_bytes, page_bytes);
    ASSERT_EQ(frame->pins, 0u);
    for (const Page& page : pages_) {
      if (Evicted(page)) continue;  // its frame may be this one, or gone with its slab
      EXPECT_TRUE(page.frame != frame && page.frame->data != frame->data) << "handed out twice";
    }
    pool_.Fill(frame, table, slot);
    pool_.Pin(frame);
    frame->prefetched = random_.Below(3) == 0;
    pages_.push_back({frame, table, slot, page_bytes, 1, false, frame->prefetched, ++patterns_});
    const size_t bytes = std::min<size_t>(sizeof(patterns_), page_bytes);
    std::memset(frame->data, 0, page_bytes);
    std::memcpy(frame->data + page_bytes - bytes, &patterns_, bytes);
    std::memcpy(frame->data, &patterns_, bytes);
  }
  // Only what is ready is used without a pin; what was dropped stands in no table.
  void UseOrReady(Page* page) {
    if (page->ready && page->table != nullptr) {
      pool_.Use(page->frame);
    } else {
      Ready(page);
    }
  }
  void Ready(Page* page) {
    if (page->ready || page->table == nullptr) return;
    page->ready = true;
    page->frame->state = State::kReady;
    Unpin(page);
  }
  void Pin(Page* page) {
    if (page->table == nullptr) return;
    ++page->pins;
    pool_.Pin(page->frame);
    page->frame->prefetched = page->prefetched = false;
  }
  void Unpin(Page* page) {
    // A page that is being read keeps its reader's pin.
    if (page->pins == 0 || (page->table != nullptr && !page->ready && page->pins == 1)) return;
    --page->pins;
    pool_.Unpin(page->frame);
    ForgetIfFree(page);
  }
  void Drop(Page* page) {
    if (page->table == nullptr) return;
    if (page->prefetched) ++wasted_;
    page->prefetched = false;
    pool_.Drop(page->frame);
    EXPECT_EQ((*page->table)[page->slot].frame, nullptr);
    page->table = nullptr;
    ForgetIfFree(page);
  }
  void ForgetIfFree(Page* page) {
    if (page->table != nullptr || page->pins > 0) return;
    EXPECT_EQ(page->frame->state, State::kFree);
    pages_.erase(pages_.begin() + (page - pages_.data()));
  }
  void Shrink() {
    const uint64_t before = pool_.slab_bytes(), taken = budget_.taken;
    const uint64_t asked = random_.Below(4 * kSlab);
    const uint64_t given = pool_.Shrink(asked);
    EXPECT_EQ(pool_.slab_bytes(), before - given);
    EXPECT_EQ(budget_.taken, taken - given);
    EXPECT_LE(given, (asked + kSlab - 1) / kSlab * kSlab);
    EXPECT_TRUE(given == 0 || pool_.slab_bytes() >= kGuaranteed);
  }

  Random random_;
  Budget budget_;
  PagePool pool_;
  std::vector<PageTable> tables_;
  std::vector<uint32_t> sizes_;
  std::vector<Page> pages_;
  uint64_t patterns_ = 0, evictions_ = 0, wasted_ = 0;
};

TEST(PagePoolTest, RandomOperationsKeepTheBooks) {
  uint64_t evictions = 0;
  for (uint64_t round = 0; round < 30; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() + round);
    PoolModel model(TestSeed() + round);
    for (int step = 0; step < 2000 && !testing::Test::HasFailure(); ++step) {
      model.Step();
      model.Check();
    }
    evictions += model.evictions();
  }
  EXPECT_GT(evictions, 1000u) << "the operations met no full pool";
}

// Against the sum itself (docs/research/PAGE_POOL.md, "The rule"): time is pages used, in pools of
// them.
TEST(PagePoolTest, WorthIsTheSumOfAgedUses) {
  constexpr uint64_t kPages = kGuaranteed / 4096;
  PagePool pool(kGuaranteed, NoMore());
  PageTable table(50);
  Random random(TestSeed());
  std::vector<std::vector<double>> uses(table.size());
  double time = 0;
  const auto used = [&](uint64_t slot) {
    time += 1.0 / kPages / PagePool::kHalfLife;
    uses[slot].push_back(time);
  };
  for (uint64_t i = 0; i < table.size(); ++i) {
    ASSERT_NE(Put(&pool, &table, i, 4096), nullptr);
    used(i);
  }
  for (int i = 0; i < 20000; ++i) {
    const uint64_t slot = random.Below(1 + random.Below(table.size()));
    pool.Use(table[slot].frame);
    used(slot);
  }
  for (uint64_t i = 0; i < table.size(); ++i) {
    double sum = 0;
    for (const double at : uses[i]) sum += std::exp2(at - time);
    EXPECT_NEAR(table[i].worth, time + std::log2(sum), 1e-9) << i;
  }
}

// A page that went and comes back counts its uses from before.
TEST(PagePoolTest, WorthOutlivesEviction) {
  PagePool pool(kGuaranteed, NoMore());
  PageTable table(2);
  Put(&pool, &table, 0, 4096);
  for (int use = 0; use < 9; ++use) pool.Use(table[0].frame);
  pool.Drop(table[0].frame);
  Put(&pool, &table, 0, 4096);
  Put(&pool, &table, 1, 4096);
  EXPECT_NEAR(table[0].worth - table[1].worth, std::log2(11.0), 0.1);
}

// The frame that goes is drawn: a few of those that are used may be among eight of the same kind.
TEST(PagePoolTest, WhatIsUsedSurvivesAScan) {
  constexpr uint64_t kHot = 64, kPages = kGuaranteed / 4096, kScanned = 4000;
  PagePool pool(kGuaranteed, NoMore());
  PageTable hot(kHot), scan(kScanned);
  for (uint64_t i = 0; i < kHot; ++i) {
    ASSERT_NE(Put(&pool, &hot, i, 4096), nullptr);
    for (int use = 0; use < 5; ++use) pool.Use(hot[i].frame);
  }
  for (uint64_t i = 0; i < kScanned; ++i) {
    ASSERT_NE(Put(&pool, &scan, i, 4096), nullptr);
    // A page of the scan is asked for once, the others four times while the pool is used once.
    if (i % (kPages / 4) != 0) continue;
    for (const PageEntry& entry : hot) {
      if (entry.frame != nullptr) pool.Use(entry.frame);
    }
  }
  EXPECT_LE(Missing(hot), 3u);
  EXPECT_EQ(pool.evictions(), kHot + kScanned - kPages);
}

TEST(PagePoolTest, WhatIsNotUsedGoesInTime) {
  constexpr uint64_t kPages = kGuaranteed / 4096;
  PagePool pool(kGuaranteed, NoMore());
  PageTable once(64), scan(64 * kPages);
  for (uint64_t i = 0; i < once.size(); ++i) {
    Put(&pool, &once, i, 4096);
    for (int use = 0; use < 100; ++use) pool.Use(once[i].frame);  // long ago
  }
  for (uint64_t i = 0; i < scan.size(); ++i) ASSERT_NE(Put(&pool, &scan, i, 4096), nullptr);
  EXPECT_EQ(Missing(once), 64u);
}

// A draw seldom meets the one page that may go; it is found all the same.
TEST(PagePoolTest, OneOfManyMayGo) {
  constexpr uint64_t kPages = kGuaranteed / 4096;
  PagePool pool(kGuaranteed, NoMore());
  PageTable table(2 * kPages);
  for (uint64_t i = 0; i < kPages; ++i) {
    Put(&pool, &table, i, 4096);
    pool.Pin(table[i].frame);
  }
  for (uint64_t i = kPages; i < 2 * kPages; ++i) {
    ASSERT_EQ(pool.Take(4096), nullptr);
    pool.Unpin(table[i - kPages].frame);
    ASSERT_NE(Put(&pool, &table, i, 4096), nullptr);
    EXPECT_EQ(table[i - kPages].frame, nullptr);
    pool.Pin(table[i].frame);
  }
}

TEST(PagePoolTest, SizesTakeSlabsFromOneAnother) {
  PagePool pool(kGuaranteed, NoMore());
  PageTable a(1000), b(1000);
  const uint64_t of_a = kGuaranteed / 4096, of_b = kSlab / 10000 * 16;
  for (uint64_t i = 0; i < of_a; ++i) ASSERT_NE(Put(&pool, &a, i, 4096), nullptr);
  EXPECT_EQ(pool.slab_bytes(), kGuaranteed);
  // b's pages are all pinned, so that it needs one slab after the other.
  for (uint64_t i = 0; i < of_b; ++i) {
    ASSERT_NE(Put(&pool, &b, i, 10000), nullptr) << i;
    pool.Pin(b[i].frame);
    EXPECT_EQ(pool.slab_bytes(), kGuaranteed);
  }
  EXPECT_EQ(Missing(a), a.size());
  EXPECT_EQ(pool.Take(10000), nullptr);
  EXPECT_EQ(pool.Take(4096), nullptr) << "of what is pinned";
  // And back: one slab's worth without pins is enough for a.
  for (uint64_t i = 0; i < kSlab / 10000; ++i) pool.Unpin(b[i].frame);
  EXPECT_NE(Put(&pool, &a, 0, 4096), nullptr);
  EXPECT_EQ(pool.slab_bytes(), kGuaranteed);
}

TEST(PagePoolTest, OnePinKeepsItsSlab) {
  PagePool pool(kGuaranteed, NoMore());
  PageTable a(1000), b(10);
  for (uint64_t i = 0; i < kGuaranteed / 4096; ++i) Put(&pool, &a, i, 4096);
  for (uint64_t i = 0; i < kGuaranteed / 4096; i += kSlab / 4096) pool.Pin(a[i].frame);
  EXPECT_EQ(pool.Take(5000), nullptr);
  pool.Unpin(a[3 * kSlab / 4096].frame);
  EXPECT_NE(Put(&pool, &b, 0, 5000), nullptr);
}

TEST(PagePoolTest, MemoryBeyondIsTakenAndGivenBackExactly) {
  Budget budget{5 * kSlab};
  {
    PagePool pool(kGuaranteed, budget.memory());
    PageTable table(1000);
    const uint64_t all = (kGuaranteed + 5 * kSlab) / 4096;
    for (uint64_t i = 0; i < all; ++i) ASSERT_NE(Put(&pool, &table, i, 4096), nullptr);
    EXPECT_EQ(pool.evictions(), 0u);
    EXPECT_EQ(budget.left, 0u);
    EXPECT_EQ(pool.Shrink(1), kSlab);
    EXPECT_EQ(budget.taken, 4 * kSlab);
    EXPECT_EQ(pool.evictions(), kSlab / 4096);
    EXPECT_EQ(pool.resident_bytes(), pool.slab_bytes());
  }
  EXPECT_EQ(budget.taken, 0u);
}

TEST(PagePoolTest, ShrinkTouchesNeitherPinsNorWhatIsGuaranteed) {
  Budget budget{8 * kSlab};
  PagePool pool(kGuaranteed, budget.memory());
  PageTable table(1000);
  const uint64_t all = (kGuaranteed + 8 * kSlab) / 4096, a_slab = kSlab / 4096;
  for (uint64_t i = 0; i < all; ++i) ASSERT_NE(Put(&pool, &table, i, 4096), nullptr);
  std::set<uint64_t> pinned;
  for (uint64_t i = 0; i < all; i += a_slab) pinned.insert(i);
  for (const uint64_t i : pinned) pool.Pin(table[i].frame);
  EXPECT_EQ(pool.Shrink(UINT64_MAX), 0u);
  EXPECT_EQ(pool.resident_bytes(), all * 4096);
  // Three slabs can go: those whose pins end.
  for (const uint64_t i : {0 * a_slab, 7 * a_slab, 23 * a_slab}) {
    pool.Unpin(table[i].frame);
    pinned.erase(i);
  }
  EXPECT_EQ(pool.Shrink(UINT64_MAX), 3 * kSlab);
  for (const uint64_t i : pinned) {
    ASSERT_NE(table[i].frame, nullptr);
    pool.Unpin(table[i].frame);
  }
  EXPECT_EQ(pool.Shrink(UINT64_MAX), 5 * kSlab);
  EXPECT_EQ(pool.slab_bytes(), kGuaranteed);
  EXPECT_EQ(budget.taken, 0u);
  EXPECT_EQ(pool.Shrink(1), 0u);
}

TEST(PagePoolTest, PrefetchesThatNobodyUsedAreCounted) {
  PagePool pool(kGuaranteed, NoMore());
  PageTable table(2000);
  const uint64_t all = kGuaranteed / 4096;
  for (uint64_t i = 0; i < all; ++i) Put(&pool, &table, i, 4096)->prefetched = i % 2 == 0;
  for (uint64_t i = 0; i < all; i += 4) table[i].frame->prefetched = false;  // used
  for (uint64_t i = all; i < 4 * all; ++i) ASSERT_NE(Put(&pool, &table, i, 4096), nullptr);
  EXPECT_EQ(pool.wasted_prefetches(), all / 4);
}

TEST(PagePoolTest, APageLargerThanASlabIsRefused) {
  PagePool pool(kGuaranteed, NoMore());
  EXPECT_EQ(PagePool::page_bytes_max(kGuaranteed), kSlab);
  EXPECT_NE(pool.Take(kSlab), nullptr);
  EXPECT_EQ(pool.Take(kSlab + 1), nullptr);
}

// What a caller may not do with frames ends the process before a page is in two places.
TEST(PagePoolDeathTest, FramesAndTablesStayConsistent) {
  PagePool pool(kGuaranteed, NoMore());
  PageTable table(10);
  PageFrame* const frame = Put(&pool, &table, 3, 4096);
  ASSERT_NE(frame, nullptr);
  EXPECT_DEATH(pool.Unpin(frame), "each Pin has one Unpin");
  EXPECT_DEATH(pool.Fill(frame, &table, 4), "it holds another page");
  EXPECT_DEATH(pool.Fill(pool.Take(4096), &table, 3), "a page is in one frame");
  table[3].frame = nullptr;
  EXPECT_DEATH(pool.Drop(frame), "table and frame name each other");
}

}  // namespace
}  // namespace attnd::storage::test
