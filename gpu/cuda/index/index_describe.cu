// SPDX-License-Identifier: Apache-2.0
//
// What the index says about each cluster, from its members' keys and values in double, as the CPU
// does; and the payload in the segment's order.
#include "gpu/cuda/index/index_codes.cuh"
#include "gpu/cuda/index/index_kernels.cuh"
#include "gpu/cuda/index/index_workers.cuh"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kThreads = kBlockWarps * 32;
constexpr uint32_t kGatherWarpSlots = 8;
constexpr uint32_t kGatherBlockSlots = kBlockWarps * kGatherWarpSlots;

// Stores this lane's channels of one vector, rounded to the dtype. row: [32 * kPart].
template <typename Element, uint32_t kPart>
__device__ __forceinline__ void StoreRow(std::byte* row, const double (&values)[kPart]) {
  auto* to = reinterpret_cast<uint32_t*>(row) + threadIdx.x % 32 * (kPart / 2);
#pragma unroll
  for (uint32_t p = 0; p < kPart / 2; ++p) {
    to[p] = Element::Pack(static_cast<float>(values[2 * p]), static_cast<float>(values[2 * p + 1]));
  }
}

// Pass one over a cluster's keys: their mean; pass two: their deviations about it. Both for this
// lane's channels, on every warp of the workers (index_workers.cuh).
template <typename Shape, typename Workers, typename Row>
__device__ __forceinline__ void KeyMoments(Workers workers, uint32_t begin, uint32_t end, Row row,
                                           double* shared, double (&mean)[Shape::kHeadDim / 32],
                                           double (&deviation)[Shape::kHeadDim / 32]) {
  constexpr uint32_t kPart = Shape::kHeadDim / 32;
  const MemberRange part = workers.Part(begin, end);
  const double size = end - begin;
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) mean[e] = deviation[e] = 0;
  ForRows<kPart / 2>(
      part.begin, part.end, row,
      [&](const uint32_t(&pairs)[kPart / 2]) {
#pragma unroll
        for (uint32_t p = 0; p < kPart / 2; ++p) {
          const float2 k = Shape::Element::Unpack(pairs[p]);
          mean[2 * p] += k.x;
          mean[2 * p + 1] += k.y;
        }
      },
      [] {});
  workers.Sum(mean, shared);
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) mean[e] /= size;
  ForRows<kPart / 2>(
      part.begin, part.end, row,
      [&](const uint32_t(&pairs)[kPart / 2]) {
#pragma unroll
        for (uint32_t p = 0; p < kPart / 2; ++p) {
          const float2 k = Shape::Element::Unpack(pairs[p]);
          const double low = k.x - mean[2 * p], high = k.y - mean[2 * p + 1];
          deviation[2 * p] += low * low;
          deviation[2 * p + 1] += high * high;
        }
      },
      [] {});
  workers.Sum(deviation, shared);
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) deviation[e] = sqrt(deviation[e] / size);
}

// The mean value, this lane's channels, on every warp of the workers; returns the mean of |v|^2.
template <typename Shape, typename Workers, typename Row>
__device__ __forceinline__ double ValueMoments(Workers workers, uint32_t begin, uint32_t end,
                                               Row row, double* shared,
                                               double (&mean)[Shape::kValueDim / 32]) {
  constexpr uint32_t kPart = Shape::kValueDim / 32;
  const MemberRange part = workers.Part(begin, end);
  const double size = end - begin;
  double norm2[1] = {0};  // of this lane's channels
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) mean[e] = 0;
  ForRows<kPart / 2>(
      part.begin, part.end, row,
      [&](const uint32_t(&pairs)[kPart / 2]) {
#pragma unroll
        for (uint32_t p = 0; p < kPart / 2; ++p) {
          const float2 v = Shape::Element::Unpack(pairs[p]);
          const double low = v.x, high = v.y;
          mean[2 * p] += low;
          mean[2 * p + 1] += high;
          norm2[0] += low * low + high * high;
        }
      },
      [] {});
  workers.Sum(mean, shared);
  workers.Sum(norm2, shared);
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) mean[e] /= size;
  return WarpSum(norm2[0]) / size;
}

