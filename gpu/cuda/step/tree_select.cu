// SPDX-License-Identifier: Apache-2.0
#include <cfloat>

#include "gpu/cuda/step/chosen_pieces.cuh"
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/cuda/step/tree_selector.cuh"

namespace attnd::gpu {
namespace {

// One, in fixed point. A row weighs twice that at most.
constexpr CutWeight kCutOne = CutWeight{1} << 34;
static_assert(2 * kCutOne < CutWeight{1} << kCutWords * kCutWordBits);

__device__ __forceinline__ CutWeight FixedShare(float share) {
  return __float2ull_rn(fminf(share, 2.0f) * static_cast<float>(kCutOne));
}

// Makes a squared error a share of the tolerance's square.
__device__ __forceinline__ float PerBudget(double tolerance) {
  return static_cast<float>(fmin(1 / (tolerance * tolerance), static_cast<double>(FLT_MAX)));
}

// Adds a state's maximum and sum to others.
__device__ __forceinline__ void AddState(float max, float sum, float* max_of_all,
                                         float* sum_of_all) {
  if (!(sum > 0)) return;
  const float greater = fmaxf(*max_of_all, max);
  *sum_of_all = *sum_of_all * Weight(*max_of_all, greater) + sum * Weight(max, greater);
  *max_of_all = greater;
}

// The same over a warp's threads.
__device__ __forceinline__ void JoinStates(float* max, float* sum) {
  const float greatest = MaxOverWarp(*max);
  *sum = SumOfWarp(*sum * Weight(*max, greatest));
  *max = greatest;
}

// What some heads (TreeHead) come to, over a warp.
struct SumsOfHeads {
  float max = -INFINITY, sum = 0, moments = 0, best_max = -INFINITY, best_sum = 0;

