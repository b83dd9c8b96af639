// SPDX-License-Identifier: Apache-2.0
//
// TokenSizes: how much there may be of everything that a TokenUnit handles, known before any memory
// is taken for the unit.
#ifndef ATTND_ATTENTION_CPU_TOKEN_SIZES_H_
#define ATTND_ATTENTION_CPU_TOKEN_SIZES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "attention/cpu/middle_unit.h"
#include "attention/policy/policy.h"
#include "attention/policy_state/block_recall.h"

namespace attnd::attention {

struct TokenSizes {
  size_t middle = 0;          // tokens
  size_t blocks = 0;          // full ones; 0 if they are not asked for
  size_t clusters = 0;        // 0 if they are not asked for
  size_t candidates = 0;      // tokens, at one time
  size_t scored = 0;          // candidates that get logits: all of them or none
  size_t ranges = 0;          // of CandidateRanges
  size_t quads = 0;           // of the query token
  size_t block_searches = 0;  // by this query token, and by the one before it

  // recalled: what RecalledFor gives for the query.
  TokenSizes(const UnitQuery& query, const BlockChoice* recalled);
  // Most bytes of an arena that the unit takes, without a CompletionEstimator's.
  size_t ArenaBytes(const ModelShape& shape) const;

 private:
  void CountSelected(const UnitQuery& query, const BlockChoice* recalled);
  void CountBlocksAndLabels(const UnitQuery& query, const BlockChoice* recalled);
  void CountClusterTokens(const UnitQuery& query);

  // Candidates that are chosen one by one: no more ranges begin at these.
  size_t chosen_ = 0;
};

// Tokens of `of` that the policy's budget takes. seen: tokens that the query token sees.
size_t BudgetTokens(const Policy& policy, uint64_t seen, size_t of);

// Positions that the unit's KV head keeps, of a keep-set policy.
std::span<const uint32_t> KeptOf(const UnitQuery& query);

// What the query token before this one chose, if this one looks for tokens in that one's blocks and
// the choice is known; else null.
std::shared_ptr<const BlockChoice> RecalledFor(const UnitQuery& query);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_TOKEN_SIZES_H_
