// SPDX-License-Identifier: Apache-2.0
//
// Means: of all keys of a head, then of each cluster's members while iterating.
#include "gpu/cuda/index/index_kernels.cuh"
#include "gpu/cuda/index/index_workers.cuh"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kThreads = kBlockWarps * 32;
constexpr uint32_t kSeedBlockClusters = 32;

// Stores centroid m + d: `delta` is d of this lane's channels, in units. All lanes of a warp.
template <typename Shape>
__device__ __forceinline__ void StoreCentroid(const Head& head, const HeadScale& scale,
                                              uint32_t cluster,
                                              const float (&delta)[Shape::kHeadDim / 32]) {
  constexpr uint32_t kDim = Shape::kHeadDim;
  const uint32_t first_channel = threadIdx.x % 32 * (kDim / 32);
  // [head_dim], from this lane's first channel on
  const auto* mean = head.At<const float>(head.plan.layout.mean) + first_channel;
  auto* fragments = head.At<uint16_t>(head.plan.layout.fragments);  // by FragmentOffset
  double bias = 0;
#pragma unroll
  for (uint32_t e = 0; e < kDim / 32; e += 2) {
    const uint32_t pair =
        Shape::Element::Pack(delta[e] * scale.fragment, delta[e + 1] * scale.fragment);
    *reinterpret_cast<uint32_t*>(fragments + FragmentOffset<kDim>(cluster, first_channel + e)) =
        pair;
    const float2 stored = Shape::Element::Unpack(pair);
    const double low = stored.x * scale.from_fragment, high = stored.y * scale.from_fragment;
    bias += low * (mean[e] + low / 2) + high * (mean[e + 1] + high / 2);
  }
  bias = WarpSum(bias);
  if (threadIdx.x % 32 == 0) {
    head.At<float>(head.plan.layout.bias)[cluster] = static_cast<float>(-bias * scale.bias);
  }
}

// A place in the assignment's tiles that has no cluster and never wins a token.
template <typename Shape>
__device__ __forceinline__ void StoreNoCentroid(const Head& head, uint32_t cluster) {
  constexpr uint32_t kDim = Shape::kHeadDim;
  const uint32_t first_channel = threadIdx.x % 32 * (kDim / 32);
  auto* fragments = head.At<uint16_t>(head.plan.layout.fragments);  // by FragmentOffset
#pragma unroll
  for (uint32_t e = 0; e < kDim / 32; e += 2) {
    *reinterpret_cast<uint32_t*>(fragments + FragmentOffset<kDim>(cluster, first_channel + e)) = 0;
  }
  if (threadIdx.x % 32 == 0) head.At<float>(head.plan.layout.bias)[cluster] = -CUDART_INF_F;
}

// Powers of two, of a head whose greatest key is `greatest` in absolute value, finite. A key is
// below 2 units and d below 4. Exponents are held where their powers are normal.
template <typename Element>
__device__ __forceinline__ HeadScale ScaleOf(float greatest) {
  const int exponent = max(-100, min(126, greatest == 0 ? 0 : ilogbf(greatest)));
  // fp16 numbers end at 2^16 and lose bits below 2^-14: d in fragments is below 2^15. bf16 has the
  // range of float: products of keys and d come to about 1.
  const int fragment = Element::kDtype == DType::kFp16 ? 13 : max(-100, min(100, -exponent));
  return {ldexpf(1, -exponent), ldexpf(1, fragment), ldexpf(1, -fragment),
          ldexpf(1, exponent + fragment)};
}

// The mean of the members at [begin, end) of the order, without m, in units: this lane's channels.
template <typename Shape, typename Workers>
__device__ __forceinline__ void MeanOfMembers(const Head& head, const HeadScale& scale,
                                              Workers workers, uint32_t begin, uint32_t end,
                                              float* shared, float (&delta)[Shape::kHeadDim / 32]) {
  constexpr uint32_t kPart = Shape::kHeadDim / 32;
  const uint32_t unclustered = head.plan.unclustered;
  const auto* order = head.At<const uint16_t>(head.plan.layout.order);  // [tokens]
  // [head_dim], from this lane's first channel on
  const auto* mean = head.At<const float>(head.plan.layout.mean) + threadIdx.x % 32 * kPart;
  const MemberRange part = workers.Part(begin, end);
  // Sums of 32 members, then sums of those, so that clusters of thousands stay exact enough.
  float some[kPart] = {};
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) delta[e] = 0;
  ForRows<kPart / 2>(
      part.begin, part.end, [&](uint32_t place) { return head.KeyRow(unclustered + order[place]); },
      [&](const uint32_t(&pairs)[kPart / 2]) {
#pragma unroll
        for (uint32_t p = 0; p < kPart / 2; ++p) {
          const float2 k = Shape::Element::Unpack(pairs[p]);
          some[2 * p] += fmaf(k.x, scale.to_unit, -mean[2 * p]);
          some[2 * p + 1] += fmaf(k.y, scale.to_unit, -mean[2 * p + 1]);
        }
      },
      [&] {
#pragma unroll
        for (uint32_t e = 0; e < kPart; ++e) {
          delta[e] += some[e];
          some[e] = 0;
        }
      });
  workers.Sum(delta, shared);
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) delta[e] /= static_cast<float>(end - begin);
}

