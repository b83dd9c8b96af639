// SPDX-License-Identifier: Apache-2.0
//
// BlockSearch: one query token's search for blocks of consecutive tokens by the bounds of their
// keys (docs/POLICIES.md, "Blocks"; Quest, and AsyncTLS section 4.1, whose form as two matrix
// products this is).
#ifndef ATTND_ATTENTION_CPU_BLOCK_SEARCH_H_
#define ATTND_ATTENTION_CPU_BLOCK_SEARCH_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/cpu/middle_unit.h"
#include "attention/cpu/observation.h"
#include "attention/kernels/kernels.h"

namespace attnd::attention {

// The full blocks of all segments, ascending, those that follow each other in one run.
std::vector<BlockRun> BlocksOf(const SequenceView& view, uint32_t block_tokens);

// Life: construct, Score(every segment) from any threads, Choose once. Blocks are numbered through
// all segments; those that are not full have no bounds and no number.
class BlockSearch {
 public:
  static size_t CountBlocks(const SequenceView& view, uint32_t block_tokens);
  static size_t ArenaBytes(const ModelShape& shape, size_t blocks);
  // queries: [quads][4][head_dim] as UnitQuery has them, of this query token or of the one before.
  BlockSearch(const UnitQuery& query, const float* queries, uint32_t block_tokens, size_t blocks,
              StepArena* arena);

  void Score(size_t segment);
  void Choose(size_t count, OrderScratch* order);
  // After Choose: for the query token behind this one (PolicyView::recall), if there is a place
  // to remember it.
  void Remember() const;

  // Calls take(segment, tokens of that segment) for each chosen block, in order.
  template <typename Take>
  void ForEachChosen(const Take& take) const {
    size_t number = 0;
    for (size_t s = 0; s < query_.view->segments.size(); ++s) {
      const BlockIndex index = IndexOf(s);
      for (uint32_t b = 0; b < index.count; ++b, ++number) {
        if (fate_[number] == Fate::kExact) take(s, index.range(b));
      }
    }
  }

 private:
  BlockIndex IndexOf(size_t segment) const {
    return query_.view->segments[segment]->blocks(query_.layer, query_.kv_head, block_tokens_);
  }
  kernels::Queries SumOfSign(float sign, const float* queries, StepArena* arena) const;

  const UnitQuery query_;
  const uint32_t block_tokens_;
  kernels::Queries positive_, negative_;  // the group's sums of either, in the first lane
  std::span<float> scores_;               // [blocks]
  std::span<Fate> fate_;                  // [blocks]
};

// Remembers the blocks that one of the observed queries chooses, which stands at `position`.
// policy: of blocks and labels.
void RememberBlocksOf(const SequenceView& view, const Policy& policy, uint32_t layer,
                      uint32_t kv_head, const ObservedQueries& queries, uint32_t observed,
                      uint64_t position);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_BLOCK_SEARCH_H_
