// SPDX-License-Identifier: Apache-2.0
#include <cfloat>

#include "gpu/cuda/step/step_kernels.h"
#include "gpu/cuda/step/tree_selector.cuh"
#include "gpu/cuda/step/tree_unit_launch.cuh"

namespace attnd::gpu {
namespace {

// Makes a squared error a share of the tolerance's square.
__device__ __forceinline__ float PerBudget(double tolerance) {
  return static_cast<float>(fmin(1 / (tolerance * tolerance), static_cast<double>(FLT_MAX)));
}

}  // namespace

__device__ TreeLevel TreeSelector::Groups() const {
  return LevelOf(places_.groups, row_.group_slots, row_.group_slots, attention::kGroupOptimism);
}
// ---- what stands before the choice ----

// A warp for each lane: maxima and sums of the zones and of all groups.
__device__ void TreeSelector::CombineStates() {
  const uint32_t thread = threadIdx.x % 32;
  const uint32_t zone_floats = StateFloats(step_.value_dim);
  for (uint32_t lane = threadIdx.x / 32; lane < step_.group; lane += kCutWarps) {
    const uint32_t tile = lane / kLanes, in_tile = lane % kLanes;
    const float* zones =
        TileStates(step_, unit_, tile, zone_floats) + in_tile * (kStateHead + step_.value_dim);
    float zone_max = -INFINITY, zone_sum = 0;
    for (uint32_t i = thread; i < row_.read_pieces; i += 32) {
      const float* head = zones + uint64_t{i} * zone_floats;
      AddState(head[kHeadMax], head[kHeadSum], &zone_max, &zone_sum);
    }
    JoinStates(&zone_max, &zone_sum);
    SumsOfHeads sums;
    for (uint32_t s = thread; s < row_.tree_slices; s += 32) {
      sums.Add(StateOfGroups(tile, s) + in_tile * (kStateHead + 2 * step_.value_dim));
    }
    sums.Join();
    if (thread != 0) continue;
    memory_->lanes[lane] = {1, zone_max, zone_sum, 0};
    memory_->sums[lane] = make_float4(sums.max, sums.sum, sums.best_max, sums.best_sum);
    memory_->moments[lane] = sums.moments;
  }
  __syncthreads();
}

// Squared lengths of some of a lane's channels: of the output that zones and all groups' estimates
// give together, and of the zones' mean. A thread has a channel, each warp some of the states.
__device__ CutWeight TreeSelector::OutputPart(uint32_t lane, uint32_t chunk) {
  const uint32_t dim = step_.value_dim, zone_floats = StateFloats(dim), tile = lane / kLanes;
  const uint32_t warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const uint32_t channel = chunk * kOutputChannels + thread;
  const TreeLane& own = memory_->lanes[lane];
  const float max = memory_->sums[lane].x;
  const float* zones =
      TileStates(step_, unit_, tile, zone_floats) + lane % kLanes * (kStateHead + dim);
  float zone = 0, groups = 0;
#pragma unroll 2
  for (uint32_t p = warp; p < row_.read_pieces; p += kCutWarps) {
    const float* state = zones + uint64_t{p} * zone_floats;
    const float factor = state[kHeadSum] > 0 ? Weight(state[kHeadMax], own.zone_max) : 0.0f;
    zone += factor * state[kStateHead + channel];
  }
#pragma unroll 4
  for (uint32_t s = warp; s < row_.tree_slices; s += kCutWarps) {
    const float* state = StateOfGroups(tile, s) + lane % kLanes * (kStateHead + 2 * dim);
    const float factor = Weight(state[kTreeMax], max);
    groups += factor * (state[kStateHead + channel] + state[kStateHead + dim + channel]);
  }
  __syncthreads();  // the part before has been read
  memory_->outputs[warp][0][thread] = zone;
  memory_->outputs[warp][1][thread] = groups;
  __syncthreads();
  zone = groups = 0;
  for (uint32_t w = 0; w < kCutWarps; ++w) {
    zone += memory_->outputs[w][0][thread];
    groups += memory_->outputs[w][1][thread];
  }
  const float greatest = fmaxf(max, own.zone_max);
  const float zone_factor = Weight(own.zone_max, greatest), factor = Weight(max, greatest);
  const float total = own.zone_sum * zone_factor + memory_->sums[lane].y * factor;
  const float mean = (zone * zone_factor + groups * factor) / total;
  const float zone_mean = own.zone_sum > 0 ? zone / own.zone_sum : 0.0f;
  const float norm2 = SumOfWarp(mean * mean), zone_norm2 = SumOfWarp(zone_mean * zone_mean);
  return static_cast<CutWeight>(__float_as_uint(zone_norm2)) << 32 | __float_as_uint(norm2);
}

// Each thread block measures some parts of outputs, and sends them to all.
__device__ void TreeSelector::MeasureOutputs() {
  const uint32_t chunks = step_.value_dim / kOutputChannels, parts = step_.group * chunks;
  exchange_.Begin();
  for (uint32_t i = CutBlocks::rank(); i < parts; i += CutBlocks::blocks()) {
    const CutWeight norms2 = OutputPart(i / chunks, i % chunks);
    if (threadIdx.x < CutBlocks::blocks()) {
      exchange_.Send(&memory_->norms[i], norms2, threadIdx.x);
    }
  }
  exchange_.Await(parts * sizeof(CutWeight));
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

// With a tolerance errors are relative to the outputs' lengths.
__device__ void TreeSelector::SetScales() {
  if (threadIdx.x < step_.group) {
    const TreeLane& lane = memory_->lanes[threadIdx.x];
    const float4 sums = memory_->sums[threadIdx.x];
    const float greatest = fmaxf(sums.x, lane.zone_max), factor = Weight(sums.x, greatest);
    const float total = lane.zone_sum * Weight(lane.zone_max, greatest) + sums.y * factor;
    const float least = LeastNorm(lane.zone_sum * Weight(lane.zone_max, greatest), lane.zone_norm2,
                                  memory_->moments[threadIdx.x] * factor, sums.y * factor);
    TreeLaneScale& scale = memory_->scales[threadIdx.x];
    scale.max = sums.x;
    scale.best_max = sums.z;
    scale.best_share = 1 / (sums.w * step_.group);
    scale.mass_unit = factor / total;
    scale.error_unit = scale.mass_unit / (limited() ? fmaxf(lane.output_norm, least) : 1);
    const float share = limited() ? fminf(1.0f, lane.output_norm / least) : 1.0f;
    scale.mass_share2 = share * share;
  }
  __syncthreads();
}

// ---- rankings ----

// Of row i, as means over the group: x, the share of the optimistic mass; y, with a tolerance: the
// squared error of leaving the row to its estimate.
__device__ __forceinline__ float2 TreeSelector::ScoreOf(const TreeLevel& level, uint32_t i,
                                                        const TreeRowInfo& info) const {
  constexpr uint32_t kAtOnce = 4;  // lanes
  float best_share = 0, error2 = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < step_.group; first += kAtOnce) {
    float log_mass[kAtOnce], d2[kAtOnce];
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint64_t at = uint64_t{min(first + k, step_.group - 1)} * level.stride + i;
      log_mass[k] = first + k < step_.group ? __ldg(level.log_mass + at) : -INFINITY;
      d2[k] = __ldg(level.d2 + at);
    }
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const TreeLaneScale& scale = memory_->scales[first + k];
      const float capped = fminf(d2[k], attention::kVarianceCap), half = capped / 2;
      const float best = log_mass[k] + level.optimism * kLog2E * Sqrt(d2[k]) - kLog2E * half;
      if (log_mass[k] != -INFINITY) best_share += Exp2(best - scale.best_max) * scale.best_share;
      const float growth = fminf(Expm1(capped), info.tokens - 1);
      const float weight = Weight(log_mass[k], scale.max);
      const float in_error = weight * scale.error_unit, mass = weight * scale.mass_unit * half;
      const float rest = fminf(in_error * info.spread, attention::kErrorMax);
      const float moved = fminf(in_error * half * info.value_norm, attention::kErrorMax);
      if (log_mass[k] != -INFINITY) {
        error2 += rest * rest * __fdividef(growth, info.tokens) +
                  attention::kMassErrorShare * (moved * moved + mass * mass * scale.mass_share2);
      }
    }
  }
  return {best_share, error2 / step_.group};
}

