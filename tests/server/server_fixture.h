// SPDX-License-Identifier: Apache-2.0
//
// Fixtures of a whole server in the test's process: in front of an engine that waits, where time
// matters, or of the real one, where answers do.
#ifndef ATTND_TESTS_SERVER_SERVER_FIXTURE_H_
#define ATTND_TESTS_SERVER_SERVER_FIXTURE_H_

#include <chrono>
#include <memory>

#include "gtest/gtest.h"
#include "tests/server/fake_engine.h"
#include "tests/server/test_server.h"

namespace attnd::testing {

class FakeEngineFixture : public ::testing::Test {
 protected:
  void StartServer() { server_ = std::make_unique<TestServer>(options_, &engine_); }
  // One step is answered, on a connection of its own.
  void ExpectAnswers() const {
    const auto stub = server_->NewStub();
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    const auto stream = stub->Decode(&context);
    v1::DecodeResponse reply;
    EXPECT_TRUE(stream->Write(SmallStep()) && stream->Read(&reply));
    EXPECT_EQ(reply.status().code(), 0);
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }

  TempDir directory_;
  server::ServerOptions options_ = TestOptions(directory_.path());
  FakeEngine engine_;
  std::unique_ptr<TestServer> server_;
};

class RealEngineFixture : public ::testing::Test {
 protected:
  void StartServer() {
    engine_ = MakeTestEngine(options_, on_disk_, lease_clock_);
    server_ = std::make_unique<TestServer>(options_, engine_.get());
    stub_ = server_->NewStub();
  }

  TempDir directory_;
  server::ServerOptions options_ = TestOptions(directory_.path());
  bool on_disk_ = false;  // whether segments may go to disk
  engine::Lease::Clock lease_clock_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<TestServer> server_;
  std::unique_ptr<v1::Attnd::Stub> stub_;
};

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVER_SERVER_FIXTURE_H_
