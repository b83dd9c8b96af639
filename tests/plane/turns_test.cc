// SPDX-License-Identifier: Apache-2.0
//
// Goal: client and server take turns, and neither passes on a word that an earlier pass left, a
// later layer's, or another value. Method: both ends over one region, in two mappings as in two
// processes, and in one, where the thread sanitizer sees both sides; each layer's data is checked
// on the other side.
#include "plane/turns.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <ostream>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "plane/region.h"
#include "plane/word_wait.h"

namespace attnd::plane {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

struct Case {
  std::chrono::microseconds spin;
  bool one_mapping;
};
void PrintTo(const Case& test, std::ostream* out) {
  *out << "spin of " << test.spin.count() << " us, " << (test.one_mapping ? 1 : 2) << " mappings";
}

class TurnsTest : public ::testing::TestWithParam<Case> {
 protected:
  TurnsTest() {
    OwnedFd descriptor;
    server_memory_ = *Region::Create(4096, &descriptor);
    client_memory_ = *Region::Map(descriptor, 4096);
  }
  Words* server_words() { return reinterpret_cast<Words*>(server_memory_->data()); }
  const Region& client_memory() {
    return GetParam().one_mapping ? *server_memory_ : *client_memory_;
  }
  Words* client_words() { return reinterpret_cast<Words*>(client_memory().data()); }
  static uint64_t* Cell(const Region& region, size_t number) {
    return reinterpret_cast<uint64_t*>(region.data() + 1024) + 64 * number;
  }
  void ExpectWaitingEnds(Waiting waiting);
  static ServerTurns::Wait Until(std::chrono::milliseconds time) {
    return {.limit = Clock::now() + time};
  }

  std::unique_ptr<Region> server_memory_, client_memory_;
};
INSTANTIATE_TEST_SUITE_P(Waits, TurnsTest,
                         ::testing::Values(Case{0us, false}, Case{50us, false}, Case{0us, true},
                                           Case{50us, true}));

TEST_P(TurnsTest, LayersAreAnsweredInOrder) {
  constexpr uint32_t kPasses = 200, kLayers = 16;
  std::atomic<uint32_t> first{0};  // of the pass that is declared, 0 while there is none
  std::thread server([&] {
    for (uint32_t pass = 0; pass < kPasses; ++pass) {
      while (first == 0) std::this_thread::yield();
      ServerTurns turns(server_words(), first.exchange(0), kLayers);
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        ASSERT_EQ(turns.layer(), layer);
        ASSERT_TRUE(turns.AwaitRing({.limit = Clock::now() + 30s, .spin = GetParam().spin}).ok());
        ASSERT_EQ(*Cell(*server_memory_, 0), uint64_t{pass} * kLayers + layer);
        *Cell(*server_memory_, 1) = 3 * *Cell(*server_memory_, 0);
        turns.Answer(layer);
      }
    }
  });
  ClientTurns turns(client_words());
  for (uint32_t pass = 0; pass < kPasses; ++pass) {
    const uint32_t epoch = turns.Begin(kLayers);
    ASSERT_NE(epoch, 0u);
    for (uint64_t layer = 0; layer < kLayers; ++layer) {
      *Cell(client_memory(), 0) = pass * kLayers + layer;
      turns.Ring();
      if (layer == 0) first = epoch;  // after the first layer is there
      ASSERT_EQ(turns.Await(GetParam().spin, Clock::now() + 30s), ClientTurns::Answer::kLayer);
      ASSERT_EQ(*Cell(client_memory(), 1), 3 * (pass * kLayers + layer));
      ASSERT_EQ(turns.failed_rows(), layer);
    }
  }
  server.join();
}

TEST_P(TurnsTest, AWordThatWasLeftBehindIsNoTurn) {
  ClientTurns client(client_words());
  const uint32_t first = client.Begin(2);
  client.Ring();
  ServerTurns server(server_words(), first, 2);
  ASSERT_TRUE(server.AwaitRing(Until(10s)).ok());
  server.Answer(0);
  ASSERT_EQ(client.Await(0us, Clock::now() + 10s), ClientTurns::Answer::kLayer);
  // The server waits for layer 1, the word still has layer 0's epoch.
  EXPECT_TRUE(absl::IsDeadlineExceeded(server.AwaitRing(Until(30ms))));
  server.GiveUp(0);
  // A new pass: neither side sees anything of the old one.
  const uint32_t second = client.Begin(2);
  EXPECT_GT(second, first + 2);
  ServerTurns next(server_words(), second, 2);
  EXPECT_TRUE(absl::IsDeadlineExceeded(next.AwaitRing(Until(30ms))));
  client.Ring();
  EXPECT_EQ(client.Await(GetParam().spin, Clock::now() + 30ms), ClientTurns::Answer::kNone);
  EXPECT_TRUE(next.AwaitRing(Until(10s)).ok());
}

TEST_P(TurnsTest, AnotherValueGivesThePassUp) {
  for (const int64_t off : {int64_t{1}, int64_t{-2}, int64_t{1} << 31}) {
    ClientTurns client(client_words());
    const uint32_t first = client.Begin(3);
    WriteWord(&client_words()->ring, first + static_cast<uint32_t>(off));
    const ServerTurns server(server_words(), first, 3);
    EXPECT_TRUE(absl::IsInvalidArgument(server.AwaitRing(Until(10s)))) << off;
  }
}

