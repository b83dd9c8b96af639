// SPDX-License-Identifier: Apache-2.0
//
// EarlySegments: small segments of tokens that are still in a sequence's tail.
#ifndef ATTND_ENGINE_SEQUENCE_EARLY_SEGMENTS_H_
#define ATTND_ENGINE_SEQUENCE_EARLY_SEGMENTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/segment/segment.h"

namespace attnd::engine {

// Copies of a tail's oldest tokens, with an index, so that steps need not read all of a long tail
// exactly. A cache: the tail keeps its tokens, and whoever builds segments, shortens a history or
// writes it down reads the tail. So early segments may be dropped at any time, are on no disk, and
// need no moving when a full segment takes their place.
//
// Segments are shared by pointer, with views and forks. Thread-safety: none; the sequence's lock
// guards it. Invariant: each segment begins where the one before it ends.
class EarlySegments {
 public:
  using Segments = std::vector<std::shared_ptr<const attention::Segment>>;

  // Of each early segment. Large enough that its axes and slopes, which it has like any other
  // segment, cost a step less than reading its tokens; what is left over is read exactly.
  static constexpr uint32_t kTokens = 1024;

  const Segments& all() const { return segments_; }
  // Where the tail begins that is left for steps to read; `begin` is where the whole tail begins.
  uint64_t EndOr(uint64_t begin) const {
    return segments_.empty() ? begin : segments_.back()->end_position();
  }
  uint64_t bytes() const;

  // `segment` begins at EndOr(the tail's begin).
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
