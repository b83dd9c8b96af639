// SPDX-License-Identifier: Apache-2.0
//
// What does shared memory save a client on the server's machine? The round trip of a layer of a
// pass, over messages of gRPC and over shared memory, where both sides sleep while they wait or
// spin first; the same rows, layers and bytes over one server in this process. Blocks of whole
// passes alternate; a block's figure is its time by its layers, so that declarations, the last
// reply and the copying of q, k and v into a message or the region count. The engine's time is the
// server's own metric. Prints medians over the rounds and the ratios within each round.
//
// On a GPU, over a prompt of 128K tokens of Llama-3.1-8B's shape, which all rows share:
//   memory_plane --backend=cuda --rows=1 --query_heads=32 --tokens=131072 --memory_gib=40
//                --policy=error-target --parameters=tolerance=off,floor=0.01
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "attention/cpu/cpu_backend.h"
#include "bench/policy_message.h"
#include "bench/statistics.h"
#include "bench/support.h"
#include "client/cpp/client.h"
#include "common/dtype.h"
#include "engine/engine.h"
#include "gpu/device/device.h"
#include "server/backend.h"
#include "server/metrics/metrics.h"
#include "server/options/options.h"
#include "server/server.h"

ABSL_FLAG(int, rounds, 21, "rounds of one block of each kind");
ABSL_FLAG(int, block_passes, 20, "passes of a block");
ABSL_FLAG(uint32_t, layers, 32, "layers of the model");
ABSL_FLAG(uint32_t, rows, 8, "rows of a pass, each a sequence of its own");
ABSL_FLAG(uint32_t, query_heads, 16, "with 8 KV heads and head_dim 128, in bf16");
ABSL_FLAG(uint64_t, tokens, 16, "tokens in each sequence: those of one prompt, which it shares");
ABSL_FLAG(std::string, policy, "", "preset; empty: the server's default");
ABSL_FLAG(std::string, parameters, "", "of the policy: NAME=VALUE, comma-separated");
ABSL_FLAG(std::string, backend, "cpu", "cpu or cuda");
ABSL_FLAG(uint64_t, memory_gib, 1, "the server's memory budget");
ABSL_FLAG(uint32_t, spin_us, 200, "of the kind that spins");
ABSL_FLAG(uint32_t, step_threads, 1, "threads of the CPU that answer one step; 0: all cores");

namespace attnd::bench {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;

constexpr uint32_t kKvHeads = 8, kHeadDim = 128;

v1::ModelShape Shape() {
  v1::ModelShape shape;
  shape.set_layers(absl::GetFlag(FLAGS_layers));
  shape.set_query_heads(absl::GetFlag(FLAGS_query_heads));
  shape.set_kv_heads(kKvHeads);
  shape.set_head_dim(kHeadDim);
  shape.set_dtype(v1::DTYPE_BF16);
  return shape;
}

std::string RandomBytes(uint32_t tokens, uint32_t heads, std::mt19937_64* random) {
  const std::vector<uint16_t> values = RandomBf16(size_t{tokens} * heads * kHeadDim, random);
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(uint16_t)};
}

// What every pass sends, in each layer the same.
struct Data {
  explicit Data(std::mt19937_64* random) {
    const uint32_t rows = absl::GetFlag(FLAGS_rows);
    q = RandomBytes(rows, absl::GetFlag(FLAGS_query_heads), random);
    k = RandomBytes(rows, kKvHeads, random);
    v = RandomBytes(rows, kKvHeads, random);
  }
  std::string q, k, v;
};

// The prompt's sequence. All layers have the same keys and values.
uint64_t MakePrompt(Client* client, std::mt19937_64* random) {
  const uint64_t tokens = absl::GetFlag(FLAGS_tokens);
  const std::string k = RandomBytes(static_cast<uint32_t>(tokens), kKvHeads, random);
  const std::string v = RandomBytes(static_cast<uint32_t>(tokens), kKvHeads, random);
  std::vector<KvBlock> blocks;
  for (uint32_t layer = 0; layer < absl::GetFlag(FLAGS_layers); ++layer) {
    blocks.push_back({.layer = layer, .tokens = tokens, .k = k, .v = v});
  }
  v1::OpenSequenceRequest open;
  *open.mutable_model()->mutable_shape() = Shape();
  if (const std::string preset = absl::GetFlag(FLAGS_policy); !preset.empty()) {
    *open.mutable_policy() = PolicyMessage(preset, absl::GetFlag(FLAGS_parameters));
  }
  const uint64_t sequence = Must(client->OpenSequence(open)).sequence_id();
  Must(client->AppendKv(sequence, Shape(), blocks, {}, {}).status());
  return sequence;
}

