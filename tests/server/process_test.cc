// SPDX-License-Identifier: Apache-2.0
//
// Goal: the program as an operator has it: options, files and their modes, metrics, signals, exit
// statuses. Method: the built attnd as a child process, its log read from a file.
#include "tests/server/process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "common/file_lock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/net/probe.h"
#include "tests/server/test_server.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using ::testing::HasSubstr;

mode_t Mode(const std::string& path) {
  struct stat info {};
  return lstat(path.c_str(), &info) == 0 ? info.st_mode & 07777u : 0u;
}

// The port that the log tells.
int MetricsPort(const Process& process) {
  const std::string before = "http://127.0.0.1:";
  std::string log = process.Log();
  for (int i = 0; i < 500 && log.find(before) == std::string::npos; ++i) {  // it may come later
    std::this_thread::sleep_for(20ms);
    log = process.Log();
  }
  const size_t found = log.find(before);
  EXPECT_NE(found, std::string::npos) << log;
  return found == std::string::npos ? 0 : std::stoi(log.substr(found + before.size()));
}

// A connection to a port of this machine, -1 if there is none. Reading from it ends after 10 s.
int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const timeval timeout = {.tv_sec = 10, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
  close(fd);
  return -1;
}

std::string HttpGet(int port, const std::string& path) {
  std::string reply;
  const int fd = Connect(port);
  if (fd >= 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
    if (write(fd, request.data(), request.size()) > 0) {
      char buffer[4096];
      ssize_t count;
      while ((count = read(fd, buffer, sizeof(buffer))) > 0) reply.append(buffer, count);
    }
  }
  close(fd);
  return reply;
}

// What a client saw that called and called.
struct Called {
  std::string wrong;  // the first end that is neither OK nor UNAVAILABLE, if there is one
  int late = 0;       // calls begun after one had been refused
};

// Keeps sixteen calls under way until the server is gone.
Called CallUntilGone(const std::string& address, const std::atomic<bool>& gone,
                     std::atomic<int>* answered) {
  struct Call {
    grpc::ClientContext context;
    v1::ListSequencesResponse reply;
    grpc::Status status;
    std::unique_ptr<grpc::ClientAsyncResponseReader<v1::ListSequencesResponse>> reader;
  };
  const auto channel = NewChannel(address);
  const auto stub = v1::Attnd::NewStub(channel);
  grpc::CompletionQueue queue;
  Called called;
  bool refused = false;
  int under_way = 0;
  const auto start = [&] {
    auto* const call = new Call;
    call->reader = stub->AsyncListSequences(&call->context, {}, &queue);
    call->reader->Finish(&call->reply, &call->status, call);
    ++under_way;
    if (refused) ++called.late;
  };
  for (int i = 0; i < 16; ++i) start();
  void* tag = nullptr;
  bool ok = false;
  while (under_way > 0 && queue.Next(&tag, &ok)) {
    const std::unique_ptr<Call> call(static_cast<Call*>(tag));
    --under_way;
    ++*answered;
    const grpc::StatusCode code = call->status.error_code();
    refused = refused || code == grpc::StatusCode::UNAVAILABLE;
    if (!call->status.ok() && code != grpc::StatusCode::UNAVAILABLE && called.wrong.empty()) {
      called.wrong = std::to_string(code) + ": " + call->status.error_message();
    }
    if (!gone) start();
    // Without a connection calls end at once.
    if (channel->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_TRANSIENT_FAILURE) {
      std::this_thread::sleep_for(1ms);
    }
  }
  return called;
}

class ProcessTest : public ProcessFixture {};

TEST_F(ProcessTest, FilesArePrivateAndTheSocketGoes) {
  const auto process = Start(Flags());
  EXPECT_EQ(Mode(directory_.path() + "/run"), 0700u);
  EXPECT_EQ(Mode(address_.substr(5)), 0600u);
  EXPECT_EQ(Mode(data_dir_), 0700u);
  EXPECT_EQ(Mode(data_dir_ + "/LOCK"), 0600u);
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(10s), 0);
  EXPECT_FALSE(std::filesystem::exists(address_.substr(5)));
  EXPECT_THAT(process->Log(), HasSubstr("shut down"));
}

TEST_F(ProcessTest, ProbeHelpAndVersion) {
  EXPECT_NE(Run({"--probe", address_}).first, 0);
  const auto process = Start(Flags());
  EXPECT_EQ(Run({"--probe", address_}).first, 0);
  const auto version = Run({"--version"});
  EXPECT_EQ(version.first, 0);
  EXPECT_THAT(version.second, ::testing::MatchesRegex("attnd [0-9]+\\.[0-9]+\\.[0-9]+\n"));
  const auto help = Run({"--help"});
  EXPECT_EQ(help.first, 0);
  EXPECT_THAT(help.second, HasSubstr("--max-message-bytes"));
}

