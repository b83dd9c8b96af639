// SPDX-License-Identifier: Apache-2.0
//
// Goal: a server that the system refuses any one of its threads does not start, says whose thread
// it was, and leaves nothing behind. Method: starts that are granted one thread more each time,
// until only gRPC's own are left to ask for.
#include <memory>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/calls/handler.h"
#include "tests/server/server_fixture.h"
#include "tests/server/test_server.h"
#include "tests/system_faults.h"

#ifdef __SANITIZE_ADDRESS__
// gRPC leaks what a thread would have had that the system refuses it.
extern "C" const char* __lsan_default_suppressions();  // NOLINT(bugprone-reserved-identifier)
extern "C" const char* __lsan_default_suppressions() { return "leak:libgpr.so\n"; }
#endif

namespace attnd::testing {
namespace {

using attnd::test::ThreadsRefused;
using ::testing::HasSubstr;

constexpr char kRefused[] = "the system refused a thread ";

class RefusedThreadsTest : public FakeEngineFixture {
 protected:
  RefusedThreadsTest() {
    options_.step_workers = 1;
    options_.disk_step_workers = 1;
    options_.allow_client_memory = true;
    options_.max_memory_passes = 1;
  }

  // Of a start that is granted `allowed` threads.
  absl::Status Start(uint64_t allowed) {
    server::Metrics metrics;
    const ThreadsRefused refused(allowed);
    return server::Server::Start(options_, server::Machine{}, &engine_, &metrics).status();
  }
};

TEST_F(RefusedThreadsTest, AServerWithoutOneOfThemIsNone) {
  StartServer();  // gRPC's own threads, which it keeps
  server_.reset();
  // Whose thread is refused when the ones before it were granted, and how many of these there are.
  const std::pair<const char*, uint64_t> threads[] = {
      {"for trimming the heap", 1},
      {"for unread replies", 1},
      {"for steps", options_.step_workers},
      {"for steps that read from disk", options_.disk_step_workers},
      {"for uploads that wait for room", 4},
      {"for finished prompts", 4},
      {"for unary calls", server::kCallWorkers},
      {"for the ends of streams", 1},
      {"for passes over memory", options_.max_memory_passes},
      {"for clients that share memory", 1},
  };
  uint64_t allowed = 0;
  for (const auto& [purpose, count] : threads) {
    for (uint64_t i = 0; i < count; ++i, ++allowed) {
      const absl::Status status = Start(allowed);
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << purpose << ": " << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(kRefused) + purpose + ":"));
    }
  }
  StartServer();
  ExpectAnswers();
}

}  // namespace
}  // namespace attnd::testing
