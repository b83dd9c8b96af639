// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a stream does when something goes wrong around it: the client leaves, does not read,
// sends too much, comes in too great a number; the server ends. Method: the real server over a Unix
// socket, with an engine that waits until the test lets it go, so that nothing depends on timing
// but the reply timeout itself.
#include <sys/stat.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
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
using Stream = grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>;
using ::testing::HasSubstr;

constexpr server::ShutdownLimits kQuick = {.steps = 200ms, .cancel = 5000ms, .server = 1000ms};

// A client with one AppendKv stream, and its next message. The context dies last.
struct Uploader {
  explicit Uploader(const TestServer& server)
      : stub(server.NewStub()), stream(stub->AppendKv(&context, &reply)) {
    request.set_sequence_id(1);
  }
  const std::unique_ptr<v1::Attnd::Stub> stub;
  grpc::ClientContext context;
  v1::AppendKvResponse reply;
  const std::unique_ptr<grpc::ClientWriter<v1::AppendKvRequest>> stream;
  v1::AppendKvRequest request;
};

// A client with one Decode stream. The context dies last.
struct Client {
  explicit Client(const TestServer& server) : stub(server.NewStub()) {
    context.set_deadline(std::chrono::system_clock::now() + 30s);
  }
  void Start() { stream = stub->Decode(&context); }
  grpc::Status Finish() {
    v1::DecodeResponse reply;
    while (stream->Read(&reply)) continue;
    return stream->Finish();
  }
  std::unique_ptr<v1::Attnd::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<Stream> stream;
};

class LifecycleTest : public FakeEngineFixture {
 protected:
  std::unique_ptr<Client> StartClient() {
    auto client = std::make_unique<Client>(*server_);
    client->Start();
    return client;
  }
};

TEST_F(LifecycleTest, AnswersInOrder) {
  StartServer();
  auto client = StartClient();
  for (uint64_t i = 1; i <= 100; ++i) {
    v1::DecodeRequest request = SmallStep();
    request.set_step_id(i);
    v1::DecodeResponse reply;
    ASSERT_TRUE(client->stream->Write(request));
    ASSERT_TRUE(client->stream->Read(&reply));
    EXPECT_EQ(reply.step_id(), i);
  }
  client->stream->WritesDone();
  EXPECT_TRUE(client->Finish().ok());
  EXPECT_TRUE(Within([&] { return engine_.released_writers() == 1; }));
  EXPECT_EQ(server_->Metric("attnd_steps_total{code=OK}"), 100);
  EXPECT_EQ(server_->Metric("attnd_stage_seconds{stage=rpc}"), 100);
}

