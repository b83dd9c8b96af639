// SPDX-License-Identifier: Apache-2.0
//
// LaunchTreeKernel: how kernels that work on tree items are launched.
#ifndef ATTND_GPU_CUDA_STEP_TREE_ITEM_LAUNCH_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_ITEM_LAUNCH_CUH_

#include <cstdint>

#include "gpu/cuda/launch.h"
#include "gpu/cuda/step/tree_block.cuh"
#include "gpu/layout/kernel_shapes.h"

namespace attnd::gpu {

// A kernel and the shared memory that its thread blocks need.
struct TreeKernel {
  void (*kernel)(StepHeader);
  uint32_t shared_bytes = 0;
};

// Launches kernel_of(ListedShape) of the step's channels, a thread block for each item. Thread
// blocks that begin beside the kernel before have a multiprocessor each, if there are enough: the
// device would put two on one while others are idle. These leave room for other streams' kernels.
template <typename KernelOf>
cudaError_t LaunchTreeKernel(const StepHeader& step, cudaStream_t stream, KernelOf kernel_of,
                             LaunchBeside beside = {}) {
  cudaError_t error = cudaErrorInvalidValue;
  DispatchListedShape(
      [&](const KernelShape& listed) {
        return listed.head_dim == step.head_dim && listed.value_dim == step.value_dim;
      },
      [&]<typename Shape>(Shape shape) {
        const TreeKernel of = kernel_of(shape);
        const uint32_t most =
            beside.kernel_before ? SharedBytesAlone(of.shared_bytes) : of.shared_bytes;
        error = AllowShared(of.kernel, most);  // another thread may launch it with that now
        if (error != cudaSuccess) return;
        const bool alone = beside.kernel_before && step.tree_items <= Multiprocessors();
        beside.other_streams |= alone;
        error = Launch(beside, of.kernel, step.tree_items, kTreeThreads,
                       alone ? most : of.shared_bytes, stream, step);
      });
  return error;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_ITEM_LAUNCH_CUH_
