// SPDX-License-Identifier: Apache-2.0
//
// Where a decode step's time goes, by policy: processor time of one layer's step, summed over
// threads, split into scoring, selecting, attending and merging. Pages are read where they lie:
// there is no gathering. All policies take turns in one process, so that ratios are of neighbours
// in time; medians over rounds.
//
//   policy_stages --tokens=131072 --head_dim=128 --rounds=9
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_split.h"
#include "attention/cpu/cpu_backend.h"
#include "bench/statistics.h"
#include "bench/step_runner.h"
#include "bench/support.h"
#include "bench/synthetic_sequence.h"

ABSL_FLAG(uint64_t, tokens, 131072, "tokens of the sequence");
ABSL_FLAG(uint32_t, head_dim, 128, "elements of a head");
ABSL_FLAG(uint32_t, query_heads, 32, "query heads");
ABSL_FLAG(uint32_t, kv_heads, 8, "KV heads");
ABSL_FLAG(uint32_t, latent_value_dim, 0,
          "above 0: a latent model, with one KV head whose value is so much of its key");
ABSL_FLAG(uint32_t, threads, 0, "threads; 0: all cores");
ABSL_FLAG(uint32_t, rounds, 9, "rounds");
ABSL_FLAG(
    std::string, policies,
    "dense streaming quest double-sparsity twilight twilight:selector=double-sparsity "
    "twilight:selector=full twilight:selector=clusters asynctls asynctls:lag=0 snapkv "
    "ada-snapkv clusters-top-k double-p topk-completion topk-completion:selector=quest "
    "topk-completion:selector=clusters error-target error-target@clusters "
    "error-target:tolerance=off error-target:tolerance=off@clusters error-target@tree "
    "error-target:tolerance=off@tree",
    "policies, separated by spaces: NAME[:key=value,...][@clusters|@tree]; a policy reads the "
    "indexes that it asks for, or clusters without a regression, and what needs no clusters "
    "reads tokens in order; keep-sets are 1,024 random tokens of each KV head");

namespace attnd::bench {
namespace {

using attention::IndexKind;

struct Timed {
  std::string name;
  attention::Policy policy;
  StepRunner* runner = nullptr;
  std::vector<double> milliseconds, score, select, attend, merge;  // shares of their sum
  double read = 0;
};

void Add(const attention::RowStats& stats, double seconds, Timed* timed) {
  const attention::StageNanos& s = stats.stages;
  const auto sum = static_cast<double>(s.score + s.select + s.attend + s.merge);
  timed->milliseconds.push_back(1e3 * seconds);
  timed->score.push_back(static_cast<double>(s.score) / sum);
  timed->select.push_back(static_cast<double>(s.select) / sum);
  timed->attend.push_back(static_cast<double>(s.attend) / sum);
  timed->merge.push_back(static_cast<double>(s.merge) / sum);
  timed->read =
      static_cast<double>(stats.exact_tokens) /
      static_cast<double>(stats.exact_tokens + stats.estimated_tokens + stats.dropped_tokens);
}

int Main() {
  ModelShape shape = Bf16Shape(1, absl::GetFlag(FLAGS_query_heads), absl::GetFlag(FLAGS_kv_heads),
                               absl::GetFlag(FLAGS_head_dim));
  if (const uint32_t value_dim = absl::GetFlag(FLAGS_latent_value_dim); value_dim > 0) {
    shape.latent = true;
    shape.kv_heads = 1;
    shape.value_dim = value_dim;
  }
  Must(shape.Validate());
  const uint64_t tokens = absl::GetFlag(FLAGS_tokens);
  const uint32_t threads = absl::GetFlag(FLAGS_threads) != 0 ? absl::GetFlag(FLAGS_threads)
                                                             : std::thread::hardware_concurrency();
  // What building takes is told beside the steps that it serves.
  const auto make = [&](attention::IndexSet indexes) {
    const auto begin = std::chrono::steady_clock::now();
    SyntheticSequence sequence = MakeSyntheticSequence(shape, tokens, 8192, threads, 1, indexes);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    std::printf("built %s in %.1f s\n", indexes.ToString().c_str(), taken.count());
    return sequence;
  };
  constexpr attention::IndexSet kClustersAndMore = {IndexKind::kClusters, IndexKind::kKeys4,
                                                    IndexKind::kSummary};
  const SyntheticSequence clusters = make(kClustersAndMore);
  const SyntheticSequence regression = make(attention::kRegressionIndexes);
  const SyntheticSequence tree = make(attention::kTreeIndexes);
  SyntheticSequence in_order = make({IndexKind::kBlocks16, IndexKind::kBlocks64, IndexKind::kLabels,
                                     IndexKind::kKeys4, IndexKind::kSummary});
  in_order.view = WithKeepSets(*in_order.view, attention::Budget().tokens, 2);
  attention::CpuBackendOptions options;
  options.threads = threads;
  const auto backend = attention::MakeCpuBackend(options);
  StepRunner of_clusters(backend.get(), clusters, tokens);
  StepRunner of_regression(backend.get(), regression, tokens);
  StepRunner of_tree(backend.get(), tree, tokens);
  StepRunner of_order(backend.get(), in_order, tokens);
  std::printf("%llu tokens, %u query heads, %u KV heads, head_dim %u%s, bf16, %u threads, %s\n",
              static_cast<unsigned long long>(tokens), shape.query_heads, shape.kv_heads,
              shape.head_dim, shape.latent ? ", latent" : "", threads,
              std::string(backend->target()).c_str());

  std::vector<Timed> all;
  for (const auto& text : absl::StrSplit(absl::GetFlag(FLAGS_policies), ' ', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('@', 1));
    Timed& timed = all.emplace_back();
    timed.name = std::string(text);
    const std::string& over = parts.second;
    if (!over.empty() && over != "clusters" && over != "regression" && over != "tree") {
      std::fprintf(stderr, "%s: behind @ may be clusters, regression, tree\n", timed.name.c_str());
      return 2;
    }
    timed.policy = ParsePolicyText(parts.first);
    const attention::IndexSet needed = timed.policy.Indexes();
    const bool in_tree = over == "tree" || (over.empty() && needed.Has(IndexKind::kTree));
    timed.runner = in_tree                ? &of_tree
                   : over == "regression" ? &of_regression
                   : needed.clustered()   ? &of_clusters
                                          : &of_order;
  }
  for (uint32_t round = 0; round <= absl::GetFlag(FLAGS_rounds); ++round) {
    for (Timed& timed : all) {
      const double seconds = timed.runner->Seconds(timed.policy);
      if (round > 0) Add(timed.runner->stats(), seconds, &timed);  // the first is a warm-up
    }
  }
  std::printf(
      "| policy | ms | read | score | select | attend | merge | score + select |\n"
      "|---|---|---|---|---|---|---|---|\n");
  for (const Timed& timed : all) {
    const double score = Median(timed.score), select = Median(timed.select);
    std::printf("| %s | %.2f | %.4f | %.2f | %.2f | %.2f | %.2f | %.2f |\n", timed.name.c_str(),
                Median(timed.milliseconds), timed.read, score, select, Median(timed.attend),
                Median(timed.merge), score + select);
  }
  return 0;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return attnd::bench::Main();
}
