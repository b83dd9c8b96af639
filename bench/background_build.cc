// SPDX-License-Identifier: Apache-2.0
//
// What building a segment in the background does to decoding: step latencies of one sequence while
// nothing else happens, and while another sequence's generated tokens are being clustered. Rounds
// alternate between the two; the ratio of p99s is taken within each round.
//
//   background_build --rounds=9 --context=8192 --policy=error-target
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "bench/engine_support.h"
#include "bench/statistics.h"
#include "bench/support.h"
#include "engine/engine.h"

ABSL_FLAG(uint32_t, rounds, 9, "rounds");
ABSL_FLAG(uint32_t, context, 8192, "tokens of the sequence whose steps are timed");
ABSL_FLAG(uint32_t, layers, 4, "layers");
ABSL_FLAG(uint32_t, head_dim, 128, "elements of a head");
ABSL_FLAG(uint32_t, threads, 0, "threads of a step; 0: all cores");
ABSL_FLAG(std::string, policy, "error-target", "policy of the timed steps");

namespace attnd::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kWindow = 64;

class Bench {
 public:
  void Run() {
    const uint64_t timed = OpenFilled(absl::GetFlag(FLAGS_context), absl::GetFlag(FLAGS_policy));
    Must(engine_->FinishPrefill("", timed, timed, nullptr).status());
    std::vector<double> ratios, p99_idle, p99_building, p50_idle, p50_building, builds;
    for (uint32_t round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
      const uint64_t grown = OpenFilled(kSegmentTokens + kWindow, "dense");
      StepAll(grown, kSegmentTokens + kWindow);  // the token that completes the run
      const auto start = Clock::now();
      std::vector<double> building;
      while (engine_->Info("", grown)->segments == 0) StepAll(timed, 0, &building);
      builds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
      engine_->WaitForBackground();
      Must(engine_->Close("", grown));
      std::vector<double> idle;
      while (idle.size() < building.size()) StepAll(timed, 0, &idle);
      p50_idle.push_back(Quantile(idle, 0.5));
      p50_building.push_back(Quantile(building, 0.5));
      p99_idle.push_back(Quantile(idle, 0.99));
      p99_building.push_back(Quantile(building, 0.99));
      ratios.push_back(p99_building.back() / p99_idle.back());
      std::printf("round %u: %zu steps each, p99 idle %.0f us, building %.0f us, ratio %.2f\n",
                  round, building.size(), p99_idle.back(), p99_building.back(), ratios.back());
    }
    std::printf(
        "median: p50 %.0f -> %.0f us, p99 %.0f -> %.0f us, p99 ratio %.2f (p10 %.2f, p90 %.2f)\n",
        Median(p50_idle), Median(p50_building), Median(p99_idle), Median(p99_building),
        Median(ratios), Quantile(ratios, 0.1), Quantile(ratios, 0.9));
    std::printf(
        "a segment of %u tokens, %u layers, 8 KV heads, in the background of steps: %.1f s\n",
        kSegmentTokens, shape_.layers, Median(builds));
  }

 private:
  std::vector<uint16_t> Random(size_t elements) { return RandomBf16(elements, &random_); }

  // A sequence of `tokens` uploaded tokens that is not segmented. Writers are named after their
  // sequences.
  uint64_t OpenFilled(uint32_t tokens, const std::string& policy) {
    engine::OpenArgs args;
    args.shape = shape_;
    args.policy = Must(attention::ParsePolicy(policy));
    const uint64_t id = Must(engine_->Open("", args));
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const auto k = Random(size_t{tokens} * shape_.kv_heads * shape_.head_dim);
      const auto v = Random(k.size());
      engine::AppendChunk chunk;
      chunk.layer = layer;
      chunk.tokens = tokens;
      chunk.k = View(k);
      chunk.v = View(v);
      Must(engine_->Append("", id, id, chunk));
    }
    return id;
  }

  // One decode step of every layer at `position`; 0 repeats nothing and only asks (query_only).
  void StepAll(uint64_t sequence, uint64_t position, std::vector<double>* latencies_us = nullptr) {
    const auto q = Random(size_t{shape_.query_heads} * shape_.head_dim);
    const auto k = Random(size_t{shape_.kv_heads} * shape_.head_dim);
    engine::DecodeRow row;
    row.sequence_id = sequence;
    row.query_tokens = 1;
    row.query_only = position == 0;
    row.position = row.query_only ? absl::GetFlag(FLAGS_context) : position;
    engine::DecodeArgs args;
    args.rows = {&row, 1};
    args.q = View(q);
    args.q_heads = shape_.query_heads;
    args.q_head_dim = shape_.head_dim;
    if (!row.query_only) {
      args.k = args.v = View(k);
      args.k_heads = args.v_heads = shape_.kv_heads;
      args.k_head_dim = args.v_value_dim = shape_.head_dim;
    }
    for (args.layer = 0; args.layer < shape_.layers; ++args.layer) {
      const auto start = Clock::now();
      Must(engine_->Decode("", sequence, args, memory_, &result_));
      Must(result_.rows[0].status);
      if (latencies_us == nullptr) continue;
      latencies_us->push_back(MicrosBetween(start, Clock::now()));
    }
  }

  const ModelShape shape_ =
      Bf16Shape(absl::GetFlag(FLAGS_layers), 32, 8, absl::GetFlag(FLAGS_head_dim));
  const std::unique_ptr<engine::Engine> engine_ = MakeEngine(absl::GetFlag(FLAGS_threads));
  std::mt19937_64 random_{1};
  engine::AnswerVectors memory_;
  engine::DecodeResult result_;
};

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  attnd::bench::Bench().Run();
  return 0;
}
