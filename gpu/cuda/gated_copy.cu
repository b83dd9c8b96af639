// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/gated_copy.h"
#include "gpu/cuda/host_memory.cuh"
#include "gpu/cuda/launch.h"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kThreads = 1024;
// Words that a thread asks for before it has the first: the way to the host is long.
constexpr uint32_t kAtOnce = 4;

__global__ void __launch_bounds__(kThreads)
    GatedCopyKernel(const uint32_t* gate, uint4* to, const uint4* from, uint32_t count) {
  if (threadIdx.x == 0) AwaitHostWord(gate);
  __syncthreads();
  for (uint32_t first = threadIdx.x; first < count; first += kThreads * kAtOnce) {
    uint4 words[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t at = first + i * kThreads;
      if (at < count) words[i] = LoadHost(from + at);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t at = first + i * kThreads;
      if (at < count) to[at] = words[i];
    }
  }
}

}  // namespace

cudaError_t LaunchGatedCopy(const uint32_t* gate, std::byte* to, const std::byte* from,
                            size_t bytes, cudaStream_t stream) {
  if (bytes > kGatedCopyBytesMax) return cudaErrorInvalidValue;
  const auto count = static_cast<uint32_t>((bytes + sizeof(uint4) - 1) / sizeof(uint4));
  return Launch(GatedCopyKernel, 1, kThreads, 0, stream, gate, reinterpret_cast<uint4*>(to),
                reinterpret_cast<const uint4*>(from), count);
}

}  // namespace attnd::gpu::cuda
