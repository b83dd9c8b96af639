// SPDX-License-Identifier: Apache-2.0
//
// What the kernels that build trees share (docs/POLICIES.md, "A tree of clusters"): the plan of a
// build and the places of its scratch memory. Words are index_kernels.cuh's; a "point" is what
// k-means compares: a key and a value behind it, each less its mean over the segment and divided by
// its root mean square length, values times kIndexValueShare. So points are of about length 1
// whatever keys and values are, and fp16 holds them to 11 bits; it holds the centroids, too.
//
// Points lie where the segment's payload will: they are as large, and no longer needed when the
// payload is put in order.
#ifndef ATTND_GPU_CUDA_INDEX_TREE_KERNELS_CUH_
#define ATTND_GPU_CUDA_INDEX_TREE_KERNELS_CUH_

#include "gpu/cuda/index/index_kernels.cuh"

namespace attnd::gpu::cuda {

inline constexpr uint32_t kMomentChunkTokens = 1024;  // of one thread block that sums moments

// Byte offsets inside one head's scratch memory, beside those of IndexPlan::layout.
struct TreeScratch {
  uint32_t partial_squares;  // double [mean chunk][2] of centred keys, of centred values
  // Of the groups while they are made.
  uint32_t spreads;   // float [groups] sum of the members' squared distances
  uint32_t farthest;  // uint32 [groups] the farthest member's token
  // Of the groups that have members.
  uint32_t group_count;   // uint32
  uint32_t group_starts;  // uint32 [groups + 1] in IndexPlan's order
  uint32_t leaf_firsts;   // uint32 [groups + 1] number of each group's first leaf, before empty
                          // ones are dropped
  // Of the leaves, before empty ones are dropped.
  uint32_t leaf_sizes;    // uint32 [leaves]
  uint32_t leaf_numbers;  // uint32 [leaves + 1] how many before it have members
  // Scratch of the groups that do not fit shared memory. A group's begin at (leaf_firsts + 8 g):
  // whole tiles of 8.
  uint32_t large_centroids;  // half [leaves + 8 groups][point]
  uint32_t large_floats;     // float [2][leaves + 8 groups]
  uint32_t large_words;      // uint32 [3][leaves + 8 groups]
  // Of the index's clusters.
  uint32_t leaf_of_slot;   // uint16 [tokens]
  uint32_t group_of_leaf;  // uint16 [leaves]
  uint32_t means;          // float [leaves][head_dim + value_dim]; where large_centroids were
  uint32_t group_means;    // float [groups][head_dim + value_dim]
  // Sums of products of a key's channel with one of a key or a value, both less the leaf's mean.
  uint32_t partial_moments;  // float [moment chunk][head_dim][head_dim + value_dim]
  uint32_t moments;          // float [head_dim][head_dim + value_dim]
  uint32_t rotations;        // AxesWords words of tree_axes.cu; where partial_moments were
  // What a key's deviation is multiplied with: [channel][axis], then [channel][channel of the value
  // that the slopes predict].
  uint32_t maps;             // float [head_dim][head_dim + value_dim]
  uint32_t variances;        // float [leaves][head_dim] along the axes
  uint32_t rests;            // float [leaves] mean square of what slopes leave
  uint32_t group_variances;  // float [groups][head_dim]
  uint32_t group_rests;      // float [groups]
};

inline constexpr uint32_t kSweepsMax = 12;  // of Jacobi rotations

// Scratch words of tree_axes.cu: the matrix, the rounds with their rotations' sines, and ranks.
__host__ __device__ constexpr uint32_t RoundsMax(uint32_t dim) { return kSweepsMax * (dim - 1); }
__host__ __device__ constexpr uint32_t AxesWords(uint32_t dim) {
  return dim * dim + RoundsMax(dim) * (dim / 2 + 1) + 1 + dim;
}

struct TreePlan {
  IndexPlan base;  // clusters: the groups; key_bytes and so on as they are
  TreeScratch scratch;
  uint32_t late_groups;
  uint32_t leaves;  // at most
  uint32_t moment_chunks;
};

// Launchers; cudaErrorInvalidValue for a shape that they have no kernel for.
// Bases of the index, and points.
cudaError_t LaunchTreePoints(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream);
cudaError_t LaunchTreeSeed(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream);
// Assignment of points to the plan's clusters.
cudaError_t LaunchAssignPoints(const KernelShape& shape, const IndexPlan& plan,
                               cudaStream_t stream);
cudaError_t LaunchTreeMove(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream);
// Makes the late groups.
cudaError_t LaunchTreeSplit(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream);
// Divides the leaves among the groups that have members.
cudaError_t LaunchTreeDivide(const TreePlan& plan, cudaStream_t stream);
// Makes each group's leaves; then all that says which token is in which leaf and group.
cudaError_t LaunchTreeLeaves(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream);
cudaError_t LaunchTreeFinish(const TreePlan& plan, cudaStream_t stream);
// From here on the payload lies in order. Each of these needs the ones before it.
cudaError_t LaunchTreeMeans(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream);
cudaError_t LaunchTreeMoments(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream);
cudaError_t LaunchTreeAxes(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream);
cudaError_t LaunchTreeSlopes(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream);
cudaError_t LaunchTreeDescribe(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream);

template <typename Shape>
inline constexpr uint32_t kPointDim = Shape::kHeadDim + Shape::kValueDim;

// [tokens][point]
__device__ __forceinline__ __half* PointsOf(const Head& head) {
  return reinterpret_cast<__half*>(head.job.pages + head.kv_head * head.job.pages_head_bytes);
}

// Rows of the payload in order, after LaunchGather.
__device__ __forceinline__ const std::byte* OrderedKey(const Head& head, uint32_t slot) {
  return head.job.pages + head.kv_head * head.job.pages_head_bytes +
         uint64_t{slot / kIndexPageTokens} * head.plan.page_bytes +
         slot % kIndexPageTokens * head.plan.key_bytes;
}
__device__ __forceinline__ const std::byte* OrderedValue(const Head& head, uint32_t slot) {
  return head.job.pages + head.kv_head * head.job.pages_head_bytes +
         uint64_t{slot / kIndexPageTokens} * head.plan.page_bytes +
         kIndexPageTokens * head.plan.key_bytes + slot % kIndexPageTokens * head.plan.value_bytes;
}

template <typename T>
__device__ __forceinline__ T* PartOf(const Head& head, uint32_t offset) {
  return reinterpret_cast<T*>(head.Index() + offset);
}
__device__ __forceinline__ uint32_t CountOf(const Head& head, const TreePart& part) {
  return *PartOf<const uint32_t>(head, part.count);
}

// Of a group or of a group's clusters.
__host__ __device__ constexpr uint32_t LateOf(uint32_t clusters) {
  return static_cast<uint32_t>(kIndexLateShare * clusters);
}

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_INDEX_TREE_KERNELS_CUH_
