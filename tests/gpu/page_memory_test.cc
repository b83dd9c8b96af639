// SPDX-License-Identifier: Apache-2.0
//
// Goal: page memory changes between whole segments and a cache without getting stuck: a cache comes
// when pages find no room and goes when none is in host memory, whatever else is pinned, built,
// refused or of no use. Method: the store of device copies, and a backend, over a fake device.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "gpu/memory/arena.h"
#include "gpu/step/device_history.h"
#include "tests/attention/cpu/paged_support.h"
#include "tests/gpu/agreement.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::kTreeIndexes;
using attention::test::CopyingStore;
using attention::test::MakeRow;
using attention::test::MakeSequence;
using attention::test::MakeShape;
using attention::test::Paged;
using attention::test::RunStep;
using attention::test::SequenceSpec;
using attention::test::TestRow;
using attention::test::TestSeed;
using attention::test::TestSequence;

using Pins = std::vector<std::shared_ptr<Resident>>;
constexpr uint64_t kMib = uint64_t{1} << 20;

// A token has 1 KiB of pages, in two layers of two KV heads.
TestSequence TokensOf(const std::vector<uint32_t>& segments, uint64_t seed) {
  SequenceSpec spec;
  spec.shape = MakeShape(4, 2, 64, 64, DType::kBf16, 2);
  spec.segment_tokens = segments;
  spec.tail_tokens = 70;
  spec.indexes = kTreeIndexes;
  spec.seed = TestSeed() + seed;
  return MakeSequence(spec);
}

class PageMemory : public testing::Test {
 protected:
  void Start(uint64_t pages_bytes, uint64_t index_bytes = 8 * kMib) {
    FakePair fake = MakeFakeDevice(pages_bytes + index_bytes + kMib, true);
    control_ = fake.control;
    auto pages = Arena::Create(fake.device.get(), "page", pages_bytes);
    auto index = Arena::Create(fake.device.get(), "index", index_bytes);
    ASSERT_TRUE(pages.ok() && index.ok());
    store_ = std::make_shared<DeviceCopyStore>(std::move(fake.device), *std::move(pages),
                                               *std::move(index));
  }
  std::shared_ptr<const DeviceHistory> Of(const TestSequence& sequence) const {
    return DeviceHistory::Of(*sequence.view, store_.get());
  }
  absl::Status PinAll(const DeviceHistory& history, Pins* pins) const {
    const absl::Status status = store_->Pin(history.segments(), PagesIn::kAnyMemory, pins);
    if (!status.ok()) return status;
    return store_->Pin(history.tail_blocks(), PagesIn::kDeviceMemory, pins);
  }

  std::shared_ptr<FakeControl> control_;
  std::shared_ptr<DeviceCopyStore> store_;
};

// While another step's pins stand in the way, segments are read in place; the first Pin without
// them makes the cache.
TEST_F(PageMemory, ACacheComesWhenItsPlaceIsFree) {
  Start(6 * kMib);
  const TestSequence a = TokensOf({2000}, 1), b = TokensOf({5200}, 2);
  const auto of_a = Of(a), of_b = Of(b);
  Pins pins_a, pins_b;
  ASSERT_TRUE(PinAll(*of_a, &pins_a).ok());
  ASSERT_TRUE(PinAll(*of_b, &pins_b).ok());
  EXPECT_NE(pins_b[0]->host_pages(), nullptr);
  EXPECT_EQ(store_->CacheOf(of_b->page_bytes()), nullptr);
  EXPECT_EQ(store_->evictions(), 0u);
  pins_a.clear();
  EXPECT_EQ(store_->CacheOf(of_b->page_bytes()), nullptr) << "a look makes no cache";
  EXPECT_EQ(store_->evictions(), 0u);
  pins_b.clear();
  ASSERT_TRUE(PinAll(*of_b, &pins_b).ok());
  EXPECT_NE(store_->CacheOf(of_b->page_bytes()), nullptr);
  EXPECT_EQ(store_->evictions(), 1u) << "what lies in its place, and no tail";
}

// Tail blocks lie at the end, so that they are in the way of no cache.
TEST_F(PageMemory, TailsAreNotInTheWay) {
  Start(6 * kMib);
  const TestSequence a = TokensOf({2000}, 1), b = TokensOf({5200}, 2);
  const auto of_a = Of(a), of_b = Of(b);
  Pins tails;
  for (const auto& history : {of_a, of_b}) {
    Pins pins;
    ASSERT_TRUE(store_->Pin(history->tail_blocks(), PagesIn::kDeviceMemory, &tails).ok());
    ASSERT_TRUE(store_->Pin(history->segments(), PagesIn::kAnyMemory, &pins).ok() ||
                history == of_b);
  }
  Pins pins;
  ASSERT_TRUE(store_->Pin(of_b->segments(), PagesIn::kAnyMemory, &pins).ok());
  EXPECT_NE(store_->CacheOf(of_b->page_bytes()), nullptr);
}

