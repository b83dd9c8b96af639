// SPDX-License-Identifier: Apache-2.0
//
// KeepSet: the tokens that SnapKV and Ada-SnapKV keep of a prompt (papers/sparse-frontier, A.1.4,
// A.1.5). It is made once, at the prompt's end, and belongs to the sequence, not to its segments.
#ifndef ATTND_ATTENTION_KEEP_SET_H_
#define ATTND_ATTENTION_KEEP_SET_H_

#include <cstdint>
#include <string>
#include <vector>

namespace attnd::attention {

// Immutable.
struct KeepSet {
  // The policy it was made by, as PolicyText gives it: another one's rows have no keep-set.
  std::string policy;
  // Tokens of the prompt: all from here on are read, too.
  uint64_t prompt_tokens = 0;
  // [layers * kv_heads] positions of the prompt's middle, ascending.
  std::vector<std::vector<uint32_t>> positions;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_KEEP_SET_H_
