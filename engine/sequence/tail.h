// SPDX-License-Identifier: Apache-2.0
//
// Tail: the newest tokens of a sequence, which no segment covers.
#ifndef ATTND_ENGINE_SEQUENCE_TAIL_H_
#define ATTND_ENGINE_SEQUENCE_TAIL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "attention/segment/pages.h"
#include "attention/segment/segment.h"
#include "common/model_shape.h"
#include "engine/memory_budget.h"
#include "engine/sequence/new_tokens.h"

namespace attnd::engine {

// Tail blocks for positions from begin() on, and for each block the greatest |k| of each layer. The
// tail knows for how many positions it has blocks; its sequence knows how many positions of a layer
// are filled.
//
// Blocks are shared: views hold them, and a fork's tail holds the blocks that neither history
// writes to again. So a position is written once, by the sequence whose tail made the block. A
// position that a pass gave up is written again only in another block (Without); one behind which
// no length ever was, as an upload was refused, is written over.
//
// Thread-safety: none; the sequence's lock guards it. Several threads may Write side by side to
// different blocks. Readers of a block read only positions below the length that they were given.
//
// Invariants: block i holds positions [64 (b + i), 64 (b + i + 1)), b = begin() / 64; there is a
// bound for each block and layer.
class Tail {
 public:
  using Blocks = std::vector<std::shared_ptr<const attention::TailBlock>>;
  using Segments = std::span<const std::shared_ptr<const attention::Segment>>;

  // An empty tail.
  explicit Tail(const ModelShape& shape, uint64_t begin = 0) : shape_(shape), begin_(begin) {}

  uint64_t begin() const { return begin_; }
  const Blocks& blocks() const { return blocks_; }
  // The positions below this one have blocks.
  uint64_t blocks_end() const {
    return blocks_.empty() ? begin_
                           : (begin_ / attention::kTailBlockTokens + blocks_.size()) *
                                 attention::kTailBlockTokens;
  }
  // [blocks][layers] greatest |k|.
  std::span<const float> key_bounds() const { return key_bounds_; }
  // [layers] greatest |k| of the block that holds `position`.
  std::span<const float> KeyBoundsAt(uint64_t position) const {
    return std::span<const float>(key_bounds_)
        .subspan(BlockOf(position) * shape_.layers, shape_.layers);
  }

  // Blocks of a tail with positions [begin, end).
  static uint64_t BlocksOf(uint64_t begin, uint64_t end) {
    return end <= begin
               ? 0
               : (end - 1) / attention::kTailBlockTokens + 1 - begin / attention::kTailBlockTokens;
  }

  // Makes the blocks that positions below `end` lack, and room for these blocks in the lists;
  // AddBlocks then adds the blocks. ResourceExhausted; nothing is changed then.
  absl::StatusOr<Blocks> MakeBlocks(uint64_t end, MemoryBudget* budget);
  void AddBlocks(const Blocks& more) noexcept;
  // Writes the tokens without the first `skip`; their positions must have blocks.
  void Write(const NewTokens& tokens, uint64_t skip);
  // Asks the processor for the memory that Write of so many tokens from `position` on will write.
  // Positions without blocks, which it would not take, are left out.
  void Warm(uint32_t layer, uint64_t position, uint64_t tokens) const;
  // Raises the bounds of the blocks in which the tokens without the first `skip` lie; returns the
  // greatest of these tokens' magnitudes (NewTokens::key_magnitudes), 0 without any.
  float RaiseKeyBounds(const NewTokens& tokens, uint64_t skip);
  // Whether positions [begin, end) hold the same bytes as `tokens`.
  bool Holds(const NewTokens& tokens, uint64_t begin, uint64_t end) const;
  // Begins the tail at a later position: drops the blocks that lie wholly before it. Does not
  // throw.
  void DropBefore(uint64_t begin);

  // Drops the blocks that hold only positions from `position` on; whether there were any. Lists
  // have room for what is left alone.
  bool DropFrom(uint64_t position) noexcept;

  // A tail with positions [begin, length) of a history that consists of `segments` and this tail.
  // It shares full blocks of this tail. It copies the block that will be written again, and the
  // tokens that lie in segments, which must be whole. ResourceExhausted.
  absl::StatusOr<Tail> CopyOf(uint64_t begin, uint64_t length, Segments segments,
                              MemoryBudget* budget) const;
  // This tail, in blocks up to position `end`, without positions [lengths[layer], written[layer])
  // of each layer, behind which nothing is written: blocks that have such positions are copied
  // without them, the others are shared. ResourceExhausted.
  absl::StatusOr<Tail> Without(std::span<const uint64_t> lengths, std::span<const uint64_t> written,
                               uint64_t end, MemoryBudget* budget) const;

 private:
  size_t BlockOf(uint64_t position) const;
  std::byte* Pages(uint32_t layer, uint32_t kv_head, uint64_t position) const;
  void CopyFromTail(uint32_t layer, uint64_t begin, uint64_t end, Tail* target) const;
  static void CopyFromSegments(Segments segments, uint64_t end, Tail* target);

  ModelShape shape_;
  uint64_t begin_ = 0;
  Blocks blocks_;
  std::vector<float> key_bounds_;  // [blocks][layers]
};

// Raises each of `bounds` to at least its counterpart in `others`.
void RaiseAll(std::span<const float> others, float* bounds);

// [layers] greatest |k| of positions [begin, end), which the view's tail holds.
std::vector<float> KeyBoundsOf(const attention::SequenceView& view, uint64_t begin, uint64_t end);

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_TAIL_H_
