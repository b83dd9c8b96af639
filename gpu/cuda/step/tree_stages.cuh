// SPDX-License-Identifier: Apache-2.0
//
// The stages over trees in which a thread block works on one tree item, but for the finish stage's
// estimate (tree_estimate.cuh): groups, leaves.
#ifndef ATTND_GPU_CUDA_STEP_TREE_STAGES_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_STAGES_CUH_

#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/tree_sums.cuh"

namespace attnd::gpu {

// Asks the second-level cache for what the thread block will read, so that later loads wait for no
// more than that cache.
__device__ __forceinline__ void PrefetchBytes(const std::byte* from, uint32_t bytes) {
  for (uint32_t at = threadIdx.x * 128; at < bytes; at += kTreeThreads * 128) {
    Prefetch(from + at);
  }
}
template <int kDim, int kValueDim>
__device__ __forceinline__ void PrefetchGroups(const TreeItem& item) {
  const TreeOffsets& offsets = item.tree->offsets;
  const uint32_t first = item.first_group();
  const uint32_t max_groups = max(item.tree->max_groups, first);
  const uint32_t rows = min(max_groups - first, item.row->tree_slice_groups);
  const auto prefetch_rows = [&](uint32_t part, uint32_t row_bytes) {
    PrefetchBytes(item.head + part + uint64_t{first} * row_bytes, rows * row_bytes);
  };
  PrefetchBytes(item.head + offsets.axes, kDim * kDim * 2);
  prefetch_rows(offsets.groups.centroids, kDim);
  prefetch_rows(offsets.groups.deviation_codes, kDim / 2);
  prefetch_rows(offsets.groups.mean_values, kValueDim);
  PrefetchBytes(item.head + offsets.slopes, kDim * kValueDim * 2);
}

// Rows [first, first + 16) of `count`.
__device__ __forceinline__ TreeRowSet RowsInOrder(uint32_t first, uint32_t count) {
  const uint32_t row = first + threadIdx.x % kTreeRows;
  return {row < count ? row : kNoRow};
}

// Thread blocks of a tree's stages that a multiprocessor should hold.
template <int kDim, int kValueDim>
inline constexpr int kTreeBlocks = kDim + kValueDim <= 256 ? 2 : 1;

// ---- groups ----

// Keeps the scores of a warp's rows, from `first` of lane g's on; the places behind the last row
// are room.
__device__ __forceinline__ void StoreTreeScores(const TreeRowScores& scores, uint32_t first,
                                                float* log_mass, float* d2) {
  const uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const uint32_t at = first + n * 8 + 2 * t;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      log_mass[at + c] = scores.log_mass[n][c];
      d2[at + c] = scores.d2[n][c];
    }
  }
}

// What choosing needs of some rows, beside their scores.
__device__ __forceinline__ TreeRowInfo InfoOf(const TreeItem& item, const TreePart& part,
                                              uint32_t row) {
  const auto* starts = reinterpret_cast<const uint32_t*>(item.head + part.starts) + row;
  TreeRowInfo info;
  info.place = __ldg(starts);
  info.tokens = __ldg(starts + 1) - info.place;
  info.spread = __ldg(item.Floats(part.spread) + row);
  info.value_norm = sqrtf(__ldg(item.Floats(part.value_norm2) + row));
  return info;
}

// What choosing needs of an item's groups. A thread asks for its first group's when this is made,
// so that the loads are on their way while queries are rotated.
class GroupInfos {
 public:
  __device__ __forceinline__ explicit GroupInfos(const TreeItem& item)
      : own_(item.first_group() + threadIdx.x),
        groups_(item.tile == 0 ? item.groups_end() : 0),  // the other tiles store none
        info_(Load(item, own_)) {}

  __device__ __forceinline__ void Store(const StepHeader& step, const TreeItem& item) const {
    if (item.tile != 0) return;
    const TreeScores places = TreeScoresOf(*item.row, step.group);
    auto* to = reinterpret_cast<TreeRowInfo*>(TreeScoresAt(step, item.unit, places.groups.info)) +
               item.tree->first_group_slot;
    const uint32_t slots_end =
        min(item.tree->group_slots, item.first_group() + item.row->tree_slice_groups);
    if (own_ < slots_end) to[own_] = info_;
    for (uint32_t i = own_ + kTreeThreads; i < slots_end; i += kTreeThreads) to[i] = Load(item, i);
  }

