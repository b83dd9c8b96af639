// SPDX-License-Identifier: Apache-2.0
//
// What does attnd add to a remote call, and what does a pass save? A Decode round trip of a layer
// minus the time inside its engine, against a bare gRPC echo of the same payload (a reactor that
// answers with a ready reply of the same size), over Unix sockets, both servers and the client in
// this process. Blocks of round trips alternate between the echo, messages of single layers and the
// layers of passes; the ratio of two blocks is the ratio of their medians. Prints the median ratios
// of all rounds with their spread, the parts, and the bytes of a layer.
//
// The engine's time is taken in nanoseconds by an engine that wraps the real one; the server has no
// hook for it.
#include <sys/resource.h>

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
#include "client/cpp/client.h"
#include "common/dtype.h"
#include "engine/engine.h"
#include "grpcpp/grpcpp.h"
#include "server/metrics/metrics.h"
#include "server/options/options.h"
#include "server/server.h"

ABSL_FLAG(int, rounds, 30, "rounds of one block of each kind");
ABSL_FLAG(int, block_trips, 1000, "round trips of a block, as many whole tokens as fit");
ABSL_FLAG(uint32_t, layers, 32, "layers of the model: messages of a token");
ABSL_FLAG(std::string, policy, "", "preset of each row, or empty: the sequence's");
ABSL_FLAG(uint32_t, echo_busy_us, 0, "time for which the echo computes before it answers");
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
    const auto start = Clock::now();
    auto pass = engine_->BeginPass(tenant, writer, rows, layers);
    if (!pass.ok()) return pass.status();
    return std::make_unique<TimedPass>(*std::move(pass), (Clock::now() - start).count(),
                                       &last_decode_ns_);
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
  // The pass's beginning counts in its first step.
  class TimedPass final : public engine::Pass {
   public:
    TimedPass(std::unique_ptr<engine::Pass> pass, int64_t begin_ns, std::atomic<int64_t>* last_ns)
        : pass_(std::move(pass)), begin_ns_(begin_ns), last_ns_(last_ns) {}
    uint32_t layer() const override { return pass_->layer(); }
    absl::Status Step(const engine::DecodeArgs& args, engine::AnswerMemory memory,
                      engine::DecodeResult* result) override {
      const auto start = Clock::now();
      absl::Status status = pass_->Step(args, memory, result);
      *last_ns_ = (Clock::now() - start).count() + std::exchange(begin_ns_, 0);
      return status;
    }
    void WarmNextLayer() override { pass_->WarmNextLayer(); }
    void ExpectFirstLayer(const engine::DecodeArgs& like) override {
      pass_->ExpectFirstLayer(like);
    }
    bool PrepareNextLayer(const engine::ClientLayer* client) override {
      return pass_->PrepareNextLayer(client);
    }
    void ForgetNextLayer() override { pass_->ForgetNextLayer(); }

   private:
    const std::unique_ptr<engine::Pass> pass_;
    int64_t begin_ns_;
    std::atomic<int64_t>* const last_ns_;
  };

  const std::unique_ptr<engine::Engine> engine_;
  std::atomic<int64_t> last_decode_ns_{0};
};

// The bare server: reads a message, writes the ready reply.
class EchoReactor final : public grpc::ServerBidiReactor<DecodeRequest, DecodeResponse> {
 public:
  explicit EchoReactor(const DecodeResponse* reply) : reply_(reply) { StartRead(&request_); }
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    const auto until = Clock::now() + busy_;
    while (Clock::now() < until) continue;
    StartWrite(reply_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    StartRead(&request_);
  }
  void OnDone() override { delete this; }

 private:
  const DecodeResponse* const reply_;
  const std::chrono::microseconds busy_{absl::GetFlag(FLAGS_echo_busy_us)};
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

// A client with a connection and a Decode stream of its own.
class Connection {
 public:
  explicit Connection(const std::string& address)
      : client_(Must(Client::Connect({.target = address}))), session_(client_->StartDecode()) {}
  Client* client() { return client_.get(); }
  void Trip(const DecodeRequest& request, DecodeResponse* reply) {
    Must(session_->Step(request, reply, std::chrono::seconds(60)));
  }
  void End() { Must(session_->Finish(std::chrono::seconds(10))); }

