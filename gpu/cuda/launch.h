// SPDX-License-Identifier: Apache-2.0
//
// How kernels are launched that are not of thread block clusters (step/cluster_launch.h).
#ifndef ATTND_GPU_CUDA_LAUNCH_H_
#define ATTND_GPU_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <algorithm>
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

// 0: not known.
inline uint32_t Multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return static_cast<uint32_t>(count);
}
// So much that no other thread block with it fits beside a thread block; at least `needed`.
inline uint32_t SharedBytesAlone(uint32_t needed) {
  int device = 0, all = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) !=
          cudaSuccess) {
    return needed;
  }
  return std::max(needed, static_cast<uint32_t>(all) / 2);  // with what the device adds, over half
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
