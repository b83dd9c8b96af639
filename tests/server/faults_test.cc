// SPDX-License-Identifier: Apache-2.0
//
// Goal: faults from outside, seen by clients over the socket of the real program: it is killed in
// the middle of decoding and started again, clients do not read, thousands of streams come at once.
// Method: the built attnd as a child process and several connections. The pauses before a kill are
// random with a fixed seed, printed on failure. ATTND_KILL_CYCLES and ATTND_STREAMS make long forms
// of two tests.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/process.h"
#include "tests/server/test_server.h"
#include "tests/server/within.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using grpc::StatusCode;
using Stream = grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>;
using ::testing::HasSubstr;

constexpr uint32_t kSeed = 20261121;

int FromEnvironment(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

uint64_t Open(v1::Attnd::Stub* stub) {
  grpc::ClientContext context;
  v1::OpenSequenceResponse reply;
  const grpc::Status status = stub->OpenSequence(&context, SmallModel(), &reply);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return reply.sequence_id();
}

// Decodes one token after the other until the stream ends.
class Decoder {
 public:
  explicit Decoder(const std::string& address) : stub_(v1::Attnd::NewStub(NewChannel(address))) {
    sequence_ = Open(stub_.get());
    thread_ = std::thread([this] { Main(); });
  }
  ~Decoder() { Join(); }
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  uint64_t sequence() const { return sequence_; }
  uint64_t steps() const { return steps_; }
  bool all_ok() const { return all_ok_; }
  // How the stream ended.
  const grpc::Status& Join() {
    if (thread_.joinable()) thread_.join();
    return status_;
  }

 private:
  void Main() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 60s);
    const auto stream = stub_->Decode(&context);
    v1::DecodeResponse reply;
    while (stream->Write(SmallStep(sequence_, steps_)) && stream->Read(&reply)) {
      if (reply.rows_size() != 1 || reply.rows(0).status().code() != 0) all_ok_ = false;
      ++steps_;
    }
    status_ = stream->Finish();
  }

  const std::unique_ptr<v1::Attnd::Stub> stub_;
  uint64_t sequence_ = 0;
  std::atomic<uint64_t> steps_{0};
  std::atomic<bool> all_ok_{true};
  grpc::Status status_;
  std::thread thread_;
};

class FaultsTest : public ProcessFixture {
 protected:
  // What a step of an unknown or known sequence is answered with, on a connection of its own.
  int Ask(uint64_t sequence) const {
    const auto stub = v1::Attnd::NewStub(NewChannel(address_));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 20s);
    const auto stream = stub->Decode(&context);
    v1::DecodeResponse reply;
    if (!stream->Write(SmallStep(sequence)) || !stream->Read(&reply)) return -1;
    return reply.rows(0).status().code();
  }
};

TEST_F(FaultsTest, KilledWhileDecodingAndStartedAgain) {
  const int cycles = FromEnvironment("ATTND_KILL_CYCLES", 3);
  std::mt19937 random(kSeed);
  uint64_t lost = 0, steps = 0;
  for (int cycle = 0; cycle < cycles && !HasFailure(); ++cycle) {
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ", cycle " + std::to_string(cycle));
    const auto process = Start(Flags());
    if (lost != 0) {
      EXPECT_EQ(Ask(lost), StatusCode::NOT_FOUND);
    }
    std::vector<std::unique_ptr<Decoder>> decoders;
    for (int i = 0; i < 4; ++i) decoders.push_back(std::make_unique<Decoder>(address_));
    EXPECT_TRUE(Within([&] {
      return std::all_of(decoders.begin(), decoders.end(), [](auto& d) { return d->steps() > 0; });
    }));
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 100));
    process->Signal(SIGKILL);
    EXPECT_EQ(process->Wait(10s), 128 + SIGKILL);
    for (const auto& decoder : decoders) {
      EXPECT_EQ(decoder->Join().error_code(), StatusCode::UNAVAILABLE)
          << decoder->Join().error_message();
      EXPECT_TRUE(decoder->all_ok());
      steps += decoder->steps();
    }
    lost = decoders[0]->sequence();
  }
  const auto process = Start(Flags());
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(10s), 0) << process->Log();
  RecordProperty("cycles", cycles);
  RecordProperty("steps", static_cast<int>(steps));
}

