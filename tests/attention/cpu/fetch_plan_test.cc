// SPDX-License-Identifier: Apache-2.0
//
// Goal: a FetchPlan serves every page that its readers want, in order, with no more pages at a time
// than one call of the store serves, and says which of them are there. Method: small plans whose
// groups are known, and a store that records what it is asked for.
#include "attention/cpu/fetch_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace attnd::attention {
namespace {

using testing::ElementsAre;

constexpr uint64_t kPageBytes = 100;

// Serves pages of so many bytes; their data is an address and nothing more.
class RecordingStore : public PageStore {
 public:
  explicit RecordingStore(uint64_t bytes_max) : bytes_max_(bytes_max) {}
  uint64_t fetch_bytes_max() const override { return bytes_max_; }
  absl::StatusOr<std::unique_ptr<PagePins>> Fetch(std::span<PageWant> wants,
                                                  const PagePatience& /*patience*/) override {
    if (!fault.ok()) return fault;
    calls.emplace_back();
    for (PageWant& want : wants) {
      calls.back().push_back(want.page);
      want.data = missing.contains(want.page) ? nullptr : &page_;
    }
    return std::make_unique<PagePins>();
  }

  std::vector<std::vector<uint32_t>> calls;
  std::set<uint32_t> missing;
  absl::Status fault;

 private:
  const uint64_t bytes_max_;
  const std::byte page_{0};
};

class Payload : public PagedPayload {
 public:
  explicit Payload(PageStore* store) : store_(store) {}
  PageStore* store() const override { return store_; }
  absl::Status status() const override { return absl::OkStatus(); }

 private:
  PageStore* const store_;
};

class FetchPlanTest : public testing::Test {
 protected:
  void Add(size_t reader, uint32_t page, bool may_part = false) {
    plan_.Add(reader, {&payload_, 0, 0, page}, kPageBytes, may_part);
  }
  // Fetches, which must succeed: the group's end and part.
  std::pair<size_t, size_t> Fetch(size_t begin, size_t end) {
    const auto group = plan_.Fetch(begin, end, PagePatience());
    EXPECT_TRUE(group.ok()) << group.status();
    return {group->end, group->part};
  }

  RecordingStore store_{3 * kPageBytes};
  Payload payload_{&store_};
  FetchPlan plan_;
};

using Group = std::pair<size_t, size_t>;

TEST_F(FetchPlanTest, ReadersWithoutPagesAreServedAtOnce) {
  EXPECT_EQ(Fetch(0, 7), Group(7, 0));
  Add(3, 1);
  plan_.Clear();
  EXPECT_EQ(Fetch(0, 7), Group(7, 0));
  EXPECT_THAT(store_.calls, ElementsAre());
}

TEST_F(FetchPlanTest, GroupsHoldWholeReaders) {
  Add(1, 10);
  Add(1, 11);
  Add(2, 12);
  Add(4, 13);
  Add(4, 14);
  EXPECT_EQ(Fetch(0, 6), Group(1, 0));  // what has no page does not wait for one
  EXPECT_EQ(Fetch(1, 6), Group(4, 0));
  EXPECT_EQ(Fetch(4, 6), Group(6, 0));
  EXPECT_THAT(store_.calls, ElementsAre(ElementsAre(10, 11, 12), ElementsAre(13, 14)));
}

TEST_F(FetchPlanTest, AGroupEndsWhereTheCallerSays) {
  for (size_t reader = 0; reader < 3; ++reader) Add(reader, static_cast<uint32_t>(reader));
  EXPECT_EQ(Fetch(0, 2), Group(2, 0));
  EXPECT_EQ(Fetch(2, 2), Group(2, 0));
  EXPECT_EQ(Fetch(2, 5), Group(5, 0));
  EXPECT_THAT(store_.calls, ElementsAre(ElementsAre(0, 1), ElementsAre(2)));
}

TEST_F(FetchPlanTest, AReaderThatIsTooLargeIsParted) {
  for (uint32_t page = 0; page < 7; ++page) Add(0, page, page % 2 == 1);
  Add(1, 7);
  EXPECT_EQ(Fetch(0, 2), Group(1, 2));  // page 2 ends no part
  EXPECT_EQ(Fetch(0, 2), Group(1, 2));
  EXPECT_EQ(Fetch(0, 2), Group(1, 0));  // the rest of it
  EXPECT_EQ(Fetch(1, 2), Group(2, 0));
  EXPECT_THAT(store_.calls, ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3), ElementsAre(4, 5, 6),
                                        ElementsAre(7)));
}

