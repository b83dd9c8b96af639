// SPDX-License-Identifier: Apache-2.0
//
// Clustering and indexing segments on the device: what the CPU's SegmentBuilder does, for many
// layers at once (docs/POLICIES.md, "Clusters" and "A tree of clusters").
//
// The same input gives the same bytes: no sum depends on the order in which threads run. Centroids
// are rounded to the dtype (a tree's to fp16) while iterating, as tensor cores take them, so that a
// token close to the middle between two clusters may go to the other one than on the CPU;
// everything that the index says about its clusters is computed from their members in double, but
// for axes, slopes, variances and rests of a tree: these are products of tf32 numbers.
//
// Plain CUDA: no library of absl's is needed to link it.
#ifndef ATTND_GPU_CUDA_INDEX_INDEX_BUILD_CUH_
#define ATTND_GPU_CUDA_INDEX_INDEX_BUILD_CUH_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/layout/index_layout.h"
#include "gpu/layout/kernel_shapes.h"

namespace attnd::gpu::cuda {

inline constexpr uint32_t kIndexClusterTokens = 16;    // attention::kClusterTokens
inline constexpr double kIndexValueShare = 0.5;        // attention::kValueShare
inline constexpr double kIndexLateShare = 0.25;        // attention::kLateShare
inline constexpr uint32_t kIndexIterations = 10;       // attention::kKMeansIterations
inline constexpr uint32_t kIndexTokensMax = 65536;     // attention::kSegmentTokensMax
inline constexpr uint32_t kIndexPageTokens = 16;       // attention::kPageTokens
inline constexpr uint32_t kIndexTailBlockTokens = 64;  // attention::kTailBlockTokens

// The launches of a build, by kind; the last ones are a tree's alone.
enum class IndexLaunch : uint32_t {
  kCentre,
  kSeed,
  kAssign,
  kSort,
  kMove,
  kDescribe,
  kGather,
  kLeaves,
  kMeans,
  kMoments,
  kAxes,
  kSlopes,
};
inline constexpr uint32_t kIndexLaunches = 12;

// Told of every launch, before it. For measurements.
class IndexLaunchListener {
 public:
  virtual ~IndexLaunchListener() = default;
  virtual void Launching(IndexLaunch kind, cudaStream_t stream) = 0;
};

// Scratch bytes of one job. A multiple of 256.
uint64_t BuildScratchBytes(const KernelShape& shape, uint32_t kv_heads, const IndexSizes& sizes);

// Enqueues the build of `count` >= 1 jobs (on the device), all with the sizes of `first_job` (a
// host copy of the first): tokens, unclustered, max_clusters, max_groups and kv_heads. `scratch` is
// aligned to 256 and has BuildScratchBytes for each job. Index parts are written for as many
// clusters as there are, the rest is left as it is; rows of the last page beyond the tokens become
// zeros.
//
// A tree has 1 to kBuiltGroupsMax groups. Its leaves are at least as many, and no more than the
// clustered tokens. cudaErrorInvalidValue, and nothing was enqueued, for a shape without kernels or
// sizes out of range; otherwise what the launches said.
cudaError_t BuildIndexes(const KernelShape& shape, const IndexJob& first_job, const IndexJob* jobs,
                         uint32_t count, std::byte* scratch, cudaStream_t stream,
                         IndexLaunchListener* listener = nullptr);

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_INDEX_INDEX_BUILD_CUH_
