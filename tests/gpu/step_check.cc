// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/step_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <sstream>
#include <vector>

#include "gpu/index/built_indexes.h"

namespace attnd::gpu::test {
namespace {

constexpr uint32_t kTailBlock = 64;  // tokens

uint64_t CeilOf(uint64_t n, uint64_t divisor) { return (n + divisor - 1) / divisor; }

class Checker {
 public:
  Checker(const KernelShape& shape, const StepHeader& header, bool measure,
          const MemoryCheck& memory)
      : shape_(shape), h_(header), measure_(measure), memory_(memory) {}

  std::string Run() {
    Equal("tiles_max", h_.tiles_max, CeilOf(h_.group, kLanes));
    const uint64_t token_bytes =
        uint64_t{shape_.head_dim + shape_.value_dim} * DTypeBytes(shape_.dtype);
    Equal("tail_block_head_bytes", h_.tail_block_head_bytes, kTailBlock * token_bytes);
    Held("row_refs", h_.row_refs, h_.rows * sizeof(RowRef));
    if (!wrong_.empty()) return wrong_;
    for (uint32_t r = 0; r < h_.rows && wrong_.empty(); ++r) Row(h_.row_refs[r]);
    Totals();
    CooperativeUnits();
    Uploads();
    Regions();
    return wrong_;
  }

 private:
  void Fail(const std::string& what) {
    if (wrong_.empty()) wrong_ = what;
  }
  void Equal(const char* what, uint64_t actual, uint64_t expected) {
    if (actual == expected) return;
    std::ostringstream text;
    text << what << " is " << actual << ", expected " << expected;
    Fail(text.str());
  }
  void Held(const char* what, const void* address, uint64_t bytes) {
    if (bytes > 0 && !memory_.owns(address, bytes))
      Fail(std::string(what) + " is not device memory");
  }

  void Row(const RowRef& row) {
    const bool tree = row.kind == UnitKind::kTree;
    const bool clusters = tree || row.kind == UnitKind::kClusters;
    const bool dense = row.kind == UnitKind::kDense;
    Equal("first_unit", row.first_unit, units_);
    Equal("first_query_token", row.first_query_token, query_tokens_);
    Equal("first_read_item", row.first_read_item, read_items_);
    Equal("first_score_item", row.first_score_item, score_items_);
    Equal("first_state", row.first_state, states_);
    Equal("first_score", row.first_score, scores_);
    Equal("first_fate", row.first_fate, fates_);
    Equal("first_token", row.first_token, chosen_);
    Equal("trees_begin", row.trees_begin, trees_);
    Equal("first_tree_item", row.first_tree_item, tree_items_);
    Equal("first_word", row.first_word, tree_words_);
    Equal("tokens_per_unit", row.tokens_per_unit, clusters ? 1 : std::max(1u, kLanes / h_.group));
    Equal("tiles_per_unit", row.tiles_per_unit,
          CeilOf(uint64_t{row.tokens_per_unit} * h_.group, kLanes));
    if (row.query_tokens == 0) Fail("query_tokens is 0");
    Segments(row);
    Trees(row);
    Tail(row);
    if (row.coop_blocks != 0) return Cooperative(row);
    Equal("read_pieces", row.read_pieces,
          dense ? row.dense_pieces + row.tail_pieces : row.tail_pieces + 1);
    if (!clusters) Equal("estimate_pieces", row.estimate_pieces, 0);
    if (tree) Equal("estimate_pieces", row.estimate_pieces, row.tree_slices);
    if (clusters && !tree) {
      Equal("estimate_pieces", row.estimate_pieces, CeilOf(row.slots, row.estimate_piece_slots));
      Equal("estimate_piece_slots % kSlotChunk", row.estimate_piece_slots % kSlotChunk, 0);
      if (row.estimate_pieces > kEstimatePiecesMax) Fail("too many estimate pieces");
    }
    const uint64_t tiles = Units(row);
    read_items_ += tiles * row.read_pieces;
    states_ += tiles * (row.read_pieces + row.estimate_pieces + (clusters ? kChosenPiecesMax : 0));
    if (!clusters) return;
    chosen_pieces_ += tiles * kChosenPiecesMax;
    const bool by_head = row.cut == CutKind::kHeadBudget;
    if (by_head && !tree) Fail("budgets of heads without a tree");
    if (row.cut == CutKind::kErrorBudget || by_head) Equal("second_order", row.second_order, 1);
    if (tree) return;
    score_items_ += UnitsOf(row) * row.slots / kSlotChunk;
    estimate_pieces_max_ = std::max(estimate_pieces_max_, row.estimate_pieces);
    needs_measure_ |= row.cut == CutKind::kErrorBudget && std::isfinite(row.tolerance);
  }

