// SPDX-License-Identifier: Apache-2.0
//
// A kernel that waits for a word of the host's: what is enqueued behind it begins when the host
// says so, without a call into CUDA (Stream::RunStepBehind).
#ifndef ATTND_GPU_CUDA_GATE_KERNEL_H_
#define ATTND_GPU_CUDA_GATE_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace attnd::gpu::cuda {

// Enqueues it. gate: in pinned memory; the kernel ends when it is not 0.
cudaError_t LaunchGate(const uint32_t* gate, cudaStream_t stream);

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_GATE_KERNEL_H_