// Keys by the optimistic mass and by the error, of each token: what it costs to read the row.
__device__ void TreeSelector::Rank(const TreeLevel& level) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < level.own; i += kCutThreads) {
    const TreeRowInfo info = InfoAt(level, level.begin + i);
    const float2 score = ScoreOf(level, level.begin + i, info);
    const bool there = info.tokens > 0;
    level.best_keys[i] = there ? KeyOf(__fdividef(score.x, info.tokens)) : 0;
    if (!limited()) continue;
    level.errors[i] = there ? score.y : 0;
    level.error_keys[i] = there ? KeyOf(__fdividef(score.y, info.tokens)) : 0;
  }
}

// Marks the `wanted` rows that might hide the one token that a query looks for; and those that must
// be read for the others' squared errors to stay within the tolerance's square, less what is
// `spent` of it. The others are estimated. Puts marked rows' sizes, and 0 of others, in the place
// of their keys; returns the sum of the thread block's own.
template <typename FateOf, typename SizeOf>
__device__ uint32_t TreeSelector::Mark(const TreeLevel& level, uint32_t wanted, double tolerance,
                                       CutWeight spent, FateOf fate_of, SizeOf size_of) {
  Rank(level);
  const float per_budget = PerBudget(tolerance);
  const WeightBy error_of{[&](uint32_t i) { return FixedShare(level.errors[i] * per_budget); }};
  CutFinder best({level.best_keys, level.own}, CutLimit::kTaken, wanted, OneEach(), &memory_->cut);
  CutFinder errors({level.error_keys, limited() ? level.own : 0}, CutLimit::kLeft,
                   kCutOne > spent ? kCutOne - spent : 0, error_of, &memory_->cut);
#pragma unroll 1
  for (uint32_t round = 0; round < kCutRounds; ++round) {
    best.Add(round);
    if (limited()) errors.Add(round);
    __syncthreads();
    const uint32_t half = exchange_.half();
    uint32_t bytes = best.Send(&exchange_);
    if (limited()) bytes += errors.Send(&exchange_);
    exchange_.Await(bytes);
    best.Narrow(round, half);
    if (limited()) errors.Narrow(round, half);
    if (best.cut().known && (!limited() || errors.cut().known)) break;
  }
  uint32_t size = 0;
  const auto mark = [&](uint32_t i, bool takes) {
    fate_of(level.begin + i) = takes ? kFateExact : kFateEstimated;
    level.best_keys[i] = takes ? size_of(InfoAt(level, level.begin + i)) : 0;
    size += level.best_keys[i];
  };
  if (best.cut().equals <= 1 && errors.cut().equals <= 1) {
#pragma unroll 2
    for (uint32_t i = threadIdx.x; i < level.own; i += kCutThreads) {
      const uint32_t key = level.best_keys[i];
      mark(i, key != 0 && (best.Takes(key) || (limited() && errors.Takes(level.error_keys[i]))));
    }
  } else {
#pragma unroll 1
    for (uint32_t first = 0; first < level.own; first += kCutThreads) {
      const uint32_t i = first + threadIdx.x;
      bool takes = best.TakesInOrder(i);
      if (limited()) takes = errors.TakesInOrder(i) || takes;
      if (i < level.own) mark(i, takes);
    }
  }
  return SumOfBlock(size);
}

