// SPDX-License-Identifier: Apache-2.0
//
// Means of leaves and of groups: exact ones in scratch memory, those of the index in bytes; and all
// that follows from sizes.
#include "gpu/cuda/index/index_workers.cuh"
#include "gpu/cuda/index/tree_kernels.cuh"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kThreads = kBlockWarps * 32;
constexpr double kGreatestCode = 127;

// Codes this warp's vector as ByteRows says; returns its scale. mean, base: this lane's channels.
template <uint32_t kPart>
__device__ __forceinline__ float StoreBytes(const float (&mean)[kPart], const float (&base)[kPart],
                                            int8_t* codes) {
  double greatest = 0;
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) {
    greatest = max(greatest, abs(static_cast<double>(mean[e]) - base[e]));
  }
  const auto scale = static_cast<float>(WarpMax(greatest) / kGreatestCode);
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) {
    const double code = scale > 0 ? (static_cast<double>(mean[e]) - base[e]) / scale : 0;
    const long rounded = lround(min(max(code, -kGreatestCode), kGreatestCode));
    codes[threadIdx.x % 32 * kPart + e] = static_cast<int8_t>(rounded);
  }
  return scale;
}

// Stores one vector, exact and in bytes; returns the squared length of the latter as it is read
// back. exact, codes: of the whole vector.
template <uint32_t kPart>
__device__ __forceinline__ double StoreVector(const float (&mean)[kPart], const float* bases,
                                              float* exact, int8_t* codes, float* scale_at) {
  const uint32_t first = threadIdx.x % 32 * kPart;
  float base[kPart];
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) {
    base[e] = bases[first + e];
    exact[first + e] = mean[e];
  }
  const float scale = StoreBytes(mean, base, codes);
  if (threadIdx.x % 32 == 0) *scale_at = scale;
  double norm2 = 0;
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) {
    const double stored = base[e] + scale * codes[first + e];
    norm2 += stored * stored;
  }
  return WarpSum(norm2);
}

// Stores the means of row `number` of leaves or groups. One warp.
template <typename Shape>
__device__ __forceinline__ void StoreMeans(const Head& head, const TreePart& part, float* exact,
                                           uint32_t number,
                                           const float (&key)[Shape::kHeadDim / 32],
                                           const float (&value)[Shape::kValueDim / 32],
                                           double size) {
  exact += uint64_t{number} * kPointDim<Shape>;
  const TreeOffsets& tree = head.job.tree;
  StoreVector(key, PartOf<const float>(head, tree.key_base), exact,
              PartOf<int8_t>(head, part.centroids) + number * Shape::kHeadDim,
              PartOf<float>(head, part.centroid_scales) + number);
  const double norm2 =
      StoreVector(value, PartOf<const float>(head, tree.value_base), exact + Shape::kHeadDim,
                  PartOf<int8_t>(head, part.mean_values) + number * Shape::kValueDim,
                  PartOf<float>(head, part.mean_value_scales) + number);
  if (threadIdx.x % 32 != 0) return;
  PartOf<float>(head, part.value_norm2)[number] = static_cast<float>(norm2);
  PartOf<float>(head, part.log_size)[number] = static_cast<float>(log(size));
}

// The mean of rows [begin, end), this lane's channels, on every warp of the workers.
template <typename Element, uint32_t kPart, typename Workers, typename Row>
__device__ __forceinline__ void MeanOf(Workers workers, uint32_t begin, uint32_t end, Row row,
                                       double* shared, float (&mean)[kPart]) {
  const MemberRange part = workers.Part(begin, end);
  double sum[kPart] = {};
  AddRows<Element>(part, row, sum);
  workers.Sum(sum, shared);
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) mean[e] = static_cast<float>(sum[e] / (end - begin));
}

