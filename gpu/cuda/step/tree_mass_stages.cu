// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/cuda/step/tree_estimate.cuh"
#include "gpu/cuda/step/tree_item_launch.cuh"
#include "gpu/cuda/step/tree_whole.cuh"

namespace attnd::gpu {

cudaError_t LaunchTreeWhole(const StepHeader& step, cudaStream_t stream) {
  return LaunchTreeKernel(step, stream, []<typename Shape>(Shape) -> TreeKernel {
    return {TreeWholeKernel<Shape::kHeadDim>};
  });
}
cudaError_t LaunchTreeEstimateByMass(const StepHeader& step, cudaStream_t stream) {
  return LaunchTreeKernel(step, stream, []<typename Shape>(Shape) -> TreeKernel {
    return {TreeEstimateKernel<Shape::kHeadDim, Shape::kValueDim, TreeChoice::kByMass>,
            sizeof(EstimateMemory<Shape::kHeadDim, Shape::kValueDim>)};
  });
}

}  // namespace attnd::gpu
