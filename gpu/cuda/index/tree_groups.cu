// SPDX-License-Identifier: Apache-2.0
//
// The groups of a tree while they are made: their centroids at first, after each assignment, and
// half way, when the late ones are made. Assignment and sort are those of index_assign.cu and
// index_sort.cu.
#include <math_constants.h>

#include "gpu/cuda/index/index_workers.cuh"
#include "gpu/cuda/index/tree_kernels.cuh"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kThreads = kBlockWarps * 32;
// Groups that a thread block moves: one for each warp, as their members are many.
constexpr uint32_t kMoveGroups = kBlockWarps;

// A centroid as the assignment's operand, with minus half of its squared length.
template <uint32_t kDim>
__device__ __forceinline__ void StoreCentroid(const Head& head, uint32_t cluster,
                                              const float (&row)[kDim / 32]) {
  const uint32_t first_channel = threadIdx.x % 32 * (kDim / 32);
  auto* fragments = head.At<uint16_t>(head.plan.layout.fragments);  // by FragmentOffset
  float norm2 = 0;
#pragma unroll
  for (uint32_t e = 0; e < kDim / 32; e += 2) {
    const uint32_t pair = Fp16::Pack(row[e], row[e + 1]);
    *reinterpret_cast<uint32_t*>(fragments + FragmentOffset<kDim>(cluster, first_channel + e)) =
        pair;
    const float2 stored = Fp16::Unpack(pair);
    norm2 += stored.x * stored.x + stored.y * stored.y;
  }
  norm2 = WarpSum(norm2);
  if (threadIdx.x % 32 == 0) head.At<float>(head.plan.layout.bias)[cluster] = -norm2 / 2;
}

template <uint32_t kDim>
__device__ __forceinline__ void LoadCentroid(const Head& head, uint32_t cluster,
                                             float (&row)[kDim / 32]) {
  const uint32_t first_channel = threadIdx.x % 32 * (kDim / 32);
  const auto* fragments = head.At<const uint16_t>(head.plan.layout.fragments);
#pragma unroll
  for (uint32_t e = 0; e < kDim / 32; e += 2) {
    const float2 pair = Fp16::Unpack(*reinterpret_cast<const uint32_t*>(
        fragments + FragmentOffset<kDim>(cluster, first_channel + e)));
    row[e] = pair.x;
    row[e + 1] = pair.y;
  }
}

template <uint32_t kDim>
__device__ __forceinline__ const std::byte* PointRow(const Head& head, uint32_t token) {
  return reinterpret_cast<const std::byte*>(PointsOf(head) + uint64_t{token} * kDim);
}

template <uint32_t kDim>
__device__ __forceinline__ void LoadPoint(const Head& head, uint32_t token,
                                          float (&row)[kDim / 32]) {
  uint32_t pairs[kDim / 64];
  LoadPairs(PointRow<kDim>(head, token), threadIdx.x % 32, pairs);
#pragma unroll
  for (uint32_t p = 0; p < kDim / 64; ++p) {
    const float2 x = Fp16::Unpack(pairs[p]);
    row[2 * p] = x.x;
    row[2 * p + 1] = x.y;
  }
}

// Thread block b: places [b % blocks * kBlockWarps, + kBlockWarps) of head b / blocks. Late groups,
// and places that have no group, win no token.
template <uint32_t kDim>
__global__ void __launch_bounds__(kThreads)
    SeedKernel(const __grid_constant__ TreePlan plan, uint32_t blocks) {
  const Head head(plan.base, blockIdx.x / blocks);
  const uint32_t c = blockIdx.x % blocks * kBlockWarps + threadIdx.x / 32;
  const uint32_t early = plan.base.clusters - plan.late_groups;
  float row[kDim / 32] = {};
  if (c < early) {
    const auto token = static_cast<uint32_t>(uint64_t{c} * plan.base.tokens / early);
    LoadPoint<kDim>(head, token, row);
  }
  StoreCentroid<kDim>(head, c, row);
  __syncwarp();
  if (c >= early && threadIdx.x % 32 == 0) {
    head.At<float>(plan.base.layout.bias)[c] = -CUDART_INF_F;
  }
}

// Thread block b: moves groups [b % blocks * kMoveGroups, + kMoveGroups) of head b / blocks to
// their members' means. An empty one keeps its place: it may win tokens again.
template <uint32_t kDim>
__global__ void __launch_bounds__(kThreads)
    MoveKernel(const __grid_constant__ TreePlan plan, uint32_t blocks) {
  __shared__ float shared[kBlockWarps * kDim];
  const Head head(plan.base, blockIdx.x / blocks);
  const auto* starts = head.At<const uint32_t>(plan.base.layout.starts);  // [clusters + 1]
  const auto* order = head.At<const uint16_t>(plan.base.layout.order);    // [tokens]
  const auto move = [&](auto workers, uint32_t cluster, uint32_t begin, uint32_t end) {
    if (begin == end) return;
    const MemberRange part = workers.Part(begin, end);
    // Sums of 32 members, then sums of those, so that groups of thousands stay exact enough.
    float some[kDim / 32] = {}, sum[kDim / 32] = {};
    ForRows<kDim / 64>(
        part.begin, part.end, [&](uint32_t place) { return PointRow<kDim>(head, order[place]); },
        [&](const uint32_t(&pairs)[kDim / 64]) {
#pragma unroll
          for (uint32_t p = 0; p < kDim / 64; ++p) {
            const float2 x = Fp16::Unpack(pairs[p]);
            some[2 * p] += x.x;
            some[2 * p + 1] += x.y;
          }
        },
        [&] {
#pragma unroll
          for (uint32_t e = 0; e < kDim / 32; ++e) {
            sum[e] += some[e];
            some[e] = 0;
          }
        });
    workers.Sum(sum, shared);
#pragma unroll
    for (uint32_t e = 0; e < kDim / 32; ++e) sum[e] /= static_cast<float>(end - begin);
    if (workers.Leads()) StoreCentroid<kDim>(head, cluster, sum);
  };
  const uint32_t first = blockIdx.x % blocks * kMoveGroups;
  ForClusters(first, min(plan.base.clusters, first + kMoveGroups), starts, move);
}

