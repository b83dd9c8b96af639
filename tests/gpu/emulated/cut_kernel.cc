// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/emulated/cut_kernel.h"

#include <cstdlib>

#include "gpu/cuda/step/cluster_launch.h"
#include "gpu/cuda/step/tree_cut.cuh"

namespace attnd::gpu::emulated {
namespace {

// In device memory.
struct DeviceRanking {
  const uint32_t* keys;
  const uint64_t* weights;  // null: each row weighs 1
  uint32_t count;
  CutLimit kind;
  uint64_t weight;
  uint8_t* taken;
};

template <typename WeightOf>
void Mark(const DeviceRanking& ranking, uint32_t begin, uint32_t own, const WeightOf& weight_of,
          CutExchange* exchange, CutMemory* memory) {
  CutFinder cut({ranking.keys + begin, own}, ranking.kind, ranking.weight, weight_of, memory);
  FindCut(&cut, exchange);
  for (uint32_t first = 0; first < own; first += kCutThreads) {
    const uint32_t i = first + threadIdx.x;
    const bool takes = cut.TakesInOrder(i);
    if (i < own) ranking.taken[begin + i] = takes ? 1 : 0;
  }
}

void CutKernel(DeviceRanking ranking) {
  auto* memory = reinterpret_cast<CutMemory*>(block_memory);
  CutExchange exchange(memory);
  const uint32_t each = (ranking.count + CutBlocks::blocks() - 1) / CutBlocks::blocks();
  const uint32_t begin = min(CutBlocks::rank() * each, ranking.count);
  const uint32_t own = min(each, ranking.count - begin);
  exchange.Begin();
  if (ranking.weights == nullptr) {
    Mark(ranking, begin, own, OneEach(), &exchange, memory);
  } else {
    const WeightBy weight_of{
        [&](uint32_t i) { return static_cast<CutWeight>(ranking.weights[begin + i]); }};
    Mark(ranking, begin, own, weight_of, &exchange, memory);
  }
}

}  // namespace

std::vector<uint8_t> TakenOf(const Ranking& ranking, uint32_t blocks) {
  const size_t count = ranking.keys.size(), key_bytes = count * sizeof(uint32_t);
  const size_t weight_bytes = ranking.weights.size() * sizeof(uint64_t);
  void *keys = nullptr, *weights = nullptr, *taken = nullptr;
  cudaStream_t stream = nullptr;
  cudaMalloc(&keys, key_bytes);
  cudaMalloc(&taken, count);
  if (weight_bytes > 0) cudaMalloc(&weights, weight_bytes);
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaMemcpyAsync(keys, ranking.keys.data(), key_bytes, cudaMemcpyHostToDevice, stream);
  if (weight_bytes > 0) {
    cudaMemcpyAsync(weights, ranking.weights.data(), weight_bytes, cudaMemcpyHostToDevice, stream);
  }
  const DeviceRanking of = {static_cast<uint32_t*>(keys),
                            static_cast<uint64_t*>(weights),
                            static_cast<uint32_t>(count),
                            ranking.takes ? CutLimit::kTaken : CutLimit::kLeft,
                            ranking.weight,
                            static_cast<uint8_t*>(taken)};
  cudaError_t error = ClusterLaunch::Allow(CutKernel, sizeof(CutMemory));
  const ClusterLaunch launch(1, blocks, kCutThreads, sizeof(CutMemory), /*overlap=*/false, stream);
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&launch.config(), CutKernel, of);
  if (error != cudaSuccess) std::abort();
  std::vector<uint8_t> result(count);
  cudaMemcpyAsync(result.data(), taken, count, cudaMemcpyDeviceToHost, stream);
  cudaStreamDestroy(stream);
  cudaFree(keys);
  if (weights != nullptr) cudaFree(weights);
  cudaFree(taken);
  return result;
}

}  // namespace attnd::gpu::emulated
