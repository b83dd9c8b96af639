// SPDX-License-Identifier: Apache-2.0
//
// What audits cost: steps a second of one layer, one row each, while a share of the rows is audited
// and while none is. One engine answers both, over the same memory: forks of one sequence are asked
// in turn, and which of them are picked to be audited is known beforehand (Auditor::Picks). A block
// of steps with audits asks so many picked forks as the share says; one without asks none. A round
// is a block without, one with, and one without; the cost is that of the middle one against the
// mean of its neighbours, and the neighbours against each other show what the machine does by
// itself. Blocks with audits begin when an audit is under way, and those without when none is.
//
// Two costs: in steps a second, and in processor time of the whole process (audits included) for
// each step, which other work on the machine moves less and which is what a server that has no idle
// core pays.
//
//   audit_cost --tokens=32768,131072 --rounds=15
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "attention/cpu/cpu_backend.h"
#include "bench/engine_support.h"
#include "bench/statistics.h"
#include "bench/support.h"
#include "engine/audit/auditor.h"
#include "engine/engine.h"

ABSL_FLAG(std::vector<std::string>, tokens, (std::vector<std::string>{"32768", "131072"}),
          "tokens of the sequence, one or more");
ABSL_FLAG(std::string, policies, "error-target:tolerance=off,floor=0.02 double-p",
          "policies, separated by spaces: NAME[:key=value,...]");
ABSL_FLAG(double, share, 0.01, "of the rows that are picked");
ABSL_FLAG(double, cpu_share, attnd::engine::AuditOptions().cpu_share,
          "of a core that audits may take");
ABSL_FLAG(int, rounds, 15, "rounds of three blocks");
ABSL_FLAG(double, block_s, 2, "seconds of a block");
ABSL_FLAG(uint32_t, threads, 0, "threads of a step; 0: all cores");

namespace attnd::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kForks = 200;  // that are asked in turn

double Seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

class CountingObserver : public engine::EventListener {
 public:
  void OnAudited(const engine::AuditedRow& row) override {
    ++audited;
    error_sum = error_sum + row.error_mean;
  }
  std::atomic<uint64_t> audited{0};
  std::atomic<double> error_sum{0};  // written by the one thread that audits
};

attention::Policy Parse(const std::string& text) {
  const std::vector<std::string> halves = absl::StrSplit(text, absl::MaxSplits(':', 1));
  std::map<std::string, std::string> parameters;
  if (halves.size() == 2) {
    for (const auto& item : absl::StrSplit(halves[1], ',')) {
      const std::pair<std::string, std::string> pair =
          absl::StrSplit(item, absl::MaxSplits('=', 1));
      parameters.insert(pair);
    }
  }
  return Must(attention::ParsePolicy(halves[0], parameters));
}

engine::EngineOptions Options() {
  engine::EngineOptions options;
  options.memory_budget_bytes = uint64_t{8} << 30;
  options.segment_tokens = kSegmentTokens;
  options.index_threads = std::thread::hardware_concurrency();
  options.audit.share = absl::GetFlag(FLAGS_share);
  options.audit.cpu_share = absl::GetFlag(FLAGS_cpu_share);
  options.audit.queue_rows = 2;  // so that there is always one, and the end is not long in coming
  return options;
}

