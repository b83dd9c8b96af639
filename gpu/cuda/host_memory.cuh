// SPDX-License-Identifier: Apache-2.0
//
// Memory that the host, another GPU, or another process on this one writes or reads while a kernel
// runs, for which C++ has no words: as instructions.cuh, tests run it over a form in C++
// (tests/gpu/emulated).
#ifndef ATTND_GPU_CUDA_HOST_MEMORY_CUH_
#define ATTND_GPU_CUDA_HOST_MEMORY_CUH_

#include <cstdint>

namespace attnd::gpu {

// A word as it is now. What its writer wrote before is there for the thread that sees it, for those
// that this thread meets at a barrier, and for what follows the kernel.
__device__ __forceinline__ uint32_t LoadHostWord(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
// The same, but for what was written before. Loads behind it do not wait for this one.
__device__ __forceinline__ uint32_t PeekHostWord(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Between two looks at such words: a kernel that reads host memory without a pause holds up those
// beside it (docs/research/MODEL_LOOP.md, "How a waiting kernel waits").
__device__ __forceinline__ void PauseForHost() { __nanosleep(500); }
// The same of words in the device's memory, which another process's kernels write.
__device__ __forceinline__ void PauseForNear() { __nanosleep(40); }

// What the thread has written, and has seen of others, is there for the host before what it writes
// next. Not __threadfence_system(), which also puts all fences into one order and takes longer.
__device__ __forceinline__ void FenceForHost() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Sets words that the host looks at, behind a fence.
__device__ __forceinline__ void SetHostWord(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void SetHostWords(uint64_t* pair, uint32_t first, uint32_t second) {
  const uint64_t value = uint64_t{second} << 32 | first;
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(pair), "l"(value) : "memory");
}

// Not from a cache that may have what was there before.
__device__ __forceinline__ uint4 LoadHost(const uint4* from) { return __ldcv(from); }
__device__ __forceinline__ uint2 LoadHost(const uint2* from) { return __ldcv(from); }

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_HOST_MEMORY_CUH_