// -------------------------------------------------------------------------------------------------
// Kernels.
// -------------------------------------------------------------------------------------------------

// Thread block b: sums keys [b % chunks * kMeanChunkTokens, + kMeanChunkTokens) of head b / chunks.
template <typename Shape>
__global__ void __launch_bounds__(kThreads) SumKernel(const __grid_constant__ IndexPlan plan) {
  constexpr uint32_t kPart = Shape::kHeadDim / 32;
  __shared__ double sums[kBlockWarps][Shape::kHeadDim];
  __shared__ float greatest[kBlockWarps];
  const Head head(plan, blockIdx.x / plan.mean_chunks);
  const uint32_t chunk = blockIdx.x % plan.mean_chunks;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t run = kMeanChunkTokens / kBlockWarps;
  const uint32_t begin = min(plan.tokens, chunk * kMeanChunkTokens + warp * run);
  const uint32_t end = min(plan.tokens, begin + run);

  double sum[kPart] = {};
  float most = 0;
  ForRows<kPart / 2>(
      begin, end, [&](uint32_t token) { return head.KeyRow(plan.unclustered + token); },
      [&](const uint32_t(&pairs)[kPart / 2]) {
#pragma unroll
        for (uint32_t p = 0; p < kPart / 2; ++p) {
          const float2 k = Shape::Element::Unpack(pairs[p]);
          sum[2 * p] += k.x;
          sum[2 * p + 1] += k.y;
          most = fmaxf(most, fmaxf(fabsf(k.x), fabsf(k.y)));
        }
      },
      [] {});
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) sums[warp][lane * kPart + e] = sum[e];
  most = WarpMax(most);
  if (lane == 0) greatest[warp] = most;
  __syncthreads();

  auto* partial_sums = head.At<double>(plan.layout.partial_sums);  // [chunks][head_dim]
  auto* partial_max = head.At<float>(plan.layout.partial_max);     // [chunks]
  for (uint32_t c = threadIdx.x; c < Shape::kHeadDim; c += kThreads) {
    double all = 0;
    for (uint32_t w = 0; w < kBlockWarps; ++w) all += sums[w][c];
    partial_sums[chunk * Shape::kHeadDim + c] = all;
  }
  if (threadIdx.x == 0) {
    for (uint32_t w = 1; w < kBlockWarps; ++w) most = fmaxf(most, greatest[w]);
    partial_max[chunk] = most;
  }
}

// Thread block b: head b.
template <typename Shape>
__global__ void __launch_bounds__(Shape::kHeadDim)
    MeanKernel(const __grid_constant__ IndexPlan plan) {
  const Head head(plan, blockIdx.x);
  const auto* partial_sums = head.At<const double>(plan.layout.partial_sums);  // [chunks][head_dim]
  const auto* partial_max = head.At<const float>(plan.layout.partial_max);     // [chunks]
  float greatest = 0;
  double sum = 0;
  for (uint32_t chunk = 0; chunk < plan.mean_chunks; ++chunk) {
    greatest = fmaxf(greatest, partial_max[chunk]);
    sum += partial_sums[chunk * Shape::kHeadDim + threadIdx.x];
  }
  const HeadScale scale = ScaleOf<typename Shape::Element>(greatest);
  head.At<float>(plan.layout.mean)[threadIdx.x] =
      static_cast<float>(sum / plan.tokens * scale.to_unit);
  if (threadIdx.x == 0) *head.At<HeadScale>(plan.layout.scale) = scale;
}

