// SPDX-License-Identifier: Apache-2.0
//
// A unit's whole step by one cooperative group, a thread block cluster, without the stages: what
// would pass between stages stays in the cluster's shared memory or in the second-level cache, and
// no unit waits for another. A step of a few long rows then takes one launch, where the stages'
// launches, and their waits for each other's last thread block, took as long as the reading.
//
// The thread blocks share a unit's slots evenly, and its pages of zones and of chosen tokens warp
// by warp. Each leaves one state of each kind; then each merges the states of some lanes.
#ifndef ATTND_GPU_CUDA_STEP_COOP_STEP_CUH_
#define ATTND_GPU_CUDA_STEP_COOP_STEP_CUH_

#include <algorithm>
#include <cstdint>

#include "gpu/cuda/step/answered.cuh"
#include "gpu/cuda/step/attend.cuh"
#include "gpu/cuda/step/coop_merge.cuh"
#include "gpu/cuda/step/coop_segments.cuh"
#include "gpu/cuda/step/cooperative_group.cuh"
#include "gpu/cuda/step/estimate.cuh"
#include "gpu/cuda/step/merge.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/prepare.cuh"
#include "gpu/cuda/step/score.cuh"
#include "gpu/cuda/step/unit_selector.cuh"

namespace attnd::gpu {

static_assert(kCoopWarps == kAttendWarps && kCoopWarps == kScoreWarps);

// Of a warp's ring, which scores, estimates and chosen tokens use in turn.
inline constexpr int kCoopScoreBuffers = 2;
inline constexpr int kCoopEstimateBuffers = 2;
inline constexpr int kCoopRingPages = 1;
template <int kKeyDim, int kValueDim>
inline constexpr uint32_t kCoopRingBytes = std::max({
    kCoopScoreBuffers * ClusterBuffer<kKeyDim>::kBytes,
    ChunkEstimator<__half, kValueDim, kCoopEstimateBuffers>::kRingBytes,
    PageReader<__half, kKeyDim, kValueDim, kCoopRingPages>::kRingBytes,
});

// A thread block's shared memory behind the rings. Other thread blocks write into `totals` and,
// while the group selects, into `unit.select`; and into the rings' place, where undecided keys are
// gathered then: ShareTotals' Sync comes after every ring's last use before that, Select's before
// the next.
template <int kKeyDim>
struct CoopMemory {
  uint32_t fragments[TileFragmentWords(kKeyDim)];
  UnitMemory<ThreadBlockCluster> unit;
  float4 totals[kCoopBlocksMax][kLanes];  // thread blocks' max and sum of mass, of optimistic mass
  ChunkRef chunks[kCoopWarps][2];
  CoopSegment segments[kCoopSegmentsMax];
};

// Thread blocks that a multiprocessor should hold.
template <int kKeyDim, int kValueDim>
inline constexpr int kCoopResident = kKeyDim <= 128 ? 4 : 2;

template <typename T, int kKeyDim, int kValueDim>
class CoopStep {
 public:
  using Memory = CoopMemory<kKeyDim>;
  static constexpr uint32_t kRingBytes = kCoopRingBytes<kKeyDim, kValueDim>;
  static constexpr uint32_t kSharedBytes = kCoopWarps * kRingBytes + sizeof(Memory);
  static_assert(sizeof(MergeMemory<kValueDim>) <= kCoopWarps * kRingBytes);
  static_assert(sizeof(CoopMergeMemory<kValueDim>) <= kCoopWarps * kRingBytes);
  static_assert(sizeof(TileQueries<kKeyDim>) <= kCoopWarps * kRingBytes);
  static_assert(sizeof(uint32_t) * kUndecidedMax <= kCoopWarps * kRingBytes);

  __device__ CoopStep(const StepHeader& step, const UnitPlace& unit)
      : step_(step),
        unit_(unit),
        row_(*unit.row),
        memory_(*reinterpret_cast<Memory*>(block_memory + kCoopWarps * kRingBytes)),
        segments_(step, unit, memory_.segments),
        ring_(WarpRing(kRingBytes)) {
    SelectMemory<ThreadBlockCluster>& select = memory_.unit.select;
    if (threadIdx.x == 0) {
      for (auto& box : select.part_boxes) box.Init();
      select.list_box.Init();
    }
    ThreadBlockCluster::Arrive();  // ShareTotals waits, before its first word to others
  }

  // As WriteAnswer, of all lanes that this thread block has answered.
  __device__ __forceinline__ bool Run() {
    Prepare();
    Score();
    Select();
    Estimate();
    Attend();
    ThreadBlockCluster::Sync();
    return Answer();
  }

 private:
  enum Pages : uint32_t { kSink, kTail, kChosen, kPages };

