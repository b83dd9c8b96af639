// SPDX-License-Identifier: Apache-2.0
//
// How much slower do steps become as generated tokens gather? A prompt over the index `tree`, with
// keys in short runs around random centres, and forks of it: each generates another number of
// tokens, one a step. Then the forks take turns in answering steps that add nothing. Prints medians
// over rounds, the first fork's median over each fork's, the tokens that a step reads as sink,
// window and tail, the error against dense attention, what a fork's generated tokens take of the
// memory budget, how many segments were built of them, and the processor's time for that.
//
//   generated_tokens --prompt=131072 --generated=64,1024,4096,8000
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "bench/engine_support.h"
#include "bench/statistics.h"
#include "bench/step_runner.h"
#include "bench/support.h"
#include "engine/engine.h"

ABSL_FLAG(uint32_t, prompt, 131072, "tokens of the prompt");
ABSL_FLAG(std::vector<std::string>, generated, std::vector<std::string>({"64", "4096"}),
          "tokens that each fork generates");
ABSL_FLAG(uint32_t, kv_heads, 8, "KV heads, with four query heads each");
ABSL_FLAG(uint32_t, head_dim, 128, "elements of a head");
ABSL_FLAG(uint32_t, threads, 0, "threads of a step; 0: all cores");
ABSL_FLAG(uint32_t, rounds, 200, "rounds");
ABSL_FLAG(uint32_t, errors, 16, "queries whose errors are averaged");
ABSL_FLAG(std::string, policy, "error-target:tolerance=off", "policy of all steps");

namespace attnd::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kRunTokens = 16;
constexpr uint32_t kChunkTokens = 8192;

// Counts what the background builds. Its thread does nothing else.
class BuildCost : public engine::EventListener {
 public:
  void OnSegmentBuilt(BuildTrigger trigger, uint64_t /*tokens*/,
                      std::chrono::nanoseconds /*time*/) override {
    if (trigger == BuildTrigger::kPrefill) return;
    timespec used{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    nanoseconds = used.tv_sec * std::nano::den + used.tv_nsec;
    ++segments;
  }
  std::atomic<int64_t> nanoseconds{0};  // of the processor
  std::atomic<uint32_t> segments{0};
};

struct Fork {
  uint64_t id = 0;
  uint64_t tokens = 0;
  // Of what the fork generated.
  uint64_t bytes = 0;  // of the budget
  uint32_t segments_built = 0;
  double build_ms = 0;  // of the processor
  // Of its steps.
  std::vector<double> microseconds;
  std::vector<double> errors;
  uint64_t zone_tokens = 0;  // of the last step
};

class Bench {
 public:
  void Run() {
    const uint64_t prompt = OpenPrompt();
    std::vector<Fork> forks;
    for (const std::string& generated : absl::GetFlag(FLAGS_generated)) {
      forks.push_back(Grow(prompt, std::stoull(generated)));
    }
    for (uint32_t round = 0; round <= absl::GetFlag(FLAGS_rounds); ++round) {
      const auto q = Queries();
      for (size_t i = 0; i < forks.size(); ++i) {
        // Whoever is first finds less of what the forks share in the processor's caches.
        Fork& fork = forks[(round + i) % forks.size()];
        const double microseconds = Step(fork.id, fork.tokens, q, nullptr);
        fork.zone_tokens = result_.rows[0].stats.zone_tokens / shape_.kv_heads;
        if (round > 0) fork.microseconds.push_back(microseconds);  // the first is a warm-up
      }
    }
    for (uint32_t i = 0; i < absl::GetFlag(FLAGS_errors); ++i) {
      const auto q = Queries();
      for (Fork& fork : forks) fork.errors.push_back(Error(fork, q));
    }
    Print(forks);
  }

 private:
  // [tokens, kv_heads, head_dim]
  std::vector<uint16_t> Keys(uint64_t tokens) {
    std::normal_distribution<float> normal;
    const size_t width = size_t{shape_.kv_heads} * shape_.head_dim;
    std::vector<uint16_t> keys(tokens * width);
    for (size_t i = 0; i < keys.size(); ++i) {
      if (i % width == 0 && key_number_++ % kRunTokens == 0) {
        centre_.resize(width);
        for (float& x : centre_) x = normal(random_);
      }
      keys[i] = FloatToBf16(centre_[i % width] + 0.5f * normal(random_));
    }
    return keys;
  }

  std::vector<uint16_t> Queries() {
    return RandomBf16(size_t{shape_.query_heads} * shape_.head_dim, &random_);
  }

  uint64_t OpenPrompt() {
    engine::OpenArgs args;
    args.shape = shape_;
    args.policy = ParsePolicyText(absl::GetFlag(FLAGS_policy));
    args.indexes = attention::kTreeIndexes;
    const uint64_t id = Must(engine_->Open("", args));
    engine::AppendChunk chunk;
    while (chunk.first_position < absl::GetFlag(FLAGS_prompt)) {
      chunk.tokens =
          std::min<uint64_t>(kChunkTokens, absl::GetFlag(FLAGS_prompt) - chunk.first_position);
      const auto k = Keys(chunk.tokens), v = RandomBf16(k.size(), &random_);
      chunk.k = View(k);
      chunk.v = View(v);
      Must(engine_->Append("", id, id, chunk));
      chunk.first_position += chunk.tokens;
    }
    Must(engine_->FinishPrefill("", id, id, nullptr).status());
    return id;
  }

