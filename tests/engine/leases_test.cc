// SPDX-License-Identifier: Apache-2.0
//
// Goal: an engine closes a sequence when its lease has ended, exactly as Close does, and every
// method that names a sequence keeps the lease from ending. Method: a clock that the test moves. To
// know that the engine has looked at its leases, a test waits for the end of a second sequence, the
// canary, whose lease is over at the same time. Calls under way are those that call the test back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/mutex.h"
#include "tests/engine/archive/archive_fixture.h"
#include "tests/engine/support.h"
#include "tests/manual_clock.h"

namespace attnd::engine::test {
namespace {

using attnd::test::ManualClock;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

constexpr seconds kLease{60};

// Remembers which leases have ended.
class EndedObserver : public EventListener {
 public:
  void OnLeaseEnded(uint64_t sequence_id, seconds lease) override {
    MutexLock lock(mutex_);
    ended_[sequence_id] = lease;
  }
  void OnSegmentBuilt(BuildTrigger, uint64_t, std::chrono::nanoseconds) override {
    if (on_built) on_built();
  }
  std::optional<seconds> EndedOf(uint64_t sequence_id) {
    MutexLock lock(mutex_);
    const auto found = ended_.find(sequence_id);
    return found != ended_.end() ? std::optional(found->second) : std::nullopt;
  }

  std::function<void()> on_built;  // set before the engine builds

 private:
  Mutex mutex_;
  std::map<uint64_t, seconds> ended_ ABSL_GUARDED_BY(mutex_);
};

class LeasesTest : public ArchiveFixture {
 protected:
  LeasesTest() : ArchiveFixture(MakeShape(2, 2, 1, 32, 32, DType::kFp32)) {
    options_ = Options();
    options_.lease_clock = clock_.function();
    Start(options_, &observer_);
  }
  ~LeasesTest() override { engine_.reset(); }  // before its observer

