// SPDX-License-Identifier: Apache-2.0
//
// Goal: what the device builds is a segment's index as docs/POLICIES.md defines it.
// Method: seeded random keys and values, common and degenerate, go through BuildIndexes twice. A
// plain reference in double, which shares no code with the kernels, then checks
//   - structure: every token once, clusters of tokens in order, payload equal to its source;
//   - every number of the index, recomputed from the device's own clusters;
//   - the sum of squared distances, on average within 1% of Lloyd's algorithm run here;
//   - that both runs gave the same bytes.
// Prints a table; exits with 1 if anything failed. With --bench: device times of 128K tokens x 8 KV
// heads x 32 layers instead.
//
// A program of its own, built on a machine with a GPU by nvcc alone, from the repository root:
//   nvcc -std=c++20 --expt-relaxed-constexpr -arch=sm_90 -O3 -I. -Xcompiler -pthread -o index_check
//        tests/gpu/index_check.cu tests/gpu/index_check_bench.cu gpu/cuda/index/index_*.cu
#include <algorithm>
#include <array>
#include <cstdio>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "gpu/cuda/index/index_build.cuh"
#include "tests/gpu/index_check_bench.cuh"
#include "tests/gpu/index_check_head.cuh"
#include "tests/gpu/index_check_support.cuh"

