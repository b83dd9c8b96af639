// SPDX-License-Identifier: Apache-2.0
//
// Clustering and indexing segments on the device: what the CPU's SegmentBuilder does, for many
// layers at once (docs/POLICIES.md, "Clusters").
//
// The same input gives the same bytes: no sum depends on the order in which threads run. Centroids
// are rounded to the dtype while iterating, as tensor cores take them, so that a token close to the
// middle between two clusters may go to the other one than on the CPU; everything that the index
// says about its clusters is computed from their members in double.
//
// Plain CUDA: neither absl nor anything that includes it.
#ifndef ATTND_GPU_CUDA_INDEX_INDEX_BUILD_CUH_
#define ATTND_GPU_CUDA_INDEX_INDEX_BUILD_CUH_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/layout/index_layout.h"

namespace attnd::gpu::cuda {

enum class ElementType : uint8_t { kBf16, kFp16 };

struct IndexShape {
  ElementType type;
  uint32_t head_dim;
  uint32_t value_dim;
};

inline constexpr uint32_t kIndexClusterTokens = 16;  // attention::kClusterTokens
inline constexpr uint32_t kIndexIterations = 10;     // attention::kKMeansIterations
inline constexpr uint32_t kIndexTokensMax = 65536;   // attention::kSegmentTokensMax
inline constexpr uint32_t kIndexPageTokens = 16;     // attention::kPageTokens
inline constexpr uint32_t kIndexBlockTokens = 64;    // attention::kTailBlockTokens

// The launches of a build, by kind.
enum class IndexStage : uint32_t { kCentre, kSeed, kAssign, kSort, kMove, kDescribe, kGather };
inline constexpr uint32_t kIndexStages = 7;

// Told of every launch, before it. For measurements.
class IndexObserver {
 public:
  virtual ~IndexObserver() = default;
  virtual void Launching(IndexStage stage, cudaStream_t stream) = 0;
};

// Scratch bytes of one job. A multiple of 256.
uint64_t IndexScratchBytes(const IndexShape& shape, uint32_t kv_heads, uint32_t tokens);

// Enqueues the build of `count` >= 1 jobs (on the device), all with the sizes of `first_job` (a
// host copy of the first): tokens, unclustered, max_clusters and kv_heads. `scratch` is aligned to
// 256 and has IndexScratchBytes for each job. Index parts are written for as many clusters as there
// are, the rest is left as it is; rows of the last page beyond the tokens become zeros.
//
// cudaErrorInvalidValue, and nothing was enqueued, for a shape without kernels or sizes out of
// range; otherwise what the launches said.
cudaError_t BuildIndexes(const IndexShape& shape, const IndexJob& first_job, const IndexJob* jobs,
                         uint32_t count, std::byte* scratch, cudaStream_t stream,
                         IndexObserver* observer = nullptr);

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_INDEX_INDEX_BUILD_CUH_
