// SPDX-License-Identifier: Apache-2.0
//
// BegunSegment: a segment under construction, with its memory.
#ifndef ATTND_ENGINE_SEQUENCE_BEGUN_SEGMENT_H_
#define ATTND_ENGINE_SEQUENCE_BEGUN_SEGMENT_H_

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "attention/index/segment_builder.h"
#include "engine/memory_budget.h"
#include "engine/sequence/sequence.h"

namespace attnd::engine {

struct BegunSegment {
  SegmentJob job;
  Reservation memory;  // of the segment; ends after the builder
  std::unique_ptr<attention::SegmentBuilder> builder;
  uint32_t layers = 0;                                // that are built, from the first on
  std::chrono::steady_clock::duration time_spent{0};  // on building them
};

// Of which nothing is built yet. ResourceExhausted, bad_alloc.
absl::StatusOr<BegunSegment> BeginSegment(const Sequence& sequence, const SegmentJob& job,
                                          uint64_t segment_id, MemoryBudget* budget);

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_BEGUN_SEGMENT_H_