TEST_F(LifecycleTest, AWrongMessageDoesNotEndTheStream) {
  StartServer();
  auto client = StartClient();
  v1::DecodeRequest wrong = SmallStep();
  wrong.mutable_q()->mutable_data()->pop_back();
  v1::DecodeResponse reply;
  ASSERT_TRUE(client->stream->Write(wrong));
  ASSERT_TRUE(client->stream->Read(&reply));
  EXPECT_EQ(reply.status().code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(reply.status().message(), HasSubstr("q.data"));
  EXPECT_EQ(reply.rows_size(), 0);
  EXPECT_FALSE(reply.has_out());
  ASSERT_TRUE(client->stream->Write(SmallStep()));
  ASSERT_TRUE(client->stream->Read(&reply));
  EXPECT_EQ(reply.status().code(), 0);
  EXPECT_EQ(reply.rows_size(), 1);
}

TEST_F(LifecycleTest, AClientThatLeavesCancelsItsStep) {
  StartServer();
  engine_.Hold();
  auto client = StartClient();
  ASSERT_TRUE(client->stream->Write(SmallStep()));
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  const auto left = std::chrono::steady_clock::now();
  client->context.TryCancel();
  ASSERT_TRUE(Within([&] { return engine_.released_writers() == 1; }));
  EXPECT_LT(std::chrono::steady_clock::now() - left, 1s);
  EXPECT_EQ(engine_.cancelled(), 1);
  EXPECT_EQ(client->Finish().error_code(), grpc::StatusCode::CANCELLED);
  engine_.Release();
  ExpectAnswers();
}

TEST_F(LifecycleTest, AClientThatLeavesCancelsItsPrefill) {
  StartServer();
  engine_.Hold();
  Uploader upload(*server_);
  upload.request.set_prefill_complete(true);
  ASSERT_TRUE(upload.stream->Write(upload.request));
  ASSERT_TRUE(upload.stream->WritesDone());
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  engine_.Hold();
  upload.context.TryCancel();
  ASSERT_TRUE(Within([&] { return engine_.released_writers() == 1; }));
  EXPECT_EQ(engine_.cancelled(), 1);
  EXPECT_EQ(upload.stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

// An upload whose finished prompt waits behind others for a worker.
TEST_F(LifecycleTest, AClientThatLeavesDoesNotWaitForItsTurn) {
  constexpr int kWorkers = 4;  // finished prompts that the server segments at the same time
  StartServer();
  engine_.Hold();
  struct Upload {
    grpc::ClientContext context;
    v1::AppendKvResponse reply;
    std::unique_ptr<grpc::ClientWriter<v1::AppendKvRequest>> stream;
  };
  const auto stub = server_->NewStub();
  v1::AppendKvRequest request;
  request.set_sequence_id(1);
  request.set_prefill_complete(true);
  std::vector<std::unique_ptr<Upload>> uploads;
  const auto start = [&] {
    Upload& upload = *uploads.emplace_back(std::make_unique<Upload>());
    upload.stream = stub->AppendKv(&upload.context, &upload.reply);
    ASSERT_TRUE(upload.stream->Write(request));
    ASSERT_TRUE(upload.stream->WritesDone());
  };
  for (int i = 0; i < kWorkers; ++i) start();
  ASSERT_TRUE(engine_.WaitForWaiting(kWorkers));
  for (int left = 1; left <= 20; ++left) {  // some before they are queued, some after
    start();
    std::this_thread::sleep_for(std::chrono::milliseconds(left));
    uploads.back()->context.TryCancel();
    ASSERT_TRUE(Within([&] { return engine_.released_writers() == left; }));
    EXPECT_EQ(uploads.back()->stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
    uploads.pop_back();
  }
  EXPECT_EQ(engine_.waiting(), kWorkers);
  EXPECT_TRUE(Within([&] { return server_->Metric("attnd_streams") == kWorkers; }));
  engine_.Release();
  for (const auto& upload : uploads) EXPECT_TRUE(upload->stream->Finish().ok());
}

// While a prefill is being finished, steps are answered: it has a worker of its own.
TEST_F(LifecycleTest, APrefillDoesNotHoldSteps) {
  options_.step_workers = 1;
  StartServer();
  engine_.Hold();
  Uploader upload(*server_);
  upload.request.set_prefill_complete(true);
  ASSERT_TRUE(upload.stream->Write(upload.request));
  ASSERT_TRUE(upload.stream->WritesDone());
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  auto client = StartClient();
  ASSERT_TRUE(client->stream->Write(SmallStep()));
  ASSERT_TRUE(engine_.WaitForWaiting(2));  // the step has reached the engine
  engine_.Release();
  EXPECT_TRUE(upload.stream->Finish().ok());
}

TEST_F(LifecycleTest, HealthIsAnsweredWhileEveryStepWaits) {
  options_.step_workers = 2;
  StartServer();
  engine_.Hold();
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 8; ++i) {
    clients.push_back(StartClient());
    ASSERT_TRUE(clients.back()->stream->Write(SmallStep()));
  }
  ASSERT_TRUE(engine_.WaitForWaiting(2));
  ASSERT_TRUE(Within([&] { return server_->Metric("attnd_queue_depth") == 6; }));
  EXPECT_TRUE(server::Probe(server_->address(), 5s).ok());
  EXPECT_EQ(server_->Metric("attnd_streams"), 8);
  engine_.Release();
  for (auto& client : clients) {
    v1::DecodeResponse reply;
    EXPECT_TRUE(client->stream->Read(&reply));
    EXPECT_EQ(reply.status().code(), 0);
  }
}

TEST_F(LifecycleTest, AFullQueueRefusesTheStepAndKeepsTheStream) {
  options_.step_workers = 1;
  options_.max_queued_steps = 1;
  StartServer();
  engine_.Hold();
  auto running = StartClient(), queued = StartClient(), refused = StartClient();
  ASSERT_TRUE(running->stream->Write(SmallStep()));
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  ASSERT_TRUE(queued->stream->Write(SmallStep()));
  ASSERT_TRUE(Within([&] { return server_->Metric("attnd_queue_depth") == 1; }));
  v1::DecodeResponse reply;
  ASSERT_TRUE(refused->stream->Write(SmallStep()));
  ASSERT_TRUE(refused->stream->Read(&reply));
  EXPECT_EQ(reply.status().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(reply.status().message(), HasSubstr("max_queued_steps"));
  EXPECT_EQ(server_->Metric("attnd_rejections_total{reason=queue}"), 1);
  engine_.Release();
  ASSERT_TRUE(queued->stream->Read(&reply));
  ASSERT_TRUE(refused->stream->Write(SmallStep()));
  ASSERT_TRUE(refused->stream->Read(&reply));
  EXPECT_EQ(reply.status().code(), 0);
}

// Sends and never reads: replies fill the connection's window, the server stops reading, and then
// ends the stream.
TEST_F(LifecycleTest, AClientThatNeverReadsIsEnded) {
  engine_.set_value_dim(1 << 16);  // 512 KiB a reply
  StartServer();
  auto greedy = StartClient();
  std::thread writer([&] {
    while (greedy->stream->Write(SmallStep())) continue;
  });
  ASSERT_TRUE(
      Within([&] { return server_->Metric("attnd_rejections_total{reason=reply_timeout}") == 1; }));
  ASSERT_TRUE(Within([&] { return engine_.released_writers() == 1; }));
  writer.join();
  EXPECT_TRUE(Within([&] { return server_->Metric("attnd_streams") == 0; }));
  const grpc::Status status = greedy->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("reply_timeout_s"));
  engine_.set_value_dim(16);
  ExpectAnswers();
}

TEST_F(LifecycleTest, AnOversizeMessageEndsItsStreamOnly) {
  options_.max_message_bytes = 64 << 10;
  StartServer();
  auto other = StartClient();
  auto client = StartClient();
  v1::DecodeRequest large = SmallStep();
  FillTensor(1, 2, 1 << 15, 1.0f, large.mutable_q());
  client->stream->Write(large);
  EXPECT_EQ(client->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(engine_.decoded(), 0);
  v1::DecodeResponse reply;
  ASSERT_TRUE(other->stream->Write(SmallStep()));
  EXPECT_TRUE(other->stream->Read(&reply));
}

TEST_F(LifecycleTest, AnOversizeChunkEndsTheUpload) {
  options_.max_message_bytes = 64 << 10;
  StartServer();
  engine_.Hold();  // a prefill that were finished would wait for ever
  Uploader upload(*server_);
  upload.request.set_prefill_complete(true);
  FillTensor(1, 1, 1 << 15, 1.0f, upload.request.mutable_k());
  upload.stream->Write(upload.request);
  upload.stream->WritesDone();
  EXPECT_EQ(upload.stream->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

// Bytes that are no message, on either stream: refused, and not taken for the stream's regular end.
TEST_F(LifecycleTest, GarbageIsNotTheEndOfAStream) {
  StartServer();
  grpc::GenericStub stub(NewChannel(server_->address()));
  for (const char* const method : {"/attnd.v1.Attnd/Decode", "/attnd.v1.Attnd/AppendKv"}) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 30s);
    grpc::CompletionQueue queue;
    const auto call = stub.PrepareCall(&context, method, &queue);
    const auto wait = [&queue] {
      void* tag = nullptr;
      bool ok = false;
      queue.Next(&tag, &ok);
    };
    call->StartCall(nullptr);
    wait();
    const grpc::Slice slice(std::string(100, '\xff'));
    call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    wait();
    grpc::Status status;
    call->Finish(&status, nullptr);
    wait();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method;
  }
  ExpectAnswers();
}

TEST_F(LifecycleTest, StreamsHaveALimit) {
  options_.max_streams = 2;
  StartServer();
  auto first = StartClient(), second = StartClient();
  ASSERT_TRUE(Within([&] { return server_->Metric("attnd_streams") == 2; }));
  auto third = StartClient();
  EXPECT_EQ(third->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(server_->Metric("attnd_rejections_total{reason=streams}"), 1);
  first->stream->WritesDone();
  EXPECT_TRUE(first->Finish().ok());
  ASSERT_TRUE(Within([&] { return server_->Metric("attnd_streams") == 1; }));
  ExpectAnswers();
}

TEST_F(LifecycleTest, TheTenantHasALimit) {
  StartServer();
  Client client(*server_);
  client.context.AddMetadata("attnd-tenant", std::string(257, 'x'));
  client.Start();
  EXPECT_EQ(client.Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  Client twice(*server_);
  twice.context.AddMetadata("attnd-tenant", "a");
  twice.context.AddMetadata("attnd-tenant", "b");
  twice.Start();
  EXPECT_EQ(twice.Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  const auto stub = server_->NewStub();
  grpc::ClientContext context;
  context.AddMetadata("attnd-tenant", std::string(257, 'x'));
  v1::OpenSequenceResponse reply;
  EXPECT_EQ(stub->OpenSequence(&context, SmallModel(), &reply).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(LifecycleTest, TheSocketIsPrivateAndGoesWithTheServer) {
  StartServer();
  const std::string path = server_->address().substr(5);
  struct stat info {};
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777u, 0600u);
  ASSERT_EQ(stat((directory_.path() + "/run").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777u, 0700u);
  server_.reset();
  EXPECT_NE(stat(path.c_str(), &info), 0);
}

TEST_F(LifecycleTest, TwoServersDoNotShareASocket) {
  StartServer();
  server::Metrics metrics;
  const auto second = server::Server::Start(options_, server::Machine(), &engine_, &metrics);
  EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
  ExpectAnswers();
}

TEST_F(LifecycleTest, TcpPortsAreChosenAndNotShared) {
  options_.listen = {"127.0.0.1:0"};
  options_.allow_insecure_tcp = true;
  StartServer();
  EXPECT_THAT(server_->address(), ::testing::MatchesRegex("127\\.0\\.0\\.1:[1-9][0-9]*"));
  ExpectAnswers();
  // A tenant's name is worth nothing where anyone may connect.
  Client client(*server_);
  client.context.AddMetadata("attnd-tenant", "red");
  client.Start();
  EXPECT_EQ(client.Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  server::ServerOptions same = options_;
  same.listen = {server_->address()};
  server::Metrics metrics;
  const auto second = server::Server::Start(same, server::Machine(), &engine_, &metrics);
  EXPECT_TRUE(absl::IsUnavailable(second.status())) << second.status();
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(server_->address()));
}

// --- Shutdown.

TEST_F(LifecycleTest, ShutdownEndsIdleStreamsAtOnce) {
  StartServer();
  auto idle = StartClient();
  v1::DecodeResponse reply;
  ASSERT_TRUE(idle->stream->Write(SmallStep()));
  ASSERT_TRUE(idle->stream->Read(&reply));
  const auto start = std::chrono::steady_clock::now();
  server_->server().Shutdown({});
  EXPECT_LT(std::chrono::steady_clock::now() - start, 2s);
  EXPECT_TRUE(engine_.opening_stopped());
  EXPECT_EQ(idle->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(engine_.released_writers(), 1);
}

TEST_F(LifecycleTest, ShutdownAnswersStepsInFlight) {
  StartServer();
  engine_.Hold();
  auto client = StartClient();
  ASSERT_TRUE(client->stream->Write(SmallStep()));
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  std::thread shutdown([&] { server_->server().Shutdown({}); });
  ASSERT_TRUE(Within([&] { return engine_.opening_stopped(); }));
  // Meanwhile: not healthy, no new sequences, no new streams.
  EXPECT_FALSE(server::Probe(server_->address(), 5s).ok());
  grpc::ClientContext context;
  v1::OpenSequenceResponse opened;
  EXPECT_EQ(client->stub->OpenSequence(&context, SmallModel(), &opened).error_code(),
            grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(Within(
      [&] { return StartClient()->Finish().error_code() == grpc::StatusCode::UNAVAILABLE; }));
  engine_.Release();
  v1::DecodeResponse reply;
  EXPECT_TRUE(client->stream->Read(&reply));
  EXPECT_EQ(reply.status().code(), 0);
  EXPECT_EQ(client->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  shutdown.join();
}

TEST_F(LifecycleTest, ShutdownCancelsWhatDoesNotEnd) {
  StartServer();
  engine_.Hold();
  auto client = StartClient();
  ASSERT_TRUE(client->stream->Write(SmallStep()));
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  const auto start = std::chrono::steady_clock::now();
  server_->server().Shutdown(kQuick);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 3s);
  EXPECT_EQ(engine_.cancelled(), 1);
  EXPECT_EQ(client->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(LifecycleTest, ShutdownEndsClientsThatDoNotRead) {
  engine_.set_value_dim(1 << 16);
  options_.reply_timeout_s = 3600;
  StartServer();
  auto greedy = StartClient();
  std::thread writer([&] {
    while (greedy->stream->Write(SmallStep())) continue;
  });
  // The window is full when no further step is decoded.
  int before = -1;
  while (engine_.decoded() == 0 || engine_.decoded() != before) {
    before = engine_.decoded();
    std::this_thread::sleep_for(100ms);
  }
  const auto start = std::chrono::steady_clock::now();
  server_->server().Shutdown(kQuick);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 3s);
  writer.join();
  EXPECT_EQ(greedy->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(LifecycleTest, ShutdownEndsUploads) {
  StartServer();
  Uploader upload(*server_);
  FillTensor(1, 1, 16, 1.0f, upload.request.mutable_k());
  FillTensor(1, 1, 16, 1.0f, upload.request.mutable_v());
  ASSERT_TRUE(upload.stream->Write(upload.request));
  ASSERT_TRUE(Within([&] { return server_->Metric("attnd_streams") == 1; }));
  server_->server().Shutdown({});
  EXPECT_EQ(upload.stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(LifecycleTest, ManyStreamsAtOnce) {
  constexpr int kStreams = 2000;
  StartServer();
  const auto stub = server_->NewStub();
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < kStreams; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(stub->Decode(contexts.back().get()));
    ASSERT_TRUE(streams.back()->Write(SmallStep()));
  }
  for (auto& stream : streams) {
    v1::DecodeResponse reply;
    ASSERT_TRUE(stream->Read(&reply));
    EXPECT_EQ(reply.status().code(), 0);
  }
  EXPECT_EQ(server_->Metric("attnd_streams"), kStreams);
  server_->server().Shutdown({});
  for (auto& stream : streams) {
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  }
}

}  // namespace
}  // namespace attnd::testing