 private:
  const std::unique_ptr<Client> client_;
  const std::unique_ptr<DecodeSession> session_;
};

// Opens a sequence and fills it with random tokens.
uint64_t MakeSequence(Client* client, uint64_t tokens, std::mt19937* random) {
  v1::OpenSequenceRequest open;
  v1::ModelShape* const shape = open.mutable_model()->mutable_shape();
  const uint32_t layers = absl::GetFlag(FLAGS_layers);
  shape->set_layers(layers);
  shape->set_query_heads(kQueryHeads);
  shape->set_kv_heads(kKvHeads);
  shape->set_head_dim(kHeadDim);
  shape->set_dtype(v1::DTYPE_BF16);
  const uint64_t sequence = Must(client->OpenSequence(open)).sequence_id();
  v1::Tensor k, v;
  FillTensor(static_cast<uint32_t>(tokens), kKvHeads, random, &k);
  FillTensor(static_cast<uint32_t>(tokens), kKvHeads, random, &v);
  std::vector<KvBlock> blocks;
  for (uint32_t layer = 0; layer < layers; ++layer) {
    blocks.push_back({.layer = layer, .tokens = tokens, .k = k.data(), .v = v.data()});
  }
  Must(client->AppendKv(sequence, *shape, blocks, {}, {.prefill_complete = false}).status());
  return sequence;
}

// The messages of a token, one for each layer, and the bytes that went over the wire for them.
struct Token {
  std::vector<DecodeRequest> layers;
  uint64_t request_bytes = 0, reply_bytes = 0;
};

// The same messages as a pass.
Token AsPass(Token token) {
  token.layers[0].mutable_begin_pass()->set_layers(static_cast<uint32_t>(token.layers.size()));
  for (size_t i = 1; i < token.layers.size(); ++i) {
    DecodeRequest& layer = token.layers[i];
    layer.clear_rows();
    for (v1::Tensor* tensor : {layer.mutable_q(), layer.mutable_k(), layer.mutable_v()}) {
      tensor->clear_dtype();
      tensor->clear_shape();
    }
  }
  return token;
}

// Sends a token once: from now on it is a repeat, the same work, and nothing grows.
void SendFirst(Connection* connection, Token* token, DecodeResponse* reply) {
  token->request_bytes = token->reply_bytes = 0;
  for (const DecodeRequest& layer : token->layers) {
    connection->Trip(layer, reply);
    if (reply->status().code() != 0) Die(reply->status().message());
    for (const v1::RowResult& row : reply->rows()) {
      if (row.status().code() != 0) Die(row.status().message());
    }
    token->request_bytes += layer.ByteSizeLong();
    token->reply_bytes += reply->ByteSizeLong();
  }
}

// Medians of one block, in microseconds a layer.
struct Block {
  double trip_us = 0;      // whole round trip
  double overhead_us = 0;  // less the engine's time
  double cpu_us = 0;       // processor time of both sides, all threads
};

double ProcessMicros() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto micros = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_usec);
  };
  return micros(usage.ru_utime) + micros(usage.ru_stime);
}

Block RunBlock(Connection* connection, const Token& token, const TimedEngine* engine) {
  const int trips = absl::GetFlag(FLAGS_block_trips);
  std::vector<double> whole, less;
  DecodeResponse reply;
  const double cpu_before = ProcessMicros();
  for (int i = 0; i < trips;) {
    for (size_t layer = 0; layer < token.layers.size(); ++layer, ++i) {
      const auto start = Clock::now();
      connection->Trip(token.layers[layer], &reply);
      const auto nanos = static_cast<double>((Clock::now() - start).count());
      const double engine_ns =
          engine == nullptr ? 0.0 : static_cast<double>(engine->last_decode_ns());
      whole.push_back(nanos * 1e-3);
      less.push_back((nanos - engine_ns) * 1e-3);
    }
  }
  const double cpu = ProcessMicros() - cpu_before;
  return {Median(whole), Median(less), cpu / static_cast<double>(whole.size())};
}

void PrintLine(const char* name, const std::vector<double>& values) {
  std::printf("%-42s %8.3f  [%.3f .. %.3f]\n", name, Quantile(values, 0.5), Quantile(values, 0.1),
              Quantile(values, 0.9));
}

// The messages of a token, without rows.
Token MakeToken(std::mt19937* random) {
  const uint32_t rows = absl::GetFlag(FLAGS_rows);
  Token token;
  for (uint32_t layer = 0; layer < absl::GetFlag(FLAGS_layers); ++layer) {
    DecodeRequest& request = token.layers.emplace_back();
    request.set_layer(layer);
    request.set_step_id(1000 + layer);
    FillTensor(rows, kQueryHeads, random, request.mutable_q());
    FillTensor(rows, kKvHeads, random, request.mutable_k());
    FillTensor(rows, kKvHeads, random, request.mutable_v());
  }
  return token;
}

