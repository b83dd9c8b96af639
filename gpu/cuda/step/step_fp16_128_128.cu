// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/step/step_instance.cuh"

namespace attnd::gpu {

const StepKernels kStepFp16_128_128 = kStepInstance<__half, 128, 128>;

}  // namespace attnd::gpu