// The token of the segment at a slot of its order.
__device__ __forceinline__ uint32_t TokenAt(const Head& head, uint32_t slot) {
  const uint32_t unclustered = head.plan.unclustered;
  if (slot < unclustered) return slot;
  return unclustered + head.At<const uint16_t>(head.plan.layout.order)[slot - unclustered];
}

// One float of an index part; a single lane of the calling warp writes it.
__device__ __forceinline__ void StoreScalar(std::byte* part, uint32_t cluster, double value) {
  if (threadIdx.x % 32 == 0) reinterpret_cast<float*>(part)[cluster] = static_cast<float>(value);
}

// What the index says of the keys at slots [begin, end).
template <typename Shape, typename Workers>
__device__ __forceinline__ void DescribeKeys(const Head& head, Workers workers, uint32_t cluster,
                                             uint32_t begin, uint32_t end, double* shared) {
  const IndexOffsets& offsets = head.job.offsets;
  std::byte* index = head.Index();
  const auto row = [&](uint32_t slot) { return head.KeyRow(TokenAt(head, slot)); };
  double centroid[Shape::kHeadDim / 32], deviation[Shape::kHeadDim / 32];
  KeyMoments<Shape>(workers, begin, end, row, shared, centroid, deviation);
  if (!workers.Leads()) return;
  StoreRow<typename Shape::Element>(index + offsets.centroids + cluster * head.plan.key_bytes,
                                    centroid);
  auto* codes = reinterpret_cast<uint8_t*>(index + offsets.deviation_codes);
  const double unit = StoreCodes(deviation, codes + cluster * (Shape::kHeadDim / 2));
  StoreScalar(index + offsets.variance_unit, cluster, unit * unit);
  StoreScalar(index + offsets.log_size, cluster, log(static_cast<double>(end - begin)));
}

// And of the values.
template <typename Shape, typename Workers>
__device__ __forceinline__ void DescribeValues(const Head& head, Workers workers, uint32_t cluster,
                                               uint32_t begin, uint32_t end, double* shared) {
  const IndexOffsets& offsets = head.job.offsets;
  std::byte* index = head.Index();
  const auto row = [&](uint32_t slot) { return head.ValueRow(TokenAt(head, slot)); };
  double mean[Shape::kValueDim / 32];
  const double square = ValueMoments<Shape>(workers, begin, end, row, shared, mean);
  if (!workers.Leads()) return;
  StoreRow<typename Shape::Element>(index + offsets.mean_values + cluster * head.plan.value_bytes,
                                    mean);
  double norm2 = 0;
#pragma unroll
  for (uint32_t e = 0; e < Shape::kValueDim / 32; ++e) norm2 += mean[e] * mean[e];
  norm2 = WarpSum(norm2);
  StoreScalar(index + offsets.spread, cluster, sqrt(max(0.0, square - norm2)));
  StoreScalar(index + offsets.value_norm2, cluster, norm2);
}

// -------------------------------------------------------------------------------------------------
// Kernels.
// -------------------------------------------------------------------------------------------------

// Thread block b: clusters [b % blocks * kBlockClusters, + kBlockClusters) of head b / blocks.
// Runs after SortKernel<true>: the head's index has its starts and its cluster count.
template <typename Shape>
__global__ void __launch_bounds__(kThreads)
    DescribeKernel(const __grid_constant__ IndexPlan plan, uint32_t blocks) {
  constexpr uint32_t kWidest =
      Shape::kHeadDim > Shape::kValueDim ? Shape::kHeadDim : Shape::kValueDim;
  __shared__ double shared[kBlockWarps * kWidest];
  const Head head(plan, blockIdx.x / blocks);
  std::byte* index = head.Index();
  const uint32_t clusters = *reinterpret_cast<const uint32_t*>(index);
  const auto* starts =
      reinterpret_cast<const uint32_t*>(index + head.job.offsets.starts);  // [clusters + 1]
  const uint32_t first = blockIdx.x % blocks * kBlockClusters;
  const auto describe = [&](auto workers, uint32_t cluster, uint32_t begin, uint32_t end) {
    DescribeKeys<Shape>(head, workers, cluster, begin, end, shared);
    DescribeValues<Shape>(head, workers, cluster, begin, end, shared);
  };
  ForClusters(first, min(clusters, first + kBlockClusters), starts, describe);
}

