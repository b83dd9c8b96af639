// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/step/step_instance.cuh"

namespace attnd::gpu {

const StepKernels kStepBf16_64_64 = kStepInstance<__nv_bfloat16, 64, 64>;

}  // namespace attnd::gpu
