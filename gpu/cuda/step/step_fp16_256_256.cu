// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/step/step_instance.cuh"

namespace attnd::gpu {

const StepKernels kStepFp16_256_256 = kStepInstance<__half, 256, 256>;

}  // namespace attnd::gpu
