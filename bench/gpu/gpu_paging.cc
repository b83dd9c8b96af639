// SPDX-License-Identifier: Apache-2.0
//
// What does a decode step cost when the GPU has memory for only a part of the pages? One layer's
// steps over a trained model's keys, each with the next query of its captures
// (page_trace_capture.py --one-layer), for several budgets of page memory beside all-resident
// pages, of one process; then, over an empty cache, a step that has to fetch all that it reads. The
// rest of the pages lies in host memory. Times are medians over the steps behind --warm.
//
//   gpu_paging --rows=4 --budgets=0.25,0.1 build/captures/131072-*.capture
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
#include "bench/gpu/step_rows.h"
#include "bench/statistics.h"
#include "bench/step_runner.h"
#include "bench/support.h"
#include "gpu/cuda_backend.h"
#include "gpu/device/device.h"

ABSL_FLAG(uint32_t, rows, 4, "sequences of a step");
ABSL_FLAG(uint32_t, warm, 32, "steps before those that are measured");
ABSL_FLAG(uint32_t, steps, 160, "steps that are measured");
ABSL_FLAG(std::vector<std::string>, budgets,
          (std::vector<std::string>{"0.5", "0.25", "0.1", "0.05"}),
          "shares of all pages that the GPU has memory for");
ABSL_FLAG(std::string, policies, "error-target error-target:tolerance=off,floor=0.01",
          "policies over a tree, separated by spaces: NAME[:key=value,...]");

namespace attnd::bench {
namespace {

using attention::Backend;
using attention::BackendStats;

constexpr double kAll = 0;  // a budget: no limit

std::unique_ptr<Backend> MakeGpu(uint64_t page_memory_bytes) {
  gpu::CudaBackendOptions options;
  options.device_memory_bytes = uint64_t{40} << 30;
  options.page_memory_bytes = page_memory_bytes;
  options.timed_steps = 1;
  return Must(gpu::MakeCudaBackend(options, Must(gpu::OpenCudaDevice()),
                                   attention::MakeCpuBackend({.threads = 1})));
}

struct Measured {
  std::vector<double> wait, device, attend;  // us
  std::vector<double> fetched, in_place, looked_up, host_tokens;
};

// The time that the device took for steps so far, by stage.
double DeviceMicros(const BackendStats& stats) {
  return 1e6 *
         (stats.score_seconds + stats.select_seconds + stats.attend_seconds + stats.merge_seconds);
}

void Step(Backend* gpu, StepRows* rows, const attention::Policy& policy, uint32_t number,
          Measured* measured) {
  const BackendStats before = gpu->stats();
  measured->wait.push_back(rows->Run(gpu, policy, number));
  const BackendStats after = gpu->stats();
  if (after.fallback_steps > before.fallback_steps) {
    Must(absl::InternalError("the CPU answered for the GPU"));
  }
  const auto count = [](uint64_t a, uint64_t b) { return static_cast<double>(a - b); };
  measured->device.push_back(DeviceMicros(after) - DeviceMicros(before));
  measured->attend.push_back(1e6 * (after.attend_seconds - before.attend_seconds));
  measured->looked_up.push_back(count(after.cache.lookups, before.cache.lookups));
  measured->fetched.push_back(count(after.cache.fetched, before.cache.fetched));
  measured->in_place.push_back(count(after.cache.in_place, before.cache.in_place));
  measured->host_tokens.push_back(count(after.cache.host_tokens, before.cache.host_tokens));
}

// resident: the GPU's time of a step all of whose pages are in its memory.
void PrintRow(const std::string& policy, const std::string& what, const Measured& m,
              double resident, uint64_t page_bytes) {
  constexpr double kMega = 1e6;
  const double looked_up = Mean(m.looked_up), missed = Mean(m.fetched) + Mean(m.in_place);
  const double moved = (Mean(m.fetched) * static_cast<double>(page_bytes)) / kMega;
  const double wanted = Mean(m.host_tokens) * static_cast<double>(page_bytes) / 16 / kMega;
  std::printf(
      "| %s | %s | %.1f | %.2f | %.1f | %.1f | %.2f%% | %.2f | %.2f | %.0f |\n", policy.c_str(),
      what.c_str(), Median(m.device), Median(m.device) / resident, Median(m.attend), Median(m.wait),
      looked_up > 0 ? 100 * (1 - missed / looked_up) : 100, moved, wanted, Mean(m.in_place));
  std::fflush(stdout);
}

uint64_t PayloadBytes(const StepRows& rows) {
  uint64_t bytes = 0;
  for (const RowSource& source : rows.sources()) {
    for (const auto& segment : source.view->segments) bytes += segment->payload_block().size();
  }
  return bytes;
}

void MeasureBudget(StepRows* rows, const std::string& name, const attention::Policy& policy,
                   double budget, double* resident) {
  const uint64_t page_bytes = gpu::PageBytesOf(gpu::KernelShapeOf(rows->shape()));
  const auto memory = static_cast<uint64_t>(budget * static_cast<double>(PayloadBytes(*rows)));
  const auto gpu = MakeGpu(memory);
  Measured cold, warm, steady;
  Step(gpu.get(), rows, policy, 0, &cold);  // uploads, and pages without a cache
  const uint32_t first = absl::GetFlag(FLAGS_warm);
  for (uint32_t step = 1; step < first; ++step) Step(gpu.get(), rows, policy, step, &warm);
  for (uint32_t step = first; step < first + absl::GetFlag(FLAGS_steps); ++step) {
    Step(gpu.get(), rows, policy, step, &steady);
  }
  if (budget == kAll) *resident = Median(steady.device);
  char text[64];
  std::snprintf(text, sizeof(text), budget == kAll ? "all resident" : "%.0f%%", 100 * budget);
  PrintRow(name, text, steady, *resident, page_bytes);
  if (budget != kAll)
    PrintRow(name, std::string(text) + ", first step", cold, *resident, page_bytes);
}

int Main(const std::vector<std::string>& captures) {
  if (captures.empty()) Must(absl::InvalidArgumentError("no captures"));
  std::vector<RowSource> sources;
  const uint32_t threads = std::thread::hardware_concurrency();
  for (uint32_t r = 0; r < absl::GetFlag(FLAGS_rows); ++r) {
    sources.push_back(CapturedRow(captures[r % captures.size()], attention::kTreeIndexes, threads));
  }
  StepRows rows(std::move(sources));
  const ModelShape& shape = rows.shape();
  std::printf("\n%u x %llu tokens, %u query heads, %u KV heads of %u; pages of a layer: %.0f MB\n",
              absl::GetFlag(FLAGS_rows), static_cast<unsigned long long>(rows.tokens()),
              shape.query_heads, shape.kv_heads, shape.head_dim,
              static_cast<double>(PayloadBytes(rows)) / 1e6);
  std::printf(
      "| policy | page memory | GPU us | of resident | attend us | waits us | hits | MB fetched | "
      "MB wanted of them | pages read in place |\n|---|---|---|---|---|---|---|---|---|---|\n");
  for (const auto text : absl::StrSplit(absl::GetFlag(FLAGS_policies), ' ', absl::SkipEmpty())) {
    const std::string name(text);
    const attention::Policy policy = ParsePolicyText(name);
    double resident = 0;
    MeasureBudget(&rows, name, policy, kAll, &resident);
    for (const std::string& budget : absl::GetFlag(FLAGS_budgets)) {
      MeasureBudget(&rows, name, policy, std::stod(budget), &resident);
    }
  }
  return 0;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  return attnd::bench::Main({arguments.begin() + 1, arguments.end()});
}
