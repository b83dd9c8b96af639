// SPDX-License-Identifier: Apache-2.0
//
// BlockRecall: which blocks a sequence's newest query tokens chose, for the query token after each
// (AsyncTLS, section 4: a step reads tokens of the blocks that the step before it chose).
#ifndef ATTND_ATTENTION_POLICY_STATE_BLOCK_RECALL_H_
#define ATTND_ATTENTION_POLICY_STATE_BLOCK_RECALL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/mutex.h"

namespace attnd::attention {

// Positions of blocks that lie side by side, all full.
struct BlockRun {
  uint64_t begin = 0;
  uint64_t end = 0;
  bool operator==(const BlockRun&) const = default;
};

// The blocks that one query token chose for one KV head, and the blocks that it chose from:
// segments may be added before the next query token, and no choice has searched their blocks.
// Immutable.
class BlockChoice {
 public:
  // searched: ascending. Block number i of them is chosen if is_chosen(i).
  BlockChoice(uint32_t block_tokens, std::span<const BlockRun> searched,
              absl::FunctionRef<bool(size_t)> is_chosen);

  // Whether the block from `begin` on was chosen; nothing if that block was not searched.
  std::optional<bool> Chose(uint64_t begin) const;
  // How many blocks of `runs`, ascending, were not searched.
  size_t CountNew(std::span<const BlockRun> runs) const;
  size_t searched_blocks() const { return searched_blocks_; }
  size_t chosen_blocks() const { return chosen_blocks_; }

  // Memory of a choice from these.
  static uint64_t Bytes(uint32_t block_tokens, std::span<const BlockRun> searched);

 private:
  struct Run {
    BlockRun positions;
    size_t first = 0;  // number of its first block
  };
  static size_t CountBlocks(uint32_t block_tokens, std::span<const BlockRun> runs);

  const uint32_t block_tokens_;
  const size_t searched_blocks_;
  size_t chosen_blocks_ = 0;
  std::vector<Run> searched_;
  std::vector<uint64_t> chosen_;  // a bit of each block
};

// Kept by (layer, position) of the query token that chose, so that a repeated step repeats its
// answer. Choices are shared with the recalls of forks. What there is no memory for is not
// remembered. Thread-safe.
class BlockRecall {
 public:
  // Choices kept of a layer, the newest positions': as many as a speculative step may take back.
  static constexpr size_t kPositionsMax = 64;
  // Gives what holds so many bytes for as long as it lives, or null if there is no room for them.
  using HoldBytes = std::function<std::shared_ptr<const void>(uint64_t bytes)>;

  BlockRecall(uint32_t layers, uint32_t kv_heads, HoldBytes hold);
  BlockRecall(const BlockRecall&) = delete;
  BlockRecall& operator=(const BlockRecall&) = delete;

  // As BlockChoice takes them.
  void Remember(uint32_t layer, uint32_t kv_head, uint64_t position, uint32_t block_tokens,
                std::span<const BlockRun> searched, absl::FunctionRef<bool(size_t)> is_chosen);
  // Null if it is not known.
  std::shared_ptr<const BlockChoice> Of(uint32_t layer, uint32_t kv_head, uint64_t position) const;
  // What tokens below position `length` chose: for a fork, and in place of this one for a sequence
  // that is cut there. Steps under way over what was there go on writing to this one.
  std::shared_ptr<BlockRecall> Prefix(uint64_t length);

 private:
  // What the heads of one layer chose for one query token.
  struct Heads {
    std::shared_ptr<const void> memory;
    std::vector<std::shared_ptr<const BlockChoice>> choices;  // [kv_heads] null: not known
  };
  struct Step {
    uint64_t position = 0;
    // Whether no other recall has the heads: those that are shared are written by nobody.
    bool own = false;
    std::shared_ptr<Heads> heads;
  };
  using Layer = std::vector<Step>;  // by ascending position

  bool MakeTables() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The heads of a query token, this recall's own; null if there is no memory, or if it is older
  // than all that are kept.
  Heads* HeadsOf(Layer* layer, uint64_t position) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static size_t PlaceOf(const Layer& layer, uint64_t position);

  const uint32_t layers_count_;
  const uint32_t kv_heads_;
  const HoldBytes hold_;
  mutable Mutex mutex_;
  std::shared_ptr<const void> memory_ ABSL_GUARDED_BY(mutex_);  // of layers_
  // [layers], with room for kPositionsMax and one; none before the first choice.
  std::vector<Layer> layers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_POLICY_STATE_BLOCK_RECALL_H_
