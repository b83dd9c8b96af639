// SPDX-License-Identifier: Apache-2.0
//
// The top-p pruner over any selector's candidates, for one query token and one KV head
// (docs/POLICIES.md, "The pruner"; Twilight section 4.2).
//
// How the definition is read where its words leave a choice:
//  - The weights of a head are a softmax over the candidates alone, with keys of all channels
//    through INT4 codes. Zones, and tokens that the selector reads anyway, are no candidates.
//  - Each head has its own set; what is read is the union over the group, masked for each head to
//    its own set. Heads' weights are never averaged.
//  - The reference (TakeMass) ranks by weight, the lower token first on a tie, and sums in that
//    order. p >= 1 keeps all, weights of 0 too.
//  - The threshold search stops when min{w > l} >= max{w <= r}, where the text says "=". Both sides
//    differ once a bound l is itself the weight at the cut and no weight lies within l < w <= r:
//    then the left one is above r, the right one is l, and with "=" the search would never end.
//    v = min{w > l} decides as the text says in either case: above r its sum is below p, and w >= l
//    is kept.
//  - How ties enter: a threshold keeps all tokens of the weight at the cut or none. In exact
//    arithmetic the search keeps every token whose weight is at least v*, the least weight that the
//    reference keeps. So the two are the same set precisely if the reference keeps all n tokens of
//    weight v*, that is if sum{w > v*} + (n - 1) v* < p: always where the weight at the cut is
//    unique. Otherwise the search keeps the others tied with the cut besides, and nothing more.
//    Where a sum lies within rounding of p, either may be off by a weight.
#ifndef ATTND_TESTS_ORACLE_NUCLEUS_H_
#define ATTND_TESTS_ORACLE_NUCLEUS_H_

#include <vector>

#include "tests/oracle/ranking.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

// The candidates that a search for a threshold keeps, ascending: bounds l = 0 and r = max w, halved
// until at most one weight lies between them. weights: [candidates], none negative. p > 0.
Indices NucleusByThreshold(const Indices& candidates, const Vector& weights, double p);

struct Pruned {
  std::vector<TopSet> heads;  // [group] of positions
  Indices read;               // positions: the union of what the heads take
};

// queries: [group][head_dim]; rows: [positions][head_dim], the keys through ThroughInt4 (or an
// engine's own codes, dequantised); candidates: positions.
Pruned Prune(const std::vector<Vector>& queries, const std::vector<Vector>& rows,
             const Indices& candidates, double p, double scale);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_NUCLEUS_H_
