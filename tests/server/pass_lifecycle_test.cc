// SPDX-License-Identifier: Apache-2.0
//
// Goal: what waits and what ends around passes and prompts that are completed within a stream: no
// later layer is refused for a full queue, a stream that ends gives its pass up first, and one that
// waits for a prefill's worker may leave. Method: the real server over a Unix socket, with an
// engine whose steps wait until the test lets them go.
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/server_fixture.h"
#include "tests/server/within.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;

class PassLifecycleTest : public FakeEngineFixture {
 protected:
  // A stream with a connection of its own.
  struct Stream {
    explicit Stream(const TestServer& server) : stub(server.NewStub()) {
      context.set_deadline(std::chrono::system_clock::now() + 60s);
      stream = stub->Decode(&context);
    }
    ~Stream() { context.TryCancel(); }
    v1::DecodeResponse Send(const v1::DecodeRequest& request) {
      v1::DecodeResponse reply;
      EXPECT_TRUE(stream->Write(request) && stream->Read(&reply));
      return reply;
    }
    grpc::Status Finish() {
      stream->WritesDone();
      v1::DecodeResponse reply;
      while (stream->Read(&reply)) continue;
      return stream->Finish();
    }
    const std::unique_ptr<v1::Attnd::Stub> stub;
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>> stream;
  };
  std::unique_ptr<Stream> NewStream() { return std::make_unique<Stream>(*server_); }

  static v1::DecodeRequest First(uint32_t layers) {
    v1::DecodeRequest request = SmallStep();
    request.mutable_begin_pass()->set_layers(layers);
    return request;
  }
  static v1::DecodeRequest Later(uint32_t layer) {
    v1::DecodeRequest request = SmallStep();
    request.clear_rows();
    request.set_layer(layer);
    return request;
  }
  static v1::DecodeRequest Complete() {
    v1::DecodeRequest request;
    request.add_complete_prefills(1);
    return request;
  }
};

TEST_F(PassLifecycleTest, AFullQueueRefusesNoLaterLayer) {
  options_.step_workers = 1;
  options_.max_queued_steps = 1;
  StartServer();
  const auto pass = NewStream(), running = NewStream(), queued = NewStream();
  EXPECT_EQ(pass->Send(First(3)).status().code(), 0);
  engine_.Hold();
  ASSERT_TRUE(running->stream->Write(SmallStep()));
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  ASSERT_TRUE(queued->stream->Write(SmallStep()));
  ASSERT_TRUE(Within([&] { return server_->Metric("attnd_queue_depth") == 1; }));
  // A declaration is refused as any other step.
  EXPECT_EQ(NewStream()->Send(First(3)).status().code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  ASSERT_TRUE(pass->stream->Write(Later(1)));
  EXPECT_TRUE(Within([&] { return server_->Metric("attnd_queue_depth") == 2; }));
  engine_.Release();
  v1::DecodeResponse reply;
  ASSERT_TRUE(pass->stream->Read(&reply));
  EXPECT_EQ(reply.status().code(), 0) << reply.status().message();
  EXPECT_EQ(pass->Send(Later(2)).status().code(), 0);
  EXPECT_EQ(engine_.passes_over(), 1);
  EXPECT_EQ(server_->Metric("attnd_rejections_total{reason=queue}"), 1);
  for (const auto& stream : {running.get(), queued.get(), pass.get()}) {
    EXPECT_TRUE(stream->Finish().ok());
  }
}

TEST_F(PassLifecycleTest, LayersThatMayReadDiskGoOn) {
  StartServer();
  engine_.ReadDisk();
  const auto pass = NewStream();
  EXPECT_EQ(pass->Send(First(3)).status().code(), 0);
  EXPECT_EQ(pass->Send(Later(1)).status().code(), 0);
  EXPECT_EQ(engine_.passes_over(), 0);
  EXPECT_EQ(pass->Send(Later(2)).status().code(), 0);
  EXPECT_EQ(engine_.passes_over(), 1);
  EXPECT_TRUE(pass->Finish().ok());
}

// Whoever ends the stream: the pass is over before the sequences have no writer any more.
TEST_F(PassLifecycleTest, AStreamThatEndsGivesItsPassUpFirst) {
  StartServer();
  for (const bool killed : {false, true}) {
    const int over = engine_.passes_over(), released = engine_.released_writers();
    engine_.HoldWriters();
    const auto pass = NewStream();
    EXPECT_EQ(pass->Send(First(3)).status().code(), 0);
    if (killed) pass->context.TryCancel();
    if (!killed) pass->stream->WritesDone();
    EXPECT_TRUE(Within([&] { return engine_.passes_over() == over + 1; }));
    EXPECT_EQ(engine_.released_writers(), released);
    engine_.ReleaseWriters();
    v1::DecodeResponse reply;
    EXPECT_FALSE(pass->stream->Read(&reply));
    EXPECT_EQ(pass->stream->Finish().ok(), !killed);
  }
}

TEST_F(PassLifecycleTest, ACancelledLayerEndsWithItsPass) {
  StartServer();
  const auto pass = NewStream();
  EXPECT_EQ(pass->Send(First(3)).status().code(), 0);
  engine_.Hold();
  ASSERT_TRUE(pass->stream->Write(Later(1)));
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  pass->context.TryCancel();
  EXPECT_TRUE(Within([&] { return engine_.passes_over() == 1; }));
  EXPECT_EQ(engine_.cancelled(), 1);
  EXPECT_EQ(pass->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(PassLifecycleTest, ShutdownEndsAPassBetweenTwoLayers) {
  StartServer();
  const auto pass = NewStream();
  EXPECT_EQ(pass->Send(First(3)).status().code(), 0);
  server_->server().Shutdown({.steps = 5000ms, .cancel = 5000ms, .server = 1000ms});
  EXPECT_EQ(engine_.passes_over(), 1);
  EXPECT_EQ(pass->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

// Prompts are completed by few workers; a stream whose client leaves does not wait for one.
TEST_F(PassLifecycleTest, AStreamLeavesTheQueueOfPrefills) {
  StartServer();
  engine_.Hold();
  std::vector<std::unique_ptr<Stream>> running;
  int waiting = -1;
  while (engine_.waiting() > waiting) {  // until one of them does not run
    waiting = engine_.waiting();
    running.push_back(NewStream());
    ASSERT_TRUE(running.back()->stream->Write(Complete()));
    static_cast<void>(engine_.WaitForWaiting(0));
    std::this_thread::sleep_for(100ms);
  }
  EXPECT_TRUE(engine_.lease_held());
  const auto queued = std::move(running.back());
  running.pop_back();
  queued->context.TryCancel();
  EXPECT_EQ(queued->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Within([&] { return engine_.released_writers() == 1; }));
  EXPECT_EQ(engine_.cancelled(), 0);
  engine_.Release();
  for (const auto& stream : running) {
    v1::DecodeResponse reply;
    ASSERT_TRUE(stream->stream->Read(&reply));
    EXPECT_EQ(reply.rows(0).status().code(), 0);
    EXPECT_TRUE(stream->Finish().ok());
  }
  EXPECT_TRUE(Within([&] { return !engine_.lease_held(); }));
}

TEST_F(PassLifecycleTest, ShutdownEndsAPrefillWithUnavailable) {
  StartServer();
  engine_.Hold();
  const auto stream = NewStream();
  ASSERT_TRUE(stream->stream->Write(Complete()));
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  server_->server().Shutdown({.steps = 100ms, .cancel = 5000ms, .server = 1000ms});
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace attnd::testing
