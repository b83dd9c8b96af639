// SPDX-License-Identifier: Apache-2.0
//
// The CPU backend against what memory allows. One process alternates between reading memory, dense
// attention and each policy, so that ratios are of neighbours in time; it prints medians over
// rounds with their spread. The sequence has clusters and no other index: policies that need
// another one, or tokens in their order, are refused before anything is built (policy_stages times
// those).
//
//   cpu_attention --tokens=131072 --head_dim=128 --rounds=15
//   --policies="error-target:tolerance=off,floor=0.02"
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/status/status.h"
#include "absl/strings/str_split.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/cpu/worker_pool.h"
#include "bench/statistics.h"
#include "bench/step_runner.h"
#include "bench/support.h"
#include "bench/synthetic_sequence.h"
#include "common/aligned_buffer.h"

ABSL_FLAG(uint64_t, tokens, 131072, "tokens of the sequence");
ABSL_FLAG(uint32_t, head_dim, 128, "elements of a head");
ABSL_FLAG(uint32_t, query_heads, 32, "query heads");
ABSL_FLAG(uint32_t, kv_heads, 8, "KV heads");
ABSL_FLAG(uint32_t, threads, 0, "threads; 0: all cores");
ABSL_FLAG(uint32_t, rounds, 15, "rounds");
ABSL_FLAG(std::string, policies, "error-target:tolerance=off,floor=0.02",
          "policies besides dense, separated by spaces: NAME[:key=value,...]; those that read a "
          "sequence with clusters and no other index");

namespace attnd::bench {
namespace {

using attention::Policy;
using Clock = std::chrono::steady_clock;

// Reads a buffer as large as the KV with every thread of a pool like the backend's: the bandwidth
// that attention is measured against. The plain loop is what the hardware's own prefetching likes
// best; software prefetches made it slower.
class MemoryReader {
 public:
  MemoryReader(size_t bytes, uint32_t threads)
      : buffer_(bytes), sums_(bytes / kPartBytes), pool_(threads) {
    std::fill_n(reinterpret_cast<uint64_t*>(buffer_.data()), bytes / sizeof(uint64_t), 1);
  }

