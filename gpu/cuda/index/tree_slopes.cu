// SPDX-License-Identifier: Apache-2.0
//
// Slopes from the moments, in the axes as they are stored; and what a key's deviation is multiplied
// with to give its coordinates and the values that the slopes predict.
#include "gpu/cuda/index/tree_kernels.cuh"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kBlockRows = 16;  // of a product that a thread block computes
// Axes with less than this share of all variance have no slope: theirs would be one rounding by
// another, as moments are sums of floats.
constexpr float kLeastVarianceShare = 1e-6f;
constexpr float kSlopeMax = 1e18f;  // as RegressionDescriber has it

// Element i of an array of bf16 numbers.
__device__ __forceinline__ float Bf16At(const uint16_t* numbers, uint32_t i) {
  return __uint_as_float(static_cast<uint32_t>(numbers[i]) << 16);
}

// sums[r] = sum_k left[r][k] * right(k, column) of kBlockRows rows; left: shared, [kDim][rows].
template <uint32_t kDim, typename Right>
__device__ __forceinline__ void Multiply(const float (*left)[kBlockRows], Right right,
                                         float (&sums)[kBlockRows]) {
#pragma unroll
  for (uint32_t r = 0; r < kBlockRows; ++r) sums[r] = 0;
#pragma unroll 4
  for (uint32_t k = 0; k < kDim; ++k) {
    const float x = right(k);
#pragma unroll
    for (uint32_t r = 0; r < kBlockRows; ++r) sums[r] += left[k][r] * x;
  }
}

// Along the axes coordinates have no covariance, so each slope is that of its axis alone. A ridge
// of head_dim tokens' worth keeps a short segment from fitting its noise.
__device__ __forceinline__ float SlopeOf(float cross, float squares, float trace, float ridge) {
  if (squares <= kLeastVarianceShare * trace) return 0;
  const float slope = cross / (ridge * squares);
  return slope > kSlopeMax ? kSlopeMax : slope < -kSlopeMax ? -kSlopeMax : slope;
}

// Each warp: the sum of the coordinates' squares along two of the thread block's axes, from what
// the moments make of them.
template <uint32_t kDim>
__device__ __forceinline__ void SumSquares(const float (*axes)[kBlockRows],
                                           const float (*turned)[kDim], float* squares) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t r = threadIdx.x / 32; r < kBlockRows; r += kThreads / 32) {
    float sum = 0;
    for (uint32_t c = lane; c < kDim; c += 32) sum += axes[c][r] * turned[r][c];
    sum = WarpSum(sum);
    if (lane == 0) squares[r] = sum;
  }
}

// Thread block b: axes [b % blocks * kBlockRows, + kBlockRows) of head b / blocks.
template <typename Shape>
__global__ void __launch_bounds__(kThreads) SlopeKernel(const __grid_constant__ TreePlan plan) {
  constexpr uint32_t kDim = Shape::kHeadDim, kAll = kPointDim<Shape>;
  __shared__ float axes[kDim][kBlockRows];
  __shared__ float turned[kBlockRows][kDim];
  __shared__ float squares[kBlockRows];
  __shared__ float trace;
  constexpr uint32_t kBlocks = kDim / kBlockRows;
  const Head head(plan.base, blockIdx.x / kBlocks);
  const uint32_t first = blockIdx.x % kBlocks * kBlockRows;
  const auto* index_axes = PartOf<const uint16_t>(head, head.job.tree.axes);
  const auto* moments = head.At<const float>(plan.scratch.moments);  // [kDim][kAll]
  for (uint32_t i = threadIdx.x; i < kBlockRows * kDim; i += kThreads) {
    axes[i % kDim][i / kDim] = Bf16At(index_axes, first * kDim + i);
  }
  if (threadIdx.x < 32) {
    float sum = 0;
    for (uint32_t c = threadIdx.x; c < kDim; c += 32) sum += moments[c * kAll + c];
    sum = WarpSum(sum);
    if (threadIdx.x == 0) trace = sum;
  }
  __syncthreads();
  float sums[kBlockRows];
  for (uint32_t column = threadIdx.x; column < kDim; column += kThreads) {
    Multiply<kDim>(
        axes, [&](uint32_t k) { return moments[k * kAll + column]; }, sums);
#pragma unroll
    for (uint32_t r = 0; r < kBlockRows; ++r) turned[r][column] = sums[r];
  }
  __syncthreads();
  SumSquares<kDim>(axes, turned, squares);
  __syncthreads();
  auto* slopes = PartOf<uint16_t>(head, head.job.tree.slopes);
  const float ridge = 1 + static_cast<float>(kDim) / static_cast<float>(plan.base.tokens);
  for (uint32_t column = threadIdx.x; column < Shape::kValueDim; column += kThreads) {
    Multiply<kDim>(
        axes, [&](uint32_t k) { return moments[k * kAll + kDim + column]; }, sums);
#pragma unroll
    for (uint32_t r = 0; r < kBlockRows; ++r) {
      slopes[(first + r) * Shape::kValueDim + column] =
          static_cast<uint16_t>(Bf16::Pack(SlopeOf(sums[r], squares[r], trace, ridge), 0));
    }
  }
}

// Thread block b: channels [b % blocks * kBlockRows, + kBlockRows) of keys of head b / blocks.
template <typename Shape>
__global__ void __launch_bounds__(kThreads) MapKernel(const __grid_constant__ TreePlan plan) {
  constexpr uint32_t kDim = Shape::kHeadDim, kAll = kPointDim<Shape>;
  __shared__ float axes[kDim][kBlockRows];  // [axis][channel]
  constexpr uint32_t kBlocks = kDim / kBlockRows;
  const Head head(plan.base, blockIdx.x / kBlocks);
  const uint32_t first = blockIdx.x % kBlocks * kBlockRows;
  const auto* index_axes = PartOf<const uint16_t>(head, head.job.tree.axes);
  const auto* slopes = PartOf<const uint16_t>(head, head.job.tree.slopes);
  auto* maps = head.At<float>(plan.scratch.maps);  // [kDim][kAll]
  for (uint32_t i = threadIdx.x; i < kBlockRows * kDim; i += kThreads) {
    const uint32_t axis = i / kBlockRows, channel = i % kBlockRows;
    axes[axis][channel] = Bf16At(index_axes, axis * kDim + first + channel);
  }
  __syncthreads();
  for (uint32_t axis = threadIdx.x; axis < kDim; axis += kThreads) {
    for (uint32_t r = 0; r < kBlockRows; ++r) maps[(first + r) * kAll + axis] = axes[axis][r];
  }
  float sums[kBlockRows];
  for (uint32_t column = threadIdx.x; column < Shape::kValueDim; column += kThreads) {
    Multiply<kDim>(
        axes, [&](uint32_t k) { return Bf16At(slopes, k * Shape::kValueDim + column); }, sums);
#pragma unroll
    for (uint32_t r = 0; r < kBlockRows; ++r) {
      maps[(first + r) * kAll + kDim + column] = sums[r];
    }
  }
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launcher.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchTreeSlopes(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    using Shape = decltype(constant);
    const uint32_t blocks = plan.base.heads * (Shape::kHeadDim / kBlockRows);
    SlopeKernel<Shape><<<blocks, kThreads, 0, stream>>>(plan);
    MapKernel<Shape><<<blocks, kThreads, 0, stream>>>(plan);
    return cudaGetLastError();
  });
}

}  // namespace attnd::gpu::cuda
