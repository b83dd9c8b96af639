// SPDX-License-Identifier: Apache-2.0
//
// TokenSizes: how much a TokenUnit may have to handle of each kind, known before any memory is
// taken for the unit.
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
  size_t blocks = 0;          // full KV blocks; 0 if the policy does not search them
  size_t clusters = 0;        // 0 if the policy does not rank them
  size_t candidates = 0;      // tokens, at one time
  size_t scored = 0;          // candidates that get logits: all of them or none
  size_t ranges = 0;          // of CandidateRanges
  size_t quads = 0;           // of the query token
  size_t block_searches = 0;  // by this query token, and by the one before it

  // recalled: what RecalledFor gives for the query.
  TokenSizes(const UnitQuery& query, const BlockChoice* recalled);
  // The most bytes of an arena that the unit takes, without those of a CompletionEstimator.
  size_t ArenaBytes(const ModelShape& shape) const;

 private:
  void CountSelected(const UnitQuery& query, const BlockChoice* recalled);
  void CountBlocksAndLabels(const UnitQuery& query, const BlockChoice* recalled);
  void CountClusterTokens(const UnitQuery& query);

  // The most candidates that are chosen one by one. Each of them may begin a range.
  size_t chosen_ = 0;
};

// How many of `of` tokens the policy's budget takes. seen: how many tokens the query token sees.
size_t BudgetTokens(const Policy& policy, uint64_t seen, size_t of);

// Positions that the unit's KV head keeps, under a policy with a keep-set.
std::span<const uint32_t> KeptOf(const UnitQuery& query);

// The blocks that the query token before this one chose, if the policy looks for tokens in these
// and they are known; else null.
std::shared_ptr<const BlockChoice> RecalledFor(const UnitQuery& query);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_TOKEN_SIZES_H_
