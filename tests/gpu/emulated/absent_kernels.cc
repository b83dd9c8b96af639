// SPDX-License-Identifier: Apache-2.0
//
// The kernels that the emulated device does not have: those of most shapes, as compiling each takes
// seconds and they differ in constants alone, and those that build indexes.
#include "gpu/cuda/index/index_build.cuh"
#include "gpu/cuda/step/step_kernels.h"

namespace attnd::gpu {

#define ATTND_NO_KERNELS(dtype, head_dim, value_dim)               \
  template <>                                                      \
  const StepKernels& StepKernelsOf<dtype, head_dim, value_dim>() { \
    static constexpr StepKernels kNone = {};                       \
    return kNone;                                                  \
  }
ATTND_NO_KERNELS(DType::kBf16, 128, 128)
ATTND_NO_KERNELS(DType::kBf16, 192, 128)
ATTND_NO_KERNELS(DType::kBf16, 256, 256)
ATTND_NO_KERNELS(DType::kFp16, 64, 64)
ATTND_NO_KERNELS(DType::kFp16, 128, 128)
ATTND_NO_KERNELS(DType::kFp16, 256, 256)

namespace cuda {
uint64_t BuildScratchBytes(const KernelShape&, uint32_t, const IndexSizes&) { return 0; }
cudaError_t BuildIndexes(const KernelShape&, const IndexJob&, const IndexJob*, uint32_t, std::byte*,
                         cudaStream_t, IndexLaunchListener*) {
  return cudaErrorInvalidValue;
}
}  // namespace cuda

}  // namespace attnd::gpu
