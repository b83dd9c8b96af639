// SPDX-License-Identifier: Apache-2.0
//
// Goal: waits end when they should, and reads happen in the order that they should. Method: real
// files behind a gate that holds their reads up, so that every order is the test's; waits for
// conditions, never for a time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "storage/cache/page_cache.h"
#include "tests/storage/cache/page_cache_support.h"

namespace attnd::storage::test {
namespace {

constexpr uint64_t kPrefetchMax = PageCacheOptions::kBytesMin / 8;
constexpr uint32_t kPage = 4096;

using PageCacheOrderTest = PageCacheTest;

TEST_F(PageCacheOrderTest, PartialPatienceGivesWhatIsThere) {
  MakeCache(Options(1));
  MakeSource(1, 100, kPage);
  std::vector<Want> there = Wants(0, 0, 10), wants = Wants(0, 0, 20);
  ASSERT_TRUE(Fetch(&there).ok());
  gate_->Close();
  {
    const auto lease = Fetch(&wants, Briefly(/*partial=*/true));
    ASSERT_TRUE(lease.ok()) << lease.status();
    const std::vector<Want> first(wants.begin(), wants.begin() + 10);
    EXPECT_TRUE(AllHold(0, first));
    EXPECT_TRUE(first.front().was_there && first.back().was_there);
    EXPECT_TRUE(AllNull({wants.begin() + 10, wants.end()}));
    EXPECT_EQ(sources_[0]->status(), absl::OkStatus());
  }
  // It goes on reading.
  gate_->Open();
  ASSERT_TRUE(EventuallyRead(20));
  const auto lease = Fetch(&wants);
  ASSERT_TRUE(lease.ok());
  EXPECT_TRUE(AllHold(0, wants));
  EXPECT_TRUE(wants.back().was_there);
  EXPECT_EQ(cache_->stats().read_pages, 20u);
}

TEST_F(PageCacheOrderTest, PartialPatienceReadsNoMoreThanPrefetchesMay) {
  MakeCache(Options(2));
  MakeSource(1, 100, kPage);
  std::vector<Want> wants = Wants(0, 0, 80);
  const auto lease = Fetch(&wants, {{}, /*partial=*/true, nullptr});
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(cache_->stats().read_bytes, kPrefetchMax);
  const auto middle = wants.begin() + kPrefetchMax / kPage;
  EXPECT_TRUE(AllHold(0, {wants.begin(), middle}));
  EXPECT_TRUE(AllNull({middle, wants.end()}));
}

TEST_F(PageCacheOrderTest, PartialPatienceWithoutRoomGivesNothing) {
  MakeCache(Options(1));
  MakeSource(1, 200, kPage);
  std::vector<Want> first = Wants(0, 0, 96), second = Wants(0, 0, 96), one = Wants(0, 0, 1);
  ASSERT_TRUE(Fetch(&one).ok());
  EXPECT_NE(one[0].data, nullptr);
  const auto first_lease = Fetch(&first), second_lease = Fetch(&second);
  ASSERT_TRUE(first_lease.ok() && second_lease.ok());
  EXPECT_TRUE(Fetch(&one, Briefly(/*partial=*/true)).ok());
  EXPECT_TRUE(AllNull(one)) << "a page that is not leased any more";
}

TEST_F(PageCacheOrderTest, ADeadlineEndsTheWaitAndTheReading) {
  MakeCache(Options(1));
  MakeSource(1, 100, kPage);
  gate_->Close();
  std::vector<Want> begun = Wants(0, 0, 10), queued = Wants(0, 10, 20), fence = Wants(0, 50, 51);
  ASSERT_TRUE(BeginAndGiveUp(&begun));
  EXPECT_TRUE(absl::IsDeadlineExceeded(Fetch(&queued, Briefly()).status()));
  EXPECT_TRUE(AllNull(begun) && AllNull(queued));
  EXPECT_EQ(cache_->stats().pinned_bytes, 0u);
  EXPECT_EQ(cache_->stats().waiting_pages, 10u);
  gate_->Open();
  EXPECT_TRUE(Fetch(&fence).ok());
  // What nobody waited for any more was not read; what had begun was.
  EXPECT_EQ(reads(), 2u);
  EXPECT_EQ(cache_->stats().read_pages, 11u);
  begun.clear(), queued.clear(), fence.clear();
  ExpectNothingPinned();
}

TEST_F(PageCacheOrderTest, OnReadHearsOfReadsOnly) {
  std::atomic<uint64_t> calls{0}, bytes{0};
  PageCacheOptions options = Options(1);
  options.on_read = [&](uint64_t read, std::chrono::nanoseconds) {
    ++calls;
    bytes += read;
  };
  MakeCache(options);
  MakeSource(1, 100, kPage);
  gate_->Close();
  std::vector<Want> begun = Wants(0, 0, 10), queued = Wants(0, 10, 20), fence = Wants(0, 50, 51);
  ASSERT_TRUE(BeginAndGiveUp(&begun));
  EXPECT_FALSE(Fetch(&queued, Briefly()).ok());
  gate_->Open();
  EXPECT_TRUE(Fetch(&fence).ok());
  EXPECT_EQ(calls, reads());
  EXPECT_EQ(bytes, cache_->stats().read_bytes);
}

TEST_F(PageCacheOrderTest, CancellationEndsBothWaits) {
  MakeCache(Options(1));
  MakeSource(1, 200, kPage);
  gate_->Close();
  std::atomic<bool> cancelled{false};
  absl::Status reading, room;
  std::thread reads_pages = Leases(0, 0, 10, {{}, false, &cancelled}, &reading);
  ASSERT_TRUE(Eventually([&] { return reads() == 1; }));
  cancelled = true;
  reads_pages.join();
  EXPECT_TRUE(absl::IsCancelled(reading)) << reading;
  gate_->Open();
  cancelled = false;
  {
    std::vector<Want> first = Wants(0, 0, 96), second = Wants(0, 0, 96);
    const auto first_lease = Fetch(&first), second_lease = Fetch(&second);
    ASSERT_TRUE(first_lease.ok() && second_lease.ok());
    std::thread waits = Leases(0, 0, 1, {{}, false, &cancelled}, &room);
    cancelled = true;
    waits.join();
    EXPECT_TRUE(absl::IsCancelled(room)) << room;
  }
  ExpectNothingPinned();
}

// Reads that began for somebody who has gone keep their memory for as long as they take.
TEST_F(PageCacheOrderTest, AbandonedReadsMakeOthersWaitNotFail) {
  MakeCache(Options(1));
  MakeSource(1, 400, kPage);
  gate_->Close();
  std::vector<Want> begun = Wants(0, 0, 96), queued = Wants(0, 96, 192);
  ASSERT_TRUE(BeginAndGiveUp(&begun));
  EXPECT_TRUE(absl::IsDeadlineExceeded(Fetch(&queued, Briefly()).status()));
  std::vector<Want> wants = Wants(0, 200, 296);
  const auto lease = Fetch(&wants, Briefly());
  EXPECT_TRUE(absl::IsDeadlineExceeded(lease.status())) << lease.status();
  absl::Status status;
  std::thread waits = Leases(0, 300, 396, {}, &status);
  gate_->Open();
  waits.join();
  EXPECT_EQ(status, absl::OkStatus());
  begun.clear(), queued.clear(), wants.clear();
  ExpectNothingPinned();
}

TEST_F(PageCacheOrderTest, PrefetchesAreCounted) {
  MakeCache(Options(1));
  MakeSource(1, 20, kPage);
  MakeSource(4, 200, kPage);
  cache_->Prefetch(sources_[0], Ids(0, 0, 20));
  cache_->Prefetch(sources_[0], Ids(0, 0, 20));  // they are on their way
  ASSERT_TRUE(EventuallyRead(20));
  EXPECT_EQ(cache_->stats().prefetched_pages, 20u);
  for (int twice = 0; twice < 2; ++twice) {
    std::vector<Want> wants = Wants(0, 0, 5);
    const auto lease = Fetch(&wants);
    ASSERT_TRUE(lease.ok() && AllHold(0, wants));
    EXPECT_TRUE(wants[0].was_there);
    EXPECT_EQ(cache_->stats().prefetched_used, 5u);
  }
  EXPECT_EQ(cache_->stats().hits, 10u);
  for (uint64_t number = 0; number + 80 <= 800; number += 80) {
    std::vector<Want> wants = Wants(1, number, number + 80);
    ASSERT_TRUE(Fetch(&wants).ok());
  }
  EXPECT_EQ(cache_->stats().prefetched_wasted, 15u);
  // One that is on its way is used as well.
  gate_->Close();
  cache_->Prefetch(sources_[1], Ids(1, 0, 10));
  std::vector<Want> late = Wants(1, 0, 2);
  EXPECT_FALSE(Fetch(&late, Briefly()).ok());
  EXPECT_EQ(cache_->stats().late, 2u);
  EXPECT_EQ(cache_->stats().prefetched_used, 7u);
  EXPECT_EQ(cache_->stats().prefetches_refused, 0u);
}

TEST_F(PageCacheOrderTest, PrefetchesBeyondTheirRoomAreRefused) {
  MakeCache(Options(1));
  MakeSource(1, 100, kPage);
  gate_->Close();
  cache_->Prefetch(sources_[0], Ids(0, 0, 100));
  constexpr uint64_t kMost = kPrefetchMax / kPage;
  EXPECT_EQ(cache_->stats().prefetched_pages, kMost);
  EXPECT_EQ(cache_->stats().prefetches_refused, 100 - kMost);
  gate_->Open();
  ASSERT_TRUE(EventuallyRead(kMost));
  cache_->Prefetch(sources_[0], Ids(0, 0, kMost + 1));
  EXPECT_EQ(cache_->stats().prefetched_pages, kMost + 1) << "there is room again";
}

TEST_F(PageCacheOrderTest, DemandOvertakesPrefetches) {
  MakeCache(Options(1));
  MakeSource(1, 256, 512);
  MakeSource(1, 20, kPage);
  gate_->Close();
  cache_->Prefetch(sources_[0], Ids(0, 0, 256));  // four reads
  ASSERT_TRUE(Eventually([&] { return reads() == 1; }));
  absl::Status status;
  std::thread waits = Leases(1, 0, 20, {}, &status);
  ASSERT_TRUE(Eventually([&] { return cache_->stats().waiting_pages == 20; }));
  gate_->Open();
  waits.join();
  EXPECT_EQ(status, absl::OkStatus());
  ASSERT_TRUE(EventuallyRead(276));
  EXPECT_THAT(Order(), testing::ElementsAre(0, 1, 0, 0, 0));
}

TEST_F(PageCacheOrderTest, APrefetchThatSomebodyWaitsForOvertakesOthers) {
  MakeCache(Options(1));
  for (int file = 0; file < 3; ++file) MakeSource(1, 64, 512);
  gate_->Close();
  for (int file = 0; file < 3; ++file) cache_->Prefetch(sources_[file], Ids(file, 0, 64));
  ASSERT_TRUE(Eventually([&] { return reads() == 1; }));
  absl::Status status;
  std::thread waits = Leases(2, 10, 11, {}, &status);
  ASSERT_TRUE(Eventually([&] { return cache_->stats().waiting_pages == 64; }));
  gate_->Open();
  waits.join();
  EXPECT_EQ(status, absl::OkStatus());
  ASSERT_TRUE(EventuallyRead(3 * 64));
  EXPECT_THAT(Order(), testing::ElementsAre(0, 2, 1));
}

TEST_F(PageCacheOrderTest, ReadsKeepToTheRate) {
  constexpr uint64_t kBytesPerS = 2 << 20;
  PageCacheOptions options = Options(3);
  options.read_bytes_per_s = kBytesPerS;
  MakeCache(options);
  MakeSource(1, 160, kPage);
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t number = 0; number < 160; number += 16) {
    std::vector<Want> wants = Wants(0, number, number + 16);
    const auto lease = Fetch(&wants);
    ASSERT_TRUE(lease.ok() && AllHold(0, wants));
  }
  // The last read may begin when there has been time for the others.
  const double needed_s = 144.0 * kPage / kBytesPerS - 0.010;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(took.count(), needed_s);
}

}  // namespace
}  // namespace attnd::storage::test
