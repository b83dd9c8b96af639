// SPDX-License-Identifier: Apache-2.0
//
// How far a token's key and value are from its leaf's means.
#ifndef ATTND_GPU_CUDA_INDEX_TREE_DEVIATIONS_CUH_
#define ATTND_GPU_CUDA_INDEX_TREE_DEVIATIONS_CUH_

#include "gpu/cuda/index/index_mma.cuh"
#include "gpu/cuda/index/tree_kernels.cuh"

namespace attnd::gpu::cuda {

// As RegressionDescriber has it: keys deviate at most by this, so that sums of products are floats.
inline constexpr float kDeviationMax = 1e16f;

__device__ __forceinline__ float BoundedDeviation(float x) {
  return fminf(fmaxf(x, -kDeviationMax), kDeviationMax);
}

// Stores a row's deviations from `mean`, [32 * kPart], as tf32; one warp.
template <typename Element, uint32_t kPart, bool kBounded>
__device__ __forceinline__ void StoreRowDeviations(const std::byte* row, const float* mean,
                                                   uint32_t* to) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t pairs[kPart / 2];
  LoadPairs(row, lane, pairs);
#pragma unroll
  for (uint32_t p = 0; p < kPart / 2; ++p) {
    const uint32_t at = lane * kPart + 2 * p;
    const float2 x = Element::Unpack(pairs[p]);
    const float low = x.x - mean[at], high = x.y - mean[at + 1];
    to[at] = ToTf32(kBounded ? BoundedDeviation(low) : low);
    to[at + 1] = ToTf32(kBounded ? BoundedDeviation(high) : high);
  }
}

// Of clustered token `place` of the segment's order, key then value; zeros if it is not valid.
template <typename Shape>
__device__ __forceinline__ void StoreDeviations(const Head& head, const TreePlan& plan,
                                                uint32_t place, bool valid, uint32_t* to) {
  if (!valid) {
    for (uint32_t c = threadIdx.x % 32; c < kPointDim<Shape>; c += 32) to[c] = 0;
    return;
  }
  const uint32_t leaf = head.At<const uint16_t>(plan.scratch.leaf_of_slot)[place];
  const float* mean = head.At<const float>(plan.scratch.means) + uint64_t{leaf} * kPointDim<Shape>;
  const uint32_t slot = plan.base.unclustered + place;
  StoreRowDeviations<typename Shape::Element, Shape::kHeadDim / 32, true>(OrderedKey(head, slot),
                                                                          mean, to);
  StoreRowDeviations<typename Shape::Element, Shape::kValueDim / 32, false>(
      OrderedValue(head, slot), mean + Shape::kHeadDim, to + Shape::kHeadDim);
}

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_INDEX_TREE_DEVIATIONS_CUH_
