// SPDX-License-Identifier: Apache-2.0
//
// What a feature map estimates for the tokens that were not retrieved, for one query head and one
// KV head (docs/POLICIES.md, "Retrieval with completion"; Top-K with Linear-Attention Completion,
// sections 4 and 5, appendices C and D). exp(scale q . k_j) is replaced by phi_q(q) . phi_k(k_j),
// with every feature positive and given by its natural logarithm.
//
// How the definition is read where its words leave a choice:
//  - The remainder is the middle less the retrieved tokens. Zones are never in a summary.
//  - A feature is dropped if what remains of its u is less than epsilon times the full u, or is not
//    positive (a logarithm is taken of it): its u and its T become 0 together, and it adds nothing.
//    The paper raises such a u to epsilon and leaves T, which divides one token's rounding by it.
//  - A summary from which as many tokens were subtracted as it holds is empty, whatever rounding
//    left of its sums.
//  - A summary of no tokens has m = -infinity, u = 0, T = 0 and is the neutral element of a merge.
//  - K counts anchors as the paper does: of ceil(share * prefill) tokens those that are not sink or
//    tail.
#ifndef ATTND_TESTS_ORACLE_COMPLETION_H_
#define ATTND_TESTS_ORACLE_COMPLETION_H_

#include <cstddef>
#include <vector>

#include "tests/oracle/ranking.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

struct FeatureTokens {
  std::vector<Vector> log_features;  // [positions][features] ln phi_k(k_j), finite
  std::vector<Vector> values;        // [positions][value_dim]
};

// Sums as they stand in equations 6 to 9, without any shift: numbers beyond a double's range are
// refused.
struct RemainderSums {
  double denominator = 0.0;  // sum over the remainder of phi_q . phi_k(k_j)
  Vector numerator;          // [value_dim] the same with v_j
};

// log_query: [features] ln phi_q(q_h). remainder: positions.
RemainderSums SumRemainder(const Vector& log_query, const FeatureTokens& tokens,
                           const Indices& remainder, std::size_t value_dim);

// What such sums add to the head's softmax: empty if the denominator is 0.
SoftmaxState RemainderState(const RemainderSums& sums);

// Appendix C: per feature f the shift m, u = sum_j exp(ln phi_k(k_j)[f] - m) and T = sum_j exp(ln
// phi_k(k_j)[f] - m) v_j.
struct FeatureSummary {
  Vector m;               // [features]
  Vector u;               // [features]
  std::vector<Vector> t;  // [features][value_dim]
  std::size_t tokens = 0;
};

// Equations 34 to 36 over the positions in members, of which there may be none.
FeatureSummary SummariseFeatures(const FeatureTokens& tokens, const Indices& members,
                                 std::size_t features, std::size_t value_dim);

// The summary of both sets of tokens: each rescaled to the larger m of each feature.
FeatureSummary MergeSummaries(const FeatureSummary& a, const FeatureSummary& b);

struct SubtractedSummary {
  FeatureSummary summary;
  // [features] what is left of u as a share of the full u, before anything is dropped; 0 for a
  // summary of no tokens. Close to epsilon another rounding may drop what this keeps.
  Vector left;
};

// Equations 38 to 40 with the shift of the full summary: retrieved are positions among its tokens,
// each once.
SubtractedSummary Subtract(const FeatureSummary& full, const FeatureTokens& tokens,
                           const Indices& retrieved, double epsilon);

// Equations 41 to 43: one state of log mass ln Z and mean r(q); empty if no feature is left.
SoftmaxState EvaluateSummary(const Vector& log_query, const FeatureSummary& summary);

// K = max(0, ceil(share * prefill) - sink - tail).
std::size_t RetrievalCount(double share, std::size_t prefill, std::size_t sink, std::size_t tail);

// The selector `exhaustive`: the count tokens of the middle with the greatest mean over the group
// of each head's softmax over the middle. keys: [positions][head_dim]; middle: positions.
TopSet RetrieveExhaustive(const std::vector<Vector>& queries, const std::vector<Vector>& keys,
                          const Indices& middle, std::size_t count, double scale);

// What reading a summary once costs, in tokens' keys and values: features (value_dim + 2) /
// (head_dim + value_dim) (appendix D).
double SummaryTokens(std::size_t features, std::size_t head_dim, std::size_t value_dim);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_COMPLETION_H_
