// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/cuda/step/tree_estimate.cuh"
#include "gpu/cuda/step/tree_stages.cuh"

namespace attnd::gpu {
namespace {

using Kernel = void (*)(StepHeader);

template <int kDim, int kValueDim>
Kernel KernelOf(TreeStage stage) {
  switch (stage) {
    case TreeStage::kGroups:
      return TreeGroupsKernel<kDim, kValueDim>;
    case TreeStage::kLeaves:
      return TreeLeavesKernel<kDim, kValueDim>;
    case TreeStage::kEstimate:
      return TreeEstimateKernel<kDim, kValueDim>;
  }
  return nullptr;
}

cudaError_t Launch(Kernel kernel, uint32_t shared_bytes, const StepHeader& step,
                   cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  kernel<<<step.tree_items, kTreeThreads, shared_bytes, stream>>>(step);
  return cudaPeekAtLastError();
}

}  // namespace

cudaError_t LaunchTreeItems(TreeStage stage, const StepHeader& step, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  DispatchListedShape(
      [&](const KernelShape& listed) {
        return listed.head_dim == step.head_dim && listed.value_dim == step.value_dim;
      },
      [&]<typename Shape>(Shape) {
        constexpr int kDim{Shape::kHeadDim}, kValueDim{Shape::kValueDim};
        error = Launch(KernelOf<kDim, kValueDim>(stage), kTreeSharedBytes<kDim, kValueDim>, step,
                       stream);
      });
  return error;
}

}  // namespace attnd::gpu
