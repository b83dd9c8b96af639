// SPDX-License-Identifier: Apache-2.0
//
// Goal: what goes wrong with one file stays there, and caches, files and leases may end in any
// order. Method: real files, one with a byte turned; a gate before them that holds reads up or
// refuses them; waits for conditions, never for a time.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "storage/cache/page_cache.h"
#include "tests/storage/cache/page_cache_support.h"

namespace attnd::storage::test {
namespace {

constexpr uint64_t kLeaseMax = PageCacheOptions::kBytesMin * 3 / 8;
constexpr uint32_t kPage = 4096;

using PageCacheEndTest = PageCacheTest;

TEST_F(PageCacheEndTest, ADamagedFileGivesNoPagesAndOthersGoOn) {
  MakeCache(Options(2));
  for (int file = 0; file < 2; ++file) MakeSource(2, 40, 5000);
  Damage(0, 1, 3);
  std::vector<Want> kept = Wants(0, 0, 10);
  auto lease = Fetch(&kept);
  ASSERT_TRUE(lease.ok() && AllHold(0, kept));
  EXPECT_EQ(sources_[0]->status(), absl::OkStatus());
  std::vector<Want> wants = Wants(1, 0, 20);
  wants.push_back(WantOf(0, 43));
  {
    const auto both = Fetch(&wants);
    ASSERT_TRUE(both.ok()) << both.status();
    EXPECT_EQ(wants.back().data, nullptr);
    wants.pop_back();
    EXPECT_TRUE(AllHold(1, wants));
  }
  EXPECT_TRUE(absl::IsDataLoss(sources_[0]->status())) << sources_[0]->status();
  EXPECT_EQ(sources_[1]->status(), absl::OkStatus());
  EXPECT_EQ(cache_->stats().failed_reads, 1u);
  // From now on nothing of it is handed out or read; what is leased stays.
  const uint64_t before = reads();
  std::vector<Want> again = Wants(0, 0, 20);
  ASSERT_TRUE(Fetch(&again).ok());
  EXPECT_TRUE(AllNull(again));
  cache_->Prefetch(sources_[0], Ids(0, 20, 30));
  EXPECT_EQ(cache_->stats().prefetched_pages, 0u);
  EXPECT_EQ(reads(), before);
  EXPECT_TRUE(AllHold(0, kept));
  lease->reset();
  std::vector<Want> other = Wants(1, 0, 60);
  EXPECT_TRUE(Fetch(&other).ok() && AllHold(1, other));
  kept.clear(), wants.clear(), again.clear(), other.clear();
  ExpectNothingPinned();
}

TEST_F(PageCacheEndTest, AReadErrorPasses) {
  MakeCache(Options(1));
  MakeSource(1, 20, kPage);
  gate_->Refuse(absl::UnavailableError("the disk is away"));
  std::vector<Want> wants = Wants(0, 0, 20);
  ASSERT_TRUE(Fetch(&wants).ok());
  EXPECT_TRUE(AllNull(wants));
  EXPECT_TRUE(absl::IsUnavailable(sources_[0]->status()));
  gate_->Refuse(absl::OkStatus());
  const auto lease = Fetch(&wants);
  EXPECT_TRUE(lease.ok() && AllHold(0, wants));
}

TEST_F(PageCacheEndTest, StopEndsEveryWait) {
  MakeCache(Options(1));
  MakeSource(1, 300, kPage);
  MakeSource(1, 20, 512);
  gate_->Close();
  cache_->Prefetch(sources_[1], Ids(1, 0, 20));
  ASSERT_TRUE(Eventually([&] { return reads() == 1; }));
  absl::Status ends[3];
  std::vector<std::thread> waits;
  // Two fill the room, the third waits for it. Then one that is queued behind them.
  for (uint64_t i = 0; i < 2; ++i) waits.push_back(Leases(0, i * 96, i * 96 + 96, {}, &ends[i]));
  ASSERT_TRUE(Eventually([&] { return cache_->stats().waiting_pages == 192; }));
  EXPECT_EQ(cache_->stats().pinned_bytes, 2 * kLeaseMax);
  gate_->LetThrough(1);  // a read for the first or second begins
  ASSERT_TRUE(Eventually([&] { return reads() == 2; }));
  waits.push_back(Leases(0, 0, 1, {}, &ends[2]));
  cache_->Stop();
  for (std::thread& thread : waits) thread.join();
  for (const absl::Status& end : ends) EXPECT_TRUE(absl::IsUnavailable(end)) << end;
  std::vector<Want> wants = Wants(0, 0, 1);
  EXPECT_TRUE(absl::IsUnavailable(Fetch(&wants).status()));
  const uint64_t before = cache_->stats().prefetched_pages;
  cache_->Prefetch(sources_[1], Ids(1, 0, 20));
  EXPECT_EQ(cache_->stats().prefetched_pages, before);
  cache_->Stop();
  wants.clear();
  ExpectNothingPinned();
}

TEST_F(PageCacheEndTest, LeasesAndSourcesMayOutliveStopAndTheOwner) {
  MakeCache(Options(2));
  MakeSource(1, 100, kPage);
  std::vector<Want> wants = Wants(0, 0, 50);
  auto lease = Fetch(&wants);
  ASSERT_TRUE(lease.ok());
  gate_->Close();
  cache_->Prefetch(sources_[0], Ids(0, 60, 80));
  cache_->Stop();
  cache_.reset();
  EXPECT_TRUE(AllHold(0, wants));
  sources_.clear();
  for (Want& want : wants) want.source.reset();
  EXPECT_TRUE(AllHold(0, wants));
  lease->reset();  // with it the source, and the cache
}

// What is to be read ahead keeps its source, and lets it go from a reader or from Stop.
TEST_F(PageCacheEndTest, ASourceMayDieWithItsLastRead) {
  MakeCache(Options(1));
  for (int file = 0; file < 3; ++file) MakeSource(1, 64, 512);
  gate_->Close();
  for (int file = 0; file < 3; ++file) cache_->Prefetch(sources_[file], Ids(file, 0, 64));
  sources_.clear();
  gate_->LetThrough(1);
  ASSERT_TRUE(Eventually([&] { return reads() == 2; }));
  EXPECT_EQ(cache_->stats().resident_bytes, 2u * 64 * 512);
  cache_->Stop();
  EXPECT_EQ(cache_->stats().resident_bytes, 0u);
}

TEST_F(PageCacheEndTest, ASourceThatDiesTakesItsPagesAlong) {
  MakeCache(Options(2));
  for (int file = 0; file < 2; ++file) MakeSource(1, 64, kPage);
  for (int file = 0; file < 2; ++file) {
    std::vector<Want> wants = Wants(file, 0, 64);
    ASSERT_TRUE(Fetch(&wants).ok());
  }
  EXPECT_EQ(cache_->stats().resident_bytes, 2u * 64 * kPage);
  sources_[0].reset();
  ASSERT_TRUE(Eventually([&] { return cache_->stats().resident_bytes == 64u * kPage; }));
  // Nobody finds them in the next source of that file, and the other one keeps its own.
  sources_[0] = AddSource(0);
  std::vector<Want> wants = Wants(0, 0, 30), others = Wants(1, 0, 64);
  const auto lease = Fetch(&wants);
  ASSERT_TRUE(lease.ok() && AllHold(0, wants));
  EXPECT_FALSE(wants[0].was_there);
  const auto other = Fetch(&others);
  ASSERT_TRUE(other.ok() && AllHold(1, others));
  EXPECT_TRUE(others[0].was_there);
}

}  // namespace
}  // namespace attnd::storage::test
