// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/step/step_instance.cuh"

namespace attnd::gpu {

const StepKernels kStepBf16_128_128 = kStepInstance<__nv_bfloat16, 128, 128>;

}  // namespace attnd::gpu
