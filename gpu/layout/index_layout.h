// SPDX-License-Identifier: Apache-2.0
//
// What the host tells the device about one layer of a segment to be built: the tail blocks with its
// tokens, and where the device writes its index and its payload in cluster order. Plain structures,
// copied as they are. Nothing in here depends on CUDA.
#ifndef ATTND_GPU_LAYOUT_INDEX_LAYOUT_H_
#define ATTND_GPU_LAYOUT_INDEX_LAYOUT_H_

#include <cstddef>
#include <cstdint>

namespace attnd::gpu {

// Byte offsets of the parts of one head's index, as in attention::IndexLayout. The index begins
// with the head's cluster count.
struct IndexOffsets {
  uint32_t centroids, mean_values, deviation_codes, variance_unit, log_size, spread, value_norm2,
      starts, positions;
};

// The same of a tree (attention/segment/index_layout.h). Means are rows in bytes; axes and slopes
// are in bf16.
struct TreePart {
  uint32_t count;  // of a uint32_t: how many rows the head has
  uint32_t centroids, centroid_scales, mean_values, mean_value_scales, deviation_codes,
      variance_unit, log_size, spread, value_norm2, starts;
  uint32_t first_members;  // of groups alone
};
struct TreeOffsets {
  TreePart leaves, groups;
  uint32_t key_base, value_base, axes, slopes, positions;
};

// The most groups of a segment's tree that kernels build.
inline constexpr uint32_t kBuiltGroupsMax = 1024;
// What one head's index is built of, and the rows that it has room for.
struct IndexSizes {
  uint32_t tokens;    // of the segment
  uint32_t clusters;  // of a tree, its leaves
  uint32_t groups;    // of a tree; 0: the index is of the kind `clusters`
};

// One layer of a segment, with all KV heads. Tokens are numbered from 0, by position.
struct IndexJob {
  const std::byte* const* tail_blocks;  // KV head 0's pages of each tail block, at the layer
  uint64_t tail_block_head_bytes;       // from one KV head to the next
  uint32_t first_row;  // token 0's place in the first tail block, below kTailBlockTokens
  uint32_t tokens;
  uint32_t unclustered;   // the first tokens, which keep their places
  uint32_t max_clusters;  // the index's room: of a tree, its leaves
  uint32_t kv_heads;
  uint32_t max_groups;  // of a tree; 0: the index is of the kind `clusters`
  std::byte* index;     // of KV head 0
  std::byte* pages;     // of KV head 0, in the segment's order
  uint64_t index_head_bytes;
  uint64_t pages_head_bytes;
  IndexOffsets offsets;  // of a tree only `positions`
  TreeOffsets tree;      // of a tree alone
};
inline IndexSizes SizesOf(const IndexJob& job) {
  return {job.tokens, job.max_clusters, job.max_groups};
}
static_assert(sizeof(IndexOffsets) == 36 && sizeof(IndexJob) == 224);
static_assert(sizeof(TreePart) == 48 && sizeof(TreeOffsets) == 116);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_LAYOUT_INDEX_LAYOUT_H_
