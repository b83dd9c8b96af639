// SPDX-License-Identifier: Apache-2.0
//
// gpu/cuda/host_word.h on the emulated device, which works only where somebody waits for it: while
// the host looks at a word another thread does the device's work.
#ifndef ATTND_GPU_CUDA_HOST_WORD_H_
#define ATTND_GPU_CUDA_HOST_WORD_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "tests/gpu/emulated/work.h"

namespace attnd::gpu {

inline constexpr std::chrono::seconds kAnswerLook{60};
inline constexpr std::chrono::seconds kTakenLook{60};

inline bool LookForWord(uint32_t* word, std::chrono::nanoseconds at_most) {
  emulated::BeginWork();
  const auto until = std::chrono::steady_clock::now() + at_most;
  while (std::atomic_ref(*word).load(std::memory_order_acquire) == 0) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_HOST_WORD_H_
