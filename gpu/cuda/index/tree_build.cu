// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "gpu/cuda/index/tree_build.cuh"
#include "gpu/cuda/index/tree_kernels.cuh"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kPartAlignment = 256;

// Gives parts of a head's scratch memory their places.
class Placer {
 public:
  template <typename T>
  uint32_t Place(uint64_t count) {
    const uint32_t offset = end_;
    end_ += CeilDiv(static_cast<uint32_t>(count * sizeof(T)), kPartAlignment) * kPartAlignment;
    return offset;
  }
  uint32_t end() const { return end_; }

 private:
  uint32_t end_ = 0;
};

// Parts by token have room for all tokens, though some may be unclustered.
void LayOut(const KernelShape& shape, const IndexSizes& sizes, ScratchLayout* base,
            TreeScratch* tree) {
  const uint32_t tokens = sizes.tokens;
  const uint64_t leaves = sizes.clusters, groups = sizes.groups;
  const uint64_t padded = CeilDiv(groups, kTileClusters) * kTileClusters;
  const uint64_t mean_chunks = CeilDiv(tokens, kMeanChunkTokens);
  const uint64_t moment_chunks = CeilDiv(tokens, kMomentChunkTokens);
  const uint64_t dim = shape.head_dim, point = shape.head_dim + shape.value_dim;
  const uint64_t large = leaves + 8 * groups;
  Placer placer;
  *base = {};
  base->partial_sums = placer.Place<double>(mean_chunks * point);
  base->fragments = placer.Place<__half>(padded * point);
  base->bias = placer.Place<float>(padded);
  base->assignment = placer.Place<uint16_t>(tokens);
  base->order = placer.Place<uint16_t>(tokens);
  base->starts = placer.Place<uint32_t>(groups + 1);
  tree->partial_squares = placer.Place<double>(mean_chunks * 2);
  tree->spreads = placer.Place<float>(groups);
  tree->farthest = placer.Place<uint32_t>(groups);
  tree->group_count = placer.Place<uint32_t>(1);
  tree->group_starts = placer.Place<uint32_t>(groups + 1);
  tree->leaf_firsts = placer.Place<uint32_t>(groups + 1);
  tree->leaf_sizes = placer.Place<uint32_t>(leaves);
  tree->leaf_numbers = placer.Place<uint32_t>(leaves + 1);
  tree->large_floats = placer.Place<float>(2 * large);
  tree->large_words = placer.Place<uint32_t>(3 * large);
  tree->leaf_of_slot = placer.Place<uint16_t>(tokens);
  tree->group_of_leaf = placer.Place<uint16_t>(leaves);
  tree->means = placer.Place<float>(std::max(leaves, (large + 1) / 2) * point);
  tree->large_centroids = tree->means;
  tree->group_means = placer.Place<float>(groups * point);
  tree->partial_moments = placer.Place<float>(
      std::max<uint64_t>(moment_chunks * point * dim, AxesWords(shape.head_dim)));
  tree->rotations = tree->partial_moments;
  tree->moments = placer.Place<float>(dim * point);
  tree->maps = placer.Place<float>(dim * point);
  tree->variances = placer.Place<float>(leaves * dim);
  tree->rests = placer.Place<float>(leaves);
  tree->group_variances = placer.Place<float>(groups * dim);
  tree->group_rests = placer.Place<float>(groups);
  base->head_bytes = placer.end();
}

TreePlan PlanOf(const KernelShape& shape, const IndexJob& first_job, const IndexJob* jobs,
                uint32_t count, std::byte* scratch) {
  TreePlan plan = {};
  IndexPlan& base = plan.base;
  base = PlanWithoutLayout(shape, first_job, jobs, count, scratch, first_job.max_groups);
  plan.late_groups = LateOf(base.clusters);
  plan.leaves = first_job.max_clusters;
  plan.moment_chunks = CeilDiv(base.tokens, kMomentChunkTokens);
  LayOut(shape, SizesOf(first_job), &base.layout, &plan.scratch);
  return plan;
}

}  // namespace

uint64_t TreeScratchBytes(const KernelShape& shape, uint32_t kv_heads, const IndexSizes& sizes) {
  ScratchLayout base;
  TreeScratch tree;
  LayOut(shape, sizes, &base, &tree);
  return uint64_t{base.head_bytes} * kv_heads;
}

cudaError_t BuildTrees(const KernelShape& shape, const IndexJob& first_job, const IndexJob* jobs,
                       uint32_t count, std::byte* scratch, cudaStream_t stream,
                       IndexLaunchListener* listener) {
  const TreePlan plan = PlanOf(shape, first_job, jobs, count, scratch);
  IndexLaunches launches(listener, stream);
  launches.Run(IndexLaunch::kCentre, [&] { return LaunchTreePoints(shape, plan, stream); });
  launches.Run(IndexLaunch::kSeed, [&] { return LaunchTreeSeed(shape, plan, stream); });
  for (uint32_t i = 0; i < kIndexIterations; ++i) {
    if (i != 0)
      launches.Run(IndexLaunch::kMove, [&] { return LaunchTreeMove(shape, plan, stream); });
    if (i == kIndexIterations / 2) {
      launches.Run(IndexLaunch::kMove, [&] { return LaunchTreeSplit(shape, plan, stream); });
    }
    launches.Run(IndexLaunch::kAssign,
                 [&] { return LaunchAssignPoints(shape, plan.base, stream); });
    launches.Run(IndexLaunch::kSort, [&] { return LaunchSort(plan.base, /*last=*/false, stream); });
  }
  launches.Run(IndexLaunch::kSort, [&] { return LaunchTreeDivide(plan, stream); });
  launches.Run(IndexLaunch::kLeaves, [&] { return LaunchTreeLeaves(shape, plan, stream); });
  launches.Run(IndexLaunch::kSort, [&] { return LaunchTreeFinish(plan, stream); });
  launches.Run(IndexLaunch::kGather, [&] { return LaunchGather(plan.base, stream); });
  launches.Run(IndexLaunch::kMeans, [&] { return LaunchTreeMeans(shape, plan, stream); });
  launches.Run(IndexLaunch::kMoments, [&] { return LaunchTreeMoments(shape, plan, stream); });
  launches.Run(IndexLaunch::kAxes, [&] { return LaunchTreeAxes(shape, plan, stream); });
  launches.Run(IndexLaunch::kSlopes, [&] { return LaunchTreeSlopes(shape, plan, stream); });
  launches.Run(IndexLaunch::kDescribe, [&] { return LaunchTreeDescribe(shape, plan, stream); });
  return launches.error();
}

}  // namespace attnd::gpu::cuda
