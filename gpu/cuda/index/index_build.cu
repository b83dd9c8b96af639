// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "gpu/cuda/index/index_build.cuh"
#include "gpu/cuda/index/index_kernels.cuh"
#include "gpu/cuda/index/tree_build.cuh"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kPartAlignment = 256;

// For a segment of `tokens` of which none is unclustered: no other needs more.
ScratchLayout LayOut(const KernelShape& shape, uint32_t tokens) {
  const uint32_t clusters = CeilDiv(tokens, kIndexClusterTokens);
  const uint32_t padded = CeilDiv(clusters, kTileClusters) * kTileClusters;
  const uint32_t chunks = CeilDiv(tokens, kMeanChunkTokens);
  uint32_t end = 0;
  const auto place = [&end](uint64_t bytes) {
    const uint32_t offset = end;
    end += CeilDiv(static_cast<uint32_t>(bytes), kPartAlignment) * kPartAlignment;
    return offset;
  };
  ScratchLayout layout;
  layout.scale = place(sizeof(HeadScale));
  layout.mean = place(shape.head_dim * sizeof(float));
  layout.partial_sums = place(uint64_t{chunks} * shape.head_dim * sizeof(double));
  layout.partial_max = place(chunks * sizeof(float));
  layout.fragments = place(uint64_t{padded} * shape.head_dim * kElementBytes);
  layout.bias = place(padded * sizeof(float));
  layout.assignment = place(tokens * sizeof(uint16_t));
  layout.order = place(tokens * sizeof(uint16_t));
  layout.starts = place((clusters + 1) * sizeof(uint32_t));
  layout.head_bytes = end;
  return layout;
}

IndexPlan PlanOf(const KernelShape& shape, const IndexJob& first_job, const IndexJob* jobs,
                 uint32_t count, std::byte* scratch) {
  IndexPlan plan =
      PlanWithoutLayout(shape, first_job, jobs, count, scratch, first_job.max_clusters);
  plan.layout = LayOut(shape, first_job.tokens);
  return plan;
}

bool InRange(const KernelShape& shape, const IndexJob& job, uint32_t count) {
  const auto known = DispatchShape(shape, [](auto) { return cudaSuccess; });
  const uint32_t clustered = job.tokens - job.unclustered;
  const bool room_fits = job.max_groups == 0
                             ? job.max_clusters == CeilDiv(clustered, kIndexClusterTokens)
                             : job.max_groups <= std::min(kBuiltGroupsMax, job.max_clusters) &&
                                   job.max_clusters <= clustered;
  return known == cudaSuccess && count >= 1 && job.kv_heads >= 1 && job.tokens <= kIndexTokensMax &&
         job.unclustered < job.tokens && job.first_row < kIndexTailBlockTokens && room_fits;
}

}  // namespace

uint64_t BuildScratchBytes(const KernelShape& shape, uint32_t kv_heads, const IndexSizes& sizes) {
  if (sizes.groups != 0) return TreeScratchBytes(shape, kv_heads, sizes);
  return uint64_t{LayOut(shape, sizes.tokens).head_bytes} * kv_heads;
}

cudaError_t BuildIndexes(const KernelShape& shape, const IndexJob& first_job, const IndexJob* jobs,
                         uint32_t count, std::byte* scratch, cudaStream_t stream,
                         IndexLaunchListener* listener) {
  if (!InRange(shape, first_job, count)) return cudaErrorInvalidValue;
  if (first_job.max_groups != 0) {
    return BuildTrees(shape, first_job, jobs, count, scratch, stream, listener);
  }
  const IndexPlan plan = PlanOf(shape, first_job, jobs, count, scratch);
  IndexLaunches launches(listener, stream);
  launches.Run(IndexLaunch::kCentre, [&] { return LaunchCentre(shape, plan, stream); });
  launches.Run(IndexLaunch::kSeed, [&] { return LaunchSeed(shape, plan, stream); });
  for (uint32_t i = 1; i <= kIndexIterations; ++i) {
    const bool last = i == kIndexIterations;
    launches.Run(IndexLaunch::kAssign, [&] { return LaunchAssign(shape, plan, stream); });
    launches.Run(IndexLaunch::kSort, [&] { return LaunchSort(plan, last, stream); });
    if (!last) launches.Run(IndexLaunch::kMove, [&] { return LaunchMove(shape, plan, stream); });
  }
  launches.Run(IndexLaunch::kDescribe, [&] { return LaunchDescribe(shape, plan, stream); });
  launches.Run(IndexLaunch::kGather, [&] { return LaunchGather(plan, stream); });
  return launches.error();
}

}  // namespace attnd::gpu::cuda
