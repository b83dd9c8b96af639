// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/sequence.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/sequence/magnitude.h"

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

// A sequence's place in the engine's table.
constexpr uint64_t kTableEntryBytes = 256;

// A segment's or block's places in the lists of its sequence; lists may be twice as long as needed.
// Views' lists are not counted.
constexpr uint64_t kListEntryBytes = 4 * sizeof(std::shared_ptr<const Segment>);

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
  // Whether the token is equal to the one at `place` of a run of pages.
  bool Equal(uint64_t token, uint32_t head, const std::byte* pages, uint64_t place) const {
    const bool keys_equal = std::memcmp(pages + geometry.KeyOffset(place), key(token, head),
                                        geometry.key_row_bytes) == 0;
    if (!geometry.stores_values() || !keys_equal) return keys_equal;
    return std::memcmp(pages + geometry.ValueOffset(place), value(token, head),
                       geometry.value_row_bytes) == 0;
  }
  const PageGeometry geometry;
  const std::byte* const keys;
  const std::byte* const values;
  const uint32_t kv_heads;
};

// For those who may choose blocks by what the step before them chose.
std::shared_ptr<attention::BlockRecall> MakeRecall(const OpenArgs& args, MemoryBudget* budget) {
  const bool two_levels =
      args.indexes.has_value() &&
      args.indexes->HasAll({attention::IndexKind::kBlocks64, attention::IndexKind::kLabels});
  if (!two_levels) return nullptr;
  const auto hold = [budget](uint64_t bytes) -> std::shared_ptr<const void> {
    auto reservation = budget->Reserve(bytes, "the blocks that a step chose");
    if (!reservation.ok()) return nullptr;
    return std::make_shared<Reservation>(*std::move(reservation));
  };
  return std::make_shared<attention::BlockRecall>(args.shape.layers, args.shape.kv_heads, hold);
}

// Of what belongs to a sequence whatever its length: the object and its place, its texts, a
// keep-set but for its positions, and the channels of its labels.
uint64_t ObjectBytes(absl::string_view tenant, const OpenArgs& args) {
  // NOLINTBEGIN(bugprone-unchecked-optional-access): Engine::Open sets them
  uint64_t bytes = sizeof(Sequence) + kTableEntryBytes + sizeof(attention::KeepSet) +
                   tenant.size() + args.fingerprint.size() + args.policy->preset.size() +
                   args.feature_maps_id.size() + args.label_channels_id.size() +
                   args.shape.layers * (sizeof(uint64_t) + sizeof(float));
  if (args.indexes->Has(attention::IndexKind::kLabels)) {
    bytes += uint64_t{args.shape.layers} * args.shape.kv_heads *
             attention::LabelChannels(args.shape) * sizeof(uint16_t);
  }
  // NOLINTEND(bugprone-unchecked-optional-access)
  return bytes;
}

float Greatest(std::span<const float> values) {
  float greatest = 0;
  for (const float value : values) greatest = std::max(greatest, value);
  return greatest;
}

// Raises each of `bounds` to at least its counterpart.
void RaiseAll(std::span<const float> others, float* bounds) {
  for (size_t i = 0; i < others.size(); ++i) bounds[i] = std::max(bounds[i], others[i]);
}

