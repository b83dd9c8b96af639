// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/sequence.h"

#include <glog/logging.h>

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/sequence/token_parts.h"

namespace attnd::engine {
namespace {

using attention::kTailBlockTokens;
using attention::Segment;
using attention::SequenceView;
using attention::TailBlock;

// Logits beyond it mean nothing in single precision, and below it no product of a step (q.k, its
// terms, squares of queries times variances of keys) overflows.
constexpr double kLogitMax = 1e18;

// A sequence's place in the engine's table.
constexpr uint64_t kTableEntryBytes = 256;

// A segment's or block's places in the lists of its sequence; lists may be twice as long as needed.
// Views' lists are not counted.
constexpr uint64_t kListEntryBytes = 4 * sizeof(std::shared_ptr<const Segment>);

attention::PolicyState MakeState(const OpenArgs& args, MemoryBudget* budget) {
  const auto hold = [budget](uint64_t bytes,
                             const char* what) -> absl::StatusOr<std::shared_ptr<const void>> {
    ATTND_ASSIGN_OR_RETURN(Reservation reservation, budget->Reserve(bytes, what));
    return std::make_shared<const Reservation>(std::move(reservation));
  };
  return attention::PolicyState(args.shape, args.indexes.value_or(attention::IndexSet()),
                                args.model_parts, hold);
}

float Greatest(std::span<const float> values) {
  float greatest = 0;
  for (const float value : values) greatest = std::max(greatest, value);
  return greatest;
}

// Looks at the tokens and writes them to the tail, which has blocks for them. key_magnitudes: of
// each block that they touch.
absl::Status WriteRun(const ModelShape& shape, const NewTokens& tokens, Tail* tail,
                      float* key_magnitudes) {
  TokenParts parts(shape, tokens);
  while (!parts.done()) {
    ATTND_ASSIGN_OR_RETURN(const NewTokens part, parts.Next());
    tail->Write(part, 0);
    key_magnitudes =
        std::copy(part.key_magnitudes.begin(), part.key_magnitudes.end(), key_magnitudes);
  }
  return absl::OkStatus();
}

}  // namespace

Sequence::Sequence(uint64_t id, std::string tenant, OpenArgs args, uint64_t max_tokens,
                   MemoryBudget* budget)
    : id_(id),
      tenant_(std::move(tenant)),
      args_(std::move(args)),
      max_tokens_(max_tokens),
      budget_(budget),
      tail_(args_.shape),
      layer_tokens_(args_.shape.layers, 0),
      layer_written_(args_.shape.layers, 0),
      key_bounds_(args_.shape.layers, 0),
      token_ids_(budget),
      state_(MakeState(args_, budget)) {}

// The object and its place, its texts, and the fixed part of its policy state.
uint64_t Sequence::ObjectBytes(absl::string_view tenant, const OpenArgs& args) {
  // NOLINTBEGIN(bugprone-unchecked-optional-access): Engine::Open sets them
  return sizeof(Sequence) + kTableEntryBytes + tenant.size() + args.fingerprint.size() +
         args.policy->preset.size() +
         attention::PolicyState::FixedBytes(args.shape, *args.indexes, args.model_parts) +
         args.shape.layers * (2 * sizeof(uint64_t) + sizeof(float));
  // NOLINTEND(bugprone-unchecked-optional-access)
}

uint64_t Sequence::ListBytes(const ModelShape& shape, uint64_t entries) {
  return entries * (kListEntryBytes + 2 * sizeof(float) * shape.layers);
}

absl::StatusOr<std::shared_ptr<Sequence>> Sequence::Create(uint64_t id, absl::string_view tenant,
                                                           OpenArgs args, uint64_t max_tokens,
                                                           MemoryBudget* budget) {
  ATTND_ASSIGN_OR_RETURN(Reservation object,
                         budget->Reserve(ObjectBytes(tenant, args), "a sequence"));
  auto sequence =
      std::make_shared<Sequence>(id, std::string(tenant), std::move(args), max_tokens, budget);
  sequence->object_ = std::move(object);
  sequence->Touch();
  return sequence;
}

// ---- appending ----

absl::StatusOr<uint64_t> Sequence::Append(WriterId writer, const NewTokens& tokens,
                                          attention::WorkerPool* workers) {
  MutexLock lock(mutex_);
  ATTND_RETURN_IF_ERROR(CheckPlace(writer, tokens));
  ATTND_RETURN_IF_ERROR(CheckRepeat(tokens));
  // What was given up has readers, and is not compared with bytes that others may write to.
  const uint64_t length = layer_tokens_[tokens.layer];
  if (tokens.end_position() > length && layer_written_[tokens.layer] > length) {
    ATTND_RETURN_IF_ERROR(ForgetGivenUp());
  }
  std::vector<float> key_magnitudes(Tail::BlocksOf(tokens.first_position, tokens.end_position()));
  ATTND_ASSIGN_OR_RETURN(TokenIds::Room room, MakeRoom(tokens));
  absl::Status status = WriteNew(tokens, workers, key_magnitudes.data());
  if (status.ok() && tokens.kept != nullptr && !(*tokens.kept)()) status = NotKept();
  if (!status.ok()) {
    DropUnwritten();
    return status;
  }
  NewTokens written = tokens;
  written.key_magnitudes = key_magnitudes;
  const uint64_t appended = Take(writer, written, std::move(room));
  if (appended > 0) newest_step_ = kNoStep;  // an upload follows it: its reply has been seen
  return appended;
}

absl::StatusOr<Snapshot> Sequence::AppendAndRead(WriterId writer, const NewTokens& tokens,
                                                 float query_magnitude) {
  MutexLock lock(mutex_);
  ATTND_RETURN_IF_ERROR(CheckStepPosition(tokens.layer, tokens.first_position));
  ATTND_RETURN_IF_ERROR(CheckPlace(writer, tokens));
  ATTND_RETURN_IF_ERROR(CheckRepeat(tokens));
  ATTND_RETURN_IF_ERROR(
      CheckLogits(tokens.layer, query_magnitude, Greatest(tokens.key_magnitudes)));
  ATTND_ASSIGN_OR_RETURN(TokenIds::Room room, MakeRoom(tokens));
  // A repeat of a step whose tokens an early segment has is answered from the tail.
  const bool in_tail = tokens.first_position >= early_.EndOr(tail_.begin());
  Snapshot snapshot{in_tail ? View() : HistoryView(), 0};
  // What was given up there is equal: MakeRoom has forgotten it otherwise.
  tail_.Write(tokens, tokens.PartBelow(layer_written_[tokens.layer]));
  snapshot.new_tokens = Take(writer, tokens, std::move(room));
  newest_step_ = tokens.first_position;
  return snapshot;
}

absl::Status Sequence::CheckPlace(WriterId writer, const NewTokens& tokens) const {
  ATTND_RETURN_IF_ERROR(CheckGap(tokens.layer, tokens.first_position));
  ATTND_RETURN_IF_ERROR(CheckLength(tokens.first_position, tokens.tokens));
  if (tokens.of_pass && tokens.layer > 0 && layer_tokens_[0] < tokens.end_position()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the sequence was truncated while a pass appended to it; the position expected is ",
        CommittedTokens()));
  }
  ATTND_RETURN_IF_ERROR(CheckWriter(writer));
  return token_ids_.Check(tokens.first_position, tokens.token_ids);
}

