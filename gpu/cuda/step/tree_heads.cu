// SPDX-License-Identifier: Apache-2.0
//
// The stages of units over trees whose heads have error budgets of their own (docs/POLICIES.md, "A
// tolerance for a share of rows"), but for those that work on tree items (tree_head_stages.cu).
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/cuda/step/tree_errors.cuh"
#include "gpu/cuda/step/tree_unit_launch.cuh"

namespace attnd::gpu {
namespace {

struct HeadMemory {
  TreeSelectMemory select;
  TreeTries tries;
  float wanted[kTreeLanesMax];  // limits of the next choice; infinity: the head needs none
};

// What the unit's stages before left. Called before a HeadSelector is made: as that tells the
// unit's other thread blocks that this one is there, none of them writes before all have read.
__device__ __forceinline__ void LoadTries(const StepHeader& step, const UnitPlace& unit,
                                          HeadMemory* memory) {
  const TreeTries* tries = TriesOf(step, unit);
  if (threadIdx.x == 0) {
    memory->tries.phase = tries->phase;
    memory->tries.tries = tries->tries;
  }
  if (threadIdx.x < step.group) {
    memory->tries.limits[threadIdx.x] = tries->limits[threadIdx.x];
    const auto* lanes = reinterpret_cast<const TreeLane*>(UnitTreeWords(step, unit));
    memory->select.lanes[threadIdx.x] = lanes[threadIdx.x];
  }
  __syncthreads();
}

class HeadSelector : public TreeErrors {
 public:
  __device__ HeadSelector(const StepHeader& step, const UnitPlace& unit, HeadMemory* memory)
      : TreeErrors(step, unit, &memory->select), heads_(memory) {}

  __device__ void Open();
  __device__ void Try();
  __device__ void Prepare();
  __device__ void ListChosen();

 private:
  __device__ void SetLimits();
  __device__ void Store(TreePhase phase, uint32_t tries);
  template <typename FateOf>
  __device__ void MarkAll(const TreeLevel& level, uint8_t fate, FateOf fate_of);
  template <typename WeightOf, typename FateOf>
  __device__ void MarkTaken(const TreeLevel& level, CutFinder<WeightOf>* cut, FateOf fate_of);
  template <typename FateOf>
  __device__ void MarkFloor(const TreeLevel& level, FateOf fate_of);
  template <bool kBesideClosed, typename FateOf>
  __device__ void MarkHead(const TreeLevel& level, uint32_t lane, double limit, FateOf fate_of);
  __device__ float HeadError(const TreeLevel& level, uint32_t row, uint32_t lane,
                             const TreeRowInfo& info) const;
  __device__ CutWeight ClosedErrors(uint32_t lane, float per_budget);
  template <typename FateOf, typename ListedOf>
  __device__ void NoteMarked(const TreeLevel& level, FateOf fate_of, ListedOf listed_of);
  __device__ float CorrectionSum(uint32_t lane, uint32_t chunk, uint32_t share) const;
  __device__ float ExpectedError(uint32_t lane, uint32_t chunks) const;
  __device__ bool Judge();

  HeadMemory* const heads_;
};

// ---- limits ----

__device__ void HeadSelector::SetLimits() {
  if (threadIdx.x < step_.group) {
    heads_->tries.limits[threadIdx.x] =
        static_cast<float>(row_.head_tolerance / attention::kIndependentShare);
  }
  __syncthreads();
}

// For the stages that follow. Not before exchange_.Begin.
__device__ void HeadSelector::Store(TreePhase phase, uint32_t tries) {
  __syncthreads();
  if (CutBlocks::rank() != 0) return;
  TreeTries* to = TriesOf(step_, unit_);
  if (threadIdx.x == 0) {
    to->phase = phase;
    to->tries = tries;
  }
  if (threadIdx.x < step_.group) {
    to->limits[threadIdx.x] = heads_->tries.limits[threadIdx.x];
    stored_lanes()[threadIdx.x] = memory_->lanes[threadIdx.x];
  }
}

// ---- marks ----

// A thread works on the same rows in all of these.
template <typename FateOf>
__device__ void HeadSelector::MarkAll(const TreeLevel& level, uint8_t fate, FateOf fate_of) {
  for (uint32_t i = threadIdx.x; i < level.own; i += kCutThreads) fate_of(level.begin + i) = fate;
}

template <typename WeightOf, typename FateOf>
__device__ void HeadSelector::MarkTaken(const TreeLevel& level, CutFinder<WeightOf>* cut,
                                        FateOf fate_of) {
  FindCut(cut, &exchange_);
#pragma unroll 1
  for (uint32_t first = 0; first < level.own; first += kCutThreads) {
    const uint32_t i = first + threadIdx.x;
    if (cut->TakesInOrder(i)) fate_of(level.begin + i) = kFateExact;
  }
}

// Marks as many rows as are taken anyway, which might hide the one token that a query looks for.
template <typename FateOf>
__device__ void HeadSelector::MarkFloor(const TreeLevel& level, FateOf fate_of) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < level.own; i += kCutThreads) {
    const AskedRow row = Ask(level, level.begin + i);
    const float share = ScoreOf(level, level.begin + i, row).x;
    level.best_keys[i] = KeyOfToken(share, row.info.tokens);
  }
  CutFinder cut({level.best_keys, level.own}, CutLimit::kTaken, memory_->taken_anyway, OneEach(),
                &memory_->cut);
  MarkTaken(level, &cut, fate_of);
}

