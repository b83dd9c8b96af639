// SPDX-License-Identifier: Apache-2.0
//
// Standard deviations in 4 bits, as attention/segment/index_parts.h has them.
#ifndef ATTND_GPU_CUDA_INDEX_INDEX_CODES_CUH_
#define ATTND_GPU_CUDA_INDEX_INDEX_CODES_CUH_

#include "gpu/cuda/index/index_kernels.cuh"

namespace attnd::gpu::cuda {

inline constexpr double kDeviationLevels = 15;  // 4 bits

// deviations: this lane's. codes: [head_dim / 2], channel j low and channel j + head_dim / 2 high;
// the latter is the same of lane + 16. Returns what a code of 1 stands for.
template <uint32_t kPart>
__device__ __forceinline__ double StoreCodes(const double (&deviations)[kPart], uint8_t* codes) {
  const uint32_t lane = threadIdx.x % 32;
  double greatest = 0;
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) greatest = max(greatest, deviations[e]);
  greatest = WarpMax(greatest);
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) {
    // Halves round away from zero, as in lround.
    const auto code =
        greatest == 0 ? 0u
                      : static_cast<uint32_t>(kDeviationLevels * deviations[e] / greatest + 0.5);
    const uint32_t high = __shfl_down_sync(kAllLanes, code, 16);
    if (lane < 16) codes[lane * kPart + e] = static_cast<uint8_t>(code | high << 4);
  }
  return greatest / kDeviationLevels;
}

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_INDEX_INDEX_CODES_CUH_
