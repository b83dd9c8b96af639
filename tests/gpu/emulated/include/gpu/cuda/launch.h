// SPDX-License-Identifier: Apache-2.0
//
// gpu/cuda/launch.h on the emulated device.
#ifndef ATTND_GPU_CUDA_LAUNCH_H_
#define ATTND_GPU_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace attnd::gpu {

template <typename... Parameters, typename... Args>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 blocks, uint32_t threads,
                   uint32_t shared_bytes, cudaStream_t stream, const Args&... args) {
  const cudaLaunchConfig_t config = {blocks, threads, shared_bytes, stream};
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_LAUNCH_H_
