// SPDX-License-Identifier: Apache-2.0
//
// A word of pinned memory that the GPU writes, as the host sees it.
#ifndef ATTND_GPU_CUDA_HOST_WORD_H_
#define ATTND_GPU_CUDA_HOST_WORD_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace attnd::gpu {

// How long a step's answer is looked for before the host waits for the stream.
inline constexpr std::chrono::milliseconds kAnswerLook{2};

// How long the host looks for a client's tokens, which the GPU takes at once unless others' kernels
// fill it. What is not taken by then is given up, and asked for anew.
inline constexpr std::chrono::milliseconds kTakenLook{5};

// Looks at the word without a pause until it is not 0. False if it still is after `at_most`. What
// the GPU wrote before the word is there then.
inline bool LookForWord(uint32_t* word, std::chrono::nanoseconds at_most) {
  const std::atomic_ref value(*word);
  const auto until = std::chrono::steady_clock::now() + at_most;
  while (value.load(std::memory_order_acquire) == 0) {
    if (std::chrono::steady_clock::now() > until) return false;
  }
  return true;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_HOST_WORD_H_
