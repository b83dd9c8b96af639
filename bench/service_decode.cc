// SPDX-License-Identifier: Apache-2.0
//
// What does one step of one layer take through the service, and where does the time go? Fills one
// sequence of a running server with random keys and values (32 query heads, 8 KV heads, head_dim
// 128, bf16) and decodes from it, one token a step. Prints medians of the round trip, of the
// engine's part as replies tell it, and of the GPU's part in the steps where it was timed; what the
// parts leave over is the call itself, and copies and host work.
//
//   service_decode --target=unix:/run/attnd/attnd.sock --policy=error-target
//                  --parameters=tolerance=off,floor=0.02
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/status/status.h"
#include "bench/policy_message.h"
#include "bench/statistics.h"
#include "bench/support.h"
#include "client/cpp/client.h"
#include "common/dtype.h"

ABSL_FLAG(std::string, target, "unix:/run/attnd/attnd.sock", "where the server listens");
ABSL_FLAG(uint64_t, tokens, 131072, "tokens of the sequence");
ABSL_FLAG(std::string, policy, "error-target", "preset");
ABSL_FLAG(std::string, parameters, "tolerance=off,floor=0.02", "NAME=VALUE, comma-separated");
ABSL_FLAG(int, steps, 2000, "steps to time");

namespace attnd::bench {
namespace {

using namespace std::chrono_literals;

// One layer of Llama-3.1-8B.
constexpr uint32_t kQueryHeads = 32, kKvHeads = 8, kHeadDim = 128;

// Even numbers in [-1.7, 1.7), of variance 1. Their distribution matters to no time measured here,
// and there are 268 million.
std::string RandomRows(uint64_t tokens, uint32_t heads, uint64_t seed) {
  std::string bytes(tokens * heads * kHeadDim * 2, '\0');
  auto* values = reinterpret_cast<uint16_t*>(bytes.data());
  uint64_t x = seed * 2 + 1;
  for (size_t i = 0; i < bytes.size() / 2; ++i) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    values[i] = FloatToBf16((static_cast<float>(x >> 40) * 0x1p-24f - 0.5f) * 3.46f);
  }
  return bytes;
}

void FillTensor(uint32_t heads, uint64_t seed, v1::Tensor* tensor) {
  tensor->set_dtype(v1::DTYPE_BF16);
  for (const uint32_t extent : {1u, heads, kHeadDim}) tensor->add_shape(extent);
  tensor->set_data(RandomRows(1, heads, seed));
}

uint64_t FillSequence(Client* client, uint64_t tokens) {
  v1::OpenSequenceRequest open;
  v1::ModelShape* shape = open.mutable_model()->mutable_shape();
  shape->set_layers(1);
  shape->set_query_heads(kQueryHeads);
  shape->set_kv_heads(kKvHeads);
  shape->set_head_dim(kHeadDim);
  shape->set_dtype(v1::DTYPE_BF16);
  *open.mutable_policy() =
      PolicyMessage(absl::GetFlag(FLAGS_policy), absl::GetFlag(FLAGS_parameters));
  const uint64_t sequence = Must(client->OpenSequence(open)).sequence_id();
  const std::string k = RandomRows(tokens, kKvHeads, 1), v = RandomRows(tokens, kKvHeads, 2);
  const KvBlock block = {.layer = 0, .first_position = 0, .tokens = tokens, .k = k, .v = v};
  Must(client->AppendKv(sequence, *shape, {&block, 1}, {}, {}).status());
  return sequence;
}

// Microseconds of each step, or of those that tell it.
struct Times {
  std::vector<double> trip, engine, gpu;
};

Times Decode(DecodeSession* session, uint64_t sequence, uint64_t first, int steps) {
  Times times;
  v1::DecodeRequest request;
  v1::DecodeResponse reply;
  for (int i = 0; i < steps; ++i) {
    request.Clear();
    v1::DecodeRow* row = request.add_rows();
    row->set_sequence_id(sequence);
    row->set_position(first + static_cast<uint64_t>(i));
    row->set_query_tokens(1);
    FillTensor(kQueryHeads, 3 + static_cast<uint64_t>(i), request.mutable_q());
    FillTensor(kKvHeads, 5 + static_cast<uint64_t>(i), request.mutable_k());
    FillTensor(kKvHeads, 7 + static_cast<uint64_t>(i), request.mutable_v());
    const auto start = std::chrono::steady_clock::now();
    Must(session->Step(request, &reply, 60s));
    times.trip.push_back(MicrosBetween(start, std::chrono::steady_clock::now()));
    const v1::Status& status = reply.status().code() != 0 ? reply.status() : reply.rows(0).status();
    if (status.code() != 0) Must(absl::InternalError(status.message()));
    times.engine.push_back(static_cast<double>(reply.engine_us()));
    const v1::StageTimes& stages = reply.rows(0).stats().stages();
    const double gpu =
        stages.score_us() + stages.select_us() + stages.attend_us() + stages.merge_us();
    if (gpu > 0) times.gpu.push_back(gpu);
  }
  return times;
}

void PrintLine(const char* name, const std::vector<double>& values) {
  if (values.empty()) return;
  std::printf("  %-28s %9.1f  [%.1f .. %.1f], of %zu\n", name, Median(values),
              Quantile(values, 0.1), Quantile(values, 0.9), values.size());
}

void Main() {
  const auto client = Must(Client::Connect({.target = absl::GetFlag(FLAGS_target)}));
  Must(client->WaitHealthy(30s));
  const v1::GetServerInfoResponse info = Must(client->GetServerInfo());
  const uint64_t tokens = absl::GetFlag(FLAGS_tokens);
  const uint64_t sequence = FillSequence(client.get(), tokens);
  const auto session = client->StartDecode();
  constexpr int kWarmUp = 200;
  Decode(session.get(), sequence, tokens, kWarmUp);
  const Times times = Decode(session.get(), sequence, tokens + kWarmUp, absl::GetFlag(FLAGS_steps));
  Must(session->Finish(10s));
  Must(client->CloseSequence(sequence));
  std::printf("%s %s, %llu tokens, one row, one layer, on %s: microseconds, median [p10 .. p90]\n",
              absl::GetFlag(FLAGS_policy).c_str(), absl::GetFlag(FLAGS_parameters).c_str(),
              static_cast<unsigned long long>(tokens),
              info.device().empty() ? "the CPU" : info.device().c_str());
  PrintLine("round trip", times.trip);
  PrintLine("  engine", times.engine);
  PrintLine("    GPU (CPU time on a CPU)", times.gpu);
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  attnd::bench::Main();
}
