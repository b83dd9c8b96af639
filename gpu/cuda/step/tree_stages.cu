// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/cuda/step/tree_estimate.cuh"
#include "gpu/cuda/step/tree_groups.cuh"
#include "gpu/cuda/step/tree_item_launch.cuh"
#include "gpu/cuda/step/tree_leaves.cuh"

namespace attnd::gpu {

cudaError_t LaunchTreeGroups(const StepHeader& step, bool beside_gate, cudaStream_t stream) {
  return LaunchTreeKernel(step, stream,
                          [&]<typename Shape>(Shape) -> TreeKernel {
                            constexpr int kDim = Shape::kHeadDim, kValueDim = Shape::kValueDim;
                            return {beside_gate ? TreeGroupsKernel<kDim, kValueDim, true>
                                                : TreeGroupsKernel<kDim, kValueDim, false>,
                                    sizeof(GroupsMemory<kDim, kValueDim>)};
                          },
                          {.kernel_before = beside_gate});
}
cudaError_t LaunchTreeLeaves(const StepHeader& step, cudaStream_t stream) {
  return LaunchTreeKernel(step, stream, []<typename Shape>(Shape) -> TreeKernel {
    return {TreeLeavesKernel<Shape::kHeadDim, Shape::kValueDim, /*kReopened=*/false>,
            sizeof(LeavesMemory<Shape::kHeadDim>)};
  });
}
cudaError_t LaunchTreeEstimate(const StepHeader& step, cudaStream_t stream) {
  return LaunchTreeKernel(
      step, stream,
      []<typename Shape>(Shape) -> TreeKernel {
        return {TreeEstimateKernel<Shape::kHeadDim, Shape::kValueDim, TreeChoice::kByError>,
                sizeof(EstimateMemory<Shape::kHeadDim, Shape::kValueDim>)};
      },
      {.other_streams = true});  // which read chosen tokens
}

}  // namespace attnd::gpu
