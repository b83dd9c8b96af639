// SPDX-License-Identifier: Apache-2.0
//
// How a cooperative group finds slots and clusters: the segments of a unit's row, resolved once
// into each thread block's shared memory, and a warp's way through its slots.
#ifndef ATTND_GPU_CUDA_STEP_COOP_SEGMENTS_CUH_
#define ATTND_GPU_CUDA_STEP_COOP_SEGMENTS_CUH_

#include <cstdint>

#include "gpu/cuda/step/cooperative_group.cuh"
#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/unit_selector.cuh"

namespace attnd::gpu {

inline constexpr uint32_t kCoopThreads = ThreadBlockCluster::kBlockThreads;

// A segment of the row, for the unit's KV head.
struct CoopSegment {
  const std::byte* head;  // of the index
  IndexOffsets offsets;
  uint32_t first_slot;
  uint32_t clusters;
  uint32_t max_clusters;
};

// The row's segments, resolved once; slots and chunks of clusters in them.
class CoopSegments {
 public:
  __device__ CoopSegments(const StepHeader& step, const UnitPlace& unit, CoopSegment* segments)
      : row_(*unit.row),
        segments_(segments),
        scores_(UnitScores(step, unit)),
        fates_(UnitFates(step, unit)),
        unit_(unit.unit) {
    for (uint32_t s = threadIdx.x; s < row_.segment_count; s += kCoopThreads) {
      const IndexPlace index(step, row_, s, unit.kv_head);
      segments[s] = {index.head, index.segment->offsets, index.segment->first_slot,
                     index.clusters(), index.segment->max_clusters};
    }
  }

  // After __syncthreads.
  __device__ uint32_t CountClusters() const {
    uint32_t clusters = 0;
    for (uint32_t s = threadIdx.x % 32; s < row_.segment_count; s += 32) {
      clusters += segments_[s].clusters;
    }
    return SumOverWarp(clusters);
  }
  __device__ __forceinline__ SlotPlace Of(uint32_t slot) const {
    const uint32_t s = SegmentOf(slot);
    const CoopSegment& segment = segments_[s];
    return {segment.head,
            segment.offsets.starts,
            segment.offsets.spread,
            s,
            slot - segment.first_slot,
            segment.clusters};
  }
  // Slots from `slot` on that lie in one segment, up to `end`, as a chunk.
  __device__ __forceinline__ void Resolve(uint32_t slot, uint32_t end, ChunkRef* chunk) const {
    const uint32_t s = SegmentOf(slot);
    const CoopSegment& segment = segments_[s];
    chunk->steps = (min(end, EndOf(s)) - slot) / kStepSlots;
    chunk->head = segment.head;
    chunk->scores = scores_ + slot;
    chunk->fates = fates_ + slot;
    chunk->offsets = segment.offsets;
    chunk->segment = s;
    chunk->first = slot - segment.first_slot;
    chunk->clusters = segment.clusters;
    chunk->max_clusters = segment.max_clusters;
    chunk->unit = unit_;
    chunk->slots = row_.slots;
    chunk->second_order = row_.second_order;
  }

 private:
  __device__ __forceinline__ uint32_t SegmentOf(uint32_t slot) const {
    return LastNotAfter(row_.segment_count, slot,
                        [&](uint32_t i) { return segments_[i].first_slot; });
  }
  __device__ __forceinline__ uint32_t EndOf(uint32_t s) const {
    return s + 1 < row_.segment_count ? segments_[s + 1].first_slot : row_.slots;
  }
  const RowRef& row_;
  const CoopSegment* const segments_;
  float* const scores_;
  uint8_t* const fates_;
  const uint32_t unit_;
};

// Slots of a warp, a multiple of kStepSlots.
struct SlotRange {
  uint32_t begin, end;
};

// What ChunkFeed is for the score stage, for a warp of a cooperative group: its slots, a chunk for
// each segment that they touch.
class CoopFeed {
 public:
  // memory: two chunks of this warp.
  __device__ CoopFeed(const CoopSegments& segments, SlotRange range, ChunkRef* memory)
      : segments_(segments), slot_(range.begin), end_(range.end), memory_(memory) {
    Fetch(0);
  }

  __device__ __forceinline__ bool done() const { return slot_ >= end_; }
  __device__ __forceinline__ bool has_next() const { return After() < end_; }
  __device__ __forceinline__ const ChunkRef& now() const { return memory_[place_]; }
  __device__ __forceinline__ const ChunkRef& next() const { return memory_[place_ ^ 1]; }
  __device__ __forceinline__ void FetchAhead() const { Fetch(1); }
  __device__ __forceinline__ void Advance() {
    slot_ = After();
    place_ ^= 1;
  }

 private:
  __device__ __forceinline__ uint32_t After() const { return slot_ + now().steps * kStepSlots; }
  __device__ __forceinline__ void Fetch(uint32_t ahead) const {
    const uint32_t slot = ahead == 0 ? slot_ : After();
    __syncwarp();
    if (threadIdx.x % 32 == 0 && slot < end_) {
      segments_.Resolve(slot, end_, &memory_[place_ ^ ahead]);
    }
    __syncwarp();
  }
  const CoopSegments& segments_;
  uint32_t slot_;
  const uint32_t end_;
  ChunkRef* const memory_;
  uint32_t place_ = 0;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_COOP_SEGMENTS_CUH_