 private:
  // Of a slot without a group: zeros.
  __device__ __forceinline__ TreeRowInfo Load(const TreeItem& item, uint32_t group) const {
    if (group >= groups_) return {};
    const TreePart& part = item.tree->offsets.groups;
    const auto* members = reinterpret_cast<const uint32_t*>(item.head + part.first_members) + group;
    TreeRowInfo info = InfoOf(item, part, group);
    const uint32_t first = __ldg(members);
    info.place = first | (__ldg(members + 1) - first) << 16;
    return info;
  }

  const uint32_t own_, groups_;
  const TreeRowInfo info_;
};

template <int kDim, int kValueDim>
__device__ __forceinline__ void SumGroups(const StepHeader& step, const TreeItem& item,
                                          const TreeQueries<kDim>& queries,
                                          TreeSums<kDim, kValueDim>* sums, Totals* best) {
  const TreePart& part = item.tree->offsets.groups;
  const uint32_t groups = item.groups_end(), g = threadIdx.x % 32 / 4;
  const uint32_t lane = item.tile * kLanes + g;
  const TreeScores places = TreeScoresOf(*item.row, step.group);
  const uint64_t at = uint64_t{lane} * item.row->group_slots + item.tree->first_group_slot;
  float* log_mass = TreeScoresAt(step, item.unit, places.groups.log_mass) + at;
  float* d2 = TreeScoresAt(step, item.unit, places.groups.d2) + at;
  for (uint32_t first = item.first_group() + threadIdx.x / 32 * kTreeRows; first < groups;
       first += kTreeWarps * kTreeRows) {
    const TreeRows<kDim> of(item.head, part, RowsInOrder(first, groups));
    const auto& rows = of.rows;
    const TreeNumbers norms = TreeNumbers::Load(item.head + part.value_norm2, rows);
    const TreeRowScores scores = ScoreTreeRows<kDim>(queries, of, attention::kGroupOptimism);
    const EstimateRows<kDim, kValueDim> estimates(item.head, part, rows);
    if (lane < step.group) StoreTreeScores(scores, first, log_mass, d2);
    AddToTotals(scores.best, best);
    const auto& x = scores.log_mass;
    RaiseMax(fmaxf(fmaxf(x[0][0], x[0][1]), fmaxf(x[1][0], x[1][1])), sums);
    float weight[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        weight[n][c] = Weight(x[n][c], sums->max);
        sums->moments += weight[n][c] * norms.x[n][c];
      }
    }
    AddTreeEstimates(estimates, weight, scores.d2, sums);
  }
}

template <int kDim, int kValueDim>
__global__ void __launch_bounds__(kTreeThreads, (kTreeBlocks<kDim, kValueDim>))
    TreeGroupsKernel(const __grid_constant__ StepHeader step) {
  __shared__ TreeBlock<kDim> block;
  const TreeItem item(step, blockIdx.x);
  if (ChoiceOf(*item.row) == TreeChoice::kByMass) return;
  PrefetchGroups<kDim, kValueDim>(item);
  const GroupInfos infos(item);
  LoadTreeQueries<kDim>(step, item, &block);
  RotateQueries<kDim>(item, &block);
  SquareQueries<kDim>(&block);
  StoreQueries<kDim>(step, item, block);
  TreeSums<kDim, kValueDim> sums;
  Totals best = {-INFINITY, 0};
  infos.Store(step, item);
  SumGroups(step, item, block.q, &sums, &best);
  TreeFinisher<kDim, kValueDim>(
      item, LanesOf(step, item.unit, item.tile),
      step.tree_states + uint64_t{item.number} * TreeStateFloats(kValueDim), &block)
      .Run(&sums, best);
}

// ---- leaves ----

// Items [begin, end) of a unit's opened leaves are a slice's to work on: an even share of its
// segment's, as a few slices have most of what is opened.
struct LeafItems {
  const uint32_t* items;
  uint32_t begin, end;

  __device__ __forceinline__ LeafItems(const StepHeader& step, const TreeItem& item) {
    const uint32_t* words = UnitTreeWords(step, item.unit);
    const uint32_t* of_slices = words + kTreeLaneWords + item.tree->first_slice;
    const uint32_t slices = item.tree->slices;
    const uint32_t first = of_slices[0], last = of_slices[slices];
    const uint32_t batches = (last - first + kTreeRows - 1) / kTreeRows;
    const uint32_t share = (batches + slices - 1) / slices * kTreeRows;
    items = words + TreeItems(*item.row);
    begin = min(first + (item.slice - item.tree->first_slice) * share, last);
    end = min(begin + share, last);
  }
  // Sixteen items from `first` on, which may lie behind the last one.
  __device__ __forceinline__ TreeRowSet Rows(uint32_t first) const {
    const uint32_t item = first + threadIdx.x % kTreeRows;
    return {item < end ? items[item] & 0xFFFF : kNoRow};
  }
};

