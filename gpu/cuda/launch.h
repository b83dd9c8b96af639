// SPDX-License-Identifier: Apache-2.0
//
// How kernels are launched that are not of thread block clusters (step/cluster_launch.h).
#ifndef ATTND_GPU_CUDA_LAUNCH_H_
#define ATTND_GPU_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace attnd::gpu {

// overlap: beside the end of the stream's kernel before, which lets it (LetNextKernelStart in
// instructions.cuh). Nothing else of the stream may lie between the two.
template <typename... Parameters, typename... Args>
cudaError_t LaunchBehind(bool overlap, void (*kernel)(Parameters...), dim3 blocks, uint32_t threads,
                         uint32_t shared_bytes, cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

template <typename... Parameters, typename... Args>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 blocks, uint32_t threads,
                   uint32_t shared_bytes, cudaStream_t stream, const Args&... args) {
  return LaunchBehind(/*overlap=*/false, kernel, blocks, threads, shared_bytes, stream, args...);
}

// Lets a kernel have so many bytes of shared memory: more than it gets without asking.
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

#endif  // ATTND_GPU_CUDA_LAUNCH_H_
