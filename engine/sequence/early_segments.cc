// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/early_segments.h"

#include <glog/logging.h>

#include <algorithm>
#include <utility>

namespace attnd::engine {

uint64_t EarlySegments::bytes() const {
  uint64_t bytes = 0;
  for (const auto& segment : segments_) bytes += segment->bytes();
  return bytes;
}

void EarlySegments::Add(std::shared_ptr<const attention::Segment> segment) {
  CHECK_EQ(segment->first_position(), EndOr(segment->first_position()));
  segments_.push_back(std::move(segment));
}

EarlySegments EarlySegments::Before(uint64_t end) const {
  EarlySegments before;
  for (const auto& segment : segments_) {
    if (segment->end_position() <= end) before.segments_.push_back(segment);
  }
  return before;
}

EarlySegments EarlySegments::From(uint64_t begin) const {
  EarlySegments from;
  const auto first = std::find_if(segments_.begin(), segments_.end(),
                                  [&](const auto& s) { return s->first_position() == begin; });
  from.segments_.assign(first, segments_.end());
  return from;
}

}  // namespace attnd::engine
