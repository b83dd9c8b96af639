// SPDX-License-Identifier: Apache-2.0
//
// A unit's whole step by one team, without the stages: what passes between them stays in the
// team's shared memory or in the second-level cache, and no unit waits for another. A step of a few
// long rows then takes one launch, where the stages' launches, and their waits for each other's
// last block, took as long as the reading.
//
// Blocks share a unit's slots evenly, and its pages of zones and of chosen tokens warp by warp; a
// block leaves one state of each kind, which the team's blocks merge, each some lanes.
#ifndef ATTND_GPU_CUDA_STEP_TEAM_STEP_CUH_
#define ATTND_GPU_CUDA_STEP_TEAM_STEP_CUH_

#include <algorithm>
#include <cstdint>

#include "gpu/cuda/step/attend.cuh"
#include "gpu/cuda/step/estimate.cuh"
#include "gpu/cuda/step/merge.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/prepare.cuh"
#include "gpu/cuda/step/score.cuh"
#include "gpu/cuda/step/team.cuh"
#include "gpu/cuda/step/unit_selector.cuh"

namespace attnd::gpu {

static_assert(kTeamWarps == kAttendWarps && kTeamWarps == kScoreWarps);

inline constexpr uint32_t kTeamThreads = ClusterTeam::kBlockThreads;
// Of a warp's ring, which scores, estimates and chosen tokens use in turn.
inline constexpr int kTeamScoreStages = 2;
inline constexpr int kTeamEstimateStages = 2;
inline constexpr int kTeamRingPages = 1;
template <int kKeyDim, int kValueDim>
inline constexpr uint32_t kTeamRingBytes = std::max({
    kTeamScoreStages * ClusterStage<kKeyDim>::kBytes,
    ChunkEstimator<__half, kValueDim, kTeamEstimateStages>::kRingBytes,
    PageReader<__half, kKeyDim, kValueDim, kTeamRingPages>::kRingBytes,
});

// A segment of the row, for the unit's KV head.
struct TeamSegment {
  const std::byte* head;  // of the index
  IndexOffsets offsets;
  uint32_t first_slot;
  uint32_t clusters;
  uint32_t max_clusters;
};

// A block's shared memory behind the rings. Other blocks write into `totals` and, while the team
// selects, into `unit.select`; and into the rings' place, where undecided keys are gathered then:
// ShareTotals' Sync comes after every ring's last use before that, Select's before the next.
template <int kKeyDim>
struct TeamMemory {
  uint32_t fragments[TileFragmentWords(kKeyDim)];
  UnitMemory<ClusterTeam> unit;
  float4 totals[kTeamBlocksMax][kLanes];  // each block's max and sum of mass, of optimistic mass
  ChunkRef chunks[kTeamWarps][2];
  TeamSegment segments[kTeamSegmentsMax];
};

// The row's segments, resolved once; slots and chunks of clusters in them.
class TeamSegments {
 public:
  __device__ TeamSegments(const StepHeader& step, const UnitPlace& unit, TeamSegment* segments)
      : row_(*unit.row),
        segments_(segments),
        scores_(UnitScores(step, unit)),
        fates_(UnitFates(step, unit)),
        unit_(unit.unit) {
    for (uint32_t s = threadIdx.x; s < row_.segment_count; s += kTeamThreads) {
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
    const TeamSegment& segment = segments_[s];
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
    const TeamSegment& segment = segments_[s];
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
  const TeamSegment* const segments_;
  float* const scores_;
  uint8_t* const fates_;
  const uint32_t unit_;
};

// Slots of a warp, a multiple of kStepSlots.
struct SlotRange {
  uint32_t begin, end;
};

// ChunkFeed's part for a warp of a team: its slots, a chunk for each segment that they touch.
class TeamFeed {
 public:
  // memory: two chunks of this warp.
  __device__ TeamFeed(const TeamSegments& segments, SlotRange range, ChunkRef* memory)
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
  const TeamSegments& segments_;
  uint32_t slot_;
  const uint32_t end_;
  ChunkRef* const memory_;
  uint32_t place_ = 0;
};

__device__ __forceinline__ void AddScaled(float factor, const float4& x, float4* sum) {
  sum->x += factor * x.x;
  sum->y += factor * x.y;
  sum->z += factor * x.z;
  sum->w += factor * x.w;
}

template <int kValueDim>
struct TeamMergeMemory {
  float2 norms[kTeamWarps];
  float values[2][kTeamWarps][kValueDim];  // of the zones, of the other states
};

// The states of one lane, merged by one block: blocks' zones, then their estimates, then their
// chosen tokens. Everything is asked for at once, as each wait is one for the whole team.
template <int kValueDim>
__device__ __forceinline__ MergedLane MergeTeam(const float* tile, uint32_t lane,
                                                TeamMergeMemory<kValueDim>* memory) {
  constexpr uint32_t kStatesMax = 3 * kTeamBlocksMax;
  constexpr uint32_t kOwn = (kStatesMax + kTeamWarps - 1) / kTeamWarps;  // of a warp
  static_assert(kStatesMax <= 64 && kValueDim <= 128);
  const uint32_t warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const uint32_t blocks = ClusterTeam::blocks(), states = 3 * blocks;
  const auto state = [&](uint32_t i) {
    return tile + uint64_t{i} * StateFloats(kValueDim) + lane * (kStateHead + kValueDim);
  };
  // Each thread has the heads of two states, and four channels of all of its warp's.
  float4 heads[2] = {make_float4(-INFINITY, 0, 0, 0), make_float4(-INFINITY, 0, 0, 0)};
  float dropped[2] = {0, 0};
#pragma unroll
  for (uint32_t k = 0; k < 2; ++k) {
    const uint32_t i = k * 32 + thread;
    if (i >= states) continue;
    heads[k] = *reinterpret_cast<const float4*>(state(i));
    dropped[k] = state(i)[4];
  }
  float4 values[kOwn];
#pragma unroll
  for (uint32_t k = 0; k < kOwn; ++k) {
    const uint32_t i = k * kTeamWarps + warp;
    values[k] = make_float4(0, 0, 0, 0);
    if (i < states && thread * 4 < kValueDim) {
      values[k] = *reinterpret_cast<const float4*>(state(i) + kStateHead + thread * 4);
    }
  }
  MergedLane merged;
  merged.max = -INFINITY;
#pragma unroll
  for (uint32_t k = 0; k < 2; ++k) {
    if (heads[k].y > 0) merged.max = fmaxf(merged.max, heads[k].x);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    merged.max = fmaxf(merged.max, __shfl_xor_sync(~0u, merged.max, offset));
  }
  float factors[2];
  float sums[kLaneSums] = {};
#pragma unroll
  for (uint32_t k = 0; k < 2; ++k) {
    const uint32_t i = k * 32 + thread;
    factors[k] = heads[k].y > 0 ? Exp2(heads[k].x - merged.max) : 0.0f;
    const float sum = factors[k] * heads[k].y;
    const bool estimate = i >= blocks && i < 2 * blocks;
    sums[kZones] += i < blocks ? sum : 0.0f;
    sums[kOthers] += i < blocks ? 0.0f : sum;
    sums[kEstimated] += estimate ? sum : 0.0f;
    sums[kErrors] += estimate ? heads[k].z : 0.0f;
    sums[kMoments] += estimate ? heads[k].w : 0.0f;
    sums[kDropped] += estimate ? dropped[k] : 0.0f;
  }
#pragma unroll
  for (int k = 0; k < kLaneSums; ++k) {
    for (int offset = 16; offset > 0; offset /= 2) {
      sums[k] += __shfl_xor_sync(~0u, sums[k], offset);
    }
    merged.sums[k] = sums[k];
  }
  float4 of_kind[2] = {};
#pragma unroll
  for (uint32_t k = 0; k < kOwn; ++k) {
    const uint32_t i = k * kTeamWarps + warp;
    const float factor =
        i < 32 ? __shfl_sync(~0u, factors[0], i % 32) : __shfl_sync(~0u, factors[1], i % 32);
    const float of_zone = i < blocks ? factor : 0.0f;
    AddScaled(of_zone, values[k], &of_kind[0]);
    AddScaled(factor - of_zone, values[k], &of_kind[1]);
  }
  if (thread * 4 < kValueDim) {
#pragma unroll
    for (uint32_t kind = 0; kind < 2; ++kind) {
      *reinterpret_cast<float4*>(&memory->values[kind][warp][thread * 4]) = of_kind[kind];
    }
  }
  __syncthreads();
  merged.zone_value = merged.other_value = 0;
  if (threadIdx.x < kValueDim) {
    for (uint32_t w = 0; w < kTeamWarps; ++w) {
      merged.zone_value += memory->values[0][w][threadIdx.x];
      merged.other_value += memory->values[1][w][threadIdx.x];
    }
  }
  return merged;
}

// Blocks that a multiprocessor should hold.
template <int kKeyDim, int kValueDim>
inline constexpr int kTeamResident = kKeyDim <= 128 ? 4 : 2;

template <typename T, int kKeyDim, int kValueDim>
class TeamStep {
 public:
  using Memory = TeamMemory<kKeyDim>;
  static constexpr uint32_t kRingBytes = kTeamRingBytes<kKeyDim, kValueDim>;
  static constexpr uint32_t kSharedBytes = kTeamWarps * kRingBytes + sizeof(Memory);
  static_assert(sizeof(MergeMemory<kValueDim>) <= kTeamWarps * kRingBytes);
  static_assert(sizeof(TeamMergeMemory<kValueDim>) <= kTeamWarps * kRingBytes);
  static_assert(sizeof(TileQueries<kKeyDim>) <= kTeamWarps * kRingBytes);
  static_assert(sizeof(uint32_t) * kUndecidedMax <= kTeamWarps * kRingBytes);

  __device__ TeamStep(const StepHeader& step, const UnitPlace& unit)
      : step_(step),
        unit_(unit),
        row_(*unit.row),
        memory_(*reinterpret_cast<Memory*>(block_memory + kTeamWarps * kRingBytes)),
        segments_(step, unit, memory_.segments),
        ring_(WarpRing(kRingBytes)) {
    SelectMemory<ClusterTeam>& select = memory_.unit.select;
    if (threadIdx.x == 0) {
      for (auto& box : select.part_boxes) box.Init();
      select.list_box.Init();
    }
    ClusterTeam::Arrive();  // ShareTotals waits, before the first word to another block
  }

  __device__ __forceinline__ void Run() {
    Prepare();
    Score();
    Select();
    Estimate();
    Attend();
    ClusterTeam::Sync();
    Answer();
  }

 private:
  enum Pages : uint32_t { kSink, kTail, kChosen, kPages };

  // The unit's queries, as every block needs them.
  __device__ __forceinline__ void Prepare() {
    auto* queries = reinterpret_cast<TileQueries<kKeyDim>*>(block_memory);
    WriteFragments<T, kKeyDim, kTeamWarps>(step_, unit_, /*tile=*/0, queries, memory_.fragments);
    __syncthreads();
  }

  // This warp's slots.
  __device__ __forceinline__ SlotRange Slots() const {
    const uint32_t steps = row_.slots / kStepSlots, warps = ClusterTeam::blocks() * kTeamWarps;
    const uint64_t warp = TeamWarp<ClusterTeam>();
    return {static_cast<uint32_t>(warp * steps / warps) * kStepSlots,
            static_cast<uint32_t>((warp + 1) * steps / warps) * kStepSlots};
  }
  __device__ __forceinline__ TeamFeed Feed() const {
    return TeamFeed(segments_, Slots(), memory_.chunks[threadIdx.x / 32]);
  }

  __device__ __forceinline__ void Score() {
    Totals totals[2] = {{-INFINITY, 0}, {-INFINITY, 0}};
    ScoreChunks<T, kKeyDim, kTeamScoreStages>(
        step_, Feed(), /*tile=*/0, ring_, [&](const ChunkRef&) { return memory_.fragments; },
        KeepAll(), totals);
    ShareTotals(totals);
  }

  // Brings the warps' totals together, and the blocks': the scales of weights.
  __device__ __forceinline__ void ShareTotals(Totals (&totals)[2]) {
    auto* of_warps = reinterpret_cast<float4(*)[kLanes]>(block_memory);
    const uint32_t g = threadIdx.x % 32 / 4, lane = threadIdx.x % kLanes;
    for (Totals& total : totals) total.Join();
    __syncthreads();  // the rings are idle
    if (threadIdx.x % 4 == 0) {
      of_warps[threadIdx.x / 32][g] =
          make_float4(totals[0].max, totals[0].sum, totals[1].max, totals[1].sum);
    }
    ClusterTeam::Wait();
    __syncthreads();
    static_assert(kTeamThreads >= kTeamBlocksMax * kLanes);
    if (threadIdx.x / kLanes < ClusterTeam::blocks()) {
      const float4 own = SumOfTotals(kTeamWarps, [&](uint32_t w) { return of_warps[w][lane]; });
      ClusterTeam::Write(&memory_.totals[ClusterTeam::rank()][lane], own, threadIdx.x / kLanes);
    }
    ClusterTeam::Sync();
    if (threadIdx.x < kLanes) {
      const float4 all = SumOfTotals(ClusterTeam::blocks(),
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
    UnitSelector<ClusterTeam, TeamSegments> selector(step_, unit_, segments_,
                                                     segments_.CountClusters(), &memory_.unit,
                                                     reinterpret_cast<uint32_t*>(block_memory));
    UnitResult result = selector.Select();
    chosen_tokens_ = result.chosen_tokens;
    if (ClusterTeam::rank() == 0 && threadIdx.x == 0) step_.unit_results[unit_.unit] = result;
    ClusterTeam::Sync();  // fates and chosen tokens
  }

  // State number of this block's `kind`-th.
  __device__ __forceinline__ void Store(const WarpState<kValueDim>& state, const EstimateSums& sums,
                                        uint32_t kind) const {
    constexpr uint32_t kFloats = StateFloats(kValueDim);
    const uint64_t number = kind * ClusterTeam::blocks() + ClusterTeam::rank();
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
    ChunkEstimator<T, kValueDim, kTeamEstimateStages>(source, ring_).Run(Feed(), &state, &sums);
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
        source.blocks = step_.blocks + row_.blocks_begin;
        source.head_offset = unit_.kv_head * step_.block_head_bytes;
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

  // Zones and chosen tokens; the team's warps take turns, for the tail from the last one on, so
  // that no warp has a page of each zone while others have none.
  __device__ __forceinline__ void Attend() {
    WaitForKernelBefore();  // it brings the newest tokens
    const uint32_t warps = ClusterTeam::blocks() * kTeamWarps, warp = TeamWarp<ClusterTeam>();
    WarpState<kValueDim> state;
#pragma unroll 1
    for (uint32_t pages = kSink; pages < kPages; ++pages) {
      const TokenSource source = SourceOf(static_cast<Pages>(pages));
      if (source.begin < source.end) {
        PageReader<T, kKeyDim, kValueDim, kTeamRingPages> reader(source, memory_.fragments, ~0u,
                                                                 ring_);
        reader.Run(pages == kTail ? warps - 1 - warp : warp, warps, &state);
      }
      if (pages == kSink) continue;
      Store(state, {}, pages == kTail ? 0 : 2);
      state = WarpState<kValueDim>();
    }
  }

  // The blocks take turns at lanes.
  __device__ __forceinline__ void Answer() {
    auto* memory = reinterpret_cast<TeamMergeMemory<kValueDim>*>(block_memory);
    for (uint32_t lane = ClusterTeam::rank(); lane < step_.group; lane += ClusterTeam::blocks()) {
      const LaneScale scale = {memory_.unit.max[0][lane], memory_.unit.sum[0][lane]};
      const MergedLane merged =
          MergeTeam<kValueDim>(TileStates(step_, unit_, 0, StateFloats(kValueDim)), lane, memory);
      WriteAnswer<kValueDim, kTeamWarps>(step_, LanePlace(step_, unit_, 0, lane), merged, &scale,
                                         memory->norms);
    }
  }

  const StepHeader& step_;
  const UnitPlace& unit_;
  const RowRef& row_;
  Memory& memory_;
  const TeamSegments segments_;
  const uint32_t ring_;
  uint32_t chosen_tokens_ = 0;
};

// ---- kernels ----

// Teams of the grid's cluster size; the first one has the step's unit number `first`.
template <typename T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kTeamThreads, (kTeamResident<kKeyDim, kValueDim>))
    TeamKernel(const __grid_constant__ StepHeader step, uint32_t first) {
#if __CUDA_ARCH__ >= 900
  const TeamUnit number = step.team_units[first + blockIdx.x / ClusterTeam::blocks()];
  const UnitPlace unit(step, step.row_refs + number.row, number.unit);
  TeamStep<T, kKeyDim, kValueDim>(step, unit).Run();
#else
  __trap();  // CountTeams has said that there are none
#endif
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TEAM_STEP_CUH_
