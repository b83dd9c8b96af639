// SPDX-License-Identifier: Apache-2.0
//
// KeepSet: the tokens that SnapKV and Ada-SnapKV keep of a prompt (papers/sparse-frontier, A.1.4,
// A.1.5). It is made once, at the prompt's end, and belongs to the sequence, not to its segments.
#ifndef ATTND_ATTENTION_KEEP_SET_H_
#define ATTND_ATTENTION_KEEP_SET_H_

#include <cstdint>
#include <vector>

#include "attention/policy.h"

namespace attnd::attention {

// Immutable.
struct KeepSet {
  // What it was made by: rows of a policy with others have no keep-set.
  Budget budget;
  bool adaptive = false;
  // Tokens that it was chosen from, and the sink: those of segments when it was made. All from here
  // on are read, too: the prompt's window, and what came later.
  uint64_t ranked_tokens = 0;
  // [layers * kv_heads] positions of the middle that there was, ascending.
  std::vector<std::vector<uint32_t>> positions;

  bool Serves(const Policy& policy) const {
    return policy.budget == budget && policy.adaptive == adaptive;
  }
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_KEEP_SET_H_
