// SPDX-License-Identifier: Apache-2.0
//
// What does attnd add to a remote call? A Decode round trip minus the time inside its engine,
// against a bare gRPC echo of the same payload (a reactor that answers with a ready reply of the
// same size), over Unix sockets, both servers and the client in this process. Blocks of round trips
// alternate between the two; the ratio of a pair of blocks is the ratio of their medians. Prints
// the median ratio of all pairs with its spread, and the parts.
//
// The engine's time is taken in nanoseconds by an engine that wraps the real one; the server has no
// hook for it.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "attention/cpu/cpu_backend.h"
#include "attnd/v1/attnd.grpc.pb.h"
#include "bench/statistics.h"
#include "bench/support.h"
#include "common/dtype.h"
#include "engine/engine.h"
#include "grpcpp/grpcpp.h"
#include "server/metrics/metrics.h"
#include "server/options/options.h"
#include "server/server.h"

ABSL_FLAG(int, pairs, 30, "pairs of blocks");
ABSL_FLAG(int, block_trips, 1000, "round trips of a block");
ABSL_FLAG(uint32_t, rows, 1, "rows of a message, each a sequence of its own");
ABSL_FLAG(uint64_t, tokens, 256, "tokens in each sequence");
ABSL_FLAG(uint32_t, step_threads, 0, "threads that answer one step; 0: all cores");

namespace attnd::bench {
namespace {

using Clock = std::chrono::steady_clock;
using v1::DecodeRequest;
using v1::DecodeResponse;

// One layer of Llama-3.1-8B.
constexpr uint32_t kQueryHeads = 32, kKvHeads = 8, kHeadDim = 128;

// Passes everything on, and keeps how long the last Decode took.
class TimedEngine final : public engine::Engine {
 public:
  explicit TimedEngine(std::unique_ptr<engine::Engine> engine) : engine_(std::move(engine)) {}
  int64_t last_decode_ns() const { return last_decode_ns_.load(); }

  absl::Status Decode(absl::string_view tenant, engine::WriterId writer,
                      const engine::DecodeArgs& args, engine::AnswerMemory memory,
                      engine::DecodeResult* result) override {
    const auto start = Clock::now();
    absl::Status status = engine_->Decode(tenant, writer, args, memory, result);
    last_decode_ns_ = (Clock::now() - start).count();
    return status;
  }

  absl::StatusOr<std::unique_ptr<engine::Pass>> BeginPass(absl::string_view tenant,
                                                          engine::WriterId writer,
                                                          std::span<const engine::DecodeRow> rows,
                                                          uint32_t layers) override {
    return engine_->BeginPass(tenant, writer, rows, layers);
  }

  const engine::EngineOptions& options() const override { return engine_->options(); }
  const attention::Backend& backend() const override { return engine_->backend(); }
  attention::IndexSet IndexesOf(const attention::Policy& policy) const override {
    return engine_->IndexesOf(policy);
  }
  absl::StatusOr<uint64_t> Open(absl::string_view tenant, const engine::OpenArgs& args) override {
    return engine_->Open(tenant, args);
  }
  absl::Status Append(absl::string_view tenant, engine::WriterId writer, uint64_t id,
                      const engine::AppendChunk& chunk) override {
    return engine_->Append(tenant, writer, id, chunk);
  }
  absl::Status Observe(absl::string_view tenant, engine::WriterId writer, uint64_t id,
                       const engine::ObservedChunk& chunk) override {
    return engine_->Observe(tenant, writer, id, chunk);
  }
  absl::StatusOr<engine::PrefillResult> FinishPrefill(absl::string_view tenant,
                                                      engine::WriterId writer, uint64_t id,
                                                      const std::atomic<bool>* cancelled) override {
    return engine_->FinishPrefill(tenant, writer, id, cancelled);
  }
  absl::StatusOr<engine::SequenceInfo> Info(absl::string_view tenant, uint64_t id) override {
    return engine_->Info(tenant, id);
  }
  absl::StatusOr<engine::Lease::Call> BeginCall(absl::string_view tenant, uint64_t id) override {
    return engine_->BeginCall(tenant, id);
  }
  absl::StatusOr<uint64_t> Truncate(absl::string_view tenant, uint64_t id,
                                    uint64_t length) override {
    return engine_->Truncate(tenant, id, length);
  }
  absl::StatusOr<engine::SequenceInfo> Fork(absl::string_view tenant, uint64_t id,
                                            std::optional<uint64_t> length) override {
    return engine_->Fork(tenant, id, length);
  }
  absl::Status Close(absl::string_view tenant, uint64_t id) override {
    return engine_->Close(tenant, id);
  }
  std::vector<engine::SequenceInfo> List(absl::string_view tenant, uint64_t after,
                                         uint32_t count) override {
    return engine_->List(tenant, after, count);
  }
  absl::StatusOr<engine::SealResult> Seal(absl::string_view tenant, uint64_t id,
                                          const std::atomic<bool>* cancelled) override {
    return engine_->Seal(tenant, id, cancelled);
  }
  absl::StatusOr<engine::OpenResult> Resume(absl::string_view tenant, const engine::OpenArgs& args,
                                            uint64_t sealed_id,
                                            const std::atomic<bool>* cancelled) override {
    return engine_->Resume(tenant, args, sealed_id, cancelled);
  }
  absl::StatusOr<engine::OpenResult> OpenReusing(absl::string_view tenant,
                                                 const engine::OpenArgs& args,
                                                 std::span<const uint32_t> token_ids,
                                                 const std::atomic<bool>* cancelled) override {
    return engine_->OpenReusing(tenant, args, token_ids, cancelled);
  }
  absl::Status DropSealed(absl::string_view tenant, uint64_t sealed_id) override {
    return engine_->DropSealed(tenant, sealed_id);
  }
  absl::StatusOr<std::vector<engine::SealedInfo>> ListSealed(absl::string_view tenant,
                                                             uint64_t after,
                                                             uint32_t count) override {
    return engine_->ListSealed(tenant, after, count);
  }
  engine::ArchiveStats archive_stats() const override { return engine_->archive_stats(); }
  bool MayReadDisk(absl::string_view tenant, uint64_t id) override {
    return engine_->MayReadDisk(tenant, id);
  }
  bool MayMakeRoom() const override { return engine_->MayMakeRoom(); }
  void ReleaseWriter(engine::WriterId writer) override { engine_->ReleaseWriter(writer); }
  engine::Usage usage() const override { return engine_->usage(); }
  void WaitForBackground() override { engine_->WaitForBackground(); }
  void StopOpening() override { engine_->StopOpening(); }
  void Shutdown() override { engine_->Shutdown(); }