TEST_F(ProcessTest, AMistakeIsNamedAndNothingStarts) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"--max-rows=0", "max_rows"},
      {"--max-rows=many", "max_rows"},
      {"--max-rowz=1", "max_rowz"},
      {"--listen=0.0.0.0:0", "allow-insecure-tcp"},
      {"--listen=127.0.0.1:0", "allow-insecure-tcp"},
      {"--metrics-listen=0.0.0.0:0", "allow-remote-metrics"},
      {"--index-threads=12GiB", "index_threads"},
      {"--memory-budget-bytes=12GB", "12GiB"},
      {"--default-policy=psychic", "psychic"},
      {"--config=/nowhere/file", "/nowhere/file"},
      {"--policy-file=/nowhere/policies", "/nowhere/policies"},
      {"surplus", "surplus"},
  };
  for (const auto& [flag, named] : cases) {
    const auto [status, output] = Run(Flags({flag}));
    EXPECT_EQ(status, 1) << flag;
    EXPECT_THAT(output, HasSubstr(named));
  }
  EXPECT_FALSE(std::filesystem::exists(data_dir_));
}

TEST_F(ProcessTest, ADataDirAndASocketHaveOneServer) {
  const auto process = Start(Flags());
  auto [status, output] =
      Run({"--listen=unix:" + directory_.path() + "/other", "--data-dir=" + data_dir_});
  EXPECT_EQ(status, 1);
  EXPECT_THAT(output, HasSubstr("LOCK"));
  std::tie(status, output) = Run({"--listen=" + address_, "--data-dir=" + data_dir_ + "2"});
  EXPECT_EQ(status, 1);
  EXPECT_THAT(output, HasSubstr("already listens"));
  EXPECT_TRUE(server::Probe(address_, 5s).ok());
}

TEST_F(ProcessTest, ADataDirThatOthersMayReadIsRefused) {
  std::filesystem::create_directory(data_dir_);
  std::filesystem::permissions(data_dir_, std::filesystem::perms{0755});
  const auto [status, output] = Run(Flags());
  EXPECT_EQ(status, 1);
  EXPECT_THAT(output, HasSubstr("data_dir: "));
  EXPECT_THAT(output, HasSubstr("0700"));
  EXPECT_TRUE(std::filesystem::is_empty(data_dir_));
}

TEST_F(ProcessTest, ABudgetBeyondTheMachineWarns) {
  const auto process = Start(Flags({"--memory-budget-bytes=512TiB"}));
  EXPECT_THAT(process->Log(), HasSubstr("memory_budget_bytes is 562949953421312, and the machine"));
}

TEST_F(ProcessTest, StartsAgainAfterBeingKilled) {
  auto process = Start(Flags());
  process->Signal(SIGKILL);
  EXPECT_EQ(process->Wait(10s), 128 + SIGKILL);
  EXPECT_TRUE(std::filesystem::exists(address_.substr(5)));  // stale
  process = Start(Flags());
  process->Signal(SIGINT);
  EXPECT_EQ(process->Wait(10s), 0);
}

TEST_F(ProcessTest, AFlagOverridesTheFile) {
  const std::string file = directory_.path() + "/config";
  std::ofstream(file) << "listen: '" << address_ << "'\nmax_rows: 11\nmax_streams: 12\n"
                      << "default_policy { preset: 'streaming' }\n";
  const auto process = Start({"--config", file, "--data-dir", data_dir_, "--max-rows=13"});
  const auto stub = v1::Attnd::NewStub(NewChannel(address_));
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stub->GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.limits().max_rows(), 13u);
  EXPECT_EQ(info.limits().max_streams(), 12u);
  EXPECT_EQ(info.default_policy().preset(), "streaming");
}

