// SPDX-License-Identifier: Apache-2.0
//
// Sequence: other histories: shorter ones, by truncation and fork, and those that were written
// down.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/sequence/magnitude.h"
#include "engine/sequence/sequence.h"

namespace attnd::engine {
namespace {

using attention::kTailBlockTokens;
using attention::PageGeometry;
using attention::TailBlock;

// What a history of `length` tokens has of a keep-set, null if it has none: tokens that come later
// are new ones. The list of positions is shared.
std::shared_ptr<const attention::KeepSet> ShortKeepSet(
    const std::shared_ptr<const attention::KeepSet>& keep, uint64_t length) {
  if (keep == nullptr || keep->ranked_tokens <= length) return keep;
  auto shorter = std::make_shared<attention::KeepSet>(*keep);
  shorter->ranked_tokens = length;
  return shorter;
}

}  // namespace

void Sequence::SetKeepSet(const std::shared_ptr<const attention::KeepSet>& keep,
                          const attention::SequenceView& chosen_from) {
  MutexLock lock(mutex_);
  const auto& segments = chosen_from.segments;
  size_t same = 0;
  while (same < std::min(segments.size(), segments_.size()) &&
         segments[same]->id() == segments_[same]->id()) {
    ++same;
  }
  const uint64_t ranked = same == 0 ? 0 : segments[same - 1]->end_position();
  keep_ = ShortKeepSet(keep, ranked);
  view_.reset();
}

// Segments that a history of `length` tokens keeps: those outside its window.
size_t Sequence::SegmentsKept(uint64_t length) const {
  size_t kept = 0;
  while (kept < segments_.size() && segments_[kept]->end_position() + policy().window <= length) {
    ++kept;
  }
  return kept;
}

// For whoever copies from segments: their callers bring them whole first.
absl::Status Sequence::CheckWhole(uint64_t begin, uint64_t end) const {
  for (const auto& segment : segments_) {
    if (!segment->paged() || segment->end_position() <= begin || segment->first_position() >= end) {
      continue;
    }
    return absl::AbortedError(absl::StrCat("positions ", segment->first_position(), "..",
                                           segment->end_position() - 1,
                                           " have been moved to disk meanwhile: try again"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Sequence::Prefix> Sequence::PrefixOf(uint64_t length) {
  if (length > CommittedTokens()) {
    return absl::FailedPreconditionError(absl::StrCat("length is ", length, "; the sequence has ",
                                                      CommittedTokens(), " committed tokens"));
  }
  Prefix prefix;
  prefix.segments = SegmentsKept(length);
  const uint64_t begin = prefix.segments == 0 ? 0 : segments_[prefix.segments - 1]->end_position();
  ATTND_RETURN_IF_ERROR(CheckWhole(begin, length));
  ATTND_ASSIGN_OR_RETURN(prefix.tail, TailFor(begin, length));
  return prefix;
}

absl::StatusOr<uint64_t> Sequence::Truncate(uint64_t length) {
  std::vector<std::shared_ptr<const attention::Segment>> dropped;  // die after the lock
  MutexLock lock(mutex_);
  ATTND_ASSIGN_OR_RETURN(Prefix prefix, PrefixOf(length));
  dropped.reserve(segments_.size());  // nothing may fail once something has changed
  auto recall = recall_ != nullptr ? recall_->Prefix(length) : nullptr;
  auto keep = ShortKeepSet(keep_, length);
  ATTND_RETURN_IF_ERROR(HoldBooks(prefix.tail.blocks.size(), prefix.segments));
  const auto kept = segments_.begin() + static_cast<ptrdiff_t>(prefix.segments);
  dropped.assign(kept, segments_.end());
  segments_.resize(prefix.segments);
  CountSegments();
  segment_key_bounds_.resize(prefix.segments * args_.shape.layers);
  tail_ = std::move(prefix.tail);
  SumUpKeyBounds();
  std::fill(layer_tokens_.begin(), layer_tokens_.end(), length);
  newest_step_ = std::min(newest_step_, length);
  recall_ = std::move(recall);
  keep_ = std::move(keep);
  if (segments_.empty()) label_choice_.reset();  // the next first segment's are its own
  build_from_ = build_delay_ = 0;
  token_ids_.Truncate(length);
  view_.reset();
  return tail_.begin;
}

absl::Status Sequence::ForkInto(std::optional<uint64_t> wanted, Sequence* child) {
  MutexLock lock(mutex_);
  const uint64_t length = wanted.value_or(CommittedTokens());
  ATTND_ASSIGN_OR_RETURN(Prefix prefix, PrefixOf(length));
  ATTND_ASSIGN_OR_RETURN(TokenIds token_ids, token_ids_.Prefix(length));
  MutexLock child_lock(child->mutex_);
  ATTND_RETURN_IF_ERROR(child->HoldBooks(prefix.tail.blocks.size(), prefix.segments));
  const auto segments = static_cast<ptrdiff_t>(prefix.segments);
  child->segments_.assign(segments_.begin(), segments_.begin() + segments);
  child->CountSegments();
  child->segment_key_bounds_.assign(segment_key_bounds_.begin(),
                                    segment_key_bounds_.begin() + segments * args_.shape.layers);
  child->tail_ = std::move(prefix.tail);
  child->SumUpKeyBounds();
  std::fill(child->layer_tokens_.begin(), child->layer_tokens_.end(), length);
  child->token_ids_ = std::move(token_ids);
  if (recall_ != nullptr) child->recall_ = recall_->Prefix(length);
  child->keep_ = ShortKeepSet(keep_, length);
  if (prefix.segments > 0) child->label_choice_ = label_choice_;
  return absl::OkStatus();
}

std::vector<std::shared_ptr<const attention::Segment>> Sequence::PagedWithin(uint64_t begin,
                                                                             uint64_t end) {
  if (!has_paged_segments()) return {};
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<const attention::Segment>> paged;
  for (const auto& segment : segments_) {
    const bool within = segment->end_position() > begin && segment->first_position() < end;
    if (within && segment->paged()) paged.push_back(segment);
  }
  return paged;
}

std::vector<std::shared_ptr<const attention::Segment>> Sequence::PagedForLength(uint64_t length) {
  uint64_t begin = 0;
  {
    MutexLock lock(mutex_);
    const size_t kept = SegmentsKept(length);
    if (kept > 0) begin = segments_[kept - 1]->end_position();
  }
  return PagedWithin(begin, length);
}

void Sequence::SwapSegments(std::span<const Swap> swaps) {
  std::vector<std::shared_ptr<const attention::Segment>> replaced;  // die after the lock
  MutexLock lock(mutex_);
  for (auto& segment : segments_) {
    for (const Swap& swap : swaps) {
      if (segment != swap.before) continue;
      replaced.push_back(std::exchange(segment, swap.after));
      break;
    }
  }
  if (replaced.empty()) return;
  if (!swaps.front().after->paged()) Touch();  // it is wanted whole now
  view_.reset();
  CountSegments();
}

void Sequence::CountSegments() {
  const auto paged = static_cast<uint32_t>(
      std::count_if(segments_.begin(), segments_.end(), [](const auto& s) { return s->paged(); }));
  paged_segments_.store(paged, std::memory_order_relaxed);
  whole_segments_.store(static_cast<uint32_t>(segments_.size()) - paged, std::memory_order_relaxed);
}

HistorySnapshot Sequence::SnapshotHistory() {
  MutexLock lock(mutex_);
  HistorySnapshot history;
  history.view = View();
  history.committed = CommittedTokens();
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
                         args_.feature_maps_id == fresh.args().feature_maps_id;
  if (!may_share) return prefix;
  MutexLock lock(mutex_);
  if (tail_.begin <= known.tokens()) return prefix;  // where the last segment ends
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
  ATTND_RETURN_IF_ERROR(AddTokenIds(restored.token_ids));
  MutexLock lock(mutex_);
  ATTND_RETURN_IF_ERROR(HoldBooks(0, restored.segments.size()));
  segments_ = std::move(restored.segments);
  CountSegments();
  segment_key_bounds_ = std::move(restored.key_bounds);
  SumUpKeyBounds();
  tail_.begin = segments_.empty() ? 0 : segments_.back()->end_position();
  std::fill(layer_tokens_.begin(), layer_tokens_.end(), tail_.begin);
  view_.reset();
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
  for (const std::vector<float>* parts : {&segment_key_bounds_, &tail_.key_bounds}) {
    for (size_t i = 0; i < parts->size(); ++i) {
      float& bound = key_bounds_[i % layers];
      bound = std::max(bound, (*parts)[i]);
    }
  }
}

// A tail with positions [begin, length): full blocks are shared; those that will be written again,
// or that need tokens from a segment, are new.
absl::StatusOr<Sequence::Tail> Sequence::TailFor(uint64_t begin, uint64_t length) {
  const uint32_t layers = args_.shape.layers;
  Tail tail;
  tail.begin = begin;
  for (uint64_t block = begin / kTailBlockTokens; block * kTailBlockTokens < length; ++block) {
    const uint64_t first = std::max(begin, block * kTailBlockTokens);
    const uint64_t end = (block + 1) * kTailBlockTokens;
    tail.key_bounds.resize(tail.key_bounds.size() + layers, 0);
    if (first >= tail_.begin && end <= length) {
      const uint64_t old = block - tail_.begin / kTailBlockTokens;
      tail.blocks.push_back(tail_.blocks[old]);
      std::copy_n(tail_.BoundsOf(old, layers).begin(), layers, tail.key_bounds.end() - layers);
      continue;
    }
    ATTND_ASSIGN_OR_RETURN(auto copy, MakeTailBlock(args_.shape, budget_));
    tail.blocks.push_back(std::move(copy));
    const uint64_t last = std::min(end, length);
    if (last > tail_.begin) CopyFromTail(std::max(first, tail_.begin), last, &tail);
  }
  CopyFromSegments(std::min(length, tail_.begin), &tail);
  return tail;
}

// Positions [begin, end), all of one block, into the same block of `target`.
void Sequence::CopyFromTail(uint64_t begin, uint64_t end, Tail* target) {
  const PageGeometry geometry(args_.shape);
  const uint64_t block = begin / kTailBlockTokens;
  const TailBlock& source = *tail_.blocks[block - tail_.begin / kTailBlockTokens];
  const uint64_t number = block - target->begin / kTailBlockTokens;
  for (uint32_t layer = 0; layer < args_.shape.layers; ++layer) {
    float& bound = target->key_bounds[number * args_.shape.layers + layer];
    for (uint32_t head = 0; head < args_.shape.kv_heads; ++head) {
      const std::byte* pages = source.pages(layer, head);
      for (uint64_t position = begin; position < end; ++position) {
        const uint64_t place = position % kTailBlockTokens;
        geometry.CopyToken(pages, place, target->blocks[number]->pages(layer, head), place);
      }
      const uint64_t place = begin % kTailBlockTokens;
      bound = std::max(bound, KeyMagnitude(geometry, pages, place, place + (end - begin)));
    }
  }
}

// Positions [target->begin, end) of the segments.
void Sequence::CopyFromSegments(uint64_t end, Tail* target) {
  const PageGeometry geometry(args_.shape);
  const uint64_t begin = target->begin;
  for (const auto& segment : segments_) {
    if (segment->end_position() <= begin || segment->first_position() >= end) continue;
    for (uint32_t layer = 0; layer < args_.shape.layers; ++layer) {
      for (uint32_t head = 0; head < args_.shape.kv_heads; ++head) {
        const std::byte* pages = segment->pages(layer, head);
        const std::span<const uint16_t> positions = segment->positions(layer, head);
        for (uint64_t slot = 0; slot < positions.size(); ++slot) {
          const uint64_t position = segment->first_position() + positions[slot];
          if (position < begin || position >= end) continue;
          const uint64_t block = position / kTailBlockTokens - begin / kTailBlockTokens;
          geometry.CopyToken(pages, slot, target->blocks[block]->pages(layer, head),
                             position % kTailBlockTokens);
          float& bound = target->key_bounds[block * args_.shape.layers + layer];
          bound = std::max(bound, KeyMagnitude(geometry, pages, slot, slot + 1));
        }
      }
    }
  }
}

}  // namespace attnd::engine
