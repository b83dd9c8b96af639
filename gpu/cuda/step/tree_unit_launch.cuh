// SPDX-License-Identifier: Apache-2.0
//
// LaunchTreeUnits: how kernels that choose among a tree unit's rows are launched: a thread block
// cluster for each unit of the step.
#ifndef ATTND_GPU_CUDA_STEP_TREE_UNIT_LAUNCH_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_UNIT_LAUNCH_CUH_

#include <array>
#include <cstdint>

#include "gpu/cuda/step/cluster_launch.h"
#include "gpu/cuda/step/tree_unit.cuh"

namespace attnd::gpu {

// How many units the process's devices work on at once, by the number of their thread blocks.
struct UnitsAtOnce {
  bool clusters = false;  // of thread blocks
  std::array<int, kCutBlocksMax + 1> units = {};
};
inline UnitsAtOnce CountUnits(void (*kernel)(StepHeader), uint32_t shared_bytes) {
  UnitsAtOnce at_once;
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return at_once;
  at_once.clusters = attributes.ptxVersion >= kClusterPtxVersion;
  for (uint32_t blocks = kCutBlocksMin; at_once.clusters && blocks <= kCutBlocksMax; ++blocks) {
    at_once.units[blocks] = ClusterLaunch::AtOnce(kernel, blocks, kCutThreads, shared_bytes);
  }
  return at_once;
}

// The most with which all units are there at once; what is chosen does not depend on their number.
inline uint32_t BlocksOfUnit(const UnitsAtOnce& at_once, uint32_t units) {
  if (!at_once.clusters) return 1;
  uint32_t blocks = kCutBlocksMax;
  while (blocks > kCutBlocksMin && at_once.units[blocks] < static_cast<int>(units)) --blocks;
  return blocks;
}

// Launches a kernel that works on the step's units.
template <void (*kKernel)(StepHeader), uint32_t kSharedBytes = sizeof(TreeSelectMemory)>
cudaError_t LaunchTreeUnits(const StepHeader& step, cudaStream_t stream) {
  const cudaError_t error = AllowShared(kKernel, kSharedBytes);
  if (error != cudaSuccess) return error;
  static const UnitsAtOnce kAtOnce = CountUnits(kKernel, kSharedBytes);
  const uint32_t blocks = BlocksOfUnit(kAtOnce, step.units);
  const ClusterLaunch launch(step.units, blocks, kCutThreads, kSharedBytes, false, stream);
  return cudaLaunchKernelEx(&launch.config(), kKernel, step);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_UNIT_LAUNCH_CUH_
