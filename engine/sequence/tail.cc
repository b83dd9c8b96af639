// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/tail.h"

#include <glog/logging.h>

#include <algorithm>
#include <utility>

#include "common/status.h"
#include "engine/sequence/held.h"
#include "engine/sequence/magnitude.h"

namespace attnd::engine {
namespace {

using attention::kTailBlockTokens;
using attention::PageGeometry;
using attention::TailBlock;

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

}  // namespace

size_t Tail::BlockOf(uint64_t position) const {
  const size_t block = position / kTailBlockTokens - begin_ / kTailBlockTokens;
  DCHECK_GE(position, begin_);
  DCHECK_LT(block, blocks_.size());
  return block;
}

std::byte* Tail::Pages(uint32_t layer, uint32_t kv_head, uint64_t position) const {
  return blocks_[BlockOf(position)]->pages(layer, kv_head);
}

absl::StatusOr<Tail::Blocks> Tail::MakeBlocks(uint64_t end, MemoryBudget* budget) {
  Blocks more;
  if (end <= blocks_end()) return more;
  const uint64_t needed = BlocksOf(begin_, end);
  while (blocks_.size() + more.size() < needed) {
    ATTND_ASSIGN_OR_RETURN(auto block, MakeTailBlock(shape_, budget));
    more.push_back(std::move(block));
  }
  const size_t bounds = needed * shape_.layers;
  if (needed > blocks_.capacity()) blocks_.reserve(2 * needed);
  if (bounds > key_bounds_.capacity()) key_bounds_.reserve(2 * bounds);
  return more;
}

void Tail::AddBlocks(const Blocks& more) noexcept {
  CHECK_GE(blocks_.capacity(), blocks_.size() + more.size());
  blocks_.insert(blocks_.end(), more.begin(), more.end());
  key_bounds_.resize(blocks_.size() * shape_.layers, 0);
}

void Tail::Write(const NewTokens& tokens, uint64_t skip) {
  if (skip == tokens.tokens) return;
  CHECK_GE(tokens.first_position + skip, begin_);
  CHECK_LE(tokens.end_position(), blocks_end());
  const NewRows rows(tokens, shape_);
  for (uint64_t i = skip; i < tokens.tokens; ++i) {
    const uint64_t position = tokens.first_position + i;
    for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
      rows.CopyTo(i, head, Pages(tokens.layer, head, position), position % kTailBlockTokens);
    }
  }
}

void Tail::Warm(uint32_t layer, uint64_t position, uint64_t tokens) const {
  const attention::PageGeometry geometry(shape_);
  constexpr size_t kLineBytes = 64;  // of a cache
  const auto ask = [](const std::byte* row, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(row + at, 1);
  };
  const uint64_t begin = std::max(position, begin_);
  const uint64_t end = std::min(position + tokens, blocks_end());
  for (uint64_t token = begin; token < end; ++token) {
    const uint64_t place = token % kTailBlockTokens;
    for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
      const std::byte* const pages = Pages(layer, head, token);
      ask(pages + geometry.KeyOffset(place), geometry.key_row_bytes);
      if (!geometry.stores_values()) continue;
      ask(pages + geometry.ValueOffset(place), geometry.value_row_bytes);
    }
  }
}

float Tail::RaiseKeyBounds(const NewTokens& tokens, uint64_t skip) {
  if (skip == tokens.tokens) return 0;
  float greatest = 0;
  const uint64_t first_new = (tokens.first_position + skip) / kTailBlockTokens;
  const uint64_t first_block = tokens.first_position / kTailBlockTokens;
  for (uint64_t block = first_new; block - first_block < tokens.key_magnitudes.size(); ++block) {
    const float magnitude = tokens.key_magnitudes[block - first_block];
    float& bound = key_bounds_[(block - begin_ / kTailBlockTokens) * shape_.layers + tokens.layer];
    bound = std::max(bound, magnitude);
    greatest = std::max(greatest, magnitude);
  }
  return greatest;
}

bool Tail::Holds(const NewTokens& tokens, uint64_t begin, uint64_t end) const {
  const NewRows rows(tokens, shape_);
  for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
    for (uint64_t position = begin; position < end; ++position) {
      if (!rows.Equal(position - tokens.first_position, head, Pages(tokens.layer, head, position),
                      position % kTailBlockTokens)) {
        return false;
      }
    }
  }
  return true;
}

void Tail::DropBefore(uint64_t begin) {
  CHECK_GE(begin, begin_);
  CHECK_LE(begin, blocks_end());
  const uint64_t dropped = begin / kTailBlockTokens - begin_ / kTailBlockTokens;
  blocks_.erase(blocks_.begin(), blocks_.begin() + static_cast<ptrdiff_t>(dropped));
  key_bounds_.erase(key_bounds_.begin(),
                    key_bounds_.begin() + static_cast<ptrdiff_t>(dropped * shape_.layers));
  begin_ = begin;
}

bool Tail::DropFrom(uint64_t position) noexcept {
  const size_t kept = BlocksOf(begin_, position);
  if (kept >= blocks_.size()) return false;
  blocks_.resize(kept);
  key_bounds_.resize(kept * shape_.layers);
  blocks_.shrink_to_fit();
  key_bounds_.shrink_to_fit();
  return true;
}

