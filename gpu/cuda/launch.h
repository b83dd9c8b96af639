// SPDX-License-Identifier: Apache-2.0
//
// How a step's kernels are launched that are not of thread block clusters (step/cluster_launch.h):
// in one place, as tests launch them on the host instead (tests/gpu/emulated).
#ifndef ATTND_GPU_CUDA_LAUNCH_H_
#define ATTND_GPU_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace attnd::gpu {

template <typename... Parameters, typename... Args>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 blocks, uint32_t threads,
                   uint32_t shared_bytes, cudaStream_t stream, const Args&... args) {
  kernel<<<blocks, threads, shared_bytes, stream>>>(args...);
  return cudaPeekAtLastError();
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_LAUNCH_H_
