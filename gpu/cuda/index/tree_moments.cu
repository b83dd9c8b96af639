// SPDX-License-Identifier: Apache-2.0
//
// Moments within leaves: sums over all tokens of the products of a key's channels with each other
// and with the value's, both less their leaf's mean, on tensor cores in tf32. Rounding to tf32 is
// random from token to token, and slopes and axes are stored in bf16.
#include "gpu/cuda/index/index_mma.cuh"
#include "gpu/cuda/index/tree_deviations.cuh"
#include "gpu/cuda/index/tree_kernels.cuh"
#include "gpu/cuda/launch.h"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kWarps = 8;
constexpr uint32_t kThreads = kWarps * 32;
constexpr uint32_t kTileTokens = 32;
constexpr uint32_t kTileChannels = 64;  // of keys, that a thread block multiplies with all channels
// Rows of a tile in shared memory: this padding puts four rows' eight columns in 32 banks.
constexpr uint32_t kPadding = 8;

// The sums of one warp: kTileChannels channels of keys by kColumns others.
template <uint32_t kColumns>
struct Sums {
  float d[kTileChannels / 16][kColumns / 8][4] = {};

  // Adds a tile's products. rows: [kTileTokens][stride]; a, b: first channels of both.
  __device__ __forceinline__ void Add(const uint32_t* rows, uint32_t stride, uint32_t a,
                                      uint32_t b) {
    const uint32_t g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (uint32_t k = 0; k < kTileTokens; k += 8) {
      const uint32_t* low = rows + (k + q) * stride + g;
      const uint32_t* high = low + 4 * stride;
      uint32_t left[kTileChannels / 16][4];
#pragma unroll
      for (uint32_t m = 0; m < kTileChannels / 16; ++m) {
        left[m][0] = low[a + m * 16];
        left[m][1] = low[a + m * 16 + 8];
        left[m][2] = high[a + m * 16];
        left[m][3] = high[a + m * 16 + 8];
      }
#pragma unroll
      for (uint32_t n = 0; n < kColumns / 8; ++n) {
        const uint32_t b0 = low[b + n * 8], b1 = high[b + n * 8];
#pragma unroll
        for (uint32_t m = 0; m < kTileChannels / 16; ++m) {
          MultiplyAddTf32(d[m][n], left[m], b0, b1);
        }
      }
    }
  }
};

// Thread block b: chunk b % chunks of head b / (chunks * tiles), channels b / chunks % tiles.
template <typename Shape>
__global__ void __launch_bounds__(kThreads) MomentKernel(const __grid_constant__ TreePlan plan) {
  constexpr uint32_t kDim = kPointDim<Shape>, kStride = kDim + kPadding;
  constexpr uint32_t kTiles = Shape::kHeadDim / kTileChannels, kColumns = kDim / kWarps;
  extern __shared__ __align__(16) uint32_t rows[];  // [kTileTokens][kStride]
  const uint32_t chunk = blockIdx.x % plan.moment_chunks;
  const uint32_t a = blockIdx.x / plan.moment_chunks % kTiles * kTileChannels;
  const uint32_t b = threadIdx.x / 32 * kColumns;
  const Head head(plan.base, blockIdx.x / (plan.moment_chunks * kTiles));
  const uint32_t first = chunk * kMomentChunkTokens;
  const uint32_t end = min(plan.base.tokens, first + kMomentChunkTokens);
  Sums<kColumns> sums;
  for (uint32_t tile = first; tile < end; tile += kTileTokens) {
    __syncthreads();  // none still reads the last tile
    for (uint32_t r = threadIdx.x / 32; r < kTileTokens; r += kWarps) {
      StoreDeviations<Shape>(head, plan, tile + r, tile + r < end, rows + r * kStride);
    }
    __syncthreads();
    sums.Add(rows, kStride, a, b);
  }
  const uint32_t g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  float* to = head.At<float>(plan.scratch.partial_moments) +
              (uint64_t{chunk} * Shape::kHeadDim + a + g) * kDim + b + 2 * q;
#pragma unroll
  for (uint32_t m = 0; m < kTileChannels / 16; ++m) {
#pragma unroll
    for (uint32_t n = 0; n < kColumns / 8; ++n) {
      const float(&d)[4] = sums.d[m][n];
      *reinterpret_cast<float2*>(to + m * 16 * kDim + n * 8) = float2{d[0], d[1]};
      *reinterpret_cast<float2*>(to + (m * 16 + 8) * kDim + n * 8) = float2{d[2], d[3]};
    }
  }
}

// Thread block b: row b % head_dim of head b / head_dim, its chunks in order.
template <typename Shape>
__global__ void __launch_bounds__(kPointDim<Shape>)
    SumKernel(const __grid_constant__ TreePlan plan) {
  constexpr uint32_t kDim = kPointDim<Shape>;
  const Head head(plan.base, blockIdx.x / Shape::kHeadDim);
  const uint32_t at = blockIdx.x % Shape::kHeadDim * kDim + threadIdx.x;
  const auto* partial = head.At<const float>(plan.scratch.partial_moments);
  double sum = 0;
  for (uint32_t chunk = 0; chunk < plan.moment_chunks; ++chunk) {
    sum += partial[uint64_t{chunk} * Shape::kHeadDim * kDim + at];
  }
  head.At<float>(plan.scratch.moments)[at] = static_cast<float>(sum);
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launcher.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchTreeMoments(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    using Shape = decltype(constant);
    constexpr uint32_t kDim = kPointDim<Shape>;
    constexpr uint32_t kSharedBytes = kTileTokens * (kDim + kPadding) * sizeof(float);
    const cudaError_t error = AllowShared(MomentKernel<Shape>, kSharedBytes);
    if (error != cudaSuccess) return error;
    const uint32_t blocks = plan.moment_chunks * (Shape::kHeadDim / kTileChannels);
    MomentKernel<Shape><<<plan.base.heads * blocks, kThreads, kSharedBytes, stream>>>(plan);
    SumKernel<Shape><<<plan.base.heads * Shape::kHeadDim, kDim, 0, stream>>>(plan);
    return cudaGetLastError();
  });
}

}  // namespace attnd::gpu::cuda
