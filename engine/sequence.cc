// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::engine {
namespace {

using attention::kTailBlockTokens;
using attention::PageGeometry;
using attention::Segment;
using attention::SequenceView;
using attention::TailBlock;

// Logits beyond it mean nothing in single precision, and below it no product of a step (q.k, its
// terms, squares of queries times variances of keys) overflows.
constexpr double kLogitMax = 1e18;

// An object with the bytes it holds of a budget.
template <typename T>
struct Held {
  template <typename... Arguments>
  explicit Held(Reservation r, Arguments&&... arguments)
      : reservation(std::move(r)), object(std::forward<Arguments>(arguments)...) {}
  Reservation reservation;
  T object;
};

// The rows of new tokens, by token and KV head.
struct NewRows {
  NewRows(const NewTokens& tokens, const ModelShape& shape)
      : geometry(shape), keys(tokens.keys), values(tokens.values), kv_heads(shape.kv_heads) {}
  const std::byte* key(uint64_t token, uint32_t head) const {
    return keys + (token * kv_heads + head) * geometry.key_row_bytes;
  }
  const std::byte* value(uint64_t token, uint32_t head) const {
    return values + (token * kv_heads + head) * geometry.value_row_bytes;
  }
  const PageGeometry geometry;
  const std::byte* const keys;
  const std::byte* const values;
  const uint32_t kv_heads;
};

// Copies token `from` of a run of pages to place `to` of another.
void CopyToken(const PageGeometry& geometry, const std::byte* source, uint64_t from,
               std::byte* target, uint64_t to) {
  std::memcpy(target + geometry.KeyOffset(to), source + geometry.KeyOffset(from),
              geometry.key_row_bytes);
  std::memcpy(target + geometry.ValueOffset(to), source + geometry.ValueOffset(from),
              geometry.value_row_bytes);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const TailBlock>> MakeTailBlock(const ModelShape& shape,
                                                               MemoryBudget* budget) {
  ATTND_ASSIGN_OR_RETURN(Reservation reservation,
                         budget->Reserve(TailBlock::Bytes(shape), "a tail block"));
  auto held = std::make_shared<Held<TailBlock>>(std::move(reservation), shape);
  if (!held->object.allocated()) {
    return absl::ResourceExhaustedError("the system refused memory for a tail block");
  }
  return std::shared_ptr<const TailBlock>(held, &held->object);
}

std::shared_ptr<const Segment> HoldReservation(std::shared_ptr<const Segment> segment,
                                               Reservation reservation) {
  auto held = std::make_shared<Held<std::shared_ptr<const Segment>>>(std::move(reservation),
                                                                     std::move(segment));
  return std::shared_ptr<const Segment>(held, held->object.get());
}

Sequence::Sequence(uint64_t id, std::string tenant, OpenArgs args, uint64_t max_tokens,
                   MemoryBudget* budget)
    : id_(id),
      tenant_(std::move(tenant)),
      args_(std::move(args)),
      max_tokens_(max_tokens),
      budget_(budget),
      layer_tokens_(args_.shape.layers, 0),
      key_magnitudes_(args_.shape.layers, 0) {}

// ---- appending ----

absl::Status Sequence::Append(WriterId writer, const NewTokens& tokens) {
  MutexLock lock(mutex_);
  ATTND_RETURN_IF_ERROR(CheckAppend(writer, tokens));
  ATTND_RETURN_IF_ERROR(AppendChecked(writer, tokens));
  newest_step_ = kNoStep;  // an upload follows it: its reply has been seen
  return absl::OkStatus();
}

absl::StatusOr<Snapshot> Sequence::AppendAndRead(WriterId writer, const NewTokens& tokens,
                                                 float query_magnitude) {
  MutexLock lock(mutex_);
  ATTND_RETURN_IF_ERROR(CheckAppend(writer, tokens));
  ATTND_RETURN_IF_ERROR(CheckLogits(tokens.layer, query_magnitude, tokens.key_magnitude));
  ATTND_RETURN_IF_ERROR(AppendChecked(writer, tokens));
  newest_step_ = tokens.first_position;
  return Snapshot{View(), layer_tokens_[tokens.layer]};
}

absl::Status Sequence::CheckAppend(WriterId writer, const NewTokens& tokens) {
  const uint64_t length = layer_tokens_[tokens.layer];
  if (tokens.first_position > length) {
    return absl::FailedPreconditionError(absl::StrCat("position ", tokens.first_position,
                                                      " leaves a gap in layer ", tokens.layer,
                                                      "; the position expected is ", length));
  }
  if (tokens.tokens > max_tokens_ - tokens.first_position) {
    return absl::ResourceExhaustedError(absl::StrCat("the sequence would have ",
                                                     tokens.first_position + tokens.tokens,
                                                     " tokens; allowed are ", max_tokens_));
  }
  const uint64_t end = tokens.first_position + tokens.tokens;
  const uint64_t repeated = std::min(end, length) - tokens.first_position;
  ATTND_RETURN_IF_ERROR(TakeWriter(writer));
  ATTND_RETURN_IF_ERROR(CheckRepeat(tokens, repeated));
  return CheckTokenIds(tokens);
}

absl::Status Sequence::AppendChecked(WriterId writer, const NewTokens& tokens) {
  uint64_t& length = layer_tokens_[tokens.layer];
  const uint64_t end = tokens.first_position + tokens.tokens;
  ATTND_RETURN_IF_ERROR(GrowTail(end));
  writer_ = writer;
  StoreTokenIds(tokens);
  Write(tokens, std::min(end, length) - tokens.first_position);
  length = std::max(length, end);
  float& magnitude = key_magnitudes_[tokens.layer];
  magnitude = std::max(magnitude, tokens.key_magnitude);
  return absl::OkStatus();
}

absl::Status Sequence::CheckLogits(uint32_t layer, float query_magnitude,
                                   float key_magnitude) const {
  const double query = double{query_magnitude} * args_.shape.softmax_scale;
  const double key = std::max(key_magnitude, key_magnitudes_[layer]);
  if (query <= kLogitMax && key <= kLogitMax && query * key * args_.shape.head_dim <= kLogitMax) {
    return absl::OkStatus();
  }
  return absl::OutOfRangeError(
      absl::StrCat("q has numbers up to ", query_magnitude, " and the layer's keys up to ", key,
                   ": their products could exceed ", kLogitMax, ", beyond what float32 answers"));
}

absl::Status Sequence::TakeWriter(WriterId writer) {
  if (!writer_.has_value() || *writer_ == writer) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrCat("another stream is writing to sequence ", id_, " until it ends"));
}

absl::Status Sequence::CheckWriter(WriterId writer) {
  MutexLock lock(mutex_);
  return TakeWriter(writer);
}

void Sequence::ReleaseWriter(WriterId writer) {
  MutexLock lock(mutex_);
  if (writer_ == writer) writer_.reset();
}

// The first `repeated` tokens are already here: they must be in the tail and equal.
absl::Status Sequence::CheckRepeat(const NewTokens& tokens, uint64_t repeated) {
  if (repeated == 0) return absl::OkStatus();
  if (tokens.first_position < tail_begin_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "position ", tokens.first_position, " lies in a finished segment; positions from ",
        tail_begin_, " can be repeated, the position expected is ", layer_tokens_[tokens.layer]));
  }
  if (!SameBytes(tokens, repeated)) {
    return absl::AlreadyExistsError(
        absl::StrCat("position ", tokens.first_position, " of layer ", tokens.layer,
                     " exists with other keys or values; the position expected is ",
                     layer_tokens_[tokens.layer]));
  }
  return absl::OkStatus();
}

