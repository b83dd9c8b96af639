// SPDX-License-Identifier: Apache-2.0
//
// Which gRPC server style answers a Decode stream fastest? Echo round trips of one message over a
// Unix socket, against servers that differ in style only:
//
//   sync            one thread a stream, blocking Read and Write
//   callback        reactor that writes its reply within OnReadDone
//   callback-hop    reactor that hands the message to a bounded queue with two worker threads
//   callback-slot   reactor that answers within OnReadDone if no other stream is doing so, and
//                   hands over otherwise
//   cq              completion queue, polled by two threads that do the work themselves
//   cq-hop          completion queue polled by one thread, and the same two workers
//
// Each server is a process of its own (pollers of one process would help each other), all are up at
// once, and blocks of round trips alternate between them, so that noise of the machine falls on all
// alike. Prints one line for each (payload, streams, style): median and spread of the blocks'
// median round trip, p99, trips a second, processor time of the server a trip, and its threads.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "attnd/v1/attnd.grpc.pb.h"
#include "bench/statistics.h"
#include "grpcpp/grpcpp.h"

ABSL_FLAG(int, blocks, 20, "blocks for each style");
ABSL_FLAG(int, block_trips, 1000, "round trips of a block, all streams together");
ABSL_FLAG(int, streams_max, 16, "streams of the concurrent case");
ABSL_FLAG(std::string, serve, "", "internal: serve this style");
ABSL_FLAG(std::string, address, "", "internal: where to serve");

namespace attnd::bench {
namespace {

using v1::DecodeRequest;
using v1::DecodeResponse;
using Clock = std::chrono::steady_clock;

constexpr int kWorkers = 2;
constexpr size_t kQueueMax = 1024;
constexpr std::array<const char*, 6> kStyles = {"sync",          "callback", "callback-hop",
                                                "callback-slot", "cq",       "cq-hop"};

// The work of every style: the payload moves from the request to the reply.
void Echo(DecodeRequest* request, DecodeResponse* reply) {
  reply->set_step_id(request->step_id());
  reply->mutable_out()->mutable_data()->swap(*request->mutable_q()->mutable_data());
}

// Fixed threads over one bounded queue, as a server would have it.
class Workers {
 public:
  Workers() {
    for (int i = 0; i < kWorkers; ++i) threads_.emplace_back([this] { Run(); });
  }
  void Post(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (tasks_.size() >= kQueueMax) std::abort();
      tasks_.push_back(std::move(task));
    }
    ready_.notify_one();
  }

 private:
  void Run() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      ready_.wait(lock, [this] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
};

class SyncService final : public v1::Attnd::Service {
 public:
  grpc::Status Decode(grpc::ServerContext*,
                      grpc::ServerReaderWriter<DecodeResponse, DecodeRequest>* stream) override {
    DecodeRequest request;
    DecodeResponse reply;
    while (stream->Read(&request)) {
      Echo(&request, &reply);
      if (!stream->Write(reply)) break;
    }
    return grpc::Status::OK;
  }
};

class EchoReactor final : public grpc::ServerBidiReactor<DecodeRequest, DecodeResponse> {
 public:
  // `slot_taken` may be null: then messages are handed over if there are workers.
  EchoReactor(Workers* workers, std::atomic<bool>* slot_taken)
      : workers_(workers), slot_taken_(slot_taken) {
    StartRead(&request_);
  }
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    if (workers_ == nullptr) return Answer();
    if (slot_taken_ != nullptr && !slot_taken_->exchange(true)) {
      Echo(&request_, &reply_);
      slot_taken_->store(false);
      return StartWrite(&reply_);
    }
    workers_->Post([this] { Answer(); });
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    StartRead(&request_);
  }
  void OnDone() override { delete this; }

 private:
  void Answer() {
    Echo(&request_, &reply_);
    StartWrite(&reply_);
  }
  Workers* const workers_;
  std::atomic<bool>* const slot_taken_;
  DecodeRequest request_;
  DecodeResponse reply_;
};

class CallbackService final : public v1::Attnd::CallbackService {
 public:
  CallbackService(Workers* workers, bool slot) : workers_(workers), slot_(slot) {}
  grpc::ServerBidiReactor<DecodeRequest, DecodeResponse>* Decode(
      grpc::CallbackServerContext*) override {
    return new EchoReactor(workers_, slot_ ? &slot_taken_ : nullptr);
  }

