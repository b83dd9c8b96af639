// SPDX-License-Identifier: Apache-2.0
//
// The leaves stage: scores of one tree item's share of the opened leaves, and their sums with those
// of the groups that stay closed.
#ifndef ATTND_GPU_CUDA_STEP_TREE_LEAVES_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_LEAVES_CUH_

#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/tree_tile.cuh"

namespace attnd::gpu {

// Items [begin, end) of a unit's opened leaves are a slice's to work on: an even share of its
// segment's, as a few slices have most of what is opened.
struct LeafItems {
  const uint32_t* items;
  uint32_t begin, end;

  __device__ __forceinline__ explicit LeafItems(const TreeItem& item) {
    const uint32_t* of_slices = item.words + kTreeLaneWords + item.first_slice;
    const uint32_t first = of_slices[0], last = of_slices[item.slices];
    const uint32_t batches = (last - first + kTreeRows - 1) / kTreeRows;
    const uint32_t share = (batches + item.slices - 1) / item.slices * kTreeRows;
    items = item.words + TreeItems(*item.row);
    begin = min(first + (item.slice - item.first_slice) * share, last);
    end = min(begin + share, last);
  }
  // Sixteen items from `first` on, which may lie behind the last one.
  __device__ __forceinline__ TreeRowSet Rows(uint32_t first) const {
    const uint32_t item = first + threadIdx.x % kTreeRows;
    return {item < end ? items[item] & 0xFFFF : kNoRow};
  }
};

// What choosing needs of an item's leaves: asked for at once, stored when nothing else is waited
// for.
class LeafInfos {
 public:
  __device__ __forceinline__ LeafInfos(const TreeItem& item, const LeafItems& leaves)
      : item_(item), leaves_(leaves), own_(leaves.begin + threadIdx.x) {
    if (item.tile == 0 && own_ < leaves.end) asked_ = Ask(own_);
  }
  __device__ __forceinline__ void Store(const StepHeader& step) const {
    if (item_.tile != 0) return;  // the other tiles store none
    const TreeScores places = TreeScoresOf(*item_.row, step.group);
    auto* to = reinterpret_cast<TreeRowInfo*>(TreeScoresAt(step, item_.unit, places.leaves.info));
    if (own_ < leaves_.end) to[own_] = asked_.info();
    for (uint32_t i = own_ + kTreeThreads; i < leaves_.end; i += kTreeThreads) {
      to[i] = Ask(i).info();
    }
  }

 private:
  __device__ __forceinline__ IndexInfo Ask(uint32_t i) const {
    return IndexInfo(item_, item_.offsets->leaves, leaves_.items[i] & 0xFFFF);
  }

  const TreeItem& item_;
  const LeafItems& leaves_;
  const uint32_t own_;  // the thread's first item
  IndexInfo asked_;
};

__device__ __forceinline__ bool IsReopened(const StepHeader& step, const TreeItem& item) {
  return item.choice == TreeChoice::kByHead && PhaseOf(step, item.unit) == TreePhase::kReopen;
}

// Adds the slice's groups that stay closed, of the lane of the thread's pairs.
__device__ __forceinline__ void AddClosedGroups(const StepHeader& step, const TreeItem& item,
                                                const TilePairs& pairs, PairTotals* totals) {
  if (!pairs.used() || item.choice == TreeChoice::kByMass) return;
  const TreeScores places = TreeScoresOf(*item.row, step.group);
  const uint32_t slot = item.first_group_slot;
  const float* log_mass = TreeScoresAt(step, item.unit, places.groups.log_mass) +
                          uint64_t{item.tile * kLanes + pairs.lane()} * item.row->group_slots +
                          slot;
  const auto* info =
      reinterpret_cast<const TreeRowInfo*>(TreeScoresAt(step, item.unit, places.groups.info)) +
      slot;
  const uint8_t* fates = UnitFates(step, item.unit) + item.row->slots + slot;
  const uint32_t groups = item.groups_end, step_of = pairs.row_step();
  constexpr uint32_t kAtOnce = TilePairs::kPairs;
  for (uint32_t first = item.first_group + pairs.first(); first < groups;
       first += kAtOnce * step_of) {
    float x[kAtOnce], norm2[kAtOnce];
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t i = first + k * step_of, at = min(i, groups - 1);
      const float mass = log_mass[at], norm = info[at].value_norm;
      const uint8_t fate = fates[at];
      x[k] = i < groups && fate != kFateExact ? mass : -INFINITY;
      norm2[k] = norm * norm;
    }
    totals->Add(x, norm2);
  }
}

template <int kDim>
struct LeavesMemory {
  TreeQueries<kDim> q;
  TileProducts products;
  WarpHeads heads;
};

// One thread block's work on an item.
template <int kDim>
class LeavesWorker {
 public:
  __device__ __forceinline__ LeavesWorker(const StepHeader& step, const TreeItem& item,
                                          const StoredWords<kDim>& queries,
                                          LeavesMemory<kDim>* memory)
      : step_(step),
        item_(item),
        memory_(memory),
        lanes_(LanesOf(step, item.unit, item.tile)),
        pairs_(lanes_),
        leaves_(item),
        queries_(queries) {}

