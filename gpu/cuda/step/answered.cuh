// SPDX-License-Identifier: Apache-2.0
//
// How a step's last kernels tell the host that it has its answers (AnswerSignal).
#ifndef ATTND_GPU_CUDA_STEP_ANSWERED_CUH_
#define ATTND_GPU_CUDA_STEP_ANSWERED_CUH_

#include <cstdint>

#include "gpu/cuda/host_memory.cuh"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

// The thread block has written its part of the outputs, all of its threads. Each thread block of
// AnswerBlocks calls it once.
__device__ __forceinline__ void NoteAnswered(const StepHeader& step) {
  if (step.signal.answered == nullptr) return;
  FenceForHost();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(step.signal.blocks, 1u) + 1 != step.answer_blocks) return;
  FenceForHost();
  SetHostWord(step.signal.answered);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_ANSWERED_CUH_