  OpenArgs Leased(seconds lease = kLease) const {
    OpenArgs args = Args();
    args.lease = lease;
    return args;
  }
  TestSequence OpenLeased(seconds lease = kLease) { return Open(Leased(lease)); }
  // A leased sequence with tokens, as a client leaves it.
  TestSequence Filled(uint64_t tokens = 700) {
    TestSequence sequence = OpenLeased();
    Prefill(&sequence, tokens, &random_);
    FinishPrefill(&sequence);
    return sequence;
  }
  // Time passes until a lease that began now would be over, and the engine has seen that.
  void PassLease(seconds lease = kLease) {
    const uint64_t canary = OpenLeased(lease).id;
    clock_.Advance(lease);
    ASSERT_TRUE(WaitForEnd(canary));
  }
  bool WaitForEnd(uint64_t id) {
    const auto limit = std::chrono::steady_clock::now() + seconds(20);
    while (!observer_.EndedOf(id).has_value()) {
      if (std::chrono::steady_clock::now() > limit) return false;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
  }
  // Names no sequence, and so renews nothing.
  bool IsOpen(uint64_t id) {
    const auto page = engine_->List(kTenant, id - 1, 1);
    return !page.empty() && page[0].id == id;
  }
  // Nothing called the sequence since `call` began.
  void ExpectRenewedBy(uint64_t id, const std::string& name, const std::function<void()>& call) {
    SCOPED_TRACE(name);
    clock_.Advance(kLease - seconds(1));
    call();
    PassLease(kLease - seconds(1));
    EXPECT_TRUE(IsOpen(id));
  }

  ManualClock clock_;
  EngineOptions options_;
  EndedObserver observer_;
};

TEST_F(LeasesTest, ASequenceThatNobodyCallsIsClosed) {
  const TestSequence forever = Open();
  const uint64_t empty_bytes = engine_->usage().resident_bytes;
  const TestSequence sequence = Filled();
  EXPECT_GT(engine_->usage().resident_bytes, empty_bytes + 700 * 2 * 2 * 32 * sizeof(float));
  EXPECT_EQ(engine_->usage().leased_sequences, 1u);
  PassLease(kLease - seconds(1));
  EXPECT_TRUE(IsOpen(sequence.id));
  clock_.Advance(seconds(1));
  ASSERT_TRUE(WaitForEnd(sequence.id));
  EXPECT_EQ(observer_.EndedOf(sequence.id), kLease);
  EXPECT_FALSE(IsOpen(sequence.id));
  EXPECT_EQ(engine_->Close(kTenant, sequence.id).code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(engine_->Info(kTenant, sequence.id).status().message()),
              HasSubstr("its lease has ended"));
  EXPECT_TRUE(IsOpen(forever.id));
  // The thread frees the memory after the sequence has left the list.
  for (int i = 0; i < 20000 && engine_->usage().resident_bytes > empty_bytes; ++i) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(engine_->usage().resident_bytes, empty_bytes);
  EXPECT_EQ(engine_->usage().sequences, 1u);
  EXPECT_EQ(engine_->usage().leased_sequences, 0u);
}

TEST_F(LeasesTest, EveryCallThatNamesTheSequenceRenewsItsLease) {
  TestSequence sequence = Filled();
  const uint64_t id = sequence.id;
  ExpectRenewedBy(id, "Append", [&] {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(AppendNext(&sequence, layer, RandomKv(shape_, 3, &random_)).ok());
    }
  });
  ExpectRenewedBy(id, "a refused Append", [&] {
    Kv kv = RandomKv(shape_, 1, &random_);
    kv.v.Set(0, 1e30f);
    ASSERT_FALSE(AppendNext(&sequence, 0, kv).ok());
  });
  ExpectRenewedBy(id, "FinishPrefill", [&] { FinishPrefill(&sequence); });
  ExpectRenewedBy(id, "Decode", [&] { Generate(&sequence, 1, &random_); });
  ExpectRenewedBy(id, "Decode that only queries", [&] {
    ASSERT_TRUE(SendRow(QueryOnlyRow(&sequence, 0, 1, &random_), 0).row_status(0).ok());
  });
  ExpectRenewedBy(id, "Observe", [&] {
    const Numbers queries = RandomNumbers(DType::kFp32, 2 * 32, &random_);
    ObservedChunk chunk;
    chunk.tokens = 1;
    chunk.heads = 2;
    chunk.head_dim = 32;
    chunk.queries = queries.view();
    ASSERT_TRUE(engine_->Observe(kTenant, kWriter, id, chunk).ok());
  });
  ExpectRenewedBy(id, "Info", [&] { sequence.Info(); });
  ExpectRenewedBy(id, "Truncate", [&] { ASSERT_TRUE(engine_->Truncate(kTenant, id, 650).ok()); });
  ExpectRenewedBy(id, "Fork", [&] { ASSERT_TRUE(engine_->Fork(kTenant, id, std::nullopt).ok()); });
  ExpectRenewedBy(id, "Seal", [&] { Seal(sequence); });
  ExpectRenewedBy(id, "BeginCall", [&] { ASSERT_TRUE(engine_->BeginCall(kTenant, id).ok()); });
}

TEST_F(LeasesTest, ListingsAndOtherTenantsRenewNothing) {
  const TestSequence sequence = Filled();
  clock_.Advance(kLease - seconds(1));
  const auto listed = engine_->List(kTenant, 0, 10);
  ASSERT_EQ(listed.size(), 1u);
  EXPECT_EQ(listed[0].args.lease, kLease);
  EXPECT_EQ(listed[0].lease_left, seconds(1));
  EXPECT_FALSE(engine_->Info("other", sequence.id).ok());
  EXPECT_FALSE(engine_->BeginCall("other", sequence.id).ok());
  // Nor does a prompt that is compared with the tenant's sequences.
  ASSERT_TRUE(engine_->OpenReusing(kTenant, Args(), Ids(700), nullptr).ok());
  clock_.Advance(seconds(1));
  EXPECT_TRUE(WaitForEnd(sequence.id));
}

// The step's answer is written while its sequence's lease would long be over.
TEST_F(LeasesTest, AStepHoldsItsSequences) {
  TestSequence sequence = Filled();
  const Row row = NextRow(&sequence, 0, 1, &random_);
  const Message message(0, {row});
  AnswerVectors vectors;
  DecodeResult result;
  const auto memory = [&](const AnswerExtents& extents) {
    PassLease(10 * kLease);
    EXPECT_TRUE(IsOpen(sequence.id));
    return vectors(extents);
  };
  ASSERT_TRUE(engine_->Decode(kTenant, kWriter, message.args, memory, &result).ok());
  EXPECT_TRUE(result.rows[0].status.ok()) << result.rows[0].status;
  PassLease(kLease - seconds(1));  // counts from the step's end
  EXPECT_TRUE(IsOpen(sequence.id));
  clock_.Advance(seconds(1));
  EXPECT_TRUE(WaitForEnd(sequence.id));
}

// Building takes longer than the lease.
TEST_F(LeasesTest, APrefillThatIsSegmentedHoldsItsSequence) {
  TestSequence sequence = OpenLeased();
  const uint64_t canary = OpenLeased().id;
  Prefill(&sequence, 1200, &random_);
  bool open = false;
  observer_.on_built = [&] {
    if (observer_.EndedOf(canary).has_value()) return;
    clock_.Advance(2 * kLease);
    EXPECT_TRUE(WaitForEnd(canary));
    open = !observer_.EndedOf(sequence.id).has_value();
  };
  FinishPrefill(&sequence);
  EXPECT_TRUE(open);
  EXPECT_TRUE(IsOpen(sequence.id));
}

TEST_F(LeasesTest, ACallWithoutAMethodHoldsUntilItEnds) {
  const TestSequence sequence = OpenLeased();
  auto call = engine_->BeginCall(kTenant, sequence.id);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->lease(), kLease);
  auto second = engine_->BeginCall(kTenant, sequence.id);
  PassLease(3 * kLease);
  call->End();
  PassLease(3 * kLease);
  EXPECT_TRUE(IsOpen(sequence.id));
  second->End();
  second->End();  // does nothing more
  PassLease();
  EXPECT_FALSE(IsOpen(sequence.id));
}

// A call that only holds the lease is no use of the memory.
TEST_F(LeasesTest, AHeldSequenceCanBeClosed) {
  const uint64_t before = engine_->usage().resident_bytes;
  const TestSequence sequence = Filled();
  const auto call = engine_->BeginCall(kTenant, sequence.id);
  ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  engine_->WaitForBackground();
  EXPECT_EQ(engine_->usage().resident_bytes, before);
  EXPECT_EQ(engine_->usage().leased_sequences, 0u);
}

TEST_F(LeasesTest, AForkHasALeaseOfItsOwnOfTheSameLength) {
  TestSequence parent = Filled(1200);
  const auto forked = engine_->Fork(kTenant, parent.id, std::nullopt);
  ASSERT_TRUE(forked.ok()) << forked.status();
  EXPECT_EQ(forked->args.lease, kLease);
  TestSequence child = Adopt(forked->id, parent.history);
  clock_.Advance(kLease - seconds(1));
  Generate(&child, 1, &random_, /*check=*/true);
  clock_.Advance(seconds(1));
  ASSERT_TRUE(WaitForEnd(parent.id));
  EXPECT_TRUE(AnswersDense(&child, &random_)) << "what both had stays with the fork";
  PassLease();
  EXPECT_FALSE(IsOpen(child.id));
}

// Sealed sequences outlive leases, and what is resumed has the lease that it is opened with.
TEST_F(LeasesTest, SealedSequencesHaveNoLease) {
  const TestSequence sequence = Filled();
  const SealResult sealed = Seal(sequence);
  PassLease(2 * kLease);
  EXPECT_FALSE(IsOpen(sequence.id));
  const auto resumed = Resume(sealed.sealed_id, sequence.history);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->Info().args.lease, seconds(0));
  const auto leased = engine_->Resume(kTenant, Leased(), sealed.sealed_id, nullptr);
  ASSERT_TRUE(leased.ok()) << leased.status();
  PassLease();
  EXPECT_TRUE(IsOpen(resumed->id));
  EXPECT_FALSE(IsOpen(leased->sequence_id));
  Start(options_, &observer_);  // as a restart of the server
  EXPECT_TRUE(engine_->List(kTenant, 0, 10).empty());
  EXPECT_TRUE(Resume(sealed.sealed_id, sequence.history).ok());
}

