// SPDX-License-Identifier: Apache-2.0
//
// The finish stage over trees: the estimate of one tree item's groups that stay closed, and of its
// leaves that are not read.
#ifndef ATTND_GPU_CUDA_STEP_TREE_ESTIMATE_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_ESTIMATE_CUH_

#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/estimate.cuh"
#include "gpu/cuda/step/tree_stages.cuh"

namespace attnd::gpu {

// Sixteen rows of one part and where their scores are. What became of them is asked for late, so
// that its load may be on its way while other rows are worked on.
struct EstimatedRows {
  const TreePart* part;
  const float* log_mass;  // of lane g, at row 0 of the sixteen
  const float* d2;
  TreeRowSet set;
  uint8_t fate;  // of the thread's own row, if there is one
  bool groups;

  // Those that have a share in the moments: opened groups' leaves stand for them.
  __device__ __forceinline__ TreeRowSet Counted() const {
    return {groups && fate == kFateExact ? kNoRow : set.own};
  }
  __device__ __forceinline__ TreeRowSet Estimated() const {
    return {fate == kFateEstimated ? set.own : kNoRow};
  }
  __device__ __forceinline__ TreeRowSet Dropped() const {
    return {fate == kFateDropped ? set.own : kNoRow};
  }
};

// What estimated rows add to the sums of errors.
template <int kDim, int kValueDim>
__device__ __forceinline__ void AddErrors(float weight, float d2, float size, float spread,
                                          float norm2, TreeSums<kDim, kValueDim>* sums) {
  const float capped = fminf(d2, kVarianceCap), half = capped / 2;
  // Among s weights none can have more than all: their relative variance is at most s - 1.
  const float growth = fminf(Expm1(capped), size - 1);
  const float mass = weight * half;
  const float rest = fminf(weight * spread, attention::kErrorMax);
  const float moved = fminf(mass * Sqrt(norm2), attention::kErrorMax);
  sums->errors +=
      rest * rest * __fdividef(growth, size) + attention::kMassErrorShare * moved * moved;
  sums->mass_errors += attention::kMassErrorShare * mass * mass;
  sums->logit_variances += weight * capped;
}

template <int kDim, int kValueDim>
__device__ __forceinline__ void AddEstimatedRows(const TreeItem& item, const EstimatedRows& source,
                                                 bool used, TreeSums<kDim, kValueDim>* sums) {
  const uint32_t t = threadIdx.x % 4;
  const TreeRowSet all_estimated = source.Estimated();
  uint32_t rows[2][2], estimated[2][2];
  RowsOfThread(source.Counted(), rows);
  RowsOfThread(all_estimated, estimated);
  const EstimateRows<kDim, kValueDim> estimates(item.head, *source.part, estimated);
  const TreeNumbers norms = TreeNumbers::Load(item.head + source.part->value_norm2, rows);
  const TreeNumbers spreads = TreeNumbers::Load(item.head + source.part->spread, estimated);
  const TreeNumbers sizes = TreeNumbers::Load(item.head + source.part->log_size, estimated);
  float log_mass[2][2], weight[2][2], d2[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t at = n * 8 + 2 * t + c;
      log_mass[n][c] = used && rows[n][c] != kNoRow ? source.log_mass[at] : -INFINITY;
      d2[n][c] = used && estimated[n][c] != kNoRow ? source.d2[at] : 0.0f;
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float p = Weight(log_mass[n][c], sums->max);
      sums->moments += p * norms.x[n][c];
      weight[n][c] = estimated[n][c] != kNoRow ? p : 0.0f;
      const float size = rintf(Exp2(sizes.x[n][c] * kLog2E));
      AddErrors(weight[n][c], d2[n][c], size, spreads.x[n][c], norms.x[n][c], sums);
    }
  }
  if (!__any_sync(~0u, all_estimated.own != kNoRow)) return;
  AddTreeEstimates(estimates, weight, d2, sums);
}

