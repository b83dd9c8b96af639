// SPDX-License-Identifier: Apache-2.0
//
// Sequence: shorter histories, by truncation and fork.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/magnitude.h"
#include "engine/sequence.h"

namespace attnd::engine {
namespace {

using attention::kTailBlockTokens;
using attention::PageGeometry;
using attention::TailBlock;

// Copies token `from` of a run of pages to place `to` of another.
void CopyToken(const PageGeometry& geometry, const std::byte* source, uint64_t from,
               std::byte* target, uint64_t to) {
  std::memcpy(target + geometry.KeyOffset(to), source + geometry.KeyOffset(from),
              geometry.key_row_bytes);
  std::memcpy(target + geometry.ValueOffset(to), source + geometry.ValueOffset(from),
              geometry.value_row_bytes);
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
  if (length > Committed()) {
    return absl::FailedPreconditionError(absl::StrCat("length is ", length, "; the sequence has ",
                                                      Committed(), " committed tokens"));
  }
  Prefix prefix;
  prefix.segments = SegmentsKept(length);
  const uint64_t begin = prefix.segments == 0 ? 0 : segments_[prefix.segments - 1]->end_position();
  ATTND_ASSIGN_OR_RETURN(prefix.tail, TailFor(begin, length));
  return prefix;
}

absl::StatusOr<uint64_t> Sequence::Truncate(uint64_t length) {
  MutexLock lock(mutex_);
  ATTND_ASSIGN_OR_RETURN(Prefix prefix, PrefixOf(length));
  ATTND_RETURN_IF_ERROR(HoldBooks(prefix.tail.blocks.size(), prefix.segments));
  segments_.resize(prefix.segments);
  segment_key_bounds_.resize(prefix.segments * args_.shape.layers);
  tail_ = std::move(prefix.tail);
  SumUpKeyBounds();
  std::fill(layer_tokens_.begin(), layer_tokens_.end(), length);
  newest_step_ = std::min(newest_step_, length);
  build_from_ = build_delay_ = 0;
  token_ids_.Truncate(length);
  view_.reset();
  return tail_.begin;
}

absl::Status Sequence::ForkInto(std::optional<uint64_t> wanted, Sequence* child) {
  MutexLock lock(mutex_);
  const uint64_t length = wanted.value_or(Committed());
  ATTND_ASSIGN_OR_RETURN(Prefix prefix, PrefixOf(length));
  ATTND_ASSIGN_OR_RETURN(TokenIds token_ids, token_ids_.Prefix(length));
  MutexLock child_lock(child->mutex_);
  ATTND_RETURN_IF_ERROR(child->HoldBooks(prefix.tail.blocks.size(), prefix.segments));
  const auto segments = static_cast<ptrdiff_t>(prefix.segments);
  child->segments_.assign(segments_.begin(), segments_.begin() + segments);
  child->segment_key_bounds_.assign(segment_key_bounds_.begin(),
                                    segment_key_bounds_.begin() + segments * args_.shape.layers);
  child->tail_ = std::move(prefix.tail);
  child->SumUpKeyBounds();
  std::fill(child->layer_tokens_.begin(), child->layer_tokens_.end(), length);
  child->token_ids_ = std::move(token_ids);
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
        CopyToken(geometry, pages, place, target->blocks[number]->pages(layer, head), place);
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
          CopyToken(geometry, pages, slot, target->blocks[block]->pages(layer, head),
                    position % kTailBlockTokens);
          float& bound = target->key_bounds[block * args_.shape.layers + layer];
          bound = std::max(bound, KeyMagnitude(geometry, pages, slot, slot + 1));
        }
      }
    }
  }
}

}  // namespace attnd::engine
