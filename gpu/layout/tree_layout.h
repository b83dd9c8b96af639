// SPDX-License-Identifier: Apache-2.0
//
// What the stages over trees leave for each other in a step's scratch memory (step_layout.h).
#ifndef ATTND_GPU_LAYOUT_TREE_LAYOUT_H_
#define ATTND_GPU_LAYOUT_TREE_LAYOUT_H_

#include <cstdint>

#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

// What choosing needs of a tree's row, beside its scores.
struct TreeRowInfo {
  float tokens;      // 0 of slots without a row
  float spread;      // as in the index
  float value_norm;  // of the mean value
  uint32_t place;    // of a group: its first leaf | leaves << 16; of a leaf: its first token
};
// A tree's scores, in floats from the unit's first on. Groups are numbered by group slots, leaves
// of opened groups by items: 0, 1, ... in the order of segments and of the index.
struct TreeLevelScores {
  uint64_t log_mass, d2;         // [lanes][rows]
  uint64_t info;                 // [rows] TreeRowInfo
  uint64_t best_key, error_key;  // [rows] by what rows are ranked (KeyOf)
  uint64_t error;                // [rows] squared error of the estimate, mean over the group
};
struct TreeScores {
  TreeLevelScores groups, leaves;
  uint64_t end;
};
constexpr TreeScores TreeScoresOf(const RowRef& row, uint32_t group) {
  uint64_t end = 0;
  const auto level = [&](uint64_t rows) {
    TreeLevelScores at{};
    at.info = end;
    at.log_mass = at.info + rows * (sizeof(TreeRowInfo) / sizeof(float));
    at.d2 = at.log_mass + rows * group;
    at.best_key = at.d2 + rows * group;
    at.error_key = at.best_key + rows;
    at.error = at.error_key + rows;
    end = at.error + rows;
    return at;
  };
  TreeScores scores{};
  scores.groups = level(row.group_slots);
  scores.leaves = level(row.slots);
  scores.end = end;
  return scores;
}
// A tree unit's words: for each lane a TreeLane; then the number of each slice's first item, and
// that of all items; then, for each item, segment << 16 | leaf.
struct TreeLane {
  float output_norm;  // of zones and all groups' estimates
  float zone_max, zone_sum;
  float zone_norm2;  // squared length of the zones' mean
};
inline constexpr uint32_t kTreeLaneWords = kTreeLanesMax * sizeof(TreeLane) / sizeof(uint32_t);
constexpr uint64_t TreeItems(const RowRef& row) {
  return kTreeLaneWords + (uint64_t{row.tree_slices} + 1 + 3) / 4 * 4;
}
// Behind the items of a unit of kByHead: how far it has come. Leaves are chosen beside closed
// groups; or all groups are to be opened, and leaves are chosen anew; or all are to be read, as
// nothing else is enough; or the choice stands, and with it the estimate that was judged; or the
// choice stands, but for leaves that the demote stage has left to their estimates since.
enum class TreePhase : uint32_t { kBesideClosed, kReopen, kAnew, kReadAll, kDone, kMissed };
struct TreeTries {
  TreePhase phase;
  uint32_t tries;               // since the phase began
  float limits[kTreeLanesMax];  // of the errors that each head's own choice leaves
};
constexpr uint64_t TreeWordsPerUnit(const RowRef& row) {
  const uint64_t tries = ChoiceOf(row) == TreeChoice::kByHead ? sizeof(TreeTries) : 0;
  return TreeItems(row) + row.slots + tries / sizeof(uint32_t);
}
// What the first stage over a tree item, or the step's gate, leaves of where it lies
// (StepHeader::tree_places).
inline constexpr uint32_t kTreePlaceBytes = 240;
constexpr uint64_t ScoresPerUnit(const RowRef& row, uint32_t group) {
  if (row.kind == UnitKind::kTree) return TreeScoresOf(row, group).end;
  return uint64_t{row.slots} * (uint64_t{group} * (row.second_order != 0 ? 2 : 1) + 1);
}
// Of a tree item, in words: its queries along the segment's axes, factors and offsets of products
// with the queries and with these squared, digits of both as products want them; and the sums of
// estimates that it leaves: a state whose values are followed by the slopes' correction of them.
constexpr uint32_t TreeQueryWords(uint32_t head_dim) { return kLanes * (5 * head_dim / 2 + 3); }
constexpr uint32_t TreeStateFloats(uint32_t value_dim) {
  return kLanes * (kStateHead + 2 * value_dim);
}

static_assert(sizeof(TreeRowInfo) == 16 && sizeof(TreeTries) == 136);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_LAYOUT_TREE_LAYOUT_H_
