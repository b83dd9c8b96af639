// SPDX-License-Identifier: Apache-2.0
//
// Goal: whoever leases pages sees the files' bytes for as long as the lease lives, whatever others
// do, and room is given out in order. Method: real files in a cache far too small for them; seeded
// random wants, compared byte for byte; threads; waits for conditions, never for a time.
#include "storage/cache/page_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <thread>
#include <vector>

#include "tests/storage/cache/page_cache_support.h"

namespace attnd::storage::test {
namespace {

constexpr uint64_t kLeaseMax = PageCacheOptions::kBytesMin * 3 / 8;

// As many bytes as a test wishes, counted.
class Account {
 public:
  explicit Account(uint64_t bytes_max) : bytes_max_(bytes_max) {}
  PageMemory memory() {
    return {[this](uint64_t bytes) {
              if (taken_.load() + bytes > bytes_max_) return false;
              taken_ += bytes;
              return true;
            },
            [this](uint64_t bytes) { taken_ -= bytes; }};
  }
  uint64_t taken() const { return taken_.load(); }

 private:
  const uint64_t bytes_max_;
  std::atomic<uint64_t> taken_{0};  // changed under the cache's lock
};

TEST_F(PageCacheTest, OptionsBeyondTheirLimitsAreRefusedByName) {
  PageCacheOptions options = Options(1);
  options.guaranteed_bytes = PageCacheOptions::kBytesMin - 1;
  const auto small = PageCache::Create(options);
  EXPECT_TRUE(absl::IsInvalidArgument(small.status()));
  EXPECT_THAT(std::string(small.status().message()), testing::HasSubstr("guaranteed_bytes"));
  for (const uint32_t readers : {0u, 65u}) {
    const auto cache = PageCache::Create(Options(readers));
    EXPECT_TRUE(absl::IsInvalidArgument(cache.status()));
    EXPECT_THAT(std::string(cache.status().message()), testing::HasSubstr("readers"));
  }
}

TEST_F(PageCacheTest, AFileWithPagesTooLargeForItIsRefused) {
  MakeCache(Options(1));
  EXPECT_EQ(cache_->lease_bytes_max(), kLeaseMax);
  const uint32_t most = 64 << 10;
  MakeSource(1, 2, most);
  std::vector<Want> wants = Wants(0, 0, 2);
  EXPECT_TRUE(Fetch(&wants).ok());
  EXPECT_TRUE(AllHold(0, wants));
  const int file = MakeFile(PagesHeader(1, 2, most + 1, &random_));
  auto opened = SegmentFile::Open(files_.get(), queue_.get(), folder_.Path(std::to_string(file)));
  ASSERT_TRUE(opened.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(cache_->Add(*std::move(opened)).status()));
}

TEST_F(PageCacheTest, PagesThatAreNotThereAreRefused) {
  MakeCache(Options(1));
  MakeSource(2, 7, 1000);
  for (const auto& [head, page] : std::vector<std::pair<uint64_t, uint32_t>>{
           {2, 0}, {0, 7}, {std::numeric_limits<uint64_t>::max(), 0}, {0, UINT32_MAX}}) {
    std::vector<Want> wants = Wants(0, 0, 1);
    wants.push_back({sources_[0], head, page});
    EXPECT_TRUE(absl::IsInvalidArgument(Fetch(&wants).status())) << head << " " << page;
    const std::vector<PageCache::PageId> ids = {{head, page}};
    cache_->Prefetch(sources_[0], ids);
  }
  EXPECT_EQ(cache_->stats().lookups, 0u);
  EXPECT_EQ(cache_->stats().prefetched_pages, 0u);
  ExpectNothingPinned();
}

TEST_F(PageCacheTest, ALeaseTooLargeIsRefused) {
  MakeCache(Options(2));
  MakeSource(1, 200, 4096);
  std::vector<Want> most = Wants(0, 0, kLeaseMax / 4096);
  EXPECT_TRUE(Fetch(&most).ok());
  EXPECT_TRUE(AllHold(0, most));
  std::vector<Want> wants = Wants(0, 0, kLeaseMax / 4096 + 1);
  EXPECT_TRUE(absl::IsResourceExhausted(Fetch(&wants).status()));
  most.clear(), wants.clear();
  ExpectNothingPinned();
}

// Wants of a round, at random: mostly of one file, often neighbours, some twice.
class RandomWants {
 public:
  RandomWants(const std::vector<std::unique_ptr<Sample>>* samples, uint64_t seed)
      : samples_(samples), random_(seed) {}