// Thread block b: leaves [b % blocks * kBlockClusters, + kBlockClusters) of head b / blocks.
template <typename Shape>
__global__ void __launch_bounds__(kThreads)
    LeafMeanKernel(const __grid_constant__ TreePlan plan, uint32_t blocks) {
  constexpr uint32_t kWidest =
      Shape::kHeadDim > Shape::kValueDim ? Shape::kHeadDim : Shape::kValueDim;
  __shared__ double shared[kBlockWarps * kWidest];
  const Head head(plan.base, blockIdx.x / blocks);
  const TreePart& part = head.job.tree.leaves;
  const uint32_t first = blockIdx.x % blocks * kBlockClusters;
  const auto describe = [&](auto workers, uint32_t leaf, uint32_t begin, uint32_t end) {
    float key[Shape::kHeadDim / 32], value[Shape::kValueDim / 32];
    MeanOf<typename Shape::Element>(
        workers, begin, end, [&](uint32_t slot) { return OrderedKey(head, slot); }, shared, key);
    MeanOf<typename Shape::Element>(
        workers, begin, end, [&](uint32_t slot) { return OrderedValue(head, slot); }, shared,
        value);
    if (!workers.Leads()) return;
    StoreMeans<Shape>(head, part, head.At<float>(plan.scratch.means), leaf, key, value,
                      end - begin);
  };
  ForClusters(first, min(CountOf(head, part), first + kBlockClusters),
              PartOf<const uint32_t>(head, part.starts), describe);
}

// Adds size * row to sum, for this lane's channels.
template <uint32_t kPart>
__device__ __forceinline__ void AddRow(const float* row, double size, double (&sum)[kPart]) {
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) sum[e] += size * row[threadIdx.x % 32 * kPart + e];
}

// Each warp of a thread block: a group, from its leaves' means by their sizes. Head b / blocks.
template <typename Shape>
__global__ void __launch_bounds__(kThreads)
    GroupMeanKernel(const __grid_constant__ TreePlan plan, uint32_t blocks) {
  const Head head(plan.base, blockIdx.x / blocks);
  const TreePart& groups = head.job.tree.groups;
  const uint32_t g = blockIdx.x % blocks * kBlockWarps + threadIdx.x / 32;
  if (g >= CountOf(head, groups)) return;
  const auto* starts = PartOf<const uint32_t>(head, head.job.tree.leaves.starts);
  const auto* first_members = PartOf<const uint32_t>(head, groups.first_members);
  const auto* means = head.At<const float>(plan.scratch.means);
  const uint32_t begin = first_members[g], end = first_members[g + 1];
  double key_sum[Shape::kHeadDim / 32] = {}, value_sum[Shape::kValueDim / 32] = {};
  for (uint32_t leaf = begin; leaf < end; ++leaf) {
    const double size = starts[leaf + 1] - starts[leaf];
    const float* row = means + uint64_t{leaf} * kPointDim<Shape>;
    AddRow(row, size, key_sum);
    AddRow(row + Shape::kHeadDim, size, value_sum);
  }
  const double size = starts[end] - starts[begin];
  float key[Shape::kHeadDim / 32], value[Shape::kValueDim / 32];
#pragma unroll
  for (uint32_t e = 0; e < Shape::kHeadDim / 32; ++e) {
    key[e] = static_cast<float>(key_sum[e] / size);
  }
#pragma unroll
  for (uint32_t e = 0; e < Shape::kValueDim / 32; ++e) {
    value[e] = static_cast<float>(value_sum[e] / size);
  }
  StoreMeans<Shape>(head, groups, head.At<float>(plan.scratch.group_means), g, key, value, size);
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launcher.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchTreeMeans(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    using Shape = decltype(constant);
    const uint32_t leaf_blocks = CeilDiv(plan.leaves, kBlockClusters);
    LeafMeanKernel<Shape>
        <<<plan.base.heads * leaf_blocks, kThreads, 0, stream>>>(plan, leaf_blocks);
    const uint32_t group_blocks = CeilDiv(plan.base.clusters, kBlockWarps);
    GroupMeanKernel<Shape>
        <<<plan.base.heads * group_blocks, kThreads, 0, stream>>>(plan, group_blocks);
    return cudaGetLastError();
  });
}

}  // namespace attnd::gpu::cuda