bool Sequence::SameBytes(const NewTokens& tokens, uint64_t count) {
  const NewRows rows(tokens, args_.shape);
  const PageGeometry& g = rows.geometry;
  for (uint32_t head = 0; head < args_.shape.kv_heads; ++head) {
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t position = tokens.first_position + i;
      const std::byte* pages = TailPages(tokens.layer, head, position);
      const uint64_t place = position % kTailBlockTokens;
      if (std::memcmp(pages + g.KeyOffset(place), rows.key(i, head), g.key_row_bytes) != 0 ||
          std::memcmp(pages + g.ValueOffset(place), rows.value(i, head), g.value_row_bytes) != 0) {
        return false;
      }
    }
  }
  return true;
}

absl::Status Sequence::CheckTokenIds(const NewTokens& tokens) {
  for (uint64_t i = 0; i < tokens.token_ids.size(); ++i) {
    const uint64_t position = tokens.first_position + i;
    if (position >= token_ids_.size()) break;
    if (token_id_known_[position] && token_ids_[position] != tokens.token_ids[i]) {
      return absl::AlreadyExistsError(absl::StrCat("token_ids[", i, "] is ", tokens.token_ids[i],
                                                   "; position ", position, " has token id ",
                                                   token_ids_[position]));
    }
  }
  return absl::OkStatus();
}