__device__ __forceinline__ void StoreLeafInfo(const StepHeader& step, const TreeItem& item,
                                              const LeafItems& leaves) {
  if (item.tile != 0) return;
  const TreeScores places = TreeScoresOf(*item.row, step.group);
  auto* to = reinterpret_cast<TreeRowInfo*>(TreeScoresAt(step, item.unit, places.leaves.info));
  for (uint32_t i = leaves.begin + threadIdx.x; i < leaves.end; i += kTreeThreads) {
    to[i] = InfoOf(item, item.tree->offsets.leaves, leaves.items[i] & 0xFFFF);
  }
}

__device__ __forceinline__ bool IsReopened(const StepHeader& step, const TreeItem& item) {
  return ChoiceOf(*item.row) == TreeChoice::kByHead &&
         PhaseOf(step, item.unit) == TreePhase::kReopen;
}

// The masses of some rows, and their values' second moments; of lane g, partial over warps and t.
struct MassTotals {
  float max = -INFINITY, sum = 0, moments = 0;

  template <int kCount>
  __device__ __forceinline__ void Add(const float (&x)[kCount], const float (&norm2)[kCount]) {
    float greatest = max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) greatest = fmaxf(greatest, x[i]);
    const float factor = Weight(max, greatest);
    sum *= factor;
    moments *= factor;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float weight = Weight(x[i], greatest);
      sum += weight;
      moments += weight * norm2[i];
    }
    max = greatest;
  }
  // Over the threads that share g.
  __device__ __forceinline__ void Join() {
    const float greatest = MaxOverT(max), factor = Weight(max, greatest);
    sum = SumOverT(sum * factor);
    moments = SumOverT(moments * factor);
    max = greatest;
  }
};

// Adds the slice's groups that stay closed.
__device__ __forceinline__ void AddClosedGroups(const StepHeader& step, const TreeItem& item,
                                                MassTotals* totals) {
  const uint32_t g = threadIdx.x % 32 / 4, lane = item.tile * kLanes + g;
  if (lane >= step.group || ChoiceOf(*item.row) == TreeChoice::kByMass) return;
  const TreeScores places = TreeScoresOf(*item.row, step.group);
  const uint32_t slot = item.tree->first_group_slot;
  const float* log_mass = TreeScoresAt(step, item.unit, places.groups.log_mass) +
                          uint64_t{lane} * item.row->group_slots + slot;
  const auto* info =
      reinterpret_cast<const TreeRowInfo*>(TreeScoresAt(step, item.unit, places.groups.info)) +
      slot;
  const uint8_t* fates = UnitFates(step, item.unit) + item.row->slots + slot;
  const uint32_t groups = item.groups_end();
  const uint32_t own = item.first_group() + threadIdx.x / 32 * 4 + threadIdx.x % 4;
  constexpr uint32_t kAtOnce = 8;
  for (uint32_t first = own; first < groups; first += kAtOnce * kTreeWarps * 4) {
    float x[kAtOnce], norm2[kAtOnce];
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t i = first + k * kTreeWarps * 4, at = min(i, groups - 1);
      const float mass = log_mass[at], norm = info[at].value_norm;
      const bool closed = i < groups && fates[at] != kFateExact;
      x[k] = closed ? mass : -INFINITY;
      norm2[k] = norm * norm;
    }
    totals->Add(x, norm2);
  }
}

// Sixteen leaves, and their values' second moments.
template <int kDim>
struct ScoredLeaves {
  TreeRows<kDim> rows;
  TreeNumbers norms;

  __device__ __forceinline__ ScoredLeaves(const TreeItem& item, const TreeRowSet& set)
      : rows(item.head, item.tree->offsets.leaves, set),
        norms(TreeNumbers::Load(item.head + item.tree->offsets.leaves.value_norm2, rows.rows)) {}
};

__device__ __forceinline__ void AddLeafMass(const TreeRowScores& scores, const TreeNumbers& norms,
                                            MassTotals* totals) {
  const auto& x = scores.log_mass;
  const float mass[4] = {x[0][0], x[0][1], x[1][0], x[1][1]};
  const float norm2[4] = {norms.x[0][0], norms.x[0][1], norms.x[1][0], norms.x[1][1]};
  totals->Add(mass, norm2);
}

