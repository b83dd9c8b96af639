// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/emulated/faulty_kernels.h"

#include "gpu/cuda/instructions.cuh"
#include "gpu/cuda/launch.h"

namespace attnd::gpu::emulated {
namespace {

constexpr uint32_t kThreads = 64;

uint32_t Thread() { return blockIdx.x * kThreads + threadIdx.x; }

}  // namespace

void ReadsANeighboursWord(uint32_t* words, bool right) {
  __shared__ uint32_t shared[kThreads];
  shared[threadIdx.x] = Thread();
  if (right) __syncthreads();
  words[Thread()] = shared[kThreads - 1 - threadIdx.x];
}

void ReadsANeighboursWordInItsWarp(uint32_t* words, bool right) {
  __shared__ uint32_t shared[kThreads];
  shared[threadIdx.x] = Thread();
  if (right) __syncwarp();
  words[Thread()] = shared[threadIdx.x ^ 1];
}

void OverwritesWhatIsRead(uint32_t* words, bool right) {
  __shared__ uint32_t shared;
  for (uint32_t i = 0; i < 4; ++i) {
    if (threadIdx.x == i) shared = i;
    __syncthreads();
    words[Thread()] = shared;
    if (right) __syncthreads();
  }
}

void LeavesDeviceMemory(uint32_t* words, bool right) { words[Thread() + (right ? 0 : 1)] = 1; }

void LeavesSharedMemory(uint32_t* words, bool right) {
  auto* shared = reinterpret_cast<uint32_t*>(block_memory);
  shared[threadIdx.x + (right ? 0 : 1)] = 1;
  words[Thread()] = shared[threadIdx.x + (right ? 0 : 1)];
}

void LeavesAnArray(uint32_t* words, bool right) {
  __shared__ uint32_t shared[2][kThreads];
  shared[0][threadIdx.x] = shared[1][threadIdx.x] = 0;
  __syncthreads();
  words[Thread()] = shared[0][threadIdx.x + (right ? 0 : 1)];
}

void LoadsUnaligned(uint32_t* words, bool right) {
  const auto* pair = reinterpret_cast<const uint2*>(words + (right ? 0 : 1));
  __syncthreads();
  const uint32_t sum = pair->x + pair->y;
  if (sum != 0) words[Thread()] = sum;
}

void ReadsWhatNobodyWrote(uint32_t* words, bool right) {
  __shared__ uint32_t shared[kThreads];
  if (right) shared[threadIdx.x] = 0;
  words[Thread()] = shared[threadIdx.x];
}

void ReadsBeforeTheCopyHasEnded(uint32_t* words, bool right) {
  const uint32_t place = threadIdx.x * 16;
  const auto* from = reinterpret_cast<const std::byte*>(words + blockIdx.x * kThreads);
  if (place < kThreads * sizeof(uint32_t)) CopyAsync16(place, from + place);
  CommitCopies();
  if (right) WaitCopies<0>();
  __syncthreads();
  words[Thread()] = reinterpret_cast<const uint32_t*>(block_memory)[threadIdx.x];
}

void AddsWithoutAtomics(uint32_t* words, bool right) {
  if (right) {
    atomicAdd(words, 1);
  } else {
    *words += 1;
  }
}

void WritesAcrossBlocks(uint32_t* words, bool right) {
  words[right ? Thread() : kThreads - 1 - threadIdx.x] = Thread();
}

void ShufflesBesideABarrier(uint32_t* words, bool right) {
  if (right || threadIdx.x % 2 == 0) {
    words[Thread()] = __shfl_sync(~0u, Thread(), 0);
  } else {
    __syncwarp();
  }
}

void LeavesABarrierOut(uint32_t* words, bool right) {
  if (right || threadIdx.x < kThreads / 2) __syncthreads();
  words[Thread()] = 1;
}

void RunFaulty(FaultyKernel kernel, bool right, uint32_t (&words)[kFaultyWords]) {
  void* memory = nullptr;
  cudaStream_t stream = nullptr;
  cudaMalloc(&memory, sizeof words);
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaMemsetAsync(memory, 0, sizeof words, stream);
  Launch(kernel, kFaultyWords / kThreads, kThreads, kThreads * sizeof(uint32_t), stream,
         static_cast<uint32_t*>(memory), right);
  cudaMemcpyAsync(words, memory, sizeof words, cudaMemcpyDeviceToHost, stream);
  cudaStreamDestroy(stream);
  cudaFree(memory);
}

}  // namespace attnd::gpu::emulated