  // The unit's queries, as every thread block needs them.
  __device__ __forceinline__ void Prepare() {
    auto* queries = reinterpret_cast<TileQueries<kKeyDim>*>(block_memory);
    WriteFragments<T, kKeyDim, kCoopWarps>(step_, unit_, /*tile=*/0, queries, memory_.fragments);
    __syncthreads();
  }

  // This warp's slots.
  __device__ __forceinline__ SlotRange Slots() const {
    const uint32_t steps = row_.slots / kStepSlots,
                   warps = ThreadBlockCluster::blocks() * kCoopWarps;
    const uint64_t warp = CoopWarp<ThreadBlockCluster>();
    return {static_cast<uint32_t>(warp * steps / warps) * kStepSlots,
            static_cast<uint32_t>((warp + 1) * steps / warps) * kStepSlots};
  }
  __device__ __forceinline__ CoopFeed Feed() const {
    return CoopFeed(segments_, Slots(), memory_.chunks[threadIdx.x / 32]);
  }

  __device__ __forceinline__ void Score() {
    Totals totals[2] = {{-INFINITY, 0}, {-INFINITY, 0}};
    ScoreChunks<T, kKeyDim, kCoopScoreBuffers>(
        step_, Feed(), /*tile=*/0, ring_, [&](const ChunkRef&) { return memory_.fragments; },
        KeepAll(), totals);
    ShareTotals(totals);
  }

  // Combines the totals of the warps, then of the thread blocks: the scales of weights.
  __device__ __forceinline__ void ShareTotals(Totals (&totals)[2]) {
    auto* of_warps = reinterpret_cast<float4(*)[kLanes]>(block_memory);
    const uint32_t g = threadIdx.x % 32 / 4, lane = threadIdx.x % kLanes;
    for (Totals& total : totals) total.Join();
    __syncthreads();  // the rings are idle
    if (threadIdx.x % 4 == 0) {
      of_warps[threadIdx.x / 32][g] =
          make_float4(totals[0].max, totals[0].sum, totals[1].max, totals[1].sum);
    }
    ThreadBlockCluster::Wait();
    __syncthreads();
    static_assert(kCoopThreads >= kCoopBlocksMax * kLanes);
    if (threadIdx.x / kLanes < ThreadBlockCluster::blocks()) {
      const float4 own = SumOfTotals(kCoopWarps, [&](uint32_t w) { return of_warps[w][lane]; });
      ThreadBlockCluster::Write(&memory_.totals[ThreadBlockCluster::rank()][lane], own,
                                threadIdx.x / kLanes);
    }
    ThreadBlockCluster::Sync();
    if (threadIdx.x < kLanes) {
      const float4 all = SumOfTotals(ThreadBlockCluster::blocks(),
                                     [&](uint32_t rank) { return memory_.totals[rank][lane]; });
      memory_.unit.max[0][lane] = all.x, memory_.unit.sum[0][lane] = all.y;
      memory_.unit.max[1][lane] = all.z, memory_.unit.sum[1][lane] = all.w;
    }
    __syncthreads();
  }
  // (max, sum) of mass and of optimistic mass, in the order of their numbers.
  template <typename Of>
  static __device__ __forceinline__ float4 SumOfTotals(uint32_t count, Of of) {
    float4 all = make_float4(-INFINITY, 0, -INFINITY, 0);
    for (uint32_t i = 0; i < count; ++i) {
      all.x = fmaxf(all.x, of(i).x);
      all.z = fmaxf(all.z, of(i).z);
    }
#pragma unroll 4
    for (uint32_t i = 0; i < count; ++i) {
      const float4 part = of(i);
      all.y += part.y * Weight(part.x, all.x);
      all.w += part.w * Weight(part.z, all.z);
    }
    return all;
  }

  __device__ __forceinline__ void Select() {
    UnitSelector<ThreadBlockCluster, CoopSegments> selector(
        step_, unit_, segments_, segments_.CountClusters(), &memory_.unit,
        reinterpret_cast<uint32_t*>(block_memory));
    UnitResult result = selector.Select();
    chosen_tokens_ = result.chosen_tokens;
    if (ThreadBlockCluster::rank() == 0 && threadIdx.x == 0)
      step_.last_results[unit_.unit] = result;
    ThreadBlockCluster::Sync();  // fates and chosen tokens
  }

  // State number of this thread block's `kind`-th.
  __device__ __forceinline__ void Store(const WarpState<kValueDim>& state, const EstimateSums& sums,
                                        uint32_t kind) const {
    constexpr uint32_t kFloats = StateFloats(kValueDim);
    const uint64_t number = kind * ThreadBlockCluster::blocks() + ThreadBlockCluster::rank();
    StoreState<kValueDim>(state, sums, LanesOf(step_, unit_, 0),
                          TileStates(step_, unit_, 0, kFloats) + number * kFloats);
  }