  // File and page number of each, of `bytes_max` together at most.
  std::vector<std::pair<int, uint64_t>> Next(uint64_t bytes_max) {
    std::vector<std::pair<int, uint64_t>> wants;
    uint64_t bytes = 0, number = 0;
    int file = 0;
    const uint64_t count = random_.Below(random_.Below(4) == 0 ? 100 : 12);
    while (wants.size() <= count) {
      if (wants.empty() || random_.Below(10) == 0) file = static_cast<int>(Below(samples_->size()));
      const SegmentFileHeader& header = (*samples_)[static_cast<size_t>(file)]->header();
      const uint64_t pages = header.heads() * header.pages;
      number = random_.Below(2) == 0 ? (number + 1) % pages : random_.Below(pages);
      bytes += header.page_bytes;
      if (bytes > bytes_max) break;
      wants.emplace_back(file, number);
    }
    return wants;
  }
  uint64_t Below(uint64_t n) { return random_.Below(n); }

 private:
  const std::vector<std::unique_ptr<Sample>>* const samples_;
  Random random_;
};

TEST_F(PageCacheTest, EveryPageIsTheFilesWhateverTheOrder) {
  for (uint64_t round = 0; round < 6; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() + round);
    random_ = Random(TestSeed() + round);
    samples_.clear(), sources_.clear();
    PageCacheOptions options = Options(1 + random_.Below32(4));
    if (round % 2 == 1) options.queue.kind = IoQueueOptions::Kind::kThreads;
    MakeCache(options);
    for (int file = 0; file < 4; ++file) {
      sources_.push_back(AddSource(MakeFile(RandomPagesHeader(&random_))));
    }
    RandomWants random_wants(&samples_, TestSeed() + round);
    uint64_t lookups = 0;
    for (int i = 0; i < 150; ++i) {
      const auto numbers = random_wants.Next(kLeaseMax);
      std::vector<Want> wants;
      uint64_t bytes = 0;
      for (const auto& [file, number] : numbers) {
        wants.push_back(WantOf(file, number));
        bytes += PagePool::FrameBytes(PageCacheOptions::kBytesMin,
                                      wants.back().source->file().header().page_bytes);
      }
      const auto lease = Fetch(&wants);
      ASSERT_TRUE(lease.ok()) << lease.status();
      for (size_t w = 0; w < wants.size(); ++w) ASSERT_TRUE(Holds(numbers[w].first, wants[w]));
      lookups += wants.size();
      ASSERT_EQ(cache_->stats().pinned_bytes, bytes);
    }
    const PageCacheStats stats = cache_->stats();
    EXPECT_EQ(stats.lookups, lookups);
    EXPECT_EQ(stats.read_pages, lookups - stats.hits - stats.late);
    EXPECT_GT(stats.hits, 0u);
    EXPECT_LE(stats.slab_bytes, PageCacheOptions::kBytesMin);
    EXPECT_LE(stats.resident_bytes, stats.slab_bytes);
    EXPECT_EQ(stats.failed_reads, 0u);
    EXPECT_EQ(stats.waiting_pages, 0u);
    ExpectNothingPinned();
    cache_->Stop();
  }
}

// Threads that lease and prefetch what they like, of sources that die and come back, while memory
// beyond the guaranteed part comes and goes.
TEST_F(PageCacheTest, ThreadsSeeTheFilesBytes) {
  constexpr int kThreads = 5, kFiles = 6, kLeases = 80;
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Account account(uint64_t{512} << 10);
  std::atomic<uint64_t> read_bytes{0}, empty_reads{0};
  PageCacheOptions options = Options(3);
  options.more = account.memory();
  options.on_read = [&](uint64_t bytes, std::chrono::nanoseconds time) {
    read_bytes += bytes;
    if (bytes == 0 || time.count() < 0) ++empty_reads;
  };
  MakeCache(options);
  for (int file = 0; file < kFiles; ++file) {
    sources_.push_back(AddSource(MakeFile(RandomPagesHeader(&random_))));
  }
  Mutex mutex;  // of sources_
  std::atomic<int> wrong{0}, failed{0};
  const auto lease_one = [&](RandomWants* random_wants) {
    const auto numbers = random_wants->Next(kLeaseMax);
    std::vector<Want> wants;
    {
      MutexLock lock(mutex);
      for (const auto& [file, number] : numbers) wants.push_back(WantOf(file, number));
    }
    const auto lease = Fetch(&wants);
    if (!lease.ok()) {
      ++failed;
      ADD_FAILURE() << lease.status();
      return;
    }
    for (int look = 0; look < 2; ++look) {
      for (size_t w = 0; w < wants.size(); ++w) wrong += !Holds(numbers[w].first, wants[w]);
      std::this_thread::yield();
    }
  };
  const auto meddle = [&](RandomWants* random_wants, IoQueue* queue) {
    const int file = static_cast<int>(random_wants->Below(kFiles));
    const auto at = static_cast<size_t>(file);
    if (random_wants->Below(4) == 0) cache_->Shrink(random_wants->Below(512 << 10));
    if (random_wants->Below(4) == 0) {
      auto opened = SegmentFile::Open(files_.get(), queue, folder_.Path(std::to_string(file)));
      auto source = cache_->Add(*std::move(opened));
      MutexLock lock(mutex);
      sources_[at].swap(*source);  // the old one dies behind the lock
    }
    std::shared_ptr<Source> source;
    std::vector<PageCache::PageId> ids;
    {
      MutexLock lock(mutex);
      source = sources_[at];
      const SegmentFileHeader& header = samples_[at]->header();
      const uint64_t begin = random_wants->Below(header.heads() * header.pages);
      ids = Ids(file, begin, std::min<uint64_t>(begin + 20, header.heads() * header.pages));
    }
    cache_->Prefetch(source, ids);
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      auto queue = MakeIoQueue({});
      RandomWants random_wants(&samples_, TestSeed() * 100 + static_cast<uint64_t>(t));
      for (int i = 0; i < kLeases; ++i) {
        if (random_wants.Below(3) == 0) meddle(&random_wants, queue->get());
        lease_one(&random_wants);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(failed, 0);
  ExpectNothingPinned();
  const PageCacheStats stats = cache_->stats();
  EXPECT_GT(stats.evictions, 0u);
  EXPECT_EQ(stats.failed_reads, 0u);
  EXPECT_EQ(stats.prefetched_pages, stats.prefetched_used + stats.prefetched_wasted);
  EXPECT_EQ(read_bytes, stats.read_bytes);
  EXPECT_EQ(empty_reads, 0u);
  EXPECT_EQ(account.taken(), cache_->reclaimable_bytes());
  const uint64_t beyond = account.taken();
  EXPECT_EQ(cache_->Shrink(UINT64_MAX), beyond);
  cache_->Stop();
  cache_.reset();
  EXPECT_EQ(account.taken(), 0u);
}

TEST_F(PageCacheTest, LeasedPagesStayWhileOthersGo) {
  MakeCache(Options(2));
  MakeSource(1, 40, 4096);
  MakeSource(4, 200, 4096);
  std::vector<Want> kept = Wants(0, 0, 40);
  auto lease = Fetch(&kept);
  ASSERT_TRUE(lease.ok()) << lease.status();
  for (uint64_t number = 0; number + 50 <= 800; number += 50) {
    std::vector<Want> wants = Wants(1, number, number + 50);
    ASSERT_TRUE(Fetch(&wants).ok());
    ASSERT_TRUE(AllHold(1, wants));
    ASSERT_TRUE(AllHold(0, kept));
  }
  EXPECT_GT(cache_->stats().evictions, 500u);
  // The source's last holder is the lease.
  sources_[0].reset();
  for (Want& want : kept) want.source.reset();
  EXPECT_TRUE(AllHold(0, kept));
  lease->reset();
  ExpectNothingPinned();
}

// A lease that waits for room keeps the room free of those that came later, even if they need
// little.
TEST_F(PageCacheTest, RoomIsGivenInOrder) {
  MakeCache(Options(2));
  MakeSource(1, 300, 4096);
  const uint64_t most = kLeaseMax / 4096;
  std::vector<Want> first = Wants(0, 0, most), second = Wants(0, 0, most - 1);
  auto first_lease = Fetch(&first), second_lease = Fetch(&second);
  ASSERT_TRUE(first_lease.ok() && second_lease.ok());
  std::atomic<bool> through{false};
  std::thread waits([&] {
    std::vector<Want> wants = Wants(0, 100, 100 + most);
    const auto lease = Fetch(&wants);
    EXPECT_TRUE(lease.ok() && AllHold(0, wants)) << lease.status();
    through = true;
  });
  // There is room for one page, until the thread stands in front of it.
  EXPECT_TRUE(Eventually([&] {
    std::vector<Want> one = Wants(0, 0, 1);
    return absl::IsDeadlineExceeded(Fetch(&one, Briefly()).status());
  }));
  EXPECT_FALSE(through);
  std::vector<Want> one = Wants(0, 0, 1);
  EXPECT_TRUE(absl::IsDeadlineExceeded(Fetch(&one, Briefly()).status()));
  first_lease->reset();
  EXPECT_TRUE(Fetch(&one).ok());  // behind the thread, which gets through
  waits.join();
  second_lease->reset();
  first.clear(), second.clear(), one.clear();
  ExpectNothingPinned();
}

// Pages that leave much of their slab empty: what may be pinned is more than the frames there are.
TEST_F(PageCacheTest, AllGetThroughWithPagesThatFillTheirSlabsBadly) {
  for (const uint32_t page_bytes : {33000u, 40000u, 65536u, 18432u}) {
    SCOPED_TRACE(page_bytes);
    samples_.clear(), sources_.clear();
    MakeCache(Options(2));
    MakeSource(2, 40, page_bytes);
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (uint64_t i = 0; i < 30; ++i) {
          const uint64_t begin = (t * 17 + i * 7) % 60;
          std::vector<Want> wants = Wants(0, begin, begin + kLeaseMax / page_bytes);
          const auto lease = Fetch(&wants);
          EXPECT_TRUE(lease.ok()) << lease.status();
          EXPECT_TRUE(AllHold(0, wants));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    ExpectNothingPinned();
    cache_->Stop();
  }
}

// Pages of one size, pinned here and there in every slab, leave none for another size: who needs
// that waits for them to go.
TEST_F(PageCacheTest, AnotherSizeWaitsForASlab) {
  MakeCache(Options(2));
  MakeSource(1, 256, 4096);
  MakeSource(1, 4, 10000);
  for (uint64_t number = 0; number < 256; number += 64) {
    std::vector<Want> wants = Wants(0, number, number + 64);
    ASSERT_TRUE(Fetch(&wants).ok());
  }
  std::vector<Want> scattered;
  for (uint64_t number = 0; number < 256; number += 4) scattered.push_back(WantOf(0, number));
  auto lease = Fetch(&scattered);
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(cache_->stats().read_pages, 256u) << "they were all there";
  std::vector<Want> wants = Wants(1, 0, 4);
  EXPECT_TRUE(absl::IsDeadlineExceeded(Fetch(&wants, Briefly()).status()));
  std::thread waits([&] {
    std::vector<Want> mine = Wants(1, 0, 4);
    const auto other = Fetch(&mine);
    EXPECT_TRUE(other.ok() && AllHold(1, mine)) << other.status();
  });
  EXPECT_TRUE(AllHold(0, scattered));
  lease->reset();
  waits.join();
  scattered.clear(), wants.clear();
  ExpectNothingPinned();
}

}  // namespace
}  // namespace attnd::storage::test
