// SPDX-License-Identifier: Apache-2.0
//
// What the host tells the device about one step, and where the device writes the results: plain
// structures that are copied as they are. The host side (step_writer) fills them; the kernels
// (cuda/) and the tests' naive loops (tests/gpu/step_reference) read them. Every pointer is a
// device address. Nothing in here depends on CUDA.
//
// Words. "Block" in the identifiers of cuda/ is a thread block. A stage is a part of a step with
// launches of its own. Each stage reads only what earlier stages wrote:
//
//   prepare   put uploaded rows into their pages; arrange queries as the kernels read them
//   read      read pieces (zones, dense tokens) exactly; score clusters
//   select    for each unit: choose clusters, list their tokens, queue their pieces for finish
//   measure   only if a unit has a tolerance: estimate everything, weigh errors, choose again
//   demote    only if the rows estimate what does not come in time: leave chosen clusters with such
//             pages to their estimates, list and queue the tokens of the others
//   fetch     only if a row's pages lie in host memory or in a file: look up the pages of chosen
//             tokens in the cache, fetch those that it misses, and list those that are in a file
//             and did not come with the step (page_cache.h); beside finish's estimates
//   finish    read the chosen tokens exactly, estimate the other clusters
//   merge     for each unit: merge its states, in the order of their numbers; normalise; statistics
//
// Units over trees have stages of their own before finish, of which groups needs nothing of prepare
// and runs beside it (its end, behind a gate). A tree item is a (unit, tile, slice): a slice is
// some neighbouring groups of one segment, with their leaves. One thread block works on an item; a
// row's begin with its last slice, of every unit and tile.
//
//   groups    score a slice's groups, sum up their estimates
//   open      for each unit: choose the groups to open, number the leaves of these
//   leaves    score the opened groups' leaves
//   choose    for each unit: choose leaves, list their tokens, queue their pieces for finish
//
// Units that rank leaves by mass look at all of them. In place of groups and open they have
//
//   whole     open all groups of a slice, number their leaves
//
// Units with a budget for each head try several choices. Behind leaves they have
//
//   try       for each unit: judge the estimate of the last choice, choose more leaves; twice, then
//             judge once more. Behind each choice:
//   estimate  what the choice leaves to estimates, as in finish, which has none for these units
//             unless the demote stage has left more to them
//   reopen    of units that are not within their budgets: open all groups, number their leaves
//   leaves    score these
//   prepare   for each such unit: leave all to estimates, whose sum tells the outputs' lengths
//   try       as before; five times and once more
//   list      for each unit: list tokens, queue their pieces for finish
//
// Instead of by stages, a unit of a cluster policy may be answered by a cooperative group (the
// thread blocks of one thread block cluster), in a single launch.
//
// Work is divided by a row's own lengths alone: other rows change no bit of its answer.
#ifndef ATTND_GPU_LAYOUT_STEP_LAYOUT_H_
#define ATTND_GPU_LAYOUT_STEP_LAYOUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "gpu/layout/answer_places.h"
#include "gpu/layout/index_layout.h"
#include "gpu/layout/page_cache.h"

