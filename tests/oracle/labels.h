// SPDX-License-Identifier: Apache-2.0
//
// Token labels for one KV head (docs/POLICIES.md, "Labels"; Double Sparsity as AsyncTLS
// section 4.1 states it).
//
// How the definition is read where its words leave a choice:
//  - A channel's importance is (mean over heads of the largest |q_h[i]|) * (the largest |k[i]|),
//    each maximum over all tokens that are given: the paper's maxima over (q, k) pairs, as the pair
//    that is largest in q need not be the one that is largest in k. Without queries the first
//    factor is 1.
//  - The chosen channels are kept in ascending order.
//  - The softmax is over the candidates and over nothing else: zones and tokens that are read
//    anyway are not in it. The scale stays that of the whole head.
//  - A share is of the middle, also where only some of the middle are candidates.
#ifndef ATTND_TESTS_ORACLE_LABELS_H_
#define ATTND_TESTS_ORACLE_LABELS_H_

#include <cstddef>
#include <vector>

#include "tests/oracle/int4.h"
#include "tests/oracle/ranking.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

// (mean_h max |q_h[i]|) * max |k[i]|; [head_dim]. queries: [group][tokens][head_dim], the group
// empty if there are none; keys: [tokens][head_dim], at least one.
Vector ChannelImportance(const std::vector<std::vector<Vector>>& queries,
                         const std::vector<Vector>& keys);

// The `count` channels of highest importance, the lower channel first on a tie.
TopSet ChooseChannels(const std::vector<std::vector<Vector>>& queries,
                      const std::vector<Vector>& keys, std::size_t count);

// The channels of each row: [rows][channels].
std::vector<Vector> Project(const std::vector<Vector>& rows, const Indices& channels);

struct Labels {
  Indices channels;          // ascending
  std::vector<Vector> rows;  // [positions][channels] dequantised
};

// The labels of keys [positions][head_dim].
Labels MakeLabels(const std::vector<Vector>& keys, const Indices& channels,
                  Int4Rounding rounding = Int4Rounding::kNone);

// alpha_j = mean_h softmax_j(scale * q_h[C] . label_j) over the candidates; [candidates].
Vector LabelWeights(const std::vector<Vector>& queries, const Labels& labels,
                    const Indices& candidates, double scale);

// The candidates (positions of the middle) of highest alpha, for a budget; middle_tokens is what a
// share is of.
TopSet SelectByLabels(const std::vector<Vector>& queries, const Labels& labels,
                      const Indices& candidates, const Budget& budget, std::size_t middle_tokens,
                      double scale);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_LABELS_H_
