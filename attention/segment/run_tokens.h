// SPDX-License-Identifier: Apache-2.0
//
// How a prompt is divided into segments, and which of these have sections.
#ifndef ATTND_ATTENTION_SEGMENT_RUN_TOKENS_H_
#define ATTND_ATTENTION_SEGMENT_RUN_TOKENS_H_

#include <cstdint>

#include "attention/segment/index_set.h"

namespace attnd::attention {

// The greatest run. A longer one would leave a step fewer axes and slopes to read, but a segment is
// built beside the tokens that it replaces.
inline constexpr uint32_t kRunTokensMax = 32768;

// Tokens of a prompt's segment that begins behind `before` tokens. Over a tree `least` times the
// greatest power of two that makes no more than lies before it, nor more than kRunTokensMax; over
// other indexes, whose making takes longer the longer a segment is, `least`. least: 1..65536.
inline uint32_t RunTokens(const IndexSet& indexes, uint64_t before, uint32_t least) {
  uint32_t tokens = least;
  if (indexes.cluster_form() != ClusterForm::kTree) return tokens;
  while (2 * tokens <= kRunTokensMax && 2 * uint64_t{tokens} <= before) tokens *= 2;
  return tokens;
}

// Whether a segment of so many tokens is to have sections (SegmentForm): of a shorter one groups
// are few, and better ones are made without sections above them (docs/research/TREE.md,
// "Sections").
inline constexpr uint32_t kSectionsAbove = 8192;
inline bool WantsSections(const IndexSet& indexes, uint32_t tokens) {
  return indexes.has_sections() && tokens > kSectionsAbove;
}

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_RUN_TOKENS_H_
