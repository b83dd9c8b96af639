// SPDX-License-Identifier: Apache-2.0
//
// The prepare stage: uploaded rows go to their pages; queries become the left sides of products.
#ifndef ATTND_GPU_CUDA_PREPARE_CUH_
#define ATTND_GPU_CUDA_PREPARE_CUH_

#include <cstdint>

#include "gpu/cuda/matrix.cuh"
#include "gpu/cuda/place.cuh"

namespace attnd::gpu {

inline constexpr uint32_t kPrepareWarps = 4;

// ---- kernels ----

// Element `i` of the step's queries.
__device__ __forceinline__ float QueryAt(const StepHeader& step, uint64_t i) {
  switch (step.query_dtype) {
    case 1:
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(step.queries)[i]);
    case 2:
      return __half2float(reinterpret_cast<const __half*>(step.queries)[i]);
    default:
      return reinterpret_cast<const float*>(step.queries)[i];
  }
}

// The greatest |x| of each lane of a tile, in every thread of a warp.
// queries in shared memory: [kLanes][kDim]
template <int kDim>
__device__ __forceinline__ float GreatestOfLane(const float* queries, uint32_t lane) {
  const uint32_t thread = threadIdx.x % 32;
  float greatest = 0;
  for (uint32_t c = thread; c < kDim; c += 32) {
    greatest = fmaxf(greatest, fabsf(queries[lane * kDim + c]));
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, offset));
  }
  return greatest;
}

// One warp writes one tile's fragments. Queries are scaled by a power of two into [-1, 1], so that
// fp16 holds them whatever they were, and their squares by the greatest; the factors carry it.
template <typename T, int kDim>
__device__ void PrepareTile(const StepHeader& step, uint32_t tile_number, float* queries) {
  const uint32_t thread = threadIdx.x % 32;
  const uint32_t unit_number = tile_number / step.tiles_max;
  const uint32_t tile = tile_number % step.tiles_max;
  const RowRef* row = RowOfUnit(step, unit_number);
  const UnitPlace unit(step, row, unit_number - row->first_unit);

  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const LanePlace place(step, unit, tile, lane);
    for (uint32_t c = thread; c < kDim; c += 32) {
      queries[lane * kDim + c] = place.used ? QueryAt(step, place.slot * kDim + c) : 0.0f;
    }
  }
  __syncwarp();

  uint32_t* words = step.query_fragments + uint64_t{tile_number} * TileFragmentWords(kDim);
  float* factors = reinterpret_cast<float*>(words + 2 * FragmentWords(kDim));
  const uint32_t g = thread / 4, t = thread % 4;
  float query_factor = 1, square_factor = 1;  // of lane g
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const float greatest = GreatestOfLane<kDim>(queries, lane);
    int exponent = 0;
    if (greatest > 0) frexpf(greatest, &exponent);
    // |softmax_scale q| is at most 1e18 where keys have a size at all; see docs/DESIGN.md, "Limits".
    const float scaled = fminf(greatest * step.softmax_scale, 1e18f);
    if (thread == 0) {
      factors[lane] = ldexpf(step.softmax_scale, exponent) * kLog2E;
      factors[kLanes + lane] = scaled * scaled;
    }
    if (lane == g) {
      query_factor = ldexpf(1.0f, -exponent);
      square_factor = scaled > 0 ? step.softmax_scale / scaled : 0.0f;
    }
  }

  const float* q = queries + g * kDim;
  for (uint32_t block = 0; block < kDim / 32; ++block) {
    uint32_t* out = words + (block * 32 + thread) * 8;
    for (uint32_t pair = 0; pair < 4; ++pair) {
      const float* x = q + block * 32 + t * 8 + pair * 2;
      Split<T>(x[0] * query_factor, x[1] * query_factor, &out[pair * 2], &out[pair * 2 + 1]);
    }
  }
  // Product m = 2 w + h takes bytes h and h + 2 of a thread's code word w: their low halves, then
  // their high ones.
  uint32_t* squares = words + FragmentWords(kDim);
  const auto square = [&](uint32_t channel) {
    const float x = fminf(fabsf(q[channel]) * square_factor, 1.0f);
    return x * x;
  };
  for (uint32_t m = 0; m < kDim / 16; ++m) {
    uint32_t* out = squares + (m * 32 + thread) * 4;
    const uint32_t channel = t * (kDim / 8) + m / 2 * 4 + m % 2;
    Split<T>(square(channel), square(channel + 2), &out[0], &out[1]);
    Split<T>(square(channel + kDim / 2), square(channel + 2 + kDim / 2), &out[2], &out[3]);
  }
}

__device__ __forceinline__ void CopyUpload(const StepHeader& step, uint32_t number) {
  const UploadRef upload = step.upload_refs[number];
  const uint4* from = reinterpret_cast<const uint4*>(step.staged + upload.from);
  uint4* to = reinterpret_cast<uint4*>(upload.to);
  for (uint64_t i = threadIdx.x % 32; i < upload.bytes / 16; i += 32) to[i] = from[i];
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kPrepareWarps * 32)
    PrepareKernel(const __grid_constant__ StepHeader step) {
  __shared__ float queries[kPrepareWarps][kLanes * kDim];
  if (blockIdx.x == 0 && threadIdx.x < 2) step.finish_count[threadIdx.x] = 0;
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t items = step.tiles + step.uploads;
  for (uint32_t i = blockIdx.x * kPrepareWarps + warp; i < items; i += gridDim.x * kPrepareWarps) {
    if (i < step.tiles) {
      PrepareTile<T, kDim>(step, i, queries[warp]);
      __syncwarp();
    } else {
      CopyUpload(step, i - step.tiles);
    }
  }
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_PREPARE_CUH_