absl::StatusOr<Tail> Tail::CopyOf(uint64_t begin, uint64_t length, Segments segments,
                                  MemoryBudget* budget) const {
  const uint32_t layers = shape_.layers;
  Tail tail(shape_, begin);
  for (uint64_t block = begin / kTailBlockTokens; block * kTailBlockTokens < length; ++block) {
    const uint64_t first = std::max(begin, block * kTailBlockTokens);
    const uint64_t end = (block + 1) * kTailBlockTokens;
    tail.key_bounds_.resize(tail.key_bounds_.size() + layers, 0);
    if (first >= begin_ && end <= length) {
      tail.blocks_.push_back(blocks_[BlockOf(first)]);
      std::copy_n(KeyBoundsAt(first).begin(), layers, tail.key_bounds_.end() - layers);
      continue;
    }
    ATTND_ASSIGN_OR_RETURN(auto copy, MakeTailBlock(shape_, budget));
    tail.blocks_.push_back(std::move(copy));
    const uint64_t last = std::min(end, length);
    if (last <= begin_) continue;
    for (uint32_t layer = 0; layer < layers; ++layer) {
      CopyFromTail(layer, std::max(first, begin_), last, &tail);
    }
  }
  CopyFromSegments(segments, std::min(length, begin_), &tail);
  CHECK_GE(tail.blocks_end(), length);
  return tail;
}

absl::StatusOr<Tail> Tail::Without(std::span<const uint64_t> lengths,
                                   std::span<const uint64_t> written, uint64_t end,
                                   MemoryBudget* budget) const {
  CHECK_EQ(lengths.size(), shape_.layers);
  CHECK_EQ(written.size(), shape_.layers);
  CHECK_GE(*std::min_element(lengths.begin(), lengths.end()), begin_);
  CHECK_LE(*std::max_element(lengths.begin(), lengths.end()), std::min(end, blocks_end()));
  const uint32_t layers = shape_.layers;
  Tail tail = *this;
  tail.DropFrom(end);
  for (size_t block = 0; block < tail.blocks_.size(); ++block) {
    const uint64_t block_begin =
        std::max(begin_, (begin_ / kTailBlockTokens + block) * kTailBlockTokens);
    const uint64_t block_end = (block_begin / kTailBlockTokens + 1) * kTailBlockTokens;
    bool given_up = false;
    for (uint32_t layer = 0; layer < layers; ++layer) {
      given_up |= std::max(lengths[layer], block_begin) < std::min(written[layer], block_end);
    }
    if (!given_up) continue;
    ATTND_ASSIGN_OR_RETURN(tail.blocks_[block], MakeTailBlock(shape_, budget));
    std::fill_n(tail.key_bounds_.begin() + static_cast<ptrdiff_t>(block * layers), layers, 0.0f);
    for (uint32_t layer = 0; layer < layers; ++layer) {
      const uint64_t layer_end = std::min(lengths[layer], block_end);
      if (block_begin < layer_end) CopyFromTail(layer, block_begin, layer_end, &tail);
    }
  }
  return tail;
}

// Positions [begin, end) of one layer, all of one block, into the same block of `target`.
void Tail::CopyFromTail(uint32_t layer, uint64_t begin, uint64_t end, Tail* target) const {
  const PageGeometry geometry(shape_);
  const TailBlock& source = *blocks_[BlockOf(begin)];
  const size_t number = target->BlockOf(begin);
  float& bound = target->key_bounds_[number * shape_.layers + layer];
  for (uint32_t head = 0; head < shape_.kv_heads; ++head) {
    const std::byte* pages = source.pages(layer, head);
    for (uint64_t position = begin; position < end; ++position) {
      const uint64_t place = position % kTailBlockTokens;
      geometry.CopyToken(pages, place, target->blocks_[number]->pages(layer, head), place);
    }
    const uint64_t place = begin % kTailBlockTokens;
    bound = std::max(bound, KeyMagnitude(geometry, pages, place, place + (end - begin)));
  }
}

// Positions [target->begin(), end) of the segments.
void Tail::CopyFromSegments(Segments segments, uint64_t end, Tail* target) {
  const ModelShape& shape = target->shape_;
  const PageGeometry geometry(shape);
  const uint64_t begin = target->begin_;
  for (const auto& segment : segments) {
    if (segment->end_position() <= begin || segment->first_position() >= end) continue;
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      for (uint32_t head = 0; head < shape.kv_heads; ++head) {
        const std::byte* pages = segment->pages(layer, head);
        const std::span<const uint16_t> positions = segment->positions(layer, head);
        for (uint64_t slot = 0; slot < positions.size(); ++slot) {
          const uint64_t position = segment->first_position() + positions[slot];
          if (position < begin || position >= end) continue;
          const size_t block = target->BlockOf(position);
          geometry.CopyToken(pages, slot, target->blocks_[block]->pages(layer, head),
                             position % kTailBlockTokens);
          float& bound = target->key_bounds_[block * shape.layers + layer];
          bound = std::max(bound, KeyMagnitude(geometry, pages, slot, slot + 1));
        }
      }
    }
  }
}

void RaiseAll(std::span<const float> others, float* bounds) {
  for (size_t i = 0; i < others.size(); ++i) bounds[i] = std::max(bounds[i], others[i]);
}

std::vector<float> KeyBoundsOf(const attention::SequenceView& view, uint64_t begin, uint64_t end) {
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

}  // namespace attnd::engine
