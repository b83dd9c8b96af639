// SPDX-License-Identifier: Apache-2.0
//
// SyntheticSequence: a long segmented sequence for benchmarks, without an engine.
#ifndef ATTND_BENCH_SYNTHETIC_SEQUENCE_H_
#define ATTND_BENCH_SYNTHETIC_SEQUENCE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/backend.h"

namespace attnd::bench {

struct SyntheticSequence {
  std::shared_ptr<const attention::SequenceView> view;
  double build_seconds = 0;  // clustering and writing all segments
  uint64_t segmented_tokens = 0;
};

// How a synthetic sequence is cut into segments: all of segment_tokens; or as a prompt that a
// device answers, from segment_tokens on longer and longer (RunTokens), without sections.
enum class SegmentCut { kEqual, kOfDevice };

// `tokens` tokens of keys in short runs around random centres, and normal values; the last 64
// tokens in the tail. Indexes with a summary get random feature maps. device: see WithSegment.
SyntheticSequence MakeSyntheticSequence(const ModelShape& shape, uint64_t tokens,
                                        uint32_t segment_tokens, uint32_t threads, uint64_t seed,
                                        attention::IndexSet indexes = attention::kClusterIndexes,
                                        SegmentCut cut = SegmentCut::kEqual,
                                        attention::Backend* device = nullptr);

// A view's copy with keep-sets of `tokens` random tokens of the middle for each KV head.
std::shared_ptr<const attention::SequenceView> WithKeepSets(const attention::SequenceView& view,
                                                            uint32_t tokens, uint64_t seed);

// [query_heads, head_dim] normal queries as floats.
std::vector<float> MakeQueries(const ModelShape& shape, uint64_t seed);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_SYNTHETIC_SEQUENCE_H_