// A sequence of its own for each row, as a sequence has one writer.
std::vector<v1::DecodeRow> MakeRows(Client* client, uint64_t prompt) {
  std::vector<v1::DecodeRow> rows(absl::GetFlag(FLAGS_rows));
  for (v1::DecodeRow& row : rows) {
    v1::ForkSequenceRequest fork;
    fork.set_sequence_id(prompt);
    row.set_sequence_id(Must(client->ForkSequence(fork)).sequence_id());
    row.set_position(absl::GetFlag(FLAGS_tokens));
    row.set_query_tokens(1);
  }
  return rows;
}

// One way to send passes. The first pass appends a token to each row; from then on passes repeat
// it.
class Kind {
 public:
  virtual ~Kind() = default;
  virtual void Pass(const Data& data) = 0;
};

void Check(const v1::DecodeResponse& reply) {
  if (reply.status().code() != 0) Must(absl::InternalError(reply.status().message()));
  for (const v1::RowResult& row : reply.rows()) {
    if (row.status().code() != 0) Must(absl::InternalError(row.status().message()));
  }
}

class Messages final : public Kind {
 public:
  Messages(Client* client, uint64_t prompt)
      : rows_(MakeRows(client, prompt)), session_(client->StartDecode()) {}
  void Pass(const Data& data) override {
    const auto rows = static_cast<uint32_t>(rows_.size());
    const uint32_t layers = absl::GetFlag(FLAGS_layers);
    for (uint32_t layer = 0; layer < layers; ++layer) {
      request_.Clear();
      request_.set_layer(layer);
      if (layer == 0) {
        request_.mutable_rows()->Add(rows_.begin(), rows_.end());
        request_.mutable_begin_pass()->set_layers(layers);
        SetShape(rows, absl::GetFlag(FLAGS_query_heads), request_.mutable_q());
        SetShape(rows, kKvHeads, request_.mutable_k());
        SetShape(rows, kKvHeads, request_.mutable_v());
      }
      request_.mutable_q()->set_data(data.q);
      request_.mutable_k()->set_data(data.k);
      request_.mutable_v()->set_data(data.v);
      Must(session_->Step(request_, &reply_, seconds(60)));
      Check(reply_);
    }
  }

 private:
  static void SetShape(uint32_t tokens, uint32_t heads, v1::Tensor* tensor) {
    tensor->set_dtype(v1::DTYPE_BF16);
    for (const uint32_t extent : {tokens, heads, kHeadDim}) tensor->add_shape(extent);
  }

  const std::vector<v1::DecodeRow> rows_;
  const std::unique_ptr<DecodeSession> session_;
  v1::DecodeRequest request_;
  v1::DecodeResponse reply_;
};

class Memory final : public Kind {
 public:
  Memory(Client* client, uint64_t prompt, std::chrono::microseconds spin)
      : rows_(MakeRows(client, prompt)),
        session_(Must(client->StartMemoryDecode(
            {.shape = Shape(), .query_tokens_max = absl::GetFlag(FLAGS_rows), .spin = spin}))) {}
  void Pass(const Data& data) override {
    Must(session_->Begin(rows_, v1::Pass()));
    for (uint32_t layer = 0; layer < absl::GetFlag(FLAGS_layers); ++layer) {
      const MemorySession::Arrays& arrays = session_->arrays();
      std::memcpy(arrays.q.data(), data.q.data(), data.q.size());
      std::memcpy(arrays.k.data(), data.k.data(), data.k.size());
      std::memcpy(arrays.v.data(), data.v.data(), data.v.size());
      Must(session_->Step(seconds(60)));
    }
    Check(session_->reply());
  }

 private:
  const std::vector<v1::DecodeRow> rows_;
  const std::unique_ptr<MemorySession> session_;
};

// Microseconds that the engine has spent on steps so far.
double EngineMicros(const server::Metrics& metrics) {
  for (const prometheus::MetricFamily& family : metrics.Collect()) {
    if (family.name != "attnd_stage_seconds") continue;
    for (const prometheus::ClientMetric& metric : family.metric) {
      for (const auto& label : metric.label) {
        if (label.value == "engine") return metric.histogram.sample_sum * 1e6;
      }
    }
  }
  return 0;
}

