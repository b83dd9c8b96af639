// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/cuda/step/tree_errors.cuh"
#include "gpu/cuda/step/tree_unit_launch.cuh"

namespace attnd::gpu {
namespace {

class TreeSelector : public TreeErrors {
 public:
  using TreeErrors::TreeErrors;

  // The open stage.
  __device__ void Open();
  // The choose stage.
  __device__ void Choose();

 private:
  struct AskedGroup {
    AskedRow row;
    bool closed = false;
  };

  __device__ void Rank(const TreeLevel& level);
  template <bool kBesideClosed, typename FateOf, typename ListedOf>
  __device__ void Mark(const TreeLevel& level, double tolerance, FateOf fate_of,
                       ListedOf listed_of);
  __device__ void CombineLanes();
  // The last threads have the first groups: the first ones rank leaves.
  static __device__ __forceinline__ uint32_t OwnGroup() { return kCutThreads - 1 - threadIdx.x; }
  __device__ __forceinline__ AskedGroup AskForGroup(const TreeLevel& groups, uint32_t i) const;
  __device__ __forceinline__ void NoteClosedErrors(const TreeLevel& groups, AskedGroup group);
  __device__ CutWeight ClosedErrors() const;
};

// ---- rankings ----

// Keys by the optimistic mass and by the error.
__device__ void TreeSelector::Rank(const TreeLevel& level) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < level.own; i += kCutThreads) {
    const AskedRow row = Ask(level, level.begin + i);
    const float2 score = ScoreOf(level, level.begin + i, row);
    const float tokens = row.info.tokens;
    level.best_keys[i] = KeyOfToken(score.x, tokens);
    if (!limited()) continue;
    level.errors[i] = tokens > 0 ? score.y : 0;
    level.error_keys[i] = KeyOfToken(score.y, tokens);
  }
}