absl::Status Sequence::CheckGap(uint32_t layer, uint64_t position) const {
  const uint64_t length = layer_tokens_[layer];
  if (position <= length) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("position ", position,
                                                    " leaves a gap in layer ", layer,
                                                    "; the position expected is ", length));
}

absl::Status Sequence::CheckLength(uint64_t position, uint64_t tokens) const {
  if (position <= max_tokens_ && tokens <= max_tokens_ - position) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the sequence would have ", position + tokens,
                                                   " tokens; allowed are ", max_tokens_));
}

absl::Status Sequence::CheckStepPosition(uint32_t layer, uint64_t position) const {
  // Its answer cannot be given again: a segment's tokens are not in order, and some are estimated.
  if (position >= tail_.begin()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("position ", position, " lies in a finished segment; steps from ", tail_.begin(),
                   " on can be repeated, the position expected is ", layer_tokens_[layer]));
}

// All that appending may fail at.
absl::StatusOr<TokenIds::Room> Sequence::MakeRoom(const NewTokens& tokens) {
  const uint64_t length = layer_tokens_[tokens.layer];
  const uint64_t written = std::min(tokens.end_position(), layer_written_[tokens.layer]);
  if (written > length && !tail_.Holds(tokens, length, written)) {
    ATTND_RETURN_IF_ERROR(ForgetGivenUp());
  }
  ATTND_ASSIGN_OR_RETURN(TokenIds::Room room,
                         token_ids_.MakeRoom(tokens.first_position, tokens.token_ids.size()));
  ATTND_RETURN_IF_ERROR(GrowTail(tokens.first_position + tokens.tokens));
  return room;
}

