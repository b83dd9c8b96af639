// SPDX-License-Identifier: Apache-2.0
//
// What a unit's errors are: the errors of leaving groups and leaves to their estimates, beside the
// length of the output (docs/POLICIES.md, "error-target").
#ifndef ATTND_GPU_CUDA_STEP_TREE_ERRORS_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_ERRORS_CUH_

#include <cfloat>
#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/select.cuh"
#include "gpu/cuda/step/tree_unit.cuh"
#include "gpu/cuda/step/unit_selector.cuh"

namespace attnd::gpu {

// Makes a squared error a share of the tolerance's square.
__device__ __forceinline__ float PerBudget(double tolerance) {
  return static_cast<float>(fmin(1 / (tolerance * tolerance), static_cast<double>(FLT_MAX)));
}

// A row's scores of some neighbouring lanes. Of lanes that the group has not, masses of nothing.
struct AskedLanes {
  static constexpr uint32_t kAtOnce = 4;
  float log_mass[kAtOnce], d2[kAtOnce];
};
// What a row's score is made of: it may be asked for before the scales are known.
struct AskedRow {
  TreeRowInfo info;
  AskedLanes first;  // of the first lanes
};

class TreeErrors : public TreeUnit {
 public:
  using TreeUnit::TreeUnit;

 protected:
  __device__ __forceinline__ const TreeRef& Tree(uint32_t segment) const {
    return step_.trees[row_.trees_begin + segment];
  }
  __device__ __forceinline__ const std::byte* HeadOf(uint32_t segment) const {
    const SegmentRef& ref = step_.segments[row_.segments_begin + segment];
    return ref.index + unit_.kv_head * ref.index_head_bytes;
  }
  __device__ __forceinline__ SegmentSlots SlotsOf(uint32_t segment) const {
    if (segment < kKnownSegments) return memory_->segments[segment];
    const TreeRef& tree = Tree(segment);
    return {tree.first_group_slot, tree.first_slice, tree.slices};
  }
  __device__ __forceinline__ uint32_t SegmentOfGroup(uint32_t slot) const {
    return LastNotAfter(row_.segment_count, slot,
                        [&](uint32_t s) { return SlotsOf(s).first_group_slot; });
  }
  __device__ __forceinline__ uint8_t& GroupFate(uint32_t slot) const {
    return fates_[row_.slots + slot];
  }
  // What the groups stage, or since then the estimate, left of a slice.
  __device__ __forceinline__ const float* StateOfGroups(uint32_t tile, uint32_t slice) const {
    return step_.tree_states + ItemNumber(tile, slice) * TreeStateFloats(step_.value_dim);
  }
  __device__ TreeLevel Groups() const;
  __device__ __forceinline__ bool limited() const { return row_.tolerance < INFINITY; }

  __device__ void CombineStates();
  __device__ void CombineZones(uint32_t lane);
  __device__ void CombineGroups(uint32_t lane);
  template <typename SumsOf, typename NormsOf>
  __device__ uint32_t MeasureParts(SumsOf sums_of, NormsOf norms_of);
  __device__ void MeasureOutputs();
  __device__ float2 OutputSums(uint32_t lane, uint32_t chunk, uint32_t share) const;
  __device__ CutWeight OutputNorms(uint32_t lane, float2 sums) const;
  __device__ void SetScales();
  __device__ __forceinline__ void SetScale(uint32_t lane);

