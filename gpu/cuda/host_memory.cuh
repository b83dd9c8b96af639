// SPDX-License-Identifier: Apache-2.0
//
// Pinned memory that the host writes, or reads, while a kernel runs, for which C++ has no words: as
// instructions.cuh, tests run it over a form in C++ (tests/gpu/emulated).
#ifndef ATTND_GPU_CUDA_HOST_MEMORY_CUH_
#define ATTND_GPU_CUDA_HOST_MEMORY_CUH_

#include <cstdint>

namespace attnd::gpu {

// Waits until a word is not 0, by one thread. What the host wrote before is there for that thread,
// for those that it meets at a barrier, and for what follows the kernel.
__device__ __forceinline__ void AwaitHostWord(const uint32_t* word) {
  // A kernel that reads host memory without a pause holds up those beside it (docs/PERFORMANCE.md,
  // "A model server's loop on one GPU").
  constexpr unsigned kPauseNanos = 500;
  while (true) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    if (value != 0) return;
    __nanosleep(kPauseNanos);
  }
}

// What the thread has written is there for the host before what it writes next.
__device__ __forceinline__ void FenceForHost() { __threadfence_system(); }

// Sets a word to 1 that the host looks at.
__device__ __forceinline__ void SetHostWord(uint32_t* word) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(1) : "memory");
}

// Not from a cache that may have what was there before.
__device__ __forceinline__ uint4 LoadHost(const uint4* from) { return __ldcv(from); }

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_HOST_MEMORY_CUH_