// Looks at the tokens that the layer lacks, and writes them, which nobody reads before they are
// taken. key_magnitudes: as NewTokens'; those of blocks that the layer has stay. As Engine::Append,
// and ResourceExhausted if the system refuses memory.
absl::Status Sequence::WriteNew(const NewTokens& tokens, attention::WorkerPool* workers,
                                float* key_magnitudes) try {
  const uint64_t begin = tokens.first_position + tokens.PartBelow(layer_tokens_[tokens.layer]);
  const std::vector<NewTokens> runs =
      RunsFrom(args_.shape, tokens, begin, workers == nullptr ? 1 : workers->threads());
  std::vector<absl::Status> statuses(runs.size());
  // The lock is this thread's, and held until all have ended.
  const auto write = [&, &tail = tail_](size_t i) {
    const uint64_t block = runs[i].first_position / kTailBlockTokens;
    statuses[i] = WriteRun(args_.shape, runs[i], &tail,
                           key_magnitudes + (block - tokens.first_position / kTailBlockTokens));
  };
  if (runs.size() > 1) {
    workers->ForEach(runs.size(), write);
  } else if (!runs.empty()) {
    write(0);
  }
  for (const absl::Status& status : statuses) ATTND_RETURN_IF_ERROR(status);
  return absl::OkStatus();
} catch (const std::bad_alloc&) {
  return absl::ResourceExhaustedError("the system refused memory");
}

// Of tokens that are written: the layer has them from here on. Gives how many of them are new.
uint64_t Sequence::Take(WriterId writer, const NewTokens& tokens, TokenIds::Room room) noexcept {
  uint64_t& length = layer_tokens_[tokens.layer];
  const uint64_t end = tokens.end_position();
  const uint64_t repeated = tokens.PartBelow(length);
  writer_ = writer;
  if (tokens.of_pass) {
    if (const auto pass = PassOf(writer); pass != passes_.end()) pass->appended = true;
  }
  Touch();
  token_ids_.Store(tokens.first_position, tokens.token_ids, std::move(room));
  layer_written_[tokens.layer] = std::max(layer_written_[tokens.layer], end);
  float& bound = key_bounds_[tokens.layer];
  bound = std::max(bound, tail_.RaiseKeyBounds(tokens, repeated));
  length = std::max(length, end);
  CHECK_LE(length, tail_.blocks_end());
  return tokens.tokens - repeated;
}

absl::Status Sequence::CheckLogits(uint32_t layer, float query_magnitude, float key_magnitude) {
  absl::Status logits = LogitsWithBounds(layer, query_magnitude, key_magnitude);
  if (logits.ok() || layer_written_[layer] == layer_tokens_[layer]) return logits;
  // The greatest key may be one that was given up.
  ATTND_RETURN_IF_ERROR(ForgetGivenUp());
  return LogitsWithBounds(layer, query_magnitude, key_magnitude);
}

absl::Status Sequence::LogitsWithBounds(uint32_t layer, float query_magnitude,
                                        float key_magnitude) const {
  const double query = double{query_magnitude} * args_.shape.softmax_scale;
  const double key = std::max(key_magnitude, key_bounds_[layer]);
  if (query <= kLogitMax && key <= kLogitMax && query * key * args_.shape.head_dim <= kLogitMax) {
    return absl::OkStatus();
  }
  return absl::OutOfRangeError(
      absl::StrCat("q has numbers up to ", query_magnitude, " and the layer's keys up to ", key,
                   ": their products could exceed ", kLogitMax, ", beyond what float32 answers"));
}

absl::Status Sequence::CheckWriter(WriterId writer) const {
  if (!writer_.has_value() || *writer_ == writer) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrCat("another stream is writing to sequence ", id_, " until it ends"));
}

void Sequence::ReleaseWriter(WriterId writer) {
  MutexLock lock(mutex_);
  if (writer_ == writer) writer_.reset();
}

// Tokens that are already here must be equal.
absl::Status Sequence::CheckRepeat(const NewTokens& tokens) const {
  const uint64_t end = tokens.first_position + tokens.PartBelow(layer_tokens_[tokens.layer]);
  const uint64_t in_tail = std::clamp(tail_.begin(), tokens.first_position, end);
  ATTND_RETURN_IF_ERROR(CheckWhole(tokens.first_position, in_tail));
  if (SegmentsHold(tokens, in_tail) && tail_.Holds(tokens, in_tail, end)) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(
      "position ", tokens.first_position, " of layer ", tokens.layer,
      " exists with other keys or values; the position expected is ", layer_tokens_[tokens.layer]));
}

