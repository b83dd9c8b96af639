// SPDX-License-Identifier: Apache-2.0
//
// Goal: unary calls that wait hold nobody else up, have a limit, and end with the right code when
// their client leaves or the server does. Method: the real server over a Unix socket, with an
// engine whose calls wait until the test lets them go, as they do behind a sequence's lock.
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/calls/handler.h"
#include "server/net/probe.h"
#include "tests/server/fake_engine.h"
#include "tests/server/server_fixture.h"
#include "tests/server/test_server.h"
#include "tests/server/within.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Stub = v1::Attnd::Stub;

// A call under way on a thread of its own.
class Call {
 public:
  using Function = std::function<grpc::Status(Stub*, grpc::ClientContext*)>;
  Call(const TestServer& server, Function function, std::chrono::milliseconds timeout = 30s)
      : stub_(server.NewStub()) {
    context_.set_deadline(std::chrono::system_clock::now() + timeout);
    thread_ = std::thread(
        [this, function = std::move(function)] { status_ = function(stub_.get(), &context_); });
  }
  ~Call() { Wait(); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void Cancel() { context_.TryCancel(); }
  const grpc::Status& Wait() {
    if (thread_.joinable()) thread_.join();
    return status_;
  }

 private:
  const std::unique_ptr<Stub> stub_;
  grpc::ClientContext context_;
  grpc::Status status_;
  std::thread thread_;
};

template <typename Request, typename Reply>
Call::Function Function(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                        Request request = Request()) {
  return [method, request](Stub* stub, grpc::ClientContext* context) {
    Reply reply;
    return (stub->*method)(context, request, &reply);
  };
}

// Every call that may wait for a sequence's lock.
std::vector<Call::Function> WaitingCalls() {
  return {Function(&Stub::TruncateSequence), Function(&Stub::ForkSequence),
          Function(&Stub::CloseSequence), Function(&Stub::ListSequences),
          Function(&Stub::OpenSequence, SmallModel())};
}

class CallsTest : public FakeEngineFixture {
 protected:
  ~CallsTest() override {
    engine_.ReleaseCalls();
    engine_.ReleaseWriters();
  }
  std::unique_ptr<Call> Start(Call::Function function, std::chrono::milliseconds timeout = 30s) {
    return std::make_unique<Call>(*server_, std::move(function), timeout);
  }
  // Truncations that occupy every worker.
  std::vector<std::unique_ptr<Call>> FillWorkers() {
    engine_.HoldCalls();
    std::vector<std::unique_ptr<Call>> calls;
    for (int i = 0; i < kWorkers; ++i) {
      calls.push_back(Start(Function(&Stub::TruncateSequence)));
      EXPECT_TRUE(Within([&] { return engine_.calls_waiting() == i + 1; }));
    }
    return calls;
  }
  bool QueueHas(int calls) {
    return Within([&] { return server_->Metric("attnd_queued_calls") == calls; });
  }

  static constexpr int kWorkers = server::kCallWorkers;
};

TEST_F(CallsTest, CallsThatWaitHoldNobodyElse) {
  StartServer();
  engine_.HoldCalls();
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 4; ++i) {
    for (const Call::Function& function : WaitingCalls()) calls.push_back(Start(function));
  }
  ASSERT_TRUE(Within([&] { return engine_.calls_waiting() >= 2; }));
  std::this_thread::sleep_for(100ms);  // whoever could be held up is
  EXPECT_TRUE(server::Probe(server_->address(), 5s).ok());
  EXPECT_TRUE(Start(Function(&Stub::GetServerInfo), 5s)->Wait().ok());
  const auto stub = server_->NewStub();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + 5s);
  const auto stream = stub->Decode(&context);
  v1::DecodeResponse reply;
  EXPECT_TRUE(stream->Write(SmallStep()) && stream->Read(&reply));
  engine_.ReleaseCalls();
  for (const auto& call : calls) {
    EXPECT_TRUE(call->Wait().ok()) << call->Wait().error_message();
  }
  EXPECT_EQ(engine_.calls_done(), 20);
}

// A stream's end releases its sequences, which may wait for their locks.
TEST_F(CallsTest, StreamsThatEndHoldNobodyElse) {
  StartServer();
  engine_.HoldWriters();
  const auto stub = server_->NewStub();
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>>>
      streams;
  for (int i = 0; i < 8; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(stub->Decode(contexts.back().get()));
    v1::DecodeResponse reply;
    ASSERT_TRUE(streams.back()->Write(SmallStep()) && streams.back()->Read(&reply));
    streams.back()->WritesDone();
  }
  std::this_thread::sleep_for(100ms);
  EXPECT_TRUE(server::Probe(server_->address(), 5s).ok());
  engine_.ReleaseWriters();
  for (auto& stream : streams) EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(engine_.released_writers(), 8);
}

TEST_F(CallsTest, AFullQueueRefusesTheCall) {
  options_.max_queued_steps = 1;
  StartServer();
  auto running = FillWorkers();
  const auto queued = Start(Function(&Stub::CloseSequence));
  ASSERT_TRUE(QueueHas(1));
  for (const Call::Function& function : WaitingCalls()) {
    const grpc::Status status = Start(function)->Wait();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(status.error_message(), HasSubstr("max_queued_steps: 1 "));
  }
  EXPECT_EQ(server_->Metric("attnd_rejections_total{reason=queue}"), 5);
  engine_.ReleaseCalls();
  EXPECT_TRUE(queued->Wait().ok());
  EXPECT_TRUE(Start(Function(&Stub::CloseSequence))->Wait().ok());
}