  static __device__ float ErrorOf(const TreeLaneScale& scale, float log_mass, float d2,
                                  const TreeRowInfo& info);
  __device__ __forceinline__ AskedLanes AskLanes(const TreeLevel& level, uint32_t i,
                                                 uint32_t first) const;
  __device__ __forceinline__ AskedRow Ask(const TreeLevel& level, uint32_t i) const;
  __device__ __forceinline__ float2 ScoreOf(const TreeLevel& level, uint32_t i,
                                            const AskedRow& row) const;
  __device__ __forceinline__ void NoteSegments() const;
  __device__ uint32_t OpenedInAnyCase(uint32_t groups) const;
  template <typename TakenOf>
  __device__ __forceinline__ void NoteRows(TreePart TreeOffsets::*part, TakenOf taken_of) const;
  __device__ __forceinline__ void NoteGroups() const;
  __device__ __forceinline__ void NoteLeaves(const TreeLevel& leaves) const;
  __device__ __forceinline__ ListedRow LeavesOf(uint32_t slot, const TreeRowInfo& info) const;
  __device__ void NumberItems(const TreeLevel& level);
  static __device__ __forceinline__ uint32_t KeyOfToken(float score, float tokens);
  __device__ __forceinline__ TreeLane* stored_lanes() const {
    return reinterpret_cast<TreeLane*>(words_);
  }
};

inline __device__ TreeLevel TreeErrors::Groups() const {
  return LevelOf(places_.groups, row_.group_slots, row_.group_slots, attention::kGroupOptimism);
}

// ---- what stands before the choice ----

// Maxima and sums of the zones and of all groups: a warp for a lane's zones, another one for its
// groups.
inline __device__ void TreeErrors::CombineStates() {
#pragma unroll 1
  for (uint32_t i = threadIdx.x / 32; i < 2 * step_.group; i += kCutWarps) {
    if (i % 2 == 0) {
      CombineZones(i / 2);
    } else {
      CombineGroups(i / 2);
    }
  }
  __syncthreads();
}
__device__ __forceinline__ void TreeErrors::CombineZones(uint32_t lane) {
  const uint32_t floats = StateFloats(step_.value_dim), thread = threadIdx.x % 32;
  const float* zones = TileStates(step_, unit_, lane / kLanes, floats) +
                       lane % kLanes * (kStateHead + step_.value_dim);
  float max = -INFINITY, sum = 0;
  for (uint32_t i = thread; i < row_.read_pieces; i += 32) {
    const float* head = zones + uint64_t{i} * floats;
    AddState(head[kHeadMax], head[kHeadSum], &max, &sum);
  }
  JoinStates(&max, &sum);
  if (thread == 0) memory_->lanes[lane] = {1, max, sum, 0};
}
__device__ __forceinline__ void TreeErrors::CombineGroups(uint32_t lane) {
  const uint32_t thread = threadIdx.x % 32;
  SumsOfHeads sums;
  for (uint32_t s = thread; s < row_.tree_slices; s += 32) {
    sums.Add(StateOfGroups(lane / kLanes, s) + lane % kLanes * (kStateHead + 2 * step_.value_dim));
  }
  sums.Join();
  if (thread != 0) return;
  memory_->sums[lane] = make_float4(sums.max, sums.sum, sums.best_max, sums.best_sum);
  memory_->moments[lane] = sums.moments;
}

// A share of a sum over `count` states: of(i, there) of each of them, in their order; 0 if it is
// not there. Some are asked for at once, without branches that would wait for one after another:
// each wait is one for the whole unit.
template <typename Of>
__device__ __forceinline__ float SumOfShare(uint32_t share, uint32_t count, Of of) {
  constexpr uint32_t kAtOnce = 4;
  float sum = 0;
#pragma unroll 1
  for (uint32_t first = share; first < count; first += kAtOnce * kOutputShares) {
    float x[kAtOnce];
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t i = first + k * kOutputShares;
      x[k] = of(min(i, count - 1), i < count);
    }
#pragma unroll
    for (const float of_state : x) sum += of_state;
  }
  return sum;
}

// A share of a channel's sums: x over the zones' states, y over those of all groups. A thread has a
// channel.
inline __device__ float2 TreeErrors::OutputSums(uint32_t lane, uint32_t chunk,
                                                uint32_t share) const {
  const uint32_t dim = step_.value_dim, zone_floats = StateFloats(dim), tile = lane / kLanes;
  const uint32_t channel = chunk * kOutputChannels + threadIdx.x % 32;
  const float zone_max = memory_->lanes[lane].zone_max, max = memory_->sums[lane].x;
  const float* zones =
      TileStates(step_, unit_, tile, zone_floats) + lane % kLanes * (kStateHead + dim);
  float2 sums;
  sums.x = SumOfShare(share, row_.read_pieces, [&](uint32_t p, bool there) {
    const float* state = zones + uint64_t{p} * zone_floats;
    const float of_max = state[kHeadMax], sum = state[kHeadSum];
    const bool counts = there && sum > 0;
    return Weight(counts ? of_max : -INFINITY, zone_max) * state[kStateHead + channel];
  });
  sums.y = SumOfShare(share, row_.tree_slices, [&](uint32_t s, bool there) {
    const float* state = StateOfGroups(tile, s) + lane % kLanes * (kStateHead + 2 * dim);
    const float of_max = state[kTreeMax];
    return Weight(there ? of_max : -INFINITY, max) * state[kStateHead + channel];
  });
  return sums;
}

