// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/early_segments.h"

#include <glog/logging.h>

#include <algorithm>
#include <utility>

namespace attnd::engine {

uint32_t EarlySegments::LeastTokens(const ModelShape& shape) {
  // Of a tree's head, in bf16.
  const uint32_t axes_bytes = 2 * shape.head_dim * (shape.head_dim + shape.value_dim);
  const uint32_t run_bytes = kTokens * shape.token_bytes();
  return (axes_bytes + run_bytes - 1) / run_bytes * kTokens;
}

uint64_t EarlySegments::bytes() const {
  uint64_t bytes = 0;
  for (const auto& segment : segments_) bytes += segment->bytes();
  return bytes;
}

std::vector<EarlyRun> EarlySegments::Runs() const {
  std::vector<EarlyRun> runs;
  for (const auto& segment : segments_) {
    runs.push_back({segment->first_position(), segment->end_position()});
  }
  return runs;
}

uint64_t EarlySegments::NextBegin(std::span<const EarlyRun> runs, uint64_t tail_begin, uint64_t end,
                                  uint32_t tokens_max) {
  uint64_t begin = runs.empty() ? tail_begin : runs.back().end;
  for (auto last = runs.rbegin(); last != runs.rend(); ++last) {
    const bool joins = last->tokens() <= 2 * (end - begin) && end - last->begin <= tokens_max;
    if (!joins) break;
    begin = last->begin;
  }
  return begin;
}

bool EarlySegments::Fits(uint64_t tail_begin, uint64_t begin, uint64_t end) const {
  return end > EndOr(tail_begin) && begin == Before(begin).EndOr(tail_begin);
}

void EarlySegments::Add(std::shared_ptr<const attention::Segment> segment) {
  const uint64_t begin = segment->first_position();
  CHECK_GT(segment->end_position(), EndOr(begin));
  while (!segments_.empty() && segments_.back()->first_position() >= begin) segments_.pop_back();
  CHECK_EQ(begin, EndOr(begin));
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