  uint64_t UnitsOf(const RowRef& row) const {
    return CeilOf(row.query_tokens, row.tokens_per_unit) * h_.kv_heads;
  }
  // What every row has; returns its tiles.
  uint64_t Units(const RowRef& row) {
    const uint64_t units = UnitsOf(row);
    units_ += units;
    tiles_ += units * row.tiles_per_unit;
    query_tokens_ += row.query_tokens;
    if (row.kind == UnitKind::kClusters) {
      scores_ += units * (h_.group * row.slots * (row.second_order != 0 ? 2 : 1) + row.slots);
      fates_ += units * row.slots;
      chosen_ += units * row.clustered_tokens;
    }
    if (row.kind == UnitKind::kTree) {
      const uint64_t rows = row.slots + row.group_slots;
      scores_ +=
          units * rows * (uint64_t{2} * h_.group + 3 + 4);  // masses, variances, ranks, numbers
      fates_ += units * rows;
      chosen_ += units * row.clustered_tokens;
      trees_ += row.segment_count;
      tree_items_ += units * row.tiles_per_unit * row.tree_slices;
      const uint64_t tries = row.cut == CutKind::kHeadBudget ? 2 + 32 : 0;
      tree_words_ += units * (4 * 32 + CeilOf(row.tree_slices + 1, 4) * 4 + row.slots + tries);
    }
    return units * row.tiles_per_unit;
  }

  // A row that cooperative groups answer.
  void Cooperative(const RowRef& row) {
    if (row.kind != UnitKind::kClusters) Fail("a cooperative group without clusters");
    if (row.cut == CutKind::kErrorBudget && std::isfinite(row.tolerance)) {
      Fail("a cooperative group with a tolerance");
    }
    if (row.segment_count > kCoopSegmentsMax) Fail("too many segments for a cooperative group");
    if (row.tiles_per_unit != 1) Fail("a cooperative group with several tiles");
    const auto* size = std::find(std::begin(kCoopBlocks), std::end(kCoopBlocks), row.coop_blocks);
    if (size == std::end(kCoopBlocks)) return Fail("no size of a cooperative group");
    Equal("read_pieces", row.read_pieces, row.coop_blocks);
    Equal("estimate_pieces", row.estimate_pieces, row.coop_blocks);
    states_ += Units(row) * 3 * row.coop_blocks;
    for (uint32_t unit = 0; unit < UnitsOf(row); ++unit) {
      const auto number = static_cast<uint32_t>(&row - h_.row_refs);
      coop_units_[size - std::begin(kCoopBlocks)].push_back({number, unit});
    }
  }

  // What a row over trees has beside its segments.
  void Trees(const RowRef& row) {
    if (row.kind != UnitKind::kTree) return Equal("group_slots", row.group_slots, 0);
    if (row.coop_blocks != 0) Fail("a cooperative group over a tree");
    const bool by_error = row.cut == CutKind::kErrorBudget;
    const bool by_head = row.cut == CutKind::kHeadBudget;
    ++tree_rows_[by_error ? 0 : by_head ? 2 : 1];
    if ((by_error || by_head) && !(row.tolerance > 0)) Fail("a tree without a tolerance");
    if (by_head && !(row.tolerance < INFINITY && row.head_tolerance > 0)) {
      Fail("heads without a tolerance");
    }
    if (h_.group > 32) Fail("more heads than a tree unit has room for");
    Held("trees", h_.trees + row.trees_begin, row.segment_count * sizeof(TreeRef));
    if (!wrong_.empty()) return;
    if (row.tree_slice_groups % kGroupSlotChunk != 0 || row.tree_slice_groups < 128 ||
        row.tree_slice_groups > 512) {
      return Fail("tree_slice_groups is out of range");
    }
    uint64_t slots = 0, slices = 0;
    for (uint32_t s = 0; s < row.segment_count && wrong_.empty(); ++s) {
      const TreeRef& tree = h_.trees[row.trees_begin + s];
      const SegmentRef& segment = h_.segments[row.segments_begin + s];
      Equal("first_group_slot", tree.first_group_slot, slots);
      Equal("a tree's group_slots", tree.group_slots,
            CeilOf(tree.max_groups, kGroupSlotChunk) * kGroupSlotChunk);
      Equal("first_slice", tree.first_slice, slices);
      Equal("a tree's slices", tree.slices, CeilOf(tree.group_slots, row.tree_slice_groups));
      slots += tree.group_slots;
      slices += tree.slices;
      Offsets(segment, tree);
    }
    if (!HasRoomOfTrees(row)) Fail("no tree's sizes give so many leaves and groups");
    Equal("tree_slices", row.tree_slices, slices);
    Equal("group_slots", row.group_slots, slots);
  }

