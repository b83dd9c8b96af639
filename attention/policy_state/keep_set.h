// SPDX-License-Identifier: Apache-2.0
//
// KeepSet: the tokens that SnapKV and Ada-SnapKV keep of a prompt (papers/sparse-frontier, A.1.4,
// A.1.5). It is made once, at the prompt's end, and belongs to the sequence, not to its segments.
#ifndef ATTND_ATTENTION_POLICY_STATE_KEEP_SET_H_
#define ATTND_ATTENTION_POLICY_STATE_KEEP_SET_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/policy/policy.h"

namespace attnd::attention {

// Immutable. A shorter history's set shares the list of the longer one's.
struct KeepSet {
  using Positions = std::vector<std::vector<uint32_t>>;

  // The parameters that it was made with: a row under other parameters finds no keep-set.
  Budget budget;
  bool adaptive = false;
  // Tokens below this position were ranked, the sink excepted: segments held them when the set was
  // made. All tokens from here on are read: the prompt's window, and what came later.
  uint64_t ranked_tokens = 0;
  // [layers * kv_heads] kept positions of the middle, ascending. Lists may go on beyond
  // ranked_tokens, as shorter histories share them: KeptBy leaves those positions out.
  std::shared_ptr<const Positions> positions;

  // head: number among all layers' KV heads.
  std::span<const uint32_t> KeptBy(size_t head) const {
    const std::vector<uint32_t>& all = (*positions)[head];
    return {all.begin(), std::lower_bound(all.begin(), all.end(), ranked_tokens)};
  }
  bool Serves(const Policy& policy) const {
    return policy.budget == budget && policy.adaptive == adaptive;
  }
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_POLICY_STATE_KEEP_SET_H_