// A build finds what the cache leaves, or nothing; the cache stays as it is.
TEST_F(PageMemory, BuildsDoNotTouchTheCache) {
  Start(4 * kMib);
  const TestSequence large = TokensOf({5000}, 1), built = TokensOf({1000}, 2);
  const auto of_large = Of(large), of_built = Of(built);
  Pins pins;
  ASSERT_TRUE(store_->Pin(of_large->segments(), PagesIn::kAnyMemory, &pins).ok());
  const uint64_t bytes = store_->cache_bytes();
  EXPECT_GT(bytes, 3 * kMib);
  Pins build;
  EXPECT_TRUE(
      absl::IsResourceExhausted(store_->Pin(of_built->segments(), PagesIn::kDeviceMemory, &build)));
  EXPECT_EQ(store_->cache_bytes(), bytes);
  EXPECT_TRUE(store_->Borrow(kMib, kMib / 4).ok());
  EXPECT_EQ(store_->cache_bytes(), bytes);
}

// A cache that has grown smaller for tails is as large as the first one after it has gone.
TEST_F(PageMemory, AnEndedCacheLeavesNoTrace) {
  Start(4 * kMib);
  for (int round = 0; round < 2; ++round) {
    const TestSequence large = TokensOf({5000}, 1);
    const auto of_large = Of(large);
    Pins pins;
    ASSERT_TRUE(store_->Pin(of_large->segments(), PagesIn::kAnyMemory, &pins).ok());
    EXPECT_GT(store_->cache_bytes(), 3 * kMib) << "round " << round;
    pins.clear();
    SequenceSpec tail = large.spec;
    tail.segment_tokens = {};
    tail.tail_tokens = 1500;  // more than an eighth
    const TestSequence other = MakeSequence(tail);
    ASSERT_TRUE(PinAll(*Of(other), &pins).ok());
    EXPECT_EQ(store_->cache_bytes(), 0u);
    pins.clear();
    ASSERT_TRUE(store_->Pin(of_large->segments(), PagesIn::kAnyMemory, &pins).ok());
    EXPECT_GT(store_->cache_bytes(), kMib);
    EXPECT_LT(store_->cache_bytes(), 3 * kMib);
  }
  EXPECT_EQ(store_->cache_bytes(), 0u);
  EXPECT_EQ(store_->pages().used(), 0u);
}

// A tail that finds no room while a step uses the cache gets none yet, and nothing is given up.
TEST_F(PageMemory, ACacheInUseIsWaitedFor) {
  Start(4 * kMib);
  const TestSequence large = TokensOf({5000}, 1);
  SequenceSpec tail = large.spec;
  tail.segment_tokens = {};
  tail.tail_tokens = 1500;
  const TestSequence other = MakeSequence(tail);
  const auto of_large = Of(large), of_other = Of(other);
  Pins pins, tails;
  ASSERT_TRUE(store_->Pin(of_large->segments(), PagesIn::kAnyMemory, &pins).ok());
  {
    const auto use = PageCache::Use::BeginAtOnce(store_->CacheOf(of_large->page_bytes()));
    const uint64_t evictions = store_->evictions();
    EXPECT_TRUE(absl::IsResourceExhausted(
        store_->Pin(of_other->tail_blocks(), PagesIn::kDeviceMemory, &tails)));
    EXPECT_EQ(store_->evictions(), evictions);
    tails.clear();
  }
  EXPECT_TRUE(store_->Pin(of_other->tail_blocks(), PagesIn::kDeviceMemory, &tails).ok());
}

// Where indexes do not fit, a cache of pages is of no use, and none stays behind.
TEST_F(PageMemory, AnIndexWithoutRoomLeavesNoCache) {
  const TestSequence large = TokensOf({5000}, 1), small = TokensOf({300}, 2);
  Start(4 * kMib, large.view->segments[0]->index_block().size() / 2);
  Pins pins;
  EXPECT_TRUE(absl::IsResourceExhausted(PinAll(*Of(large), &pins)));
  EXPECT_EQ(store_->cache_bytes(), 0u);
  ASSERT_TRUE(PinAll(*Of(small), &pins).ok());
  EXPECT_EQ(pins[0]->host_pages(), nullptr);
}