// This thread's share of how many rows of a level the unit's segments have.
__device__ uint32_t TreeSelector::OwnCounts(bool groups) const {
  uint32_t rows = 0;
  for (uint32_t s = threadIdx.x; s < row_.segment_count; s += kCutThreads) {
    const TreeOffsets& offsets = Tree(s).offsets;
    const uint32_t at = groups ? offsets.groups.count : offsets.leaves.count;
    rows += __ldg(reinterpret_cast<const uint32_t*>(HeadOf(s) + at));
  }
  return rows;
}
// ---- the open stage ----

// Numbers the leaves of opened groups, in the order of segments and groups.
__device__ void TreeSelector::NumberItems(const TreeLevel& level, uint32_t leaves) {
  const uint32_t all = List(level, leaves, [&](uint32_t slot, uint32_t count, uint32_t item) {
    const uint32_t segment = SegmentOfGroup(slot), first = InfoAt(level, slot).place & 0xFFFF;
    for (uint32_t i = 0; i < count; ++i) items()[item + i] = segment << 16 | (first + i);
  });
  __syncthreads();
  for (uint32_t s = threadIdx.x; s < row_.segment_count; s += kCutThreads) {
    const TreeRef& tree = Tree(s);
    uint32_t slot = tree.first_group_slot - level.begin;  // wraps for those before
    for (uint32_t i = 0; i < tree.slices; ++i, slot += row_.tree_slice_groups) {
      if (slot < level.own) first_items()[tree.first_slice + i] = level.error_keys[slot];
    }
  }
  if (threadIdx.x == 0 && CutBlocks::rank() == 0) first_items()[row_.tree_slices] = all;
}

