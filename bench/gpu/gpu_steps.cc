// SPDX-License-Identifier: Apache-2.0
//
// One layer's decode steps on a GPU, by policy: the GPU's own time (between events of a graph), by
// stage, and the time that a caller of the backend waits (kernels from a graph, copies and host
// work with them). All policies take turns; times are medians over rounds, what was read and the
// errors means. Keys are in short runs around random centres, or a trained model's: then each round
// has the next query of each capture (page_trace_capture.py --one-layer). The GPU builds indexes.
//
//   gpu_steps --rows=4 --tokens=131072
//   gpu_steps --rows=4 build/captures/131072-*.capture: rows take the captures in turn
//   gpu_steps --tokens=131072,8192 --policies=dense+clusters-top-k: rows take lengths and policies
//       in turn, so that a step has several kinds of rows
//   gpu_steps --check --rows=2 --tokens=20000: compares with the CPU backend's answers instead
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
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "attention/cpu/cpu_backend.h"
#include "bench/gpu/step_rows.h"
#include "bench/statistics.h"
#include "bench/step_runner.h"
#include "bench/support.h"
#include "gpu/cuda_backend.h"
#include "gpu/device/device.h"

ABSL_FLAG(uint32_t, rows, 4, "sequences of a step");
ABSL_FLAG(std::vector<std::string>, tokens, {"131072"}, "tokens of each; rows take them in turn");
ABSL_FLAG(uint32_t, head_dim, 128, "elements of a head");
ABSL_FLAG(uint32_t, query_heads, 32, "query heads");
ABSL_FLAG(uint32_t, kv_heads, 8, "KV heads");
ABSL_FLAG(uint32_t, threads, 0, "threads of the CPU; 0: all cores");
ABSL_FLAG(uint32_t, rounds, 50, "rounds");
ABSL_FLAG(bool, check, false, "compare with the CPU backend");
ABSL_FLAG(bool, equal_segments, false,
          "random keys in segments of 8,192 tokens, not in those of a prompt that a GPU answers");
ABSL_FLAG(std::string, policies,
          "dense error-target:tolerance=off,floor=0.02@clusters error-target@clusters "
          "error-target:tolerance=off,floor=0.01@tree error-target@tree "
          "error-target:tolerance=0.1@tree error-target:tolerance=0.02@tree",
          "policies, separated by spaces: NAME[:key=value,...][+NAME...][@INDEX]; rows take those "
          "that a + joins in turn");