// Squared lengths of a lane's channels that a warp has the sums of: of the output that zones and
// all groups' estimates give together, and of the zones' mean.
inline __device__ CutWeight TreeErrors::OutputNorms(uint32_t lane, float2 sums) const {
  const TreeLane& own = memory_->lanes[lane];
  const float max = memory_->sums[lane].x, greatest = fmaxf(max, own.zone_max);
  const float zone_factor = Weight(own.zone_max, greatest), factor = Weight(max, greatest);
  const float total = own.zone_sum * zone_factor + memory_->sums[lane].y * factor;
  const float mean = (sums.x * zone_factor + sums.y * factor) / total;
  const float zone_mean = own.zone_sum > 0 ? sums.x / own.zone_sum : 0.0f;
  const float norm2 = SumOfWarp(mean * mean), zone_norm2 = SumOfWarp(zone_mean * zone_mean);
  return static_cast<CutWeight>(__float_as_uint(zone_norm2)) << 32 | __float_as_uint(norm2);
}

// Two squared lengths (TreeSelectMemory::norms) of each lane's channels, kOutputChannels at a time:
// norms_of(lane, sums), by a warp, of the sums over all shares of sums_of(lane, chunk, share). Each
// thread block measures some, and sends them to all. Returns how many there are of a lane.
template <typename SumsOf, typename NormsOf>
__device__ uint32_t TreeErrors::MeasureParts(SumsOf sums_of, NormsOf norms_of) {
  const uint32_t chunks = step_.value_dim / kOutputChannels, parts = step_.group * chunks;
  const uint32_t blocks = CutBlocks::blocks(), rank = CutBlocks::rank();
  const uint32_t warp = threadIdx.x / 32, thread = threadIdx.x % 32, share = warp % kOutputShares;
#pragma unroll 1
  for (uint32_t first = 0; first * blocks + rank < parts; first += kCutWarps / kOutputShares) {
    const uint32_t part = (first + warp / kOutputShares) * blocks + rank;
    float2 sums = {};
    if (part < parts) sums = sums_of(part / chunks, part % chunks, share);
    __syncthreads();  // the parts before have been read
    memory_->outputs[warp][thread] = sums;
    __syncthreads();
    if (share != 0 || part >= parts) continue;
    sums = {};
    for (uint32_t k = 0; k < kOutputShares; ++k) {
      sums.x += memory_->outputs[warp + k][thread].x;
      sums.y += memory_->outputs[warp + k][thread].y;
    }
    const CutWeight norms2 = norms_of(part / chunks, sums);
    if (thread < blocks) exchange_.Send(&memory_->norms[part], norms2, thread);
  }
  exchange_.Await(parts * sizeof(CutWeight));
  return chunks;
}

// Finds the outputs' lengths, and the zones'.
inline __device__ void TreeErrors::MeasureOutputs() {
  exchange_.Begin();
  const uint32_t chunks =
      MeasureParts([this](uint32_t lane, uint32_t chunk,
                          uint32_t share) { return OutputSums(lane, chunk, share); },
                   [this](uint32_t lane, float2 sums) { return OutputNorms(lane, sums); });
  if (threadIdx.x < step_.group) {
    float norm2 = 0, zone_norm2 = 0;
    for (uint32_t c = 0; c < chunks; ++c) {
      const CutWeight part = memory_->norms[threadIdx.x * chunks + c];
      norm2 += __uint_as_float(static_cast<uint32_t>(part));
      zone_norm2 += __uint_as_float(static_cast<uint32_t>(part >> 32));
    }
    memory_->lanes[threadIdx.x].output_norm = sqrtf(norm2);
    memory_->lanes[threadIdx.x].zone_norm2 = zone_norm2;
  }
  __syncthreads();
}

