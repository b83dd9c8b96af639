// SPDX-License-Identifier: Apache-2.0
//
// EarlySegments: small segments of tokens that are still in a sequence's tail.
#ifndef ATTND_ENGINE_SEQUENCE_EARLY_SEGMENTS_H_
#define ATTND_ENGINE_SEQUENCE_EARLY_SEGMENTS_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/segment/segment.h"
#include "common/model_shape.h"
#include "engine/sequence/segment_rules.h"

namespace attnd::engine {

// Copies of a tail's oldest tokens, with an index, so that steps need not read all of a long tail
// exactly. A cache: the tail keeps its tokens, and whoever builds segments, shortens a history or
// writes it down reads the tail. So early segments may be dropped at any time, are on no disk, and
// need no moving when a full segment takes their place.
//
// The first ones are small, and longer ones take their place as tokens gather (NextBegin): each
// segment has axes and slopes of its own, which every step reads.
//
// Segments are shared by pointer, with views and forks. Thread-safety: none; the sequence's lock
// guards it. Invariant: each segment begins where the one before it ends.
class EarlySegments {
 public:
  using Segments = std::vector<std::shared_ptr<const attention::Segment>>;

  // The lengths of early segments are multiples of LeastTokens: so many that axes and slopes cost a
  // step less than reading the tokens. What is left over is read exactly. LeastTokens is kTokens,
  // or a multiple of it where a head has more than 512 channels.
  static constexpr uint32_t kTokens = 512;
  static uint32_t LeastTokens(const ModelShape& shape);

  const Segments& all() const { return segments_; }
  // Where the tail begins that is left for steps to read; `begin` is where the whole tail begins.
  uint64_t EndOr(uint64_t begin) const {
    return segments_.empty() ? begin : segments_.back()->end_position();
  }
  uint64_t bytes() const;

  std::vector<EarlyRun> Runs() const;

  // Where a segment of at most `tokens_max` tokens is to begin that ends at `end`, behind all
  // `runs` that there are: it has the tokens of the last segments, too, as long as each is at most
  // twice as long as what follows it (docs/PERFORMANCE.md has the other rules that were tried). So
  // each segment is more than twice as long as the next, unless memory was short, and whenever a
  // token is indexed anew its segment grows by half or more.
  static uint64_t NextBegin(std::span<const EarlyRun> runs, uint64_t tail_begin, uint64_t end,
                            uint32_t tokens_max);
  // Whether Add may be given a segment of [begin, end).
  bool Fits(uint64_t tail_begin, uint64_t begin, uint64_t end) const;
  // Adds a segment that reaches further than all that there are, in place of those from its begin
  // on.
  void Add(std::shared_ptr<const attention::Segment> segment);
  // Those that lie before `end`.
  EarlySegments Before(uint64_t end) const;
  // Those of a tail that begins at `begin`; none if one of them lies across `begin`.
  EarlySegments From(uint64_t begin) const;

 private:
  Segments segments_;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_EARLY_SEGMENTS_H_
