// SPDX-License-Identifier: Apache-2.0
//
// One layer's decode steps on a GPU, by policy: the GPU's own time (between events, kernel by
// kernel), by stage, and the time that a caller of the backend waits (kernels from a graph, copies
// and host work with them). Keys are in short runs around random centres; all policies take turns,
// medians over rounds.
//
//   gpu_steps --rows=4 --tokens=131072
//   gpu_steps --check --rows=2 --tokens=20000: compares with the CPU backend's answers instead
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
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
#include "gpu/cuda_backend.h"
#include "gpu/device/device.h"

ABSL_FLAG(uint32_t, rows, 4, "sequences of a step");
ABSL_FLAG(uint64_t, tokens, 131072, "tokens of each");
ABSL_FLAG(uint32_t, head_dim, 128, "elements of a head");
ABSL_FLAG(uint32_t, query_heads, 32, "query heads");
ABSL_FLAG(uint32_t, kv_heads, 8, "KV heads");
ABSL_FLAG(uint32_t, threads, 0, "threads that build indexes; 0: all cores");
ABSL_FLAG(uint32_t, rounds, 50, "rounds");
ABSL_FLAG(bool, check, false, "compare with the CPU backend");
ABSL_FLAG(std::string, policies,
          "dense error-target:tolerance=off,floor=0.02@clusters error-target@clusters "
          "error-target:tolerance=off,floor=0.01@tree error-target@tree "
          "error-target:tolerance=0.1@tree error-target:tolerance=0.02@tree",
          "policies, separated by spaces: NAME[:key=value,...][@INDEX]");

namespace attnd::bench {
namespace {

using Clock = std::chrono::steady_clock;
using attention::Backend;

uint32_t Threads() {
  return absl::GetFlag(FLAGS_threads) != 0 ? absl::GetFlag(FLAGS_threads)
                                           : std::thread::hardware_concurrency();
}

std::unique_ptr<Backend> MakeGpu(std::shared_ptr<Backend> cpu, uint32_t timed_steps) {
  gpu::CudaBackendOptions options;
  options.device_memory_bytes = uint64_t{24} << 30;
  options.timed_steps = timed_steps;
  return Must(gpu::MakeCudaBackend(options, Must(gpu::OpenCudaDevice()), std::move(cpu)));
}

// Rows of one query token each, over sequences of their own.
class Batch {
 public:
  Batch(const ModelShape& shape, const std::vector<SyntheticSequence>& sequences, uint64_t tokens)
      : rows_(sequences.size()), stats_(sequences.size()), answers_(sequences.size()) {
    for (size_t r = 0; r < rows_.size(); ++r) {
      Answer& answer = answers_[r];
      answer.queries = MakeQueries(shape, 100 + r);
      answer.out.resize(size_t{shape.query_heads} * shape.value_dim);
      answer.lse.resize(shape.query_heads);
      attention::StepRow& row = rows_[r];
      row.view = sequences[r].view;
      row.query_tokens = 1;
      row.query_only = true;
      row.query_dtype = DType::kFp32;
      row.past_tokens = tokens;
      row.queries = reinterpret_cast<const std::byte*>(answer.queries.data());
      row.out = answer.out.data();
      row.lse = answer.lse.data();
      row.stats = &stats_[r];
    }
  }

  // Microseconds that the caller waits.
  double Run(Backend* backend, const attention::Policy& policy) {
    for (attention::StepRow& row : rows_) row.policy = &policy;
    attention::StepRequest request;
    request.rows = rows_;
    const auto start = Clock::now();
    Must(backend->Step(request));
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
  }

  struct Answer {
    std::vector<float> queries, out, lse;
  };
  const std::vector<Answer>& answers() const { return answers_; }
  const std::vector<attention::RowStats>& stats() const { return stats_; }