// Thread block b: places [b % blocks * kSeedBlockClusters, + kSeedBlockClusters) of head b /
// blocks.
template <typename Shape>
__global__ void __launch_bounds__(kThreads)
    SeedKernel(const __grid_constant__ IndexPlan plan, uint32_t blocks) {
  constexpr uint32_t kPart = Shape::kHeadDim / 32;
  const Head head(plan, blockIdx.x / blocks);
  const HeadScale scale = *head.At<const HeadScale>(plan.layout.scale);
  const uint32_t lane = threadIdx.x % 32;
  const auto* mean = head.At<const float>(plan.layout.mean) + lane * kPart;  // [head_dim]
  const uint32_t first = blockIdx.x % blocks * kSeedBlockClusters;
  for (uint32_t c = first + threadIdx.x / 32; c < first + kSeedBlockClusters; c += kBlockWarps) {
    if (c >= plan.clusters) {
      StoreNoCentroid<Shape>(head, c);
      continue;
    }
    const auto token = static_cast<uint32_t>(uint64_t{c} * plan.tokens / plan.clusters);
    uint32_t pairs[kPart / 2];
    LoadPairs(head.KeyRow(plan.unclustered + token), lane, pairs);
    float delta[kPart];
#pragma unroll
    for (uint32_t p = 0; p < kPart / 2; ++p) {
      const float2 k = Shape::Element::Unpack(pairs[p]);
      delta[2 * p] = fmaf(k.x, scale.to_unit, -mean[2 * p]);
      delta[2 * p + 1] = fmaf(k.y, scale.to_unit, -mean[2 * p + 1]);
    }
    StoreCentroid<Shape>(head, scale, c, delta);
  }
}

// Thread block b: moves clusters [b % blocks * kBlockClusters, + kBlockClusters) of head b / blocks
// to their members' means. An empty cluster keeps its place: it may win tokens again.
template <typename Shape>
__global__ void __launch_bounds__(kThreads, Shape::kHeadDim <= 192 ? 3 : 2)
    MoveKernel(const __grid_constant__ IndexPlan plan, uint32_t blocks) {
  __shared__ float shared[kBlockWarps * Shape::kHeadDim];
  const Head head(plan, blockIdx.x / blocks);
  const HeadScale scale = *head.At<const HeadScale>(plan.layout.scale);
  const auto* starts = head.At<const uint32_t>(plan.layout.starts);  // [clusters + 1]
  const uint32_t first = blockIdx.x % blocks * kBlockClusters;
  const auto move = [&](auto workers, uint32_t cluster, uint32_t begin, uint32_t end) {
    if (begin == end) return;
    float delta[Shape::kHeadDim / 32];
    MeanOfMembers<Shape>(head, scale, workers, begin, end, shared, delta);
    if (workers.Leads()) StoreCentroid<Shape>(head, scale, cluster, delta);
  };
  ForClusters(first, min(plan.clusters, first + kBlockClusters), starts, move);
}

// Values' size is none of these kernels' business: they are compiled once for each head_dim.
template <typename Given>
using KeyShape = ShapeConstant<typename Given::Element, Given::kHeadDim, 0>;

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launchers.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchCentre(const KernelShape& shape, const IndexPlan& plan, cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    using Shape = KeyShape<decltype(constant)>;
    SumKernel<Shape><<<plan.heads * plan.mean_chunks, kThreads, 0, stream>>>(plan);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    MeanKernel<Shape><<<plan.heads, Shape::kHeadDim, 0, stream>>>(plan);
    return cudaGetLastError();
  });
}

cudaError_t LaunchSeed(const KernelShape& shape, const IndexPlan& plan, cudaStream_t stream) {
  static_assert(kTileClusters % kSeedBlockClusters == 0);
  return DispatchShape(shape, [&](auto constant) {
    using Shape = KeyShape<decltype(constant)>;
    const uint32_t blocks = plan.padded_clusters / kSeedBlockClusters;
    SeedKernel<Shape><<<plan.heads * blocks, kThreads, 0, stream>>>(plan, blocks);
    return cudaGetLastError();
  });
}

cudaError_t LaunchMove(const KernelShape& shape, const IndexPlan& plan, cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    using Shape = KeyShape<decltype(constant)>;
    const uint32_t blocks = CeilDiv(plan.clusters, kBlockClusters);
    MoveKernel<Shape><<<plan.heads * blocks, kThreads, 0, stream>>>(plan, blocks);
    return cudaGetLastError();
  });
}

}  // namespace attnd::gpu::cuda
