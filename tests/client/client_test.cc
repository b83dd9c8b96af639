// SPDX-License-Identifier: Apache-2.0
//
// Goal: the C++ client against a real server: whole path, deadlines, what it repeats and what it
// does not, and sessions that end in every way. Method: the server in this process over a Unix
// socket, with the real engine where answers matter and one that waits where time does.
#include "client/cpp/client.h"

#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "client/cpp/memory_client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/client_fixture.h"
#include "tests/server/test_server.h"
#include "tests/server/within.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using ::testing::HasSubstr;

class ClientTest : public ClientFixture {
 protected:
  void StartReal() {
    StartServer(RealEngine());
    Connect();
  }
  void StartFake() {
    StartServer(&fake_);
    Connect();
  }
};

// The server compares tokens that are repeated with those that it has.
TEST_F(ClientTest, UploadsFromSharedMemory) {
  options_.allow_client_memory = true;
  StartReal();
  constexpr uint64_t kTokens = 1000, kBytes = kTokens * 16 * sizeof(float);
  auto memory = MemoryClient::Connect(*MemoryClient::SocketOf(server_->address()), 10s);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const auto region = (*memory)->Register(4 * kBytes, "");
  ASSERT_TRUE(region.ok()) << region.status();
  auto* const bytes = reinterpret_cast<char*>(region->memory->data());
  std::string k(kBytes, '\0'), v(kBytes, '\0');
  for (size_t i = 0; i < kBytes; i += sizeof(float)) {
    const float numbers[2] = {static_cast<float>(i % 977), static_cast<float>(i % 613)};
    std::memcpy(k.data() + i, &numbers[0], sizeof(float));
    std::memcpy(v.data() + i, &numbers[1], sizeof(float));
  }
  std::memcpy(bytes + 64, k.data(), kBytes);
  std::memcpy(bytes + 2 * kBytes, v.data(), kBytes);
  const uint64_t sequence = client_->OpenSequence(SmallModel())->sequence_id();
  const v1::ModelShape shape = SmallModel().model().shape();
  KvBlock block = {.layer = 0,
                   .first_position = 0,
                   .tokens = kTokens,
                   .k = {bytes + 64, kBytes},
                   .v = {bytes + 2 * kBytes, kBytes}};
  AppendOptions append;
  append.chunk_bytes = 10000;  // several messages
  append.prefill_complete = false;
  append.memory = &*region;
  const auto appended = client_->AppendKv(sequence, shape, {&block, 1}, {}, append);
  ASSERT_TRUE(appended.ok()) << appended.status();
  EXPECT_EQ(appended->committed_tokens(), kTokens);

  block.k = k;
  block.v = v;
  const auto outside = client_->AppendKv(sequence, shape, {&block, 1}, {}, append);
  EXPECT_THAT(outside.status().message(), HasSubstr("blocks[0].k does not lie in the memory"));
  append.memory = nullptr;
  EXPECT_TRUE(client_->AppendKv(sequence, shape, {&block, 1}, {}, append).ok());
  k[4000] ^= 1;
  block.k = k;
  EXPECT_EQ(client_->AppendKv(sequence, shape, {&block, 1}, {}, append).status().code(),
            absl::StatusCode::kAlreadyExists);
  append.memory = &*region;
  for (const uint64_t at : {uint64_t{32}, 3 * kBytes + 64}) {
    block.k = {bytes + at, kBytes};
    EXPECT_TRUE(absl::IsInvalidArgument(
        client_->AppendKv(sequence, shape, {&block, 1}, {}, append).status()))
        << at;
  }
}

