// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/step_writer.h"

#include <glog/logging.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#include "attention/segment/pages.h"
#include "gpu/step/narrow.h"
#include "gpu/step/row_plan.h"

namespace attnd::gpu {
namespace {

template <typename T>
T* At(std::byte* base, uint64_t offset) {
  static_assert(std::is_trivially_copyable_v<T>);
  return reinterpret_cast<T*>(base + offset);
}

// Bytes of one query token.
uint64_t QueryBytes(const WaveShape& shape) {
  return uint64_t{shape.query_heads()} * shape.kernel.head_dim * DTypeBytes(shape.query_dtype);
}

// Number of the first tail token that a row appends: of a causal row the last one that its first
// query token sees.
uint64_t FirstAppended(const RowDescription& row) {
  return row.causal ? row.tail_limit - 1 : row.tail_end();
}

// Where the turn's twin has what is at `place` of its memory.
template <typename T>
T* InTwin(const attention::ClientTurn& turn, T* place) {
  return reinterpret_cast<T*>(turn.memory_twin +
                              (reinterpret_cast<const std::byte*>(place) - turn.memory));
}

// The lowest address of any row's tokens.
const std::byte* FirstOf(std::span<const attention::RowTokens> rows) {
  const std::byte* first = rows.front().queries;
  for (const attention::RowTokens& row : rows) {
    for (const std::byte* tensor : {row.queries, row.keys, row.values}) {
      if (tensor != nullptr) first = std::min(first, tensor, std::less<>());
    }
  }
  return first;
}

// Calls put(to, from, bytes) for an upload's rows, which lie in the tensors that bring the row's
// tokens.
template <typename Put>
void ForAppended(const RowDescription& row, const attention::RowTokens& tokens,
                 const Upload& upload, uint64_t to, Put put) {
  const bool keys = upload.rows == Upload::Rows::kKeys;
  const KernelShape& kernel = row.shape.kernel;
  const uint64_t row_bytes =
      uint64_t{keys ? kernel.head_dim : kernel.value_dim} * DTypeBytes(kernel.dtype);
  const uint64_t first = upload.first_token - FirstAppended(row);
  const std::byte* from = (keys ? tokens.keys : tokens.values) +
                          (first * row.shape.kv_heads + upload.kv_head) * row_bytes;
  for (uint64_t at = 0; at < upload.bytes; at += row_bytes) {
    put(to + at, from, row_bytes);
    from += row.shape.kv_heads * row_bytes;
  }
}

}  // namespace

void StepWriter::Begin(const WaveShape& shape, bool with_fates) {
  CHECK_GE(shape.group, 1u);
  CHECK_LE(shape.group, kKernelGroupMax);
  static_assert(kKernelGroupMax <= kTreeLanesMax);
  shape_ = shape;
  with_fates_ = with_fates;
  counts_ = WaveCounts();
  parts_.clear();
  memories_.clear();
  measure_ = false;
  off_device_ = false;
  cache_ = {};
  carried_ = {};
}

std::optional<PlannedPart> StepWriter::Plan(const RowDescription& row, uint32_t number,
                                            uint32_t first_token,
                                            std::span<const Upload> uploads) const {
  CHECK(row.shape == shape_) << "a row of another wave";
  CHECK_LT(first_token, row.query_tokens);
  if (!HasPlan(row)) return std::nullopt;
  const uint32_t unit = TokensPerUnit(row);
  const uint32_t rest = row.query_tokens - first_token;
  const bool cooperative = cooperative_groups_ && !shape_.reads_files;  // they have no fetch stage
  const auto plan = [&](uint64_t units) {
    const uint32_t tokens = Narrow(std::min<uint64_t>(rest, units * unit));
    PlannedPart planned;
    planned.part = {.row = &row,
                    .number = number,
                    .first_token = first_token,
                    .tokens = tokens,
                    .units = 0,
                    .ref = PlanRow(row, first_token, tokens, cooperative)};
    planned.counts = CountsOf(row, planned.part.ref, uploads);
    planned.part.units = planned.counts.units;
    return planned;
  };
  const auto fits = [&](const PlannedPart& planned) {
    WaveCounts counts = counts_;
    counts.Add(planned.counts);
    return counts.FitHeader() && PlacesOf(counts, shape_, with_fates_).Fit(room_);
  };
  uint64_t most = (uint64_t{rest} + unit - 1) / unit;
  PlannedPart planned = plan(most);
  if (fits(planned)) return planned;
  uint64_t least = 0;  // fits; `most` does not
  while (most - least > 1) {
    const uint64_t middle = least + (most - least) / 2;
    (fits(plan(middle)) ? least : most) = middle;
  }
  if (least == 0) return std::nullopt;
  return plan(least);
}

void StepWriter::Add(PlannedPart planned, RowMemory memory) {
  const RowDescription& row = *planned.part.row;
  CHECK_EQ(memory.segments.size(), row.segments.size());
  CHECK_EQ(memory.tail_blocks.size(), TailBlocksSeen(row));
  CHECK_EQ(memory.uploads.size(), planned.counts.uploads);
  RowRef& ref = planned.part.ref;
  ref.first_unit = Narrow(counts_.units);
  ref.first_query_token = Narrow(counts_.query_tokens);
  ref.segments_begin = Narrow(counts_.segments);
  ref.tail_blocks_begin = Narrow(counts_.tail_blocks);
  ref.first_read_item = Narrow(counts_.read_items);
  ref.first_score_item = Narrow(counts_.score_items);
  ref.first_state = Narrow(counts_.states);
  ref.first_score = counts_.scores;
  ref.first_fate = counts_.fates;
  ref.first_token = counts_.chosen;
  ref.trees_begin = Narrow(counts_.trees);
  ref.first_tree_item = Narrow(counts_.tree_items);
  ref.first_word = counts_.tree_words;
  measure_ |= HasTolerance(ref);
  planned.part.host_tokens = planned.part.host_unclustered = 0;
  for (size_t s = 0; s < row.segments.size(); ++s) {
    if (memory.segments[s].first_page == 0) continue;
    ref.off_device = 1;
    if (row.segments[s].in_file) continue;
    planned.part.host_tokens += row.segments[s].tokens;
    planned.part.host_unclustered += row.segments[s].unclustered;
  }
  off_device_ |= LooksUpPages(ref);
  CHECK(!shape_.miss_wait_us.has_value() || LooksUpPages(ref)) << "the row cannot miss a page";
  counts_.Add(planned.counts);
  parts_.push_back(planned.part);
  memories_.push_back(std::move(memory));
}

void StepWriter::Remove(const std::set<uint32_t>& rows) {
  const std::vector<RowPart> parts = std::move(parts_);
  std::vector<RowMemory> memories = std::move(memories_);
  Begin(shape_, with_fates_);
  for (size_t i = 0; i < parts.size(); ++i) {
    const RowPart& part = parts[i];
    if (rows.contains(part.number)) continue;
    const WaveCounts counts = CountsOf(*part.row, part.ref, memories[i].uploads);
    Add({part, counts}, std::move(memories[i]));
  }
}

uint32_t StepWriter::MissingCount(const std::byte* results) const {
  if (!shape_.reads_files) return 0;
  uint32_t count = 0;
  std::memcpy(&count, results + results_.missing_count, sizeof(count));
  return count;
}

uint64_t StepWriter::Write(const WaveBuffers& buffers) {
  std::byte* const input = buffers.input;
  const WavePlaces places = this->places();
  CHECK(cache_.set_count > 0 || !shape_.reads_files) << "files are read by way of the cache";
  CHECK(counts_.FitHeader() && places.Fit(room_)) << "more was added than fits";
  results_ = places.result;
  device_results_ = buffers.device_scratch + places.copied;
  FillHeader(places, buffers);
  WriteCoopUnits(At<CoopUnit>(input, places.coop_units));
  CHECK_EQ(CoopUnits(header_), counts_.coop_units);
  header_.answer_blocks = AnswerBlocks(header_);
  std::memcpy(input, &header_, sizeof(header_));
  *At<uint32_t>(input, places.answer_blocks) = 0;
  own_answer_ = AnswerPlaces{};
  own_answer_.out = buffers.results + places.result.out;
  *At<AnswerPlaces>(input, places.answer) = own_answer_;
  *At<CacheClock>(input, places.cache_clock) = clock_;
  if (shape_.reads_files) *At<CarriedPages>(input, places.carried) = carried_;
  for (size_t i = 0; i < parts_.size(); ++i) {
    At<RowRef>(input, places.rows)[i] = parts_[i].ref;
    WriteRow(parts_[i], memories_[i], places, input);
  }
  WriteUploadRefs(places, input);
  return places.input_bytes;
}

template <typename QueriesOf, typename UploadOf, typename Put>
void StepWriter::ForTokens(QueriesOf queries_of, UploadOf upload_of, Put put) const {
  const WavePlaces places = this->places();
  const uint64_t token_bytes = QueryBytes(shape_);
  uint64_t to = places.upload_data;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const RowPart& part = parts_[i];
    put(places.queries + part.ref.first_query_token * token_bytes,
        queries_of(part) + part.first_token * token_bytes, part.tokens * token_bytes);
    for (const Upload& upload : memories_[i].uploads) {
      upload_of(part, upload, to);
      to += upload.bytes;
    }
  }
}

