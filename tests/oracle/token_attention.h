// SPDX-License-Identifier: Apache-2.0
//
// What a selection of tokens answers, whoever made it: for one query token and one KV head, the
// exact softmax over the tokens that were read (docs/POLICIES.md; every policy that reads tokens).
//
// A test of an engine takes the tokens of the engine's own plan, zones included, and compares out
// and lse. Pages are read for the union over the group; a head's own list is its mask.
#ifndef ATTND_TESTS_ORACLE_TOKEN_ATTENTION_H_
#define ATTND_TESTS_ORACLE_TOKEN_ATTENTION_H_

#include <cstddef>
#include <vector>

#include "tests/oracle/ranking.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

struct TokenInput {
  std::vector<Vector> queries;  // [group][head_dim]
  // All tokens that the query sees, and none that it does not.
  std::vector<Vector> keys;    // [positions][head_dim]
  std::vector<Vector> values;  // [positions][value_dim]
  double scale = 1.0;
  std::size_t value_dim = 0;
};

struct TokenAnswer {
  Vector out;        // [value_dim]; zeros if nothing was read and there is no other state
  double lse = 0.0;  // natural log; -infinity if nothing was read and there is no other state
  // The true softmax share, among all tokens, of those that were read; an extra state, being an
  // estimate, counts nothing here. 1 if there is no token.
  double covered_mass = 0.0;
};

// read: [group] positions in any order, each once. extra: empty, or one state for each head that is
// merged before the one normalisation (an empty state changes nothing).
std::vector<TokenAnswer> AttendTokens(const TokenInput& input, const std::vector<Indices>& read,
                                      const std::vector<SoftmaxState>& extra = {});

// The same positions for every head of the group.
std::vector<Indices> ForEachHead(const TokenInput& input, const Indices& read);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_TOKEN_ATTENTION_H_