 private:
  Workers* const workers_;
  const bool slot_;
  std::atomic<bool> slot_taken_{false};
};

// One stream of the completion-queue style: a state machine whose tag is itself.
class CqCall {
 public:
  CqCall(v1::Attnd::AsyncService* service, grpc::ServerCompletionQueue* queue, Workers* workers)
      : service_(service), queue_(queue), workers_(workers), stream_(&context_) {
    service_->RequestDecode(&context_, &stream_, queue_, queue_, this);
  }
  void Proceed(bool ok) {
    switch (state_) {
      case State::kConnect:
        if (!ok) return delete this;
        new CqCall(service_, queue_, workers_);
        return Read();
      case State::kRead:
        if (!ok) return End();
        if (workers_ == nullptr) return Answer();
        return workers_->Post([this] { Answer(); });
      case State::kWrite:
        if (!ok) return End();
        return Read();
      case State::kFinish:
        return delete this;
    }
  }

 private:
  enum class State { kConnect, kRead, kWrite, kFinish };
  void Read() {
    state_ = State::kRead;
    stream_.Read(&request_, this);
  }
  void Answer() {
    Echo(&request_, &reply_);
    state_ = State::kWrite;
    stream_.Write(reply_, this);
  }
  void End() {
    state_ = State::kFinish;
    stream_.Finish(grpc::Status::OK, this);
  }
  v1::Attnd::AsyncService* const service_;
  grpc::ServerCompletionQueue* const queue_;
  Workers* const workers_;
  grpc::ServerContext context_;
  grpc::ServerAsyncReaderWriter<DecodeResponse, DecodeRequest> stream_;
  State state_ = State::kConnect;
  DecodeRequest request_;
  DecodeResponse reply_;
};

std::unique_ptr<grpc::Server> Start(grpc::ServerBuilder* builder) {
  auto server = builder->BuildAndStart();
  if (server == nullptr) std::abort();
  return server;
}

// Serves until the parent ends this process.
void Serve(const std::string& style, const std::string& address) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const bool slot = style.ends_with("-slot");
  const bool hop = style.ends_with("-hop") || slot;
  auto workers = hop ? std::make_unique<Workers>() : nullptr;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  if (style == "sync") {
    SyncService service;
    builder.RegisterService(&service);
    Start(&builder)->Wait();
  } else if (style.starts_with("callback")) {
    CallbackService service(workers.get(), slot);
    builder.RegisterService(&service);
    Start(&builder)->Wait();
  } else {
    v1::Attnd::AsyncService service;
    builder.RegisterService(&service);
    auto queue = builder.AddCompletionQueue();
    auto server = Start(&builder);
    new CqCall(&service, queue.get(), workers.get());
    std::vector<std::thread> pollers;
    for (int i = 0; i < (hop ? 1 : kWorkers); ++i) {
      pollers.emplace_back([&queue] {
        void* tag;
        bool ok;
        while (queue->Next(&tag, &ok)) static_cast<CqCall*>(tag)->Proceed(ok);
      });
    }
    server->Wait();
  }
}

struct ServerProcess {
  std::string style;
  std::string address;
  pid_t pid = 0;

  // User and system time so far, in microseconds (the kernel counts in 10 ms).
  double CpuMicros() const {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string text((std::istreambuf_iterator<char>(file)), {});
    std::istringstream fields(text.substr(text.rfind(')') + 2));
    std::string skip;
    for (int i = 0; i < 11; ++i) fields >> skip;
    double user = 0, system = 0;
    fields >> user >> system;
    return (user + system) * 1e6 / static_cast<double>(sysconf(_SC_CLK_TCK));
  }
  int Threads() const {
    std::ifstream file("/proc/" + std::to_string(pid) + "/status");
    std::string line;
    while (std::getline(file, line)) {
      if (line.starts_with("Threads:")) return std::atoi(line.c_str() + 8);
    }
    return 0;
  }
};

ServerProcess Spawn(const std::string& style, const std::string& directory) {
  ServerProcess process{style, "unix:" + directory + "/" + style + ".sock"};
  process.pid = fork();
  if (process.pid == 0) {
    const std::string serve = "--serve=" + style, address = "--address=" + process.address;
    execl("/proc/self/exe", "rpc_server_styles", serve.c_str(), address.c_str(), nullptr);
    _exit(127);
  }
  return process;
}

