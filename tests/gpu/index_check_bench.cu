// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdio>
#include <vector>

#include "gpu/cuda/index/index_build.cuh"
#include "tests/gpu/index_check_bench.cuh"
#include "tests/gpu/index_check_support.cuh"

namespace attnd::gpu::test {
namespace {

using cuda::BuildIndexes;
using cuda::BuildScratchBytes;
using cuda::IndexLaunch;
using cuda::IndexLaunchListener;
using cuda::kIndexLaunches;

__device__ uint32_t Hash(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x >> 32);
}

// About normal.
__device__ float Noise(uint64_t x) {
  float sum = 0;
  for (uint32_t i = 0; i < 4; ++i) sum += static_cast<float>(Hash(x * 4 + i)) * 0x1p-32f;
  return (sum - 2) * 1.732f;
}

// A mixture of 700 centres for each run of `layer_rows` rows. rows: [elements / dim][dim].
__global__ void FillKernel(__nv_bfloat16* rows, size_t elements, uint32_t dim, size_t layer_rows) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += stride) {
    const size_t row = i / dim, channel = i % dim;
    const uint64_t centre = row / layer_rows * 700 + Hash(row + 77) % 700;
    const float mean = channel % 29 == 3 ? 10 : 0;
    rows[i] =
        __float2bfloat16_rn(mean + Noise(centre * dim + channel) + 0.6f * Noise((1ull << 40) + i));
  }
}

// Time from each launch to the next, by kind of launch.
class LaunchTimer : public IndexLaunchListener {
 public:
  void Launching(IndexLaunch launch, cudaStream_t stream) override {
    launches_.push_back(launch);
    Mark(stream);
  }
  void Mark(cudaStream_t stream) {
    cudaEvent_t event;
    CHECK_CUDA(cudaEventCreate(&event));
    CHECK_CUDA(cudaEventRecord(event, stream));
    events_.push_back(event);
  }
  // Seconds of each kind of launch; after a last Mark and synchronisation.
  std::array<double, kIndexLaunches> Seconds() const {
    std::array<double, kIndexLaunches> seconds = {};
    for (size_t i = 0; i < launches_.size(); ++i) {
      float ms = 0;
      CHECK_CUDA(cudaEventElapsedTime(&ms, events_[i], events_[i + 1]));
      seconds[static_cast<size_t>(launches_[i])] += ms / 1e3;
    }
    return seconds;
  }

 private:
  std::vector<IndexLaunch> launches_;
  std::vector<cudaEvent_t> events_;  // the process ends soon after
};

// Segments of one size at `layers` layers, all built by one call.
class Bench {
 public:
  static constexpr KernelShape kShape = {DType::kBf16, 128, 128};
  static constexpr uint32_t kHeads = 8;

  Bench(uint32_t layers, bool tree, uint32_t tokens)
      : layers_(layers),
        layout_(kShape, tokens, 0, tree ? kTreeTokens : RowTokens{}),
        tail_(size_t{layers} * kHeads * layout_.pages_bytes),
        pointers_(layers * (tokens / kTailBlockTokens) * sizeof(std::byte*)),
        index_(size_t{layers} * kHeads * layout_.head_bytes),
        pages_(size_t{layers} * kHeads * layout_.pages_bytes),
        jobs_(layers * sizeof(IndexJob)),
        scratch_(layers * BuildScratchBytes(kShape, kHeads, layout_.sizes())) {
    const uint32_t blocks = tokens / kTailBlockTokens;
    const size_t run_bytes = kTailBlockTokens / kPageTokens * layout_.page_bytes;
    // Heads of a layer share centres; keys and values too, which does no harm here.
    FillKernel<<<132 * 16, 256>>>(reinterpret_cast<__nv_bfloat16*>(tail_.data()), tail_.size() / 2,
                                  128, tail_.size() / layers / 256);
    CHECK_CUDA(cudaDeviceSynchronize());
    std::vector<const std::byte*> addresses;
    std::vector<IndexJob> jobs;
    for (uint32_t l = 0; l < layers; ++l) {
      for (uint32_t b = 0; b < blocks; ++b) {
        addresses.push_back(tail_.data() + (size_t{l} * blocks + b) * kHeads * run_bytes);
      }
      IndexJob job = {};
      job.tail_blocks =
          reinterpret_cast<const std::byte* const*>(pointers_.data()) + size_t{l} * blocks;
      job.tail_block_head_bytes = run_bytes;
      job.tokens = tokens;
      job.max_clusters = layout_.max_clusters;
      job.max_groups = layout_.max_groups;
      job.kv_heads = kHeads;
      job.index = index_.data() + size_t{l} * kHeads * layout_.head_bytes;
      job.pages = pages_.data() + size_t{l} * kHeads * layout_.pages_bytes;
      job.index_head_bytes = layout_.head_bytes;
      job.pages_head_bytes = layout_.pages_bytes;
      job.offsets = layout_.offsets;
      job.tree = layout_.tree;
      jobs.push_back(job);
    }
    pointers_.Upload(addresses.data());
    jobs_.Upload(jobs.data());
    first_job_ = jobs[0];
  }

