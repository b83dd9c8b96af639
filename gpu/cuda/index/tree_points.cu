// SPDX-License-Identifier: Apache-2.0
//
// The points of a tree: means of keys and values over the segment, which are also the bases of the
// index's rows in bytes, then root mean square lengths, then the points.
#include "gpu/cuda/index/index_workers.cuh"
#include "gpu/cuda/index/tree_kernels.cuh"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kThreads = kBlockWarps * 32;
constexpr uint32_t kPointBlockTokens = 64;
constexpr double kLeastLength = 1e-30;
constexpr float kPointMax = 60000;  // what fp16 holds; points reach 256 = sqrt(kIndexTokensMax)

// The tokens of this warp in chunk b % chunks.
__device__ __forceinline__ MemberRange WarpTokens(const IndexPlan& plan, uint32_t chunk) {
  constexpr uint32_t kRun = kMeanChunkTokens / kBlockWarps;
  const uint32_t begin = min(plan.tokens, chunk * kMeanChunkTokens + threadIdx.x / 32 * kRun);
  return {begin, min(plan.tokens, begin + kRun)};
}

// Sums of this warp's rows; sums: [32 * kPart] of this warp.
template <typename Element, uint32_t kPart, typename Row>
__device__ __forceinline__ void SumRows(MemberRange tokens, Row row, double* sums) {
  double sum[kPart] = {};
  AddRows<Element>(tokens, row, sum);
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) sums[threadIdx.x % 32 * kPart + e] = sum[e];
}

// Thread block b: sums rows [b % chunks * kMeanChunkTokens, + kMeanChunkTokens) of head b / chunks.
template <typename Shape>
__global__ void __launch_bounds__(kThreads) SumKernel(const __grid_constant__ TreePlan plan) {
  constexpr uint32_t kDim = kPointDim<Shape>;
  __shared__ double sums[kBlockWarps][kDim];
  const Head head(plan.base, blockIdx.x / plan.base.mean_chunks);
  const uint32_t chunk = blockIdx.x % plan.base.mean_chunks, first = plan.base.unclustered;
  const MemberRange tokens = WarpTokens(plan.base, chunk);
  double* own = sums[threadIdx.x / 32];
  SumRows<typename Shape::Element, Shape::kHeadDim / 32>(
      tokens, [&](uint32_t t) { return head.KeyRow(first + t); }, own);
  SumRows<typename Shape::Element, Shape::kValueDim / 32>(
      tokens, [&](uint32_t t) { return head.ValueRow(first + t); }, own + Shape::kHeadDim);
  __syncthreads();
  auto* partial = head.At<double>(plan.base.layout.partial_sums) + chunk * kDim;
  for (uint32_t c = threadIdx.x; c < kDim; c += kThreads) {
    double all = 0;
    for (uint32_t w = 0; w < kBlockWarps; ++w) all += sums[w][c];
    partial[c] = all;
  }
}

// Thread block b: head b.
template <typename Shape>
__global__ void __launch_bounds__(kPointDim<Shape>)
    MeanKernel(const __grid_constant__ TreePlan plan) {
  constexpr uint32_t kDim = kPointDim<Shape>;
  const Head head(plan.base, blockIdx.x);
  const auto* partial = head.At<const double>(plan.base.layout.partial_sums);  // [chunks][kDim]
  double sum = 0;
  for (uint32_t c = 0; c < plan.base.mean_chunks; ++c) sum += partial[c * kDim + threadIdx.x];
  const TreeOffsets& tree = head.job.tree;
  float* base = threadIdx.x < Shape::kHeadDim
                    ? PartOf<float>(head, tree.key_base) + threadIdx.x
                    : PartOf<float>(head, tree.value_base) + (threadIdx.x - Shape::kHeadDim);
  *base = static_cast<float>(sum / plan.base.tokens);
}

// This warp's sum of squared distances from `mean`, [32 * kPart].
template <typename Element, uint32_t kPart, typename Row>
__device__ __forceinline__ double SumSquares(MemberRange tokens, Row row, const float* mean) {
  float own[kPart];
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) own[e] = mean[threadIdx.x % 32 * kPart + e];
  double sum = 0;
  ForRows<kPart / 2>(
      tokens.begin, tokens.end, row,
      [&](const uint32_t(&pairs)[kPart / 2]) {
#pragma unroll
        for (uint32_t p = 0; p < kPart / 2; ++p) {
          const float2 x = Element::Unpack(pairs[p]);
          const double low = x.x - own[2 * p], high = x.y - own[2 * p + 1];
          sum += low * low + high * high;
        }
      },
      [] {});
  return WarpSum(sum);
}