  // Whether the row's segments have room for trees of one size that the backend has.
  bool HasRoomOfTrees(const RowRef& row) const {
    using Sizes = attention::TreeSizes;
    const auto fits = [&](uint32_t leaf, uint32_t group) {
      for (uint32_t s = 0; s < row.segment_count; ++s) {
        const SegmentRef& segment = h_.segments[row.segments_begin + s];
        const uint64_t tokens = segment.tokens - segment.unclustered;
        const uint32_t max_groups = h_.trees[row.trees_begin + s].max_groups;
        if (segment.max_clusters != CeilOf(tokens, leaf) || max_groups != CeilOf(tokens, group)) {
          return false;
        }
      }
      return true;
    };
    for (const uint32_t leaf : Sizes::kLeafTokens) {
      for (const uint32_t fan : Sizes::kFans) {
        if (leaf * fan >= kGroupTokensMin && fits(leaf, leaf * fan)) return true;
      }
    }
    return false;
  }

  // A tree's parts lie in the order of docs/FORMAT.md, apart from one another, in the head's index.
  void Offsets(const SegmentRef& segment, const TreeRef& tree) {
    const uint64_t dim = shape_.head_dim, value_dim = shape_.value_dim;
    uint64_t end = 0;
    const auto part = [&](const char* name, uint64_t at, uint64_t bytes) {
      Equal(name, at, CeilOf(end, 64) * 64);
      end = at + bytes;
    };
    const auto rows = [&](const TreePart& at, uint64_t room) {
      part("centroids", at.centroids, room * dim);
      part("centroid_scales", at.centroid_scales, room * 4);
      part("mean_values", at.mean_values, room * value_dim);
      part("mean_value_scales", at.mean_value_scales, room * 4);
      part("deviation_codes", at.deviation_codes, room * dim / 2);
      part("variance_unit", at.variance_unit, room * 4);
      part("log_size", at.log_size, room * 4);
      part("spread", at.spread, room * 4);
      part("value_norm2", at.value_norm2, room * 4);
      part("starts", at.starts, (room + 1) * 4);
    };
    const TreeOffsets& at = tree.offsets;
    Equal("the number of leaves", at.leaves.count, 0);
    Equal("the number of groups", at.groups.count, 4);
    end = 8;
    rows(at.leaves, segment.max_clusters);
    part("positions", at.positions, uint64_t{segment.tokens} * 2);
    part("axes", at.axes, 2 * dim * dim);
    part("slopes", at.slopes, 2 * dim * value_dim);
    part("key_base", at.key_base, 4 * dim);
    part("value_base", at.value_base, 4 * value_dim);
    rows(at.groups, tree.max_groups);
    part("first_members", at.groups.first_members, (uint64_t{tree.max_groups} + 1) * 4);
    if (end > segment.index_head_bytes) Fail("a tree's parts exceed its index");
  }

  void Cache() {
    if (!wants_cache_) Fail("a page cache that no row wants");
    const PageCacheRef& cache = h_.cache;
    Held("cache.sets", cache.sets, cache.set_count * sizeof(CacheSet));
    Held("cache.frames", cache.frames, uint64_t{cache.set_count} * kCacheWays * cache.page_bytes);
    Held("cache.clock", cache.clock, sizeof(CacheClock));
    const auto frames = reinterpret_cast<uintptr_t>(cache.frames);
    if (frames < reinterpret_cast<uintptr_t>(cache.sets + cache.set_count)) {
      Fail("the cache's sets and frames overlap");
    }
    if (frames % 16 != 0) Fail("frames are not aligned");
    Equal("cache.page_bytes", cache.page_bytes, PageBytes());
  }

  uint64_t PageBytes() const {
    return 16 * uint64_t{shape_.head_dim + shape_.value_dim} * DTypeBytes(shape_.dtype);
  }