TEST_F(LeasesTest, LeasesHaveALimit) {
  for (const seconds lease : {seconds(-1), kLeaseMax + seconds(1)}) {
    const absl::Status status = engine_->Open(kTenant, Leased(lease)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("lease_seconds"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("allowed are 0..604800"));
  }
  EXPECT_EQ(engine_->usage().sequences, 0u);
  EXPECT_TRUE(engine_->Open(kTenant, Leased(kLeaseMax)).ok());
}

// Leases end while sequences are called, closed and forked by several threads, on the real clock's
// scale of the engine's rounds: the sanitizers look at it.
TEST_F(LeasesTest, LeasesEndWhileOthersUseTheEngine) {
  constexpr int kThreads = 4;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Random random(seed_ + static_cast<uint64_t>(t));
      while (!stop) {
        TestSequence sequence = OpenSequence(engine_.get(), shape_);
        const auto leased = engine_->Open(kTenant, Leased(seconds(1)));
        ASSERT_TRUE(leased.ok()) << leased.status();
        for (uint64_t i = random.Below(6); i > 0; --i) {
          const auto call = engine_->BeginCall(kTenant, *leased);
          engine_->Fork(kTenant, *leased, std::nullopt).status().IgnoreError();
          clock_.Advance(milliseconds(random.Below(100)));
        }
        if (random.Below(2) == 0) engine_->Close(kTenant, *leased).IgnoreError();
        ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
        std::this_thread::sleep_for(milliseconds(1));
      }
    });
  }
  std::this_thread::sleep_for(milliseconds(600));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  const uint64_t last = OpenLeased(seconds(1)).id;
  clock_.Advance(seconds(1));
  ASSERT_TRUE(WaitForEnd(last));
  EXPECT_EQ(engine_->usage().leased_sequences, 0u);
}

}  // namespace
}  // namespace attnd::engine::test
