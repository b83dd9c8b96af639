// SPDX-License-Identifier: Apache-2.0
//
// How kernels are launched that are not of thread block clusters (step/cluster_launch.h).
#ifndef ATTND_GPU_CUDA_LAUNCH_H_
#define ATTND_GPU_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace attnd::gpu {

// What a kernel runs beside.
struct LaunchBeside {
  // The end of the stream's kernel before, which lets it (LetNextKernelStart in instructions.cuh).
  // Nothing else of the stream may lie between the two.
  bool kernel_before = false;
  // Kernels of other streams, whose thread blocks shall have room on its multiprocessors. By itself
  // the device seems to give these as much shared memory as the kernel's own thread blocks need,
  // and the rest to the first-level cache.
  bool other_streams = false;
};

// Adds the attribute of a launch beside the kernel before; `attrs` has room for it.
inline void AddOverlap(cudaLaunchConfig_t* config) {
  cudaLaunchAttribute& attribute = config->attrs[config->numAttrs++];
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
}

template <typename... Parameters, typename... Args>
cudaError_t Launch(LaunchBeside beside, void (*kernel)(Parameters...), dim3 blocks,
                   uint32_t threads, uint32_t shared_bytes, cudaStream_t stream,
                   const Args&... args) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (beside.kernel_before) AddOverlap(&config);
  if (beside.other_streams) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attribute.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  }
  return cudaLaunchKernelEx(&config, kernel, args...);
}

template <typename... Parameters, typename... Args>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 blocks, uint32_t threads,
                   uint32_t shared_bytes, cudaStream_t stream, const Args&... args) {
  return Launch(LaunchBeside{}, kernel, blocks, threads, shared_bytes, stream, args...);
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
cudaError_t LaunchLarge(LaunchBeside beside, void (*kernel)(Parameters...), dim3 blocks,
                        uint32_t threads, uint32_t shared_bytes, cudaStream_t stream,
                        const Args&... args) {
  const cudaError_t error = AllowShared(kernel, shared_bytes);
  if (error != cudaSuccess) return error;
  return Launch(beside, kernel, blocks, threads, shared_bytes, stream, args...);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_LAUNCH_H_
