// SPDX-License-Identifier: Apache-2.0
//
// Goal: a step whose stream ends with UNAVAILABLE is repeated on a new one, so that a server that
// restarts or a connection that breaks costs a pause and no answer; within the step's limit, a
// bounded number of times, and without appending twice. Method: servers on one socket, one after
// the other, over one engine: what the first one did is there when the second answers.
#include <chrono>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "client/cpp/client.h"
#include "gtest/gtest.h"
#include "tests/client/client_fixture.h"
#include "tests/server/test_server.h"
#include "tests/server/within.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr server::ShutdownLimits kQuick = {.steps = 100ms, .cancel = 5000ms, .server = 1000ms};

class DecodeSessionTest : public ClientFixture {
 protected:
  void StopServer() {
    server_->server().Shutdown(kQuick);
    server_.reset();
  }
};

TEST_F(DecodeSessionTest, AStepIsRepeatedWhenTheServerComesBack) {
  StartServer(RealEngine());
  Connect();
  const auto opened = client_->OpenSequence(SmallModel());
  ASSERT_TRUE(opened.ok());
  const uint64_t sequence = opened->sequence_id();
  const auto session = client_->StartDecode();
  v1::DecodeResponse before, after;
  ASSERT_TRUE(session->Step(SmallStep(sequence, 0, 2), &before, 10s).ok());
  StopServer();
  std::thread restart([&] {
    std::this_thread::sleep_for(300ms);
    StartServer(RealEngine());
  });
  // The step that was answered, as if its reply had been lost, and the next one.
  const absl::Status status = session->Step(SmallStep(sequence, 0, 2), &after, 10s);
  restart.join();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(after.rows(0).status().code(), 0) << after.rows(0).status().message();
  EXPECT_EQ(after.out().data(), before.out().data());
  ASSERT_TRUE(session->Step(SmallStep(sequence, 1, 3), &after, 10s).ok());
  EXPECT_EQ(after.rows(0).status().code(), 0);
  EXPECT_EQ(client_->ListSequences()->at(0).committed_tokens(), 2u);  // nothing twice
  EXPECT_TRUE(session->Finish(10s).ok());
}

TEST_F(DecodeSessionTest, AStepInTheMiddleIsRepeated) {
  StartServer(&fake_);
  Connect();
  fake_.Hold();
  std::thread restart([&] {
    ASSERT_TRUE(fake_.WaitForWaiting(1));
    StopServer();
    fake_.Release();
    StartServer(&fake_);
  });
  const auto session = client_->StartDecode();
  v1::DecodeResponse reply;
  const absl::Status status = session->Step(SmallStep(), &reply, 10s);
  restart.join();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(fake_.cancelled(), 1);
  EXPECT_EQ(fake_.decoded(), 1);
}

// The second server lets another stream write first, as the old one's end may be noticed late.
TEST_F(DecodeSessionTest, ARepeatedStepWaitsForTheOldWriter) {
  StartServer(RealEngine());
  Connect();
  const auto opened = client_->OpenSequence(SmallModel());
  ASSERT_TRUE(opened.ok());
  const auto session = client_->StartDecode();
  v1::DecodeResponse reply;
  ASSERT_TRUE(session->Step(SmallStep(opened->sequence_id(), 0), &reply, 10s).ok());
  StopServer();
  StartServer(RealEngine());
  const auto stub = server_->NewStub();
  grpc::ClientContext context;
  const auto writer = stub->Decode(&context);
  ASSERT_TRUE(writer->Write(SmallStep(opened->sequence_id(), 1)) && writer->Read(&reply));
  std::thread end([&] {
    std::this_thread::sleep_for(150ms);
    writer->WritesDone();
    EXPECT_TRUE(writer->Finish().ok());
  });
  const absl::Status status = session->Step(SmallStep(opened->sequence_id(), 1), &reply, 10s);
  end.join();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(reply.rows(0).status().code(), 0) << reply.rows(0).status().message();
}

TEST_F(DecodeSessionTest, AttemptsAreCounted) {
  for (const int attempts : {1, 3}) {
    StartServer(&fake_);
    Connect(attempts);
    const auto session = client_->StartDecode();
    v1::DecodeResponse reply;
    ASSERT_TRUE(session->Step(SmallStep(), &reply, 10s).ok());
    StopServer();
    const auto start = Clock::now();
    const absl::Status status = session->Step(SmallStep(), &reply, 10s);
    const auto time = Clock::now() - start;
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    // Whether the first try ends with the server's words or with the connection depends on what the
    // client reads first.
    EXPECT_EQ(absl::StrContains(status.message(), "repeated in vain"), attempts == 3) << status;
    EXPECT_EQ(time >= 250ms, attempts == 3);
    EXPECT_LT(time, 5s);
    EXPECT_EQ(session->Step(SmallStep(), &reply, 10s), status);  // for good
  }
}

TEST_F(DecodeSessionTest, RepetitionsEndWithTheTimeout) {
  Connect(1000);
  const auto session = client_->StartDecode();
  v1::DecodeResponse reply;
  const auto start = Clock::now();
  EXPECT_TRUE(absl::IsUnavailable(session->Step(SmallStep(), &reply, 500ms)));
  EXPECT_LT(Clock::now() - start, 1s);
}

