// SPDX-License-Identifier: Apache-2.0
//
// Memory that the kernels need, known without CUDA: the host side plans with it in every build.
#include "gpu/device.h"

namespace attnd::gpu {

uint64_t QueryFragmentBytes(const KernelShape& shape) {
  return uint64_t{TileFragmentWords(shape.head_dim)} * sizeof(uint32_t);
}

// Centred keys, their assignments, and for each cluster sums, a centroid and counts.
uint64_t IndexScratchBytes(const KernelShape& shape, uint32_t kv_heads, uint32_t tokens) {
  constexpr uint64_t kClusterTokens = 16;
  constexpr uint64_t kRounding = 4096;  // of the parts' places
  const uint64_t clusters = tokens / kClusterTokens + 1;
  const uint64_t key_bytes = uint64_t{shape.head_dim} * sizeof(float);
  const uint64_t head =
      tokens * (key_bytes + 8 * sizeof(uint32_t)) +
      clusters * (4 * key_bytes + shape.value_dim * sizeof(float) + 8 * sizeof(uint32_t)) +
      2 * key_bytes + kRounding;
  return kv_heads * head;
}

}  // namespace attnd::gpu
