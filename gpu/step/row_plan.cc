// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/row_plan.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "attention/segment/pages.h"
#include "attention/segment/segment.h"
#include "gpu/step/narrow.h"

namespace attnd::gpu {
namespace {

using attention::kTailBlockTokens;
using attention::PageGeometry;

// Entries of `chosen` have 15 bits for the segment's number.
constexpr uint64_t kSegmentsMax = kCachedToken >> 16;

constexpr uint64_t CeilOf(uint64_t n, uint64_t divisor) { return (n + divisor - 1) / divisor; }

// The least `unit` times a power of two for which `pieces` gives at most `max`, but no more than
// `largest`.
template <typename F>
uint32_t PieceSize(uint64_t unit, uint64_t largest, uint64_t max, const F& pieces) {
  while (unit < largest && pieces(unit) > max) unit *= 2;
  return Narrow(unit);
}

uint64_t DensePieces(const RowDescription& row, uint64_t piece_tokens) {
  uint64_t pieces = 0;
  for (const auto& segment : row.segments) pieces += CeilOf(segment.tokens, piece_tokens);
  return pieces;
}

// Divides what is read in any case, and the estimates, into pieces.
void PlanPieces(const RowDescription& row, RowRef* ref) {
  // By the row's own last token, though a part may end before it: how a row is divided must not
  // depend on what else is in the wave.
  const uint64_t tail_end = row.tail_end();
  // Rows of many query tokens have warps enough.
  const bool is_short = row.query_tokens == 1 && tail_end <= kShortTailTokens;
  ref->tail_piece_tokens = is_short ? kTailPieceTokens : kReadPieceTokens;
  const uint64_t pieces = CeilOf(tail_end, ref->tail_piece_tokens);
  // Rounded up, so that it seldom changes: each number has a graph of its own.
  const uint64_t room = is_short ? std::bit_ceil(pieces) : pieces;
  ref->tail_pieces = tail_end > ref->tail_begin ? Narrow(room) : 0;
  ref->dense_piece_tokens = PieceSize(
      kReadPieceTokens, attention::kSegmentTokensMax, ReadPiecesMaxFor(row.shape.kv_heads),
      [&](uint64_t piece_tokens) { return DensePieces(row, piece_tokens); });
  const bool dense = row.kind == UnitKind::kDense;
  ref->dense_pieces = dense ? Narrow(DensePieces(row, ref->dense_piece_tokens)) : 0;
  ref->read_pieces = dense ? ref->dense_pieces + ref->tail_pieces : ref->tail_pieces + 1;
  if (row.kind == UnitKind::kTree) {
    ref->tree_slice_groups = TreeSliceGroupsFor(ref->group_slots);
    for (const SegmentDescription& segment : row.segments) {
      ref->tree_slices += TreeSlicesFor(GroupSlotsFor(segment.max_groups), ref->tree_slice_groups);
    }
    ref->estimate_pieces = ref->tree_slices;
  }
  if (row.kind != UnitKind::kClusters) return;
  ref->estimate_piece_slots = PieceSize(kEstimatePieceSlots, uint64_t{1} << 31, kEstimatePiecesMax,
                                        [&](uint64_t slots) { return CeilOf(ref->slots, slots); });
  ref->estimate_pieces = Narrow(CeilOf(ref->slots, ref->estimate_piece_slots));
}

}  // namespace

bool HasPlan(const RowDescription& row) {
  uint64_t leaves = 0;
  for (const SegmentDescription& segment : row.segments) leaves += SlotsFor(segment.max_clusters);
  if (row.kind == UnitKind::kTree && leaves > kTreeRowsMax) return false;
  return row.history_segments <= kSegmentsMax && row.history_tokens <= kUnitTokensMax &&
         row.tail_end() <= std::numeric_limits<uint32_t>::max();
}

RowRef PlanRow(const RowDescription& row, uint32_t first_token, uint32_t tokens,
               bool cooperative_groups) {
  RowRef ref{};
  ref.kind = row.kind;
  ref.cut = row.cut;
  ref.second_order = row.second_order ? 1 : 0;
  ref.query_tokens = tokens;
  ref.tokens_per_unit = TokensPerUnit(row);
  // Dense units take as many query tokens as one tile holds, so that all units have as many tiles.
  ref.tiles_per_unit = Narrow(CeilOf(row.shape.group, kLanes));
  ref.tail_begin = row.tail_begin;
  ref.tail_limit = Narrow(row.TailLimit(first_token));
  ref.causal = row.causal ? 1 : 0;
  ref.segment_count = Narrow(row.segments.size());
  for (const SegmentDescription& segment : row.segments) {
    ref.clustered_tokens += segment.tokens - segment.unclustered;
    if (ReadsClusters(ref)) ref.slots += SlotsFor(segment.max_clusters);
    if (row.kind == UnitKind::kTree) ref.group_slots += GroupSlotsFor(segment.max_groups);
  }
  PlanPieces(row, &ref);
  ref.exact_share = row.exact_share;
  ref.estimated_share = row.estimated_share;
  ref.p1 = row.p1;
  ref.p2 = row.p2;
  ref.tolerance = row.tolerance;
  ref.floor = row.floor;
  ref.head_tolerance = row.head_tolerance;
  if (cooperative_groups) {
    ref.coop_blocks =
        CoopBlocksFor(ref, row.shape.group, row.shape.kernel.value_dim, row.tail_end());
  }
  if (ref.coop_blocks != 0) ref.read_pieces = ref.estimate_pieces = ref.coop_blocks;
  return ref;
}

uint32_t TokensPerUnit(const RowDescription& row) {
  const bool clusters = row.kind == UnitKind::kClusters || row.kind == UnitKind::kTree;
  return clusters ? 1 : std::max(1u, kLanes / row.shape.group);
}

uint64_t UnitsOf(const RowDescription& row, uint32_t tokens) {
  return CeilOf(tokens, TokensPerUnit(row)) * row.shape.kv_heads;
}

uint64_t TailBlocksSeen(const RowDescription& row) {
  return row.tail_end() > row.tail_begin ? CeilOf(row.tail_end(), kTailBlockTokens) : 0;
}

SegmentRef PlanSegment(const RowRef& row, const SegmentDescription& segment,
                       const RowMemory::SegmentPlace& place, const SegmentRef* before) {
  SegmentRef ref{};
  ref.index = place.index;
  ref.pages = place.pages;
  ref.index_head_bytes = segment.index_head_bytes;
  ref.pages_head_bytes = segment.pages_head_bytes;
  ref.head_pages = Narrow(PageGeometry::PagesFor(segment.tokens));
  if (segment.in_file) {  // its sink alone is in the device's memory
    ref.in_file = 1;
    ref.pages_head_bytes =
        segment.pages_head_bytes / ref.head_pages * PageGeometry::PagesFor(segment.unclustered);
  }
  ref.offsets = segment.offsets;
  ref.tokens = segment.tokens;
  ref.unclustered = segment.unclustered;
  ref.slots = SlotsFor(segment.max_clusters);
  ref.max_clusters = segment.max_clusters;
  ref.first_page = place.first_page;
  if (before != nullptr) {
    ref.first_slot = before->first_slot + before->slots;
    ref.first_piece = before->first_piece + Narrow(CeilOf(before->tokens, row.dense_piece_tokens));
  }
  return ref;
}

TreeRef PlanTree(const RowRef& row, const SegmentDescription& segment, const TreeRef* before) {
  TreeRef ref{};
  ref.offsets = segment.tree;
  ref.max_groups = segment.max_groups;
  ref.group_slots = GroupSlotsFor(segment.max_groups);
  ref.slices = TreeSlicesFor(ref.group_slots, row.tree_slice_groups);
  if (before != nullptr) {
    ref.first_group_slot = before->first_group_slot + before->group_slots;
    ref.first_slice = before->first_slice + before->slices;
  }
  return ref;
}

}  // namespace attnd::gpu