  Fork Grow(uint64_t prompt, uint64_t generated) {
    const uint64_t before = engine_->usage().resident_bytes;
    const int64_t nanoseconds = cost_.nanoseconds;
    const uint32_t segments = cost_.segments;
    const attention::Policy cheap = ParsePolicyText("streaming");
    Fork fork;
    fork.id = Must(engine_->Fork("", prompt, absl::GetFlag(FLAGS_prompt))).id;
    fork.tokens = absl::GetFlag(FLAGS_prompt);
    const auto q = Queries();
    for (uint64_t i = 0; i < generated; ++i, ++fork.tokens) {
      const auto k = Keys(1);
      Step(fork.id, fork.tokens, q, &k, cheap);
      // As if other layers and the rest of a model took time: a build is not left behind.
      if (i % kRunTokens == 0) engine_->WaitForBackground();
    }
    engine_->WaitForBackground();
    fork.bytes = engine_->usage().resident_bytes - before;
    fork.segments_built = cost_.segments - segments;
    fork.build_ms = static_cast<double>(cost_.nanoseconds - nanoseconds) / 1e6;
    return fork;
  }

  // |o - o_dense| / |o_dense| of a step, mean over query heads.
  double Error(const Fork& fork, const std::vector<uint16_t>& q) {
    Step(fork.id, fork.tokens, q, nullptr);
    const std::vector<float> out = memory_.out();
    Step(fork.id, fork.tokens, q, nullptr, ParsePolicyText("dense"));
    double sum = 0;
    for (size_t head = 0; head < shape_.query_heads; ++head) {
      double difference = 0, length = 0;
      for (size_t i = head * shape_.value_dim; i < (head + 1) * shape_.value_dim; ++i) {
        difference += std::pow(out[i] - memory_.out()[i], 2);
        length += std::pow(memory_.out()[i], 2);
      }
      sum += std::sqrt(difference / length);
    }
    return sum / shape_.query_heads;
  }

  // A step at `position` that adds a token, or nothing without `k`; microseconds. policy: absent,
  // the sequence's.
  double Step(uint64_t sequence, uint64_t position, const std::vector<uint16_t>& q,
              const std::vector<uint16_t>* k,
              const std::optional<attention::Policy>& policy = std::nullopt) {
    engine::DecodeRow row;
    row.sequence_id = sequence;
    row.position = position;
    row.query_tokens = 1;
    row.query_only = k == nullptr;
    row.policy = policy;
    engine::DecodeArgs args;
    args.rows = {&row, 1};
    args.q = View(q);
    args.q_heads = shape_.query_heads;
    args.q_head_dim = shape_.head_dim;
    if (k != nullptr) {
      args.k = args.v = View(*k);
      args.k_heads = args.v_heads = shape_.kv_heads;
      args.k_head_dim = args.v_value_dim = shape_.head_dim;
    }
    const auto start = Clock::now();
    Must(engine_->Decode("", sequence, args, memory_, &result_));
    Must(result_.rows[0].status);
    return MicrosBetween(start, Clock::now());
  }

  void Print(const std::vector<Fork>& forks) const {
    std::printf("%s over a tree, %u tokens, one layer, %u query heads, %u KV heads, head_dim %u\n",
                absl::GetFlag(FLAGS_policy).c_str(), absl::GetFlag(FLAGS_prompt),
                shape_.query_heads, shape_.kv_heads, shape_.head_dim);
    std::printf(
        "| generated | us, median [p10 .. p90] | speed | zones, tokens | error | MiB | built | "
        "ms of building |\n"
        "|---|---|---|---|---|---|---|---|\n");
    for (const Fork& fork : forks) {
      std::printf("| %llu | %.0f [%.0f .. %.0f] | %.2f | %llu | %.3f | %.1f | %u | %.0f |\n",
                  static_cast<unsigned long long>(fork.tokens - absl::GetFlag(FLAGS_prompt)),
                  Median(fork.microseconds), Quantile(fork.microseconds, 0.1),
                  Quantile(fork.microseconds, 0.9),
                  Median(forks.front().microseconds) / Median(fork.microseconds),
                  static_cast<unsigned long long>(fork.zone_tokens), Mean(fork.errors),
                  static_cast<double>(fork.bytes) / (1 << 20), fork.segments_built, fork.build_ms);
    }
  }

  const ModelShape shape_ = Bf16Shape(1, 4 * absl::GetFlag(FLAGS_kv_heads),
                                      absl::GetFlag(FLAGS_kv_heads), absl::GetFlag(FLAGS_head_dim));
  BuildCost cost_;  // outlives the engine
  const std::unique_ptr<engine::Engine> engine_ = MakeEngine(absl::GetFlag(FLAGS_threads), &cost_);
  std::mt19937_64 random_{1};
  std::vector<float> centre_;
  uint64_t key_number_ = 0;
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