// Gives each row a sequence of its own: a sequence has one writer.
void AddRows(Client* client, std::mt19937* random, Token* token) {
  const uint64_t tokens = absl::GetFlag(FLAGS_tokens);
  for (uint32_t i = 0; i < absl::GetFlag(FLAGS_rows); ++i) {
    v1::DecodeRow row;
    row.set_sequence_id(MakeSequence(client, tokens, random));
    row.set_position(tokens);
    row.set_query_tokens(1);
    row.add_token_ids(50'000);
    row.mutable_policy()->set_preset(absl::GetFlag(FLAGS_policy));
    for (DecodeRequest& layer : token->layers) *layer.add_rows() = row;
  }
}

void PrintBytes(const char* name, const Token& token) {
  const auto layers = static_cast<double>(token.layers.size());
  const double data = absl::GetFlag(FLAGS_rows) * (2 * kQueryHeads + 2 * kKvHeads) * kHeadDim * 2;
  const double request_bytes = static_cast<double>(token.request_bytes) / layers;
  const double reply_bytes = static_cast<double>(token.reply_bytes) / layers;
  std::printf("bytes a layer, %-14s request %.0f, reply %.0f; besides q, k, v and out %.0f\n", name,
              request_bytes, reply_bytes, request_bytes + reply_bytes - data);
}

// What the blocks of one kind measured, a number for each round.
struct Samples {
  std::vector<double> trip_us, overhead_us, cpu_us;
  void Add(const Block& block) {
    trip_us.push_back(block.trip_us);
    overhead_us.push_back(block.overhead_us);
    cpu_us.push_back(block.cpu_us);
  }
};

// Round by round.
std::vector<double> Ratios(const std::vector<double>& above, const std::vector<double>& below) {
  std::vector<double> ratios;
  for (size_t i = 0; i < above.size(); ++i) ratios.push_back(above[i] / below[i]);
  return ratios;
}

// Measures and prints; returns the median of what single layers add to an echo.
double Compare(const TimedEngine& engine, Connection* attnd, Connection* passing, Connection* echo,
               const Token& singles, const Token& passes) {
  RunBlock(attnd, singles, &engine);  // warm-up
  RunBlock(passing, passes, &engine);
  RunBlock(echo, singles, nullptr);
  Samples single, pass, bare;
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    for (int turn = 0; turn < 3; ++turn) {
      const int kind = (round + turn) % 3;
      if (kind == 0) single.Add(RunBlock(attnd, singles, &engine));
      if (kind == 1) pass.Add(RunBlock(passing, passes, &engine));
      if (kind == 2) bare.Add(RunBlock(echo, singles, nullptr));
    }
  }
  std::printf("%-42s %8s  %s\n", "", "median", "[p10 .. p90] of the blocks");
  PrintLine("echo round trip, us", bare.trip_us);
  PrintLine("single layer, round trip, us", single.trip_us);
  PrintLine("single layer minus engine, us", single.overhead_us);
  PrintLine("layer of a pass, round trip, us", pass.trip_us);
  PrintLine("layer of a pass minus engine, us", pass.overhead_us);
  PrintLine("single layer, processor time, us", single.cpu_us);
  PrintLine("layer of a pass, processor time, us", pass.cpu_us);
  PrintLine("pass / single layers, processor time", Ratios(pass.cpu_us, single.cpu_us));
  PrintLine("pass / single layers, round trip", Ratios(pass.trip_us, single.trip_us));
  PrintLine("pass / single layers, minus engine", Ratios(pass.overhead_us, single.overhead_us));
  PrintLine("pass minus engine / echo", Ratios(pass.overhead_us, bare.trip_us));
  const std::vector<double> added = Ratios(single.overhead_us, bare.trip_us);
  PrintLine("single minus engine / echo (at most 1.3)", added);
  return Median(added);
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
  Connection attnd(options.listen[0]), passing(options.listen[0]);
  Token singles = MakeToken(&random), passes = singles;
  AddRows(attnd.client(), &random, &singles);
  AddRows(attnd.client(), &random, &passes);
  passes = AsPass(passes);
  DecodeResponse reply;
  SendFirst(&passing, &passes, &reply);
  SendFirst(&attnd, &singles, &reply);

  EchoService echo_service(&reply);
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + directory + "/echo.sock", grpc::InsecureServerCredentials());
  builder.RegisterService(&echo_service);
  const auto echo_server = builder.BuildAndStart();
  Connection echo("unix:" + directory + "/echo.sock");

  std::printf(
      "%u rows of %llu tokens, %u layers, %d rounds of %d trips\n", absl::GetFlag(FLAGS_rows),
      static_cast<unsigned long long>(absl::GetFlag(FLAGS_tokens)), absl::GetFlag(FLAGS_layers),
      absl::GetFlag(FLAGS_rounds), absl::GetFlag(FLAGS_block_trips));
  PrintBytes("single layers", singles);
  PrintBytes("a pass", passes);
  const double added = Compare(engine, &attnd, &passing, &echo, singles, passes);
  for (Connection* connection : {&attnd, &passing, &echo}) connection->End();
  echo_server->Shutdown();
  server->Shutdown({});
  std::filesystem::remove_all(directory);
  return added <= 1.3 ? 0 : 1;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return attnd::bench::Main();
}