  __device__ __forceinline__ void Run() {
    ScoredRows<kDim> rows(item_.head, part(), OwnRows(leaves_.begin));
    const LeafInfos infos(item_, leaves_);
    queries_.Store(&memory_->q);
    AddClosedGroups(step_, item_, pairs_, &totals_);
    __syncthreads();
#pragma unroll 1
    for (uint32_t first = leaves_.begin; first < leaves_.end;) {
      AddTile(first, rows);
      first += kTileRows;
      if (first >= leaves_.end) break;
      rows = ScoredRows<kDim>(item_.head, part(), OwnRows(first));
      __syncthreads();  // products have been read
    }
    StorePartials();
    infos.Store(step_);
  }

 private:
  __device__ __forceinline__ const TreePart& part() const { return item_.offsets->leaves; }
  __device__ __forceinline__ TreeRowSet OwnRows(uint32_t first) const {
    return leaves_.Rows(first + threadIdx.x / 32 * kTreeRows);
  }
  __device__ __forceinline__ void AddTile(uint32_t first, const ScoredRows<kDim>& rows) {
    const uint32_t count = min(leaves_.end - first, kTileRows);
    RowNumbers numbers[TilePairs::kPairs];
    float norm2[TilePairs::kPairs];
#pragma unroll
    for (uint32_t k = 0; k < TilePairs::kPairs; ++k) {
      const uint32_t row = pairs_.Row(k);
      if (row >= count) continue;
      const uint32_t leaf = leaves_.items[first + row] & 0xFFFF;
      numbers[k] = NumbersOf(item_, part(), leaf);
      norm2[k] = __ldg(item_.Floats(part().value_norm2) + leaf);
    }
    if (threadIdx.x / 32 * kTreeRows < count) {
      MultiplyRows(
          memory_->q, rows,
          [&](int n, uint32_t block) { return SixteenSquares(rows.codes[n][block]); },
          &memory_->products);
    }
    __syncthreads();
    if (!pairs_.used()) return;
    const TreeScores places = TreeScoresOf(*item_.row, step_.group);
    const uint64_t at = uint64_t{item_.tile * kLanes + pairs_.lane()} * item_.row->slots + first;
    float* log_mass = TreeScoresAt(step_, item_.unit, places.leaves.log_mass) + at;
    float* d2 = TreeScoresAt(step_, item_.unit, places.leaves.d2) + at;
    const LaneFactors factors(memory_->q, pairs_.lane());
    float x[TilePairs::kPairs], best[TilePairs::kPairs];
#pragma unroll
    for (uint32_t k = 0; k < TilePairs::kPairs; ++k) {
      const uint32_t row = pairs_.Row(k);
      RowScore score;
      if (row < count) {
        score = factors.ScoreOf(memory_->products, pairs_.lane(), row, numbers[k],
                                attention::kOptimism);
        log_mass[row] = score.log_mass;
        d2[row] = score.d2;
      } else {
        norm2[k] = 0;
      }
      x[k] = score.log_mass;
      best[k] = score.best;
    }
    totals_.Add(x, norm2);
    totals_.best.Add(best);
  }
  // The item's partial sums: masses and moments of its leaves and closed groups, optimistic masses
  // of its leaves.
  __device__ __forceinline__ void StorePartials() {
    totals_.StoreMasses(&memory_->heads);
    __syncthreads();
    if (threadIdx.x >= kLanes) return;
    float head[kStateHead] = {};
    head[kTreeMax] = head[kTreeBestMax] = -INFINITY;
    if (threadIdx.x < lanes_) MergeMasses(pairs_, memory_->heads, threadIdx.x, head);
    float* out = step_.tree_partials + (uint64_t{item_.number} * kLanes + threadIdx.x) * kStateHead;
#pragma unroll
    for (uint32_t i = 0; i < kStateHead; ++i) out[i] = head[i];
  }

  const StepHeader& step_;
  const TreeItem& item_;
  LeavesMemory<kDim>* const memory_;
  const uint32_t lanes_;
  const TilePairs pairs_;
  const LeafItems leaves_;
  const StoredWords<kDim>& queries_;
  PairTotals totals_;
};

// kReopened: of units whose groups have all been opened after a first choice; else of all.
template <int kDim, int kValueDim, bool kReopened>
__global__ void __launch_bounds__(kTreeThreads, (kTreeBlocks<kDim, kValueDim>))
    TreeLeavesKernel(const __grid_constant__ StepHeader step) {
  LetNextKernelStart();  // choose, of rows by error
  const StoredWords<kDim> queries(step, blockIdx.x);
  const TreeItem item = ReadItem(step, blockIdx.x);
  if (kReopened && !IsReopened(step, item)) return;
  auto* memory = reinterpret_cast<LeavesMemory<kDim>*>(block_memory);
  LeavesWorker<kDim>(step, item, queries, memory).Run();
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_LEAVES_CUH_