// Of a kind's blocks, in microseconds a layer, a number for each round.
struct Samples {
  std::vector<double> trip_us, engine_us, rest_us;
};

void RunBlock(Kind* kind, const Data& data, const server::Metrics& metrics, Samples* samples) {
  const int passes = absl::GetFlag(FLAGS_block_passes);
  const double layers = static_cast<double>(passes) * absl::GetFlag(FLAGS_layers);
  const double engine_before = EngineMicros(metrics);
  const auto start = Clock::now();
  for (int i = 0; i < passes; ++i) kind->Pass(data);
  const double trip = MicrosBetween(start, Clock::now()) / layers;
  const double engine = (EngineMicros(metrics) - engine_before) / layers;
  samples->trip_us.push_back(trip);
  samples->engine_us.push_back(engine);
  samples->rest_us.push_back(trip - engine);
}

void PrintLine(const char* name, const Samples& samples) {
  std::printf("%-34s %8.1f %8.1f %8.1f\n", name, Median(samples.trip_us), Median(samples.engine_us),
              Median(samples.rest_us));
}

void PrintRatios(const char* name, const Samples& above, const Samples& below) {
  std::vector<double> trip, rest;
  for (size_t i = 0; i < above.trip_us.size(); ++i) {
    trip.push_back(above.trip_us[i] / below.trip_us[i]);
    rest.push_back(above.rest_us[i] / below.rest_us[i]);
  }
  std::printf("%-34s %8.3f %8s %8.3f  [%.3f .. %.3f] of the trips\n", name, Median(trip), "",
              Median(rest), Quantile(trip, 0.1), Quantile(trip, 0.9));
}

std::unique_ptr<attention::Backend> MakeBackend() {
  const std::string backend = absl::GetFlag(FLAGS_backend);
  if (backend == "cpu") {
    return attention::MakeCpuBackend({.threads = absl::GetFlag(FLAGS_step_threads)});
  }
  server::ServerOptions options;
  options.backend = backend;
  return Must(server::MakeBackend(options, gpu::OpenCudaDevice, nullptr));
}

int Main() {
  char pattern[] = "/tmp/attnd-memory-XXXXXX";
  const std::string directory = mkdtemp(pattern);
  server::ServerOptions options;
  options.listen = {"unix:" + directory + "/attnd.sock"};
  options.memory_budget_bytes = absl::GetFlag(FLAGS_memory_gib) << 30;
  options.allow_client_memory = true;
  const server::Machine machine = server::Machine::Detect();
  server::Metrics metrics;
  const auto engine = Must(
      engine::Engine::Create(server::ToEngineOptions(options, machine), MakeBackend(), &metrics));
  const auto server = Must(server::Server::Start(options, machine, engine.get(), &metrics));
  {
    const auto client = Must(Client::Connect({.target = options.listen[0]}));
    std::mt19937_64 random(1);
    const Data data(&random);
    const uint64_t prompt = MakePrompt(client.get(), &random);
    Messages messages(client.get(), prompt);
    Memory sleeping(client.get(), prompt, std::chrono::microseconds(0));
    Memory spinning(client.get(), prompt, std::chrono::microseconds(absl::GetFlag(FLAGS_spin_us)));
    Kind* const kinds[] = {&messages, &sleeping, &spinning};
    Samples samples[3], warm_up;
    for (Kind* kind : kinds) RunBlock(kind, data, metrics, &warm_up);
    for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
      for (int turn = 0; turn < 3; ++turn) {
        const int kind = (round + turn) % 3;
        RunBlock(kinds[kind], data, metrics, &samples[kind]);
      }
    }
    std::printf("q, k and v of a layer have %zu bytes; %u rows of %llu tokens, %u layers\n",
                data.q.size() + data.k.size() + data.v.size(), absl::GetFlag(FLAGS_rows),
                static_cast<unsigned long long>(absl::GetFlag(FLAGS_tokens)),
                absl::GetFlag(FLAGS_layers));
    std::printf("%-34s %8s %8s %8s\n", "us a layer, medians", "trip", "engine", "the rest");
    PrintLine("messages", samples[0]);
    PrintLine("memory, sleeping", samples[1]);
    PrintLine("memory, spinning", samples[2]);
    PrintRatios("memory / messages, sleeping", samples[1], samples[0]);
    PrintRatios("memory / messages, spinning", samples[2], samples[0]);
  }
  server->Shutdown({});
  std::filesystem::remove_all(directory);
  return 0;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return attnd::bench::Main();
}
