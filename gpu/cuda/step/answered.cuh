// SPDX-License-Identifier: Apache-2.0
//
// How a step's last kernels tell the host, and perhaps a client, that there are answers
// (AnswerSignal, AnswerPlaces).
#ifndef ATTND_GPU_CUDA_STEP_ANSWERED_CUH_
#define ATTND_GPU_CUDA_STEP_ANSWERED_CUH_

#include <cstdint>

#include "gpu/cuda/host_memory.cuh"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

// The thread block has written its part of the outputs, all of its threads. Each thread block of
// AnswerBlocks calls it once. flawless, of thread 0: every lse that it has written is a number.
__device__ __forceinline__ void NoteAnswered(const StepHeader& step, bool flawless) {
  if (step.signal.answered == nullptr) return;
  FenceForHost();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (!flawless) atomicOr(step.signal.blocks, kFlawed);
  const uint32_t before = atomicAdd(step.signal.blocks, 1u);
  if ((before & ~kFlawed) + 1 != step.answer_blocks) return;
  FenceForHost();
  const AnswerPlaces& places = *step.answer;
  const bool tells =
      places.turn != nullptr && before < kFlawed && atomicAdd(&step.answer->allowed, 0u) != 0;
  if (tells) SetHostWords(places.turn, places.epoch, 0);
  SetHostWord(step.signal.answered, tells ? kAnsweredAndTold : kAnswered);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_ANSWERED_CUH_
