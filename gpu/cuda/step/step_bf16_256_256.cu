// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/step/step_instance.cuh"

namespace attnd::gpu {

const StepKernels kStepBf16_256_256 = kStepInstance<__nv_bfloat16, 256, 256>;

}  // namespace attnd::gpu
