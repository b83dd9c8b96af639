// SPDX-License-Identifier: Apache-2.0
//
// Memory that the kernels need, known without CUDA: the host side plans with it in every build.
#include "gpu/device/device.h"

namespace attnd::gpu {

// A bound on what cuda/index_build.cu lays out for a head: its mean in parts, centroids as
// fragments in whole tiles of clusters, assignment and order of its tokens. The device compares.
uint64_t IndexScratchBytes(const KernelShape& shape, uint32_t kv_heads, uint32_t tokens) {
  constexpr uint64_t kClusterTokens = 16, kTileClusters = 128, kMeanChunkTokens = 128;
  constexpr uint64_t kRounding = uint64_t{16} * 256;  // of the parts' places
  const uint64_t clusters = tokens / kClusterTokens + 1 + kTileClusters;
  const uint64_t chunks = tokens / kMeanChunkTokens + 1;
  const uint64_t head = uint64_t{tokens} * 2 * sizeof(uint16_t) +
                        clusters * (shape.head_dim * sizeof(uint16_t) + 2 * sizeof(float)) +
                        chunks * (shape.head_dim * sizeof(double) + sizeof(float)) +
                        shape.head_dim * sizeof(float) + kRounding;
  return kv_heads * head;
}

}  // namespace attnd::gpu
