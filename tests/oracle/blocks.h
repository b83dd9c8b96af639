// SPDX-License-Identifier: Apache-2.0
//
// Blocks of tokens with key bounds, for one query token and one KV head (docs/POLICIES.md,
// "Blocks"; Quest, and AsyncTLS section 4.1).
//
// How the definition is read where its words leave a choice:
//  - A sequence's segments lie one after another from position 0. Blocks of B tokens are cut at
//    multiples of B of a segment's own token numbers: block b of a segment that begins at position
//    s holds positions s + b B .. s + (b + 1) B - 1. Segments may begin at any position.
//  - Sink tokens (positions below `sink`) are in no block: a block that would hold some keeps its
//    place and holds the rest, which may be nothing. Such a block, and a segment's last one if it
//    is short, is not full.
//  - A block that is not full is never scored and always read. It costs no budget: a budget is
//    ceil(tokens / B) full blocks, or ceil(share * full blocks).
//  - Blocks are numbered through by (segment, block), those that are not full included.
//  - The score sums over the group without a softmax: the heads' bounds in raw logits, unscaled.
//    The scale moves no rank, so it is left out.
#ifndef ATTND_TESTS_ORACLE_BLOCKS_H_
#define ATTND_TESTS_ORACLE_BLOCKS_H_

#include <cstddef>
#include <vector>

#include "tests/oracle/ranking.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

struct Block {
  std::size_t segment = 0;
  // Positions begin .. end - 1, sink tokens left out; begin = end if nothing is left.
  std::size_t begin = 0;
  std::size_t end = 0;
  bool full = false;
};

// The blocks of segments of these lengths, by number.
std::vector<Block> CutBlocks(const std::vector<std::size_t>& segment_tokens, std::size_t sink,
                             std::size_t block_tokens);

// The positions in the blocks of these numbers, ascending.
Indices PositionsIn(const std::vector<Block>& blocks, const Indices& numbers);

// The numbers of full blocks, and of the others.
Indices FullBlocks(const std::vector<Block>& blocks);
Indices PartialBlocks(const std::vector<Block>& blocks);

struct BlockBounds {
  Vector minimum;  // [head_dim] of the block's keys, each channel by itself
  Vector maximum;  // [head_dim]
};

// keys: [positions][head_dim]. The block holds at least one token.
BlockBounds BoundsOf(const std::vector<Vector>& keys, const Block& block);

// sum_h (max(q_h, 0) . maximum + min(q_h, 0) . minimum): no key in the block has a greater sum over
// the heads of q_h . k. queries: [group][head_dim].
double BoundScore(const std::vector<Vector>& queries, const BlockBounds& bounds);

// The same sum with every term's magnitude: a float sum's rounding is relative to this, however
// much the terms cancel.
double BoundMagnitude(const std::vector<Vector>& queries, const BlockBounds& bounds);

struct BlockSelection {
  TopSet top;    // candidates are the full blocks' numbers
  Indices read;  // positions: those of the blocks taken and of all blocks that are not full
};

// How many of the full blocks a budget takes.
std::size_t BlocksOf(const Budget& budget, std::size_t block_tokens, std::size_t full_blocks);

// The `count` full blocks of highest score. A block is close to the cut by 1e-4 of the score there,
// or by 1e-6 (float rounding) of the greatest magnitude of all.
BlockSelection SelectBlocks(const std::vector<Vector>& queries, const std::vector<Vector>& keys,
                            const std::vector<Block>& blocks, std::size_t count);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_BLOCKS_H_