// Each of them has one reply in flight, and then waits; the others do not notice.
TEST_F(FaultsTest, ClientsThatDoNotReadHarmNobody) {
  constexpr int kGreedy = 8;
  const auto process = Start(Flags({"--reply-timeout-s=4"}));
  const auto stub = v1::Attnd::NewStub(NewChannel(address_));
  const uint64_t sequence = OpenLarge(stub.get());
  EXPECT_EQ(Ask(Open(stub.get())), 0);
  const uint64_t before = process->ResidentBytes();
  std::vector<std::unique_ptr<UnreadReplies>> greedy;
  std::vector<std::thread> starters;
  greedy.resize(kGreedy);
  for (auto& client : greedy) {
    starters.emplace_back(
        [&] { client = std::make_unique<UnreadReplies>(address_, LargeStep(sequence)); });
  }
  for (std::thread& starter : starters) starter.join();
  Clock::duration longest{0};
  for (int i = 0; i < 100; ++i) {
    const auto start = Clock::now();
    EXPECT_EQ(Ask(Open(stub.get())), 0);
    longest = std::max(longest, Clock::now() - start);
  }
  EXPECT_LT(longest, 2s);
  const uint64_t after = process->ResidentBytes();
#ifndef __SANITIZE_ADDRESS__  // which keeps freed memory for a while
  // A reply of 1 MiB, its float32 source and its message, and what the connection holds.
  EXPECT_LT(after, before + kGreedy * (uint64_t{16} << 20));
#endif
  EXPECT_TRUE(Within([&] {
    return std::all_of(greedy.begin(), greedy.end(), [](auto& client) { return client->ended(); });
  }));
  RecordProperty(
      "longest_us",
      static_cast<int>(std::chrono::duration_cast<std::chrono::microseconds>(longest).count()));
  RecordProperty("bytes_for_each", static_cast<int>((after - before) / kGreedy));
}

// As many streams as are allowed, each with a sequence of its own, over several connections; one
// more is told so, and when one ends there is room again.
TEST_F(FaultsTest, ManyStreamsAndOneMore) {
  const int streams_max = FromEnvironment("ATTND_STREAMS", 2000);
  constexpr int kConnections = 20;
  const auto process = Start(Flags({"--max-streams=" + std::to_string(streams_max)}));
  std::vector<std::unique_ptr<v1::Attnd::Stub>> stubs;
  for (int i = 0; i < kConnections; ++i) stubs.push_back(v1::Attnd::NewStub(NewChannel(address_)));
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<uint64_t> sequences;
  for (int i = 0; i < streams_max; ++i) {
    v1::Attnd::Stub* const stub = stubs[i % kConnections].get();
    sequences.push_back(Open(stub));
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(stub->Decode(contexts.back().get()));
  }
  v1::DecodeResponse reply;
  const auto start = Clock::now();
  for (uint64_t position = 0; position < 3; ++position) {
    for (int i = 0; i < streams_max; ++i) {
      ASSERT_TRUE(streams[i]->Write(SmallStep(sequences[i], position)));
    }
    for (int i = 0; i < streams_max; ++i) {
      ASSERT_TRUE(streams[i]->Read(&reply));
      // Far more than max_queued_steps come at once: refused ones are sent again.
      while (reply.status().code() == StatusCode::RESOURCE_EXHAUSTED) {
        ASSERT_THAT(reply.status().message(), HasSubstr("max_queued_steps"));
        ASSERT_TRUE(streams[i]->Write(SmallStep(sequences[i], position)));
        ASSERT_TRUE(streams[i]->Read(&reply));
      }
      ASSERT_EQ(reply.status().code(), 0) << reply.status().message();
      ASSERT_EQ(reply.rows(0).status().code(), 0) << reply.rows(0).status().message();
    }
  }
  const auto time = Clock::now() - start;
  {
    grpc::ClientContext context;
    const auto surplus = stubs[0]->Decode(&context);
    EXPECT_FALSE(surplus->Read(&reply));
    const grpc::Status status = surplus->Finish();
    EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(status.error_message(), HasSubstr("max_streams"));
  }
  streams[0]->WritesDone();
  EXPECT_TRUE(streams[0]->Finish().ok());
  EXPECT_TRUE(Within([&] { return Ask(sequences[0]) == 0; }));
  process->Signal(SIGTERM);
  for (int i = 1; i < streams_max; ++i) {
    EXPECT_EQ(streams[i]->Finish().error_code(), StatusCode::UNAVAILABLE);
  }
  EXPECT_EQ(process->Wait(10s), 0) << process->Log();
  RecordProperty("streams", streams_max);
  RecordProperty(
      "steps_ms",
      static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(time).count()));
}

}  // namespace
}  // namespace attnd::testing
