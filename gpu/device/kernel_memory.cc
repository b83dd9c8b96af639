// SPDX-License-Identifier: Apache-2.0
//
// Memory that the kernels need, known without CUDA: the host side plans with it in every build.
#include <algorithm>

#include "gpu/device/device.h"

namespace attnd::gpu {

namespace {

constexpr uint64_t kRounding = uint64_t{32} * 256;  // of the parts' places

// A bound on what cuda/index/index_build.cu lays out for a head: its mean in parts, centroids as
// fragments in whole tiles of clusters, assignment and order of its tokens.
uint64_t ClustersBytes(const KernelShape& shape, const IndexSizes& sizes) {
  constexpr uint64_t kClusterTokens = 16, kTileClusters = 128, kMeanChunkTokens = 128;
  const uint64_t tokens = sizes.tokens, clusters = tokens / kClusterTokens + 1 + kTileClusters;
  const uint64_t chunks = tokens / kMeanChunkTokens + 1;
  return tokens * 2 * sizeof(uint16_t) +
         clusters * (shape.head_dim * sizeof(uint16_t) + 2 * sizeof(float)) +
         chunks * (shape.head_dim * sizeof(double) + sizeof(float)) +
         shape.head_dim * sizeof(float) + kRounding;
}

// Of what cuda/index/tree_build.cu lays out: for each token its places, for each leaf and group
// what is known of it, exact means and variances among it; centroids in whole tiles of groups; and
// matrices of moments, in parts, and of all; the rotations that make axes take the parts' place.
uint64_t TreeBytes(const KernelShape& shape, const IndexSizes& sizes) {
  constexpr uint64_t kTileGroups = 64, kChunkTokens = 1024, kSweeps = 12;
  const uint64_t tokens = sizes.tokens, leaves = sizes.clusters + 1, groups = sizes.groups + 1;
  const uint64_t chunks = tokens / kChunkTokens + 1;
  const uint64_t point = shape.head_dim + shape.value_dim;
  const uint64_t means = (leaves + 5 * groups) * point, variances = (leaves + groups) * point;
  const uint64_t dim = shape.head_dim, matrix = dim * point;
  const uint64_t rotations = dim * dim + kSweeps * dim * (dim / 2 + 1) + dim;
  return tokens * 3 * sizeof(uint16_t) + (means + variances) * sizeof(float) +
         (leaves + 8 * groups) * 10 * sizeof(uint32_t) +
         (groups + kTileGroups) * (point + 2) * sizeof(uint16_t) +
         chunks * (point + 2) * sizeof(double) +
         (std::max(chunks * matrix, rotations) + 2 * matrix) * sizeof(float) + kRounding;
}

}  // namespace

// The device compares it with what it lays out.
uint64_t IndexScratchBytes(const KernelShape& shape, uint32_t kv_heads, const IndexSizes& sizes) {
  return kv_heads * (sizes.groups != 0 ? TreeBytes(shape, sizes) : ClustersBytes(shape, sizes));
}

}  // namespace attnd::gpu