// One client stream with a connection of its own.
class ClientStream {
 public:
  ClientStream(const std::string& address, size_t payload_bytes) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    auto channel =
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
    const auto limit = std::chrono::system_clock::now() + std::chrono::seconds(10);
    if (!channel->WaitForConnected(limit)) std::abort();
    stub_ = v1::Attnd::NewStub(channel);
    stream_ = stub_->Decode(&context_);
    request_.mutable_q()->mutable_data()->assign(payload_bytes, 'x');
  }
  ~ClientStream() {
    stream_->WritesDone();
    DecodeResponse reply;
    while (stream_->Read(&reply)) continue;
    static_cast<void>(stream_->Finish());
  }
  // Seconds of each round trip are appended to `trips`.
  void Run(int count, std::vector<double>* trips) {
    for (int i = 0; i < count; ++i) {
      const auto start = Clock::now();
      if (!stream_->Write(request_) || !stream_->Read(&reply_)) std::abort();
      trips->push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
  }

 private:
  std::unique_ptr<v1::Attnd::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<DecodeRequest, DecodeResponse>> stream_;
  DecodeRequest request_;
  DecodeResponse reply_;
};

struct StyleRun {
  const ServerProcess* process;
  std::vector<std::unique_ptr<ClientStream>> streams;
  std::vector<double> medians, p99s, rates;
  double cpu_us = 0;
  double trips = 0;

  void Block(int trips_of_block) {
    const double cpu_before = process->CpuMicros();
    std::vector<std::vector<double>> seconds(streams.size());
    const auto start = Clock::now();
    std::vector<std::thread> threads;
    const int each = trips_of_block / static_cast<int>(streams.size());
    for (size_t i = 1; i < streams.size(); ++i) {
      threads.emplace_back([&, i] { streams[i]->Run(each, &seconds[i]); });
    }
    streams[0]->Run(each, &seconds[0]);
    for (auto& thread : threads) thread.join();
    const double wall = std::chrono::duration<double>(Clock::now() - start).count();
    std::vector<double> all;
    for (const auto& part : seconds) all.insert(all.end(), part.begin(), part.end());
    medians.push_back(Quantile(all, 0.5) * 1e6);
    p99s.push_back(Quantile(all, 0.99) * 1e6);
    rates.push_back(static_cast<double>(all.size()) / wall);
    cpu_us += process->CpuMicros() - cpu_before;
    trips += static_cast<double>(all.size());
  }
};

void Compare(const std::vector<ServerProcess>& servers, size_t payload_bytes, int stream_count) {
  std::vector<StyleRun> runs;
  for (const ServerProcess& server : servers) {
    StyleRun run{&server, {}, {}, {}, {}};
    for (int i = 0; i < stream_count; ++i) {
      run.streams.push_back(std::make_unique<ClientStream>(server.address, payload_bytes));
    }
    run.Block(absl::GetFlag(FLAGS_block_trips));  // warm-up
    runs.push_back({&server, std::move(run.streams), {}, {}, {}});
  }
  for (int block = 0; block < absl::GetFlag(FLAGS_blocks); ++block) {
    for (size_t i = 0; i < runs.size(); ++i) {
      runs[(i + static_cast<size_t>(block)) % runs.size()].Block(absl::GetFlag(FLAGS_block_trips));
    }
  }
  for (const StyleRun& run : runs) {
    std::printf("%7zu %7d  %-13s %8.1f %8.1f %8.1f %8.1f %9.0f %8.1f %7d\n", payload_bytes,
                stream_count, run.process->style.c_str(), Quantile(run.medians, 0.5),
                Quantile(run.medians, 0.1), Quantile(run.medians, 0.9), Quantile(run.p99s, 0.5),
                Quantile(run.rates, 0.5), run.cpu_us / run.trips, run.process->Threads());
  }
  std::fflush(stdout);
}

int Main() {
  char pattern[] = "/tmp/attnd-styles-XXXXXX";
  if (mkdtemp(pattern) == nullptr) return 1;
  const std::string directory = pattern;
  std::vector<ServerProcess> servers;
  for (const char* style : kStyles) servers.push_back(Spawn(style, directory));
  std::printf("%7s %7s  %-13s %8s %8s %8s %8s %9s %8s %7s\n", "bytes", "streams", "style", "us p50",
              "blk p10", "blk p90", "us p99", "trips/s", "cpu us", "threads");
  for (const int stream_count : {1, absl::GetFlag(FLAGS_streams_max)}) {
    for (const size_t payload_bytes : {size_t{8} << 10, size_t{64} << 10}) {
      Compare(servers, payload_bytes, stream_count);
    }
  }
  for (const ServerProcess& server : servers) {
    kill(server.pid, SIGTERM);
    waitpid(server.pid, nullptr, 0);
    unlink(server.address.c_str() + 5);
  }
  rmdir(directory.c_str());
  return 0;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  if (!absl::GetFlag(FLAGS_serve).empty()) {
    attnd::bench::Serve(absl::GetFlag(FLAGS_serve), absl::GetFlag(FLAGS_address));
    return 0;
  }
  return attnd::bench::Main();
}
