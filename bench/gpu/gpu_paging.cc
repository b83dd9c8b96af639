// SPDX-License-Identifier: Apache-2.0
//
// What does a decode step cost when the GPU has memory for only a part of the pages? One layer's
// steps, each with another query, for several budgets of page memory beside all-resident pages, of
// one process. The rest of the pages lies in host memory. Times are medians over steps, in
// microseconds of the GPU but for what the caller waits. Rows of each budget:
//
//   steady       the steps behind --warm
//   floor        the same steps, each asked a second time right after the first, over a cache of
//                its own: its pages are in the cache (the column "hits" says whether they were), so
//                that what is left is looking up, and reading through the cache
//   first step   of a new backend, which uploads indexes and maps host memory as well
//   empty cache  steps before each of which the cache was emptied, and nothing else: what fetching
//                takes. "Of the ceiling" is the rate of the fetch stage beside the best of kernels
//                that do nothing but read as much mapped host memory (host_reads.h), which are
//                measured first
//
// Every answer is compared with the all-resident one, bit for bit; the program fails if one
// differs, and if the CPU answers a row. "Fetch" is a part of "attend", beside which estimates run.
//
// Keys and queries are a trained model's (page_trace_capture.py --one-layer), or random: keys in
// short runs around random centres, and queries that move slowly from one random query to another
// (step_rows.h). Random ones say what a step costs at the hits that it prints. How many hits a
// model has they do not say: nothing in them is worth keeping for longer than queries are alike.
//
//   gpu_paging --rows=4 --budgets=0.25,0.1 build/captures/131072-*.capture
//   gpu_paging --policies=error-target:tolerance=off,floor=0.01
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "attention/cpu/cpu_backend.h"
#include "bench/gpu/emptied_cache.h"
#include "bench/gpu/paging_steps.h"
#include "bench/gpu/paging_table.h"
#include "bench/gpu/read_ceiling.h"
#include "bench/gpu/step_rows.h"
#include "bench/step_runner.h"
#include "bench/support.h"
#include "gpu/cuda_backend.h"
#include "gpu/device/device.h"

ABSL_FLAG(uint32_t, rows, 4, "sequences of a step");
ABSL_FLAG(uint32_t, warm, 32, "steps before those that are measured");
ABSL_FLAG(uint32_t, steps, 160, "steps that are measured");
ABSL_FLAG(uint32_t, emptied, 16, "steps that are measured over an emptied cache");
ABSL_FLAG(std::vector<std::string>, budgets,
          (std::vector<std::string>{"0.5", "0.25", "0.1", "0.05"}),
          "shares of all pages that the GPU has memory for, above 0 and below 1");
ABSL_FLAG(std::vector<std::string>, ceiling_mb, (std::vector<std::string>{"2", "12", "48", "1024"}),
          "megabytes that are read to find the ceiling, each amount by itself; empty: no ceiling");
ABSL_FLAG(uint64_t, device_memory_mib, uint64_t{24} << 10,
          "GPU memory of a backend; at times there are two, as the last one's memory goes when the "
          "next one first steps");
ABSL_FLAG(uint64_t, tokens, 131072, "without a capture: of each sequence");
ABSL_FLAG(uint32_t, head_dim, 128, "without a capture: elements of a head");
ABSL_FLAG(uint32_t, query_heads, 24, "without a capture: query heads");
ABSL_FLAG(uint32_t, kv_heads, 8, "without a capture: KV heads");
ABSL_FLAG(std::string, policies, "error-target error-target:tolerance=off,floor=0.01",
          "policies over a tree, separated by spaces: NAME[:key=value,...]");

namespace attnd::bench {
namespace {

using attention::Backend;

constexpr double kAll = 0;  // a budget: no limit
constexpr double kCeilingMbMax = 1e6;

std::unique_ptr<Backend> MakeGpu(uint64_t page_memory_bytes,
                                 std::shared_ptr<CacheEmptier> emptier) {
  gpu::CudaBackendOptions options;
  options.device_memory_bytes = absl::GetFlag(FLAGS_device_memory_mib) << 20;
  options.page_memory_bytes = page_memory_bytes;
  options.timed_steps = 1;
  auto device =
      std::make_unique<EmptiedCacheDevice>(Must(gpu::OpenCudaDevice()), std::move(emptier));
  return Must(
      gpu::MakeCudaBackend(options, std::move(device), attention::MakeCpuBackend({.threads = 1})));
}

// The measurements of one policy; all steps with their answers.
class Measurement {
 public:
  Measurement(StepRows* rows, const std::string& policy, PagingTable* table, Answers* answers)
      : rows_(rows),
        policy_(ParsePolicyText(policy)),
        name_(policy),
        table_(table),
        steps_(rows, &policy_, answers) {}

  void Resident() {
    const auto gpu = MakeGpu(kAll, std::make_shared<CacheEmptier>());
    const Measured steady = Steady(gpu.get(), 0, /*twice=*/false);
    // Of the steps over an emptied cache, too, which come behind.
    for (uint32_t i = 0; i < absl::GetFlag(FLAGS_emptied); ++i) steps_.Run(gpu.get(), Last() + i);
    table_->SetResident(steady);
    table_->Print(name_, "all resident", steady);
  }

  // One backend after the other, as they map the same memory.
  void Budget(double share) {
    char text[64];
    std::snprintf(text, sizeof(text), "%.0f%%", 100 * share);
    MeasureCaches(share, text);
    const auto gpu = Paged(share, std::make_shared<CacheEmptier>());
    table_->Print(name_, std::string(text) + ", floor", Steady(gpu.get(), 0, /*twice=*/true));
  }

