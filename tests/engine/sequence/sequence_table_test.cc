// SPDX-License-Identifier: Apache-2.0
//
// Goal: a lease ends when no call has named its sequence for so long, neither earlier nor later,
// and never under a call. Method: random openings, calls that overlap, listings, closings and
// pauses of several tenants beside a plain model, by a clock that the test moves. No thread.
#include "engine/sequence/sequence_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/support.h"
#include "tests/manual_clock.h"

namespace attnd::engine::test {
namespace {

using attnd::test::ManualClock;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;
using testing::Not;

class SequenceTableTest : public testing::Test {
 protected:
  uint64_t Open(seconds lease, const std::string& tenant = kTenant) {
    OpenArgs args = ArgsOf(MakeShape(1, 1, 1, 16, 16, DType::kFp32), PolicyOf("dense"));
    args.indexes.emplace();
    args.lease = lease;
    const uint64_t id = table_.NewId().value();
    auto sequence = Sequence::Create(id, tenant, args, 4096, &budget_);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    EXPECT_TRUE(table_.Publish(*std::move(sequence)).ok());
    return id;
  }
  bool IsOpen(uint64_t id, const std::string& tenant = kTenant) {
    const auto page = table_.List(tenant, id - 1, 1);
    return !page.empty() && page[0].sequence->id() == id;
  }
  // The ids of all sequences whose leases have ended.
  std::vector<uint64_t> TakeAllEnded() {
    std::vector<uint64_t> ids;
    while (const auto ended = table_.TakeEnded()) ids.push_back(ended->id());
    std::sort(ids.begin(), ids.end());
    return ids;
  }

  ManualClock clock_;
  MemoryBudget budget_{uint64_t{64} << 20};
  SequenceTable table_{4096, clock_.function()};
};

TEST_F(SequenceTableTest, LeasesEndWhenNoCallHasNamedTheirSequencesForSoLong) {
  struct Modelled {
    std::string tenant;
    milliseconds lease{0};
    milliseconds idle_since{0};
    std::vector<Lease::Call> calls;
  };
  Random random(TestSeed());
  std::map<uint64_t, Modelled> model;
  milliseconds now{0};
  int ended = 0, renewed = 0;
  for (int step = 0; step < 20000; ++step) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << " step " << step);
    if (model.size() < 8) {
      const std::string tenant = random.Below(2) == 0 ? "red" : "blue";
      const seconds lease(random.Below(4));
      model[Open(lease, tenant)] = {tenant, lease, now, {}};
    }
    auto it = model.begin();
    std::advance(it, random.Below(model.size()));
    auto& [id, modelled] = *it;
    switch (random.Below(8)) {
      case 0: {
        const milliseconds pause(random.Below(1500));
        clock_.Advance(pause);
        now += pause;
        break;
      }
      case 1:  // a call of somebody else renews nothing
        EXPECT_FALSE(table_.Find(modelled.tenant == "red" ? "blue" : "red", id).ok());
        break;
      case 2:
        EXPECT_TRUE(IsOpen(id, modelled.tenant));
        break;
      case 3:
        if (random.Below(4) != 0) break;
        EXPECT_TRUE(table_.Remove(modelled.tenant, id).ok());
        model.erase(it);
        break;
      case 4:
      case 5: {  // a call begins
        auto call = random.Below(2) == 0 ? table_.Find(modelled.tenant, id)
                                         : table_.FindToWrite(modelled.tenant, id, 1);
        ASSERT_TRUE(call.ok()) << call.status();
        modelled.calls.push_back(std::move(call->call));
        break;
      }
      default:  // a call ends
        if (modelled.calls.empty()) break;
        modelled.calls.pop_back();
        modelled.idle_since = now;
        ++renewed;
    }
    std::vector<uint64_t> expected;
    for (const auto& [other, each] : model) {
      const bool over =
          each.lease > seconds(0) && each.calls.empty() && now >= each.idle_since + each.lease;
      if (over) expected.push_back(other);
    }
    ASSERT_EQ(TakeAllEnded(), expected);
    ended += static_cast<int>(expected.size());
    for (const uint64_t gone : expected) model.erase(gone);
    EXPECT_EQ(table_.size(), model.size());
    EXPECT_EQ(table_.leased(), std::count_if(model.begin(), model.end(), [](const auto& each) {
                return each.second.lease > seconds(0);
              }));
  }
  EXPECT_GT(ended, 300);
  EXPECT_GT(renewed, 1000);
}

TEST_F(SequenceTableTest, AListingTellsWhatIsLeft) {
  const uint64_t id = Open(seconds(10));
  const uint64_t forever = Open(seconds(0));
  clock_.Advance(seconds(4));
  const auto left = [&](uint64_t which) {
    return table_.List(kTenant, which - 1, 1)[0].lease_left;
  };
  EXPECT_EQ(left(id), seconds(6));
  EXPECT_EQ(left(forever), seconds(0));
  {
    const auto called = table_.Find(kTenant, id);
    clock_.Advance(seconds(4));
    EXPECT_EQ(left(id), seconds(10)) << "a call is under way";
  }
  clock_.Advance(seconds(11));
  EXPECT_EQ(left(id), seconds(0)) << "it is about to be closed";
}

// The owner is told why, for some time; nobody else is.
TEST_F(SequenceTableTest, NotFoundSaysThatTheLeaseHasEnded) {
  const uint64_t oldest = Open(seconds(100));
  const uint64_t id = Open(seconds(7));
  const uint64_t closed = Open(seconds(7));
  ASSERT_TRUE(table_.Remove(kTenant, closed).ok());
  clock_.Advance(seconds(7));
  ASSERT_EQ(TakeAllEnded(), std::vector<uint64_t>{id});
  const auto message = [&](const std::string& tenant, uint64_t which) {
    const absl::Status status = table_.Find(tenant, which).status();
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(message(kTenant, id), HasSubstr("no call named it for 7 s, so its lease has ended"));
  EXPECT_THAT(message("other", id), Not(HasSubstr("lease")));
  EXPECT_THAT(message(kTenant, closed), Not(HasSubstr("lease")));
  for (int i = 0; i < 1024; ++i) Open(seconds(1));  // as many as are remembered
  clock_.Advance(seconds(1));
  ASSERT_EQ(TakeAllEnded().size(), 1024u);
  EXPECT_THAT(message(kTenant, id), Not(HasSubstr("lease")));
  clock_.Advance(seconds(100));
  ASSERT_EQ(TakeAllEnded(), std::vector<uint64_t>{oldest});
  EXPECT_THAT(message(kTenant, oldest), HasSubstr("lease")) << "the newest end, not the newest id";
}

}  // namespace
}  // namespace attnd::engine::test