namespace attnd::gpu {

// (Query token, query head) pairs that are handled together: the columns of one matrix instruction.
inline constexpr uint32_t kLanes = 8;
// Clusters are numbered by slots: a segment's clusters follow one another from a multiple of
// kSlotChunk on; the slots behind its last cluster, up to the next multiple, are empty. A score
// item scores kSlotChunk slots.
inline constexpr uint32_t kSlotChunk = 64;
// The same of a tree's groups.
inline constexpr uint32_t kGroupSlotChunk = 16;
// Groups of a tree item's slice, at least and at most; see TreeSliceGroupsFor.
inline constexpr uint32_t kTreeSliceGroupsMin = 128;
inline constexpr uint32_t kTreeSliceGroupsMax = 512;
inline constexpr uint32_t kTreeSlicesWanted = 32;  // of a row
inline constexpr uint32_t kTreeLanesMax = 32;      // query heads of a KV head (kKernelGroupMax)
// Slots that a warp works on at a time.
inline constexpr uint32_t kStepSlots = 16;
// Tokens or slots of a piece, and the most pieces: a row that would have more pieces has longer
// ones. A long tail has as many as it needs; a short one that one query token sees shorter ones,
// their number rounded up to a power of two. Of segments' read pieces see ReadPiecesMaxFor.
inline constexpr uint32_t kReadPieceTokens = 512, kTailPieceTokens = 128, kShortTailTokens = 2048;
inline constexpr uint32_t kReadItemsWanted = 256;  // of a long row
inline constexpr uint32_t kReadPiecesLeast = 16, kReadPiecesMost = 64;
inline constexpr uint32_t kChosenPieceTokens = 128;
inline constexpr uint32_t kChosenPiecesMax = 64;
inline constexpr uint32_t kEstimatePieceSlots = 512;
inline constexpr uint32_t kEstimatePiecesMax = 64;
// Sizes of cooperative groups, in thread blocks. At most 12: an H200 has its multiprocessors in
// parts of 18, some of 16; a thread block cluster lies within one part, and a multiprocessor holds
// four thread blocks. So the device holds 37 groups of 12 at once, but only 30 of 14 and 28 of 16,
// and four rows of eight KV heads have 32 units.
inline constexpr uint32_t kCoopBlocks[] = {2, 4, 7, 12};
inline constexpr uint32_t kCoopWarps = 4;        // of a cooperative group's thread block
inline constexpr uint32_t kCoopBlockWork = 320;  // see CoopSizeFor
inline constexpr uint32_t kCoopSizes = sizeof(kCoopBlocks) / sizeof(kCoopBlocks[0]);
inline constexpr uint32_t kCoopBlocksMax = kCoopBlocks[kCoopSizes - 1];
inline constexpr uint32_t kCoopSegmentsMax = 32;
inline constexpr uint32_t kCoopValueDimMax = 128;
// The most clustered tokens of a unit; selection counts two kinds of tokens in one word.
inline constexpr uint64_t kUnitTokensMax = (uint64_t{1} << 28) - 1;
// The most groups, and the most leaves, of a unit's tree: choosing adds them up in words.
inline constexpr uint32_t kTreeRowsMax = 1u << 20;
// Floats before a state's values; those from kHeadErrors on are of estimate pieces alone: sums of
// squared errors, of second moments, of dropped weights, and over trees of the masses' squared
// errors and of the variances of logits.
inline constexpr uint32_t kStateHead = 8;
enum StateHead : uint32_t {
  kHeadMax,
  kHeadSum,
  kHeadErrors,
  kHeadMoments,
  kHeadDropped,
  kHeadMassErrors,
  kHeadLogitVariances
};

// kTree: clusters that are the leaves of a tree.
enum class UnitKind : uint32_t { kDense, kStreaming, kClusters, kTree };
// kHeadBudget: an error budget for each query head; over trees alone.
enum class CutKind : uint32_t { kTopK, kTopP, kErrorBudget, kHeadBudget };

// One segment of a row at the step's layer.
struct SegmentRef {
  const std::byte* index;     // of KV head 0, as in attention::IndexLayout; its first 4 bytes are
                              // the cluster count
  const std::byte* pages;     // of KV head 0; of a segment in a file the first ones alone, which
                              // have the unclustered tokens
  uint64_t index_head_bytes;  // from one KV head to the next
  uint64_t pages_head_bytes;  // likewise, of what `pages` has
  IndexOffsets offsets;
  uint32_t tokens;
  uint32_t unclustered;
  uint32_t first_slot;    // a multiple of kSlotChunk
  uint32_t slots;         // max_clusters, rounded up to kSlotChunk
  uint32_t first_piece;   // number among the row's dense pieces; a piece never spans segments
  uint32_t max_clusters;  // rows that the index has room for, at least 1
  // Number, for the page cache, of KV head 0's first page, if the pages lie in host memory or in a
  // file; 0 if they lie in the device's memory.
  uint64_t first_page;
  uint32_t head_pages;  // of a KV head, wherever they lie: numbers from one KV head to the next
  uint32_t in_file;     // 1: the pages lie in a file
};

// What a tree has beside its SegmentRef, whose clusters are the leaves.
struct TreeRef {
  TreeOffsets offsets;
  uint32_t max_groups;        // rows that the index has room for, at least 1
  uint32_t first_group_slot;  // among the row's groups
  uint32_t group_slots;       // max_groups, rounded up to kGroupSlotChunk
  uint32_t first_slice;       // among the row's slices
  uint32_t slices;            // at least 1
};

// One row of the batch. A unit is one (row, group of query tokens, KV head), with number
// first_unit + token_group * kv_heads + kv_head. A unit has tiles of kLanes (query token, query
// head of the KV head) pairs, numbered token-major.
struct RowRef {
  UnitKind kind;
  CutKind cut;
  uint32_t second_order;  // 1: estimates of the second order, with predicted errors
  uint32_t query_tokens;
  uint32_t tokens_per_unit;  // 1 for kClusters and kTree
  uint32_t tiles_per_unit;
  uint32_t first_unit;
  uint32_t first_query_token;  // number in the step's queries and outputs

