// SPDX-License-Identifier: Apache-2.0
//
// A kernel that does nothing: what a round trip measures is when it may begin
// (server/calls/round_trip.h).
#ifndef ATTND_GPU_CUDA_EMPTY_KERNEL_H_
#define ATTND_GPU_CUDA_EMPTY_KERNEL_H_

#include <cuda_runtime_api.h>

namespace attnd::gpu::cuda {

// Enqueues it. A kernel, not a copy or an event: copies have engines of their own, which run beside
// another process's kernel also where kernels take turns.
cudaError_t LaunchEmpty(cudaStream_t stream);

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_EMPTY_KERNEL_H_