  void Files() {
    if (!wants_files_) {
      if (h_.carried != nullptr || h_.missing_count != nullptr) Fail("no row reads files");
      if (h_.estimates_misses != 0) Fail("no row can miss pages");
      return;
    }
    if (h_.cache.set_count == 0) return Fail("files are read without a cache");
    if (h_.missing_max == 0) Fail("no page can be missing");
    Held("carried", h_.carried, sizeof(CarriedPages));
    if (!wrong_.empty()) return;
    Held("the carried pages' list", h_.carried->pages, h_.carried->count * sizeof(CarriedPage));
    for (uint32_t i = 0; i < h_.carried->count && wrong_.empty(); ++i) {
      if (h_.carried->pages[i].frame == kNoFrame) continue;  // it did not come
      Held("a carried page",
           h_.cache.frames + uint64_t{h_.carried->pages[i].frame} * h_.cache.page_bytes,
           h_.cache.page_bytes);
    }
  }

  void CooperativeUnits() {
    uint64_t first = 0;
    for (uint32_t size = 0; size < kCoopSizes; ++size) {
      Equal("coop_counts", h_.coop_counts[size], coop_units_[size].size());
      Held("coop_units", h_.coop_units + first, coop_units_[size].size() * sizeof(CoopUnit));
      for (size_t i = 0; i < coop_units_[size].size() && wrong_.empty(); ++i, ++first) {
        Equal("a cooperative unit's row", h_.coop_units[first].row, coop_units_[size][i].row);
        Equal("a cooperative unit's number", h_.coop_units[first].unit, coop_units_[size][i].unit);
      }
    }
  }

  // A row that looks at no clusters does not say what its segments have; clusters are as large as
  // the largest leaves.
  static bool HasRoomOfClusters(const RowRef& row, const SegmentRef& segment) {
    const uint64_t tokens = segment.tokens - segment.unclustered;
    if (row.kind == UnitKind::kTree) return true;  // HasRoomOfTrees looks at them
    if (row.kind == UnitKind::kClusters) return segment.max_clusters == CeilOf(tokens, 16);
    const auto& sizes = attention::TreeSizes::kLeafTokens;
    return std::any_of(std::begin(sizes), std::end(sizes),
                       [&](uint32_t leaf) { return segment.max_clusters == CeilOf(tokens, leaf); });
  }

  void Segments(const RowRef& row) {
    uint64_t slots = 0, pieces = 0, clustered = 0;
    bool off_device = false;
    Held("segments", h_.segments + row.segments_begin, row.segment_count * sizeof(SegmentRef));
    if (!wrong_.empty()) return;
    for (uint32_t s = 0; s < row.segment_count; ++s) {
      const SegmentRef& segment = h_.segments[row.segments_begin + s];
      Held("a segment's index", segment.index, h_.kv_heads * segment.index_head_bytes);
      const uint64_t pages_bytes = h_.kv_heads * segment.pages_head_bytes;
      Equal("head_pages", segment.head_pages, CeilOf(segment.tokens, 16));
      const uint64_t pages_at = segment.in_file != 0 ? segment.unclustered : segment.tokens;
      Equal("pages_head_bytes", segment.pages_head_bytes, CeilOf(pages_at, 16) * PageBytes());
      if (segment.in_file != 0) {
        if (segment.first_page == 0) Fail("pages in a file have no number");
        off_device = true;
        wants_files_ |= row.kind == UnitKind::kClusters || row.kind == UnitKind::kTree;
        Held("a segment's sink", segment.pages, pages_bytes);
        if (row.kind == UnitKind::kDense) Fail("a dense row reads files");
        if (row.coop_blocks != 0) Fail("a cooperative group reads files");
      } else if (segment.first_page == 0) {
        Held("a segment's pages", segment.pages, pages_bytes);
      } else {
        off_device = true;
        if (!memory_.maps(segment.pages, pages_bytes)) Fail("pages in host memory are not mapped");
      }
      if (segment.tokens <= segment.unclustered) Fail("a segment has no clusters");
      Equal("first_slot", segment.first_slot, slots);
      if (!HasRoomOfClusters(row, segment)) Fail("no clusters are as many as max_clusters");
      Equal("slots", segment.slots, CeilOf(segment.max_clusters, kSlotChunk) * kSlotChunk);
      Equal("first_piece", segment.first_piece, pieces);
      slots += segment.slots;
      pieces += CeilOf(segment.tokens, row.dense_piece_tokens);
      clustered += segment.tokens - segment.unclustered;
    }
    const bool clusters = row.kind == UnitKind::kClusters || row.kind == UnitKind::kTree;
    Equal("slots", row.slots, clusters ? slots : 0);
    Equal("dense_pieces", row.dense_pieces, row.kind == UnitKind::kDense ? pieces : 0);
    Equal("clustered_tokens", row.clustered_tokens, clustered);
    Equal("off_device", row.off_device, off_device ? 1 : 0);
    wants_cache_ |= off_device && clusters && row.coop_blocks == 0;
    if (row.dense_pieces > std::max(std::clamp(256 / h_.kv_heads, 16u, 64u), row.segment_count)) {
      Fail("too many pieces");
    }
  }