  uint32_t segments_begin;  // in StepHeader::segments
  uint32_t segment_count;
  uint32_t tail_blocks_begin;  // in StepHeader::tail_blocks
  // Tail tokens are numbered from the start of the first tail block.
  uint32_t tail_begin;  // first token that no segment covers
  uint32_t tail_limit;  // query token i sees tail tokens below tail_limit + i * causal
  uint32_t causal;      // 1, or 0 for a query-only row

  uint32_t slots;  // of all segments
  uint32_t dense_piece_tokens, tail_piece_tokens;
  uint32_t dense_pieces;     // of a kDense unit's segments; then come the tail pieces
  uint32_t tail_pieces;      // counted from tail token 0, the last ones may be empty; the sink is
                             // piece read_pieces - 1 of units that are not kDense
  uint32_t read_pieces;      // of a unit's tile
  uint32_t estimate_pieces;  // of a unit's tile; 0 unless kClusters or kTree
  uint32_t estimate_piece_slots;  // a multiple of kSlotChunk
  uint32_t first_read_item;       // items of a row: (unit, tile, piece), piece fastest
  uint32_t first_score_item;      // (unit, slots / kSlotChunk), chunk fastest; tiles share an item
  // Thread blocks of the cooperative group that answers each of the row's units; 0 if the stages
  // answer them. Each thread block of a group leaves one state of zones, one of estimates and one
  // of chosen tokens. So read_pieces and estimate_pieces are then coop_blocks, and the row has no
  // read items and no score items.
  uint32_t coop_blocks;

  // Places of the row's first unit in scratch memory; the other units follow at equal distances.
  uint32_t first_state;  // of states; a tile has StatesPerTile: of read pieces, of estimate pieces,
                         // of chosen pieces

  // Of kTree. estimate_pieces is then tree_slices.
  uint32_t group_slots;        // of all segments
  uint32_t trees_begin;        // in StepHeader::trees
  uint32_t first_tree_item;    // items of a row: (unit, tile, slice), slice fastest
  uint32_t tree_slices;        // of all segments
  uint32_t tree_slice_groups;  // of a slice; a segment's last slice may have fewer

  uint32_t off_device;  // 1 if pages of one of its segments lie in host memory or in a file;
                        // changes nothing of the plan

  uint64_t first_score;  // of floats in scores: per unit log_mass [lanes][slots], then, for the
                         // second order, d2 [lanes][slots], then group_score [slots]; of a tree see
                         // TreeScores (tree_layout.h)
  uint64_t first_fate;   // of bytes in fates: per unit [slots] (of a tree by its leaves' items),
                         // then, of a tree, [group_slots]
  uint64_t first_word;   // of words in tree_words: per unit TreeWordsPerUnit
  uint64_t first_token;  // of entries in chosen: per unit [clustered_tokens]
  uint64_t clustered_tokens;  // in the row's segments

