// SPDX-License-Identifier: Apache-2.0
//
// What the checks of index builds build: seeded random rows, and their indexes on the device.
#ifndef ATTND_TESTS_GPU_INDEX_CHECK_BUILD_CUH_
#define ATTND_TESTS_GPU_INDEX_CHECK_BUILD_CUH_

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <vector>

#include "gpu/cuda/index/index_build.cuh"
#include "tests/gpu/index_check_support.cuh"

namespace attnd::gpu::test {

enum class Data {
  kMixture,    // Gaussians around more centres than clusters, a few large channels
  kEqualKeys,  // one key
  kFewKeys,    // five keys: most clusters lose their members, the others have hundreds
  kOutlier,    // a mixture with one token far off
  kHuge,       // a mixture times 1e30 (bf16) or 1e3 (fp16)
  kTiny,       // a mixture times 1e-30 (bf16) or 1e-5 (fp16)
};

struct Case {
  const char* name;
  KernelShape shape;
  uint32_t tokens, unclustered, first_row, jobs, kv_heads;
  Data data;
  uint32_t seed;
  RowTokens tree = kTreeTokens;
};

// Rows of one head of one job.
struct HeadRows {
  std::vector<uint16_t> keys;    // [tokens][head_dim]
  std::vector<uint16_t> values;  // [tokens][value_dim]
};

inline double ScaleOf(const Case& c) {
  const bool half = c.shape.dtype == DType::kFp16;
  if (c.data == Data::kHuge) return half ? 1e3 : 1e30;
  if (c.data == Data::kTiny) return half ? 1e-5 : 1e-30;
  return 1;
}

inline HeadRows MakeRows(const Case& c, uint32_t head) {
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
inline std::vector<std::byte> TailBlocks(const Case& c, const Layout& layout, const HeadRows* heads,
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
inline std::array<std::vector<std::byte>, 2> BuildTwice(const Case& c, const Layout& layout,
                                                        const std::vector<HeadRows>& rows) {
  const uint32_t block_count = (c.first_row + c.tokens + kTailBlockTokens - 1) / kTailBlockTokens;
  const size_t run_bytes = kTailBlockTokens / kPageTokens * layout.page_bytes;
  const size_t block_bytes = c.kv_heads * run_bytes;
  const size_t index_bytes = size_t{c.jobs} * c.kv_heads * layout.head_bytes;
  DeviceBytes tail(c.jobs * block_count * block_bytes);
  DeviceBytes pointers(c.jobs * block_count * sizeof(std::byte*));
  DeviceBytes output(index_bytes + c.jobs * c.kv_heads * layout.pages_bytes);
  DeviceBytes device_jobs(c.jobs * sizeof(IndexJob));
  DeviceBytes scratch(c.jobs * cuda::BuildScratchBytes(c.shape, c.kv_heads, layout.sizes()));

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
    job.max_groups = layout.max_groups;
    job.kv_heads = c.kv_heads;
    job.index = output.data() + j * c.kv_heads * layout.head_bytes;
    job.pages = output.data() + index_bytes + j * c.kv_heads * layout.pages_bytes;
    job.index_head_bytes = layout.head_bytes;
    job.pages_head_bytes = layout.pages_bytes;
    job.offsets = layout.offsets;
    job.tree = layout.tree;
    jobs.push_back(job);
  }
  tail.Upload(all_blocks.data());
  pointers.Upload(addresses.data());
  device_jobs.Upload(jobs.data());

  std::array<std::vector<std::byte>, 2> results;
  for (int run = 0; run < 2; ++run) {
    CHECK_CUDA(cudaMemset(output.data(), 0xab, output.size()));
    CHECK_CUDA(cudaMemset(scratch.data(), run == 0 ? 0xff : 0x3c, scratch.size()));
    CHECK_CUDA(cuda::BuildIndexes(c.shape, jobs[0], reinterpret_cast<IndexJob*>(device_jobs.data()),
                                  c.jobs, scratch.data(), nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    results[static_cast<size_t>(run)] = output.Download();
  }
  return results;
}

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_INDEX_CHECK_BUILD_CUH_
