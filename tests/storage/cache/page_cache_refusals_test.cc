// SPDX-License-Identifier: Apache-2.0
//
// Goal: whatever allocation the system refuses while pages are fetched or read ahead, in the
// caller, in a reader or in its queue, the caller hears RESOURCE_EXHAUSTED or has its pages; no
// page is lost on its way and nothing stays pinned. Method: each allocation is refused in turn,
// alone and with the two behind it; then all pages must come.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "storage/cache/page_cache.h"
#include "tests/storage/cache/page_cache_support.h"
#include "tests/system_faults.h"

namespace attnd::storage::test {
namespace {

using attnd::test::AllocationRefused;

constexpr uint32_t kPage = 4096;
constexpr uint64_t kPages = 90;  // more than a reader takes at once

struct Refusals {
  IoQueueOptions::Kind queue;
  uint64_t count;
};

class PageCacheRefusalsTest : public PageCacheTest, public testing::WithParamInterface<Refusals> {
 protected:
  using PageIds = std::vector<PageCache::PageId>;
  // A cache without a page, and every allocation of `call`, which may ask for these pages, refused
  // in turn.
  template <typename F>
  void RefuseEach(const F& call) {
    bool refused = true;
    for (uint64_t allocation = 0; refused; ++allocation) {
      SCOPED_TRACE(testing::Message() << "allocation " << allocation);
      sources_.clear();
      if (cache_ != nullptr) cache_->Stop();
      PageCacheOptions options = Options(1);
      options.queue.kind = GetParam().queue;
      MakeCache(options);
      sources_.push_back(AddSource(0));
      std::vector<Want> asked = Wants(0, 0, kPages);
      const PageIds ids = Ids(0, 0, 20);
      {
        const AllocationRefused some(allocation, GetParam().count);
        call(&asked, ids);
        // Readers may still be at it: what they are refused is part of the call.
        while (cache_->stats().waiting_pages > 0) std::this_thread::yield();
        refused = some.refused();
      }
      {
        auto lease = Fetch(&asked);
        ASSERT_TRUE(lease.ok()) << lease.status();
        if (!AllHold(0, asked)) {  // it may have joined a read that was refused memory
          lease = nullptr;
          asked = Wants(0, 0, kPages);
          lease = Fetch(&asked);
          ASSERT_TRUE(lease.ok()) << lease.status();
        }
        ASSERT_TRUE(AllHold(0, asked));
      }
      ASSERT_EQ(cache_->stats().pinned_bytes, 0u);
      ASSERT_LT(allocation, 2000u);
    }
  }
  void SetUp() override { MakeFile(PagesHeader(1, 100, kPage, &random_)); }
};

TEST_P(PageCacheRefusalsTest, Fetch) {
  RefuseEach([&](std::vector<Want>* wants, const PageIds& /*ids*/) {
    const auto lease = Fetch(wants);
    if (!lease.ok()) {
      EXPECT_TRUE(absl::IsResourceExhausted(lease.status())) << lease.status();
      return;
    }
    for (const Want& want : *wants) {
      if (want.data == nullptr) {
        EXPECT_TRUE(absl::IsResourceExhausted(sources_[0]->status())) << sources_[0]->status();
      }
    }
  });
}

TEST_P(PageCacheRefusalsTest, FetchWhatIsThere) {
  RefuseEach([&](std::vector<Want>* wants, const PageIds& /*ids*/) {
    const auto lease = Fetch(wants, {{}, /*partial=*/true, nullptr});
    if (!lease.ok()) {
      EXPECT_TRUE(absl::IsResourceExhausted(lease.status())) << lease.status();
    }
  });
}

TEST_P(PageCacheRefusalsTest, Prefetch) {
  RefuseEach([&](std::vector<Want>* wants, const PageIds& ids) {
    cache_->Prefetch(sources_[0], ids);
    wants->resize(ids.size());
    static_cast<void>(Fetch(wants));  // until the reader is through
  });
}

INSTANTIATE_TEST_SUITE_P(Queues, PageCacheRefusalsTest,
                         testing::Values(Refusals{IoQueueOptions::Kind::kAuto, 1},
                                         Refusals{IoQueueOptions::Kind::kAuto, 3},
                                         Refusals{IoQueueOptions::Kind::kThreads, 1},
                                         Refusals{IoQueueOptions::Kind::kThreads, 3}),
                         [](const testing::TestParamInfo<Refusals>& which) {
                           return std::string(which.param.queue == IoQueueOptions::Kind::kAuto
                                                  ? "Auto"
                                                  : "Threads") +
                                  std::to_string(which.param.count);
                         });

}  // namespace
}  // namespace attnd::storage::test
