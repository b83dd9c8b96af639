// SPDX-License-Identifier: Apache-2.0
//
// The two-level selection of a run of query tokens, for one KV head (docs/POLICIES.md, "Two
// levels"; AsyncTLS section 4).
//
//   M_t = the `blocks` full blocks of highest bound for q_t
//   S_t = the tokens of highest label weight for q_t inside M_(t - 1) (lag 1) or M_t (lag 0)
//
// How the definition is read where its words leave a choice:
//  - With lag 1 the first query token searches the M that it is given (of the last prefill query,
//    or of the step before), or its own where none is given: lag 0 for that token alone. With lag 0
//    a given M is not looked at.
//  - The softmax of the labels is over the tokens of the blocks searched. A budget's share is of
//    the middle: all tokens in blocks, full or not.
//  - Tokens of blocks that are not full are always read, besides and outside the budget; they are
//    never searched.
//  - All query tokens of the run see the same blocks: their own new tokens are in no segment yet.
//  - Between two runs segments may come, go and be cut anew. A block that was none when M was
//  chosen
//    counts as chosen, as the query token that chose M read its tokens without asking and nobody
//    has searched them since; a chosen block that is none any more is read with the tail, or counts
//    by the blocks that took its place (CarriedOver).
#ifndef ATTND_TESTS_ORACLE_TWO_LEVEL_H_
#define ATTND_TESTS_ORACLE_TWO_LEVEL_H_

#include <cstddef>
#include <optional>
#include <vector>

#include "tests/oracle/blocks.h"
#include "tests/oracle/labels.h"
#include "tests/oracle/ranking.h"

namespace attnd::oracle {

struct TwoLevelInput {
  std::vector<std::vector<Vector>> queries;  // [query tokens][group][head_dim]
  std::vector<Vector> keys;                  // [positions][head_dim], of all blocks at least
  Labels labels;                             // [positions]
  std::vector<Block> blocks;
  double scale = 1.0;
};

struct TwoLevelPolicy {
  std::size_t blocks = 128;
  Budget tokens{1024, std::nullopt};
  std::size_t lag = 1;             // 0 or 1
  std::optional<Indices> earlier;  // M before the first query token: numbers of full blocks
};

struct TwoLevelStep {
  TopSet blocks;     // M_t
  Indices searched;  // the block numbers inside which S_t was looked for
  TopSet tokens;     // S_t
  Indices read;      // positions: S_t and those of blocks that are not full
};

// S_t inside the blocks of these numbers, whoever chose them.
TopSet SelectInside(const TwoLevelInput& input, const std::vector<Vector>& queries,
                    const Indices& searched, const Budget& budget);

// The M of later blocks: numbers of those full blocks in `now` that `chosen`, numbers in `before`,
// names by their positions, and of those that were not full blocks in `before`.
Indices CarriedOver(const std::vector<Block>& before, const Indices& chosen,
                    const std::vector<Block>& now);

// [query tokens]
std::vector<TwoLevelStep> SelectTwoLevel(const TwoLevelInput& input, const TwoLevelPolicy& policy);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_TWO_LEVEL_H_
