// SPDX-License-Identifier: Apache-2.0
//
// Goal: what the device builds is a segment's index as docs/POLICIES.md defines it.
// Method: seeded random keys and values, common and degenerate, go through BuildIndexes twice. A
// plain reference in double, which shares no code with the kernels, then checks
//   - structure: every token once, clusters of tokens in order, payload equal to its source;
//   - every number of the index, recomputed from the device's own clusters;
//   - the sum of squared distances, on average within 1% of Lloyd's algorithm run here;
//   - that both runs gave the same bytes.
// Then the same of trees (tree_check.cuh). Prints tables; exits with 1 if anything failed. With
// --trees [TEXT]: trees alone, of the cases whose names contain TEXT. With --bench: device times of
// 128K tokens x 8 KV heads x 32 layers instead.
//
// A program of its own, built on a machine with a GPU by nvcc alone, from the repository root:
//   nvcc -std=c++20 --expt-relaxed-constexpr -arch=sm_90 -O3 -I. -Xcompiler -pthread -o index_check
//        tests/gpu/index_check*.cu tests/gpu/tree_check*.cu
//        gpu/cuda/index/index_*.cu gpu/cuda/index/tree_*.cu
#include <algorithm>
#include <array>
#include <cstdio>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/index_check_bench.cuh"
#include "tests/gpu/index_check_build.cuh"
#include "tests/gpu/index_check_head.cuh"
#include "tests/gpu/index_check_support.cuh"
#include "tests/gpu/tree_check.cuh"