  double exact_share, estimated_share;  // kTopK
  double p1, p2;                        // kTopP
  double tolerance, floor;              // kErrorBudget, kHeadBudget; infinity for "off"
  double head_tolerance;  // kHeadBudget: what a head's predicted error is to be within
};

// Slots of a segment whose index has room for max_clusters clusters.
constexpr uint32_t SlotsFor(uint32_t max_clusters) {
  return (max_clusters + kSlotChunk - 1) / kSlotChunk * kSlotChunk;
}
constexpr uint32_t GroupSlotsFor(uint32_t max_groups) {
  return (max_groups + kGroupSlotChunk - 1) / kGroupSlotChunk * kGroupSlotChunk;
}
// Groups of a slice of a row that has so many group slots: what an item does once, whatever its
// size, takes longer than a slice of the least size, but few slices leave multiprocessors idle.
constexpr uint32_t TreeSliceGroupsFor(uint32_t group_slots) {
  uint32_t groups = kTreeSliceGroupsMin;
  while (groups < kTreeSliceGroupsMax && groups * kTreeSlicesWanted < group_slots) groups *= 2;
  return groups;
}
constexpr uint32_t TreeSlicesFor(uint32_t group_slots, uint32_t slice_groups) {
  return (group_slots + slice_groups - 1) / slice_groups;
}
// The most read pieces that a unit's segments are divided into, but for those that short segments
// make. Few, as what a piece begins with, and merging, takes time; but a long row alone has work
// for two thread blocks on each multiprocessor, if it has 4 to 16 KV heads.
constexpr uint32_t ReadPiecesMaxFor(uint32_t kv_heads) {
  return std::clamp(kReadItemsWanted / kv_heads, kReadPiecesLeast, kReadPiecesMost);
}
// How a tree's row chooses leaves: kByError opens groups before; kByMass looks at all leaves;
// kByHead does as kByError, again and again until every head's error is within its tolerance.
enum class TreeChoice : uint32_t { kByError, kByMass, kByHead };
inline constexpr uint32_t kTreeChoices = 3;
constexpr TreeChoice ChoiceOf(const RowRef& row) {
  if (row.cut == CutKind::kErrorBudget) return TreeChoice::kByError;
  return row.cut == CutKind::kHeadBudget ? TreeChoice::kByHead : TreeChoice::kByMass;
}
constexpr bool Chooses(const RowRef& row, TreeChoice choice) {
  return row.kind == UnitKind::kTree && ChoiceOf(row) == choice;
}
// Whether the measure stage chooses the row's clusters.
constexpr bool HasTolerance(const RowRef& row) {
  return row.kind == UnitKind::kClusters && row.cut == CutKind::kErrorBudget &&
         row.tolerance < std::numeric_limits<double>::infinity();
}
// The size of a unit's cooperative group, as a number in kCoopBlocks: the first size for which a
// thread block has at most kCoopBlockWork of work, or the last size. work: the unit's slots plus
// the tail tokens that it reads.
constexpr uint32_t CoopSizeFor(uint64_t work) {
  uint32_t size = 0;
  while (size + 1 < kCoopSizes && uint64_t{kCoopBlocks[size]} * kCoopBlockWork < work) ++size;
  return size;
}
// RowRef::coop_blocks of a row, on a device that runs cooperative groups. tail_tokens: how many
// tail tokens the row sees.
constexpr uint32_t CoopBlocksFor(const RowRef& row, uint32_t group, uint32_t value_dim,
                                 uint64_t tail_tokens) {
  if (row.kind != UnitKind::kClusters || HasTolerance(row) || group > kLanes ||
      value_dim > kCoopValueDimMax || row.segment_count > kCoopSegmentsMax) {
    return 0;
  }
  return kCoopBlocks[CoopSizeFor(row.slots + tail_tokens)];
}
// Distances, in elements, between the places of a row's tiles and units in scratch memory.
constexpr bool ReadsClusters(const RowRef& row) {
  return row.kind == UnitKind::kClusters || row.kind == UnitKind::kTree;
}
// Whether the fetch stage looks up the pages of the row's chosen tokens, if the step has a cache.
constexpr bool LooksUpPages(const RowRef& row) {
  return row.off_device != 0 && row.coop_blocks == 0 && ReadsClusters(row);
}
constexpr uint64_t StatesPerTile(const RowRef& row) {
  if (row.coop_blocks != 0) return uint64_t{3} * row.coop_blocks;
  return uint64_t{row.read_pieces} + row.estimate_pieces +
         (ReadsClusters(row) ? kChosenPiecesMax : 0);
}
constexpr uint64_t FatesPerUnit(const RowRef& row) { return uint64_t{row.slots} + row.group_slots; }

constexpr uint32_t StateFloats(uint32_t value_dim) { return kLanes * (kStateHead + value_dim); }
// A unit that a cooperative group answers: the row's unit number `unit`.
struct CoopUnit {
  uint32_t row;
  uint32_t unit;
};

// Keys and values of new tokens, which come with the step. The prepare stage copies them to their
// pages.
struct UploadRef {
  std::byte* to;
  uint64_t from;   // byte in StepHeader::upload_data
  uint64_t bytes;  // a multiple of 16, as are the addresses
};

// What became of a cluster; the values of attention::Fate.
inline constexpr uint8_t kFateDropped = 0;
inline constexpr uint8_t kFateEstimated = 1;
inline constexpr uint8_t kFateExact = 2;

// Some slots of one unit in one segment, with all addresses that are needed to work on them. The
// prepare stage writes a ChunkRef for every kSlotChunk slots, so that the score stage need not
// search. In a cooperative group each warp writes one for its share of each segment.
struct ChunkRef {
  const std::byte* head;  // the KV head's index
  float* scores;          // log_mass of lane 0 at the first slot
  uint8_t* fates;         // at the first slot
  IndexOffsets offsets;
  uint32_t segment;   // number in the row
  uint32_t first;     // the first slot's cluster
  uint32_t clusters;  // of the segment and KV head; slots beyond are empty
  uint32_t max_clusters;
  uint32_t unit;
  uint32_t slots;  // of the row: from one lane's scores to the next
  uint32_t second_order;
  uint32_t steps;  // of kStepSlots slots
  uint32_t reserved[9];
};
static_assert(sizeof(ChunkRef) == 128);

// The result of a unit's selection.
struct UnitResult {
  uint32_t clusters;  // that it chose from: of a tree the opened groups' leaves
  uint32_t chosen_tokens;
  uint32_t chosen_pieces;
  uint32_t chosen_piece_tokens;
  uint64_t estimated_tokens;
  uint64_t dropped_tokens;
  // Of pages in host memory and in files, counted by the fetch stage. A page counts once for each
  // 32 tokens of the list that it has tokens in.
  uint32_t pages;          // that chosen tokens lie in
  uint32_t missed_pages;   // of them, that were fetched from host memory into the cache
  uint32_t earlier_pages;  // of them, that an earlier run of the wave has fetched so
  uint32_t host_pages;     // of them, that are read where they lie in host memory
  uint32_t carried_pages;  // of them, that came with the step, or with an earlier run of the wave
  uint32_t host_tokens;    // chosen tokens of pages of these four kinds
  uint32_t disk_tokens;    // of them, of pages that were read from disk for the step
  uint32_t missed_tokens;  // of estimated_tokens: chosen, but their pages did not come in time
};

// For each lane, written by the select stage, over trees by choose: the scale of the weights that
// estimates use.
struct LaneScale {
  float max;     // of log_mass over all clusters
  float sum;     // of all weights
  float missed;  // of the weights of clusters that the demote stage has left to estimates
  uint32_t reserved;
};

// For each query token and query head, in the order of StepHeader::lse.
struct LaneResult {
  float covered_mass;
  float exact_mass;
  float predicted_error;
  float missed_mass;
};

// A piece of a tile's chosen tokens, with all addresses that are needed to read it. The select,
// the measure or the choose stage queues pieces, the finish stage reads them.
struct ChosenPiece {
  const uint32_t* chosen;      // the unit's list
  const SegmentRef* segments;  // of the row
  const uint32_t* fragments;   // of the tile
  float* state;
  uint32_t begin, end;  // tokens of `chosen`
  uint32_t kv_head;
  uint32_t lanes;
  const std::byte* frames;  // of the page cache
  uint32_t reserved[2];
};
static_assert(sizeof(ChosenPiece) == 64);

// The most pages that a step lists as missing, and that come with a step.
inline constexpr uint32_t kMissingPagesMax = 1u << 15;
inline constexpr uint32_t kCarriedPagesMax = 1u << 16;

// Counters in scratch memory: how many pieces of chosen tokens have been queued; how many read
// pieces and how many queued pieces thread blocks have taken.
enum Cursor : uint32_t { kQueuedPieces, kTakenReadPieces, kTakenFinishPieces, kCursors };

// Words of StepHeader::query_fragments for one tile: fragments of the queries and of the squared
// queries, then kLanes factors of the logits and kLanes factors of their variances, rounded up.
constexpr uint32_t FragmentWords(uint32_t head_dim) { return head_dim * 8; }
constexpr uint32_t TileFragmentWords(uint32_t head_dim) { return 2 * FragmentWords(head_dim) + 64; }

// Places and sizes of everything else. Scratch memory is as the last step left it; kernels clear
// the counters that they use.
struct StepHeader {
  uint32_t rows;
  uint32_t units;
  uint32_t read_items;
  uint32_t score_items;
  uint32_t uploads;
  uint32_t query_tokens;  // of all rows
  uint32_t kv_heads;
  uint32_t head_dim;
  uint32_t value_dim;
  uint32_t group;                    // query heads of a KV head
  uint32_t tiles;                    // of all units
  uint32_t tiles_max;                // of a unit
  uint32_t estimate_pieces_max;      // of a row
  uint16_t query_dtype;              // DType
  uint16_t out_dtype;                // DType
  uint32_t coop_counts[kCoopSizes];  // units that groups of kCoopBlocks[i] thread blocks answer
  float softmax_scale;
  uint32_t tree_items;
  uint32_t tree_rows[kTreeChoices];  // rows of each TreeChoice
  uint32_t missing_max;              // entries of `missing`
  uint32_t estimates_misses;         // 1: the rows have the demote stage; not without `carried`
  uint32_t answer_blocks;            // AnswerBlocks
  uint64_t tail_block_head_bytes;    // of a tail block, from one KV head to the next