// Marks as many rows as are taken anyway, which might hide the one token that a query looks for;
// and those that must be read for the others' squared errors to stay within the tolerance's square,
// less what closed groups have of it (NoteClosedErrors). The others are estimated. Rows have been
// ranked. Notes listed_of(row, info) of marked rows.
template <bool kBesideClosed, typename FateOf, typename ListedOf>
__device__ void TreeSelector::Mark(const TreeLevel& level, double tolerance, FateOf fate_of,
                                   ListedOf listed_of) {
  const bool spends = kBesideClosed && limited();
  const float per_budget = PerBudget(tolerance);
  const WeightBy error_of{[&](uint32_t i) { return FixedShare(level.errors[i] * per_budget); }};
  CutFinder best({level.best_keys, level.own}, CutLimit::kTaken, memory_->taken_anyway, OneEach(),
                 &memory_->cut);
  CutFinder errors({level.error_keys, limited() ? level.own : 0}, CutLimit::kLeft, kCutOne,
                   error_of, &memory_->cut);
#pragma unroll 1
  for (bool first = true; !best.cut().known || (limited() && !errors.cut().known); first = false) {
    best.Add();
    if (limited()) errors.Add();
    __syncthreads();
    const uint32_t half = exchange_.half();
    uint32_t bytes = best.Send(&exchange_);
    if (limited()) bytes += errors.Send(&exchange_);
    if (spends && first) bytes += exchange_.SendShare(ClosedErrors());
    exchange_.Await(bytes);
    if (spends && first) {
      CutWeight before;
      const CutWeight spent = exchange_.SumOfShares(half, &before);
      errors.SetWeight(kCutOne > spent ? kCutOne - spent : 0);
    }
    if (limited()) {
      best.NarrowWith(&errors, half);
    } else {
      best.Narrow(half);
    }
  }
  const auto mark = [&](uint32_t i, bool takes) {
    const uint32_t row = level.begin + i;
    fate_of(row) = takes ? kFateExact : kFateEstimated;
    NoteListed(level, i, takes ? listed_of(row, InfoAt(level, row)) : ListedRow());
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
}

// ---- the open stage ----

__device__ void TreeSelector::Open() {
  NoteSegments();
  NoteGroups();
  CombineStates();
  if (limited()) {
    MeasureOutputs();
  } else {
    exchange_.Begin();
  }
  SetScales();
  if (threadIdx.x < step_.group && CutBlocks::rank() == 0) {
    stored_lanes()[threadIdx.x] = memory_->lanes[threadIdx.x];
  }
  const TreeLevel level = Groups();
  Rank(level);
  Mark</*kBesideClosed=*/false>(
      level, attention::kClosedErrorShare * row_.tolerance,
      [this](uint32_t slot) -> uint8_t& { return GroupFate(slot); },
      [this](uint32_t slot, const TreeRowInfo& info) { return LeavesOf(slot, info); });
  NumberItems(level);
}

// ---- the choose stage ----

// Of the thread block's group i, if it has one.
__device__ __forceinline__ TreeSelector::AskedGroup TreeSelector::AskForGroup(
    const TreeLevel& groups, uint32_t i) const {
  AskedGroup group;
  if (i >= groups.own) return group;
  group.row = Ask(groups, groups.begin + i);
  group.closed = GroupFate(groups.begin + i) != kFateExact && group.row.info.tokens > 0;
  return group;
}
// Notes the errors of the thread block's groups that stay closed, as shares of the tolerance's
// square. group: the thread's own, asked for while scales were not known.
__device__ __forceinline__ void TreeSelector::NoteClosedErrors(const TreeLevel& groups,
                                                               AskedGroup group) {
  const float per_budget = PerBudget(row_.tolerance);
  CutWeight own = 0;
#pragma unroll 1
  for (uint32_t i = OwnGroup();;) {
    if (group.closed) {
      own += FixedShare(ScoreOf(groups, groups.begin + i, group.row).y * per_budget);
    }
    i += kCutThreads;
    if (i >= groups.own) break;
    group = AskForGroup(groups, i);
  }
  own = SumOverWarp(own);
  if (threadIdx.x % 32 == 0) memory_->closed_errors[threadIdx.x / 32] = own;
}
// What has been noted, behind a barrier.
__device__ CutWeight TreeSelector::ClosedErrors() const {
  CutWeight sum = 0;
  for (const CutWeight of_warp : memory_->closed_errors) sum += of_warp;
  return sum;
}

// What the open stage left of lanes, sums over leaves and closed groups, and the scales: a warp for
// each lane.
__device__ void TreeSelector::CombineLanes() {
  for (uint32_t lane = threadIdx.x / 32; lane < step_.group; lane += kCutWarps) {
    const TreeLane stored = stored_lanes()[lane];
    CombinePartialsOf(lane);
    if (threadIdx.x % 32 != 0) continue;
    memory_->lanes[lane] = stored;
    SetScale(lane);
  }
  __syncthreads();
}

__device__ void TreeSelector::Choose() {
  const TreeLevel groups = Groups();
  AskedGroup first_group;
  if (limited()) first_group = AskForGroup(groups, OwnGroup());
  const TreeLevel level = Leaves();
  NoteLeaves(level);
  CombineLanes();
  exchange_.Begin();
  if (CutBlocks::rank() == 0) StoreLaneScales();
  Rank(level);
  if (limited()) NoteClosedErrors(groups, first_group);
  Mark</*kBesideClosed=*/true>(
      level, row_.tolerance, [this](uint32_t item) -> uint8_t& { return LeafFate(item); },
      [this](uint32_t item, const TreeRowInfo& info) { return TokensOf(item, info); });
  ListTokens(level);
}

// ---- kernels ----

template <bool kOpen>
__global__ void __launch_bounds__(kCutThreads, 2)
    TreeSelectKernel(const __grid_constant__ StepHeader step) {
  const uint32_t number = blockIdx.x / CutBlocks::blocks();
  const RowRef* row = RowOfUnit(step, number);
  // Before any return: later kernels rely on this one's end for that of leaves, too.
  WaitForKernelBefore();
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
cudaError_t LaunchTreeChoose(const StepHeader& step, bool overlap, cudaStream_t stream) {
  return LaunchTreeUnits<TreeSelectKernel<false>>(step, stream, overlap);
}

}  // namespace attnd::gpu