TEST_F(ClientTest, TheWholePath) {
  StartReal();
  ASSERT_TRUE(client_->WaitHealthy(10s).ok());
  const auto info = client_->GetServerInfo();
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->backends(0), "cpu");
  const auto opened = client_->OpenSequence(SmallModel());
  ASSERT_TRUE(opened.ok()) << opened.status();
  const uint64_t sequence = opened->sequence_id();
  const std::string bytes(1000 * 16 * sizeof(float), '\0');
  const std::vector<KvBlock> blocks = {
      {.layer = 0, .first_position = 0, .tokens = 1000, .k = bytes, .v = bytes}};
  AppendOptions append;
  append.chunk_bytes = 10000;  // several messages
  append.prefill_complete = false;
  const v1::ModelShape shape = SmallModel().model().shape();
  EXPECT_TRUE(client_->AppendKv(sequence, shape, blocks, {}, append).ok());
  append.prefill_complete = true;  // the same tokens once more, and the end
  const auto appended = client_->AppendKv(sequence, shape, blocks, {}, append);
  ASSERT_TRUE(appended.ok()) << appended.status();
  EXPECT_EQ(appended->committed_tokens(), 1000u);

  const auto session = client_->StartDecode();
  v1::DecodeResponse reply;
  for (uint64_t position = 1000; position < 1010; ++position) {
    const absl::Status status = session->Step(SmallStep(sequence, position), &reply, 10s);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(reply.rows(0).status().code(), 0) << reply.rows(0).status().message();
    EXPECT_EQ(reply.step_id(), position + 1);
  }
  EXPECT_TRUE(session->Finish(10s).ok());
  EXPECT_FALSE(session->Step(SmallStep(), &reply, 1s).ok());

  v1::ForkSequenceRequest fork;
  fork.set_sequence_id(sequence);
  EXPECT_TRUE(client_->ForkSequence(fork).ok());
  v1::TruncateSequenceRequest truncate;
  truncate.set_sequence_id(sequence);
  truncate.set_length(10);
  EXPECT_TRUE(client_->TruncateSequence(truncate).ok());
  const auto sequences = client_->ListSequences();
  ASSERT_TRUE(sequences.ok());
  EXPECT_EQ(sequences->size(), 2u);
  EXPECT_TRUE(client_->CloseSequence(sequence).ok());
  EXPECT_TRUE(absl::IsNotFound(client_->CloseSequence(sequence)));
}

TEST_F(ClientTest, AllPagesAreListed) {
  StartReal();
  for (int i = 0; i < 1002; ++i) ASSERT_TRUE(client_->OpenSequence(SmallModel()).ok());
  const auto sequences = client_->ListSequences();
  ASSERT_TRUE(sequences.ok()) << sequences.status();
  EXPECT_EQ(sequences->size(), 1002u);
}

TEST_F(ClientTest, TenantsAreSent) {
  StartReal();
  const auto red = Client::Connect({.target = options_.listen[0], .tenant = "red"});
  ASSERT_TRUE(red.ok());
  const auto opened = (*red)->OpenSequence(SmallModel());
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ((*red)->ListSequences()->size(), 1u);
  EXPECT_EQ(client_->ListSequences()->size(), 0u);
  v1::DecodeResponse reply;
  ASSERT_TRUE((*red)->StartDecode()->Step(SmallStep(opened->sequence_id()), &reply, 10s).ok());
  EXPECT_EQ(reply.rows(0).status().code(), 0);
}

TEST_F(ClientTest, OptionsAreChecked) {
  EXPECT_TRUE(absl::IsInvalidArgument(Client::Connect({}).status()));
  EXPECT_FALSE(Client::Connect({.target = "unix:a", .tenant = std::string(257, 'x')}).ok());
  EXPECT_FALSE(Client::Connect({.target = "unix:a", .tenant = "\x01"}).ok());
  EXPECT_FALSE(Client::Connect({.target = "unix:a", .timeout = 0ms}).ok());
  EXPECT_FALSE(Client::Connect({.target = "unix:a", .max_message_bytes = 0}).ok());
  EXPECT_FALSE(Client::Connect({.target = "unix:a", .attempts = 0}).ok());
}