 private:
  const std::unique_ptr<engine::Engine> engine_;
  std::atomic<int64_t> last_decode_ns_{0};
};

// The bare server: reads a message, writes the ready reply.
class EchoReactor final : public grpc::ServerBidiReactor<DecodeRequest, DecodeResponse> {
 public:
  explicit EchoReactor(const DecodeResponse* reply) : reply_(reply) { StartRead(&request_); }
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    StartWrite(reply_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    StartRead(&request_);
  }
  void OnDone() override { delete this; }

 private:
  const DecodeResponse* const reply_;
  DecodeRequest request_;
};

class EchoService final : public v1::Attnd::CallbackService {
 public:
  explicit EchoService(const DecodeResponse* reply) : reply_(reply) {}
  grpc::ServerBidiReactor<DecodeRequest, DecodeResponse>* Decode(
      grpc::CallbackServerContext*) override {
    return new EchoReactor(reply_);
  }

 private:
  const DecodeResponse* const reply_;
};

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "rpc_overhead: %s\n", why.c_str());
  std::exit(1);
}

void FillTensor(uint32_t tokens, uint32_t heads, std::mt19937* random, v1::Tensor* tensor) {
  std::normal_distribution<float> normal;
  tensor->set_dtype(v1::DTYPE_BF16);
  for (const uint32_t extent : {tokens, heads, kHeadDim}) tensor->add_shape(extent);
  std::string* const data = tensor->mutable_data();
  data->reserve(size_t{tokens} * heads * kHeadDim * 2);
  for (size_t i = 0; i < size_t{tokens} * heads * kHeadDim; ++i) {
    const uint16_t bits = FloatToBf16(normal(*random));
    data->append(reinterpret_cast<const char*>(&bits), sizeof(bits));
  }
}

// A client with a connection of its own.
class Connection {
 public:
  explicit Connection(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stub_ = v1::Attnd::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
  }
  v1::Attnd::Stub* stub() { return stub_.get(); }
  void StartDecode() { stream_ = stub_->Decode(&context_); }
  void Trip(const DecodeRequest& request, DecodeResponse* reply) {
    if (!stream_->Write(request) || !stream_->Read(reply)) Die("the stream ended");
  }
  void End() {
    stream_->WritesDone();
    static_cast<void>(stream_->Finish());
  }

 private:
  std::unique_ptr<v1::Attnd::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<DecodeRequest, DecodeResponse>> stream_;
};

// Opens a sequence and fills it with random tokens.
uint64_t MakeSequence(v1::Attnd::Stub* stub, uint64_t tokens, std::mt19937* random) {
  v1::OpenSequenceRequest open;
  v1::ModelShape* const shape = open.mutable_model()->mutable_shape();
  shape->set_layers(1);
  shape->set_query_heads(kQueryHeads);
  shape->set_kv_heads(kKvHeads);
  shape->set_head_dim(kHeadDim);
  shape->set_dtype(v1::DTYPE_BF16);
  v1::OpenSequenceResponse opened;
  grpc::ClientContext open_context, append_context;
  if (!stub->OpenSequence(&open_context, open, &opened).ok()) Die("OpenSequence failed");
  v1::AppendKvResponse appended;
  const auto stream = stub->AppendKv(&append_context, &appended);
  v1::AppendKvRequest chunk;
  chunk.set_sequence_id(opened.sequence_id());
  FillTensor(static_cast<uint32_t>(tokens), kKvHeads, random, chunk.mutable_k());
  FillTensor(static_cast<uint32_t>(tokens), kKvHeads, random, chunk.mutable_v());
  stream->Write(chunk);
  stream->WritesDone();
  if (const grpc::Status status = stream->Finish(); !status.ok()) Die(status.error_message());
  return opened.sequence_id();
}