// What dropped rows add to the sum of their weights.
__device__ __forceinline__ void AddDroppedRows(const EstimatedRows& source, bool used, float max,
                                               float* sum) {
  const uint32_t t = threadIdx.x % 4;
  uint32_t rows[2][2];
  RowsOfThread(source.Dropped(), rows);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (used && rows[n][c] != kNoRow) *sum += Weight(source.log_mass[n * 8 + 2 * t + c], max);
    }
  }
}

// The rows of an item that may be estimated, sixteen at a time: first its groups, of which those
// that are opened count as missing, then its leaves. with_groups: whether any may be closed.
class EstimatedRowsOf {
 public:
  __device__ EstimatedRowsOf(const StepHeader& step, const TreeItem& item, bool with_groups)
      : item_(item),
        row_(*item.row),
        leaves_(step, item),
        lane_(item.tile * kLanes + threadIdx.x % 32 / 4),
        fates_(UnitFates(step, item.unit)),
        first_group_(item.first_group()),
        groups_end_(item.groups_end()),
        group_batches_(with_groups ? (groups_end_ - first_group_ + kTreeRows - 1) / kTreeRows : 0) {
    const TreeScores places = TreeScoresOf(row_, step.group);
    group_log_mass_ = TreeScoresAt(step, item.unit, places.groups.log_mass);
    group_d2_ = TreeScoresAt(step, item.unit, places.groups.d2);
    leaf_log_mass_ = TreeScoresAt(step, item.unit, places.leaves.log_mass);
    leaf_d2_ = TreeScoresAt(step, item.unit, places.leaves.d2);
  }

  __device__ __forceinline__ uint32_t batches() const {
    return group_batches_ + (leaves_.end - leaves_.begin + kTreeRows - 1) / kTreeRows;
  }
  // Without rows behind the last one.
  __device__ __forceinline__ EstimatedRows Batch(uint32_t number) const {
    const bool groups = number < group_batches_;
    const uint32_t first = groups ? first_group_ + number * kTreeRows
                                  : leaves_.begin + (number - group_batches_) * kTreeRows;
    const uint64_t at =
        groups ? uint64_t{lane_} * row_.group_slots + item_.tree->first_group_slot + first
               : uint64_t{lane_} * row_.slots + first;
    EstimatedRows rows;
    rows.part = groups ? &item_.tree->offsets.groups : &item_.tree->offsets.leaves;
    rows.log_mass = (groups ? group_log_mass_ : leaf_log_mass_) + at;
    rows.d2 = (groups ? group_d2_ : leaf_d2_) + at;
    rows.set = groups ? RowsInOrder(first, groups_end_) : leaves_.Rows(first);
    rows.groups = groups;
    const uint32_t own = first + threadIdx.x % kTreeRows;
    rows.fate = kFateExact;
    if (own < (groups ? groups_end_ : leaves_.end)) {
      rows.fate = fates_[groups ? row_.slots + item_.tree->first_group_slot + own : own];
    }
    return rows;
  }

 private:
  const TreeItem& item_;
  const RowRef& row_;
  const LeafItems leaves_;
  const uint32_t lane_;
  const uint8_t* const fates_;
  const float *group_log_mass_, *group_d2_, *leaf_log_mass_, *leaf_d2_;
  const uint32_t first_group_, groups_end_;
  const uint32_t group_batches_;
};

