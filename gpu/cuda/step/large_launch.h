// SPDX-License-Identifier: Apache-2.0
//
// LaunchLarge: Launch with more shared memory than a kernel gets without asking.
#ifndef ATTND_GPU_CUDA_STEP_LARGE_LAUNCH_H_
#define ATTND_GPU_CUDA_STEP_LARGE_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "gpu/cuda/launch.h"

namespace attnd::gpu {

// Lets a kernel have so many bytes of shared memory.
template <typename... Parameters>
cudaError_t AllowShared(void (*kernel)(Parameters...), uint32_t shared_bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes));
}

template <typename... Parameters, typename... Args>
cudaError_t LaunchLarge(void (*kernel)(Parameters...), dim3 blocks, uint32_t threads,
                        uint32_t shared_bytes, cudaStream_t stream, const Args&... args) {
  const cudaError_t error = AllowShared(kernel, shared_bytes);
  if (error != cudaSuccess) return error;
  return Launch(kernel, blocks, threads, shared_bytes, stream, args...);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_LARGE_LAUNCH_H_