TEST_F(CallsTest, ACallWhoseClientIsGoneIsNotMade) {
  StartServer();
  auto running = FillWorkers();
  const auto left = Start(Function(&Stub::TruncateSequence));
  ASSERT_TRUE(QueueHas(1));
  left->Cancel();
  EXPECT_EQ(left->Wait().error_code(), grpc::StatusCode::CANCELLED);
  const auto late = Start(Function(&Stub::TruncateSequence), 200ms);
  EXPECT_EQ(late->Wait().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  std::this_thread::sleep_for(100ms);  // the server counts from the call's arrival, in rounded time
  engine_.ReleaseCalls();
  for (const auto& call : running) EXPECT_TRUE(call->Wait().ok());
  ASSERT_TRUE(QueueHas(0));
  EXPECT_TRUE(Start(Function(&Stub::CloseSequence))->Wait().ok());
  EXPECT_EQ(engine_.calls_done(), kWorkers + 1);
  EXPECT_EQ(server_->Metric("attnd_rpcs_total{code=DEADLINE_EXCEEDED}{method=TruncateSequence}"),
            1);
  EXPECT_EQ(server_->Metric("attnd_rpcs_total{code=CANCELLED}{method=TruncateSequence}"), 1);
}

// Calls that run are answered, those that wait and those that come are refused.
TEST_F(CallsTest, ShutdownEndsCallsWithUnavailable) {
  StartServer();
  const auto holder = server_->NewStub();  // a step that keeps the shutdown from closing the door
  engine_.Hold();
  grpc::ClientContext context;
  const auto stream = holder->Decode(&context);
  ASSERT_TRUE(stream->Write(SmallStep()));
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  auto running = FillWorkers();
  const auto queued = Start(Function(&Stub::ForkSequence));
  ASSERT_TRUE(QueueHas(1));
  std::thread shutdown([&] { server_->server().Shutdown({}); });
  ASSERT_TRUE(Within([&] {
    return Start(Function(&Stub::GetServerInfo))->Wait().error_code() ==
           grpc::StatusCode::UNAVAILABLE;
  }));
  for (const Call::Function& function : WaitingCalls()) {
    const grpc::Status status = Start(function)->Wait();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("shutting down"));
  }
  EXPECT_EQ(server_->Metric("attnd_rejections_total{reason=shutdown}"), 6);
  engine_.ReleaseCalls();
  for (const auto& call : running) EXPECT_TRUE(call->Wait().ok());
  EXPECT_EQ(queued->Wait().error_code(), grpc::StatusCode::UNAVAILABLE);
  engine_.Release();
  shutdown.join();
  EXPECT_EQ(engine_.calls_done(), kWorkers);
}

// An upload that waits for its segments.
class Prefill {
 public:
  explicit Prefill(const TestServer& server)
      : stub_(server.NewStub()), stream_(stub_->AppendKv(&context_, &reply_)) {
    v1::AppendKvRequest request;
    request.set_sequence_id(1);
    request.set_prefill_complete(true);
    stream_->Write(request);
    stream_->WritesDone();
  }
  grpc::Status Finish() { return stream_->Finish(); }

 private:
  const std::unique_ptr<Stub> stub_;
  grpc::ClientContext context_;
  v1::AppendKvResponse reply_;
  const std::unique_ptr<grpc::ClientWriter<v1::AppendKvRequest>> stream_;
};

// The engine says CANCELLED of a build that nobody wants any more; the uploader did not cancel it.
TEST_F(CallsTest, APrefillOfASequenceThatWasClosedIsNotFound) {
  StartServer();
  engine_.Hold();
  Prefill prefill(*server_);
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  engine_.LoseSequences();
  engine_.Release();
  EXPECT_EQ(prefill.Finish().error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(CallsTest, ShutdownEndsAPrefillWithUnavailable) {
  StartServer();
  engine_.Hold();
  Prefill prefill(*server_);
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  server_->server().Shutdown({.steps = 100ms, .cancel = 5000ms, .server = 1000ms});
  EXPECT_EQ(prefill.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

// A call may wait for minutes behind prefills: the sequence that it names must still be there.
TEST_F(CallsTest, ACallThatWaitsHoldsTheLeaseOfItsSequence) {
  StartServer();
  engine_.Hold();
  v1::OpenSequenceRequest resume = SmallModel();
  resume.set_resume_sealed_id(1);
  std::vector<std::unique_ptr<Call>> running;
  for (int i = 0; i < 4; ++i) running.push_back(Start(Function(&Stub::OpenSequence, resume)));
  ASSERT_TRUE(engine_.WaitForWaiting(4));
  EXPECT_FALSE(engine_.lease_held());
  v1::SealSequenceRequest seal;
  seal.set_sequence_id(1);
  const auto queued = Start(Function(&Stub::SealSequence, seal));
  EXPECT_TRUE(Within([&] { return engine_.lease_held(); }));
  EXPECT_EQ(engine_.waiting(), 4) << "the seal does not run";
  engine_.Release();
  EXPECT_TRUE(queued->Wait().ok());
  EXPECT_FALSE(engine_.lease_held());  // at once: it ends before the client can see its answer
}

TEST_F(CallsTest, APrefillThatWaitsHoldsTheLeaseOfItsSequence) {
  StartServer();
  engine_.Hold();
  Prefill prefill(*server_);
  ASSERT_TRUE(engine_.WaitForWaiting(1));
  EXPECT_TRUE(engine_.lease_held());
  engine_.Release();
  EXPECT_TRUE(prefill.Finish().ok());
  EXPECT_FALSE(engine_.lease_held());
}

}  // namespace
}  // namespace attnd::testing