// Thread block b: slots [b % blocks * kGatherBlockSlots, + kGatherBlockSlots) of head b / blocks:
// their tokens' rows and positions. A warp moves the same 16 bytes of several rows at a time.
__global__ void __launch_bounds__(kThreads)
    GatherKernel(const __grid_constant__ IndexPlan plan, uint32_t blocks) {
  const Head head(plan, blockIdx.x / blocks);
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t first =
      blockIdx.x % blocks * kGatherBlockSlots + threadIdx.x / 32 * kGatherWarpSlots;
  const uint32_t tokens = plan.unclustered + plan.tokens;
  std::byte* pages = head.job.pages + head.kv_head * head.job.pages_head_bytes;

  // Lane s of the first kGatherWarpSlots knows slot first + s.
  unsigned long long key_row = 0, value_row = 0;
  if (lane < kGatherWarpSlots && first + lane < tokens) {
    const uint32_t slot = first + lane;
    const uint32_t token = TokenAt(head, slot);
    key_row = reinterpret_cast<unsigned long long>(head.KeyRow(token));
    value_row = reinterpret_cast<unsigned long long>(head.ValueRow(token));
    auto* positions = reinterpret_cast<uint16_t*>(head.Index() + head.job.offsets.positions);
    positions[slot] = static_cast<uint16_t>(token);
  }
  // kGatherWarpSlots divides a page, so that these rows follow one another there.
  static_assert(kIndexPageTokens % kGatherWarpSlots == 0);
  std::byte* page = pages + uint64_t{first / kIndexPageTokens} * plan.page_bytes;
  const auto copy = [&](unsigned long long row, std::byte* to, uint32_t row_bytes) {
    for (uint32_t base = 0; base < row_bytes; base += 32 * sizeof(uint4)) {
      const uint32_t at = base + lane * static_cast<uint32_t>(sizeof(uint4));
      uint4 moved[kGatherWarpSlots];
#pragma unroll
      for (uint32_t s = 0; s < kGatherWarpSlots; ++s) {
        const auto* from = reinterpret_cast<const std::byte*>(__shfl_sync(kAllLanes, row, s));
        moved[s] = uint4{0, 0, 0, 0};  // beyond the last token
        if (from != nullptr && at < row_bytes) {
          moved[s] = __ldg(reinterpret_cast<const uint4*>(from + at));
        }
      }
#pragma unroll
      for (uint32_t s = 0; s < kGatherWarpSlots; ++s) {
        if (at < row_bytes) *reinterpret_cast<uint4*>(to + s * row_bytes + at) = moved[s];
      }
    }
  };
  if (first >= CeilDiv(tokens, kIndexPageTokens) * kIndexPageTokens) return;
  const uint32_t row = first % kIndexPageTokens;
  copy(key_row, page + row * plan.key_bytes, plan.key_bytes);
  copy(value_row, page + kIndexPageTokens * plan.key_bytes + row * plan.value_bytes,
       plan.value_bytes);
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launchers.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchDescribe(const KernelShape& shape, const IndexPlan& plan, cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    using Shape = decltype(constant);
    const uint32_t blocks = CeilDiv(plan.clusters, kBlockClusters);
    DescribeKernel<Shape><<<plan.heads * blocks, kThreads, 0, stream>>>(plan, blocks);
    return cudaGetLastError();
  });
}

cudaError_t LaunchGather(const IndexPlan& plan, cudaStream_t stream) {
  const uint32_t blocks = CeilDiv(plan.unclustered + plan.tokens, kGatherBlockSlots);
  GatherKernel<<<plan.heads * blocks, kThreads, 0, stream>>>(plan, blocks);
  return cudaGetLastError();
}

}  // namespace attnd::gpu::cuda