__device__ float HeadSelector::HeadError(const TreeLevel& level, uint32_t row, uint32_t lane,
                                         const TreeRowInfo& info) const {
  const uint64_t at = uint64_t{lane} * level.stride + row;
  return ErrorOf(memory_->scales[lane], __ldg(level.log_mass + at), __ldg(level.d2 + at), info);
}

// Marks the rows that the head must have for the others' squared errors to stay within the limit's
// square, less those of closed groups.
template <bool kBesideClosed, typename FateOf>
__device__ void HeadSelector::MarkHead(const TreeLevel& level, uint32_t lane, double limit,
                                       FateOf fate_of) {
  const float per_budget = PerBudget(limit);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < level.own; i += kCutThreads) {
    const TreeRowInfo info = InfoAt(level, level.begin + i);
    const bool there = info.tokens > 0;
    const float error2 = there ? HeadError(level, level.begin + i, lane, info) : 0.0f;
    level.errors[i] = error2;
    level.error_keys[i] = KeyOfToken(error2, info.tokens);
  }
  const CutWeight spent = kBesideClosed ? ClosedErrors(lane, per_budget) : 0;
  const WeightBy error_of{[&](uint32_t i) { return FixedShare(level.errors[i] * per_budget); }};
  CutFinder cut({level.error_keys, level.own}, CutLimit::kLeft,
                kCutOne > spent ? kCutOne - spent : 0, error_of, &memory_->cut);
  MarkTaken(level, &cut, fate_of);
}

// The head's errors of groups that stay closed, as a share of the limit's square.
__device__ CutWeight HeadSelector::ClosedErrors(uint32_t lane, float per_budget) {
  const TreeLevel level = Groups();
  CutWeight own = 0, before;
  for (uint32_t i = threadIdx.x; i < level.own; i += kCutThreads) {
    const uint32_t slot = level.begin + i;
    const TreeRowInfo info = InfoAt(level, slot);
    if (info.tokens > 0 && GroupFate(slot) != kFateExact) {
      own += FixedShare(HeadError(level, slot, lane, info) * per_budget);
    }
  }
  return exchange_.Sum(SumOfBlock(own), &before);
}

// Notes listed_of(row, info) of marked rows.
template <typename FateOf, typename ListedOf>
__device__ void HeadSelector::NoteMarked(const TreeLevel& level, FateOf fate_of,
                                         ListedOf listed_of) {
  for (uint32_t i = threadIdx.x; i < level.own; i += kCutThreads) {
    const uint32_t row = level.begin + i;
    const bool marked = fate_of(row) == kFateExact;
    NoteListed(level, i, marked ? listed_of(row, InfoAt(level, row)) : ListedRow());
  }
}

// ---- judgement ----

// A share of a channel's sum of the slopes' correction. A thread has a channel.
__device__ float HeadSelector::CorrectionSum(uint32_t lane, uint32_t chunk, uint32_t share) const {
  const uint32_t dim = step_.value_dim, thread = threadIdx.x % 32;
  float sum = 0;
#pragma unroll 4
  for (uint32_t s = share; s < row_.tree_slices; s += kOutputShares) {
    const float* state = StateOfGroups(lane / kLanes, s) + lane % kLanes * (kStateHead + 2 * dim);
    sum += state[kStateHead + dim + chunk * kOutputChannels + thread];
  }
  return sum;
}