// Medians of one block, in microseconds.
struct Block {
  double trip_us = 0;      // whole round trip
  double overhead_us = 0;  // less the engine's time
};

Block RunBlock(Connection* connection, const DecodeRequest& request, const TimedEngine* engine) {
  const int trips = absl::GetFlag(FLAGS_block_trips);
  std::vector<double> whole, less;
  DecodeResponse reply;
  for (int i = 0; i < trips; ++i) {
    const auto start = Clock::now();
    connection->Trip(request, &reply);
    const auto nanos = static_cast<double>((Clock::now() - start).count());
    const double engine_ns =
        engine == nullptr ? 0.0 : static_cast<double>(engine->last_decode_ns());
    whole.push_back(nanos * 1e-3);
    less.push_back((nanos - engine_ns) * 1e-3);
  }
  return {Median(whole), Median(less)};
}

void PrintLine(const char* name, const std::vector<double>& values) {
  std::printf("%-34s %8.3f  [%.3f .. %.3f]\n", name, Quantile(values, 0.5), Quantile(values, 0.1),
              Quantile(values, 0.9));
}

int Main() {
  char pattern[] = "/tmp/attnd-overhead-XXXXXX";
  const std::string directory = mkdtemp(pattern);
  server::ServerOptions options;
  options.listen = {"unix:" + directory + "/attnd.sock"};
  options.memory_budget_bytes = uint64_t{1} << 30;
  const server::Machine machine = server::Machine::Detect();
  server::Metrics metrics;
  TimedEngine engine(Must(engine::Engine::Create(
      server::ToEngineOptions(options, machine),
      attention::MakeCpuBackend({.threads = absl::GetFlag(FLAGS_step_threads)}), &metrics)));
  const auto server = Must(server::Server::Start(options, machine, &engine, &metrics));

  std::mt19937 random(1);
  const uint32_t rows = absl::GetFlag(FLAGS_rows);
  const uint64_t tokens = absl::GetFlag(FLAGS_tokens);
  Connection attnd(options.listen[0]);
  DecodeRequest request;
  for (uint32_t i = 0; i < rows; ++i) {
    v1::DecodeRow* const row = request.add_rows();
    row->set_sequence_id(MakeSequence(attnd.stub(), tokens, &random));
    row->set_position(tokens);
    row->set_query_tokens(1);
  }
  FillTensor(rows, kQueryHeads, &random, request.mutable_q());
  FillTensor(rows, kKvHeads, &random, request.mutable_k());
  FillTensor(rows, kKvHeads, &random, request.mutable_v());
  attnd.StartDecode();
  DecodeResponse reply;
  attnd.Trip(request, &reply);  // from now on the step is a repeat: the same work, nothing grows
  for (const v1::RowResult& row : reply.rows()) {
    if (row.status().code() != 0) Die(row.status().message());
  }

  EchoService echo_service(&reply);
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + directory + "/echo.sock", grpc::InsecureServerCredentials());
  builder.RegisterService(&echo_service);
  const auto echo_server = builder.BuildAndStart();
  Connection echo("unix:" + directory + "/echo.sock");
  echo.StartDecode();

  std::printf("request %zu bytes, reply %zu bytes, %u rows of %llu tokens, %d pairs of %d trips\n",
              request.ByteSizeLong(), reply.ByteSizeLong(), rows,
              static_cast<unsigned long long>(tokens), absl::GetFlag(FLAGS_pairs),
              absl::GetFlag(FLAGS_block_trips));
  RunBlock(&attnd, request, &engine);  // warm-up
  RunBlock(&echo, request, nullptr);
  std::vector<double> ratios, trips, overheads, echoes;
  for (int pair = 0; pair < absl::GetFlag(FLAGS_pairs); ++pair) {
    Block answered, echoed;
    if (pair % 2 == 0) {
      answered = RunBlock(&attnd, request, &engine);
      echoed = RunBlock(&echo, request, nullptr);
    } else {
      echoed = RunBlock(&echo, request, nullptr);
      answered = RunBlock(&attnd, request, &engine);
    }
    trips.push_back(answered.trip_us);
    overheads.push_back(answered.overhead_us);
    echoes.push_back(echoed.trip_us);
    ratios.push_back(answered.overhead_us / echoed.trip_us);
  }
  std::printf("%-34s %8s  %s\n", "", "median", "[p10 .. p90] of the blocks");
  PrintLine("Decode round trip, us", trips);
  PrintLine("Decode minus engine, us", overheads);
  PrintLine("echo round trip, us", echoes);
  PrintLine("ratio (at most 1.3)", ratios);
  attnd.End();
  echo.End();
  echo_server->Shutdown();
  server->Shutdown({});
  std::filesystem::remove_all(directory);
  return Median(ratios) <= 1.3 ? 0 : 1;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return attnd::bench::Main();
}