  double Seconds() {
    const auto start = Clock::now();
    pool_.ForEach(sums_.size(), [this](size_t part) { Read(part); });
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  size_t bytes() const { return sums_.size() * kPartBytes; }
  uint64_t checksum() const { return std::accumulate(sums_.begin(), sums_.end(), uint64_t{0}); }

 private:
  static constexpr size_t kPartBytes = size_t{4} << 20;

  void Read(size_t part) {
    constexpr size_t kWords = kPartBytes / sizeof(uint64_t);
    const auto* data = reinterpret_cast<const uint64_t*>(buffer_.data()) + part * kWords;
    uint64_t sums[8] = {};
    for (size_t i = 0; i + 8 <= kWords; i += 8) {
      for (size_t j = 0; j < 8; ++j) sums[j] += data[i + j];
    }
    sums_[part] = std::accumulate(sums, sums + 8, uint64_t{0});
  }

  AlignedBuffer buffer_;
  std::vector<uint64_t> sums_;
  attention::WorkerPool pool_;
};

void PrintRow(const std::string& name, const std::vector<double>& seconds,
              const std::vector<double>& ratios, const char* ratio_name,
              const attention::RowStats* stats) {
  std::printf("%-46s %9.3f ms (best %.3f)  %s %6.3f (p10 %.3f, p90 %.3f)", name.c_str(),
              1e3 * Median(seconds), 1e3 * Quantile(seconds, 0), ratio_name, Median(ratios),
              Quantile(ratios, 0.1), Quantile(ratios, 0.9));
  if (stats != nullptr) {
    const double middle =
        static_cast<double>(stats->exact_tokens + stats->estimated_tokens + stats->dropped_tokens);
    std::printf("  read %.4f  us: score %.0f select %.0f attend %.0f merge %.0f",
                static_cast<double>(stats->exact_tokens) / middle,
                static_cast<double>(stats->stages.score) / 1e3,
                static_cast<double>(stats->stages.select) / 1e3,
                static_cast<double>(stats->stages.attend) / 1e3,
                static_cast<double>(stats->stages.merge) / 1e3);
  }
  std::printf("\n");
}

struct NamedPolicy {
  std::string name;
  Policy policy;
};

// The policies of --policies. Ends the program for one that a sequence with these indexes cannot
// serve. The backend leaves that check to the engine: without its index a policy stops the process
// or takes other bytes for the index, and without its keep-set a policy reads everything.
std::vector<NamedPolicy> PoliciesToTime(const ModelShape& shape,
                                        const attention::IndexSet& indexes) {
  std::vector<NamedPolicy> policies;
  for (const auto& text : absl::StrSplit(absl::GetFlag(FLAGS_policies), ' ', absl::SkipEmpty())) {
    const std::string name(text);
    const Policy policy = ParsePolicyText(name);
    absl::Status status = policy.CheckIndexes(indexes);
    if (status.ok()) status = policy.CheckShape(shape);
    if (!status.ok()) {
      std::fprintf(stderr, "--policies: %s: %s\n", name.c_str(),
                   std::string(status.message()).c_str());
      std::exit(2);
    }
    policies.push_back({name, policy});
  }
  return policies;
}

int Main() {
  const ModelShape shape = Bf16Shape(1, absl::GetFlag(FLAGS_query_heads),
                                     absl::GetFlag(FLAGS_kv_heads), absl::GetFlag(FLAGS_head_dim));
  const std::vector<NamedPolicy> policies = PoliciesToTime(shape, attention::kClusterIndexes);
  const uint64_t tokens = absl::GetFlag(FLAGS_tokens);
  const uint32_t threads = absl::GetFlag(FLAGS_threads) != 0 ? absl::GetFlag(FLAGS_threads)
                                                             : std::thread::hardware_concurrency();
  const SyntheticSequence sequence =
      MakeSyntheticSequence(shape, tokens, 8192, threads, 1, attention::kClusterIndexes);
  std::printf("%llu tokens, %u query heads, %u KV heads, head_dim %u, bf16, %u threads\n",
              static_cast<unsigned long long>(tokens), shape.query_heads, shape.kv_heads,
              shape.head_dim, threads);
  std::printf(
      "index building: %.0f tokens x KV heads a second (%.2f s)\n",
      static_cast<double>(sequence.segmented_tokens * shape.kv_heads) / sequence.build_seconds,
      sequence.build_seconds);

  attention::CpuBackendOptions options;
  options.threads = threads;
  const auto backend = attention::MakeCpuBackend(options);
  std::printf("SIMD target %s\n", std::string(backend->target()).c_str());
  StepRunner runner(backend.get(), sequence, tokens);
  const uint64_t kv_bytes = tokens * shape.kv_heads * shape.token_bytes();
  MemoryReader reader(kv_bytes, threads);

  const Policy dense = ParsePolicyText("dense");
  std::vector<double> read_s, dense_s, share;
  std::vector<std::vector<double>> policy_s(policies.size()), speed(policies.size());
  std::vector<attention::RowStats> stats(policies.size());
  for (uint32_t round = 0; round <= absl::GetFlag(FLAGS_rounds); ++round) {
    const double read = reader.Seconds();
    const double full = runner.Seconds(dense);
    for (size_t i = 0; i < policies.size(); ++i) {
      const double seconds = runner.Seconds(policies[i].policy);
      stats[i] = runner.stats();
      if (round == 0) continue;  // warm-up
      policy_s[i].push_back(seconds);
      speed[i].push_back(full / seconds);
    }
    if (round == 0) continue;
    read_s.push_back(read);
    dense_s.push_back(full);
    share.push_back(read / full);
  }
  std::printf("memory read: %.1f GB/s, best %.1f (checksum %llu)\n",
              static_cast<double>(reader.bytes()) / Median(read_s) / 1e9,
              static_cast<double>(reader.bytes()) / Quantile(read_s, 0) / 1e9,
              static_cast<unsigned long long>(reader.checksum()));
  PrintRow("dense", dense_s, share, "of read bandwidth", nullptr);
  for (size_t i = 0; i < policies.size(); ++i) {
    PrintRow(policies[i].name, policy_s[i], speed[i], "times as fast as dense", &stats[i]);
  }
  return 0;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return attnd::bench::Main();
}