inline __device__ void TreeErrors::SetScales() {
  if (threadIdx.x < step_.group) SetScale(threadIdx.x);
  __syncthreads();
}
// With a tolerance errors are relative to the outputs' lengths.
__device__ __forceinline__ void TreeErrors::SetScale(uint32_t lane) {
  const TreeLane& of = memory_->lanes[lane];
  const float4 sums = memory_->sums[lane];
  const float greatest = fmaxf(sums.x, of.zone_max), factor = Weight(sums.x, greatest);
  const float total = of.zone_sum * Weight(of.zone_max, greatest) + sums.y * factor;
  const float least = LeastNorm(of.zone_sum * Weight(of.zone_max, greatest), of.zone_norm2,
                                memory_->moments[lane] * factor, sums.y * factor);
  TreeLaneScale& scale = memory_->scales[lane];
  scale.max = sums.x;
  scale.best_max = sums.z;
  scale.best_share = 1 / (sums.w * step_.group);
  scale.mass_unit = factor / total;
  scale.error_unit = scale.mass_unit / (limited() ? fmaxf(of.output_norm, least) : 1);
  const float share = limited() ? fminf(1.0f, of.output_norm / least) : 1.0f;
  scale.mass_share2 = share * share;
}

// A row's key by its score for each token, which is what reading it costs; 0 of a row that is none.
__device__ __forceinline__ uint32_t TreeErrors::KeyOfToken(float score, float tokens) {
  return tokens > 0 ? KeyOf(__fdividef(score, tokens)) : 0;
}

// The squared error of leaving a row to its estimate.
__device__ __forceinline__ float TreeErrors::ErrorOf(const TreeLaneScale& scale, float log_mass,
                                                     float d2, const TreeRowInfo& info) {
  const float capped = fminf(d2, attention::kVarianceCap), half = capped / 2;
  const float growth = fminf(Expm1(capped), info.tokens - 1);
  const float weight = Weight(log_mass, scale.max);
  const float in_error = weight * scale.error_unit, mass = weight * scale.mass_unit * half;
  const float rest = fminf(in_error * info.spread, attention::kErrorMax);
  const float moved = fminf(in_error * half * info.value_norm, attention::kErrorMax);
  return rest * rest * __fdividef(growth, info.tokens) +
         attention::kMassErrorShare * (moved * moved + mass * mass * scale.mass_share2);
}

__device__ __forceinline__ AskedLanes TreeErrors::AskLanes(const TreeLevel& level, uint32_t i,
                                                           uint32_t first) const {
  AskedLanes scores;
#pragma unroll
  for (uint32_t k = 0; k < AskedLanes::kAtOnce; ++k) {
    const uint64_t at = uint64_t{min(first + k, step_.group - 1)} * level.stride + i;
    scores.log_mass[k] = first + k < step_.group ? level.log_mass[at] : -INFINITY;
    scores.d2[k] = level.d2[at];
  }
  return scores;
}
__device__ __forceinline__ AskedRow TreeErrors::Ask(const TreeLevel& level, uint32_t i) const {
  return {InfoAt(level, i), AskLanes(level, i, 0)};
}

// Of row i, as means over the group: x, the share of the optimistic mass; y, with a tolerance: the
// squared error of leaving the row to its estimate.
__device__ __forceinline__ float2 TreeErrors::ScoreOf(const TreeLevel& level, uint32_t i,
                                                      const AskedRow& row) const {
  AskedLanes scores = row.first;
  float best_share = 0, error2 = 0;
#pragma unroll 1
  for (uint32_t first = 0;;) {
#pragma unroll
    for (uint32_t k = 0; k < AskedLanes::kAtOnce; ++k) {
      const float log_mass = scores.log_mass[k], d2 = scores.d2[k];
      if (log_mass == -INFINITY) continue;
      const TreeLaneScale& scale = memory_->scales[first + k];
      const float half = fminf(d2, attention::kVarianceCap) / 2;
      const float best = log_mass + level.optimism * kLog2E * Sqrt(d2) - kLog2E * half;
      best_share += Exp2(best - scale.best_max) * scale.best_share;
      if (limited()) error2 += ErrorOf(scale, log_mass, d2, row.info);
    }
    first += AskedLanes::kAtOnce;
    if (first >= step_.group) return {best_share, error2 / step_.group};
    scores = AskLanes(level, i, first);
  }
}