namespace attnd::gpu::test {
namespace {

// Bound of the objective's mean over a case's heads, relative to the reference's.
constexpr double kMeanRatioMax = 1.01;

// Prints the case's line; false if it failed.
bool RunCase(const Case& c) {
  const Layout layout(c.shape, c.tokens, c.unclustered);
  const uint32_t heads = c.jobs * c.kv_heads;
  std::vector<HeadRows> rows(heads);
  std::vector<Findings> findings(heads);
  const auto on_threads = [&](auto work) {
    std::vector<std::thread> threads;
    for (uint32_t h = 0; h < heads; ++h) threads.emplace_back(work, h);
    for (std::thread& thread : threads) thread.join();
  };
  on_threads([&](uint32_t h) { rows[h] = MakeRows(c, h); });
  const auto results = BuildTwice(c, layout, rows);
  const std::byte* pages = results[0].data() + heads * layout.head_bytes;
  on_threads([&](uint32_t h) {
    findings[h] = HeadCheck(c, rows[h], results[0].data() + h * layout.head_bytes,
                            pages + h * layout.pages_bytes)
                      .Run();
  });

  std::string failure = results[0] == results[1] ? "" : "two runs differ";
  uint32_t clusters_min = ~0u, clusters_max = 0, greatest = 0;
  double ratio_min = 1e300, ratio_max = 0, ratio_sum = 0, code_error = 0;
  for (const Findings& f : findings) {
    if (failure.empty()) failure = f.failure;
    clusters_min = std::min(clusters_min, f.clusters);
    clusters_max = std::max(clusters_max, f.clusters);
    greatest = std::max(greatest, f.greatest);
    ratio_min = std::min(ratio_min, f.objective_ratio);
    ratio_max = std::max(ratio_max, f.objective_ratio);
    ratio_sum += f.objective_ratio;
    code_error = std::max(code_error, f.code_error);
  }
  if (failure.empty() && !(ratio_sum / heads <= kMeanRatioMax)) failure = "objective, on average";
  std::printf("%-26s %s %3ux%-3u %6u %3u %4u-%-4u/%-4u %6u  %.5f-%.5f  %.6f  %s%s\n", c.name,
              c.shape.dtype == DType::kFp16 ? "fp16" : "bf16", c.shape.head_dim, c.shape.value_dim,
              c.tokens, c.unclustered, clusters_min, clusters_max, layout.max_clusters, greatest,
              ratio_min, ratio_max, code_error,
              failure.empty() ? "ok" : "FAILED: ", failure.c_str());
  if (!failure.empty()) std::printf("  seed %u, first row %u\n", c.seed, c.first_row);
  std::fflush(stdout);
  return failure.empty();
}

// Whether each of kKernelShapes has a case; names one that has none.
bool HasEveryListedShape(std::span<const Case> cases) {
  for (const KernelShape& shape : kKernelShapes) {
    const bool has_case =
        std::any_of(cases.begin(), cases.end(), [&](const Case& c) { return c.shape == shape; });
    if (has_case) continue;
    std::printf("no case for %s %ux%u\n", shape.dtype == DType::kFp16 ? "fp16" : "bf16",
                shape.head_dim, shape.value_dim);
    return false;
  }
  return true;
}

int RunChecks() {
  constexpr auto kBf16 = DType::kBf16, kFp16 = DType::kFp16;
  const Case cases[] = {
      {"mixture", {kBf16, 128, 128}, 2048, 4, 0, 2, 2, Data::kMixture, 1},
      {"mixture, small heads", {kBf16, 64, 64}, 2048, 4, 17, 2, 2, Data::kMixture, 2},
      {"mixture, unequal dims", {kBf16, 192, 128}, 1536, 0, 63, 1, 3, Data::kMixture, 3},
      {"mixture, large heads", {kBf16, 256, 256}, 1536, 4, 5, 1, 2, Data::kMixture, 4},
      {"mixture", {kFp16, 128, 128}, 2048, 0, 9, 2, 2, Data::kMixture, 5},
      {"mixture, small heads", {kFp16, 64, 64}, 2048, 64, 0, 1, 3, Data::kMixture, 6},
      {"mixture, unequal dims", {kFp16, 192, 128}, 1024, 4, 33, 2, 1, Data::kMixture, 7},
      {"mixture, large heads", {kFp16, 256, 256}, 1024, 0, 0, 2, 2, Data::kMixture, 8},
      {"usual segment", {kBf16, 128, 128}, 8192, 4, 0, 1, 2, Data::kMixture, 9},
      {"least usual segment", {kBf16, 128, 128}, 512, 0, 40, 3, 8, Data::kMixture, 10},
      {"no multiple of 16", {kBf16, 128, 128}, 1237, 4, 3, 2, 2, Data::kMixture, 11},
      {"more clusters than tiles", {kBf16, 64, 64}, 20011, 7, 3, 1, 2, Data::kMixture, 12},
      {"one token and the sink", {kBf16, 128, 128}, 5, 4, 62, 2, 3, Data::kMixture, 13},
      {"one token", {kFp16, 64, 64}, 1, 0, 63, 1, 1, Data::kMixture, 14},
      {"17 tokens", {kBf16, 128, 128}, 17, 0, 1, 1, 2, Data::kMixture, 15},
      {"equal keys", {kBf16, 128, 128}, 2048, 4, 0, 1, 2, Data::kEqualKeys, 16},
      {"equal keys", {kFp16, 64, 64}, 1000, 0, 0, 1, 2, Data::kEqualKeys, 17},
      {"five keys", {kBf16, 128, 128}, 8000, 4, 0, 1, 2, Data::kFewKeys, 18},
      {"five keys", {kFp16, 256, 256}, 4000, 0, 0, 1, 2, Data::kFewKeys, 19},
      {"outlier", {kBf16, 128, 128}, 2048, 4, 0, 1, 2, Data::kOutlier, 20},
      {"outlier", {kFp16, 128, 128}, 2048, 4, 0, 1, 2, Data::kOutlier, 21},
      {"huge keys", {kBf16, 128, 128}, 2048, 4, 0, 1, 2, Data::kHuge, 22},
      {"huge keys", {kFp16, 128, 128}, 2048, 4, 0, 1, 2, Data::kHuge, 23},
      {"tiny keys", {kBf16, 128, 128}, 2048, 4, 0, 1, 2, Data::kTiny, 24},
      {"tiny keys", {kFp16, 128, 128}, 2048, 4, 0, 1, 2, Data::kTiny, 25},
      {"greatest segment", {kBf16, 64, 64}, 65536, 4, 11, 1, 1, Data::kFewKeys, 26},
  };
  if (!HasEveryListedShape(cases)) return 1;
  std::printf("%-26s dtype  dims tokens out clusters/most     size  objective         code\n",
              "case");
  int failed = 0;
  for (const Case& c : cases) failed += !RunCase(c);
  std::printf("%d of %zu cases failed\n", failed, std::size(cases));
  failed += RunTreeChecks();
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace attnd::gpu::test

int main(int argc, char** argv) {
  const std::string option = argc > 1 ? argv[1] : "";
  if (option == "--trees") {
    return attnd::gpu::test::RunTreeChecks(argc > 2 ? argv[2] : "") == 0 ? 0 : 1;
  }
  if (option == "--bench") {
    for (const bool tree : {false, true}) {
      for (const uint32_t layers : {32u, 8u, 1u}) {
        attnd::gpu::test::BenchIndexes(layers, tree, 8192);
      }
    }
    // As long prompts have them.
    for (const uint32_t layers : {8u, 1u}) attnd::gpu::test::BenchIndexes(layers, true, 32768);
    return 0;
  }
  return attnd::gpu::test::RunChecks();
}