  void Tail(const RowRef& row) {
    if (row.tail_begin >= kTailBlock) Fail("tail_begin is not in the first block");
    const uint64_t limit = row.tail_limit + (row.query_tokens - 1) * row.causal;
    const bool empty = limit <= row.tail_begin;
    // Of the whole row, of which this may be a part.
    const uint32_t piece = row.tail_piece_tokens;
    if (piece != kTailPieceTokens && piece != kReadPieceTokens) Fail("pieces of no size");
    if (!empty && row.tail_pieces < CeilOf(limit, piece)) Fail("too few tail pieces");
    const uint64_t blocks = empty ? 0 : CeilOf(limit, kTailBlock);
    Held("blocks", h_.tail_blocks + row.tail_blocks_begin, blocks * sizeof(const std::byte*));
    for (uint64_t b = 0; b < blocks && wrong_.empty(); ++b) {
      Held("a tail block", h_.tail_blocks[row.tail_blocks_begin + b],
           h_.kv_heads * h_.tail_block_head_bytes);
    }
  }

  void Totals() {
    Equal("units", h_.units, units_);
    Equal("tiles", h_.tiles, tiles_);
    Equal("query_tokens", h_.query_tokens, query_tokens_);
    Equal("read_items", h_.read_items, read_items_);
    Equal("score_items", h_.score_items, score_items_);
    Equal("tree_items", h_.tree_items, tree_items_);
    Equal("tree rows by error", h_.tree_rows[0], tree_rows_[0]);
    Equal("tree rows by mass", h_.tree_rows[1], tree_rows_[1]);
    Equal("tree rows by head", h_.tree_rows[2], tree_rows_[2]);
    Equal("estimate_pieces_max", h_.estimate_pieces_max, estimate_pieces_max_);
    Equal("head_dim", h_.head_dim, shape_.head_dim);
    Equal("value_dim", h_.value_dim, shape_.value_dim);
    Equal("measure", measure_ ? 1 : 0, needs_measure_ ? 1 : 0);
    if (h_.cache.set_count > 0) Cache();
    Files();
  }

  void Uploads() {
    Held("upload_refs", h_.upload_refs, h_.uploads * sizeof(UploadRef));
    if (!wrong_.empty()) return;
    for (uint32_t u = 0; u < h_.uploads && wrong_.empty(); ++u) {
      const UploadRef& upload = h_.upload_refs[u];
      const auto to = reinterpret_cast<uintptr_t>(upload.to);
      const auto from = reinterpret_cast<uintptr_t>(h_.upload_data + upload.from);
      if (to % 16 != 0 || from % 16 != 0 || upload.bytes % 16 != 0)
        Fail("an upload is not aligned");
      Held("an upload's target", upload.to, upload.bytes);
      Held("an upload's source", h_.upload_data + upload.from, upload.bytes);
    }
  }