template <typename Put>
void StepWriter::ForTokensOf(std::span<const attention::RowTokens> rows, Put put) const {
  for (const RowPart& part : parts_) CHECK_EQ(part.tokens, part.row->query_tokens);
  ForTokens([&](const RowPart& part) { return rows[part.number].queries; },
            [&](const RowPart& part, const Upload& upload, uint64_t to) {
              ForAppended(*part.row, rows[part.number], upload, to, put);
            },
            put);
}

void StepWriter::WriteTokens(std::byte* input) const {
  const auto put = [input](uint64_t to, const std::byte* from, uint64_t bytes) {
    std::memcpy(input + to, from, bytes);
  };
  ForTokens([](const RowPart& part) { return part.row->queries; },
            [&](const RowPart&, const Upload& upload, uint64_t to) {
              put(to, upload.from, upload.bytes);
            },
            put);
}

bool StepWriter::WriteTurn(const attention::ClientTurn& turn, StepGate* gate) {
  if (!UploadsAppended()) return false;
  const std::byte* const tokens = FirstOf(turn.tokens);
  uint32_t count = 0;
  bool fits = reinterpret_cast<uintptr_t>(tokens) % kMoveBytes == 0;
  ForTokensOf(turn.tokens, [&](uint64_t to, const std::byte* from, uint64_t bytes) {
    const auto apart = static_cast<uint64_t>(from - tokens);
    fits = fits && (apart | to | bytes) % kMoveBytes == 0 &&
           apart / kMoveBytes <= kMovesEnd - bytes / kMoveBytes &&
           bytes / kMoveBytes <= kMovesMax - count;
    for (uint64_t at = 0; fits && at < bytes; at += kMoveBytes) {
      gate->moves[count++] = {Narrow((apart + at) / kMoveBytes), Narrow((to + at) / kMoveBytes)};
    }
  });
  if (!fits) return false;
  const bool near = turn.memory_twin != nullptr;
  gate->ring = near ? InTwin(turn, turn.ring) : turn.ring;
  gate->ring_is_near = near ? 1 : 0;
  gate->epoch = turn.epoch;
  gate->tokens = near ? InTwin(turn, tokens) : tokens;
  gate->moves_count = count;
  gate->answer = own_answer_;
  if (turn.out != nullptr) gate->answer.out = turn.out;
  gate->answer.lse = turn.lse;
  gate->answer.turn = turn.answer;
  if (near && turn.answer != nullptr) {
    gate->answer.turn = InTwin(turn, turn.answer);
    gate->answer.twin_out = InTwin(turn, turn.out);
    if (turn.lse != nullptr) gate->answer.twin_lse = InTwin(turn, turn.lse);
  }
  gate->answer.epoch = turn.epoch;
  gate->answer.taken = 1;
  return true;
}