TEST_F(FetchPlanTest, AReaderThatMayNotBePartedIsServedWhole) {
  for (uint32_t page = 0; page < 5; ++page) Add(0, page);
  Add(1, 5);
  EXPECT_EQ(Fetch(0, 2), Group(1, 0));
  EXPECT_EQ(Fetch(1, 2), Group(2, 0));
  EXPECT_THAT(store_.calls, ElementsAre(ElementsAre(0, 1, 2, 3, 4), ElementsAre(5)));
}

TEST_F(FetchPlanTest, APageThatIsWantedTwiceInARowIsFetchedOnce) {
  Add(0, 1);
  Add(0, 1);
  Add(1, 1);
  Add(1, 2);
  Add(2, 3);
  EXPECT_EQ(Fetch(0, 3), Group(3, 0));
  EXPECT_THAT(store_.calls, ElementsAre(ElementsAre(1, 2, 3)));
  EXPECT_EQ(plan_.PagesOf(0).wants().size(), 1u);
  EXPECT_EQ(plan_.PagesOf(1).wants().size(), 2u);
}

TEST_F(FetchPlanTest, PagesAreFoundByPayloadAndNumber) {
  RecordingStore store(100 * kPageBytes);
  const Payload payloads[] = {Payload(&store), Payload(&store), Payload(&store)};
  for (const size_t first : {2, 0, 1}) {  // in no order of addresses
    for (const uint32_t page : {3u, 8u, 9u}) {
      plan_.Add(5, {&payloads[first], 0, 0, page}, kPageBytes, false);
    }
  }
  store.missing = {8};
  EXPECT_EQ(Fetch(5, 6), Group(6, 0));
  const FetchedPages pages = plan_.PagesOf(5);
  for (const Payload& payload : payloads) {
    for (uint32_t page = 0; page < 12; ++page) {
      const PageWant* const want = pages.Find(&payload, page);
      ASSERT_EQ(want != nullptr, page == 3 || page == 9) << page;
      if (want == nullptr) continue;
      EXPECT_EQ(want->payload, &payload);
      EXPECT_EQ(want->page, page);
    }
  }
  EXPECT_EQ(pages.Find(&payload_, 3), nullptr);
  EXPECT_EQ(plan_.PagesOf(4).Find(&payloads[0], 3), nullptr);
}

TEST_F(FetchPlanTest, TheStoresFaultIsTheCallers) {
  Add(0, 1);
  store_.fault = absl::CancelledError("over");
  EXPECT_EQ(plan_.Fetch(0, 1, PagePatience()).status(), store_.fault);
}

// A misuse ends the process before it reads a page that is not there.
TEST(FetchPlanDeathTest, ReadersAndTheirPagesAscend) {
  // Other tests of the program may have left threads, which a fork would not take along.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  RecordingStore store(kPageBytes);
  const Payload payload(&store);
  const auto add = [&](FetchPlan* plan, size_t reader, uint32_t page) {
    plan->Add(reader, {&payload, 0, 0, page}, kPageBytes, false);
  };
  FetchPlan plan;
  add(&plan, 1, 5);
  EXPECT_DEATH(add(&plan, 0, 6), "readers are listed in their order");
  EXPECT_DEATH(add(&plan, 1, 4), "pages of one payload ascend");
  EXPECT_DEATH((void)plan.Fetch(2, 3, PagePatience()), "passed over");
}

}  // namespace
}  // namespace attnd::attention