  __device__ __forceinline__ void Add(const float* head) {
    const float before = max;
    AddState(head[kTreeMax], head[kTreeSum], &max, &sum);
    moments = moments * Weight(before, max) + head[kTreeMoments] * Weight(head[kTreeMax], max);
    AddState(head[kTreeBestMax], head[kTreeBestSum], &best_max, &best_sum);
  }
  __device__ __forceinline__ void Join() {
    const float before = max;
    JoinStates(&max, &sum);
    moments = SumOfWarp(moments * Weight(before, max));
    JoinStates(&best_max, &best_sum);
  }
};

}  // namespace

__device__ TreeLevel TreeSelector::LevelOf(const TreeLevelScores& places, uint32_t count,
                                           uint32_t stride, float optimism) const {
  TreeLevel level;
  level.count = count;
  level.stride = stride;
  level.log_mass = scores_ + places.log_mass;
  level.d2 = scores_ + places.d2;
  level.info = reinterpret_cast<const TreeRowInfo*>(scores_ + places.info);
  level.best_keys = reinterpret_cast<uint32_t*>(scores_ + places.best_key);
  level.error_keys = reinterpret_cast<uint32_t*>(scores_ + places.error_key);
  level.errors = scores_ + places.error;
  level.optimism = optimism;
  return level;
}
__device__ TreeLevel TreeSelector::Groups() const {
  return LevelOf(places_.groups, row_.group_slots, row_.group_slots, attention::kGroupOptimism);
}
__device__ TreeLevel TreeSelector::Leaves() const {
  return LevelOf(places_.leaves, first_items()[row_.segment_count], row_.slots,
                 attention::kOptimism);
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
    for (uint32_t s = thread; s < row_.segment_count; s += 32) {
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

// The lengths of the outputs that zones and all groups' estimates give together. A thread has a
// lane's channel.
__device__ void TreeSelector::MeasureOutputs() {
  const uint32_t dim = step_.value_dim, zone_floats = StateFloats(dim);
  for (uint32_t i = threadIdx.x; i < step_.group * dim; i += kCutThreads) {
    const uint32_t lane = i / dim, channel = i % dim, tile = lane / kLanes;
    const TreeLane& own = memory_->lanes[lane];
    const float max = memory_->sums[lane].x;
    const float* zones =
        TileStates(step_, unit_, tile, zone_floats) + lane % kLanes * (kStateHead + dim);
    float zone = 0, groups = 0;
#pragma unroll 4
    for (uint32_t p = 0; p < row_.read_pieces; ++p) {
      const float* state = zones + uint64_t{p} * zone_floats;
      const float factor = state[kHeadSum] > 0 ? Weight(state[kHeadMax], own.zone_max) : 0.0f;
      zone += factor * state[kStateHead + channel];
    }
#pragma unroll 4
    for (uint32_t s = 0; s < row_.segment_count; ++s) {
      const float* state = StateOfGroups(tile, s) + lane % kLanes * (kStateHead + 2 * dim);
      const float factor = Weight(state[kTreeMax], max);
      groups += factor * (state[kStateHead + channel] + state[kStateHead + dim + channel]);
    }
    const float greatest = fmaxf(max, own.zone_max);
    const float zone_factor = Weight(own.zone_max, greatest), factor = Weight(max, greatest);
    const float total = own.zone_sum * zone_factor + memory_->sums[lane].y * factor;
    const float mean = (zone * zone_factor + groups * factor) / total;
    const float zone_mean = own.zone_sum > 0 ? zone / own.zone_sum : 0.0f;
    // A warp's channels are one lane's, as value dims are multiples of 32.
    const float norm2 = SumOfWarp(mean * mean), zone_norm2 = SumOfWarp(zone_mean * zone_mean);
    if (threadIdx.x % 32 != 0) continue;
    memory_->norms[lane][0][channel / 32] = norm2;
    memory_->norms[lane][1][channel / 32] = zone_norm2;
  }
  __syncthreads();
  if (threadIdx.x < step_.group) {
    const uint32_t lane = threadIdx.x;
    TreeLane& own = memory_->lanes[lane];
    float norm2 = 0, zone_norm2 = 0;
    for (uint32_t i = 0; i < dim / 32; ++i) {
      norm2 += memory_->norms[lane][0][i];
      zone_norm2 += memory_->norms[lane][1][i];
    }
    own.output_norm = sqrtf(norm2);
    own.zone_norm2 = zone_norm2;
  }
  __syncthreads();
}

// A warp for each lane: sums over the leaves and the closed groups.
__device__ void TreeSelector::CombinePartials() {
  const uint32_t thread = threadIdx.x % 32;
  for (uint32_t lane = threadIdx.x / 32; lane < step_.group; lane += kCutWarps) {
    SumsOfHeads sums;
    for (uint32_t s = thread; s < row_.segment_count; s += 32) {
      const uint64_t item = ItemNumber(lane / kLanes, s);
      sums.Add(step_.tree_partials + (item * kLanes + lane % kLanes) * kStateHead);
    }
    sums.Join();
    if (thread != 0) continue;
    memory_->sums[lane] = make_float4(sums.max, sums.sum, sums.best_max, sums.best_sum);
    memory_->moments[lane] = sums.moments;
  }
  if (threadIdx.x < step_.group) {
    memory_->lanes[threadIdx.x] = reinterpret_cast<const TreeLane*>(words_)[threadIdx.x];
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

// The group's mean share of the optimistic mass.
__device__ float TreeSelector::BestOf(const TreeLevel& level, uint32_t i) const {
  float score = 0;
#pragma unroll 4
  for (uint32_t lane = 0; lane < step_.group; ++lane) {
    const uint64_t at = uint64_t{lane} * level.stride + i;
    const TreeLaneScale& scale = memory_->scales[lane];
    const float d2 = level.d2[at];
    const float best = level.log_mass[at] + level.optimism * kLog2E * Sqrt(d2) -
                       kLog2E / 2 * fminf(d2, attention::kVarianceCap);
    score += Weight(best, scale.best_max) * scale.best_share;
  }
  return score;
}

// The squared error of leaving row i to its estimate, mean over the group.
__device__ float TreeSelector::ErrorOf(const TreeLevel& level, uint32_t i,
                                       const TreeRowInfo& info) const {
  float error2 = 0;
#pragma unroll 4
  for (uint32_t lane = 0; lane < step_.group; ++lane) {
    const uint64_t at = uint64_t{lane} * level.stride + i;
    const TreeLaneScale& scale = memory_->scales[lane];
    const float capped = fminf(level.d2[at], attention::kVarianceCap), half = capped / 2;
    const float growth = fminf(Expm1(capped), info.tokens - 1);
    const float weight = Weight(level.log_mass[at], scale.max);
    const float in_error = weight * scale.error_unit, mass = weight * scale.mass_unit * half;
    const float rest = fminf(in_error * info.spread, attention::kErrorMax);
    const float moved = fminf(in_error * half * info.value_norm, attention::kErrorMax);
    error2 += rest * rest * (growth / info.tokens) +
              attention::kMassErrorShare * (moved * moved + mass * mass * scale.mass_share2);
  }
  return error2 / step_.group;
}

// Keys by the optimistic mass and by the error, of each token: what it costs to read the row.
__device__ void TreeSelector::Rank(const TreeLevel& level) {
  for (uint32_t i = threadIdx.x; i < level.count; i += kCutThreads) {
    const TreeRowInfo info = level.info[i];
    const bool there = info.tokens > 0;
    level.best_keys[i] = there ? KeyOf(BestOf(level, i) / info.tokens) : 0;
    if (!limited()) continue;
    const float error2 = there ? ErrorOf(level, i, info) : 0.0f;
    level.errors[i] = error2;
    level.error_keys[i] = there ? KeyOf(error2 / info.tokens) : 0;
  }
  __syncthreads();
}

// Marks the `wanted` rows that might hide the one token that a query looks for; and those that must
// be read for the others' squared errors to stay within the tolerance's square, less what is
// `spent` of it. The others are estimated.
template <typename FateOf>
__device__ void TreeSelector::Mark(const TreeLevel& level, uint32_t wanted, double tolerance,
                                   CutWeight spent, FateOf fate_of) {
  Rank(level);
  for (uint32_t i = threadIdx.x; i < level.count; i += kCutThreads) fate_of(i) = kFateEstimated;
  const auto take = [&](uint32_t i) { fate_of(i) = kFateExact; };
  const OneEach one;
  TreeCut cut = FindCut(level.best_keys, level.count, CutLimit::kTaken, wanted, one, &memory_->cut);
  ApplyCut(level.best_keys, level.count, cut, one, &memory_->cut, take);
  if (limited()) {
    const float per_budget = PerBudget(tolerance);
    const WeightBy weight{[&](uint32_t i) { return FixedShare(level.errors[i] * per_budget); }};
    const CutWeight left = kCutOne > spent ? kCutOne - spent : 0;
    cut = FindCut(level.error_keys, level.count, CutLimit::kLeft, left, weight, &memory_->cut);
    ApplyCut(level.error_keys, level.count, cut, weight, &memory_->cut, take);
  }
  __syncthreads();
}

// ---- the open stage ----

// How many rows of a level the unit's segments have.
__device__ uint32_t TreeSelector::CountRows(bool groups) {
  CutWeight rows = 0, total;
  for (uint32_t s = threadIdx.x; s < row_.segment_count; s += kCutThreads) {
    const TreeOffsets& offsets = Tree(s).offsets;
    const uint32_t at = groups ? offsets.groups.count : offsets.leaves.count;
    rows += *reinterpret_cast<const uint32_t*>(HeadOf(s) + at);
  }
  ScanBlock(rows, &memory_->cut, &total);
  return static_cast<uint32_t>(total);
}

// Numbers the leaves of opened groups, in the order of segments and groups. A thread has some
// neighbouring slots.
__device__ void TreeSelector::NumberItems() {
  const TreeLevel level = Groups();
  const uint32_t each = (level.count + kCutThreads - 1) / kCutThreads;
  const uint32_t begin = min(threadIdx.x * each, level.count), end = min(begin + each, level.count);
  uint32_t leaves = 0;
  for (uint32_t slot = begin; slot < end; ++slot) {
    if (GroupFate(slot) == kFateExact) leaves += level.info[slot].place >> 16;
  }
  CutWeight total;
  auto item = static_cast<uint32_t>(ScanBlock(leaves, &memory_->cut, &total));
  uint32_t segment = begin < end ? SegmentOfGroup(begin) : 0;
  for (uint32_t slot = begin; slot < end; ++slot) {
    while (slot >= Tree(segment).first_group_slot + Tree(segment).group_slots) ++segment;
    if (slot == Tree(segment).first_group_slot) first_items()[segment] = item;
    if (GroupFate(slot) != kFateExact) continue;
    const uint32_t place = level.info[slot].place;
    for (uint32_t i = 0; i < place >> 16; ++i) {
      items()[item++] = segment << 16 | ((place & 0xFFFF) + i);
    }
  }
  if (threadIdx.x == 0) first_items()[row_.segment_count] = static_cast<uint32_t>(total);
}

__device__ void TreeSelector::Open() {
  CombineStates();
  MeasureOutputs();
  SetScales();
  if (threadIdx.x < step_.group) {
    reinterpret_cast<TreeLane*>(words_)[threadIdx.x] = memory_->lanes[threadIdx.x];
  }
  const uint32_t groups = CountRows(/*groups=*/true);
  const double share =
      fmin(1.0, fmax(attention::kOpenedShare, attention::kOpenedPerFloor * row_.floor));
  const uint32_t wanted = max(min(attention::kOpenedLeast, groups), ShareOf(share, groups));
  Mark(Groups(), wanted, attention::kClosedErrorShare * row_.tolerance, 0,
       [this](uint32_t slot) -> uint8_t& { return GroupFate(slot); });
  NumberItems();
}

// ---- the choose stage ----

// The errors of groups that stay closed, as a share of the tolerance's square.
__device__ CutWeight TreeSelector::ClosedErrors() {
  const TreeLevel level = Groups();
  const float per_budget = PerBudget(row_.tolerance);
  CutWeight own = 0, total;
  for (uint32_t slot = threadIdx.x; slot < level.count; slot += kCutThreads) {
    const TreeRowInfo info = level.info[slot];
    if (info.tokens == 0 || GroupFate(slot) == kFateExact) continue;
    own += FixedShare(ErrorOf(level, slot, info) * per_budget);
  }
  ScanBlock(own, &memory_->cut, &total);
  return total;
}

// Lists the chosen leaves' tokens; returns how many there are. A thread has some neighbouring
// items.
__device__ uint32_t TreeSelector::ListTokens(uint32_t count) {
  const TreeRowInfo* info = Leaves().info;
  uint32_t* list = UnitChosen(step_, unit_);
  const uint32_t each = (count + kCutThreads - 1) / kCutThreads;
  const uint32_t begin = min(threadIdx.x * each, count), end = min(begin + each, count);
  uint32_t tokens = 0;
  for (uint32_t item = begin; item < end; ++item) {
    if (LeafFate(item) == kFateExact) tokens += static_cast<uint32_t>(info[item].tokens);
  }
  CutWeight total;
  auto place = static_cast<uint32_t>(ScanBlock(tokens, &memory_->cut, &total));
  for (uint32_t item = begin; item < end; ++item) {
    if (LeafFate(item) != kFateExact) continue;
    const uint32_t segment = items()[item] >> 16 << 16, leaf_tokens = info[item].tokens;
    for (uint32_t i = 0; i < leaf_tokens; ++i) list[place++] = segment | (info[item].place + i);
  }
  return static_cast<uint32_t>(total);
}

__device__ void TreeSelector::Choose() {
  CombinePartials();
  SetScales();
  for (uint32_t i = threadIdx.x; i < step_.tiles_max * kLanes; i += kCutThreads) {
    const float4 sums = i < step_.group ? memory_->sums[i] : make_float4(-INFINITY, 0, 0, 0);
    step_.lane_scales[uint64_t{unit_.unit} * step_.tiles_max * kLanes + i] = {sums.x, sums.y};
  }
  const TreeLevel level = Leaves();
  const uint32_t wanted = min(ShareOf(row_.floor, CountRows(/*groups=*/false)), level.count);
  Mark(level, wanted, row_.tolerance, limited() ? ClosedErrors() : 0,
       [this](uint32_t item) -> uint8_t& { return LeafFate(item); });
  UnitResult result = {};
  result.clusters = level.count;
  result.chosen_tokens = ListTokens(level.count);
  result.estimated_tokens = row_.clustered_tokens - result.chosen_tokens;
  QueuePieces(step_, unit_, result, &memory_->first_piece);
}

namespace {

// ---- kernels ----

template <bool kOpen>
__global__ void __launch_bounds__(kCutThreads)
    TreeSelectKernel(const __grid_constant__ StepHeader step) {
  __shared__ TreeSelectMemory memory;
  const RowRef* row = RowOfUnit(step, blockIdx.x);
  if (row->kind != UnitKind::kTree) return;
  const UnitPlace unit(step, row, blockIdx.x - row->first_unit);
  TreeSelector selector(step, unit, &memory);
  if constexpr (kOpen) {
    selector.Open();
  } else {
    selector.Choose();
  }
}

}  // namespace

// ---- launchers ----

cudaError_t LaunchTreeOpen(const StepHeader& step, cudaStream_t stream) {
  TreeSelectKernel<true><<<step.units, kCutThreads, 0, stream>>>(step);
  return cudaPeekAtLastError();
}
cudaError_t LaunchTreeChoose(const StepHeader& step, cudaStream_t stream) {
  TreeSelectKernel<false><<<step.units, kCutThreads, 0, stream>>>(step);
  return cudaPeekAtLastError();
}

}  // namespace attnd::gpu
