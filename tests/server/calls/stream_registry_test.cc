// SPDX-License-Identifier: Apache-2.0
//
// Goal: the limit of streams, the order of a shutdown and the reply clock; what is counted begins
// before it ends. Method: streams that count what is done to them.
#include "server/calls/stream_registry.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "gtest/gtest.h"
#include "server/calls/open_calls.h"

namespace attnd::server {
namespace {

using namespace std::chrono_literals;

struct CountingStream : ManagedStream {
  void Stop() override { ++stops; }
  void Abort(const absl::Status&) override { ++aborts; }
  void CheckReply(std::chrono::steady_clock::time_point) override { ++checks; }
  std::atomic<int> stops{0}, aborts{0}, checks{0};
};

TEST(StreamRegistry, LimitsStreams) {
  StreamRegistry registry(2, 1h);
  const auto a = std::make_shared<CountingStream>(), b = std::make_shared<CountingStream>(),
             c = std::make_shared<CountingStream>();
  EXPECT_TRUE(registry.Add(a).ok());
  EXPECT_TRUE(registry.Add(b).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(registry.Add(c)));
  registry.Remove(a.get());
  registry.Remove(a.get());  // twice is harmless
  EXPECT_TRUE(registry.Add(c).ok());
  EXPECT_EQ(registry.size(), 2u);
  registry.Remove(b.get());
  registry.Remove(c.get());
}

TEST(StreamRegistry, StopRefusesNewOnesAndWaits) {
  StreamRegistry registry(8, 1h);
  const auto stream = std::make_shared<CountingStream>();
  ASSERT_TRUE(registry.Add(stream).ok());
  registry.StopAll();
  EXPECT_EQ(stream->stops, 1);
  EXPECT_TRUE(absl::IsUnavailable(registry.Add(std::make_shared<CountingStream>())));
  EXPECT_FALSE(registry.WaitUntilEmpty(10ms));
  registry.AbortAll(absl::UnavailableError("end"));
  EXPECT_EQ(stream->aborts, 1);
  std::thread remover([&] {
    std::this_thread::sleep_for(20ms);
    registry.Remove(stream.get());
  });
  EXPECT_TRUE(registry.WaitUntilEmpty(10s));
  remover.join();
}

TEST(StreamRegistry, TheClockLooksSeveralTimesATimeout) {
  StreamRegistry registry(8, 40ms);
  ASSERT_TRUE(registry.Start().ok());
  const auto stream = std::make_shared<CountingStream>();
  ASSERT_TRUE(registry.Add(stream).ok());
  const auto limit = std::chrono::steady_clock::now() + 10s;
  while (stream->checks < 4 && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_GE(stream->checks, 4);
  registry.Remove(stream.get());
}

// What no client can bring about ends the process.
TEST(StreamRegistryDeathTest, AStreamIsRegisteredOnceAndRemoved) {
  StreamRegistry registry(2, 1h);
  const auto stream = std::make_shared<CountingStream>();
  ASSERT_TRUE(registry.Add(stream).ok());
  EXPECT_DEATH(static_cast<void>(registry.Add(stream)), "registered twice");
  registry.Remove(stream.get());
  EXPECT_DEATH(
      {
        StreamRegistry other(2, 1h);
        static_cast<void>(other.Add(stream));
      },
      "outlive their registry");
}

TEST(OpenCallsDeathTest, ACallThatEndsHasBegun) {
  OpenCalls calls;
  calls.Begin();
  calls.End();
  EXPECT_TRUE(calls.WaitUntilNone(0ms));
  EXPECT_DEATH(calls.End(), "did not begin");
}

}  // namespace
}  // namespace attnd::server