// What the lane's output errs by if what the last estimate has stays estimated. A warp.
__device__ float HeadSelector::ExpectedError(uint32_t lane, uint32_t chunks) const {
  const uint32_t thread = threadIdx.x % 32;
  float sum = 0, errors = 0, mass_errors = 0, variances = 0, correction2 = 0;
  for (uint32_t s = thread; s < row_.tree_slices; s += 32) {
    const float* head =
        StateOfGroups(lane / kLanes, s) + lane % kLanes * (kStateHead + 2 * step_.value_dim);
    sum += head[kTreeSum];
    errors += head[kTreeErrors];
    mass_errors += head[kTreeMassErrors];
    variances += head[kTreeLogitVariances];
  }
  for (uint32_t c = thread; c < chunks; c += 32) {
    correction2 += __uint_as_float(static_cast<uint32_t>(memory_->norms[lane * chunks + c]));
  }
  sum = SumOfWarp(sum);
  errors = SumOfWarp(errors);
  mass_errors = SumOfWarp(mass_errors);
  variances = SumOfWarp(variances);
  correction2 = SumOfWarp(correction2);
  const TreeLaneScale& scale = memory_->scales[lane];
  const float of_values = sqrtf(errors) * scale.error_unit;
  const float of_mass = sqrtf(mass_errors * scale.mass_share2) * scale.mass_unit;
  const float variance = sum > 0 ? fminf(variances / sum, attention::kVarianceCap) : 0.0f;
  const float common =
      attention::kCoherentShare * sqrtf(correction2) * sqrtf(variance) * scale.error_unit;
  return hypotf(attention::kIndependentShare * hypotf(of_values, of_mass), common);
}

// Whether all heads are within the tolerance. Of those that are not, less may be left to estimates
// from now on; the others need no more leaves.
__device__ bool HeadSelector::Judge() {
  const uint32_t chunks = MeasureParts(
      [this](uint32_t lane, uint32_t chunk, uint32_t share) {
        return make_float2(CorrectionSum(lane, chunk, share), 0);
      },
      [](uint32_t, float2 sums) -> CutWeight {
        return __float_as_uint(SumOfWarp(sums.x * sums.x));
      });
  const auto within = static_cast<float>(row_.head_tolerance);
  bool all_within = true;
  for (uint32_t lane = threadIdx.x / 32; lane < step_.group; lane += kCutWarps) {
    const float expected = ExpectedError(lane, chunks);
    const bool is_within = expected <= within;  // not what is no number
    all_within &= is_within;
    if (threadIdx.x % 32 != 0) continue;
    float& limit = heads_->tries.limits[lane];
    if (!is_within) {
      const auto slack = static_cast<float>(attention::kQuantileSlack);
      limit *= expected < INFINITY ? slack * within / expected : 0.0f;
    }
    heads_->wanted[lane] = is_within ? INFINITY : limit;
  }
  return __syncthreads_and(all_within) != 0;
}

// ---- stages ----

__device__ void HeadSelector::Open() {
  const auto fate_of = [this](uint32_t slot) -> uint8_t& { return GroupFate(slot); };
  NoteSegments();
  NoteGroups();
  CombineStates();
  MeasureOutputs();
  SetScales();
  const TreeLevel level = Groups();
  MarkAll(level, kFateEstimated, fate_of);
  MarkFloor(level, fate_of);
  const double limit =
      attention::kQuantileClosedShare * attention::kClosedErrorShare * row_.head_tolerance;
#pragma unroll 1
  for (uint32_t lane = 0; lane < step_.group; ++lane) {
    MarkHead</*kBesideClosed=*/false>(level, lane, limit, fate_of);
  }
  NoteMarked(level, fate_of,
             [this](uint32_t slot, const TreeRowInfo& info) { return LeavesOf(slot, info); });
  NumberItems(level);
  SetLimits();
  Store(TreePhase::kBesideClosed, 0);
}

