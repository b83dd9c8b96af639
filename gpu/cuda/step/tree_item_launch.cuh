// SPDX-License-Identifier: Apache-2.0
//
// LaunchTreeKernel: how kernels that work on tree items are launched.
#ifndef ATTND_GPU_CUDA_STEP_TREE_ITEM_LAUNCH_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_ITEM_LAUNCH_CUH_

#include <cstdint>

#include "gpu/cuda/step/large_launch.h"
#include "gpu/cuda/step/tree_sums.cuh"
#include "gpu/layout/kernel_shapes.h"

namespace attnd::gpu {

using TreeKernel = void (*)(StepHeader);

// Launches kernel_of(ListedShape) of the step's channels, a thread block for each item.
template <typename KernelOf>
cudaError_t LaunchTreeKernel(const StepHeader& step, cudaStream_t stream, KernelOf kernel_of) {
  cudaError_t error = cudaErrorInvalidValue;
  DispatchListedShape(
      [&](const KernelShape& listed) {
        return listed.head_dim == step.head_dim && listed.value_dim == step.value_dim;
      },
      [&]<typename Shape>(Shape shape) {
        const TreeKernel kernel = kernel_of(shape);
        constexpr uint32_t kBytes = kTreeSharedBytes<Shape::kHeadDim, Shape::kValueDim>;
        error = LaunchLarge(kernel, step.tree_items, kTreeThreads, kBytes, stream, step);
      });
  return error;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_ITEM_LAUNCH_CUH_