// Each warp of a thread block: an early group's sum of squared distances from its moved centroid,
// and its farthest member, the first of equals. Head b / blocks.
template <uint32_t kDim>
__global__ void __launch_bounds__(kThreads)
    SpreadKernel(const __grid_constant__ TreePlan plan, uint32_t blocks) {
  const Head head(plan.base, blockIdx.x / blocks);
  const uint32_t c = blockIdx.x % blocks * kBlockWarps + threadIdx.x / 32;
  if (c >= plan.base.clusters - plan.late_groups) return;
  const auto* starts = head.At<const uint32_t>(plan.base.layout.starts);  // [clusters + 1]
  const auto* order = head.At<const uint16_t>(plan.base.layout.order);    // [tokens]
  float centroid[kDim / 32];
  LoadCentroid<kDim>(head, c, centroid);
  float squares = 0, greatest = -1;
  uint32_t place = starts[c], farthest = place;
  ForRows<kDim / 64>(
      starts[c], starts[c + 1], [&](uint32_t p) { return PointRow<kDim>(head, order[p]); },
      [&](const uint32_t(&pairs)[kDim / 64]) {
        float square = 0;
#pragma unroll
        for (uint32_t p = 0; p < kDim / 64; ++p) {
          const float2 x = Fp16::Unpack(pairs[p]);
          const float low = x.x - centroid[2 * p], high = x.y - centroid[2 * p + 1];
          square += low * low + high * high;
        }
        square = WarpSum(square);
        squares += square;
        if (square > greatest) {
          greatest = square;
          farthest = place;
        }
        ++place;
      },
      [] {});
  if (threadIdx.x % 32 != 0) return;
  head.At<float>(plan.scratch.spreads)[c] = squares;
  head.At<uint32_t>(plan.scratch.farthest)[c] = squares > 0 ? order[farthest] : 0;
}

// Each warp of a thread block: an early group. If it is among the widest, a late group starts at
// its farthest member; groups in one point give none.
template <uint32_t kDim>
__global__ void __launch_bounds__(kThreads)
    SplitKernel(const __grid_constant__ TreePlan plan, uint32_t blocks) {
  const Head head(plan.base, blockIdx.x / blocks);
  const uint32_t c = blockIdx.x % blocks * kBlockWarps + threadIdx.x / 32;
  const uint32_t early = plan.base.clusters - plan.late_groups;
  if (c >= early) return;
  const auto* spreads = head.At<const float>(plan.scratch.spreads);  // [early]
  const float own = spreads[c];
  uint32_t wider = 0;
  for (uint32_t other = threadIdx.x % 32; other < early; other += 32) {
    wider += spreads[other] > own || (spreads[other] == own && other < c);
  }
  wider = WarpSum(wider);
  if (wider >= plan.late_groups || !(own > 0)) return;
  float row[kDim / 32];
  LoadPoint<kDim>(head, head.At<const uint32_t>(plan.scratch.farthest)[c], row);
  StoreCentroid<kDim>(head, early + wider, row);
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launchers.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchTreeSeed(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream) {
  static_assert(kTileClusters % kBlockWarps == 0);
  return DispatchShape(shape, [&](auto constant) {
    const uint32_t blocks = plan.base.padded_clusters / kBlockWarps;
    SeedKernel<kPointDim<decltype(constant)>>
        <<<plan.base.heads * blocks, kThreads, 0, stream>>>(plan, blocks);
    return cudaGetLastError();
  });
}

cudaError_t LaunchTreeMove(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    const uint32_t blocks = CeilDiv(plan.base.clusters, kMoveGroups);
    MoveKernel<kPointDim<decltype(constant)>>
        <<<plan.base.heads * blocks, kThreads, 0, stream>>>(plan, blocks);
    return cudaGetLastError();
  });
}

cudaError_t LaunchTreeSplit(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream) {
  if (plan.late_groups == 0) return cudaSuccess;
  return DispatchShape(shape, [&](auto constant) {
    constexpr uint32_t kDim = kPointDim<decltype(constant)>;
    const uint32_t blocks = CeilDiv(plan.base.clusters, kBlockWarps);
    SpreadKernel<kDim><<<plan.base.heads * blocks, kThreads, 0, stream>>>(plan, blocks);
    SplitKernel<kDim><<<plan.base.heads * blocks, kThreads, 0, stream>>>(plan, blocks);
    return cudaGetLastError();
  });
}

}  // namespace attnd::gpu::cuda
