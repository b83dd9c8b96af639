// SPDX-License-Identifier: Apache-2.0
//
// What a builder of trees must give, by plain loops in double precision: the fake device's
// arithmetic. It shares no code with the builder of attention/ or the kernels of gpu/cuda/.
#ifndef ATTND_TESTS_GPU_TREE_BUILD_REFERENCE_H_
#define ATTND_TESTS_GPU_TREE_BUILD_REFERENCE_H_

#include "gpu/layout/index_layout.h"
#include "gpu/layout/kernel_shapes.h"

namespace attnd::gpu::test {

// Builds one layer of a job with groups as docs/POLICIES.md says ("A tree of clusters"): the index,
// and the pages in its order.
void BuildTreeReference(const KernelShape& shape, const IndexJob& job);

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_TREE_BUILD_REFERENCE_H_