TEST_F(ProcessTest, MetricsAreServed) {
  const auto process = Start(Flags({"--metrics-listen=127.0.0.1:0"}));
  const int port = MetricsPort(*process);
  const auto stub = v1::Attnd::NewStub(NewChannel(address_));
  const uint64_t sequence = OpenLarge(stub.get());
  grpc::ClientContext context;
  const auto stream = stub->Decode(&context);
  v1::DecodeResponse reply;
  ASSERT_TRUE(stream->Write(LargeStep(sequence)));
  ASSERT_TRUE(stream->Read(&reply));
  ASSERT_EQ(reply.rows(0).status().code(), 0) << reply.rows(0).status().message();
  stream->WritesDone();
  ASSERT_TRUE(stream->Finish().ok());
  const std::string text = HttpGet(port, "/metrics");
  for (const char* const line :
       {"attnd_build_info{", "attnd_steps_total{code=\"OK\"} 1\n", "attnd_sequences 1\n",
        "attnd_capacity_bytes{tier=\"host\"} 1073741824", "attnd_rpcs_total{",
        "attnd_stage_seconds_bucket{stage=\"engine\",le=\"+Inf\"} 1\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  // A port in use is said, not thrown.
  const auto [status, output] =
      Run({"--listen=unix:" + directory_.path() + "/b", "--data-dir", data_dir_ + "2",
           "--metrics-listen=127.0.0.1:" + std::to_string(port)});
  EXPECT_EQ(status, 1);
  EXPECT_THAT(output, HasSubstr("metrics_listen"));
}

// More of them than there are threads: each gives its thread back when it has said nothing for
// long.
TEST_F(ProcessTest, SilentConnectionsDoNotKeepTheMetricsAway) {
  const auto process = Start(Flags({"--metrics-listen=127.0.0.1:0"}));
  const int port = MetricsPort(*process);
  std::vector<int> silent(12);
  for (int& fd : silent) fd = Connect(port);
  EXPECT_THAT(HttpGet(port, "/metrics"), HasSubstr("attnd_build_info"));
  for (const int fd : silent) {
    EXPECT_GE(fd, 0);
    close(fd);
  }
}

// Clients that call and call, refused or not, until the process has ended: what came too late is
// the server's fault, not theirs.
TEST_F(ProcessTest, SigtermEndsCallsWithUnavailable) {
  const auto process = Start(Flags());
  std::atomic<int> answered{0};
  std::atomic<bool> gone{false};
  std::vector<Called> called(4);
  std::vector<std::thread> callers;
  for (Called& what : called) {
    callers.emplace_back([&] { what = CallUntilGone(address_, gone, &answered); });
  }
  while (answered < 100) std::this_thread::sleep_for(1ms);
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(10s), 0) << process->Log();
  gone = true;
  for (std::thread& caller : callers) caller.join();
  int late = 0;
  for (const Called& what : called) {
    EXPECT_EQ(what.wrong, "");
    late += what.late;
  }
  EXPECT_GT(late, 0);
}

// Somebody else holds the lock of its socket: it does not wait for ever, and says what it left out.
TEST_F(ProcessTest, SigtermWhileTheSocketsLockIsTakenEndsInTime) {
  const auto process = Start(Flags());
  const auto lock = FileLock::Acquire(address_.substr(5) + ".lock", O_RDWR);
  ASSERT_TRUE(lock.ok()) << lock.status();
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(10s), 0);
  EXPECT_THAT(process->Log(), HasSubstr("goes without its lock"));
}

TEST_F(ProcessTest, SigtermEndsStreamsWithUnavailable) {
  const auto process = Start(Flags());
  const auto stub = v1::Attnd::NewStub(NewChannel(address_));
  const uint64_t sequence = OpenLarge(stub.get());
  grpc::ClientContext context;
  const auto stream = stub->Decode(&context);
  v1::DecodeResponse reply;
  ASSERT_TRUE(stream->Write(LargeStep(sequence)));
  ASSERT_TRUE(stream->Read(&reply));
  const auto start = Clock::now();
  process->Signal(SIGTERM);
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(process->Wait(10s), 0) << process->Log();
  EXPECT_LT(Clock::now() - start, 5s);  // nothing is left to wait for
}

TEST_F(ProcessTest, SigtermWithAClientThatDoesNotReadEndsInTime) {
  const auto process = Start(Flags());
  const auto stub = v1::Attnd::NewStub(NewChannel(address_));
  const uint64_t sequence = OpenLarge(stub.get());
  const UnreadReplies unread(address_, LargeStep(sequence));
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(10s), 0) << process->Log();
}

TEST_F(ProcessTest, ASecondSignalLeavesAtOnce) {
  const auto process = Start(Flags());
  const auto stub = v1::Attnd::NewStub(NewChannel(address_));
  const uint64_t sequence = OpenLarge(stub.get());
  const UnreadReplies unread(address_, LargeStep(sequence));
  process->Signal(SIGTERM);
  while (process->Log().find("shutting down") == std::string::npos) {
    std::this_thread::sleep_for(2ms);
  }
  std::this_thread::sleep_for(50ms);
  const auto start = Clock::now();
  process->Signal(SIGTERM);
  EXPECT_EQ(process->Wait(10s), 128 + SIGTERM) << process->Log();
  EXPECT_LT(Clock::now() - start, 3s);  // in order it takes five
}

}  // namespace
}  // namespace attnd::testing
