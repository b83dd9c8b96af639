// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/cuda/step/tree_estimate.cuh"
#include "gpu/cuda/step/tree_item_launch.cuh"
#include "gpu/cuda/step/tree_stages.cuh"

namespace attnd::gpu {

cudaError_t LaunchTreeGroups(const StepHeader& step, cudaStream_t stream) {
  return LaunchTreeKernel(step, stream, []<typename Shape>(Shape) -> TreeKernel {
    return TreeGroupsKernel<Shape::kHeadDim, Shape::kValueDim>;
  });
}
cudaError_t LaunchTreeLeaves(const StepHeader& step, cudaStream_t stream) {
  return LaunchTreeKernel(step, stream, []<typename Shape>(Shape) -> TreeKernel {
    return TreeLeavesKernel<Shape::kHeadDim, Shape::kValueDim, /*kReopened=*/false>;
  });
}
cudaError_t LaunchTreeEstimate(const StepHeader& step, cudaStream_t stream) {
  return LaunchTreeKernel(step, stream, []<typename Shape>(Shape) -> TreeKernel {
    return TreeEstimateKernel<Shape::kHeadDim, Shape::kValueDim, TreeChoice::kByError>;
  });
}

}  // namespace attnd::gpu
