// SPDX-License-Identifier: Apache-2.0
//
// What selections of blocks and tokens share: counts, weights, and the top of a ranking
// (docs/POLICIES.md).
//
// Tokens are named by their positions in the sequence. Candidates of a selection are item numbers
// (positions, or numbers of blocks), ascending, each once; a vector said to be [candidates] lies in
// their order.
//
// How the definitions are read where their words leave a choice:
//  - A budget in tokens of 0 takes nothing, and so does a share of 0; any other share takes at
//    least one item if there is one (FractionCount). No budget takes more than there is.
//  - "Scores within 1e-4 (relative) of the cut": of the score at the cut, whatever the magnitude of
//    the others. Scores that may be negative or cancel need `slack` besides.
//  - A tie is an exact tie. A ranking's `must` and `may` leave ties at the cut free, as they leave
//    free all that is close; a test of tie order compares with `taken`.
#ifndef ATTND_TESTS_ORACLE_RANKING_H_
#define ATTND_TESTS_ORACLE_RANKING_H_

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

using Indices = std::vector<std::size_t>;

// How much a selector takes: tokens, or if there is a share that share of what the selector counts.
struct Budget {
  std::size_t tokens = 0;
  std::optional<double> share;
};

// Of `count` tokens: the budget's tokens, or its share of `whole`; at most count.
std::size_t TokensOf(const Budget& budget, std::size_t whole, std::size_t count);

// Items begin .. end - 1.
Indices Range(std::size_t begin, std::size_t end);

// All numbers that are in a or in b, ascending.
Indices Union(const Indices& a, const Indices& b);

// softmax over the candidates of scale * q . rows[candidate]; [candidates].
Vector HeadWeights(const Vector& query, const std::vector<Vector>& rows, const Indices& candidates,
                   double scale);

// HeadWeights of each query of the group ([group][dim]), then the mean over the group.
Vector GroupWeights(const std::vector<Vector>& queries, const std::vector<Vector>& rows,
                    const Indices& candidates, double scale);

// Candidates that a cut through their ranking takes, and what an implementation with another
// rounding may take.
struct TopSet {
  Indices candidates;
  Vector scores;                    // [candidates]
  Indices order;                    // numbers by descending score, the lower number first on a tie
  Indices taken;                    // numbers, ascending: a prefix of order
  std::vector<bool> must;           // [candidates] has to be taken
  std::vector<bool> may;            // [candidates] may be taken
  std::optional<std::size_t> size;  // how many have to be taken; none where that may differ
};

// The first `count` of the ranking (at most all). A candidate is close to the cut if its score is
// within margin * |score at the cut| + slack of it.
TopSet TakeTop(const Indices& candidates, const Vector& scores, std::size_t count,
               double margin = 1e-4, double slack = 0.0);

// The shortest prefix of the ranking whose scores (weights: none negative, their sum 1) sum to p or
// more; all of it if p >= 1, or if no prefix does by rounding. The sums may be off by the margin
// (relative), and so may each score.
TopSet TakeMass(const Indices& candidates, const Vector& weights, double p, double margin = 1e-4);

// Items (by number, [items] of each) of the longest prefix of the ranking whose sizes sum to
// `limit` or less, ascending: clusters into which a budget of tokens is put. One at least, unless
// the limit is 0. No margins: a rank that differs by rounding may move the prefix's end.
Indices FittingPrefix(const Vector& scores, const std::vector<std::size_t>& sizes,
                      std::size_t limit);

// Empty if `taken` (numbers in any order) is right within the set's margins, else the first thing
// wrong with it.
std::string CheckTaken(const TopSet& expected, const Indices& taken);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_RANKING_H_
