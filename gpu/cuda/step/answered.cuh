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
  __syncthreads();
  if (threadIdx.x != 0) return;
  FenceForHost();  // what all of its threads have written: the barrier puts that before
  if (!flawless) atomicOr(step.signal.blocks, kFlawed);
  // All of these are on their way at once.
  uint64_t* const turn = step.answer->turn;
  const uint32_t epoch = step.answer->epoch;
  const uint32_t allowed = atomicAdd(&step.answer->allowed, 0u);  // not without a turn
  const uint32_t before = atomicAdd(step.signal.blocks, 1u);
  if ((before & ~kFlawed) + 1 != step.answer_blocks) return;
  FenceForHost();  // and what the others have written
  const bool tells = allowed != 0 && before < kFlawed;
  if (tells) SetHostWords(turn, epoch, 0);
  SetHostWord(step.signal.answered, tells ? kAnsweredAndTold : kAnswered);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_ANSWERED_CUH_
