// SPDX-License-Identifier: Apache-2.0
//
// The build of trees: what index_build.cu does of jobs with max_groups > 0.
#ifndef ATTND_GPU_CUDA_INDEX_TREE_BUILD_CUH_
#define ATTND_GPU_CUDA_INDEX_TREE_BUILD_CUH_

#include "gpu/cuda/index/index_build.cuh"

namespace attnd::gpu::cuda {

// As BuildScratchBytes and BuildIndexes have it; the sizes are in range.
uint64_t TreeScratchBytes(const KernelShape& shape, uint32_t kv_heads, const IndexSizes& sizes);
cudaError_t BuildTrees(const KernelShape& shape, const IndexJob& first_job, const IndexJob* jobs,
                       uint32_t count, std::byte* scratch, cudaStream_t stream,
                       IndexLaunchListener* listener);

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_INDEX_TREE_BUILD_CUH_
