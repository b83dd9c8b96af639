// SPDX-License-Identifier: Apache-2.0
//
// Where things are: from the number of an item to its row, unit and segment, and from there to
// addresses. What step_layout.h says in words, said once in code.
#ifndef ATTND_GPU_CUDA_STEP_PLACE_CUH_
#define ATTND_GPU_CUDA_STEP_PLACE_CUH_

#include <cstdint>

#include "gpu/layout/kernel_shapes.h"
#include "gpu/layout/step_layout.h"
#include "gpu/layout/tree_layout.h"

namespace attnd::gpu {

inline constexpr uint32_t kTailBlockRows = 64;

// Last i in [0, n) with first(i) <= item; first(0) is 0. Each look is a wait for memory.
template <typename First>
__device__ __forceinline__ uint32_t LastNotAfter(uint32_t n, uint64_t item, First first) {
  uint32_t low = 0, high = n;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (first(middle) <= item ? low : high) = middle;
  }
  return low;
}

// The same by a whole warp, all of whose threads have one item: a look at up to 32 at a time.
template <typename First>
__device__ __forceinline__ uint32_t LastNotAfterOfWarp(uint32_t n, uint64_t item, First first) {
  uint32_t low = 0;
  while (n > 1) {
    const uint32_t apart = (n + 31) / 32, at = threadIdx.x % 32 * apart;
    const bool not_after = at < n && first(low + at) <= item;
    const uint32_t before = (__popc(__ballot_sync(~0u, not_after)) - 1) * apart;
    low += before;
    n = min(apart, n - before);
  }
  return low;
}

// How an item is looked for.
struct ByWarp {
  template <typename First>
  static __device__ __forceinline__ uint32_t Last(uint32_t n, uint64_t item, First first) {
    return LastNotAfterOfWarp(n, item, first);
  }
};
struct ByThread {
  template <typename First>
  static __device__ __forceinline__ uint32_t Last(uint32_t n, uint64_t item, First first) {
    return LastNotAfter(n, item, first);
  }
};

// A unit and what it belongs to.
struct UnitPlace {
  const RowRef* row;
  uint32_t unit;
  uint32_t in_row;  // its number in the row
  uint32_t kv_head;
  uint32_t first_token;  // query token of the row
  uint32_t tokens;

  __device__ __forceinline__ UnitPlace(const StepHeader& step, const RowRef* r, uint32_t number)
      : row(r), unit(r->first_unit + number), in_row(number) {
    kv_head = number % step.kv_heads;
    first_token = number / step.kv_heads * r->tokens_per_unit;
    tokens = min(r->tokens_per_unit, r->query_tokens - first_token);
  }
};

// The row of an item, by the first that each row has.
template <typename Search = ByWarp>
__device__ __forceinline__ const RowRef* RowOf(const StepHeader& step, uint32_t item,
                                               uint32_t RowRef::*first) {
  return step.row_refs +
         Search::Last(step.rows, item, [&](uint32_t i) { return step.row_refs[i].*first; });
}
__device__ __forceinline__ const RowRef* RowOfUnit(const StepHeader& step, uint32_t unit) {
  return RowOf(step, unit, &RowRef::first_unit);
}

// Lane `lane` of a tile: which query head and token.
struct LanePlace {
  bool used;
  uint32_t token;  // of the row
  uint64_t slot;   // in StepHeader::lse

  __device__ __forceinline__ LanePlace(const StepHeader& step, const UnitPlace& unit, uint32_t tile,
                                       uint32_t lane) {
    const uint32_t pair = tile * kLanes + lane;
    const uint32_t in_unit = pair / step.group;
    used = in_unit < unit.tokens;
    token = unit.first_token + in_unit;
    slot = (uint64_t{unit.row->first_query_token} + token) * (step.kv_heads * step.group) +
           unit.kv_head * step.group + pair % step.group;
  }
};

// Lanes of a tile that are queries; the first ones.
__device__ __forceinline__ uint32_t LanesOf(const StepHeader& step, const UnitPlace& unit,
                                            uint32_t tile) {
  return min(unit.tokens * step.group - tile * kLanes, kLanes);
}

__device__ __forceinline__ uint32_t SegmentOfSlot(const StepHeader& step, const RowRef& row,
                                                  uint32_t slot) {
  const SegmentRef* segments = step.segments + row.segments_begin;
  return LastNotAfter(row.segment_count, slot, [&](uint32_t i) { return segments[i].first_slot; });
}

// One KV head's index of a segment.
struct IndexPlace {
  const SegmentRef* segment;
  const std::byte* head;

  __device__ __forceinline__ IndexPlace(const StepHeader& step, const RowRef& row, uint32_t number,
                                        uint32_t kv_head)
      : segment(step.segments + row.segments_begin + number),
        head(segment->index + kv_head * segment->index_head_bytes) {}

  __device__ __forceinline__ uint32_t clusters() const {
    return *reinterpret_cast<const uint32_t*>(head);
  }
};

// A unit's share of scratch.
__device__ __forceinline__ float* UnitScores(const StepHeader& step, const UnitPlace& unit) {
  return step.scores + unit.row->first_score + unit.in_row * ScoresPerUnit(*unit.row, step.group);
}
__device__ __forceinline__ uint8_t* UnitFates(const StepHeader& step, const UnitPlace& unit) {
  return step.fates + unit.row->first_fate + unit.in_row * FatesPerUnit(*unit.row);
}
__device__ __forceinline__ uint32_t* UnitChosen(const StepHeader& step, const UnitPlace& unit) {
  return step.chosen + unit.row->first_token + unit.in_row * unit.row->clustered_tokens;
}

// States of a tile: read pieces, then estimate pieces, then chosen pieces.
__device__ __forceinline__ float* TileStates(const StepHeader& step, const UnitPlace& unit,
                                             uint32_t tile, uint32_t state_floats) {
  const uint64_t state = unit.row->first_state +
                         (uint64_t{unit.in_row} * step.tiles_max + tile) * StatesPerTile(*unit.row);
  return step.states + state * state_floats;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_PLACE_CUH_
