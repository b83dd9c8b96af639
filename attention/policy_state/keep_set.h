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

// Immutable. The keep-set of a shorter history shares its positions with that of the longer
// history.
struct KeepSet {
  using Positions = std::vector<std::vector<uint32_t>>;

  // The parameters that the set was made with. It does not serve a policy with other parameters.
  Budget budget;
  bool adaptive = false;
  // Tokens below this position, except the sink, were ranked: segments held them when the set was
  // made. All tokens from this position on are read: the prompt's window, and later tokens.
  uint64_t ranked_tokens = 0;
  // [layers * kv_heads] kept positions of the middle, ascending. As shorter histories share the
  // lists, a list may go on beyond ranked_tokens; KeptBy leaves these positions out.
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