// dropped: this thread's share of the dropped rows' weights; stays as it is if none may be dropped.
template <int kDim, int kValueDim, TreeChoice kChoice>
__device__ __forceinline__ void SumEstimates(const StepHeader& step, const TreeItem& item,
                                             TreeSums<kDim, kValueDim>* sums, float* dropped) {
  constexpr bool kByMass = kChoice == TreeChoice::kByMass;
  const bool used = item.tile * kLanes + threadIdx.x % 32 / 4 < step.group;
  const EstimatedRowsOf source(step, item, /*with_groups=*/!kByMass);
  EstimatedRows rows = source.Batch(threadIdx.x / 32);
#pragma unroll 1
  for (uint32_t i = threadIdx.x / 32; i < source.batches(); i += kTreeWarps) {
    const EstimatedRows next = source.Batch(i + kTreeWarps);  // on its way meanwhile
    AddEstimatedRows(item, rows, used, sums);
    if constexpr (kByMass) AddDroppedRows(rows, used, sums->max, dropped);
    rows = next;
  }
}

// The item's estimate as a state of the tile. TreeFinisher has put the dropped weights in the place
// of another sum.
template <int kValueDim, TreeChoice kChoice>
__device__ __forceinline__ void StoreEstimate(const StepHeader& step, const TreeItem& item,
                                              uint32_t lanes) {
  constexpr uint32_t kFrom = kStateHead + 2 * kValueDim, kTo = kStateHead + kValueDim;
  const float* from = step.tree_states + uint64_t{item.number} * TreeStateFloats(kValueDim);
  constexpr uint32_t kFloats = StateFloats(kValueDim);
  float* to = TileStates(step, item.unit, item.tile, kFloats) +
              (uint64_t{item.row->read_pieces} + item.slice) * kFloats;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < lanes * kValueDim; i += kTreeThreads) {
    const uint32_t lane = i / kValueDim, channel = i % kValueDim;
    const float* value = from + lane * kFrom + kStateHead + channel;
    to[lane * kTo + kStateHead + channel] = value[0] + value[kValueDim];
  }
  if (threadIdx.x >= lanes) return;
  const float* head = from + threadIdx.x * kFrom;
  float* head_out = to + threadIdx.x * kTo;
  head_out[kHeadMax] = head[kTreeMax];
  head_out[kHeadSum] = head[kTreeSum];
  head_out[kHeadErrors] = head[kTreeErrors];
  head_out[kHeadMoments] = head[kTreeMoments];
  head_out[kHeadDropped] = kChoice == TreeChoice::kByMass ? head[kTreeBestSum] : 0.0f;
  head_out[kHeadMassErrors] = head[kTreeMassErrors];
  head_out[kHeadLogitVariances] = head[kTreeLogitVariances];
}

template <int kDim, int kValueDim, TreeChoice kChoice>
__global__ void __launch_bounds__(kTreeThreads, (kTreeBlocks<kDim, kValueDim>))
    TreeEstimateKernel(const __grid_constant__ StepHeader step) {
  __shared__ TreeBlock<kDim> block;
  const TreeItem item(step, blockIdx.x);
  if (ChoiceOf(*item.row) != kChoice) return;
  if constexpr (kChoice == TreeChoice::kByHead) {
    if (PhaseOf(step, item.unit) == TreePhase::kDone) return;
  }
  PrefetchBytes(item.head + item.tree->offsets.slopes, kDim * kValueDim * 2);
  LoadStoredQueries<kDim>(step, item, kLanes * kDim, &block);
  TreeSums<kDim, kValueDim> sums;
  const uint64_t tile_number = uint64_t{item.unit.unit} * step.tiles_max + item.tile;
  sums.max = step.lane_scales[tile_number * kLanes + threadIdx.x % 32 / 4].max;
  Totals dropped = {kChoice == TreeChoice::kByMass ? sums.max : -INFINITY, 0};
  SumEstimates<kDim, kValueDim, kChoice>(step, item, &sums, &dropped.sum);
  const uint32_t lanes = LanesOf(step, item.unit, item.tile);
  TreeFinisher<kDim, kValueDim>(
      item, lanes, step.tree_states + uint64_t{item.number} * TreeStateFloats(kValueDim), &block)
      .Run(&sums, dropped);
  StoreEstimate<kValueDim, kChoice>(step, item, lanes);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_ESTIMATE_CUH_