TEST_F(ClientTest, AServerThatIsNotThere) {
  Connect();
  EXPECT_TRUE(absl::IsUnavailable(client_->OpenSequence(SmallModel()).status()));
  EXPECT_TRUE(absl::IsUnavailable(client_->GetServerInfo().status()));
  const auto start = Clock::now();
  EXPECT_TRUE(absl::IsDeadlineExceeded(client_->WaitHealthy(200ms)));
  EXPECT_LT(Clock::now() - start, 5s);
  v1::DecodeResponse reply;
  EXPECT_TRUE(absl::IsUnavailable(client_->StartDecode()->Step(SmallStep(), &reply, 10s)));
}

TEST_F(ClientTest, CallsWithoutEffectAreRepeatedUntilTheServerIsThere) {
  auto patient = Client::Connect({.target = options_.listen[0], .timeout = 20s, .attempts = 1000});
  ASSERT_TRUE(patient.ok());
  std::thread starter([&] {
    std::this_thread::sleep_for(100ms);
    StartFake();
  });
  EXPECT_TRUE((*patient)->WaitHealthy(20s).ok());
  EXPECT_TRUE((*patient)->GetServerInfo().ok());
  starter.join();
}

TEST_F(ClientTest, AStepHasALimit) {
  StartFake();
  fake_.Hold();
  const auto session = client_->StartDecode();
  v1::DecodeResponse reply;
  const auto start = Clock::now();
  EXPECT_TRUE(absl::IsDeadlineExceeded(session->Step(SmallStep(), &reply, 100ms)));
  EXPECT_LT(Clock::now() - start, 5s);
  EXPECT_TRUE(Within([&] { return fake_.cancelled() == 1; }));
  EXPECT_TRUE(absl::IsDeadlineExceeded(session->Step(SmallStep(), &reply, 10s)));  // for good
}

TEST_F(ClientTest, ASessionMayDieAtAnyTime) {
  StartFake();
  client_->StartDecode().reset();
  fake_.Hold();
  {
    const auto session = client_->StartDecode();
    v1::DecodeResponse reply;
    EXPECT_FALSE(session->Step(SmallStep(), &reply, 50ms).ok());
  }
  EXPECT_TRUE(Within([&] { return server_->Metric("attnd_streams") == 0; }));
}

TEST_F(ClientTest, ASessionSaysWhyItEnded) {
  StartFake();
  const auto session = client_->StartDecode();
  v1::DecodeResponse reply;
  ASSERT_TRUE(session->Step(SmallStep(), &reply, 10s).ok());
  server_->server().Shutdown({});
  const absl::Status status = session->Step(SmallStep(), &reply, 10s);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("shutting down"));
}

TEST_F(ClientTest, AnUploadSaysWhichChunkWasWrong) {
  StartReal();
  const auto opened = client_->OpenSequence(SmallModel());
  ASSERT_TRUE(opened.ok());
  std::string bytes(10 * 16 * sizeof(float), '\0');
  bytes.replace(5 * 16 * sizeof(float), 4, "\xff\xff\xff\xff");  // NaN in token 5
  const std::vector<KvBlock> blocks = {
      {.layer = 0, .first_position = 0, .tokens = 10, .k = bytes, .v = bytes}};
  AppendOptions append;
  append.chunk_bytes = 1;  // a token a message
  const auto status =
      client_->AppendKv(opened->sequence_id(), SmallModel().model().shape(), blocks, {}, append)
          .status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("chunk 5"));
  EXPECT_EQ((*client_->ListSequences())[0].committed_tokens(), 5u);
}

TEST_F(ClientTest, TheExampleRuns) {
  StartReal();
  const std::string command = std::string(ATTND_EXAMPLE_BINARY) + " " + options_.listen[0];
  FILE* const program = popen(command.c_str(), "r");
  ASSERT_NE(program, nullptr);
  std::string said;
  for (int c = fgetc(program); c != EOF; c = fgetc(program)) said.push_back(static_cast<char>(c));
  const int status = pclose(program);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << said;
  // Of a dense step all tokens, once.
  EXPECT_THAT(said,
              HasSubstr("token 2000 layer 0: 2001 tokens read, 0 estimated for each KV head"));
}

}  // namespace
}  // namespace attnd::testing