// Whether the new tokens up to position `end` are equal to those of segments, which hold them as
// they came, in another order.
bool Sequence::SegmentsHold(const NewTokens& tokens, uint64_t end) const {
  const NewRows rows(tokens, args_.shape);
  const uint64_t begin = tokens.first_position;
  for (const auto& segment : segments_) {
    if (segment->end_position() <= begin || segment->first_position() >= end) continue;
    for (uint32_t head = 0; head < args_.shape.kv_heads; ++head) {
      const std::byte* pages = segment->pages(tokens.layer, head);
      const std::span<const uint16_t> positions = segment->positions(tokens.layer, head);
      for (uint64_t slot = 0; slot < positions.size(); ++slot) {
        const uint64_t position = segment->first_position() + positions[slot];
        if (position < begin || position >= end) continue;
        if (!rows.Equal(position - begin, head, pages, slot)) return false;
      }
    }
  }
  return true;
}

// Makes the tail's blocks for positions below `end`; all of them or none.
absl::Status Sequence::GrowTail(uint64_t end) {
  ATTND_ASSIGN_OR_RETURN(const Tail::Blocks more, tail_.MakeBlocks(end, budget_));
  if (more.empty()) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(HoldBooks(tail_.blocks().size() + more.size(), segments_.size()));
  tail_.AddBlocks(more);
  view_.reset();
  return absl::OkStatus();
}

// Bytes of the lists for so many blocks and segments.
absl::Status Sequence::HoldBooks(size_t blocks, size_t segments) {
  return budget_->Resize(&books_, ListBytes(args_.shape, blocks + segments), "a sequence's lists");
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
  Touch();
  return Snapshot{View(), 0};
}

std::shared_ptr<const SequenceView> Sequence::View() {
  if (view_ != nullptr && view_state_version_ == state_.version()) return view_;
  view_ = MakeView(early_);
  view_state_version_ = state_.version();
  return view_;
}

std::shared_ptr<const SequenceView> Sequence::HistoryView() {
  return early_.all().empty() ? View() : MakeView(EarlySegments());
}

std::shared_ptr<SequenceView> Sequence::MakeView(const EarlySegments& early) {
  auto view = TailView(early.EndOr(tail_.begin()));
  view->segments = segments_;
  view->segments.insert(view->segments.end(), early.all().begin(), early.all().end());
  return view;
}

std::shared_ptr<SequenceView> Sequence::TailView(uint64_t begin) {
  auto view = std::make_shared<SequenceView>();
  view->shape = args_.shape;
  view->indexes = indexes();
  view->owner = args_.backend;
  view->state = state_.View(segments_.empty() ? nullptr : segments_.front().get());
  view->tail_begin = begin;
  const uint64_t covered = begin / kTailBlockTokens - tail_.begin() / kTailBlockTokens;  // blocks
  view->tail.assign(tail_.blocks().begin() + static_cast<ptrdiff_t>(covered), tail_.blocks().end());
  return view;
}

uint64_t Sequence::CommittedTokens() const {
  return *std::min_element(layer_tokens_.begin(), layer_tokens_.end());
}

uint64_t Sequence::KeptTokens() const {
  uint64_t tokens = CommittedTokens();
  for (const DeclaredPass& pass : passes_) {
    if (!pass.appended) continue;
    tokens = std::min(tokens, *std::min_element(pass.lengths.begin(), pass.lengths.end()));
  }
  return tokens;
}

absl::Status Sequence::CompletePrefill(WriterId writer) {
  MutexLock lock(mutex_);
  ATTND_RETURN_IF_ERROR(CheckWriter(writer));
  ATTND_RETURN_IF_ERROR(CheckAligned());
  newest_step_ = kNoStep;
  return absl::OkStatus();
}

absl::Status Sequence::CheckAligned() const {
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
  info.committed_tokens = KeptTokens();
  info.segmented_tokens = tail_.begin();
  info.segments = static_cast<uint32_t>(segments_.size());
  for (const auto& segment : segments_) info.resident_bytes += segment->bytes();
  info.resident_bytes += tail_.blocks().size() * TailBlock::Bytes(args_.shape) + early_.bytes();
  info.layer_tokens = layer_tokens_;
  return info;
}

}  // namespace attnd::engine
