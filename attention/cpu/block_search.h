// SPDX-License-Identifier: Apache-2.0
//
// BlockSearch: one query token's search for KV blocks by the bounds of their keys
// (docs/POLICIES.md, "Blocks"; Quest). The bounds are computed as two matrix products, as in
// AsyncTLS, section 4.1.
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

// The positions of the full blocks of all segments, ascending. Blocks that follow each other share
// a run.
std::vector<BlockRun> BlocksOf(const SequenceView& view, uint32_t block_tokens);

// Life: construct; Score for every segment, from any threads; Choose once. Full blocks are numbered
// through all segments. A block that is not full has no bounds and no number.
class BlockSearch {
 public:
  static size_t CountBlocks(const SequenceView& view, uint32_t block_tokens);
  static size_t ArenaBytes(const ModelShape& shape, size_t blocks);
  // queries: [quads][4][head_dim] as in UnitQuery, of this query token or of the one before it.
  BlockSearch(const UnitQuery& query, const float* queries, uint32_t block_tokens, size_t blocks,
              StepArena* arena);

  void Score(size_t segment);
  void Choose(size_t count, OrderScratch* order);
  // After Choose: remembers the chosen blocks for the next query token (PolicyView::recall). Does
  // nothing if the view has no recall or the query token no position.
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
  // Lane 0: the group's sums of the queries' positive channels, and of their negative channels.
  kernels::Queries positive_, negative_;
  std::span<float> scores_;  // [blocks]
  std::span<Fate> fate_;     // [blocks]
};

// Remembers the blocks that observed query token number `observed`, which is at `position`,
// chooses. policy: one that selects by blocks and labels.
void RememberBlocksOf(const SequenceView& view, const Policy& policy, uint32_t layer,
                      uint32_t kv_head, const ObservedQueries& queries, uint32_t observed,
                      uint64_t position);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_BLOCK_SEARCH_H_