// Thread blocks as SumKernel's.
template <typename Shape>
__global__ void __launch_bounds__(kThreads) SquaresKernel(const __grid_constant__ TreePlan plan) {
  __shared__ double sums[kBlockWarps][2];
  const Head head(plan.base, blockIdx.x / plan.base.mean_chunks);
  const uint32_t chunk = blockIdx.x % plan.base.mean_chunks, first = plan.base.unclustered;
  const MemberRange tokens = WarpTokens(plan.base, chunk);
  const double keys = SumSquares<typename Shape::Element, Shape::kHeadDim / 32>(
      tokens, [&](uint32_t t) { return head.KeyRow(first + t); },
      PartOf<const float>(head, head.job.tree.key_base));
  const double values = SumSquares<typename Shape::Element, Shape::kValueDim / 32>(
      tokens, [&](uint32_t t) { return head.ValueRow(first + t); },
      PartOf<const float>(head, head.job.tree.value_base));
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32][0] = keys;
    sums[threadIdx.x / 32][1] = values;
  }
  __syncthreads();
  if (threadIdx.x >= 2) return;
  double all = 0;
  for (uint32_t w = 0; w < kBlockWarps; ++w) all += sums[w][threadIdx.x];
  head.At<double>(plan.scratch.partial_squares)[chunk * 2 + threadIdx.x] = all;
}

// What keys (0) or values (1) are multiplied with.
__device__ __forceinline__ float ScaleOf(const Head& head, const TreePlan& plan, uint32_t which) {
  const auto* partial = head.At<const double>(plan.scratch.partial_squares);  // [chunks][2]
  double squares = 0;
  for (uint32_t c = 0; c < plan.base.mean_chunks; ++c) squares += partial[c * 2 + which];
  const double length = max(sqrt(squares / plan.base.tokens), kLeastLength);
  return static_cast<float>((which == 0 ? 1 : kIndexValueShare) / length);
}

__device__ __forceinline__ float Bounded(float x) { return fminf(fmaxf(x, -kPointMax), kPointMax); }

// Writes the part of this warp's point that is made of one row.
template <typename Element, uint32_t kPart>
__device__ __forceinline__ void StorePoint(const std::byte* row, const float* mean, float scale,
                                           __half* point) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t pairs[kPart / 2];
  LoadPairs(row, lane, pairs);
#pragma unroll
  for (uint32_t p = 0; p < kPart / 2; ++p) {
    const float2 x = Element::Unpack(pairs[p]);
    const float* m = mean + lane * kPart + 2 * p;
    reinterpret_cast<uint32_t*>(point)[lane * (kPart / 2) + p] =
        Fp16::Pack(Bounded((x.x - m[0]) * scale), Bounded((x.y - m[1]) * scale));
  }
}

// Thread block b: tokens [b % blocks * kPointBlockTokens, + kPointBlockTokens) of head b / blocks.
template <typename Shape>
__global__ void __launch_bounds__(kThreads)
    PointKernel(const __grid_constant__ TreePlan plan, uint32_t blocks) {
  const Head head(plan.base, blockIdx.x / blocks);
  const float key_scale = ScaleOf(head, plan, 0), value_scale = ScaleOf(head, plan, 1);
  const auto* key_mean = PartOf<const float>(head, head.job.tree.key_base);
  const auto* value_mean = PartOf<const float>(head, head.job.tree.value_base);
  const uint32_t first = blockIdx.x % blocks * kPointBlockTokens;
  const uint32_t end = min(plan.base.tokens, first + kPointBlockTokens);
  for (uint32_t t = first + threadIdx.x / 32; t < end; t += kBlockWarps) {
    __half* point = PointsOf(head) + uint64_t{t} * kPointDim<Shape>;
    StorePoint<typename Shape::Element, Shape::kHeadDim / 32>(
        head.KeyRow(plan.base.unclustered + t), key_mean, key_scale, point);
    StorePoint<typename Shape::Element, Shape::kValueDim / 32>(
        head.ValueRow(plan.base.unclustered + t), value_mean, value_scale, point + Shape::kHeadDim);
  }
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launcher.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchTreePoints(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    using Shape = decltype(constant);
    const uint32_t heads = plan.base.heads, chunks = plan.base.mean_chunks;
    SumKernel<Shape><<<heads * chunks, kThreads, 0, stream>>>(plan);
    MeanKernel<Shape><<<heads, kPointDim<Shape>, 0, stream>>>(plan);
    SquaresKernel<Shape><<<heads * chunks, kThreads, 0, stream>>>(plan);
    const uint32_t blocks = CeilDiv(plan.base.tokens, kPointBlockTokens);
    PointKernel<Shape><<<heads * blocks, kThreads, 0, stream>>>(plan, blocks);
    return cudaGetLastError();
  });
}

}  // namespace attnd::gpu::cuda