double ProcessSeconds() {
  rusage used{};
  static_cast<void>(getrusage(RUSAGE_SELF, &used));
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

struct Block {
  double steps_per_s = 0;
  double cpu_us = 0;  // of a step
  double p99_us = 0;
};

class Bench {
 public:
  explicit Bench(uint64_t tokens) : tokens_(tokens) {
    Fill();
    Fork();
  }

  void Run(const std::string& text) {
    const attention::Policy policy = Parse(text);
    RunBlock(policy, usual_, 0.5);  // warm-up
    std::vector<double> cost, control, cpu_cost, cpu_control;
    std::vector<double> with, without, p99_with, p99_without;
    double audit_s = 0;
    const uint64_t audited_before = observer_.audited;
    const double error_before = observer_.error_sum;
    for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
      const double block_s = absl::GetFlag(FLAGS_block_s);
      const Block before = RunBlock(policy, usual_, block_s);
      const auto start = Clock::now();
      StartAudits(policy);
      const Block middle = RunBlock(policy, audited_, block_s);
      engine_->WaitForBackground();
      audit_s += Seconds(Clock::now() - start);
      const Block after = RunBlock(policy, usual_, block_s);
      const double neighbours = (before.steps_per_s + after.steps_per_s) / 2;
      cost.push_back(100 * (1 - middle.steps_per_s / neighbours));
      control.push_back(100 * (1 - after.steps_per_s / before.steps_per_s));
      cpu_cost.push_back(100 * (2 * middle.cpu_us / (before.cpu_us + after.cpu_us) - 1));
      cpu_control.push_back(100 * (after.cpu_us / before.cpu_us - 1));
      with.push_back(middle.steps_per_s);
      without.push_back(neighbours);
      p99_with.push_back(middle.p99_us);
      p99_without.push_back((before.p99_us + after.p99_us) / 2);
    }
    const auto audited = static_cast<double>(observer_.audited - audited_before);
    std::printf("%llu tokens, %s: %.0f steps/s without, %.0f with\n",
                static_cast<unsigned long long>(tokens_), text.c_str(), Median(without),
                Median(with));
    Print("cost, percent of steps/s", cost);
    Print("  neighbours", control);
    Print("cost, percent of time", cpu_cost);
    Print("  neighbours", cpu_control);
    Print("p99 of a step without, us", p99_without);
    Print("p99 of a step with, us", p99_with);
    std::printf("  %-28s %8.2f a second, mean error %.3f\n", "audits", audited / audit_s,
                (observer_.error_sum - error_before) / std::max(1.0, audited));
    std::fflush(stdout);
  }

 private:
  static void Print(const char* name, const std::vector<double>& values) {
    std::printf("  %-28s %8.2f [%.2f .. %.2f]\n", name, Median(values), Quantile(values, 0.1),
                Quantile(values, 0.9));
  }

  // Keys in short runs around random centres, so that clusters are like a model's.
  void Fill() {
    engine::OpenArgs args;
    args.shape = shape_;
    args.policy = Parse("dense");
    parent_ = Must(engine_->Open("", args));
    constexpr uint64_t kChunk = 4096;
    std::normal_distribution<float> normal;
    const size_t width = size_t{shape_.kv_heads} * shape_.head_dim;
    std::vector<float> centre(width);
    for (uint64_t first = 0; first < tokens_; first += kChunk) {
      std::vector<uint16_t> k(std::min(kChunk, tokens_ - first) * width);
      for (size_t i = 0; i < k.size(); ++i) {
        if (i % (16 * width) == 0) {
          for (float& c : centre) c = normal(random_);
        }
        k[i] = FloatToBf16(centre[i % width] + 0.5f * normal(random_));
      }
      const std::vector<uint16_t> v = RandomBf16(k.size(), &random_);
      engine::AppendChunk chunk;
      chunk.first_position = first;
      chunk.tokens = k.size() / width;
      chunk.k = View(k);
      chunk.v = View(v);
      Must(engine_->Append("", parent_, parent_, chunk));
    }
    Must(engine_->FinishPrefill("", parent_, parent_, nullptr).status());
  }

  // kForks that are not picked, and the same with as many picked ones in their place as the share
  // says.
  void Fork() {
    const engine::AuditOptions audit = Options().audit;
    const auto picked = static_cast<size_t>(kForks * audit.share + 0.5);
    std::vector<uint64_t> picks;
    while (usual_.size() < kForks || picks.size() < picked) {
      const uint64_t id = Must(engine_->Fork("", parent_, std::nullopt)).id;
      const bool picks_it = engine::Auditor::Picks(audit, id, 0, tokens_);
      if (picks_it && picks.size() < picked) {
        picks.push_back(id);
      } else if (!picks_it && usual_.size() < kForks) {
        usual_.push_back(id);
      } else {
        Must(engine_->Close("", id));
      }
    }
    audited_ = usual_;
    for (size_t i = 0; i < picks.size(); ++i) audited_[i * kForks / picks.size()] = picks[i];
    picks_ = std::move(picks);
  }

  void StartAudits(const attention::Policy& policy) {
    for (const uint64_t fork : picks_) Step(policy, fork);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }

  Block RunBlock(const attention::Policy& policy, const std::vector<uint64_t>& forks,
                 double seconds) {
    std::vector<double> times_us;
    const double cpu = ProcessSeconds();
    const auto start = Clock::now();
    auto now = start;
    for (size_t i = 0; Seconds(now - start) < seconds; ++i) {
      const auto before = now;
      Step(policy, forks[i % forks.size()]);
      now = Clock::now();
      times_us.push_back(1e6 * Seconds(now - before));
    }
    const auto steps = static_cast<double>(times_us.size());
    return {steps / Seconds(now - start), 1e6 * (ProcessSeconds() - cpu) / steps,
            Quantile(times_us, 0.99)};
  }

  void Step(const attention::Policy& policy, uint64_t sequence) {
    const size_t elements = size_t{shape_.query_heads} * shape_.head_dim;
    const size_t query = next_query_++ % kQueries;
    engine::DecodeRow row;
    row.sequence_id = sequence;
    row.query_tokens = 1;
    row.query_only = true;
    row.position = tokens_;
    row.policy = policy;
    engine::DecodeArgs args;
    args.rows = {&row, 1};
    args.q = {DType::kBf16, reinterpret_cast<const std::byte*>(&queries_[query * elements]),
              elements};
    args.q_heads = shape_.query_heads;
    args.q_head_dim = shape_.head_dim;
    Must(engine_->Decode("", parent_, args, memory_, &result_));
    Must(result_.rows[0].status);
  }

  static constexpr size_t kQueries = 64;

  const uint64_t tokens_;
  const ModelShape shape_ = Bf16Shape(1, 32, 8, 128);
  std::mt19937_64 random_{1};
  const std::vector<uint16_t> queries_ =
      RandomBf16(kQueries * shape_.query_heads * shape_.head_dim, &random_);
  size_t next_query_ = 0;
  CountingObserver observer_;
  const std::unique_ptr<engine::Engine> engine_ = Must(engine::Engine::Create(
      Options(), attention::MakeCpuBackend({.threads = absl::GetFlag(FLAGS_threads)}), &observer_));
  uint64_t parent_ = 0;
  std::vector<uint64_t> usual_, audited_, picks_;
  engine::AnswerVectors memory_;
  engine::DecodeResult result_;
};

void Main() {
  std::printf("share %g, of a core %g: median [p10 .. p90] of %d rounds\n",
              absl::GetFlag(FLAGS_share), absl::GetFlag(FLAGS_cpu_share),
              absl::GetFlag(FLAGS_rounds));
  for (const std::string& text : absl::GetFlag(FLAGS_tokens)) {
    uint64_t tokens = 0;
    if (!absl::SimpleAtoi(text, &tokens) || tokens == 0) {
      Must(absl::InvalidArgumentError("tokens is no number"));
    }
    Bench bench(tokens);
    for (const auto policy : absl::StrSplit(absl::GetFlag(FLAGS_policies), ' ')) {
      bench.Run(std::string(policy));
    }
  }
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  attnd::bench::Main();
}