// A fault of the request or of its row is an answer, and no reason to ask again.
TEST_F(DecodeSessionTest, OtherFaultsAreNotRepeated) {
  StartServer(RealEngine());
  Connect();
  const auto session = client_->StartDecode();
  v1::DecodeResponse reply;
  ASSERT_TRUE(session->Step(SmallStep(1), &reply, 10s).ok());
  EXPECT_EQ(reply.rows(0).status().code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_TRUE(session->Finish(10s).ok());
  EXPECT_TRUE(Within([&] { return server_->Metric("attnd_streams") == 0; }));
  EXPECT_EQ(server_->Metric("attnd_steps_total{code=OK}"), 1);
}

// A pass whose server goes away is sent again from its first layer.
TEST_F(DecodeSessionTest, APassIsRepeatedWhole) {
  StartServer(RealEngine());
  Connect();
  v1::OpenSequenceRequest model = SmallModel();
  model.mutable_model()->mutable_shape()->set_layers(3);
  const uint64_t sequence = client_->OpenSequence(model)->sequence_id();
  const auto twin = client_->OpenSequence(model)->sequence_id();
  const auto session = client_->StartDecode(), other = client_->StartDecode();
  for (uint32_t layer = 0; layer < 3; ++layer) {
    v1::DecodeRequest request = SmallStep(sequence, 0, 2.0f + static_cast<float>(layer));
    request.set_layer(layer);
    v1::DecodeRequest single = request;
    single.mutable_rows(0)->set_sequence_id(twin);
    if (layer == 0) request.mutable_begin_pass()->set_layers(3);
    if (layer > 0) request.clear_rows();
    if (layer == 2) {
      StopServer();
      StartServer(RealEngine());
      EXPECT_EQ(client_->ListSequences()->at(0).layer_tokens(0), 0u);  // given up
    }
    v1::DecodeResponse reply, expected;
    const absl::Status status = session->Step(request, &reply, 10s);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(reply.status().code(), 0) << reply.status().message();
    ASSERT_TRUE(other->Step(single, &expected, 10s).ok());
    EXPECT_EQ(reply.out().data(), expected.out().data());
    EXPECT_EQ(reply.step_id(), request.step_id());
  }
  EXPECT_EQ(client_->ListSequences()->at(0).committed_tokens(), 1u);
}

// Layer 0 and layer 1 of a pass over two layers.
v1::DecodeRequest FirstLayer(uint64_t sequence) {
  v1::DecodeRequest request = SmallStep(sequence, 0);
  request.mutable_begin_pass()->set_layers(request.layer() + 2);
  return request;
}
v1::DecodeRequest SecondLayer() {
  v1::DecodeRequest request = SmallStep(0, 0);
  request.clear_rows();
  request.set_layer(1);
  return request;
}

v1::OpenSequenceRequest TwoLayers() {
  v1::OpenSequenceRequest model = SmallModel();
  model.mutable_model()->mutable_shape()->set_layers(2);
  return model;
}

// Sent again the row might take part, with what was sent in its place.
TEST_F(DecodeSessionTest, APassThatARowHasLeftIsNotRepeated) {
  StartServer(RealEngine());
  Connect();
  const uint64_t sequence = client_->OpenSequence(TwoLayers())->sequence_id();
  const auto session = client_->StartDecode();
  v1::DecodeResponse reply;
  ASSERT_TRUE(session->Step(FirstLayer(sequence + 1), &reply, 10s).ok());
  ASSERT_EQ(reply.rows(0).status().code(), grpc::StatusCode::NOT_FOUND);
  StopServer();
  StartServer(RealEngine());
  EXPECT_EQ(session->Step(SecondLayer(), &reply, 10s).code(), absl::StatusCode::kUnavailable);
}

// A reply of another layer is never a step's answer.
TEST_F(DecodeSessionTest, APassThatFailsWhenItIsRepeatedIsUnavailable) {
  StartServer(RealEngine());
  Connect();
  const uint64_t sequence = client_->OpenSequence(TwoLayers())->sequence_id();
  const auto session = client_->StartDecode();
  v1::DecodeResponse reply;
  ASSERT_TRUE(session->Step(FirstLayer(sequence), &reply, 10s).ok());
  ASSERT_EQ(reply.rows_size(), 0) << reply.rows(0).status().message();
  StopServer();
  StartServer(RealEngine());
  const auto stub = server_->NewStub();
  grpc::ClientContext context;
  const auto writer = stub->Decode(&context);
  v1::DecodeResponse written;
  ASSERT_TRUE(writer->Write(SmallStep(sequence, 0)) && writer->Read(&written));
  const absl::Status status = session->Step(SecondLayer(), &reply, 2s);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "layer 0 of the pass failed")) << status;
  writer->WritesDone();
  EXPECT_TRUE(writer->Finish().ok());
}

}  // namespace
}  // namespace attnd::testing