// [layers] greatest |k| of positions [begin, end), which the view's tail holds.
std::vector<float> KeyBoundsOf(const SequenceView& view, uint64_t begin, uint64_t end) {
  const PageGeometry geometry(view.shape);
  std::vector<float> bounds(view.shape.layers, 0);
  for (uint64_t position = begin; position < end;) {
    const uint64_t block = position / kTailBlockTokens;
    const uint64_t block_end = std::min(end, (block + 1) * kTailBlockTokens);
    const TailBlock& source = *view.tail[block - view.tail_begin / kTailBlockTokens];
    for (uint32_t layer = 0; layer < view.shape.layers; ++layer) {
      for (uint32_t head = 0; head < view.shape.kv_heads; ++head) {
        const float magnitude =
            KeyMagnitude(geometry, source.pages(layer, head), position % kTailBlockTokens,
                         block_end - block * kTailBlockTokens);
        bounds[layer] = std::max(bounds[layer], magnitude);
      }
    }
    position = block_end;
  }
  return bounds;
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
      key_bounds_(args_.shape.layers, 0),
      token_ids_(budget),
      recall_(MakeRecall(args_, budget)) {}

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

absl::StatusOr<uint64_t> Sequence::Append(WriterId writer, const NewTokens& tokens) {
  MutexLock lock(mutex_);
  ATTND_RETURN_IF_ERROR(CheckAppend(writer, tokens));
  ATTND_ASSIGN_OR_RETURN(TokenIds::Room room, MakeRoom(tokens));
  const uint64_t appended = Take(writer, tokens, std::move(room));
  if (appended > 0) newest_step_ = kNoStep;  // an upload follows it: its reply has been seen
  return appended;
}

absl::StatusOr<Snapshot> Sequence::AppendAndRead(WriterId writer, const NewTokens& tokens,
                                                 float query_magnitude) {
  MutexLock lock(mutex_);
  // Its answer cannot be given again: a segment's tokens are not in order, and some are estimated.
  if (tokens.first_position < tail_.begin) {
    return absl::FailedPreconditionError(absl::StrCat(
        "position ", tokens.first_position, " lies in a finished segment; steps from ", tail_.begin,
        " on can be repeated, the position expected is ", layer_tokens_[tokens.layer]));
  }
  ATTND_RETURN_IF_ERROR(CheckAppend(writer, tokens));
  ATTND_RETURN_IF_ERROR(
      CheckLogits(tokens.layer, query_magnitude, Greatest(tokens.key_magnitudes)));
  ATTND_ASSIGN_OR_RETURN(TokenIds::Room room, MakeRoom(tokens));
  Snapshot snapshot{View(), 0};
  snapshot.new_tokens = Take(writer, tokens, std::move(room));
  newest_step_ = tokens.first_position;
  return snapshot;
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
  ATTND_RETURN_IF_ERROR(CheckWriter(writer));
  ATTND_RETURN_IF_ERROR(CheckRepeat(tokens, repeated));
  return token_ids_.Check(tokens.first_position, tokens.token_ids);
}

// All that appending may fail at.
absl::StatusOr<TokenIds::Room> Sequence::MakeRoom(const NewTokens& tokens) {
  ATTND_ASSIGN_OR_RETURN(TokenIds::Room room,
                         token_ids_.MakeRoom(tokens.first_position, tokens.token_ids.size()));
  ATTND_RETURN_IF_ERROR(GrowTail(tokens.first_position + tokens.tokens));
  return room;
}

// Gives how many tokens are new.
uint64_t Sequence::Take(WriterId writer, const NewTokens& tokens, TokenIds::Room room) noexcept {
  uint64_t& length = layer_tokens_[tokens.layer];
  const uint64_t end = tokens.first_position + tokens.tokens;
  const uint64_t repeated = std::min(end, length) - tokens.first_position;
  writer_ = writer;
  Touch();
  token_ids_.Store(tokens.first_position, tokens.token_ids, std::move(room));
  Write(tokens, repeated);
  RaiseKeyBounds(tokens, repeated);
  length = std::max(length, end);
  return tokens.tokens - repeated;
}

// By those of the blocks that got new tokens; what they repeat is in their bounds already.
void Sequence::RaiseKeyBounds(const NewTokens& tokens, uint64_t repeated) {
  if (repeated == tokens.tokens) return;
  const uint64_t first_new = (tokens.first_position + repeated) / kTailBlockTokens;
  const uint64_t first_block = tokens.first_position / kTailBlockTokens;
  for (uint64_t block = first_new; block - first_block < tokens.key_magnitudes.size(); ++block) {
    const float magnitude = tokens.key_magnitudes[block - first_block];
    float& bound = tail_.key_bounds[(block - tail_.begin / kTailBlockTokens) * args_.shape.layers +
                                    tokens.layer];
    bound = std::max(bound, magnitude);
    key_bounds_[tokens.layer] = std::max(key_bounds_[tokens.layer], magnitude);
  }
}

absl::Status Sequence::CheckLogits(uint32_t layer, float query_magnitude,
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

// The first `repeated` tokens are already here: they must be equal.
absl::Status Sequence::CheckRepeat(const NewTokens& tokens, uint64_t repeated) {
  const uint64_t end = tokens.first_position + repeated;
  const uint64_t in_tail = std::clamp(tail_.begin, tokens.first_position, end);
  ATTND_RETURN_IF_ERROR(CheckWhole(tokens.first_position, in_tail));
  if (SegmentsHold(tokens, in_tail) && TailHolds(tokens, in_tail, end)) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(
      "position ", tokens.first_position, " of layer ", tokens.layer,
      " exists with other keys or values; the position expected is ", layer_tokens_[tokens.layer]));
}

// Whether positions [begin, end) of the tail are equal to the new tokens.
bool Sequence::TailHolds(const NewTokens& tokens, uint64_t begin, uint64_t end) {
  const NewRows rows(tokens, args_.shape);
  for (uint32_t head = 0; head < args_.shape.kv_heads; ++head) {
    for (uint64_t position = begin; position < end; ++position) {
      if (!rows.Equal(position - tokens.first_position, head,
                      TailPages(tokens.layer, head, position), position % kTailBlockTokens)) {
        return false;
      }
    }
  }
  return true;
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

// Makes the blocks for positions up to `end`; all of them or none.
absl::Status Sequence::GrowTail(uint64_t end) {
  const uint64_t needed =
      end == 0 ? 0 : (end - 1) / kTailBlockTokens + 1 - tail_.begin / kTailBlockTokens;
  if (end <= tail_.begin || needed <= tail_.blocks.size()) return absl::OkStatus();
  std::vector<std::shared_ptr<const TailBlock>> blocks;
  while (tail_.blocks.size() + blocks.size() < needed) {
    ATTND_ASSIGN_OR_RETURN(auto block, MakeTailBlock(args_.shape, budget_));
    blocks.push_back(std::move(block));
  }
  const size_t bounds = needed * args_.shape.layers;
  if (needed > tail_.blocks.capacity()) tail_.blocks.reserve(2 * needed);
  if (bounds > tail_.key_bounds.capacity()) tail_.key_bounds.reserve(2 * bounds);
  ATTND_RETURN_IF_ERROR(HoldBooks(needed, segments_.size()));
  tail_.key_bounds.resize(bounds, 0);
  tail_.blocks.insert(tail_.blocks.end(), blocks.begin(), blocks.end());
  view_.reset();
  return absl::OkStatus();
}

// Bytes of the lists for so many blocks and segments.
absl::Status Sequence::HoldBooks(size_t blocks, size_t segments) {
  const uint64_t entry = kListEntryBytes + 2 * sizeof(float) * args_.shape.layers;
  return budget_->Resize(&books_, (blocks + segments) * entry, "a sequence's lists");
}

std::byte* Sequence::TailPages(uint32_t layer, uint32_t kv_head, uint64_t position) {
  return tail_.blocks[position / kTailBlockTokens - tail_.begin / kTailBlockTokens]->pages(layer,
                                                                                           kv_head);
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
      if (!g.stores_values()) continue;
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
  Touch();
  return Snapshot{View(), 0};
}

std::shared_ptr<const SequenceView> Sequence::View() {
  if (view_ == nullptr) {
    auto view = std::make_shared<SequenceView>();
    view->shape = args_.shape;
    view->indexes = indexes();
    view->owner = args_.backend;
    view->recall = recall_;
    view->label_choice = LabelsToCome();
    view->keep = keep_;
    view->feature_maps = args_.feature_maps;
    view->segments = segments_;
    view->tail = tail_.blocks;
    view->tail_begin = tail_.begin;
    view_ = std::move(view);
  }
  return view_;
}

std::shared_ptr<const attention::LabelChoice> Sequence::LabelsToCome() {
  if (!indexes().Has(attention::IndexKind::kLabels)) return nullptr;
  if (label_choice_ == nullptr && !segments_.empty()) {
    label_choice_ = attention::LabelChoiceOf(*segments_.front());
  }
  if (label_choice_ != nullptr) return label_choice_;
  if (args_.label_channels != nullptr) return args_.label_channels;
  if (observed_magnitudes_.empty()) return nullptr;
  auto choice = std::make_shared<attention::LabelChoice>();
  choice->query_magnitudes = observed_magnitudes_;
  return choice;
}

uint64_t Sequence::CommittedTokens() const {
  return *std::min_element(layer_tokens_.begin(), layer_tokens_.end());
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

// ---- observed queries ----

absl::Status Sequence::Observe(WriterId writer, uint32_t layer,
                               std::shared_ptr<const ObservedLayer> queries,
                               std::span<const float> head_magnitudes, float magnitude) {
  MutexLock lock(mutex_);
  ATTND_RETURN_IF_ERROR(CheckWriter(writer));
  ATTND_RETURN_IF_ERROR(CheckLogits(layer, magnitude, 0));
  const bool weighs_labels = indexes().Has(attention::IndexKind::kLabels);
  const size_t width = head_magnitudes.size();
  if (weighs_labels) {
    // The magnitudes, and a view's copy.
    const uint64_t bytes = uint64_t{2} * args_.shape.layers * width * sizeof(float);
    ATTND_RETURN_IF_ERROR(
        budget_->Resize(&observed_memory_, bytes, "the magnitudes of observed queries"));
  }
  writer_ = writer;
  Touch();
  observed_.resize(args_.shape.layers);
  observed_[layer] = std::move(queries);
  if (!weighs_labels) return absl::OkStatus();
  // Channels of layers without queries count by their keys.
  observed_magnitudes_.resize(args_.shape.layers * width, 1.0f);
  std::copy(head_magnitudes.begin(), head_magnitudes.end(),
            observed_magnitudes_.begin() + static_cast<ptrdiff_t>(layer * width));
  view_.reset();
  return absl::OkStatus();
}

std::optional<PromptObservation> Sequence::Observation() {
  MutexLock lock(mutex_);
  PromptObservation prompt;
  prompt.tokens = CommittedTokens();
  const bool complete =
      !observed_.empty() && std::all_of(observed_.begin(), observed_.end(), [&](const auto& layer) {
        return layer != nullptr && layer->tokens <= prompt.tokens;
      });
  if (!complete) return std::nullopt;
  prompt.view = View();
  prompt.layers = observed_;
  return prompt;
}

void Sequence::ForgetObservation(const PromptObservation& seen) {
  MutexLock lock(mutex_);
  if (observed_ == seen.layers) observed_.clear();
}

bool Sequence::has_keep_set() {
  MutexLock lock(mutex_);
  return keep_ != nullptr;
}

absl::Status Sequence::CheckKeepSet(const attention::Policy& policy) {
  if (policy.selector != attention::Selector::kKeepSet) return absl::OkStatus();
  MutexLock lock(mutex_);
  if (segments_.empty() || (keep_ != nullptr && keep_->Serves(policy))) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "policy.preset ", policy.preset,
      " needs a keep-set, which is made when a prompt is complete: open the sequence with this "
      "policy and its parameters, and send observed_queries of every layer with the prompt"));
}

SequenceInfo Sequence::Info() {
  MutexLock lock(mutex_);
  SequenceInfo info;
  info.id = id_;
  info.args = args_;
  info.committed_tokens = CommittedTokens();
  info.segmented_tokens = tail_.begin;
  info.segments = static_cast<uint32_t>(segments_.size());
  for (const auto& segment : segments_) info.resident_bytes += segment->bytes();
  info.resident_bytes += tail_.blocks.size() * TailBlock::Bytes(args_.shape);
  info.layer_tokens = layer_tokens_;
  return info;
}

// ---- segments ----

uint64_t Sequence::SegmentsEnd() const {
  const uint64_t committed = CommittedTokens();
  return std::min(committed - std::min<uint64_t>(committed, policy().window), newest_step_);
}

bool Sequence::HasSegment(uint32_t min_tokens) {
  MutexLock lock(mutex_);
  return SegmentsEnd() >= tail_.begin + min_tokens;
}

bool Sequence::BuildDue(uint32_t min_tokens) {
  MutexLock lock(mutex_);
  return SegmentsEnd() >= tail_.begin + min_tokens && CommittedTokens() >= build_from_;
}

void Sequence::DelayBuild() {
  MutexLock lock(mutex_);
  build_delay_ = std::clamp(2 * build_delay_, kBuildDelayMin, kBuildDelayMax);
  build_from_ = CommittedTokens() + build_delay_;
}

std::optional<SegmentJob> Sequence::NextSegment(uint32_t min_tokens, uint32_t max_tokens) {
  MutexLock lock(mutex_);
  const uint64_t end = SegmentsEnd();
  if (end < tail_.begin + min_tokens) return std::nullopt;
  SegmentJob job;
  job.tokens = static_cast<uint32_t>(std::min<uint64_t>(max_tokens, end - tail_.begin));
  job.unclustered = tail_.begin == 0 ? policy().sink : 0;
  job.view = View();
  return job;
}

bool Sequence::Install(const SegmentJob& job, std::shared_ptr<const Segment> segment) {
  // The bounds of the job's whole blocks are known; those of the parts at its ends are looked up
  // here, in positions that are never written again.
  const uint64_t begin = job.view->tail_begin;
  const uint64_t end = begin + job.tokens;
  const uint64_t first_whole = (begin + kTailBlockTokens - 1) / kTailBlockTokens;
  const uint64_t end_whole = std::max(first_whole, end / kTailBlockTokens);
  std::vector<float> bounds =
      KeyBoundsOf(*job.view, begin, std::min(end, first_whole * kTailBlockTokens));
  RaiseAll(KeyBoundsOf(*job.view, std::max(begin, end_whole * kTailBlockTokens), end),
           bounds.data());

  MutexLock lock(mutex_);
  if (!StillFits(job)) return false;
  const uint32_t layers = args_.shape.layers;
  const uint64_t first_block = begin / kTailBlockTokens;
  for (uint64_t block = first_whole; block < end_whole; ++block) {
    RaiseAll(tail_.BoundsOf(block - first_block, layers), bounds.data());
  }
  if (segments_.size() == segments_.capacity()) segments_.reserve(2 * segments_.size() + 1);
  segment_key_bounds_.insert(segment_key_bounds_.end(), bounds.begin(), bounds.end());
  const uint64_t dropped = end / kTailBlockTokens - first_block;
  // A segment takes the place of several blocks: the lists shrink, which cannot fail.
  HoldBooks(tail_.blocks.size() - dropped, segments_.size() + 1).IgnoreError();
  segments_.push_back(std::move(segment));
  CountSegments();
  tail_.DropBlocks(dropped, layers);
  tail_.begin = end;
  build_from_ = build_delay_ = 0;
  view_.reset();
  return true;
}

// Whether the tokens that a job was made from are still there, committed and outside the window.
bool Sequence::StillFits(const SegmentJob& job) const {
  // A truncation may have taken the tokens away, and others may have come in their place: the
  // blocks then differ. A truncation keeps a block only if it keeps all of its positions, which are
  // never written again; it copies or drops the others. The job's view holds the old blocks, so
  // that no new one can have the address of an old one.
  const uint64_t end = tail_.begin + job.tokens;
  if (tail_.begin != job.view->tail_begin || CommittedTokens() < end + policy().window)
    return false;
  // A step that is being repeated must stay in the tail until a newer one comes.
  if (end > newest_step_) return false;
  const uint64_t blocks = (end - 1) / kTailBlockTokens + 1 - tail_.begin / kTailBlockTokens;
  return tail_.blocks.size() >= blocks &&
         std::equal(tail_.blocks.begin(), tail_.blocks.begin() + static_cast<ptrdiff_t>(blocks),
                    job.view->tail.begin());
}

}  // namespace attnd::engine