namespace attnd::bench {
namespace {

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

struct Case {
  std::string name;
  std::vector<attention::Policy> policies;
  StepRows* rows;
  std::vector<double> wait, score, select, attend, merge, device, read, error, predicted;
};

// Whether the GPU answered everything, as the CPU does.
bool Check(Backend* gpu, Backend* cpu, const std::vector<Case>& cases) {
  constexpr double kApartMax = 1e-3;  // relative to an output's length
  bool agree = true;
  std::printf(
      "| policy | outputs apart | read by GPU, CPU | predicted error by GPU, CPU |\n"
      "|---|---|---|---|\n");
  for (const Case& c : cases) {
    StepRows& rows = *c.rows;
    rows.Run(gpu, c.policies);
    const std::vector<float> outputs = rows.outputs();
    const double read = rows.ReadShare(), predicted = rows.PredictedError();
    rows.Run(cpu, c.policies);
    const double apart = ApartOf(outputs, rows.outputs(), rows.shape().value_dim).worst;
    agree &= apart <= kApartMax;
    std::printf("| %s | %.2e | %.4f%% %.4f%% | %.5f %.5f |\n", c.name.c_str(), apart, 100 * read,
                100 * rows.ReadShare(), predicted, rows.PredictedError());
  }
  std::printf("steps that the CPU answered in the GPU's place: %llu\n",
              static_cast<unsigned long long>(gpu->stats().fallback_steps));
  return agree && gpu->stats().fallback_steps == 0;
}

// Runs a case on the backend whose steps are timed, and adds what it took.
void TimeStages(Backend* gpu, uint32_t round, Case* c) {
  const attention::BackendStats before = gpu->stats();
  c->rows->Run(gpu, c->policies, round);
  const attention::BackendStats after = gpu->stats();
  const double score = 1e6 * (after.score_seconds - before.score_seconds);
  const double select = 1e6 * (after.select_seconds - before.select_seconds);
  const double attend = 1e6 * (after.attend_seconds - before.attend_seconds);
  const double merge = 1e6 * (after.merge_seconds - before.merge_seconds);
  c->score.push_back(score);
  c->select.push_back(select);
  c->attend.push_back(attend);
  c->merge.push_back(merge);
  c->device.push_back(score + select + attend + merge);
  c->read.push_back(c->rows->ReadShare());
  c->predicted.push_back(c->rows->PredictedError());
}

// Enough equal steps for the next ones to run from a graph.
void WarmUp(Backend* gpu, const Case& c) {
  for (int i = 0; i < 12; ++i) c.rows->Run(gpu, c.policies);
}

void Print(const std::vector<Case>& cases) {
  std::printf(
      "| policy | GPU us | as fast as the first | score | select | attend | merge | waits us | "
      "read | error | predicted |\n|---|---|---|---|---|---|---|---|---|---|---|\n");
  const double first = Median(cases[0].device);
  for (const Case& c : cases) {
    const double device = Median(c.device);
    std::printf("| %s | %.1f | %.2f | %.1f | %.1f | %.1f | %.1f | %.1f | %.2f%% | %.3f | %.3f |\n",
                c.name.c_str(), device, first / device, Median(c.score), Median(c.select),
                Median(c.attend), Median(c.merge), Median(c.wait), 100 * Mean(c.read),
                Mean(c.error), Mean(c.predicted));
  }
}

// The first case, which should be dense, says what errors are.
void Time(const std::shared_ptr<Backend>& cpu, std::vector<Case>* cases) {
  {
    const auto gpu = MakeGpu(cpu, /*timed_steps=*/1);
    for (const Case& c : *cases) WarmUp(gpu.get(), c);
    for (uint32_t round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
      std::vector<float> right;
      for (Case& c : *cases) {
        TimeStages(gpu.get(), round, &c);
        if (right.empty()) right = c.rows->outputs();
        c.error.push_back(ApartOf(c.rows->outputs(), right, c.rows->shape().value_dim).mean);
      }
    }
  }
  const auto gpu = MakeGpu(cpu, /*timed_steps=*/0);
  for (const Case& c : *cases) WarmUp(gpu.get(), c);
  for (uint32_t round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    for (Case& c : *cases) c.wait.push_back(c.rows->Run(gpu.get(), c.policies, round));
  }
  Print(*cases);
}

ModelShape ShapeOfFlags() {
  return ShapeOfRows(absl::GetFlag(FLAGS_query_heads), absl::GetFlag(FLAGS_kv_heads),
                     absl::GetFlag(FLAGS_head_dim));
}

uint64_t TokensOfRow(uint32_t row) {
  const std::vector<std::string> tokens = absl::GetFlag(FLAGS_tokens);
  uint64_t number = 0;
  if (tokens.empty() || !absl::SimpleAtoi(tokens[row % tokens.size()], &number) || number == 0) {
    Must(absl::InvalidArgumentError("--tokens wants numbers above 0"));
  }
  return number;
}

// The step's rows over an index; captures: paths, in turn, or none. builder: the GPU, which builds
// their segments.
std::unique_ptr<StepRows> MakeRows(const std::vector<std::string>& captures,
                                   const std::string& index, Backend* builder) {
  const attention::IndexSet indexes = ParseIndexText(index);
  const RowBuilding building = {Threads(), builder};
  std::vector<RowSource> sources;
  for (uint32_t r = 0; r < absl::GetFlag(FLAGS_rows); ++r) {
    sources.push_back(captures.empty()
                          ? RandomRow(ShapeOfFlags(), TokensOfRow(r), r, indexes, building,
                                      absl::GetFlag(FLAGS_equal_segments) ? SegmentCut::kEqual
                                                                          : SegmentCut::kOfDevice)
                          : CapturedRow(captures[r % captures.size()], indexes, building));
  }
  return std::make_unique<StepRows>(std::move(sources));
}

int Main(const std::vector<std::string>& captures) {
  const std::shared_ptr<Backend> cpu = attention::MakeCpuBackend({.threads = Threads()});
  auto builder = MakeGpu(cpu, /*timed_steps=*/0);
  std::map<std::string, std::unique_ptr<StepRows>> rows;
  std::vector<Case> cases;
  for (const auto text : absl::StrSplit(absl::GetFlag(FLAGS_policies), ' ', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('@', 1));
    const std::string index = parts.second.empty() ? "clusters" : parts.second;
    auto& own = rows[index];
    if (own == nullptr) own = MakeRows(captures, index, builder.get());
    Case& c = cases.emplace_back();
    c.name = std::string(text);
    for (const auto policy : absl::StrSplit(parts.first, '+')) {
      c.policies.push_back(ParsePolicyText(std::string(policy)));
    }
    c.rows = own.get();
  }
  builder.reset();
  const ModelShape& shape = cases.at(0).rows->shape();
  std::string tokens;
  for (const auto& source : cases[0].rows->sources()) absl::StrAppend(&tokens, " ", source.tokens);
  std::printf("\n%u rows of%s tokens, %u query heads, %u KV heads of %u%s\n",
              absl::GetFlag(FLAGS_rows), tokens.c_str(), shape.query_heads, shape.kv_heads,
              shape.head_dim, captures.empty() ? "" : ", of a trained model");
  if (absl::GetFlag(FLAGS_check)) {
    const auto gpu = MakeGpu(cpu, /*timed_steps=*/0);
    return Check(gpu.get(), cpu.get(), cases) ? 0 : 1;
  }
  Time(cpu, &cases);
  return 0;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  return attnd::bench::Main({arguments.begin() + 1, arguments.end()});
}
