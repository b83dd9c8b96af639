// SPDX-License-Identifier: Apache-2.0
//
// The rules by which a sequence's tokens become segments, and all segments of a history by these
// rules. Sequence and Segmenter go by the rules; CutOf is for those who want to know the sizes of a
// sequence that is not there.
#ifndef ATTND_ENGINE_SEQUENCE_SEGMENT_RULES_H_
#define ATTND_ENGINE_SEQUENCE_SEGMENT_RULES_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "attention/segment/run_tokens.h"
#include "attention/segment/segment.h"
#include "common/model_shape.h"

namespace attnd::engine {

// Fewer tokens of a prompt's end stay in the tail.
inline constexpr uint32_t kSegmentTokensMin = 512;

// Where the window of a history of `length` tokens begins.
inline uint64_t WindowBegin(uint64_t length, uint32_t window) {
  return length - std::min<uint64_t>(length, window);
}

// Tokens of the segment that a prompt's next tokens, from `begin` on, are to become: at least
// `least`. has_ids: whether the next token has an id.
inline uint32_t PromptRunTokens(const attention::IndexSet& indexes, uint64_t begin, uint32_t least,
                                bool has_ids) {
  return has_ids ? least : attention::RunTokens(indexes, begin, least);
}

// Tokens of the next segment of a tail of which [begin, end) may become segments; 0 if these are
// fewer than min_tokens.
inline uint32_t NextSegmentTokens(uint64_t begin, uint64_t end, uint32_t min_tokens,
                                  uint32_t max_tokens) {
  if (end < begin + min_tokens) return 0;
  return static_cast<uint32_t>(std::min<uint64_t>(max_tokens, end - begin));
}

// Tokens at the front of a segment from `begin` on that are in no cluster.
inline uint32_t UnclusteredTokens(uint64_t begin, uint32_t sink) { return begin == 0 ? sink : 0; }

inline attention::SegmentForm SegmentFormOf(const ModelShape& shape,
                                            const attention::IndexSet& indexes, uint32_t tokens,
                                            uint32_t unclustered, bool on_device) {
  const bool sections = !on_device && attention::WantsSections(indexes, tokens);
  return {shape, indexes, tokens, unclustered, sections};
}

// Positions [begin, end) of an early segment.
struct EarlyRun {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t tokens() const { return end - begin; }
  bool operator==(const EarlyRun&) const = default;
};

// Whether a sequence may have early segments. has_segments: whether it has a full one.
inline bool HasEarlySegments(const attention::IndexSet& indexes, bool has_segments) {
  return has_segments && indexes.cluster_form() == attention::ClusterForm::kTree;
}

// The next early segment behind `runs`, which begin at tail_begin and follow one another, or
// nothing while fewer than `least` further tokens lie before segments_end. It takes the place of
// the runs from its begin on. max_tokens >= least.
std::optional<EarlyRun> NextEarlyRun(std::span<const EarlyRun> runs, uint64_t tail_begin,
                                     uint64_t segments_end, uint32_t least, uint32_t max_tokens);

struct CutRules {
  attention::IndexSet indexes;
  uint32_t segment_tokens = 8192;
  uint32_t sink = 0;
  uint32_t window = 0;
  bool on_device = false;
  bool has_ids = false;  // whether all tokens of the prompt have ids
};

// What a history consists of.
struct SequenceCut {
  std::vector<attention::SegmentForm> segments;  // from position 0 on
  std::vector<attention::SegmentForm> early;     // from where the tail begins on
  uint64_t tail_begin = 0;                       // behind `segments`
  uint64_t early_end = 0;                        // behind `early`; tail_begin if there are none
  uint64_t length = 0;
  uint64_t tail_blocks = 0;
};

// The segments of a prompt that was uploaded while memory was free, and of tokens that steps
// generated behind it one by one, when the background has built all that is due. Its lists have an
// entry for each segment.
SequenceCut CutOf(const ModelShape& shape, const CutRules& rules, uint64_t prompt_tokens,
                  uint64_t generated_tokens);

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_SEGMENT_RULES_H_
