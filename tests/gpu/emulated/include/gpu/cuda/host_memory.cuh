// SPDX-License-Identifier: Apache-2.0
//
// gpu/cuda/host_memory.cuh on the emulated device: what its functions do is said there. No kernel
// may touch the host's memory otherwise, so that the checks of memory look away here.
#ifndef ATTND_GPU_CUDA_HOST_MEMORY_CUH_
#define ATTND_GPU_CUDA_HOST_MEMORY_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <thread>

namespace attnd::gpu {

__attribute__((no_sanitize("thread"))) inline void AwaitHostWord(const uint32_t* word) {
  const volatile uint32_t* const look = word;
  while (*look == 0) std::this_thread::yield();
}

// Threads are fibers of one of the system's, which SetHostWord orders.
inline void FenceForHost() {}

__attribute__((no_sanitize("thread"))) inline void SetHostWord(uint32_t* word) {
  __asm__ volatile("" ::: "memory");  // behind what the host will look at
  *const_cast<volatile uint32_t*>(word) = 1;
}

__attribute__((no_sanitize("thread"))) inline uint4 LoadHost(const uint4* from) { return *from; }

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_HOST_MEMORY_CUH_