void Sequence::StoreTokenIds(const NewTokens& tokens) {
  const uint64_t end = tokens.first_position + tokens.token_ids.size();
  if (!tokens.token_ids.empty() && end > token_ids_.size()) {
    token_ids_.resize(end);
    token_id_known_.resize(end, false);
  }
  for (uint64_t i = 0; i < tokens.token_ids.size(); ++i) {
    token_ids_[tokens.first_position + i] = tokens.token_ids[i];
    token_id_known_[tokens.first_position + i] = true;
  }
}

// Makes the blocks for positions up to `end`; all of them or none.
absl::Status Sequence::GrowTail(uint64_t end) {
  const uint64_t needed =
      end == 0 ? 0 : (end - 1) / kTailBlockTokens + 1 - tail_begin_ / kTailBlockTokens;
  if (end <= tail_begin_ || needed <= tail_.size()) return absl::OkStatus();
  Blocks blocks;
  while (tail_.size() + blocks.size() < needed) {
    ATTND_ASSIGN_OR_RETURN(auto block, MakeTailBlock(args_.shape, budget_));
    blocks.push_back(std::move(block));
  }
  tail_.insert(tail_.end(), blocks.begin(), blocks.end());
  view_.reset();
  return absl::OkStatus();
}

std::byte* Sequence::TailPages(uint32_t layer, uint32_t kv_head, uint64_t position) {
  return tail_[position / kTailBlockTokens - tail_begin_ / kTailBlockTokens]->pages(layer, kv_head);
}

void Sequence::Write(const NewTokens& tokens, uint64_t skip) {
  const NewRows rows(tokens, args_.shape);
  const PageGeometry& g = rows.geometry;
  for (uint64_t i = skip; i < tokens.tokens; ++i) {
    const uint64_t position = tokens.first_position + i;
    const uint64_t place = position % kTailBlockTokens;
    for (uint32_t head = 0; head < args_.shape.kv_heads; ++head) {
      std::byte* pages = TailPages(tokens.layer, head, position);
      std::memcpy(pages + g.KeyOffset(place), rows.key(i, head), g.key_row_bytes);
      std::memcpy(pages + g.ValueOffset(place), rows.value(i, head), g.value_row_bytes);
    }
  }
}

// ---- reading ----

absl::StatusOr<Snapshot> Sequence::Read(uint32_t layer, uint64_t position, float query_magnitude) {
  MutexLock lock(mutex_);
  if (position != layer_tokens_[layer]) {
    return absl::FailedPreconditionError(
        absl::StrCat("position is ", position, "; a query_only row expects the layer's length, ",
                     layer_tokens_[layer]));
  }
  ATTND_RETURN_IF_ERROR(CheckLogits(layer, query_magnitude, 0));
  return Snapshot{View(), layer_tokens_[layer]};
}

std::shared_ptr<const SequenceView> Sequence::View() {
  if (view_ == nullptr) {
    auto view = std::make_shared<SequenceView>();
    view->shape = args_.shape;
    view->segments = segments_;
    view->tail = tail_;
    view->tail_begin = tail_begin_;
    view_ = std::move(view);
  }
  return view_;
}

uint64_t Sequence::Committed() const {
  return *std::min_element(layer_tokens_.begin(), layer_tokens_.end());
}

uint64_t Sequence::CommittedTokens() {
  MutexLock lock(mutex_);
  return Committed();
}

absl::Status Sequence::CheckAligned() {
  MutexLock lock(mutex_);
  const auto [least, most] = std::minmax_element(layer_tokens_.begin(), layer_tokens_.end());
  if (*least == *most) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "prefill_complete: layer ", least - layer_tokens_.begin(), " has ", *least,
      " tokens and layer ", most - layer_tokens_.begin(), " has ", *most, "; they must be equal"));
}