// Room for an index is made by giving up the last copy that used the cache: the next one finds the
// cache with all that is in it.
TEST_F(PageMemory, ACacheStaysForItsNextUser) {
  const TestSequence a = TokensOf({5000}, 1), b = TokensOf({5000}, 2);
  const uint64_t index_bytes = a.view->segments[0]->index_block().size();
  Start(4 * kMib, index_bytes + index_bytes / 2);
  const PageCache* first = nullptr;
  for (const TestSequence* sequence : {&a, &b, &a}) {
    const auto history = Of(*sequence);
    Pins pins;
    ASSERT_TRUE(store_->Pin(history->segments(), PagesIn::kAnyMemory, &pins).ok());
    const auto cache = store_->CacheOf(history->page_bytes());
    ASSERT_NE(cache, nullptr);
    if (first == nullptr) first = cache.get();
    EXPECT_EQ(cache.get(), first);
  }
  EXPECT_EQ(store_->evictions(), 2u);
}

// A segment in a file wants a cache, in whose place something is pinned: whole segments stay away
// from that place, but no longer than the segment lives.
TEST_F(PageMemory, AWishForACacheEndsWithItsSegment) {
  Start(6 * kMib);
  const TestSequence pinned = TokensOf({2000}, 1), whole = TokensOf({500}, 2);
  const TestSequence away = TokensOf({500}, 3), resident = TokensOf({500}, 4);
  CopyingStore files;
  auto in_file = std::make_unique<TestSequence>(Paged(whole, &files));
  Pins pins, none, pins_of_away, pins_of_resident;
  ASSERT_TRUE(store_->Pin(Of(pinned)->segments(), PagesIn::kAnyMemory, &pins).ok());
  EXPECT_TRUE(
      absl::IsResourceExhausted(store_->Pin(Of(*in_file)->segments(), PagesIn::kAnyMemory, &none)));
  ASSERT_TRUE(store_->Pin(Of(away)->segments(), PagesIn::kAnyMemory, &pins_of_away).ok());
  EXPECT_NE(pins_of_away[0]->host_pages(), nullptr);
  in_file.reset();
  ASSERT_TRUE(store_->Pin(Of(resident)->segments(), PagesIn::kAnyMemory, &pins_of_resident).ok());
  EXPECT_EQ(pins_of_resident[0]->host_pages(), nullptr);
  EXPECT_EQ(store_->cache_bytes(), 0u);
}

// Numbers name pages of the segment, not of its copy, which may come and go.
TEST_F(PageMemory, ASegmentKeepsItsPageNumbers) {
  Start(4 * kMib, 2 * kMib);
  const TestSequence a = TokensOf({5000}, 1), b = TokensOf({5000}, 2);
  uint64_t first[2] = {0, 0};
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 2; ++i) {
      Pins pins;
      ASSERT_TRUE(PinAll(*Of(i == 0 ? a : b), &pins).ok());
      ASSERT_NE(pins[0]->host_pages(), nullptr);
      const uint64_t page = pins[0]->host_pages()->first_page();
      if (round > 0) {
        EXPECT_EQ(page, first[i]);
      }
      first[i] = page;
    }
  }
  EXPECT_NE(first[0], first[1]);
}

// The system refuses to map host memory: sequences take turns in GPU memory, as they did before
// there was a cache.
TEST_F(PageMemory, WithoutMappingSequencesTakeTurns) {
  CudaBackendOptions options = SmallOptions();
  options.page_memory_bytes = 5 * kMib;
  const FakeBackend fake = MakeFakeBackend(options, true);
  fake.control->Set({.mapping = 0});
  TestSequence a = TokensOf({3000}, 1), b = TokensOf({3000}, 2), c = TokensOf({500}, 3);
  const auto step = [&](TestSequence* sequence) {
    const std::vector<TestRow> rows = {MakeRow(sequence, Parse("error-target"),
                                               sequence->spec.tokens() - 1, 1, false, DType::kFp32,
                                               0, TestSeed())};
    EXPECT_TRUE(
        Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
  };
  for (int round = 0; round < 3; ++round) {
    for (TestSequence* sequence : {&a, &b, &c}) step(sequence);
  }
  EXPECT_LE(fake.backend->stats().fallback_steps, 1u) << "the step that found out";
  EXPECT_EQ(fake.backend->stats().cache.bytes, 0u);
}

}  // namespace
}  // namespace attnd::gpu::test
