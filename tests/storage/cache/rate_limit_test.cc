// SPDX-License-Identifier: Apache-2.0
//
// Goal: bookings begin in order, never above the rate, and at once if there is no limit. Method:
// seeded bookings at made-up times against the definition; many threads at one time.
#include "storage/cache/rate_limit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "tests/storage/files/segment_samples.h"

namespace attnd::storage::test {
namespace {

using Clock = RateLimit::Clock;
using std::chrono::nanoseconds;

constexpr nanoseconds kBurst = std::chrono::milliseconds(10);

struct Booking {
  Clock::time_point asked;
  Clock::time_point begin;
  uint64_t bytes = 0;
};

double SecondsOf(nanoseconds time) { return std::chrono::duration<double>(time).count(); }

// From any booking to any later one there is time for all that lies between, but for the burst.
void ExpectWithinRate(const std::vector<Booking>& bookings, uint64_t bytes_per_s) {
  for (size_t i = 0; i < bookings.size(); ++i) {
    uint64_t bytes = 0;
    for (size_t j = i + 1; j < bookings.size(); ++j) {
      bytes += bookings[j - 1].bytes;
      ASSERT_GE(bookings[j].begin, bookings[j - 1].begin) << j;
      const double needed_s = static_cast<double>(bytes) / static_cast<double>(bytes_per_s);
      const double allowed_s = SecondsOf(bookings[j].begin - bookings[i].begin + kBurst) +
                               1e-9 * static_cast<double>(j - i + 1);  // rounding
      ASSERT_LE(needed_s, allowed_s) << i << ".." << j;
    }
  }
}

TEST(RateLimitTest, BookingsAreInOrderAndNotAboveTheRate) {
  for (uint64_t round = 0; round < 30; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() + round);
    Random random(TestSeed() + round);
    const uint64_t bytes_per_s = 1 + random.Below(uint64_t{1} << (10 + random.Below(22)));
    RateLimit rate(bytes_per_s);
    Clock::time_point now = Clock::now();
    std::vector<Booking> bookings;
    for (int i = 0; i < 100; ++i) {
      // Sometimes faster than the rate, sometimes slower, sometimes after a pause.
      const uint64_t bytes = random.Below(bytes_per_s / 8 + 2);
      now += nanoseconds(random.Below(random.Below(10) == 0 ? 3000000000 : 100000000));
      bookings.push_back({now, rate.Book(bytes, now), bytes});
      ASSERT_GE(bookings.back().begin, now);
    }
    ExpectWithinRate(bookings, bytes_per_s);
  }
}

TEST(RateLimitTest, NobodyWaitsLongerThanTheRateAsks) {
  RateLimit rate(1000);
  const Clock::time_point start = Clock::now();
  EXPECT_EQ(rate.Book(500, start), start);
  const Clock::time_point second = rate.Book(1000, start);
  EXPECT_GE(second - start, std::chrono::milliseconds(490));
  EXPECT_LE(second - start, std::chrono::milliseconds(500));
  // After a pause there is no debt, and no credit beyond the burst.
  const Clock::time_point later = start + std::chrono::seconds(60);
  EXPECT_EQ(rate.Book(1000, later), later);
  EXPECT_GE(rate.Book(1, later) - later, std::chrono::milliseconds(990));
}

TEST(RateLimitTest, ThreadsShareOneRate) {
  constexpr uint64_t kBytesPerS = 1000000;
  constexpr int kThreads = 4, kEach = 200;
  RateLimit rate(kBytesPerS);
  const Clock::time_point now = Clock::now();
  std::vector<std::vector<Clock::time_point>> begins(kThreads);
  std::vector<std::thread> threads;
  for (auto& mine : begins) {
    threads.emplace_back([&mine, &rate, now] {
      for (int i = 0; i < kEach; ++i) mine.push_back(rate.Book(1000, now));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<Booking> all;
  for (const auto& mine : begins) {
    for (const Clock::time_point begin : mine) all.push_back({now, begin, 1000});
  }
  std::sort(all.begin(), all.end(),
            [](const Booking& a, const Booking& b) { return a.begin < b.begin; });
  ExpectWithinRate(all, kBytesPerS);
  EXPECT_LE(all.back().begin - now, std::chrono::milliseconds(kThreads * kEach));
}

TEST(RateLimitTest, NoLimitIsNone) {
  RateLimit rate(0);
  const Clock::time_point now = Clock::now();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(rate.Book(uint64_t{1} << 60, now), now);
}

}  // namespace
}  // namespace attnd::storage::test
