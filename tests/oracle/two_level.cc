// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/two_level.h"

#include <algorithm>

namespace attnd::oracle {

TopSet SelectInside(const TwoLevelInput& input, const std::vector<Vector>& queries,
                    const Indices& searched, const Budget& budget) {
  for (const std::size_t number : searched) {
    Require(input.blocks.at(number).full, "full blocks to search");
  }
  const std::size_t middle = PositionsIn(input.blocks, Range(0, input.blocks.size())).size();
  return SelectByLabels(queries, input.labels, PositionsIn(input.blocks, searched), budget, middle,
                        input.scale);
}

Indices CarriedOver(const std::vector<Block>& before, const Indices& chosen,
                    const std::vector<Block>& now) {
  Indices carried;
  for (const std::size_t number : FullBlocks(now)) {
    const auto same = [&](std::size_t old) {
      return before[old].begin == now[number].begin && before[old].end == now[number].end;
    };
    const Indices all = FullBlocks(before);
    const bool was_block = std::any_of(all.begin(), all.end(), same);
    if (!was_block || std::any_of(chosen.begin(), chosen.end(), same)) carried.push_back(number);
  }
  return carried;
}

std::vector<TwoLevelStep> SelectTwoLevel(const TwoLevelInput& input, const TwoLevelPolicy& policy) {
  Require(policy.lag <= 1, "lag 0 or 1");
  std::vector<TwoLevelStep> steps;
  std::optional<Indices> before = policy.earlier;
  for (const std::vector<Vector>& queries : input.queries) {
    TwoLevelStep step;
    step.blocks = SelectBlocks(queries, input.keys, input.blocks, policy.blocks).top;
    step.searched = policy.lag == 1 && before.has_value() ? *before : step.blocks.taken;
    step.tokens = SelectInside(input, queries, step.searched, policy.tokens);
    step.read = Union(step.tokens.taken, PositionsIn(input.blocks, PartialBlocks(input.blocks)));
    before = step.blocks.taken;
    steps.push_back(step);
  }
  return steps;
}

}  // namespace attnd::oracle