bool StepWriter::HoldsTokensOf(std::span<const attention::RowTokens> rows,
                               const std::byte* input) const {
  bool holds = true;
  ForTokensOf(rows, [&](uint64_t to, const std::byte* from, uint64_t bytes) {
    holds = holds && std::memcmp(input + to, from, bytes) == 0;
  });
  return holds;
}

bool StepWriter::UploadsAppended() const {
  for (size_t i = 0; i < parts_.size(); ++i) {
    for (const Upload& upload : memories_[i].uploads) {
      if (upload.rows == Upload::Rows::kPage) return false;
      if (upload.first_token < FirstAppended(*parts_[i].row)) return false;
    }
  }
  return true;
}

void StepWriter::WriteNoTokens(std::byte* input) const {
  const WavePlaces places = this->places();
  std::memset(input + places.queries, 0, counts_.query_tokens * QueryBytes(shape_));
  UploadRef* const refs = At<UploadRef>(input, places.upload_refs);
  for (uint64_t i = 0; i < counts_.uploads; ++i) refs[i].bytes = 0;
  At<CacheClock>(input, places.cache_clock)->only_looks = 1;
}

void StepWriter::FillHeader(const WavePlaces& places, const WaveBuffers& buffers) {
  std::byte* const device_input = buffers.device_input;
  std::byte* const device_scratch = buffers.device_scratch;
  const KernelShape& kernel = shape_.kernel;
  StepHeader& h = header_ = StepHeader{};
  h.rows = Narrow(counts_.rows);
  h.units = Narrow(counts_.units);
  h.read_items = Narrow(counts_.read_items);
  h.score_items = Narrow(counts_.score_items);
  h.uploads = Narrow(counts_.uploads);
  h.tree_items = Narrow(counts_.tree_items);
  h.query_tokens = Narrow(counts_.query_tokens);
  h.kv_heads = shape_.kv_heads;
  h.head_dim = kernel.head_dim;
  h.value_dim = kernel.value_dim;
  h.group = shape_.group;
  h.tiles = Narrow(counts_.tiles);
  h.tiles_max = (shape_.group + kLanes - 1) / kLanes;
  for (const RowPart& part : parts_) {
    if (part.ref.kind == UnitKind::kTree) {
      ++h.tree_rows[static_cast<uint32_t>(ChoiceOf(part.ref))];
      continue;
    }
    if (part.ref.coop_blocks != 0) continue;
    h.estimate_pieces_max = std::max(h.estimate_pieces_max, part.ref.estimate_pieces);
  }
  h.query_dtype = static_cast<uint16_t>(shape_.query_dtype);
  h.out_dtype = static_cast<uint16_t>(shape_.out_dtype);
  h.softmax_scale = shape_.softmax_scale;
  h.tail_block_head_bytes = uint64_t{attention::kTailBlockTokens} *
                            (kernel.head_dim + kernel.value_dim) * DTypeBytes(kernel.dtype);
  h.row_refs = At<RowRef>(device_input, places.rows);
  h.segments = At<SegmentRef>(device_input, places.segments);
  h.trees = At<TreeRef>(device_input, places.trees);
  h.tail_blocks = At<const std::byte*>(device_input, places.tail_blocks);
  h.upload_refs = At<UploadRef>(device_input, places.upload_refs);
  h.coop_units = At<CoopUnit>(device_input, places.coop_units);
  h.upload_data = device_input + places.upload_data;
  h.queries = device_input + places.queries;
  h.cache = cache_;
  if (cache_.set_count > 0) h.cache.clock = At<CacheClock>(device_input, places.cache_clock);
  h.query_fragments = At<uint32_t>(device_scratch, places.query_fragments);
  h.states = At<float>(device_scratch, places.states);
  h.scores = At<float>(device_scratch, places.scores);
  h.fates = At<uint8_t>(device_scratch, places.Copied(places.result.fates));
  h.chosen = At<uint32_t>(device_scratch, places.chosen);
  h.score_partials = At<float>(device_scratch, places.score_partials);
  h.lane_scales = At<LaneScale>(device_scratch, places.lane_scales);
  h.unit_results = At<UnitResult>(device_scratch, places.unit_results);
  h.chunks = At<ChunkRef>(device_scratch, places.chunks);
  h.chosen_pieces = At<ChosenPiece>(device_scratch, places.chosen_pieces);
  h.cursors = At<uint32_t>(device_scratch, places.cursors);
  h.tree_words = At<uint32_t>(device_scratch, places.tree_words);
  h.tree_places = At<std::byte>(device_scratch, places.tree_places);
  h.tree_queries = At<float>(device_scratch, places.tree_queries);
  h.tree_states = At<float>(device_scratch, places.tree_states);
  h.tree_partials = At<float>(device_scratch, places.tree_partials);
  if (shape_.reads_files) {
    h.carried = At<CarriedPages>(device_input, places.carried);
    h.missing = At<uint64_t>(device_scratch, places.missing);
    h.missing_max = MissingMax(counts_);
    h.missing_count = At<uint32_t>(device_scratch, places.Copied(places.result.missing_count));
    h.estimates_misses = shape_.miss_wait_us.has_value() ? 1 : 0;
  }
  h.answer = At<AnswerPlaces>(device_input, places.answer);
  h.lse = At<float>(buffers.results, places.result.lse);
  h.lane_results = At<LaneResult>(buffers.results, places.result.lane_results);
  h.last_results = At<UnitResult>(buffers.results, places.result.unit_results);
  h.signal = {.answered = buffers.answered,
              .blocks = At<uint32_t>(device_input, places.answer_blocks)};
}