// The item's partial sums: masses and moments of its leaves and closed groups, optimistic masses of
// its leaves.
__device__ __forceinline__ void StorePartials(const StepHeader& step, const TreeItem& item,
                                              MassTotals mass, Totals best) {
  __shared__ float parts[kTreeWarps][kLanes][kStateHead];
  const uint32_t warp = threadIdx.x / 32;
  mass.Join();
  best.Join();
  if (threadIdx.x % 4 == 0) {
    float* part = parts[warp][threadIdx.x % 32 / 4];
    part[kTreeMax] = mass.max;
    part[kTreeSum] = mass.sum;
    part[kTreeMoments] = mass.moments;
    part[kTreeBestMax] = best.max;
    part[kTreeBestSum] = best.sum;
  }
  __syncthreads();
  if (threadIdx.x >= kLanes) return;
  const uint32_t lane = threadIdx.x;
  float head[kStateHead] = {};
  head[kTreeMax] = head[kTreeBestMax] = -INFINITY;
  for (uint32_t w = 0; w < kTreeWarps; ++w) {
    head[kTreeMax] = fmaxf(head[kTreeMax], parts[w][lane][kTreeMax]);
    head[kTreeBestMax] = fmaxf(head[kTreeBestMax], parts[w][lane][kTreeBestMax]);
  }
  for (uint32_t w = 0; w < kTreeWarps; ++w) {
    const float* part = parts[w][lane];
    const float factor = Weight(part[kTreeMax], head[kTreeMax]);
    head[kTreeSum] += factor * part[kTreeSum];
    head[kTreeMoments] += factor * part[kTreeMoments];
    head[kTreeBestSum] += Weight(part[kTreeBestMax], head[kTreeBestMax]) * part[kTreeBestSum];
  }
  float* out = step.tree_partials + (uint64_t{item.number} * kLanes + lane) * kStateHead;
#pragma unroll
  for (uint32_t i = 0; i < kStateHead; ++i) out[i] = head[i];
}

// kReopened: of units whose groups have all been opened after a first choice; else of all.
template <int kDim, int kValueDim, bool kReopened>
__global__ void __launch_bounds__(kTreeThreads, (kTreeBlocks<kDim, kValueDim>))
    TreeLeavesKernel(const __grid_constant__ StepHeader step) {
  __shared__ TreeBlock<kDim> block;
  const TreeItem item(step, blockIdx.x);
  if (kReopened && !IsReopened(step, item)) return;
  const LeafItems leaves(step, item);
  MassTotals mass;
  Totals best = {-INFINITY, 0};
  AddClosedGroups(step, item, &mass);
  if (leaves.begin < leaves.end) {
    StoreLeafInfo(step, item, leaves);
    LoadStoredQueries<kDim>(step, item, TreeQueryWords(kDim), &block);
  }
  const uint32_t lane = item.tile * kLanes + threadIdx.x % 32 / 4;
  const TreeScores places = TreeScoresOf(*item.row, step.group);
  const uint64_t at = uint64_t{lane} * item.row->slots;
  float* log_mass = TreeScoresAt(step, item.unit, places.leaves.log_mass) + at;
  float* d2 = TreeScoresAt(step, item.unit, places.leaves.d2) + at;
  constexpr uint32_t kStride = kTreeWarps * kTreeRows;
  const uint32_t own = leaves.begin + threadIdx.x / 32 * kTreeRows;
  ScoredLeaves<kDim> next(item, leaves.Rows(own));
  TreeRowSet after = leaves.Rows(own + kStride);
#pragma unroll 1
  for (uint32_t first = own; first < leaves.end; first += kStride) {
    const ScoredLeaves<kDim> of = next;
    next = ScoredLeaves<kDim>(item, after);  // on their way meanwhile, as are the items behind them
    after = leaves.Rows(first + 2 * kStride);
    const TreeRowScores scores = ScoreTreeRows<kDim>(block.q, of.rows, attention::kOptimism);
    const uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint32_t number = first + n * 8 + 2 * t + c;
        if (number >= leaves.end || lane >= step.group) continue;
        log_mass[number] = scores.log_mass[n][c];
        d2[number] = scores.d2[n][c];
      }
    }
    AddLeafMass(scores, of.norms, &mass);
    AddToTotals(scores.best, &best);
  }
  StorePartials(step, item, mass, best);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_STAGES_CUH_
