// SPDX-License-Identifier: Apache-2.0
//
// BlockRecall: which blocks a sequence's newest query tokens chose, for the query token after each
// (AsyncTLS, section 4: a step reads tokens of the blocks that the step before it chose).
#ifndef ATTND_ATTENTION_BLOCK_RECALL_H_
#define ATTND_ATTENTION_BLOCK_RECALL_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "common/mutex.h"

namespace attnd::attention {

// Kept by (layer, position) of the query token that chose, so that a repeated step repeats its
// answer. Thread-safe.
class BlockRecall {
 public:
  // Choices kept of a layer, the newest positions': as many as a speculative step may take back.
  static constexpr size_t kPositionsMax = 64;

  BlockRecall(uint32_t layers, uint32_t kv_heads) : kv_heads_(kv_heads), layers_(layers) {}
  BlockRecall(const BlockRecall&) = delete;
  BlockRecall& operator=(const BlockRecall&) = delete;

  // Blocks are told by the position of their first token; ascending.
  void Remember(uint32_t layer, uint32_t kv_head, uint64_t position,
                std::span<const uint64_t> blocks);
  std::optional<std::vector<uint64_t>> Of(uint32_t layer, uint32_t kv_head,
                                          uint64_t position) const;
  // Forgets what tokens from position `length` on chose.
  void Truncate(uint64_t length);
  // Takes over what tokens below position `length` chose in another sequence of the same model.
  void CopyFrom(const BlockRecall& other, uint64_t length);

 private:
  struct Choice {
    uint64_t position = 0;
    std::vector<std::optional<std::vector<uint64_t>>> heads;  // [kv_heads]
  };
  using Layer = std::deque<Choice>;  // by ascending position

  const uint32_t kv_heads_;
  mutable Mutex mutex_;
  std::vector<Layer> layers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_BLOCK_RECALL_H_