  // Parts that kernels write: device memory, or the host's, aligned, and apart from one another.
  void Regions() {
    const uint64_t lanes = query_tokens_ * h_.kv_heads * h_.group;
    const auto add = [this](const char* name, const void* address, uint64_t bytes) {
      const auto begin = reinterpret_cast<uintptr_t>(address);
      if (bytes > 0 && begin % 256 != 0) Fail(std::string(name) + " is not aligned");
      if (bytes > 0) parts_.push_back({begin, begin + bytes});
    };
    const auto part = [&](const char* name, const void* address, uint64_t bytes) {
      Held(name, address, bytes);
      add(name, address, bytes);
    };
    const auto output = [&](const char* name, const void* address, uint64_t bytes) {
      if (!memory_.pins(address, bytes)) Fail(std::string(name) + " is not pinned memory");
      add(name, address, bytes);
    };
    part("query_fragments", h_.query_fragments,
         tiles_ * TileFragmentWords(shape_.head_dim) * sizeof(uint32_t));
    part("states", h_.states, states_ * kLanes * (kStateHead + shape_.value_dim) * sizeof(float));
    part("scores", h_.scores, scores_ * sizeof(float));
    part("fates", h_.fates, fates_);
    part("chosen", h_.chosen, chosen_ * sizeof(uint32_t));
    part("score_partials", h_.score_partials,
         score_items_ * h_.tiles_max * kLanes * 4 * sizeof(float));
    part("lane_scales", h_.lane_scales, tiles_ * kLanes * sizeof(LaneScale));
    part("unit_results", h_.unit_results, units_ * sizeof(UnitResult));
    part("chunks", h_.chunks, score_items_ * sizeof(ChunkRef));
    part("chosen_pieces", h_.chosen_pieces, chosen_pieces_ * sizeof(ChosenPiece));
    part("cursors", h_.cursors, kCursors * sizeof(uint32_t));
    part("tree_words", h_.tree_words, tree_words_ * sizeof(uint32_t));
    part("tree_places", h_.tree_places, tree_items_ * 240);
    part("tree_queries", h_.tree_queries,
         tree_items_ * kLanes * (5 * shape_.head_dim / 2 + 3) * sizeof(float));
    part("tree_states", h_.tree_states,
         tree_items_ * kLanes * (kStateHead + 2 * shape_.value_dim) * sizeof(float));
    part("tree_partials", h_.tree_partials, tree_items_ * kLanes * kStateHead * sizeof(float));
    part("missing", h_.missing, h_.missing_max * sizeof(uint64_t));
    part("missing_count", h_.missing_count, wants_files_ ? sizeof(uint32_t) : 0);
    Held("answer", h_.answer, sizeof(AnswerPlaces));
    if (h_.answer->taken == 0) {  // else it is a client's memory
      output("out", h_.answer->out,
             lanes * shape_.value_dim * DTypeBytes(static_cast<DType>(h_.out_dtype)));
      if (h_.answer->turn != nullptr || h_.answer->lse != nullptr) Fail("a client is told");
    }
    output("lse", h_.lse, lanes * sizeof(float));
    output("lane_results", h_.lane_results, lanes * sizeof(LaneResult));
    output("last_results", h_.last_results, units_ * sizeof(UnitResult));
    if (!memory_.pins(h_.signal.answered, sizeof(uint32_t))) Fail("answered is not pinned memory");
    Held("the count of blocks", h_.signal.blocks, sizeof(uint32_t));
    uint64_t coop_units = 0, coop_blocks = 0;
    for (size_t size = 0; size < kCoopSizes; ++size) {
      coop_units += coop_units_[size].size();
      coop_blocks += coop_units_[size].size() * kCoopBlocks[size];
    }
    Equal("answer_blocks", h_.answer_blocks,
          coop_blocks + (coop_units < units_ ? units_ * h_.group : 0));
    Held("queries", h_.queries,
         lanes * shape_.head_dim * DTypeBytes(static_cast<DType>(h_.query_dtype)));
    std::sort(parts_.begin(), parts_.end());
    for (size_t i = 1; i < parts_.size(); ++i) {
      if (parts_[i].first < parts_[i - 1].second) Fail("parts of scratch memory overlap");
    }
  }

  const KernelShape& shape_;
  const StepHeader& h_;
  const bool measure_;
  const MemoryCheck& memory_;
  std::string wrong_;
  uint64_t units_ = 0, tiles_ = 0, query_tokens_ = 0, read_items_ = 0, score_items_ = 0;
  uint64_t states_ = 0, scores_ = 0, fates_ = 0, chosen_ = 0, chosen_pieces_ = 0;
  uint64_t trees_ = 0, tree_items_ = 0, tree_words_ = 0;
  uint32_t estimate_pieces_max_ = 0;
  uint32_t tree_rows_[kTreeChoices] = {};
  bool needs_measure_ = false;
  bool wants_cache_ = false;  // a row's chosen tokens may lie off the device
  bool wants_files_ = false;  // in files
  std::array<std::vector<CoopUnit>, kCoopSizes> coop_units_;
  std::vector<std::pair<uintptr_t, uintptr_t>> parts_;
};

}  // namespace

std::string CheckStep(const KernelShape& shape, const StepHeader& header, bool measure,
                      const MemoryCheck& memory) {
  return Checker(shape, header, measure, memory).Run();
}

}  // namespace attnd::gpu::test
