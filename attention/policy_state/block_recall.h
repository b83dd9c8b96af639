// SPDX-License-Identifier: Apache-2.0
//
// BlockRecall: which KV blocks each of a sequence's newest query tokens chose, for the query token
// after it (AsyncTLS, section 4: a step reads tokens of the blocks that the step before it chose).
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

// Positions [begin, end) of full blocks that lie side by side.
struct BlockRun {
  uint64_t begin = 0;
  uint64_t end = 0;
  bool operator==(const BlockRun&) const = default;
};

// The blocks that one query token chose for one KV head, and the blocks that it chose from. The
// latter are kept because segments may be added before the next query token: their blocks have not
// been searched. Immutable.
class BlockChoice {
 public:
  // searched: ascending. Block number i of the searched blocks was chosen if is_chosen(i).
  BlockChoice(uint32_t block_tokens, std::span<const BlockRun> searched,
              absl::FunctionRef<bool(size_t)> is_chosen);

  // Whether the block at position `begin` was chosen; nothing if that block was not searched.
  std::optional<bool> Chose(uint64_t begin) const;
  // How many blocks of `runs`, ascending, were not searched.
  size_t CountNew(std::span<const BlockRun> runs) const;
  size_t searched_blocks() const { return searched_blocks_; }
  size_t chosen_blocks() const { return chosen_blocks_; }

  // Bytes of memory of a choice from the blocks `searched`.
  static uint64_t Bytes(uint32_t block_tokens, std::span<const BlockRun> searched);

 private:
  struct Run {
    BlockRun positions;
    size_t first = 0;  // number of the run's first block
  };
  static size_t CountBlocks(uint32_t block_tokens, std::span<const BlockRun> runs);

  const uint32_t block_tokens_;
  const size_t searched_blocks_;
  size_t chosen_blocks_ = 0;
  std::vector<Run> searched_;
  std::vector<uint64_t> chosen_;  // a bit for each searched block
};

// Choices are kept by (layer, position) of the query token that chose, so that a repeated step
// repeats its answer. Choices are shared with the recalls of forks. A choice that the memory budget
// has no room for is not remembered. Thread-safe.
class BlockRecall {
 public:
  // For how many positions, the newest ones, a layer keeps choices: as many as a speculative step
  // may take back.
  static constexpr size_t kPositionsMax = 64;
  // Returns an object that holds `bytes` of the memory budget for as long as it lives, or null if
  // there is no room.
  using HoldBytes = std::function<std::shared_ptr<const void>(uint64_t bytes)>;

  BlockRecall(uint32_t layers, uint32_t kv_heads, HoldBytes hold);
  BlockRecall(const BlockRecall&) = delete;
  BlockRecall& operator=(const BlockRecall&) = delete;

  // Keeps a BlockChoice, made from the last three arguments.
  void Remember(uint32_t layer, uint32_t kv_head, uint64_t position, uint32_t block_tokens,
                std::span<const BlockRun> searched, absl::FunctionRef<bool(size_t)> is_chosen);
  // Null if the choice is not known.
  std::shared_ptr<const BlockChoice> Of(uint32_t layer, uint32_t kv_head, uint64_t position) const;
  // The choices of query tokens below position `length`: for a fork, or for a sequence that is
  // truncated there, which then uses the result in place of this recall. Steps under way over the
  // longer history go on writing to this recall.
  std::shared_ptr<BlockRecall> Prefix(uint64_t length);

 private:
  // What the heads of one layer chose for one query token.
  struct Heads {
    std::shared_ptr<const void> memory;
    std::vector<std::shared_ptr<const BlockChoice>> choices;  // [kv_heads] null: not known
  };
  struct Step {
    uint64_t position = 0;
    // Whether no other recall has the heads. Shared heads are not written any more.
    bool own = false;
    std::shared_ptr<Heads> heads;
  };
  using Layer = std::vector<Step>;  // by ascending position

  bool MakeTables() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The heads of a query token, not shared with another recall. Null if there is no memory, or if
  // the query token is older than all that are kept.
  Heads* HeadsOf(Layer* layer, uint64_t position) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static size_t PlaceOf(const Layer& layer, uint64_t position);

  const uint32_t layers_count_;
  const uint32_t kv_heads_;
  const HoldBytes hold_;
  mutable Mutex mutex_;
  std::shared_ptr<const void> memory_ ABSL_GUARDED_BY(mutex_);  // of layers_
  // [layers], each with room for kPositionsMax + 1 steps; empty before the first choice.
  std::vector<Layer> layers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_POLICY_STATE_BLOCK_RECALL_H_
