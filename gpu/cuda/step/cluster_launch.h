// SPDX-License-Identifier: Apache-2.0
//
// ClusterLaunch: how a kernel of thread block clusters of some size is launched.
#ifndef ATTND_GPU_CUDA_STEP_CLUSTER_LAUNCH_H_
#define ATTND_GPU_CUDA_STEP_CLUSTER_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "gpu/cuda/launch.h"

namespace attnd::gpu {

// Code that was compiled for less, which a newer device may run, has no thread block clusters.
inline constexpr int kClusterPtxVersion = 90;

class ClusterLaunch {
 public:
  // overlap: beside the end of the kernel before, which lets it.
  ClusterLaunch(uint32_t clusters, uint32_t blocks, uint32_t threads, uint32_t shared_bytes,
                bool overlap, cudaStream_t stream) {
    config_.attrs = attributes_;
    config_.numAttrs = 0;
    if (blocks > 1) {
      auto& attribute = attributes_[config_.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {blocks, 1, 1};
    }
    if (overlap) AddOverlap(&config_);
    config_.gridDim = clusters * blocks;
    config_.blockDim = threads;
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = stream;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;

  const cudaLaunchConfig_t& config() const { return config_; }

  // How many thread block clusters of so many thread blocks the device holds at once; 0: none, or
  // it cannot say.
  template <typename Kernel>
  static int AtOnce(Kernel kernel, uint32_t blocks, uint32_t threads, uint32_t shared_bytes) {
    const ClusterLaunch launch(1, blocks, threads, shared_bytes, /*overlap=*/false, nullptr);
    int count = 0;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config());
    if (error == cudaSuccess) return count;
    static_cast<void>(cudaGetLastError());  // which a launch would take for its own
    return 0;
  }

  // What a kernel needs before it is launched so.
  template <typename Kernel>
  static cudaError_t Allow(Kernel kernel, uint32_t shared_bytes) {
    const cudaError_t error = AllowShared(kernel, shared_bytes);
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }

 private:
  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_ = {};
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_CLUSTER_LAUNCH_H_
