// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/launch.h"
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/cuda/step/tree_estimate.cuh"
#include "gpu/cuda/step/tree_item_launch.cuh"
#include "gpu/cuda/step/tree_leaves.cuh"
#include "gpu/cuda/step/tree_whole.cuh"

namespace attnd::gpu {
namespace {

__global__ void __launch_bounds__(kTreeThreads)
    TreeReopenKernel(const __grid_constant__ StepHeader step) {
  const TreeItem item = ReadItem(step, blockIdx.x);
  if (IsReopened(step, item)) OpenWhole(step, item);
}

}  // namespace

cudaError_t LaunchTreeEstimateByHead(const StepHeader& step, cudaStream_t stream) {
  return LaunchTreeKernel(step, stream, []<typename Shape>(Shape) -> TreeKernel {
    return {TreeEstimateKernel<Shape::kHeadDim, Shape::kValueDim, TreeChoice::kByHead>,
            sizeof(EstimateMemory<Shape::kHeadDim, Shape::kValueDim>)};
  });
}
cudaError_t LaunchTreeReopen(const StepHeader& step, cudaStream_t stream) {
  const cudaError_t error =
      Launch(TreeReopenKernel, step.tree_items, kTreeThreads, 0, stream, step);
  if (error != cudaSuccess) return error;
  return LaunchTreeKernel(step, stream, []<typename Shape>(Shape) -> TreeKernel {
    return {TreeLeavesKernel<Shape::kHeadDim, Shape::kValueDim, /*kReopened=*/true>,
            sizeof(LeavesMemory<Shape::kHeadDim>)};
  });
}

}  // namespace attnd::gpu
