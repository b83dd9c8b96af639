// SPDX-License-Identifier: Apache-2.0
//
// gpu/cuda/host_memory.cuh on the emulated device: what its functions do is said there. No kernel
// may touch the host's memory otherwise, so that the checks of memory look away here.
#ifndef ATTND_GPU_CUDA_HOST_MEMORY_CUH_
#define ATTND_GPU_CUDA_HOST_MEMORY_CUH_

#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace attnd::gpu {

__attribute__((no_sanitize("thread"))) inline uint32_t PeekHostWord(const uint32_t* word) {
  return *const_cast<const volatile uint32_t*>(word);
}
__attribute__((no_sanitize("thread"))) inline uint32_t LoadHostWord(const uint32_t* word) {
  const uint32_t value = PeekHostWord(word);
  std::atomic_thread_fence(std::memory_order_acquire);
  return value;
}

// Long beside a device's pause: the host is a thread that this one may keep from its core.
inline void PauseForHost() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }
inline void PauseForNear() { PauseForHost(); }

// Threads of a kernel are fibers of one of the system's, which SetHostWord orders.
inline void FenceForHost() {}

__attribute__((no_sanitize("thread"))) inline void SetHostWord(uint32_t* word, uint32_t value) {
  std::atomic_thread_fence(std::memory_order_release);
  *const_cast<volatile uint32_t*>(word) = value;
}
__attribute__((no_sanitize("thread"))) inline void SetHostWords(uint64_t* pair, uint32_t first,
                                                                uint32_t second) {
  std::atomic_thread_fence(std::memory_order_release);
  *const_cast<volatile uint64_t*>(pair) = uint64_t{second} << 32 | first;
}

__attribute__((no_sanitize("thread"))) inline uint4 LoadHost(const uint4* from) { return *from; }
__attribute__((no_sanitize("thread"))) inline uint2 LoadHost(const uint2* from) { return *from; }

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_HOST_MEMORY_CUH_