 private:
  void MeasureCaches(double share, const char* text) {
    const auto emptier = std::make_shared<CacheEmptier>();
    const auto gpu = Paged(share, emptier);
    Measured first, emptied;
    first.Add(steps_.Run(gpu.get(), 0));  // uploads, and maps host memory
    const Measured steady = Steady(gpu.get(), 1, /*twice=*/false);
    CheckPaged(*gpu, text);
    for (uint32_t i = 0; i < absl::GetFlag(FLAGS_emptied); ++i) {
      Must(emptier->Empty());
      emptied.Add(steps_.Run(gpu.get(), Last() + i));
    }
    table_->Print(name_, text, steady);
    table_->Print(name_, std::string(text) + ", first step", first);
    if (!emptied.device.empty()) {
      table_->Print(name_, std::string(text) + ", empty cache", emptied);
    }
  }

  // The number behind those of steady steps.
  static uint32_t Last() { return absl::GetFlag(FLAGS_warm) + absl::GetFlag(FLAGS_steps); }

  // From step `begin` on. twice: measured is each step's second run.
  Measured Steady(Backend* gpu, uint32_t begin, bool twice) {
    Measured measured;
    const uint32_t first = absl::GetFlag(FLAGS_warm);
    for (uint32_t step = begin; step < first; ++step) steps_.Run(gpu, step);
    for (uint32_t step = first; step < Last(); ++step) {
      if (twice) steps_.Run(gpu, step);
      measured.Add(steps_.Run(gpu, step));
    }
    return measured;
  }

  std::unique_ptr<Backend> Paged(double share, std::shared_ptr<CacheEmptier> emptier) const {
    const double bytes = share * static_cast<double>(rows_->PayloadBytes());
    return MakeGpu(static_cast<uint64_t>(bytes), std::move(emptier));
  }

  // A row of the table over a device that holds everything would say nothing.
  static void CheckPaged(const Backend& gpu, const char* budget) {
    const attention::BackendStats stats = gpu.stats();
    if (stats.cache.bytes > 0 && stats.cache.lookups > 0) return;
    Must(absl::InternalError(std::string(budget) + " of the pages: no page was looked up"));
  }

  StepRows* const rows_;
  const attention::Policy policy_;
  const std::string name_;
  PagingTable* const table_;
  PagingSteps steps_;
};

ModelShape ShapeOfFlags() {
  return ShapeOfRows(absl::GetFlag(FLAGS_query_heads), absl::GetFlag(FLAGS_kv_heads),
                     absl::GetFlag(FLAGS_head_dim));
}

// captures: paths, in turn, or none.
StepRows MakeRows(const std::vector<std::string>& captures) {
  const auto builder = MakeGpu(kAll, std::make_shared<CacheEmptier>());
  const RowBuilding building = {std::thread::hardware_concurrency(), builder.get()};
  const uint32_t queries =
      absl::GetFlag(FLAGS_warm) + absl::GetFlag(FLAGS_steps) + absl::GetFlag(FLAGS_emptied);
  std::vector<RowSource> sources;
  for (uint32_t r = 0; r < absl::GetFlag(FLAGS_rows); ++r) {
    sources.push_back(
        captures.empty()
            ? RandomRow(ShapeOfFlags(), absl::GetFlag(FLAGS_tokens), r, attention::kTreeIndexes,
                        building, SegmentCut::kOfDevice, queries)
            : CapturedRow(captures[r % captures.size()], attention::kTreeIndexes, building));
  }
  return StepRows(std::move(sources));
}

// Of a flag: numbers above 0 and below `limit`.
std::vector<double> Numbers(const char* flag, const std::vector<std::string>& texts, double limit) {
  std::vector<double> numbers;
  for (const std::string& text : texts) {
    double number = 0;
    if (!absl::SimpleAtod(text, &number) || !(number > 0 && number < limit)) {
      Must(absl::InvalidArgumentError(absl::StrCat(
          flag, " has \"", text, "\"; allowed are numbers above 0 and below ", limit)));
    }
    numbers.push_back(number);
  }
  return numbers;
}

int Main(const std::vector<std::string>& captures) {
  const std::vector<double> budgets = Numbers("budgets", absl::GetFlag(FLAGS_budgets), 1);
  StepRows rows = MakeRows(captures);
  const ModelShape& shape = rows.shape();
  std::printf(
      "\n%u x %llu tokens, %u query heads, %u KV heads of %u; pages of a layer: %.0f MB%s\n",
      absl::GetFlag(FLAGS_rows), static_cast<unsigned long long>(rows.tokens()), shape.query_heads,
      shape.kv_heads, shape.head_dim, static_cast<double>(rows.PayloadBytes()) / 1e6,
      captures.empty() ? "; random keys" : "");
  const uint32_t page_bytes = gpu::PageBytesOf(gpu::KernelShapeOf(shape));
  const ReadCeiling ceiling(rows, page_bytes,
                            Numbers("ceiling_mb", absl::GetFlag(FLAGS_ceiling_mb), kCeilingMbMax));
  PagingTable table(page_bytes, &ceiling);
  Answers::Counts counts;
  for (const auto text : absl::StrSplit(absl::GetFlag(FLAGS_policies), ' ', absl::SkipEmpty())) {
    Answers answers(&counts);
    Measurement measurement(&rows, std::string(text), &table, &answers);
    measurement.Resident();
    for (const double budget : budgets) measurement.Budget(budget);
  }
  std::printf("%llu of %llu steps over a part of the pages differ from those over all pages\n",
              static_cast<unsigned long long>(counts.wrong),
              static_cast<unsigned long long>(counts.compared));
  return counts.wrong == 0 && (counts.compared > 0 || budgets.empty()) ? 0 : 1;
}

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  const std::vector<char*> arguments = absl::ParseCommandLine(argc, argv);
  return attnd::bench::Main({arguments.begin() + 1, arguments.end()});
}