// A GPU's pass that is declared while the one before has turns: its first ring is waited for
// whatever earlier epoch the word has, and however the word moves up to it.
TEST_P(TurnsTest, APassDeclaredAheadWaitsForItsOwnRing) {
  constexpr uint32_t kFirst = 7;  // epochs before it are beyond the end of 32 bits, too
  const auto looking = [](std::chrono::milliseconds time) {
    ServerTurns::Wait wait = Until(time);
    wait.waiting = Waiting::kLooking;
    return wait;
  };
  uint32_t* const ring = &client_words()->ring;
  for (const uint32_t behind : {1u, 2u, 40u, 1u << 31}) {
    WriteWord(ring, kFirst - behind);
    ServerTurns server(server_words(), kFirst, 2);
    EXPECT_TRUE(absl::IsDeadlineExceeded(server.AwaitRing(looking(30ms)))) << behind;
    std::thread client([&] {
      for (const uint32_t left : {3u, 2u, 1u}) {
        WriteWord(ring, kFirst - left);
        std::this_thread::sleep_for(2ms);
      }
      WriteWord(ring, kFirst);
    });
    EXPECT_TRUE(server.AwaitRing(looking(10s)).ok()) << behind;
    client.join();
    server.Answer(0);
    // Behind the first layer the word counts as ever.
    EXPECT_TRUE(absl::IsDeadlineExceeded(server.AwaitRing(looking(30ms))));
    WriteWord(ring, kFirst - 1);
    EXPECT_TRUE(absl::IsInvalidArgument(server.AwaitRing(looking(10s))));
  }
  for (const uint32_t ahead : {1u, 2u, (1u << 31) - 1}) {
    WriteWord(ring, kFirst + ahead);
    const ServerTurns server(server_words(), kFirst, 2);
    EXPECT_TRUE(absl::IsInvalidArgument(server.AwaitRing(looking(10s)))) << ahead;
  }
}

TEST_P(TurnsTest, AGivenUpPassWakesItsClient) {
  ClientTurns client(client_words());
  const uint32_t first = client.Begin(3);
  client.Ring();
  std::thread server([&] {
    ServerTurns turns(server_words(), first, 3);
    EXPECT_TRUE(turns.AwaitRing(Until(10s)).ok());
    std::this_thread::sleep_for(20ms);
    turns.GiveUp(2);
  });
  EXPECT_EQ(client.Await(GetParam().spin, Clock::now() + 10s), ClientTurns::Answer::kOver);
  EXPECT_EQ(client.failed_rows(), 2u);
  server.join();
}

TEST_P(TurnsTest, EpochsGoOverTheEndOf32Bits) {
  constexpr uint32_t kFirst = 0xFFFFFFFE;
  WriteWord(&client_words()->ring, kFirst - 1);
  ServerTurns server(server_words(), kFirst, 4);
  for (const uint32_t epoch : {0xFFFFFFFEu, 0xFFFFFFFFu, 0u, 1u}) {
    WriteWord(&client_words()->ring, epoch);
    ASSERT_TRUE(server.AwaitRing(Until(10s)).ok()) << epoch;
    server.Answer(0);
    EXPECT_EQ(ReadWord(&client_words()->answer), epoch);
  }
}

// A ring as a GPU writes it: without a wake. Where the server sleeps in the futex such a ring is
// seen every kLookPeriod alone, so most of these waits end late there; where it looks, none may.
TEST_P(TurnsTest, ARingThatWakesNobodyIsLookedFor) {
  constexpr uint32_t kLayers = 100;
  const uint32_t first = ClientTurns(client_words()).Begin(kLayers);
  std::atomic<uint32_t> waits_for{0};
  std::atomic<int64_t> rung_at{0};
  std::thread client([&] {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      while (waits_for != layer + 1) std::this_thread::yield();
      std::this_thread::sleep_for(1ms);  // the server's spin is over
      rung_at = Clock::now().time_since_epoch().count();
      std::atomic_ref<uint32_t>(client_words()->ring).store(first + layer);
    }
  });
  ServerTurns server(server_words(), first, kLayers);
  std::vector<Clock::duration> late;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    waits_for = layer + 1;
    ASSERT_TRUE(server
                    .AwaitRing({.limit = Clock::now() + 30s,
                                .spin = GetParam().spin,
                                .waiting = Waiting::kLooking})
                    .ok());
    late.push_back(Clock::now().time_since_epoch() - Clock::duration(rung_at));
    server.Answer(0);
  }
  client.join();
  // The median, as a machine with other work may be late by anything.
  std::nth_element(late.begin(), late.begin() + kLayers / 2, late.end());
  EXPECT_LT(late[kLayers / 2], ServerTurns::kLookPeriod / 4);
}

TEST_P(TurnsTest, WaitingEnds) {
  for (const Waiting waiting : {Waiting::kWoken, Waiting::kLooking}) ExpectWaitingEnds(waiting);
}

void TurnsTest::ExpectWaitingEnds(Waiting waiting) {
  ClientTurns client(client_words());
  const ServerTurns server(server_words(), client.Begin(1), 1);
  std::atomic<bool> cancelled{false}, stopping{false};
  const ServerTurns::Wait wait = {.limit = Clock::now() + 60s,
                                  .spin = GetParam().spin,
                                  .waiting = waiting,
                                  .cancelled = &cancelled,
                                  .stopping = &stopping};
  for (std::atomic<bool>* flag : {&cancelled, &stopping}) {
    const auto start = Clock::now();
    std::thread other([&] {
      std::this_thread::sleep_for(30ms);
      *flag = true;
    });
    const absl::Status status = server.AwaitRing(wait);
    EXPECT_EQ(status.code(),
              flag == &cancelled ? absl::StatusCode::kCancelled : absl::StatusCode::kUnavailable);
    EXPECT_LT(Clock::now() - start, 5s);
    other.join();
    *flag = false;
  }
}

}  // namespace
}  // namespace attnd::plane
