// SPDX-License-Identifier: Apache-2.0
//
// The built attnd as a child process, and clients that misbehave towards it.
#ifndef ATTND_TESTS_SERVER_PROCESS_H_
#define ATTND_TESTS_SERVER_PROCESS_H_

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/process_memory.h"
#include "gtest/gtest.h"
#include "server/net/probe.h"
#include "tests/server/test_server.h"

namespace attnd::testing {

// A running attnd. Ends it if it is still there.
class Process {
 public:
  Process(const std::vector<std::string>& flags, const std::string& log) : log_(log) {
    std::vector<std::string> arguments = {ATTND_BINARY};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    std::vector<char*> pointers;
    pointers.reserve(arguments.size() + 1);
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      const int fd = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      dup2(fd, STDOUT_FILENO);
      dup2(fd, STDERR_FILENO);
      execv(pointers[0], pointers.data());
      _exit(127);
    }
  }
  ~Process() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void Signal(int signal) const { kill(pid_, signal); }
  // Stops it, and waits until the last of its threads stands still: until then some still answer.
  void Stop() const {
    Signal(SIGSTOP);
    siginfo_t stopped;
    EXPECT_EQ(waitid(P_PID, static_cast<id_t>(pid_), &stopped, WSTOPPED), 0);
  }
  // Resident memory in bytes.
  uint64_t ResidentBytes() const { return attnd::ResidentBytes(std::to_string(pid_)); }
  // The most that it has been since the last ForgetPeak, or since the start.
  uint64_t PeakBytes() const {
    std::ifstream file("/proc/" + std::to_string(pid_) + "/status");
    const std::string name = "VmHWM:";
    uint64_t kibibytes = 0;
    for (std::string word; file >> word;) {
      if (word == name) file >> kibibytes;
    }
    return kibibytes << 10;
  }
  // Resident memory, and the peak counts anew from here. Fails the test where the system cannot
  // say.
  uint64_t ForgetPeak() const {
    std::ofstream file("/proc/" + std::to_string(pid_) + "/clear_refs");
    EXPECT_TRUE(file << "5" << std::flush) << "clear_refs cannot be written";
    const uint64_t before = ResidentBytes();
    EXPECT_GT(before, 0u);
    // The kernel counts resident memory in batches of pages for each thread.
    constexpr uint64_t kUncounted = uint64_t{4} << 20;
    EXPECT_GE(PeakBytes() + kUncounted, before) << "/proc tells no VmHWM";
    return before;
  }
  // The exit status, 128 + signal if a signal ended it, -1 if it has not ended in time.
  int Wait(std::chrono::milliseconds timeout) {
    const auto limit = std::chrono::steady_clock::now() + timeout;
    int status = 0;
    while (waitpid(pid_, &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > limit) return -1;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  std::string Log() const {
    std::ifstream file(log_);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

 private:
  const std::string log_;
  pid_t pid_ = 0;
};

// Starts programs in a directory of the test's own.
class ProcessFixture : public ::testing::Test {
 protected:
  std::vector<std::string> Flags(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> flags = {"--listen", address_, "--data-dir", data_dir_,
                                      "--memory-budget-bytes=1073741824"};
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }
  std::unique_ptr<Process> Start(const std::vector<std::string>& flags) const {
    auto process = std::make_unique<Process>(flags, directory_.path() + "/log");
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    const auto serves = [this] { return server::Probe(address_, std::chrono::seconds(1)).ok(); };
    while (!serves() && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    EXPECT_TRUE(serves()) << process->Log();
    return process;
  }
  // Runs to the end: exit status and output.
  std::pair<int, std::string> Run(const std::vector<std::string>& flags) const {
    Process process(flags, directory_.path() + "/run-log");
    const int status = process.Wait(std::chrono::seconds(20));
    return {status, process.Log()};
  }
  // A sequence whose replies are large: 128 KiB for a token.
  uint64_t OpenLarge(v1::Attnd::Stub* stub) const {
    v1::OpenSequenceRequest request = SmallModel();
    request.mutable_model()->mutable_shape()->set_query_heads(64);
    request.mutable_model()->mutable_shape()->set_value_dim(512);
    v1::OpenSequenceResponse reply;
    grpc::ClientContext context;
    EXPECT_TRUE(stub->OpenSequence(&context, request, &reply).ok());
    return reply.sequence_id();
  }
  static v1::DecodeRequest LargeStep(uint64_t sequence) {
    v1::DecodeRequest request;
    v1::DecodeRow* row = request.add_rows();
    row->set_sequence_id(sequence);
    row->set_query_tokens(8);
    row->set_query_only(true);
    FillTensor(8, 64, 16, 1.0f, request.mutable_q());
    return request;
  }

  const TempDir directory_;
  const std::string address_ = "unix:" + directory_.path() + "/run/attnd.sock";
  const std::string data_dir_ = directory_.path() + "/data";
};

// A client that never reads: when this is made, its replies fill everything between it and the
// server.
class UnreadReplies {
 public:
  UnreadReplies(const std::string& address, const v1::DecodeRequest& step)
      : stub_(v1::Attnd::NewStub(NewChannel(address))), stream_(stub_->Decode(&context_)) {
    writer_ = std::thread([this, step] {
      while (stream_->Write(step)) ++written_;
      ended_ = true;
    });
    int before = -1;
    while (written_ == 0 || written_ != before) {
      before = written_;
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
  }
  // Whether the server has ended the stream.
  bool ended() const { return ended_; }
  ~UnreadReplies() {
    context_.TryCancel();
    writer_.join();
  }

 private:
  const std::unique_ptr<v1::Attnd::Stub> stub_;
  grpc::ClientContext context_;
  const std::unique_ptr<grpc::ClientReaderWriter<v1::DecodeRequest, v1::DecodeResponse>> stream_;
  std::atomic<int> written_{0};
  std::atomic<bool> ended_{false};
  std::thread writer_;
};

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVER_PROCESS_H_