  const RowRef* row_refs;  // [rows], ascending by first_unit
  const SegmentRef* segments;
  const TreeRef* trees;                 // of the segments of kTree rows
  const std::byte* const* tail_blocks;  // KV head 0's pages of each tail block, at the step's layer
  const UploadRef* upload_refs;         // [uploads]
  const CoopUnit* coop_units;           // by the size of their groups, smaller ones first
  const std::byte* upload_data;
  const std::byte* queries;     // [query_tokens][kv_heads * group][head_dim] of query_dtype
  PageCacheRef cache;           // set_count is 0 if no row has pages off the device
  const CarriedPages* carried;  // null if no row has pages in a file

  // Scratch.
  uint32_t* query_fragments;  // [tiles][TileFragmentWords]
  float* states;              // [state][kLanes][kStateHead + value_dim]
  float* scores;
  uint8_t* fates;
  uint32_t* chosen;            // segment << 16 | token in the segment's order; see kCachedToken
  float* score_partials;       // [score_items][tile][kLanes][2][2]: max and sum of log_mass, then
                               // of the optimistic mass, over the item's clusters
  LaneScale* lane_scales;      // [tiles][kLanes]
  UnitResult* unit_results;    // [units]
  ChunkRef* chunks;            // [score_items]
  ChosenPiece* chosen_pieces;  // [tiles * kChosenPiecesMax]
  uint32_t* cursors;           // [kCursors]
  uint32_t* tree_words;
  std::byte* tree_places;  // [tree_items][kTreePlaceBytes], in the order of thread blocks
  float* tree_queries;     // [tree_items][TreeQueryWords], likewise
  float* tree_states;    // [tree_items][kLanes][kStateHead + 2 value_dim]: values with the slopes'
                         // correction; then, of estimates, that correction
  float* tree_partials;  // [tree_items][kLanes][kStateHead]: over leaves and closed groups
  uint64_t* missing;  // [missing_max] numbers of pages in files that are neither in the cache nor
                      // carried, in any order, some more than once; a row with such a page has no
                      // answer

