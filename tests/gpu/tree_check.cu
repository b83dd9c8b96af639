// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gpu/device/device.h"
#include "tests/gpu/index_check_build.cuh"
#include "tests/gpu/tree_check.cuh"
#include "tests/gpu/tree_check_head.cuh"

namespace attnd::gpu::test {
namespace {

// Bound of the objective's mean over all heads, relative to the reference's.
constexpr double kMeanRatioMax = 1.01;

constexpr auto kBf16 = DType::kBf16, kFp16 = DType::kFp16;
const Case kCases[] = {
    {"mixture", {kBf16, 128, 128}, 2048, 4, 0, 2, 2, Data::kMixture, 1},
    {"mixture, small heads", {kBf16, 64, 64}, 2048, 4, 17, 2, 2, Data::kMixture, 2},
    {"mixture, unequal dims", {kBf16, 192, 128}, 1536, 0, 63, 1, 3, Data::kMixture, 3},
    {"mixture, large heads", {kBf16, 256, 256}, 1024, 4, 5, 1, 2, Data::kMixture, 4},
    {"mixture", {kFp16, 128, 128}, 2048, 0, 9, 2, 2, Data::kMixture, 5},
    {"mixture, small heads", {kFp16, 64, 64}, 2048, 64, 0, 1, 3, Data::kMixture, 6},
    {"mixture, unequal dims", {kFp16, 192, 128}, 1024, 4, 33, 2, 1, Data::kMixture, 7},
    {"mixture, large heads", {kFp16, 256, 256}, 600, 0, 0, 2, 1, Data::kMixture, 8},
    {"usual segment", {kBf16, 128, 128}, 8192, 4, 0, 1, 2, Data::kMixture, 9},
    {"early segment", {kBf16, 128, 128}, 1024, 0, 40, 3, 4, Data::kMixture, 10},
    {"no multiple of 8", {kBf16, 128, 128}, 1237, 4, 3, 2, 2, Data::kMixture, 11},
    {"more groups than tiles", {kBf16, 64, 64}, 20011, 7, 3, 1, 2, Data::kMixture, 12},
    {"one token and the sink", {kBf16, 128, 128}, 5, 4, 62, 2, 3, Data::kMixture, 13},
    {"one token", {kFp16, 64, 64}, 1, 0, 63, 1, 1, Data::kMixture, 14},
    {"65 tokens", {kBf16, 128, 128}, 65, 0, 1, 1, 2, Data::kMixture, 15},
    {"equal keys", {kBf16, 128, 128}, 2048, 4, 0, 1, 2, Data::kEqualKeys, 16},
    {"five keys", {kBf16, 128, 128}, 4000, 4, 0, 1, 2, Data::kFewKeys, 18},
    {"five keys", {kFp16, 256, 256}, 1000, 0, 0, 1, 2, Data::kFewKeys, 19},
    {"outlier", {kBf16, 128, 128}, 2048, 4, 0, 1, 2, Data::kOutlier, 20},
    {"outlier", {kFp16, 128, 128}, 2048, 4, 0, 1, 2, Data::kOutlier, 21},
    {"huge keys", {kFp16, 128, 128}, 2048, 4, 0, 1, 2, Data::kHuge, 23},
    {"tiny keys", {kFp16, 128, 128}, 2048, 4, 0, 1, 2, Data::kTiny, 25},
    {"greatest segment", {kBf16, 64, 64}, 65536, 4, 11, 1, 1, Data::kFewKeys, 26},
    {"fan of 16", {kBf16, 128, 128}, 8192, 4, 0, 1, 2, Data::kMixture, 27, {8, 128}},
    {"fan of 16", {kFp16, 192, 128}, 2048, 4, 0, 1, 2, Data::kMixture, 28, {8, 128}},
    {"leaves of 16", {kBf16, 64, 64}, 4096, 4, 7, 1, 2, Data::kMixture, 29, {16, 256}},
    {"leaves of 16", {kFp16, 256, 256}, 2048, 4, 0, 1, 2, Data::kMixture, 32, {16, 256}},
    {"leaves of 16, fan of 4", {kBf16, 64, 64}, 65536, 4, 0, 1, 1, Data::kFewKeys, 34, {16, 64}},
    {"leaves of 12", {kBf16, 128, 128}, 3001, 4, 7, 1, 2, Data::kMixture, 30, {12, 96}},
    {"fan of 16, five keys", {kBf16, 128, 128}, 4000, 4, 0, 1, 2, Data::kFewKeys, 31, {8, 128}},
};

void OnThreads(uint32_t count, const auto& work) {
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < count; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

// Prints the case's line; false if it failed. Adds its heads' objectives to *ratios.
bool RunCase(const Case& c, std::vector<double>* ratios) {
  const Layout layout(c.shape, c.tokens, c.unclustered, c.tree);
  const uint32_t heads = c.jobs * c.kv_heads;
  std::vector<HeadRows> rows(heads);
  std::vector<TreeFindings> findings(heads);
  OnThreads(heads, [&](uint32_t h) { rows[h] = MakeRows(c, h); });
  const auto results = BuildTwice(c, layout, rows);
  const std::byte* pages = results[0].data() + heads * layout.head_bytes;
  OnThreads(heads, [&](uint32_t h) {
    findings[h] = TreeHeadCheck(c, rows[h], results[0].data() + h * layout.head_bytes,
                                pages + h * layout.pages_bytes)
                      .Run();
  });
  std::string failure = results[0] == results[1] ? "" : "two runs differ";
  if (IndexScratchBytes(c.shape, c.kv_heads, layout.sizes()) <
      cuda::BuildScratchBytes(c.shape, c.kv_heads, layout.sizes())) {
    failure = "the host plans with too little scratch";
  }
  TreeFindings worst;
  worst.objective_ratio = 0;
  double ratio_sum = 0;
  const auto raise = [](auto* most, auto value) { *most = std::max(*most, value); };
  for (const TreeFindings& f : findings) {
    if (failure.empty()) failure = f.failure;
    raise(&worst.leaves, f.leaves);
    raise(&worst.groups, f.groups);
    raise(&worst.greatest, f.greatest);
    raise(&worst.objective_ratio, f.objective_ratio);
    raise(&worst.off_diagonal, f.off_diagonal);
    raise(&worst.slope_error, f.slope_error);
    raise(&worst.deviation_error, f.deviation_error);
    raise(&worst.spread_error, f.spread_error);
    ratio_sum += f.objective_ratio;
    ratios->push_back(f.objective_ratio);
  }
  std::printf(
      "%-23s %s %3ux%-3u %5u %3u %4u/%-4u %4u/%-4u %5u %.5f %.5f %.1e %.1e %.1e %.1e %s%s\n",
      c.name, c.shape.dtype == kFp16 ? "fp16" : "bf16", c.shape.head_dim, c.shape.value_dim,
      c.tokens, c.unclustered, worst.leaves, layout.max_clusters, worst.groups, layout.max_groups,
      worst.greatest, ratio_sum / heads, worst.objective_ratio, worst.off_diagonal,
      worst.slope_error, worst.deviation_error, worst.spread_error,
      failure.empty() ? "ok" : "FAILED: ", failure.c_str());
  if (!failure.empty()) std::printf("  seed %u, first row %u\n", c.seed, c.first_row);
  std::fflush(stdout);
  return failure.empty();
}

}  // namespace

int RunTreeChecks(const std::string& only) {
  int failed = 0;
  for (const KernelShape& shape : kKernelShapes) {
    const bool has_case = std::any_of(std::begin(kCases), std::end(kCases),
                                      [&](const Case& c) { return c.shape == shape; });
    if (!has_case) std::printf("no tree for %ux%u\n", shape.head_dim, shape.value_dim);
    failed += !has_case;
  }
  std::printf(
      "%-23s dtype  dims tokens out leaves/most groups/most size objective: mean, worst; errors of "
      "axes, slopes, deviations, spreads\n",
      "trees");
  std::vector<double> ratios;
  for (const Case& c : kCases) {
    if (std::string(c.name).find(only) != std::string::npos) failed += !RunCase(c, &ratios);
  }
  const double mean = std::accumulate(ratios.begin(), ratios.end(), 0.0) / ratios.size();
  std::printf("objective of all %zu heads, on average: %.5f%s\n", ratios.size(), mean,
              mean <= kMeanRatioMax ? "" : " FAILED");
  failed += !(mean <= kMeanRatioMax);
  std::printf("%d of %zu cases of trees failed\n", failed, std::size(kCases));
  return failed;
}

}  // namespace attnd::gpu::test