SequenceInfo Sequence::Info() {
  MutexLock lock(mutex_);
  SequenceInfo info;
  info.id = id_;
  info.args = args_;
  info.committed_tokens = Committed();
  info.segmented_tokens = tail_begin_;
  info.segments = static_cast<uint32_t>(segments_.size());
  for (const auto& segment : segments_) info.resident_bytes += segment->bytes();
  info.resident_bytes += tail_.size() * TailBlock::Bytes(args_.shape);
  info.layer_tokens = layer_tokens_;
  return info;
}

// ---- segments ----

uint64_t Sequence::SegmentsEnd() const {
  const uint64_t committed = Committed();
  return std::min(committed - std::min<uint64_t>(committed, policy().window), newest_step_);
}

bool Sequence::HasSegment(uint32_t min_tokens) {
  MutexLock lock(mutex_);
  return SegmentsEnd() >= tail_begin_ + min_tokens;
}

bool Sequence::BuildDue(uint32_t min_tokens) {
  MutexLock lock(mutex_);
  return SegmentsEnd() >= tail_begin_ + min_tokens && Committed() >= build_from_;
}

void Sequence::DelayBuild() {
  MutexLock lock(mutex_);
  build_delay_ = std::clamp(2 * build_delay_, kBuildDelayMin, kBuildDelayMax);
  build_from_ = Committed() + build_delay_;
}

std::optional<SegmentJob> Sequence::NextSegment(uint32_t min_tokens, uint32_t max_tokens) {
  MutexLock lock(mutex_);
  const uint64_t end = SegmentsEnd();
  if (end < tail_begin_ + min_tokens) return std::nullopt;
  SegmentJob job;
  job.tokens = static_cast<uint32_t>(std::min<uint64_t>(max_tokens, end - tail_begin_));
  job.unclustered = tail_begin_ == 0 ? policy().sink : 0;
  job.view = View();
  return job;
}

bool Sequence::Install(const SegmentJob& job, std::shared_ptr<const Segment> segment) {
  MutexLock lock(mutex_);
  // A truncation may have taken the tokens away, and others may have come in their place: the
  // blocks then differ. A truncation keeps a block only if it keeps all of its positions, which are
  // never written again; it copies or drops the others. The job's view holds the old blocks, so
  // that no new one can have the address of an old one.
  const uint64_t end = tail_begin_ + job.tokens;
  if (tail_begin_ != job.view->tail_begin || Committed() < end + policy().window) return false;
  // A step that is being repeated must stay in the tail until a newer one comes.
  if (end > newest_step_) return false;
  const uint64_t blocks = (end - 1) / kTailBlockTokens + 1 - tail_begin_ / kTailBlockTokens;
  if (tail_.size() < blocks ||
      !std::equal(tail_.begin(), tail_.begin() + static_cast<ptrdiff_t>(blocks),
                  job.view->tail.begin())) {
    return false;
  }
  const uint64_t dropped = end / kTailBlockTokens - tail_begin_ / kTailBlockTokens;
  tail_.erase(tail_.begin(), tail_.begin() + static_cast<ptrdiff_t>(dropped));
  tail_begin_ = end;
  segments_.push_back(std::move(segment));
  build_from_ = build_delay_ = 0;
  view_.reset();
  return true;
}

// ---- shorter histories ----

// Segments that a history of `length` tokens keeps: those outside its window.
size_t Sequence::SegmentsKept(uint64_t length) const {
  size_t kept = 0;
  while (kept < segments_.size() && segments_[kept]->end_position() + policy().window <= length) {
    ++kept;
  }
  return kept;
}

absl::StatusOr<uint64_t> Sequence::Truncate(uint64_t length) {
  MutexLock lock(mutex_);
  if (length > Committed()) {
    return absl::FailedPreconditionError(absl::StrCat("length is ", length, "; the sequence has ",
                                                      Committed(), " committed tokens"));
  }
  const size_t kept = SegmentsKept(length);
  const uint64_t begin = kept == 0 ? 0 : segments_[kept - 1]->end_position();
  ATTND_ASSIGN_OR_RETURN(Blocks blocks, TailFor(begin, length));
  segments_.resize(kept);
  tail_ = std::move(blocks);
  tail_begin_ = begin;
  std::fill(layer_tokens_.begin(), layer_tokens_.end(), length);
  newest_step_ = std::min(newest_step_, length);
  build_from_ = build_delay_ = 0;
  if (length == 0) std::fill(key_magnitudes_.begin(), key_magnitudes_.end(), 0.0f);
  if (token_ids_.size() > length) {
    token_ids_.resize(length);
    token_id_known_.resize(length);
  }
  view_.reset();
  return tail_begin_;
}