  // Outputs. Out and the next three lie in pinned memory of the host, where the kernels that answer
  // write them. The others, and fates, are copied back if they are wanted.
  AnswerPlaces* answer;      // of the input, on the device
  float* lse;                // [query_tokens][query_heads]; NaN where a number of out is none
  LaneResult* lane_results;  // [query_tokens][query_heads]
  UnitResult* last_results;  // [units] what unit_results are in the end, of units over clusters
  uint32_t* missing_count;   // of entries that `missing` has, or would have; null as `carried`
  AnswerSignal signal;
};

// No padding, so that equal headers have equal bytes.
static_assert(offsetof(StepHeader, tail_block_head_bytes) ==
              offsetof(StepHeader, answer_blocks) + sizeof(StepHeader::answer_blocks));
// The compilers of host and device agree on these sizes: the structures are copied as bytes.
static_assert(sizeof(SegmentRef) == 112 && sizeof(RowRef) == 224 && sizeof(StepHeader) == 408);
static_assert(sizeof(UploadRef) == 24 && sizeof(CoopUnit) == 8 && sizeof(TreeRef) == 136);
static_assert(sizeof(UnitResult) == 64 && sizeof(LaneResult) == 16 && sizeof(LaneScale) == 16);
static_assert(std::is_trivially_copyable_v<SegmentRef> && std::is_trivially_copyable_v<RowRef> &&
              std::is_trivially_copyable_v<StepHeader> && std::is_trivially_copyable_v<UploadRef>);

// Units that cooperative groups answer.
constexpr uint32_t CoopUnits(const StepHeader& step) {
  uint32_t units = 0;
  for (const uint32_t count : step.coop_counts) units += count;
  return units;
}

// Thread blocks of the kernels that write answers: of cooperative groups; and of the merge stage,
// one for each unit and query head, unless groups answer all units.
constexpr uint32_t AnswerBlocks(const StepHeader& step) {
  uint32_t blocks = CoopUnits(step) == step.units ? 0 : step.units * step.group;
  for (uint32_t i = 0; i < kCoopSizes; ++i) blocks += step.coop_counts[i] * kCoopBlocks[i];
  return blocks;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_LAYOUT_STEP_LAYOUT_H_
