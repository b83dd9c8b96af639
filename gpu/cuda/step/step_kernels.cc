// SPDX-License-Identifier: Apache-2.0
//
// Names the instance of every entry of kKernelShapes: a program in which one is missing does not
// link. A file of its own, as StepKernelsOf's definition (step_instance.cuh) must not be seen here:
// the compiler would instantiate all of them.
#include "gpu/cuda/step/step_kernels.h"

namespace attnd::gpu {

const StepKernels* StepKernelsFor(const KernelShape& shape) {
  const StepKernels* kernels = nullptr;
  DispatchListedShape([&](const KernelShape& listed) { return listed == shape; },
                      [&]<typename Shape>(Shape) {
                        kernels =
                            &StepKernelsOf<Shape::kDtype, Shape::kHeadDim, Shape::kValueDim>();
                      });
  return kernels;
}

}  // namespace attnd::gpu