__device__ void TreeSelector::Open() {
  const uint32_t own_counts = OwnCounts(/*groups=*/true);
  CombineStates();
  if (limited()) {
    MeasureOutputs();
  } else {
    exchange_.Begin();
  }
  SetScales();
  if (threadIdx.x < step_.group && CutBlocks::rank() == 0) {
    reinterpret_cast<TreeLane*>(words_)[threadIdx.x] = memory_->lanes[threadIdx.x];
  }
  const uint32_t groups = SumOfBlock(own_counts);
  const double share =
      fmin(1.0, fmax(attention::kOpenedShare, attention::kOpenedPerFloor * row_.floor));
  const uint32_t wanted = max(min(attention::kOpenedLeast, groups), ShareOf(share, groups));
  const TreeLevel level = Groups();
  const uint32_t leaves = Mark(
      level, wanted, attention::kClosedErrorShare * row_.tolerance, 0,
      [this](uint32_t slot) -> uint8_t& { return GroupFate(slot); },
      [](const TreeRowInfo& info) { return info.place >> 16; });
  NumberItems(level, leaves);
}

// ---- the choose stage ----

// The errors of groups that stay closed, as a share of the tolerance's square.
__device__ CutWeight TreeSelector::ClosedErrors() {
  const TreeLevel level = Groups();
  const float per_budget = PerBudget(row_.tolerance);
  CutWeight own = 0, of_block, before;
  for (uint32_t i = threadIdx.x; i < level.own; i += kCutThreads) {
    const uint32_t slot = level.begin + i;
    const TreeRowInfo info = InfoAt(level, slot);
    const bool closed = info.tokens > 0 && GroupFate(slot) != kFateExact;
    const float error2 = ScoreOf(level, slot, info).y;
    if (closed) own += FixedShare(error2 * per_budget);
  }
  ScanBlock(own, &memory_->cut, &of_block);
  return exchange_.Sum(of_block, &before);
}

__device__ void TreeSelector::Choose() {
  const TreeLevel level = Leaves();
  const uint32_t own_counts = OwnCounts(/*groups=*/false);
  if (threadIdx.x < step_.group) {
    memory_->lanes[threadIdx.x] = reinterpret_cast<const TreeLane*>(words_)[threadIdx.x];
  }
  CombinePartials();
  SetScales();
  exchange_.Begin();
  const bool first = CutBlocks::rank() == 0;
  if (first) StoreLaneScales();
  const uint32_t wanted = min(ShareOf(row_.floor, SumOfBlock(own_counts)), level.count);
  const uint32_t tokens = Mark(
      level, wanted, row_.tolerance, limited() ? ClosedErrors() : 0,
      [this](uint32_t item) -> uint8_t& { return LeafFate(item); },
      [](const TreeRowInfo& info) { return static_cast<uint32_t>(info.tokens); });
  UnitResult result = {};
  result.clusters = level.count;
  result.chosen_tokens = ListTokens(level, tokens);
  result.estimated_tokens = row_.clustered_tokens - result.chosen_tokens;
  if (first) QueuePieces(step_, unit_, result, &memory_->first_piece);
}

// ---- kernels ----

namespace {

template <bool kOpen>
__global__ void __launch_bounds__(kCutThreads, 2)
    TreeSelectKernel(const __grid_constant__ StepHeader step) {
  const uint32_t number = blockIdx.x / CutBlocks::blocks();
  const RowRef* row = RowOfUnit(step, number);
  if (!Chooses(*row, TreeChoice::kByError)) return;
  const UnitPlace unit(step, row, number - row->first_unit);
  TreeSelector selector(step, unit, reinterpret_cast<TreeSelectMemory*>(block_memory));
  if constexpr (kOpen) {
    selector.Open();
  } else {
    selector.Choose();
  }
}

}  // namespace

cudaError_t LaunchTreeOpen(const StepHeader& step, cudaStream_t stream) {
  return LaunchTreeUnits<TreeSelectKernel<true>>(step, stream);
}
cudaError_t LaunchTreeChoose(const StepHeader& step, cudaStream_t stream) {
  return LaunchTreeUnits<TreeSelectKernel<false>>(step, stream);
}

}  // namespace attnd::gpu
