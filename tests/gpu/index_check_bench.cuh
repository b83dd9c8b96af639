// SPDX-License-Identifier: Apache-2.0
//
// Device times of index builds.
#ifndef ATTND_TESTS_GPU_INDEX_CHECK_BENCH_CUH_
#define ATTND_TESTS_GPU_INDEX_CHECK_BENCH_CUH_

#include <cstdint>

namespace attnd::gpu::test {

// Builds the indexes (trees, or of the kind `clusters`) of 128K tokens x 8 KV heads x 32 layers, in
// calls of `layers` layers of one segment of `segment_tokens`, and prints times.
void BenchIndexes(uint32_t layers, bool tree, uint32_t segment_tokens);

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_INDEX_CHECK_BENCH_CUH_
