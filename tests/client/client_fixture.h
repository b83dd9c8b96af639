// SPDX-License-Identifier: Apache-2.0
//
// A client of servers that come and go on one socket, before an engine that stays.
#ifndef ATTND_TESTS_CLIENT_CLIENT_FIXTURE_H_
#define ATTND_TESTS_CLIENT_CLIENT_FIXTURE_H_

#include <memory>
#include <utility>

#include "client/cpp/client.h"
#include "gtest/gtest.h"
#include "tests/server/fake_engine.h"
#include "tests/server/test_server.h"

namespace attnd::testing {

class ClientFixture : public ::testing::Test {
 protected:
  void StartServer(engine::Engine* engine) {
    server_.reset();
    server_ = std::make_unique<TestServer>(options_, engine);
  }
  void Connect(int attempts = ClientOptions().attempts) {
    auto client = Client::Connect({.target = options_.listen[0], .attempts = attempts});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }
  // One for the test's whole life.
  engine::Engine* RealEngine() {
    if (real_ == nullptr) real_ = MakeTestEngine(options_);
    return real_.get();
  }

  TempDir directory_;
  server::ServerOptions options_ = TestOptions(directory_.path());
  FakeEngine fake_;
  std::unique_ptr<engine::Engine> real_;
  std::unique_ptr<TestServer> server_;
  std::unique_ptr<Client> client_;
};

}  // namespace attnd::testing

#endif  // ATTND_TESTS_CLIENT_CLIENT_FIXTURE_H_