  __device__ __forceinline__ void Estimate() {
    const uint32_t g = threadIdx.x % 32 / 4;
    EstimateSource source;
    source.lane = g;
    source.group = step_.group;
    source.max = memory_.unit.max[0][g];
    source.used = g < step_.group;
    source.all = false;
    WarpState<kValueDim> state;
    EstimateSums sums;
    state.max = source.max;
    ChunkEstimator<T, kValueDim, kCoopEstimateBuffers>(source, ring_).Run(Feed(), &state, &sums);
    if constexpr (kEstimateScale<T> != 1) ScaleValues(1 / kEstimateScale<T>, &state);
    Store(state, sums, /*kind=*/1);
  }

  __device__ __forceinline__ TokenSource SourceOf(Pages pages) const {
    TokenSource source;
    const SegmentRef* segments = step_.segments + row_.segments_begin;
    switch (pages) {
      case kSink:
        source.pages = segments[0].pages + unit_.kv_head * segments[0].pages_head_bytes;
        source.end = segments[0].unclustered;
        break;
      case kTail:
        source.tail_blocks = step_.tail_blocks + row_.tail_blocks_begin;
        source.head_offset = unit_.kv_head * step_.tail_block_head_bytes;
        source.begin = row_.tail_begin;
        source.end = TailEnd();
        break;
      default:
        source.chosen = UnitChosen(step_, unit_);
        source.segments = segments;
        source.kv_head = unit_.kv_head;
        source.end = chosen_tokens_;
    }
    return source;
  }
  // What the unit's query sees of the tail.
  __device__ __forceinline__ uint32_t TailEnd() const {
    return row_.tail_limit + row_.causal * unit_.first_token;
  }

  // Zones and chosen tokens; the group's warps take turns, for the tail from the last one on, so
  // that no warp has a page of each zone while others have none.
  __device__ __forceinline__ void Attend() {
    WaitForKernelBefore();  // which puts the newest tokens into their pages
    const uint32_t warps = ThreadBlockCluster::blocks() * kCoopWarps,
                   warp = CoopWarp<ThreadBlockCluster>();
    WarpState<kValueDim> state;
#pragma unroll 1
    for (uint32_t pages = kSink; pages < kPages; ++pages) {
      const TokenSource source = SourceOf(static_cast<Pages>(pages));
      if (source.begin < source.end) {
        PageReader<T, kKeyDim, kValueDim, kCoopRingPages> reader(source, memory_.fragments, ~0u,
                                                                 ring_);
        reader.Run(pages == kTail ? warps - 1 - warp : warp, warps, &state);
      }
      if (pages == kSink) continue;
      Store(state, {}, pages == kTail ? 0 : 2);
      state = WarpState<kValueDim>();
    }
  }

  // The thread blocks take turns at lanes.
  __device__ __forceinline__ bool Answer() {
    const AnswerTo to(step_);
    bool flawless = true;
    auto* memory = reinterpret_cast<CoopMergeMemory<kValueDim>*>(block_memory);
    for (uint32_t lane = ThreadBlockCluster::rank(); lane < step_.group;
         lane += ThreadBlockCluster::blocks()) {
      const LaneScale scale = {memory_.unit.max[0][lane], memory_.unit.sum[0][lane], 0, 0};
      const MergedLane merged =
          MergeCoop<kValueDim>(TileStates(step_, unit_, 0, StateFloats(kValueDim)), lane, memory);
      flawless &= WriteAnswer<kValueDim, kCoopWarps>(step_, to, LanePlace(step_, unit_, 0, lane),
                                                     merged, &scale, memory->lengths);
    }
    return flawless;
  }

  const StepHeader& step_;
  const UnitPlace& unit_;
  const RowRef& row_;
  Memory& memory_;
  const CoopSegments segments_;
  const uint32_t ring_;
  uint32_t chosen_tokens_ = 0;
};

// ---- kernels ----

// Cooperative groups of the grid's cluster size; the first one has number `first` of coop_units.
template <typename T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kCoopThreads, (kCoopResident<kKeyDim, kValueDim>))
    CoopKernel(const __grid_constant__ StepHeader step, uint32_t first) {
#if __CUDA_ARCH__ >= 900
  const CoopUnit number = step.coop_units[first + blockIdx.x / ThreadBlockCluster::blocks()];
  const UnitPlace unit(step, step.row_refs + number.row, number.unit);
  NoteAnswered(step, CoopStep<T, kKeyDim, kValueDim>(step, unit).Run());
#else
  __trap();  // CountGroups has said that there are none
#endif
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_COOP_STEP_CUH_
