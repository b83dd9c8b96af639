// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/step/step_instance.cuh"

namespace attnd::gpu {

template const StepKernels& StepKernelsOf<DType::kFp16, 64, 64>();

}  // namespace attnd::gpu
