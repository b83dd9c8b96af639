// SPDX-License-Identifier: Apache-2.0
//
// LaunchTreeUnits: how kernels that choose among a tree unit's rows are launched: a thread block
// cluster for each unit of the step. Two thread blocks on one multiprocessor are slower than one on
// each of two, and the device puts them there even while others are idle: so they have more shared
// memory than they need (docs/research/GPU_STEP.md, "One thread block a multiprocessor").
#ifndef ATTND_GPU_CUDA_STEP_TREE_UNIT_LAUNCH_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_UNIT_LAUNCH_CUH_

#include <algorithm>
#include <array>
#include <cstdint>

#include "gpu/cuda/step/cluster_launch.h"
#include "gpu/cuda/step/tree_unit.cuh"

namespace attnd::gpu {

// How many units the process's devices work on at once, by the number of their thread blocks, each
// of which has so much shared memory.
struct UnitsAtOnce {
  uint32_t shared_bytes = 0;
  std::array<int, kCutBlocksMax + 1> units = {};
};
// Thread blocks that have a multiprocessor to themselves, and those that may share it.
struct UnitPlacing {
  bool clusters = false;  // of thread blocks
  UnitsAtOnce alone, beside;
};
struct UnitBlocks {
  uint32_t blocks, shared_bytes;
};

inline UnitsAtOnce CountUnits(void (*kernel)(StepHeader), uint32_t shared_bytes) {
  UnitsAtOnce at_once;
  if (AllowShared(kernel, shared_bytes) != cudaSuccess) return at_once;
  at_once.shared_bytes = shared_bytes;
  for (uint32_t blocks = kCutBlocksMin; blocks <= kCutBlocksMax; ++blocks) {
    at_once.units[blocks] = ClusterLaunch::AtOnce(kernel, blocks, kCutThreads, shared_bytes);
  }
  return at_once;
}
inline UnitPlacing PlacingOf(void (*kernel)(StepHeader), uint32_t shared_bytes) {
  UnitPlacing placing;
  placing.beside.shared_bytes = shared_bytes;
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return placing;
  placing.clusters = attributes.ptxVersion >= kClusterPtxVersion;
  if (!placing.clusters) return placing;
  placing.beside = CountUnits(kernel, shared_bytes);
  placing.alone = CountUnits(kernel, SharedBytesAlone(shared_bytes));
  return placing;
}

// The most with which all units are there at once, each thread block alone on its multiprocessor;
// if there are too many units for that, not alone. What is chosen does not depend on either.
inline UnitBlocks BlocksOfUnit(const UnitPlacing& placing, uint32_t units) {
  if (!placing.clusters) return {1, placing.beside.shared_bytes};
  for (const UnitsAtOnce* at_once : {&placing.alone, &placing.beside}) {
    for (uint32_t blocks = kCutBlocksMax; blocks >= kCutBlocksMin; --blocks) {
      if (at_once->units[blocks] >= static_cast<int>(units)) return {blocks, at_once->shared_bytes};
    }
  }
  return {kCutBlocksMin, placing.beside.shared_bytes};
}

// Launches a kernel that works on the step's units. overlap: beside the end of the kernel before,
// as LaunchBeside says.
template <void (*kKernel)(StepHeader), uint32_t kSharedBytes = sizeof(TreeSelectMemory)>
cudaError_t LaunchTreeUnits(const StepHeader& step, cudaStream_t stream, bool overlap = false) {
  static const UnitPlacing kPlacing = PlacingOf(kKernel, kSharedBytes);
  const UnitBlocks unit = BlocksOfUnit(kPlacing, step.units);
  // Always the most: another thread may launch the kernel with it now.
  const cudaError_t error =
      AllowShared(kKernel, std::max(kSharedBytes, kPlacing.alone.shared_bytes));
  if (error != cudaSuccess) return error;
  const ClusterLaunch launch(step.units, unit.blocks, kCutThreads, unit.shared_bytes, overlap,
                             stream);
  return cudaLaunchKernelEx(&launch.config(), kKernel, step);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_UNIT_LAUNCH_CUH_
