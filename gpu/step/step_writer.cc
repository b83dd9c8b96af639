// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/step_writer.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "attention/segment/pages.h"
#include "attention/segment/segment.h"
#include "gpu/layout/index_offsets.h"

namespace attnd::gpu {
namespace {

using attention::IndexLayout;
using attention::kTailBlockTokens;
using attention::Policy;
using attention::Segment;
using attention::Selector;
using attention::StepRow;

constexpr uint64_t kPartAlignment = 256;
constexpr uint64_t kInputStepBytes = 4096;
constexpr uint64_t kOverflow = std::numeric_limits<uint64_t>::max();
// Entries of `chosen` have 16 bits for the segment's number.
constexpr size_t kSegmentsMax = 65536;

// Sums and products that stay at kOverflow once they reach it.
uint64_t Plus(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? kOverflow : sum;
}
uint64_t Times(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? kOverflow : product;
}
constexpr uint64_t CeilOf(uint64_t n, uint64_t divisor) { return (n + divisor - 1) / divisor; }

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

// The least `unit` times a power of two for which `pieces` gives at most `max`, but no more than
// `largest`.
template <typename F>
uint64_t PieceSize(uint64_t unit, uint64_t largest, uint64_t max, const F& pieces) {
  while (unit < largest && pieces(unit) > max) unit *= 2;
  return unit;
}

uint64_t DensePieces(const StepRow& row, uint64_t piece_tokens) {
  uint64_t pieces = 0;
  for (const auto& segment : row.view->segments) pieces += CeilOf(segment->tokens(), piece_tokens);
  return pieces;
}

// How many tail tokens, counted from the first block's start, a query token sees.
uint64_t TailLimit(const StepRow& row, uint64_t query_token) {
  const uint64_t base = row.view->tail_begin / kTailBlockTokens * kTailBlockTokens;
  return row.past_tokens - base + (row.query_only ? 0 : query_token + 1);
}

CutKind CutOf(const Policy& policy) {
  switch (policy.cut) {
    case attention::Cut::kTopK:
      return CutKind::kTopK;
    case attention::Cut::kTopP:
      return CutKind::kTopP;
    case attention::Cut::kErrorBudget:
      return CutKind::kErrorBudget;
  }
  return CutKind::kTopK;
}

template <typename T>
T* At(std::byte* base, uint64_t offset) {
  static_assert(std::is_trivially_copyable_v<T>);
  return reinterpret_cast<T*>(base + offset);
}

uint32_t Narrow(uint64_t value) { return static_cast<uint32_t>(value); }  // Fits() has checked it

}  // namespace

UnitKind KindOf(const StepRow& row, uint32_t layer) {
  const Policy& policy = *row.policy;
  if (policy.DenseIn(layer)) return UnitKind::kDense;
  if (policy.selector == Selector::kNone) return UnitKind::kStreaming;
  // Clusters: CudaBackend::Supports lets no others in.
  if (policy.cut == attention::Cut::kErrorBudget && policy.tolerance == 0) return UnitKind::kDense;
  return row.view->segments.empty() ? UnitKind::kStreaming : UnitKind::kClusters;
}

std::vector<const Segment*> SegmentsRead(const StepRow& row, UnitKind kind) {
  std::vector<const Segment*> segments;
  for (const auto& segment : row.view->segments) {
    if (kind != UnitKind::kStreaming || segment->unclustered() > 0) {
      segments.push_back(segment.get());
    }
  }
  return segments;
}

uint64_t TailBlocksSeen(const StepRow& row) {
  const uint64_t limit = TailLimit(row, row.query_tokens - 1);
  return limit > row.view->tail_begin % kTailBlockTokens ? CeilOf(limit, kTailBlockTokens) : 0;
}

bool SameWave(const StepRow& a, const StepRow& b) {
  const ModelShape& x = a.view->shape;
  const ModelShape& y = b.view->shape;
  return KernelShapeOf(x) == KernelShapeOf(y) && x.kv_heads == y.kv_heads &&
         x.query_heads == y.query_heads && x.softmax_scale == y.softmax_scale &&
         a.query_dtype == b.query_dtype;
}

void StepWriter::Counts::Add(const Counts& other) {
  constexpr uint64_t Counts::*kFields[] = {
      &Counts::rows,        &Counts::units,        &Counts::tiles,         &Counts::read_items,
      &Counts::score_items, &Counts::query_tokens, &Counts::states,        &Counts::scores,
      &Counts::fates,       &Counts::chosen,       &Counts::chosen_pieces, &Counts::coop_units,
      &Counts::segments,    &Counts::blocks,       &Counts::uploads,       &Counts::upload_bytes};
  static_assert(sizeof(kFields) / sizeof(kFields[0]) * sizeof(uint64_t) == sizeof(Counts));
  for (const auto field : kFields) this->*field = Plus(this->*field, other.*field);
}

void StepWriter::Begin(const StepRow& row, uint32_t layer, bool with_fates) {
  const ModelShape& shape = row.view->shape;
  shape_ = KernelShapeOf(shape);
  kv_heads_ = shape.kv_heads;
  group_ = shape.group();
  // Dense units take as many query tokens as one tile holds, so that all units have as many tiles.
  tiles_per_unit_ = Narrow(CeilOf(group_, kLanes));
  query_dtype_ = row.query_dtype;
  layer_ = layer;
  softmax_scale_ = shape.softmax_scale;
  with_fates_ = with_fates;
  counts_ = Counts();
  parts_.clear();
  memories_.clear();
  uploads_.clear();
  measure_ = false;
}

uint32_t StepWriter::TokensPerUnit(UnitKind kind) const {
  return kind == UnitKind::kClusters ? 1 : std::max(1u, kLanes / group_);
}

RowRef StepWriter::Describe(const StepRow& row, uint32_t first_token, uint32_t tokens) const {
  const Policy& policy = *row.policy;
  RowRef ref{};
  ref.kind = KindOf(row, layer_);
  const bool clusters = ref.kind == UnitKind::kClusters;
  ref.cut = CutOf(policy);
  ref.second_order = clusters && policy.estimator == attention::Estimator::kSecondOrder ? 1 : 0;
  ref.query_tokens = tokens;
  ref.tokens_per_unit = TokensPerUnit(ref.kind);
  ref.tiles_per_unit = tiles_per_unit_;
  ref.tail_begin = Narrow(row.view->tail_begin % kTailBlockTokens);
  ref.tail_limit = Narrow(TailLimit(row, first_token));
  ref.causal = row.query_only ? 0 : 1;

  for (const Segment* segment : SegmentsRead(row, ref.kind)) {
    ++ref.segment_count;
    ref.clustered_tokens += segment->clustered();
    if (clusters) ref.slots += SlotsFor(segment->layout().max_clusters);
  }
  // By the row's own last token, though this part may end before it: how a row is divided, and so
  // its answer's bits, must not depend on what else is in the wave.
  const uint64_t tail_end = TailLimit(row, row.query_tokens - 1);
  ref.tail_pieces = tail_end > ref.tail_begin ? Narrow(CeilOf(tail_end, kReadPieceTokens)) : 0;
  ref.dense_piece_tokens =
      Narrow(PieceSize(kReadPieceTokens, attention::kSegmentTokensMax, kReadPiecesMax,
                       [&](uint64_t piece_tokens) { return DensePieces(row, piece_tokens); }));
  const bool dense = ref.kind == UnitKind::kDense;
  ref.dense_pieces = dense ? Narrow(DensePieces(row, ref.dense_piece_tokens)) : 0;
  ref.read_pieces = dense ? ref.dense_pieces + ref.tail_pieces : ref.tail_pieces + 1;
  if (clusters) {
    ref.estimate_piece_slots =
        Narrow(PieceSize(kEstimatePieceSlots, uint64_t{1} << 31, kEstimatePiecesMax,
                         [&](uint64_t slots) { return CeilOf(ref.slots, slots); }));
    ref.estimate_pieces = Narrow(CeilOf(ref.slots, ref.estimate_piece_slots));
  }
  ref.exact_share = policy.exact_share;
  ref.estimated_share = policy.estimated_share;
  ref.p1 = policy.p1;
  ref.p2 = policy.p2;
  ref.tolerance = policy.tolerance;
  ref.floor = policy.floor;
  if (teams_) ref.coop_blocks = CoopBlocksFor(ref, group_, shape_.value_dim, tail_end);
  if (ref.coop_blocks != 0) ref.read_pieces = ref.estimate_pieces = ref.coop_blocks;
  return ref;
}

StepWriter::Counts StepWriter::CountsOf(const RowRef& ref, const StepRow& row,
                                        std::span<const Upload> uploads) const {
  const bool clusters = ref.kind == UnitKind::kClusters;
  Counts counts;
  counts.rows = 1;
  counts.query_tokens = ref.query_tokens;
  counts.units = Times(CeilOf(ref.query_tokens, ref.tokens_per_unit), kv_heads_);
  counts.tiles = Times(counts.units, ref.tiles_per_unit);
  const bool team = ref.coop_blocks != 0;
  counts.coop_units = team ? counts.units : 0;
  counts.read_items = team ? 0 : Times(counts.tiles, ref.read_pieces);
  counts.states = Times(counts.tiles, StatesPerTile(ref));
  if (clusters) {
    counts.score_items = team ? 0 : Times(counts.units, ref.slots / kSlotChunk);
    counts.scores = Times(counts.units, ScoresPerUnit(ref, group_));
    counts.fates = Times(counts.units, ref.slots);
    counts.chosen = Times(counts.units, ref.clustered_tokens);
    counts.chosen_pieces = team ? 0 : Times(counts.tiles, kChosenPiecesMax);
  }
  counts.segments = ref.segment_count;
  counts.blocks = TailBlocksSeen(row);
  counts.uploads = uploads.size();
  for (const Upload& upload : uploads) {
    counts.upload_bytes = Plus(counts.upload_bytes, upload.bytes);
  }
  return counts;
}

StepWriter::Places StepWriter::PlacesOf(const Counts& counts) const {
  const uint64_t query_heads = uint64_t{kv_heads_} * group_;
  Places places{};
  Placer input;
  input.Place(1, sizeof(StepHeader));
  places.rows = input.Place(counts.rows, sizeof(RowRef));
  places.segments = input.Place(counts.segments, sizeof(SegmentRef));
  places.upload_refs = input.Place(counts.uploads, sizeof(UploadRef));
  places.coop_units = input.Place(counts.coop_units, sizeof(CoopUnit));
  places.queries = input.Place(Times(counts.query_tokens, query_heads),
                               shape_.head_dim * DTypeBytes(query_dtype_));
  places.staged = input.Place(counts.upload_bytes, 1);
  // Last, and all rounded up: a row that grows by a block then changes no address of its next
  // steps, which one graph launches.
  places.blocks = input.Place(counts.blocks, sizeof(const std::byte*));
  places.input_bytes = Plus(input.end(), kInputStepBytes - 1) / kInputStepBytes * kInputStepBytes;

  Placer scratch;
  places.query_fragments = scratch.Place(counts.tiles, QueryFragmentBytes(shape_));
  places.states = scratch.Place(counts.states, sizeof(float) * StateFloats(shape_.value_dim));
  places.scores = scratch.Place(counts.scores, sizeof(float));
  places.chosen = scratch.Place(counts.chosen, sizeof(uint32_t));
  places.score_partials =
      scratch.Place(Times(counts.score_items, tiles_per_unit_), sizeof(float) * kLanes * 4);
  places.lane_scales = scratch.Place(counts.tiles, kLanes * sizeof(LaneScale));
  places.chunks = scratch.Place(counts.score_items, sizeof(ChunkRef));
  places.chosen_pieces = scratch.Place(counts.chosen_pieces, sizeof(ChosenPiece));
  places.cursors = scratch.Place(kCursors, sizeof(uint32_t));
  places.results = scratch.end();

  const uint64_t lanes = Times(counts.query_tokens, query_heads);
  Placer results;
  places.result.out = results.Place(lanes, shape_.value_dim * sizeof(float));
  places.result.lse = results.Place(lanes, sizeof(float));
  places.result.lane_results = results.Place(lanes, sizeof(LaneResult));
  places.result.unit_results = results.Place(counts.units, sizeof(UnitResult));
  places.result.fates = results.end();
  if (with_fates_) results.Place(counts.fates, 1);
  places.result.bytes = results.end();
  if (!with_fates_) results.Place(counts.fates, 1);
  places.scratch_bytes = Plus(places.results, results.end());
  return places;
}

bool StepWriter::Fits(const Counts& counts) const {
  constexpr uint64_t kNumberMax = std::numeric_limits<uint32_t>::max();
  for (const uint64_t number :
       {counts.rows, counts.units, counts.tiles, counts.read_items, counts.score_items,
        counts.query_tokens, counts.states, counts.chosen_pieces, counts.coop_units,
        counts.segments, counts.blocks, counts.uploads}) {
    if (number > kNumberMax) return false;
  }
  const Places places = PlacesOf(counts);
  return places.input_bytes <= room_.input_bytes && places.scratch_bytes <= room_.scratch_bytes &&
         places.result.bytes <= room_.result_bytes;
}

uint32_t StepWriter::Fitting(const StepRow& row, uint32_t first_token,
                             std::span<const Upload> uploads) const {
  // Numbers of the row itself that its reference must be able to hold, and selection to count.
  if (row.view->segments.size() > kSegmentsMax || row.view->tail_begin > kUnitTokensMax ||
      TailLimit(row, row.query_tokens - 1) > std::numeric_limits<uint32_t>::max()) {
    return 0;
  }
  const uint32_t unit = TokensPerUnit(KindOf(row, layer_));
  const uint32_t rest = row.query_tokens - first_token;
  const auto fits = [&](uint64_t units) {
    const uint32_t tokens = Narrow(std::min<uint64_t>(rest, units * unit));
    Counts counts = counts_;
    counts.Add(CountsOf(Describe(row, first_token, tokens), row, uploads));
    return Fits(counts);
  };
  uint64_t most = CeilOf(rest, unit);
  if (fits(most)) return rest;
  uint64_t least = 0;  // fits; `most` does not
  while (most - least > 1) {
    const uint64_t middle = least + (most - least) / 2;
    (fits(middle) ? least : most) = middle;
  }
  return Narrow(least * unit);
}

void StepWriter::Add(const StepRow& row, uint32_t number, uint32_t first_token, uint32_t tokens,
                     RowMemory memory, std::span<const Upload> uploads) {
  RowPart& part = parts_.emplace_back();
  part.row = &row;
  part.number = number;
  part.first_token = first_token;
  part.tokens = tokens;
  RowRef& ref = part.ref = Describe(row, first_token, tokens);
  ref.first_unit = Narrow(counts_.units);
  ref.first_query_token = Narrow(counts_.query_tokens);
  ref.segments_begin = Narrow(counts_.segments);
  ref.tail_blocks_begin = Narrow(counts_.blocks);
  ref.first_read_item = Narrow(counts_.read_items);
  ref.first_score_item = Narrow(counts_.score_items);
  ref.first_state = Narrow(counts_.states);
  ref.first_score = counts_.scores;
  ref.first_fate = counts_.fates;
  ref.first_token = counts_.chosen;
  measure_ |= HasTolerance(ref);
  counts_.Add(CountsOf(ref, row, uploads));
  memories_.push_back(std::move(memory));
  uploads_.insert(uploads_.end(), uploads.begin(), uploads.end());
}

uint64_t StepWriter::Write(std::byte* input, std::byte* device_input, std::byte* device_scratch) {
  const Places places = PlacesOf(counts_);
  results_ = places.result;
  device_results_ = device_scratch + places.results;
  std::byte* const results = device_scratch + places.results;
  StepHeader& h = header_ = StepHeader{};
  h.rows = Narrow(counts_.rows);
  h.units = Narrow(counts_.units);
  h.read_items = Narrow(counts_.read_items);
  h.score_items = Narrow(counts_.score_items);
  h.uploads = Narrow(counts_.uploads);
  h.query_tokens = Narrow(counts_.query_tokens);
  h.kv_heads = kv_heads_;
  h.head_dim = shape_.head_dim;
  h.value_dim = shape_.value_dim;
  h.group = group_;
  h.tiles = Narrow(counts_.tiles);
  h.tiles_max = tiles_per_unit_;
  for (const RowPart& part : parts_) {
    if (part.ref.coop_blocks != 0) continue;
    h.estimate_pieces_max = std::max(h.estimate_pieces_max, part.ref.estimate_pieces);
  }
  h.query_dtype = static_cast<uint32_t>(query_dtype_);
  h.softmax_scale = softmax_scale_;
  h.tail_block_head_bytes =
      uint64_t{kTailBlockTokens} * (shape_.head_dim + shape_.value_dim) * DTypeBytes(shape_.dtype);
  h.row_refs = At<RowRef>(device_input, places.rows);
  h.segments = At<SegmentRef>(device_input, places.segments);
  h.tail_blocks = At<const std::byte*>(device_input, places.blocks);
  h.upload_refs = At<UploadRef>(device_input, places.upload_refs);
  h.coop_units = At<CoopUnit>(device_input, places.coop_units);
  h.upload_data = device_input + places.staged;
  h.queries = device_input + places.queries;
  h.query_fragments = At<uint32_t>(device_scratch, places.query_fragments);
  h.states = At<float>(device_scratch, places.states);
  h.scores = At<float>(device_scratch, places.scores);
  h.fates = At<uint8_t>(results, places.result.fates);
  h.chosen = At<uint32_t>(device_scratch, places.chosen);
  h.score_partials = At<float>(device_scratch, places.score_partials);
  h.lane_scales = At<LaneScale>(device_scratch, places.lane_scales);
  h.unit_results = At<UnitResult>(results, places.result.unit_results);
  h.chunks = At<ChunkRef>(device_scratch, places.chunks);
  h.chosen_pieces = At<ChosenPiece>(device_scratch, places.chosen_pieces);
  h.cursors = At<uint32_t>(device_scratch, places.cursors);
  h.out = At<float>(results, places.result.out);
  h.lse = At<float>(results, places.result.lse);
  h.lane_results = At<LaneResult>(results, places.result.lane_results);

  WriteCoopUnits(At<CoopUnit>(input, places.coop_units));
  std::memcpy(input, &h, sizeof(h));
  for (size_t i = 0; i < parts_.size(); ++i) {
    At<RowRef>(input, places.rows)[i] = parts_[i].ref;
    WriteRow(parts_[i], memories_[i], places, input);
  }
  WriteUploads(places, input);
  return places.input_bytes;
}

// The part's segments, blocks and queries.
void StepWriter::WriteRow(const RowPart& part, const RowMemory& memory, const Places& places,
                          std::byte* input) const {
  const StepRow& row = *part.row;
  SegmentRef* ref = At<SegmentRef>(input, places.segments) + part.ref.segments_begin;
  uint32_t slots = 0, pieces = 0;
  const std::vector<const Segment*> segments = SegmentsRead(row, part.ref.kind);
  for (size_t s = 0; s < segments.size(); ++s, ++ref) {
    const Segment& segment = *segments[s];
    const IndexLayout& layout = segment.layout();
    *ref = SegmentRef{};
    ref->index = memory.segments[s].index;
    ref->pages = memory.segments[s].pages;
    ref->index_head_bytes = layout.head_bytes;
    ref->pages_head_bytes = segment.pages_head_bytes();
    ref->offsets = OffsetsOf(layout);
    ref->tokens = segment.tokens();
    ref->unclustered = segment.unclustered();
    ref->first_slot = slots;
    ref->slots = SlotsFor(layout.max_clusters);
    ref->first_piece = pieces;
    ref->max_clusters = layout.max_clusters;
    slots += ref->slots;
    pieces += Narrow(CeilOf(segment.tokens(), part.ref.dense_piece_tokens));
  }
  std::copy(memory.blocks.begin(), memory.blocks.end(),
            At<const std::byte*>(input, places.blocks) + part.ref.tail_blocks_begin);
  const uint64_t token_bytes =
      uint64_t{kv_heads_} * group_ * shape_.head_dim * DTypeBytes(query_dtype_);
  std::memcpy(input + places.queries + part.ref.first_query_token * token_bytes,
              row.queries + part.first_token * token_bytes, part.tokens * token_bytes);
}

void StepWriter::WriteCoopUnits(CoopUnit* units) {
  for (uint32_t size = 0; size < kCoopSizes; ++size) {
    for (uint32_t row = 0; row < parts_.size(); ++row) {
      const RowRef& ref = parts_[row].ref;
      if (ref.coop_blocks != kCoopBlocks[size]) continue;
      const uint32_t count = ref.query_tokens * kv_heads_;  // as tokens_per_unit is 1
      for (uint32_t unit = 0; unit < count; ++unit) *units++ = {row, unit};
      header_.coop_counts[size] += count;
    }
  }
}

void StepWriter::WriteUploads(const Places& places, std::byte* input) const {
  UploadRef* ref = At<UploadRef>(input, places.upload_refs);
  uint64_t from = 0;
  for (const Upload& upload : uploads_) {
    *ref++ = {upload.to, from, upload.bytes};
    std::memcpy(input + places.staged + from, upload.from, upload.bytes);
    from += upload.bytes;
  }
}

}  // namespace attnd::gpu
