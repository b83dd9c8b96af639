// SPDX-License-Identifier: Apache-2.0
//
// Which indexes the kernels build and read.
#ifndef ATTND_GPU_INDEX_BUILT_INDEXES_H_
#define ATTND_GPU_INDEX_BUILT_INDEXES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "attention/segment/index_layout.h"
#include "attention/segment/index_set.h"
#include "gpu/layout/index_layout.h"

namespace attnd::gpu {

// Tokens of a tree's group, on average, at least: so the longest segment has few enough groups.
inline constexpr uint32_t kGroupTokensMin = attention::kSegmentTokensMax / kBuiltGroupsMax;

// Whether the set is a tree alone, of sizes that kernels build.
inline bool IsBuiltTree(const attention::IndexSet& indexes) {
  const attention::TreeSizes& sizes = indexes.tree_sizes();
  attention::IndexSet tree = attention::kTreeIndexes;
  tree.set_tree_sizes(sizes);
  return indexes == tree && sizes.leaf_tokens * sizes.fan >= kGroupTokensMin;
}

// OK for clusters alone, and for a tree alone of such sizes; otherwise Unimplemented, naming what
// the set has and what is allowed.
inline absl::Status CheckIndexes(const attention::IndexSet& indexes) {
  if (indexes == attention::kClusterIndexes || IsBuiltTree(indexes)) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("indexes are ", indexes.ToString(),
                   "; the CUDA backend reads clusters alone, or a tree whose groups have ",
                   kGroupTokensMin, " tokens (leaf_tokens * fan) or more"));
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_INDEX_BUILT_INDEXES_H_