namespace attnd::gpu::test {
namespace {

using cuda::BuildIndexes;
using cuda::BuildScratchBytes;

// Bound of the objective's mean over a case's heads, relative to the reference's.
constexpr double kMeanRatioMax = 1.01;

double ScaleOf(const Case& c) {
  const bool half = c.shape.dtype == DType::kFp16;
  if (c.data == Data::kHuge) return half ? 1e3 : 1e30;
  if (c.data == Data::kTiny) return half ? 1e-5 : 1e-30;
  return 1;
}

HeadRows MakeRows(const Case& c, uint32_t head) {
  std::mt19937_64 random(c.seed * 1000003ull + head);
  std::normal_distribution<double> normal;
  const uint32_t dim = c.shape.head_dim, value_dim = c.shape.value_dim;
  const uint32_t centres = c.data == Data::kEqualKeys ? 1
                           : c.data == Data::kFewKeys ? 5
                                                      : std::max(2u, c.tokens / 12);
  const double noise = c.data == Data::kEqualKeys || c.data == Data::kFewKeys ? 0 : 1.5;
  std::vector<double> key_centres(size_t{centres} * dim),
      value_centres(size_t{centres} * value_dim);
  for (double& x : key_centres) x = normal(random);
  for (double& x : value_centres) x = normal(random);
  HeadRows rows;
  rows.keys.resize(size_t{c.tokens} * dim);
  rows.values.resize(size_t{c.tokens} * value_dim);
  uint32_t centre = 0;
  for (uint32_t t = 0; t < c.tokens; ++t) {
    // Neighbours are often alike.
    if (random() % 3 != 0) centre = static_cast<uint32_t>(random() % centres);
    const bool outlier = c.data == Data::kOutlier && t == c.tokens / 2;
    for (uint32_t k = 0; k < dim; ++k) {
      double x = key_centres[size_t{centre} * dim + k] + noise * normal(random);
      if (k % 29 == 3) x = 2 * x + 12;  // channels with a mean
      if (outlier) x *= 2000;
      rows.keys[size_t{t} * dim + k] = FromDouble(c.shape.dtype, x * ScaleOf(c));
    }
    for (uint32_t k = 0; k < value_dim; ++k) {
      const double x = value_centres[size_t{centre} * value_dim + k] + 0.5 * normal(random);
      rows.values[size_t{t} * value_dim + k] = FromDouble(c.shape.dtype, x);
    }
  }
  return rows;
}

// The rows of all heads of one job, in tail blocks that lie in memory last first.
std::vector<std::byte> TailBlocks(const Case& c, const Layout& layout, const HeadRows* heads,
                                  uint32_t block_count) {
  const size_t run_bytes = kTailBlockTokens / kPageTokens * layout.page_bytes;
  std::vector<std::byte> blocks(block_count * c.kv_heads * run_bytes, std::byte{0x7f});
  for (uint32_t h = 0; h < c.kv_heads; ++h) {
    for (uint32_t t = 0; t < c.tokens; ++t) {
      const uint32_t place = c.first_row + t;
      std::byte* run = blocks.data() +
                       ((block_count - 1 - place / kTailBlockTokens) * c.kv_heads + h) * run_bytes;
      std::memcpy(run + layout.Key(place % kTailBlockTokens),
                  heads[h].keys.data() + size_t{t} * c.shape.head_dim, layout.key_bytes);
      std::memcpy(run + layout.Value(place % kTailBlockTokens),
                  heads[h].values.data() + size_t{t} * c.shape.value_dim, layout.value_bytes);
    }
  }
  return blocks;
}

// Builds the case's indexes, twice: [2] of all index bytes, then all payload bytes.
std::array<std::vector<std::byte>, 2> BuildTwice(const Case& c, const Layout& layout,
                                                 const std::vector<HeadRows>& rows) {
  const uint32_t block_count = (c.first_row + c.tokens + kTailBlockTokens - 1) / kTailBlockTokens;
  const size_t run_bytes = kTailBlockTokens / kPageTokens * layout.page_bytes;
  const size_t block_bytes = c.kv_heads * run_bytes;
  const size_t index_bytes = size_t{c.jobs} * c.kv_heads * layout.head_bytes;
  DeviceBytes tail(c.jobs * block_count * block_bytes);
  DeviceBytes pointers(c.jobs * block_count * sizeof(std::byte*));
  DeviceBytes output(index_bytes + c.jobs * c.kv_heads * layout.pages_bytes);
  DeviceBytes device_jobs(c.jobs * sizeof(IndexJob));
  DeviceBytes scratch(c.jobs * BuildScratchBytes(c.shape, c.kv_heads, c.tokens));

  std::vector<std::byte> all_blocks;
  std::vector<const std::byte*> addresses;
  std::vector<IndexJob> jobs;
  for (uint32_t j = 0; j < c.jobs; ++j) {
    const auto blocks = TailBlocks(c, layout, rows.data() + j * c.kv_heads, block_count);
    all_blocks.insert(all_blocks.end(), blocks.begin(), blocks.end());
    for (uint32_t b = 0; b < block_count; ++b) {
      addresses.push_back(tail.data() + (j * block_count + block_count - 1 - b) * block_bytes);
    }
    IndexJob job = {};
    job.tail_blocks =
        reinterpret_cast<const std::byte* const*>(pointers.data()) + size_t{j} * block_count;
    job.tail_block_head_bytes = run_bytes;
    job.first_row = c.first_row;
    job.tokens = c.tokens;
    job.unclustered = c.unclustered;
    job.max_clusters = layout.max_clusters;
    job.kv_heads = c.kv_heads;
    job.index = output.data() + j * c.kv_heads * layout.head_bytes;
    job.pages = output.data() + index_bytes + j * c.kv_heads * layout.pages_bytes;
    job.index_head_bytes = layout.head_bytes;
    job.pages_head_bytes = layout.pages_bytes;
    job.offsets = layout.offsets;
    jobs.push_back(job);
  }
  tail.Upload(all_blocks.data());
  pointers.Upload(addresses.data());
  device_jobs.Upload(jobs.data());

  std::array<std::vector<std::byte>, 2> results;
  for (int run = 0; run < 2; ++run) {
    CHECK_CUDA(cudaMemset(output.data(), 0xab, output.size()));
    CHECK_CUDA(cudaMemset(scratch.data(), run == 0 ? 0xff : 0x3c, scratch.size()));
    CHECK_CUDA(BuildIndexes(c.shape, jobs[0], reinterpret_cast<IndexJob*>(device_jobs.data()),
                            c.jobs, scratch.data(), nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    results[static_cast<size_t>(run)] = output.Download();
  }
  return results;
}

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
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace attnd::gpu::test

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--bench") {
    for (const uint32_t layers : {32u, 8u, 1u}) attnd::gpu::test::BenchIndexes(layers);
    return 0;
  }
  return attnd::gpu::test::RunChecks();
}
