// SPDX-License-Identifier: Apache-2.0
//
// The order of a tree: how its leaves are divided among the groups, and, when the leaves are made,
// which tokens, leaves and groups follow one another. One thread block for each head.
#include "gpu/cuda/index/index_block.cuh"
#include "gpu/cuda/index/tree_kernels.cuh"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kWarps = 32;
constexpr uint32_t kThreads = kWarps * 32;  // a thread for each group
static_assert(kThreads >= kBuiltGroupsMax);

// The sum over the thread block's threads, for all of them. sums: shared, [kWarps].
__device__ __forceinline__ uint32_t BlockSum(uint32_t value, uint32_t* sums) {
  uint32_t total;
  BlockPrefix<kWarps>(value, sums, &total);
  return total;
}

// D'Hondt's method, every further leaf to the group with the most tokens a leaf: of all quotients
// size / c, c = 1 .. size - 1, the `further` greatest have a leaf each, of equal ones the lower
// group's. As integers of 32 bits behind the point two quotients are equal only if they are equal,
// so that their least winner can be found by bisection. Returns this thread's group's share of
// `further` leaves; size: of this thread's group, 0 if it has none. More leaves than tokens: each
// token has one.
__device__ __forceinline__ uint32_t ShareOf(uint32_t size, uint32_t further, uint32_t* sums) {
  const uint32_t most = size == 0 ? 0 : size - 1;
  const uint64_t scaled = uint64_t{size} << 32;
  // How many of this group's quotients are at least `least`.
  const auto count = [&](uint64_t least) {
    return static_cast<uint32_t>(min(uint64_t{most}, scaled / least));
  };
  if (BlockSum(most, sums) <= further) return most;
  // More than `further` quotients are at least `low`, and at most `further` at least `high`.
  uint64_t low = 1, high = (uint64_t{kIndexTokensMax} << 32) + 1;
  while (high - low > 1) {
    const uint64_t middle = low + (high - low) / 2;
    if (BlockSum(count(middle), sums) > further) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const uint32_t sure = count(high);
  const uint32_t left = further - BlockSum(sure, sums);
  const uint32_t equal = count(low) - sure;  // 1 at most
  uint32_t total;
  const uint32_t before = BlockPrefix<kWarps>(equal, sums, &total);
  return sure + (before < left ? equal : 0);
}

// Drops groups without members and divides the leaves. Thread block b: head b.
__global__ void __launch_bounds__(kThreads) DivideKernel(const __grid_constant__ TreePlan plan) {
  __shared__ uint32_t sums[kWarps];
  const Head head(plan.base, blockIdx.x);
  const auto* starts = head.At<const uint32_t>(plan.base.layout.starts);  // [groups + 1]
  auto* group_starts = head.At<uint32_t>(plan.scratch.group_starts);
  auto* leaf_firsts = head.At<uint32_t>(plan.scratch.leaf_firsts);
  const uint32_t g = threadIdx.x;
  const bool valid = g < plan.base.clusters;
  const uint32_t begin = valid ? starts[g] : 0;
  const uint32_t size = valid ? starts[g + 1] - begin : 0;
  uint32_t kept, leaves;
  const uint32_t number = BlockPrefix<kWarps>(size != 0, sums, &kept);
  const uint32_t share = ShareOf(size, plan.leaves - kept, sums);
  const uint32_t own = size == 0 ? 0 : 1 + share;
  const uint32_t first = BlockPrefix<kWarps>(own, sums, &leaves);
  if (size != 0) {
    group_starts[number] = begin;
    leaf_firsts[number] = first;
  }
  if (threadIdx.x == 0) {
    group_starts[kept] = plan.base.tokens;
    leaf_firsts[kept] = leaves;
    *head.At<uint32_t>(plan.scratch.group_count) = kept;
  }
}

// Drops leaves without members: numbers them, and says where they begin. Returns their number.
__device__ __forceinline__ uint32_t NumberLeaves(const Head& head, const TreePlan& plan,
                                                 uint32_t leaves, uint32_t* sums) {
  const auto* sizes = head.At<const uint32_t>(plan.scratch.leaf_sizes);  // [leaves]
  auto* numbers = head.At<uint32_t>(plan.scratch.leaf_numbers);          // [leaves + 1]
  auto* index_starts = PartOf<uint32_t>(head, head.job.tree.leaves.starts);
  uint32_t kept = 0, place = 0;
  for (uint32_t base = 0; base < leaves; base += kThreads) {
    const uint32_t leaf = base + threadIdx.x;
    const uint32_t size = leaf < leaves ? sizes[leaf] : 0;
    uint32_t total;
    const uint32_t number = kept + BlockPrefix<kWarps>(size != 0, sums, &total);
    kept += total;
    const uint32_t start = place + BlockPrefix<kWarps>(size, sums, &total);
    place += total;
    if (leaf < leaves) numbers[leaf] = number;
    if (size != 0) index_starts[number] = plan.base.unclustered + start;
  }
  if (threadIdx.x == 0) {
    numbers[leaves] = kept;
    index_starts[kept] = plan.base.unclustered + plan.base.tokens;
    *PartOf<uint32_t>(head, head.job.tree.leaves.count) = kept;
  }
  return kept;
}

// Everything that the index says about which tokens a leaf and a group has. Thread block b: head b.
__global__ void __launch_bounds__(kThreads) FinishKernel(const __grid_constant__ TreePlan plan) {
  __shared__ uint32_t sums[kWarps];
  const Head head(plan.base, blockIdx.x);
  const TreeOffsets& tree = head.job.tree;
  const uint32_t groups = *head.At<const uint32_t>(plan.scratch.group_count);
  const auto* group_starts = head.At<const uint32_t>(plan.scratch.group_starts);
  const auto* leaf_firsts = head.At<const uint32_t>(plan.scratch.leaf_firsts);
  const auto* numbers = head.At<const uint32_t>(plan.scratch.leaf_numbers);
  const uint32_t leaves = NumberLeaves(head, plan, leaf_firsts[groups], sums);
  __syncthreads();
  auto* first_members = PartOf<uint32_t>(head, tree.groups.first_members);
  for (uint32_t g = threadIdx.x; g <= groups; g += kThreads) {
    PartOf<uint32_t>(head, tree.groups.starts)[g] = plan.base.unclustered + group_starts[g];
    first_members[g] = numbers[leaf_firsts[g]];
  }
  if (threadIdx.x == 0) *PartOf<uint32_t>(head, tree.groups.count) = groups;
  __syncthreads();
  auto* group_of_leaf = head.At<uint16_t>(plan.scratch.group_of_leaf);
  for (uint32_t g = threadIdx.x; g < groups; g += kThreads) {
    for (uint32_t l = first_members[g]; l < first_members[g + 1]; ++l) {
      group_of_leaf[l] = static_cast<uint16_t>(g);
    }
  }
  const auto* starts = PartOf<const uint32_t>(head, tree.leaves.starts);
  auto* leaf_of_slot = head.At<uint16_t>(plan.scratch.leaf_of_slot) - plan.base.unclustered;
  for (uint32_t l = threadIdx.x; l < leaves; l += kThreads) {
    for (uint32_t slot = starts[l]; slot < starts[l + 1]; ++slot) {
      leaf_of_slot[slot] = static_cast<uint16_t>(l);
    }
  }
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launchers.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchTreeDivide(const TreePlan& plan, cudaStream_t stream) {
  DivideKernel<<<plan.base.heads, kThreads, 0, stream>>>(plan);
  return cudaGetLastError();
}

cudaError_t LaunchTreeFinish(const TreePlan& plan, cudaStream_t stream) {
  FinishKernel<<<plan.base.heads, kThreads, 0, stream>>>(plan);
  return cudaGetLastError();
}

}  // namespace attnd::gpu::cuda
