// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/wave_memory.h"

#include <algorithm>
#include <limits>

#include "attention/segment/pages.h"
#include "gpu/layout/tree_layout.h"
#include "gpu/step/row_plan.h"

namespace attnd::gpu {
namespace {

constexpr uint64_t kPartAlignment = 256;
constexpr uint64_t kInputStepBytes = 4096;
constexpr uint64_t kOverflow = std::numeric_limits<uint64_t>::max();

// Sums and products that stay at kOverflow once they reach it.
uint64_t Plus(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? kOverflow : sum;
}
uint64_t Times(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? kOverflow : product;
}

// Places parts one after another.
class Placer {
 public:
  uint64_t Place(uint64_t count, uint64_t element_bytes) {
    const uint64_t offset = end_;
    const uint64_t end = Plus(Plus(end_, Times(count, element_bytes)), kPartAlignment - 1);
    end_ = end == kOverflow ? kOverflow : end / kPartAlignment * kPartAlignment;
    return offset;
  }
  uint64_t end() const { return end_; }

 private:
  uint64_t end_ = 0;
};

void PlaceInput(const WaveCounts& counts, const WaveShape& shape, WavePlaces* places) {
  Placer input;
  input.Place(1, sizeof(StepHeader));
  places->answer_blocks = input.Place(1, sizeof(uint32_t));
  places->answer = input.Place(1, sizeof(AnswerPlaces));
  places->cache_clock = input.Place(1, sizeof(CacheClock));
  places->carried = input.Place(shape.reads_files ? 1 : 0, sizeof(CarriedPages));
  places->rows = input.Place(counts.rows, sizeof(RowRef));
  places->segments = input.Place(counts.segments, sizeof(SegmentRef));
  places->trees = input.Place(counts.trees, sizeof(TreeRef));
  places->upload_refs = input.Place(counts.uploads, sizeof(UploadRef));
  places->coop_units = input.Place(counts.coop_units, sizeof(CoopUnit));
  places->queries = input.Place(Times(counts.query_tokens, shape.query_heads()),
                                shape.kernel.head_dim * DTypeBytes(shape.query_dtype));
  places->upload_data = input.Place(counts.upload_bytes, 1);
  // Last, and all rounded up: a row that grows by a tail block then changes no address of its next
  // steps, which one graph launches.
  places->tail_blocks = input.Place(counts.tail_blocks, sizeof(const std::byte*));
  places->input_bytes = Plus(input.end(), kInputStepBytes - 1) / kInputStepBytes * kInputStepBytes;
}

void PlaceScratch(const WaveCounts& counts, const WaveShape& shape, WavePlaces* places) {
  const uint64_t tiles_per_unit = (shape.group + kLanes - 1) / kLanes;
  Placer scratch;
  places->query_fragments =
      scratch.Place(counts.tiles, TileFragmentWords(shape.kernel.head_dim) * sizeof(uint32_t));
  places->states =
      scratch.Place(counts.states, sizeof(float) * StateFloats(shape.kernel.value_dim));
  places->scores = scratch.Place(counts.scores, sizeof(float));
  places->chosen = scratch.Place(counts.chosen, sizeof(uint32_t));
  places->score_partials =
      scratch.Place(Times(counts.score_items, tiles_per_unit), sizeof(float) * kLanes * 4);
  places->lane_scales = scratch.Place(counts.tiles, kLanes * sizeof(LaneScale));
  places->chunks = scratch.Place(counts.score_items, sizeof(ChunkRef));
  places->chosen_pieces = scratch.Place(counts.chosen_pieces, sizeof(ChosenPiece));
  places->cursors = scratch.Place(kCursors, sizeof(uint32_t));
  places->tree_words = scratch.Place(counts.tree_words, sizeof(uint32_t));
  places->tree_places = scratch.Place(counts.tree_items, kTreePlaceBytes);
  places->tree_queries =
      scratch.Place(counts.tree_items, sizeof(float) * TreeQueryWords(shape.kernel.head_dim));
  places->tree_states =
      scratch.Place(counts.tree_items, sizeof(float) * TreeStateFloats(shape.kernel.value_dim));
  places->tree_partials = scratch.Place(counts.tree_items, sizeof(float) * kLanes * kStateHead);
  places->missing = scratch.Place(MissingMax(counts), sizeof(uint64_t));
  places->unit_results = scratch.Place(counts.units, sizeof(UnitResult));
  places->copied = scratch.end();
  scratch.Place(shape.reads_files ? 1 : 0, sizeof(uint32_t));
  scratch.Place(counts.fates, 1);
  places->scratch_bytes = scratch.end();
}

}  // namespace

void WaveCounts::Add(const WaveCounts& other) {
  constexpr uint64_t WaveCounts::*kFields[] = {
      &WaveCounts::rows,         &WaveCounts::units,         &WaveCounts::tiles,
      &WaveCounts::read_items,   &WaveCounts::score_items,   &WaveCounts::query_tokens,
      &WaveCounts::states,       &WaveCounts::scores,        &WaveCounts::fates,
      &WaveCounts::chosen,       &WaveCounts::chosen_pieces, &WaveCounts::coop_units,
      &WaveCounts::segments,     &WaveCounts::tail_blocks,   &WaveCounts::uploads,
      &WaveCounts::upload_bytes, &WaveCounts::trees,         &WaveCounts::tree_items,
      &WaveCounts::tree_words,   &WaveCounts::file_pages};
  static_assert(sizeof(kFields) / sizeof(kFields[0]) * sizeof(uint64_t) == sizeof(WaveCounts));
  for (const auto field : kFields) this->*field = Plus(this->*field, other.*field);
}

bool WaveCounts::FitHeader() const {
  constexpr uint64_t kNumberMax = std::numeric_limits<uint32_t>::max();
  for (const uint64_t number :
       {rows, units, tiles, read_items, score_items, query_tokens, states, chosen_pieces,
        coop_units, segments, tail_blocks, uploads, trees, tree_items}) {
    if (number > kNumberMax) return false;
  }
  return true;
}

WaveCounts CountsOf(const RowDescription& row, const RowRef& ref, std::span<const Upload> uploads) {
  const bool tree = ref.kind == UnitKind::kTree;
  const bool cooperative = ref.coop_blocks != 0;
  WaveCounts counts;
  counts.rows = 1;
  counts.query_tokens = ref.query_tokens;
  counts.units = UnitsOf(row, ref.query_tokens);
  counts.tiles = Times(counts.units, ref.tiles_per_unit);
  counts.coop_units = cooperative ? counts.units : 0;
  counts.read_items = cooperative ? 0 : Times(counts.tiles, ref.read_pieces);
  counts.states = Times(counts.tiles, StatesPerTile(ref));
  if (ReadsClusters(ref)) {
    counts.score_items = cooperative || tree ? 0 : Times(counts.units, ref.slots / kSlotChunk);
    counts.scores = Times(counts.units, ScoresPerUnit(ref, row.shape.group));
    counts.fates = Times(counts.units, FatesPerUnit(ref));
    counts.chosen = Times(counts.units, ref.clustered_tokens);
    counts.chosen_pieces = cooperative ? 0 : Times(counts.tiles, kChosenPiecesMax);
  }
  if (tree) {
    counts.trees = ref.segment_count;
    counts.tree_items = Times(counts.tiles, ref.tree_slices);
    counts.tree_words = Times(counts.units, TreeWordsPerUnit(ref));
  }
  counts.segments = ref.segment_count;
  for (const SegmentDescription& segment : row.segments) {
    if (!segment.in_file || !row.shape.reads_files) continue;
    const uint64_t pages = attention::PageGeometry::PagesFor(segment.tokens);
    counts.file_pages = Plus(counts.file_pages, Times(pages, row.shape.kv_heads));
  }
  counts.tail_blocks = TailBlocksSeen(row);
  counts.uploads = uploads.size();
  for (const Upload& upload : uploads) {
    counts.upload_bytes = Plus(counts.upload_bytes, upload.bytes);
  }
  return counts;
}

uint32_t MissingMax(const WaveCounts& counts) {
  return static_cast<uint32_t>(std::min<uint64_t>(counts.file_pages, kMissingPagesMax));
}

WavePlaces PlacesOf(const WaveCounts& counts, const WaveShape& shape, bool with_fates) {
  WavePlaces places{};
  PlaceInput(counts, shape, &places);
  PlaceScratch(counts, shape, &places);
  const uint64_t lanes = Times(counts.query_tokens, shape.query_heads());
  Placer results;
  places.result.out = results.Place(lanes, shape.kernel.value_dim * DTypeBytes(shape.out_dtype));
  places.result.lse = results.Place(lanes, sizeof(float));
  places.result.lane_results = results.Place(lanes, sizeof(LaneResult));
  places.result.unit_results = results.Place(counts.units, sizeof(UnitResult));
  places.result.copied = results.end();
  places.result.missing_count = results.Place(shape.reads_files ? 1 : 0, sizeof(uint32_t));
  places.result.fates = results.end();
  if (with_fates) results.Place(counts.fates, 1);
  places.result.bytes = results.end();
  places.result.missing = places.result.bytes;
  places.result.missing_bytes = MissingMax(counts) * sizeof(uint64_t);
  return places;
}

}  // namespace attnd::gpu
