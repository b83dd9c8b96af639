// SPDX-License-Identifier: Apache-2.0
//
// Kernels of a step that waits for its queries: what is enqueued behind them begins when the host,
// or a client, says so, without a call into CUDA (Stream::RunStepBehind).
#ifndef ATTND_GPU_CUDA_STEP_STEP_GATE_H_
#define ATTND_GPU_CUDA_STEP_STEP_GATE_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/layout/step_gate.h"

namespace attnd::gpu::cuda {

// One thread block copies: of more than this a copy engine is faster.
inline constexpr size_t kGatedInputBytesMax = size_t{512} << 10;

// A step's input, in pinned memory and on the device, and where AnswerPlaces lie there. At most
// kGatedInputBytesMax, of which up to 15 bytes more are copied.
struct GatedInput {
  std::byte* host;
  std::byte* device;
  size_t bytes;
  AnswerPlaces* answer;  // on the device
};

// Enqueues the copy of the input to the device, once the gate is open. One kernel: copies by copy
// engines would begin some microseconds after a kernel's end, and kernels after theirs. If the gate
// has a ring, all but the client's tokens is copied before it opens. places_items: the places of
// trees' items are found then, too. The next kernel of the stream may look at both, if it is
// launched to (LaunchBeside), before the tokens are there.
cudaError_t LaunchGate(const StepGate* gate, const GatedInput& input, const StepHeader& step,
                       bool places_items, cudaStream_t stream);

// Behind it, beside the step: if a client has opened the gate, copies its tokens to the host's
// input, tells of it, and passes on what the host allows.
cudaError_t LaunchTaken(StepGate* gate, const GatedInput& input, cudaStream_t stream);

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_STEP_STEP_GATE_H_