// The part's segments, trees and tail blocks.
void StepWriter::WriteRow(const RowPart& part, const RowMemory& memory, const WavePlaces& places,
                          std::byte* input) const {
  const RowDescription& row = *part.row;
  SegmentRef* ref = At<SegmentRef>(input, places.segments) + part.ref.segments_begin;
  for (size_t s = 0; s < row.segments.size(); ++s, ++ref) {
    *ref = PlanSegment(part.ref, row.segments[s], memory.segments[s], s == 0 ? nullptr : ref - 1);
  }
  TreeRef* tree = At<TreeRef>(input, places.trees) + part.ref.trees_begin;
  for (size_t s = 0; row.kind == UnitKind::kTree && s < row.segments.size(); ++s, ++tree) {
    *tree = PlanTree(part.ref, row.segments[s], s == 0 ? nullptr : tree - 1);
  }
  std::copy(memory.tail_blocks.begin(), memory.tail_blocks.end(),
            At<const std::byte*>(input, places.tail_blocks) + part.ref.tail_blocks_begin);
}

void StepWriter::WriteCoopUnits(CoopUnit* units) {
  for (uint32_t size = 0; size < kCoopSizes; ++size) {
    for (uint32_t row = 0; row < parts_.size(); ++row) {
      if (parts_[row].ref.coop_blocks != kCoopBlocks[size]) continue;
      const uint32_t count = Narrow(parts_[row].units);
      for (uint32_t unit = 0; unit < count; ++unit) *units++ = {row, unit};
      header_.coop_counts[size] += count;
    }
  }
}

void StepWriter::WriteUploadRefs(const WavePlaces& places, std::byte* input) const {
  UploadRef* ref = At<UploadRef>(input, places.upload_refs);
  uint64_t from = 0;
  for (const RowMemory& memory : memories_) {
    for (const Upload& upload : memory.uploads) {
      *ref++ = {upload.to, from, upload.bytes};
      from += upload.bytes;
    }
  }
  CHECK_EQ(from, counts_.upload_bytes);
}

}  // namespace attnd::gpu