 private:
  std::vector<attention::StepRow> rows_;
  std::vector<attention::RowStats> stats_;
  std::vector<Answer> answers_;
};

struct Case {
  std::string name;
  attention::Policy policy;
  Batch* batch;
  double read = 0;
  std::vector<double> wait, score, select, attend, merge, device;
};

// Greatest |a - b| / |b| of the batches' outputs, by query head.
double Apart(const Batch& a, const Batch& b, size_t value_dim) {
  double worst = 0;
  for (size_t r = 0; r < a.answers().size(); ++r) {
    const auto &x = a.answers()[r].out, &y = b.answers()[r].out;
    for (size_t at = 0; at < x.size(); at += value_dim) {
      double apart2 = 0, norm2 = 0;
      for (size_t c = at; c < at + value_dim; ++c) {
        apart2 += (double{x[c]} - y[c]) * (double{x[c]} - y[c]);
        norm2 += double{y[c]} * y[c];
      }
      const double apart = std::sqrt(apart2 / norm2);
      worst = apart <= worst ? worst : apart;  // NaN is the worst
    }
  }
  return worst;
}

double ReadShare(const Batch& batch) {
  double exact = 0, all = 0;
  for (const attention::RowStats& stats : batch.stats()) {
    exact += static_cast<double>(stats.exact_tokens);
    all += static_cast<double>(stats.exact_tokens + stats.estimated_tokens + stats.dropped_tokens);
  }
  return all > 0 ? exact / all : 0;
}

// Whether the GPU answered everything, as the CPU does.
bool Check(Backend* gpu, Backend* cpu, std::vector<Case>* cases, const ModelShape& shape,
           const std::map<std::string, std::vector<SyntheticSequence>>& sequences) {
  constexpr double kApartMax = 1e-3;  // relative to an output's length
  bool agree = true;
  std::printf(
      "| policy | outputs apart | read by GPU, CPU | predicted error by GPU, CPU |\n"
      "|---|---|---|---|\n");
  for (Case& c : *cases) {
    const std::string index =
        c.name.find('@') == std::string::npos ? "clusters" : c.name.substr(c.name.find('@') + 1);
    Batch other(shape, sequences.at(index), absl::GetFlag(FLAGS_tokens));
    c.batch->Run(gpu, c.policy);
    other.Run(cpu, c.policy);
    const double apart = Apart(*c.batch, other, shape.value_dim);
    agree &= apart <= kApartMax;
    std::printf("| %s | %.2e | %.4f%% %.4f%% | %.5f %.5f |\n", c.name.c_str(), apart,
                100 * ReadShare(*c.batch), 100 * ReadShare(other),
                c.batch->stats()[0].predicted_error_mean.value_or(-1),
                other.stats()[0].predicted_error_mean.value_or(-1));
  }
  std::printf("steps that the CPU answered in the GPU's place: %llu\n",
              static_cast<unsigned long long>(gpu->stats().fallback_steps));
  return agree && gpu->stats().fallback_steps == 0;
}

// Runs a case on the backend whose steps are timed, and adds the stages' times.
void TimeStages(Backend* gpu, Case* c) {
  const attention::BackendStats before = gpu->stats();
  c->batch->Run(gpu, c->policy);
  const attention::BackendStats after = gpu->stats();
  const double score = 1e6 * (after.score_seconds - before.score_seconds);
  const double select = 1e6 * (after.select_seconds - before.select_seconds);
  const double attend = 1e6 * (after.attend_seconds - before.attend_seconds);
  const double merge = 1e6 * (after.merge_seconds - before.merge_seconds);
  c->read = ReadShare(*c->batch);
  c->score.push_back(score);
  c->select.push_back(select);
  c->attend.push_back(attend);
  c->merge.push_back(merge);
  c->device.push_back(score + select + attend + merge);
}

// Enough equal steps for the next ones to run from a graph.
void WarmUp(Backend* gpu, const Case& c) {
  for (int i = 0; i < 12; ++i) c.batch->Run(gpu, c.policy);
}

void Time(const std::shared_ptr<Backend>& cpu, std::vector<Case>* cases) {
  {
    const auto gpu = MakeGpu(cpu, /*timed_steps=*/1);
    for (Case& c : *cases) WarmUp(gpu.get(), c);
    for (uint32_t round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
      for (Case& c : *cases) TimeStages(gpu.get(), &c);
    }
  }
  const auto gpu = MakeGpu(cpu, /*timed_steps=*/0);
  for (Case& c : *cases) WarmUp(gpu.get(), c);
  for (uint32_t round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    for (Case& c : *cases) c.wait.push_back(c.batch->Run(gpu.get(), c.policy));
  }
  std::printf(
      "| policy | GPU us | as fast as dense | score | select | attend | merge | waits us | "
      "read |\n|---|---|---|---|---|---|---|---|---|\n");
  const double dense = Median((*cases)[0].device);
  for (Case& c : *cases) {
    const double device = Median(c.device);
    std::printf("| %s | %.1f | %.2f | %.1f | %.1f | %.1f | %.1f | %.1f | %.2f%% |\n",
                c.name.c_str(), device, dense / device, Median(c.score), Median(c.select),
                Median(c.attend), Median(c.merge), Median(c.wait), 100 * c.read);
  }
}

attention::IndexSet IndexNamed(const std::string& name) {
  for (const attention::IndexKindInfo& info : attention::kIndexKindInfos) {
    if (info.name == name && info.clusters.has_value()) return {info.kind};
  }
  Must(absl::InvalidArgumentError("no index of clusters is named " + name));
  return {};
}

int Main() {
  const uint64_t tokens = absl::GetFlag(FLAGS_tokens);
  ModelShape shape;
  shape.layers = 1;
  shape.query_heads = absl::GetFlag(FLAGS_query_heads);
  shape.kv_heads = absl::GetFlag(FLAGS_kv_heads);
  shape.head_dim = shape.value_dim = absl::GetFlag(FLAGS_head_dim);
  shape.softmax_scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
  shape.dtype = DType::kBf16;
  Must(shape.Validate());
  const std::shared_ptr<Backend> cpu = attention::MakeCpuBackend({.threads = Threads()});
  std::map<std::string, std::vector<SyntheticSequence>> sequences;
  std::map<std::string, std::unique_ptr<Batch>> batches;
  std::vector<Case> cases;
  for (const auto text : absl::StrSplit(absl::GetFlag(FLAGS_policies), ' ', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('@', 1));
    const std::string index = parts.second.empty() ? "clusters" : parts.second;
    auto& own = sequences[index];
    for (uint32_t r = static_cast<uint32_t>(own.size()); r < absl::GetFlag(FLAGS_rows); ++r) {
      own.push_back(MakeSyntheticSequence(shape, tokens, 8192, Threads(), r, IndexNamed(index)));
    }
    auto& batch = batches[index];
    if (batch == nullptr) batch = std::make_unique<Batch>(shape, own, tokens);
    cases.push_back(
        {std::string(text), ParsePolicyText(parts.first), batch.get(), 0, {}, {}, {}, {}, {}, {}});
  }
  std::printf("\n%u x %llu tokens, %u query heads, %u KV heads of %u\n", absl::GetFlag(FLAGS_rows),
              static_cast<unsigned long long>(tokens), shape.query_heads, shape.kv_heads,
              shape.head_dim);
  if (absl::GetFlag(FLAGS_check)) {
    const auto gpu = MakeGpu(cpu, /*timed_steps=*/0);
    return Check(gpu.get(), cpu.get(), &cases, shape, sequences) ? 0 : 1;
  }
  Time(cpu, &cases);
  return 0;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return attnd::bench::Main();
}