absl::Status Sequence::ForkInto(std::optional<uint64_t> wanted, Sequence* child) {
  MutexLock lock(mutex_);
  const uint64_t length = wanted.value_or(Committed());
  if (length > Committed()) {
    return absl::FailedPreconditionError(absl::StrCat("length is ", length, "; the sequence has ",
                                                      Committed(), " committed tokens"));
  }
  const size_t kept = SegmentsKept(length);
  const uint64_t begin = kept == 0 ? 0 : segments_[kept - 1]->end_position();
  ATTND_ASSIGN_OR_RETURN(Blocks blocks, TailFor(begin, length));
  MutexLock child_lock(child->mutex_);
  child->segments_.assign(segments_.begin(), segments_.begin() + static_cast<ptrdiff_t>(kept));
  child->tail_ = std::move(blocks);
  child->tail_begin_ = begin;
  std::fill(child->layer_tokens_.begin(), child->layer_tokens_.end(), length);
  child->key_magnitudes_ = key_magnitudes_;
  const size_t ids = std::min<uint64_t>(length, token_ids_.size());
  child->token_ids_.assign(token_ids_.begin(), token_ids_.begin() + static_cast<ptrdiff_t>(ids));
  child->token_id_known_.assign(token_id_known_.begin(),
                                token_id_known_.begin() + static_cast<ptrdiff_t>(ids));
  return absl::OkStatus();
}

// A tail with positions [begin, length): full blocks are shared; those that will be written again,
// or that need tokens from a segment, are new.
absl::StatusOr<Sequence::Blocks> Sequence::TailFor(uint64_t begin, uint64_t length) {
  Blocks blocks;
  for (uint64_t block = begin / kTailBlockTokens; block * kTailBlockTokens < length; ++block) {
    const uint64_t first = std::max(begin, block * kTailBlockTokens);
    const uint64_t end = (block + 1) * kTailBlockTokens;
    if (first >= tail_begin_ && end <= length) {
      blocks.push_back(tail_[block - tail_begin_ / kTailBlockTokens]);
      continue;
    }
    ATTND_ASSIGN_OR_RETURN(auto copy, MakeTailBlock(args_.shape, budget_));
    const uint64_t last = std::min(end, length);
    if (last > tail_begin_) CopyFromTail(std::max(first, tail_begin_), last, *copy, block);
    blocks.push_back(std::move(copy));
  }
  CopyFromSegments(begin, std::min(length, tail_begin_), blocks);
  return blocks;
}

void Sequence::CopyFromTail(uint64_t begin, uint64_t end, const TailBlock& target, uint64_t block) {
  const PageGeometry geometry(args_.shape);
  const TailBlock& source = *tail_[block - tail_begin_ / kTailBlockTokens];
  for (uint32_t layer = 0; layer < args_.shape.layers; ++layer) {
    for (uint32_t head = 0; head < args_.shape.kv_heads; ++head) {
      for (uint64_t position = begin; position < end; ++position) {
        const uint64_t place = position % kTailBlockTokens;
        CopyToken(geometry, source.pages(layer, head), place, target.pages(layer, head), place);
      }
    }
  }
}

// Positions [begin, end) of the segments into blocks, the first of which holds `begin`.
void Sequence::CopyFromSegments(uint64_t begin, uint64_t end, const Blocks& blocks) {
  const PageGeometry geometry(args_.shape);
  const uint64_t first_block = begin / kTailBlockTokens;
  for (const auto& segment : segments_) {
    if (segment->end_position() <= begin || segment->first_position() >= end) continue;
    for (uint32_t layer = 0; layer < args_.shape.layers; ++layer) {
      for (uint32_t head = 0; head < args_.shape.kv_heads; ++head) {
        const std::span<const uint16_t> positions = segment->positions(layer, head);
        for (uint64_t slot = 0; slot < positions.size(); ++slot) {
          const uint64_t position = segment->first_position() + positions[slot];
          if (position < begin || position >= end) continue;
          const TailBlock& target = *blocks[position / kTailBlockTokens - first_block];
          CopyToken(geometry, segment->pages(layer, head), slot, target.pages(layer, head),
                    position % kTailBlockTokens);
        }
      }
    }
  }
}

}  // namespace attnd::engine
