// SPDX-License-Identifier: Apache-2.0
//
// Sequence: other histories: shorter ones, by truncation and fork, and those that were written
// down.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/sequence/sequence.h"

namespace attnd::engine {

namespace {

// DataLoss unless the segments, which may come from files, are a chain from position 0 on of this
// shape and these indexes, each with bounds of its keys, and only the first has a sink.
absl::Status CheckChain(const RestoredSegments& restored, const ModelShape& shape,
                        const attention::IndexSet& indexes) {
  uint64_t end = 0;
  for (const auto& segment : restored.segments) {
    const bool follows = segment->first_position() == end && segment->shape() == shape &&
                         segment->indexes() == indexes && (end == 0 || segment->unclustered() == 0);
    if (!follows) {
      return absl::DataLossError(
          absl::StrCat("the segment from position ", segment->first_position(),
                       " on is none that can follow ", end, " tokens of the sequence"));
    }
    end = segment->end_position();
  }
  if (restored.key_bounds.size() == restored.segments.size() * shape.layers) {
    return absl::OkStatus();
  }
  return absl::DataLossError("segments have no bounds of their keys");
}

}  // namespace

// Segments that a history of `length` tokens keeps: those outside its window.
size_t Sequence::SegmentsKept(uint64_t length) const {
  size_t kept = 0;
  while (kept < segments_.size() && segments_[kept]->end_position() + policy().window <= length) {
    ++kept;
  }
  return kept;
}

absl::StatusOr<Sequence::Prefix> Sequence::PrefixOf(uint64_t length) {
  if (length > KeptTokens()) {
    return absl::FailedPreconditionError(absl::StrCat("length is ", length, "; the sequence has ",
                                                      KeptTokens(), " committed tokens"));
  }
  Prefix prefix{SegmentsKept(length), Tail(args_.shape)};
  const uint64_t begin = prefix.segments == 0 ? 0 : segments_[prefix.segments - 1]->end_position();
  ATTND_RETURN_IF_ERROR(CheckWhole(begin, length));
  ATTND_ASSIGN_OR_RETURN(prefix.tail, tail_.CopyOf(begin, length, segments_, budget_));
  return prefix;
}

absl::StatusOr<uint64_t> Sequence::Truncate(uint64_t length) {
  std::vector<std::shared_ptr<const attention::Segment>> dropped;  // die after the lock
  EarlySegments early;                                             // likewise
  MutexLock lock(mutex_);
  ATTND_ASSIGN_OR_RETURN(Prefix prefix, PrefixOf(length));
  dropped.reserve(segments_.size());  // nothing may fail once something has changed
  early = early_.Before(WindowBegin(length));
  attention::PolicyState state = state_.Truncated(length, prefix.segments > 0);
  ATTND_RETURN_IF_ERROR(HoldBooks(prefix.tail.blocks().size(), prefix.segments));
  const auto kept = segments_.begin() + static_cast<ptrdiff_t>(prefix.segments);
  dropped.assign(kept, segments_.end());
  segments_.resize(prefix.segments);
  CountSegments();
  segment_key_bounds_.resize(prefix.segments * args_.shape.layers);
  tail_ = std::move(prefix.tail);
  std::swap(early_, early);
  SumUpKeyBounds();
  std::fill(layer_tokens_.begin(), layer_tokens_.end(), length);
  layer_written_ = layer_tokens_;
  newest_step_ = std::min(newest_step_, length);
  state_ = std::move(state);
  segment_delay_ = early_delay_ = BuildDelay();
  token_ids_.Truncate(length);
  view_.reset();
  CheckInvariants();
  return tail_.begin();
}

absl::Status Sequence::ForkInto(std::optional<uint64_t> wanted, Sequence* child) {
  MutexLock lock(mutex_);
  const uint64_t length = wanted.value_or(KeptTokens());
  ATTND_ASSIGN_OR_RETURN(Prefix prefix, PrefixOf(length));
  ATTND_ASSIGN_OR_RETURN(TokenIds token_ids, token_ids_.Prefix(length));
  MutexLock child_lock(child->mutex_);
  ATTND_RETURN_IF_ERROR(child->HoldBooks(prefix.tail.blocks().size(), prefix.segments));
  const auto segments = static_cast<ptrdiff_t>(prefix.segments);
  child->segments_.assign(segments_.begin(), segments_.begin() + segments);
  child->CountSegments();
  child->segment_key_bounds_.assign(segment_key_bounds_.begin(),
                                    segment_key_bounds_.begin() + segments * args_.shape.layers);
  child->tail_ = std::move(prefix.tail);
  child->early_ = early_.Before(WindowBegin(length));
  child->SumUpKeyBounds();
  std::fill(child->layer_tokens_.begin(), child->layer_tokens_.end(), length);
  child->layer_written_ = child->layer_tokens_;
  child->token_ids_ = std::move(token_ids);
  child->state_ = state_.Forked(length, prefix.segments > 0);
  child->view_.reset();
  child->CheckInvariants();
  return absl::OkStatus();
}

HistorySnapshot Sequence::SnapshotHistory() {
  MutexLock lock(mutex_);
  HistorySnapshot history;
  history.view = HistoryView();
  history.committed = KeptTokens();
  history.segment_key_bounds = segment_key_bounds_;
  history.token_ids = token_ids_.Runs(0, history.committed);
  return history;
}

RestoredSegments Sequence::PrefixFor(const Sequence& fresh, std::span<const uint32_t> token_ids,
                                     const RestoredSegments& known) {
  RestoredSegments prefix;
  const bool may_share = !args_.fingerprint.empty() && tenant_ == fresh.tenant() &&
                         args_.fingerprint == fresh.args().fingerprint &&
                         args_.shape == fresh.shape() && args_.shard == fresh.args().shard &&
                         indexes() == fresh.indexes() &&
                         fresh.args().model_parts.CanReadSegmentsOf(args_.model_parts);
  if (!may_share) return prefix;
  MutexLock lock(mutex_);
  if (tail_.begin() <= known.tokens()) return prefix;  // where the last segment ends
  for (const auto& segment : segments_) {
    const uint64_t begin = segment->first_position();
    const bool fits = segment->end_position() <= token_ids.size() &&
                      segment->unclustered() == (begin == 0 ? fresh.policy().sink : 0);
    if (!fits || (segment->paged() && absl::IsDataLoss(segment->paged_payload()->status()))) break;
    const size_t i = prefix.segments.size();
    const bool same = i < known.segments.size() && known.segments[i] == segment;
    if (!same && !token_ids_.Holds(begin, token_ids.subspan(begin, segment->tokens()))) break;
    prefix.segments.push_back(segment);
  }
  if (prefix.tokens() <= known.tokens()) return RestoredSegments();
  prefix.key_bounds.assign(segment_key_bounds_.begin(),
                           segment_key_bounds_.begin() +
                               static_cast<ptrdiff_t>(prefix.segments.size() * args_.shape.layers));
  return prefix;
}

absl::Status Sequence::Restore(RestoredSegments restored) {
  ATTND_RETURN_IF_ERROR(CheckChain(restored, args_.shape, indexes()));
  ATTND_RETURN_IF_ERROR(AddTokenIds(restored.token_ids));
  for (const auto& segment : restored.segments) Expect(*segment);
  MutexLock lock(mutex_);
  ATTND_RETURN_IF_ERROR(HoldBooks(0, restored.segments.size()));
  segments_ = std::move(restored.segments);
  CountSegments();
  segment_key_bounds_ = std::move(restored.key_bounds);
  SumUpKeyBounds();
  tail_ = Tail(args_.shape, segments_.empty() ? 0 : segments_.back()->end_position());
  std::fill(layer_tokens_.begin(), layer_tokens_.end(), tail_.begin());
  layer_written_ = layer_tokens_;
  view_.reset();
  CheckInvariants();
  return absl::OkStatus();
}

absl::Status Sequence::AddTokenIds(std::span<const TokenIds::Run> runs) {
  MutexLock lock(mutex_);
  for (const TokenIds::Run& run : runs) {
    ATTND_ASSIGN_OR_RETURN(auto room, token_ids_.MakeRoom(run.first_position, run.ids.size()));
    token_ids_.Store(run.first_position, run.ids, std::move(room));
  }
  return absl::OkStatus();
}

void Sequence::SumUpKeyBounds() {
  const size_t layers = args_.shape.layers;
  std::fill(key_bounds_.begin(), key_bounds_.end(), 0.0f);
  for (const std::span<const float> parts :
       {std::span<const float>(segment_key_bounds_), tail_.key_bounds()}) {
    for (size_t i = 0; i < parts.size(); ++i) {
      float& bound = key_bounds_[i % layers];
      bound = std::max(bound, parts[i]);
    }
  }
}

}  // namespace attnd::engine
