// SPDX-License-Identifier: Apache-2.0
//
// gpu/cuda/host_word.cuh on the emulated device: what its function does is said there.
#ifndef ATTND_GPU_CUDA_HOST_WORD_CUH_
#define ATTND_GPU_CUDA_HOST_WORD_CUH_

#include <cstdint>
#include <thread>

namespace attnd::gpu {

// No memory that a kernel may touch otherwise; another thread writes it.
__attribute__((no_sanitize("thread"))) inline void AwaitHostWord(const uint32_t* word) {
  const volatile uint32_t* const look = word;
  while (*look == 0) std::this_thread::yield();
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_HOST_WORD_CUH_
