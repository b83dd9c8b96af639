// SPDX-License-Identifier: Apache-2.0
//
// Goal: what gRPC itself is allowed to use has a limit, and meeting it harms nobody else: memory of
// messages, streams of a connection, pings. Method: the real server over a Unix socket,
// with an engine that computes nothing; memory is what the allocator says is in use.
#include <malloc.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"
#include "server/net/probe.h"
#include "tests/server/fake_engine.h"
#include "tests/server/server_fixture.h"
#include "tests/server/test_server.h"
#include "tests/server/within.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using DecodeStream = grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>;
using AppendStream = grpc::ClientWriter<v1::AppendKvRequest>;

size_t BytesInUse() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

v1::AppendKvRequest LargeChunk(uint32_t bytes) {
  v1::AppendKvRequest request;
  request.set_sequence_id(1);
  FillTensor(bytes / 128, 1, 16, 1.0f, request.mutable_k());
  FillTensor(bytes / 128, 1, 16, 1.0f, request.mutable_v());
  return request;
}

class LimitsTest : public FakeEngineFixture {};

// Forty streams that each sent 8 MiB and now pause: the server keeps none of it.
TEST_F(LimitsTest, UploadsThatPauseKeepNoMessage) {
  constexpr int kStreams = 40;
  StartServer();
  ExpectAnswers();
  const auto stub = server_->NewStub();
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<AppendStream>> streams;
  std::vector<v1::AppendKvResponse> replies(kStreams);
  const size_t before = BytesInUse();
  {
    const v1::AppendKvRequest chunk = LargeChunk(8 << 20);
    v1::AppendKvRequest ids;  // few bytes on the wire, many in memory
    ids.set_sequence_id(1);
    for (int i = 0; i < 200'000; ++i) ids.add_token_ids(1);
    FillTensor(200'000, 1, 1, 1.0f, ids.mutable_k());
    FillTensor(200'000, 1, 1, 1.0f, ids.mutable_v());
    for (int i = 0; i < kStreams; ++i) {
      contexts.push_back(std::make_unique<grpc::ClientContext>());
      streams.push_back(stub->AppendKv(contexts.back().get(), &replies[i]));
      ASSERT_TRUE(streams.back()->Write(chunk));
      ASSERT_TRUE(streams.back()->Write(ids));
    }
    ASSERT_TRUE(Within([&] { return engine_.chunks() == 2 * kStreams; }));
  }
  EXPECT_TRUE(Within([&] { return BytesInUse() < before + (20u << 20); }))
      << (BytesInUse() - before) << " bytes are kept";
  for (auto& stream : streams) {
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
}

// The statuses of `streams` uploads at once, each of `chunks` messages of 3 MiB.
std::vector<grpc::Status> Upload(const TestServer& server, int streams, int chunks) {
  const v1::AppendKvRequest chunk = LargeChunk(3 << 20);
  std::vector<grpc::Status> statuses(streams);
  std::vector<std::thread> threads;
  for (grpc::Status& status : statuses) {
    threads.emplace_back([&] {
      const auto stub = server.NewStub();
      grpc::ClientContext context;
      v1::AppendKvResponse reply;
      const auto stream = stub->AppendKv(&context, &reply);
      for (int i = 0; i < chunks; ++i) {
        if (!stream->Write(chunk)) break;
      }
      stream->WritesDone();
      status = stream->Finish();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

// Within it nobody is refused; far beyond it gRPC ends streams and connections, memory stays,
// and afterwards all is well. Three streams are well within: of each gRPC may hold what follows a
// message, too, and the buffers that both were read into.
TEST_F(LimitsTest, MemoryOfMessagesHasALimit) {
  options_.max_message_bytes = 4 << 20;
  options_.grpc_memory_bytes = 48 << 20;
  ASSERT_TRUE(options_.Validate().ok()) << options_.Validate();
  StartServer();
  for (const grpc::Status& status : Upload(*server_, 3, 30)) {
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  EXPECT_EQ(engine_.chunks(), 90);
  int refused = 0;
  for (const grpc::Status& status : Upload(*server_, 24, 10)) {
    refused += !status.ok();
    EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED ||
                status.error_code() == grpc::StatusCode::UNAVAILABLE)  // its connection was closed
        << status.error_code() << ": " << status.error_message();
  }
  EXPECT_GT(refused, 0);
  EXPECT_TRUE(Within([&] { return server_->Metric("attnd_streams") == 0; }));
  for (int i = 0; i < 10; ++i) ExpectAnswers();
  for (const grpc::Status& status : Upload(*server_, 3, 3)) EXPECT_TRUE(status.ok());
}

TEST_F(LimitsTest, AConnectionHasALimitOfStreams) {
  options_.max_connection_streams = 2;
  StartServer();
  const auto stub = server_->NewStub();
  grpc::ClientContext contexts[3];
  std::unique_ptr<DecodeStream> streams[2];
  v1::DecodeResponse reply;
  for (int i = 0; i < 2; ++i) {
    streams[i] = stub->Decode(&contexts[i]);
    ASSERT_TRUE(streams[i]->Write(SmallStep()) && streams[i]->Read(&reply));
  }
  std::atomic<bool> answered{false};
  std::thread third([&] {
    const auto stream = stub->Decode(&contexts[2]);
    v1::DecodeResponse own;
    answered = stream->Write(SmallStep()) && stream->Read(&own);
  });
  ExpectAnswers();  // on another connection
  EXPECT_FALSE(answered);
  streams[0]->WritesDone();
  EXPECT_TRUE(streams[0]->Finish().ok());
  third.join();
  EXPECT_TRUE(answered);  // its turn has come
}

TEST_F(LimitsTest, WhoPingsTooOftenIsDisconnected) {
  StartServer();
  engine_.Hold();
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  const auto stub = v1::Attnd::NewStub(
      grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), arguments));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + 60s);
  const auto stream = stub->Decode(&context);
  ASSERT_TRUE(stream->Write(SmallStep()));
  v1::DecodeResponse reply;
  EXPECT_FALSE(stream->Read(&reply));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  engine_.Release();
  ExpectAnswers();
}

// gRPC's reflection parses requests before anybody has counted their fields, on threads of its own:
// the server has none.
TEST_F(LimitsTest, NothingIsServedThatIsNotCounted) {
  StartServer();
  grpc::GenericStub stub(NewChannel(server_->address()));
  for (const char* const version : {"v1", "v1alpha"}) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 30s);
    grpc::CompletionQueue queue;
    const std::string method =
        absl::StrCat("/grpc.reflection.", version, ".ServerReflection/ServerReflectionInfo");
    const auto call = stub.PrepareCall(&context, method, &queue);
    grpc::Status status;
    void* tag = nullptr;
    bool ok = false;
    call->StartCall(nullptr);
    queue.Next(&tag, &ok);
    call->Finish(&status, nullptr);
    queue.Next(&tag, &ok);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << status.error_message();
  }
}

}  // namespace
}  // namespace attnd::testing