// Makes SlotsOf possible, behind the next __syncthreads.
__device__ __forceinline__ void TreeErrors::NoteSegments() const {
  // By the warps before the last, which counts rows: as a rule they have nothing else to do.
  const uint32_t s = kCutThreads - 33 - threadIdx.x;
  if (s >= min(row_.segment_count, kKnownSegments)) return;
  const TreeRef& tree = Tree(s);
  memory_->segments[s] = {tree.first_group_slot, tree.first_slice, tree.slices};
}

// How many of the groups are opened, whatever their errors.
inline __device__ uint32_t TreeErrors::OpenedInAnyCase(uint32_t groups) const {
  const double share =
      fmin(1.0, fmax(attention::kOpenedShare, attention::kOpenedPerFloor * row_.floor));
  return max(min(attention::kOpenedLeast, groups), ShareOf(share, groups));
}

// Notes how many rows of a level the unit's segments have, and taken_of(that) as the number of
// those that are taken whatever their errors, for whoever looks behind the next barrier. The last
// warp waits for it; as a rule the first ones add up meanwhile what an earlier stage found.
template <typename TakenOf>
__device__ __forceinline__ void TreeErrors::NoteRows(TreePart TreeOffsets::*part,
                                                     TakenOf taken_of) const {
  if (threadIdx.x / 32 != kCutWarps - 1) return;
  uint32_t rows = 0;
#pragma unroll 1
  for (uint32_t s = threadIdx.x % 32; s < row_.segment_count; s += 32) {
    const uint32_t at = (Tree(s).offsets.*part).count;
    rows += __ldg(reinterpret_cast<const uint32_t*>(HeadOf(s) + at));
  }
  rows = SumOverWarp(rows);
  if (threadIdx.x % 32 != 0) return;
  memory_->level_rows = rows;
  memory_->taken_anyway = taken_of(rows);
}
__device__ __forceinline__ void TreeErrors::NoteGroups() const {
  NoteRows(&TreeOffsets::groups, [this](uint32_t groups) { return OpenedInAnyCase(groups); });
}
// leaves: those that may be chosen.
__device__ __forceinline__ void TreeErrors::NoteLeaves(const TreeLevel& leaves) const {
  NoteRows(&TreeOffsets::leaves,
           [&](uint32_t all) { return min(ShareOf(row_.floor, all), leaves.count); });
}

// The leaves of an opened group; info: of the group.
__device__ __forceinline__ ListedRow TreeErrors::LeavesOf(uint32_t slot,
                                                          const TreeRowInfo& info) const {
  return {info.place >> 16, (SegmentOfGroup(slot) << 16) + (info.place & 0xFFFF)};
}

// Numbers the leaves of opened groups, in the order of segments and groups.
inline __device__ void TreeErrors::NumberItems(const TreeLevel& level) {
  List(level, items(), [&](uint32_t all) {
    if (threadIdx.x % 32 == 0 && CutBlocks::rank() == 0) first_items()[row_.tree_slices] = all;
  });
  __syncthreads();
  for (uint32_t s = threadIdx.x; s < row_.segment_count; s += kCutThreads) {
    const SegmentSlots tree = SlotsOf(s);
    uint32_t slot = tree.first_group_slot - level.begin;  // wraps for those before
    for (uint32_t i = 0; i < tree.slices; ++i, slot += row_.tree_slice_groups) {
      if (slot < level.own) first_items()[tree.first_slice + i] = level.error_keys[slot];
    }
  }
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_ERRORS_CUH_