__device__ void HeadSelector::Try() {
  const auto fate_of = [this](uint32_t item) -> uint8_t& { return LeafFate(item); };
  const TreePhase phase = heads_->tries.phase;
  const uint32_t tries = heads_->tries.tries;
  const TreeLevel level = Leaves();
  NoteLeaves(level);
  CombinePartials();
  if (phase == TreePhase::kAnew && tries == 0) {
    MeasureOutputs();
  } else {
    exchange_.Begin();
  }
  SetScales();
  const bool closed = level.count < memory_->level_rows;
  if (tries == 0) {
    if (CutBlocks::rank() == 0) StoreLaneScales();
    MarkAll(level, kFateEstimated, fate_of);
    MarkFloor(level, fate_of);
    if (threadIdx.x < step_.group) {
      heads_->wanted[threadIdx.x] = heads_->tries.limits[threadIdx.x];
    }
    __syncthreads();
  } else {
    if (Judge()) return Store(TreePhase::kDone, tries);
    if (tries >= (closed ? attention::kQuantileTriesBesideClosed : attention::kQuantileTries)) {
      if (closed) return Store(TreePhase::kReopen, 0);
      MarkAll(level, kFateExact, fate_of);
      return Store(TreePhase::kReadAll, 0);
    }
  }
#pragma unroll 1
  for (uint32_t lane = 0; lane < step_.group; ++lane) {
    const float limit = heads_->wanted[lane];
    if (limit < INFINITY) MarkHead</*kBesideClosed=*/true>(level, lane, limit, fate_of);
  }
  Store(phase, tries + 1);
}

// All is estimated once, as the outputs' lengths are found by that.
__device__ void HeadSelector::Prepare() {
  CombinePartials();
  exchange_.Begin();
  if (CutBlocks::rank() == 0) StoreLaneScales();
  MarkAll(Leaves(), kFateEstimated, [this](uint32_t item) -> uint8_t& { return LeafFate(item); });
  SetLimits();
  Store(TreePhase::kAnew, 0);
}

__device__ void HeadSelector::ListChosen() {
  exchange_.Begin();
  const TreeLevel level = Leaves();
  NoteMarked(
      level, [this](uint32_t item) { return LeafFate(item); },
      [this](uint32_t item, const TreeRowInfo& info) { return TokensOf(item, info); });
  ListTokens(level);
  if (CutBlocks::rank() != 0) return;
  // Where all is read that has been estimated by now: there is nothing left to do.
  const bool reads_all = heads_->tries.phase == TreePhase::kReadAll;
  if (reads_all && threadIdx.x == 0) TriesOf(step_, unit_)->phase = TreePhase::kDone;
}

// ---- kernels ----

enum class HeadStage { kOpen, kTry, kPrepare, kList };

// Whether a unit of that phase has anything to do in the stage.
template <HeadStage kStage>
__device__ __forceinline__ bool TakesPart(TreePhase phase) {
  if (kStage == HeadStage::kPrepare) return phase == TreePhase::kReopen;
  if (kStage == HeadStage::kList) return true;
  return phase == TreePhase::kBesideClosed || phase == TreePhase::kAnew;
}

template <HeadStage kStage>
__global__ void __launch_bounds__(kCutThreads, 2)
    TreeHeadsKernel(const __grid_constant__ StepHeader step) {
  const uint32_t number = blockIdx.x / CutBlocks::blocks();
  const RowRef* row = RowOfUnit(step, number);
  if (!Chooses(*row, TreeChoice::kByHead)) return;
  const UnitPlace unit(step, row, number - row->first_unit);
  auto* memory = reinterpret_cast<HeadMemory*>(block_memory);
  if constexpr (kStage != HeadStage::kOpen) {
    LoadTries(step, unit, memory);
    if (!TakesPart<kStage>(memory->tries.phase)) return;
  }
  HeadSelector selector(step, unit, memory);
  if constexpr (kStage == HeadStage::kOpen) selector.Open();
  if constexpr (kStage == HeadStage::kTry) selector.Try();
  if constexpr (kStage == HeadStage::kPrepare) selector.Prepare();
  if constexpr (kStage == HeadStage::kList) selector.ListChosen();
}

template <HeadStage kStage>
cudaError_t Launch(const StepHeader& step, cudaStream_t stream) {
  return LaunchTreeUnits<TreeHeadsKernel<kStage>, sizeof(HeadMemory)>(step, stream);
}

}  // namespace

cudaError_t LaunchTreeOpenByHead(const StepHeader& step, cudaStream_t stream) {
  return Launch<HeadStage::kOpen>(step, stream);
}
cudaError_t LaunchTreeTry(const StepHeader& step, cudaStream_t stream) {
  return Launch<HeadStage::kTry>(step, stream);
}
cudaError_t LaunchTreePrepare(const StepHeader& step, cudaStream_t stream) {
  return Launch<HeadStage::kPrepare>(step, stream);
}
cudaError_t LaunchTreeList(const StepHeader& step, cudaStream_t stream) {
  return Launch<HeadStage::kList>(step, stream);
}

}  // namespace attnd::gpu
