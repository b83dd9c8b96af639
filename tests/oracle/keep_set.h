// SPDX-License-Identifier: Apache-2.0
//
// Which tokens of a prefill SnapKV and Ada-SnapKV keep, for one layer of one shard
// (docs/POLICIES.md, "Keep-sets"; The Sparse Frontier, appendices A.1.4 and A.1.5).
//
// How the definitions are read where their words leave a choice:
//  - The observation queries are the last prefill tokens: query i of n stands at position
//    prefill - n + i and sees the keys up to its own. Its mass on later keys is 0, and the mean
//    over observation queries divides by n all the same.
//  - The softmax is over all keys that a query sees, sink and window included.
//  - The middle is what a budget chooses from: positions sink .. prefill - window - 1, with sink 4
//    and window 128. Where more is always kept (tokens that no segment covers), the middle that is
//    given ends sooner. Sink and window are always kept and cost no budget.
//  - Pooling sees the middle alone: what lies outside it counts as 0 and the divisor stays the
//    kernel. So masses of the sink and of the window never leak into their neighbours' scores.
//  - Pooling comes after aggregation. A.1.5 has the maximum "across query positions and heads for
//    score calculation", and A.1.4 smooths "the calculated token importance scores". For the mean
//    the order makes no difference; for Ada's maximum it does, and Pooling::kBeforeAggregation is
//    the other one.
//  - Ada: each KV head first takes its own floor(min_share * B) best tokens; the rest of kv_heads *
//    B goes to the best of what is left in one ranking over the shard's heads, the lower head and
//    then the lower token first on a tie. B is at most the middle. A product that falls short of a
//    whole number by rounding alone counts as that number.
#ifndef ATTND_TESTS_ORACLE_KEEP_SET_H_
#define ATTND_TESTS_ORACLE_KEEP_SET_H_

#include <cstddef>
#include <vector>

#include "tests/oracle/ranking.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

struct ObservedHead {                        // one KV head
  std::vector<std::vector<Vector>> queries;  // [group][observed][head_dim]
  std::vector<Vector> keys;                  // [prefill][head_dim]
};

struct Middle {
  std::size_t begin = 0;
  std::size_t end = 0;  // positions begin .. end - 1

  std::size_t size() const { return end - begin; }
};

// Empty if the prefill is no longer than sink and window.
Middle MiddleOfPrefill(std::size_t prefill, std::size_t sink = 4, std::size_t window = 128);

inline constexpr std::size_t kPoolingKernel = 21;

enum class Pooling { kAfterAggregation, kBeforeAggregation };

// Softmax of one query at `position` over keys 0 .. position; [prefill], 0 beyond.
Vector CausalMass(const Vector& query, std::size_t position, const std::vector<Vector>& keys,
                  double scale);

// The mean over `kernel` (odd) neighbours, centred, zeros beyond the ends: same length.
Vector AveragePool(const Vector& masses, std::size_t kernel = kPoolingKernel);

// Mean over observation queries and group, pooled; [middle].
Vector SnapScores(const ObservedHead& head, const Middle& middle, double scale,
                  Pooling pooling = Pooling::kAfterAggregation);

// Maximum over observation queries and group, pooled; [middle].
Vector AdaScores(const ObservedHead& head, const Middle& middle, double scale,
                 Pooling pooling = Pooling::kAfterAggregation);

// The positions that one KV head keeps of the middle. A share is of the middle.
TopSet KeepTop(const Vector& scores, const Middle& middle, const Budget& budget);

// The positions that each KV head keeps of the middle; scores: [kv_heads][middle]. Each set's
// margins hold for both stages; its size is free, but all sizes together are kv_heads * B.
std::vector<TopSet> KeepAdaptive(const std::vector<Vector>& scores, const Middle& middle,
                                 const Budget& budget, double min_share = 0.2,
                                 double margin = 1e-4);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_KEEP_SET_H_