  void Build(IndexLaunchListener* listener) {
    CHECK_CUDA(BuildIndexes(kShape, first_job_, reinterpret_cast<IndexJob*>(jobs_.data()), layers_,
                            scratch_.data(), nullptr, listener));
  }
  size_t scratch_bytes() const { return scratch_.size(); }

 private:
  const uint32_t layers_;
  const Layout layout_;
  DeviceBytes tail_, pointers_, index_, pages_, jobs_, scratch_;
  IndexJob first_job_;
};

}  // namespace

void BenchIndexes(uint32_t layers, bool tree, uint32_t segment_tokens) {
  constexpr uint32_t kTokens = 131072, kLayers = 32;
  const uint32_t segments = kTokens / segment_tokens;
  Bench bench(layers, tree, segment_tokens);
  const uint32_t calls = segments * kLayers / layers;
  bench.Build(nullptr);
  CHECK_CUDA(cudaDeviceSynchronize());

  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  CHECK_CUDA(cudaEventRecord(begin));
  for (uint32_t i = 0; i < calls; ++i) bench.Build(nullptr);
  CHECK_CUDA(cudaEventRecord(end));
  CHECK_CUDA(cudaDeviceSynchronize());
  float ms = 0;
  CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
  std::printf(
      "%s of %u tokens, %u layers a call (scratch %.1f MB): %u calls, %.4f s together, %.3f ms "
      "each\n",
      tree ? "trees" : "clusters", segment_tokens, layers,
      static_cast<double>(bench.scratch_bytes()) / 1e6, calls, ms / 1e3, ms / calls);

  LaunchTimer timer;
  for (uint32_t i = 0; i < calls; ++i) bench.Build(&timer);
  timer.Mark(nullptr);
  CHECK_CUDA(cudaDeviceSynchronize());
  const auto seconds = timer.Seconds();
  constexpr const char* kNames[kIndexLaunches] = {"centre", "seed",     "assign", "sort",
                                                  "move",   "describe", "gather", "leaves",
                                                  "means",  "moments",  "axes",   "slopes"};
  double sum = 0;
  for (uint32_t s = 0; s < kIndexLaunches; ++s) {
    if (seconds[s] == 0) continue;
    std::printf("  %-8s %.4f s\n", kNames[s], seconds[s]);
    sum += seconds[s];
  }
  // Of a tree: of its groups, whose points are keys and values.
  const double row = (tree ? 256.0 / kTreeTokens.group : 128.0 / kClusterTokens) * segment_tokens;
  const double products = 2.0 * kTokens * row * Bench::kHeads * kLayers * kIterations;
  std::printf("  sum      %.4f s with events between; assign at %.0f TFLOP/s\n", sum,
              products / seconds[static_cast<size_t>(IndexLaunch::kAssign)] / 1e12);
}

}  // namespace attnd::gpu::test
