// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/begun_segment.h"

#include <utility>

#include "common/status.h"
#include "engine/sequence/segment_rules.h"

namespace attnd::engine {

using attention::Segment;
using attention::SegmentBuilder;

absl::StatusOr<BegunSegment> BeginSegment(const Sequence& sequence, const SegmentJob& job,
                                          uint64_t segment_id, MemoryBudget* budget) {
  const attention::SegmentForm form = SegmentFormOf(
      sequence.shape(), sequence.indexes(), job.tokens, job.unclustered, sequence.on_device());
  BegunSegment begun;
  begun.job = job;
  ATTND_ASSIGN_OR_RETURN(
      begun.memory,
      budget->Reserve(Segment::IndexBytes(form) + Segment::PayloadBytes(form), "a segment"));
  begun.builder = std::make_unique<SegmentBuilder>(job.view, segment_id, form);
  if (!begun.builder->allocated()) {
    return absl::ResourceExhaustedError("the system refused memory for a segment");
  }
  return begun;
}

}  // namespace attnd::engine
