// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/token_attention.h"

#include <cmath>

namespace attnd::oracle {

std::vector<TokenAnswer> AttendTokens(const TokenInput& input, const std::vector<Indices>& read,
                                      const std::vector<SoftmaxState>& extra) {
  Require(input.values.size() == input.keys.size(), "a value for each key");
  Require(read.size() == input.queries.size(), "a list of tokens for each head");
  Require(extra.empty() || extra.size() == read.size(), "an extra state for each head, or none");
  std::vector<TokenAnswer> answers;
  for (std::size_t h = 0; h < read.size(); ++h) {
    Vector logits;
    SoftmaxState all(input.value_dim);
    for (std::size_t j = 0; j < input.keys.size(); ++j) {
      logits.push_back(input.scale * Dot(input.queries[h], input.keys[j]));
      all.Add(logits[j], input.values[j]);
    }
    SoftmaxState state(input.value_dim);
    std::vector<bool> seen(input.keys.size(), false);
    for (const std::size_t j : read[h]) {
      Require(j < seen.size() && !seen[j], "tokens that exist, each read once");
      seen[j] = true;
      state.Add(logits[j], input.values[j]);
    }
    TokenAnswer answer;
    answer.covered_mass = input.keys.empty() ? 1.0 : std::exp(state.Lse() - all.Lse());
    if (!extra.empty()) state.Merge(extra[h]);
    answer.out = state.Out();
    answer.lse = state.Lse();
    answers.push_back(answer);
  }
  return answers;
}

std::vector<Indices> ForEachHead(const TokenInput& input, const Indices& read) {
  return std::vector<Indices>(input.queries.size(), read);
}

}  // namespace attnd::oracle
