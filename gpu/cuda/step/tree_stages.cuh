// SPDX-License-Identifier: Apache-2.0
//
// The stages over trees in which a thread block works on one tree item: groups, leaves, and the
// finish stage's estimate.
#ifndef ATTND_GPU_CUDA_STEP_TREE_STAGES_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_STAGES_CUH_

#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/estimate.cuh"
#include "gpu/cuda/step/tree_sums.cuh"

namespace attnd::gpu {

// Asks the second-level cache for what the thread block will read, so that later loads wait for no
// more than that cache.
__device__ __forceinline__ void PrefetchBytes(const std::byte* from, uint32_t bytes) {
  for (uint32_t at = threadIdx.x * 128; at < bytes; at += kTreeThreads * 128) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
  }
}
template <int kDim, int kValueDim>
__device__ __forceinline__ void PrefetchGroups(const TreeItem& item) {
  const TreeOffsets& offsets = item.tree->offsets;
  const uint32_t rows = item.tree->max_groups;
  PrefetchBytes(item.head + offsets.axes, kDim * kDim * 2);
  PrefetchBytes(item.head + offsets.groups.centroids, rows * kDim);
  PrefetchBytes(item.head + offsets.groups.deviation_codes, rows * (kDim / 2));
  PrefetchBytes(item.head + offsets.groups.mean_values, rows * kValueDim);
  PrefetchBytes(item.head + offsets.slopes, kDim * kValueDim * 2);
}

// Where a warp's two buffers are.
template <int kDim, int kValueDim>
struct TreeBuffers {
  uint32_t rows, squares;
  __device__ __forceinline__ TreeBuffers() {
    constexpr uint32_t kBytes = kTreeBufferBytes<kDim, kValueDim>;
    rows = threadIdx.x / 32 * 2 * kBytes;
    squares = rows + kBytes;
  }
};

// Rows [first, first + 16) of `count`.
__device__ __forceinline__ TreeRowSet RowsInOrder(uint32_t first, uint32_t count) {
  const uint32_t row = first + threadIdx.x % kTreeRows;
  return {row < count ? row : kNoRow};
}

// Thread blocks of a tree's stages that a multiprocessor should hold.
template <int kDim, int kValueDim>
inline constexpr int kTreeBlocks = kDim + kValueDim <= 256 ? 4 : 2;

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

__device__ __forceinline__ void StoreGroupInfo(const StepHeader& step, const TreeItem& item) {
  if (item.tile != 0) return;
  const TreePart& part = item.tree->offsets.groups;
  const uint32_t groups = item.CountOf(part);
  const auto* members = reinterpret_cast<const uint32_t*>(item.head + part.first_members);
  const TreeScores places = TreeScoresOf(*item.row, step.group);
  auto* to = reinterpret_cast<TreeRowInfo*>(TreeScoresAt(step, item.unit, places.groups.info)) +
             item.tree->first_group_slot;
  for (uint32_t i = threadIdx.x; i < item.tree->group_slots; i += kTreeThreads) {
    TreeRowInfo info = {};
    if (i < groups) {
      info = InfoOf(item, part, i);
      const uint32_t first = __ldg(members + i);
      info.place = first | (__ldg(members + i + 1) - first) << 16;
    }
    to[i] = info;
  }
}

template <int kDim, int kValueDim>
__device__ __forceinline__ void SumGroups(const StepHeader& step, const TreeItem& item,
                                          const TreeQueries<kDim>& queries,
                                          TreeSums<kDim, kValueDim>* sums, Totals* best) {
  const TreePart& part = item.tree->offsets.groups;
  const uint32_t groups = item.CountOf(part), g = threadIdx.x % 32 / 4;
  const uint32_t lane = item.tile * kLanes + g;
  const TreeScores places = TreeScoresOf(*item.row, step.group);
  const uint64_t at = uint64_t{lane} * item.row->group_slots + item.tree->first_group_slot;
  float* log_mass = TreeScoresAt(step, item.unit, places.groups.log_mass) + at;
  float* d2 = TreeScoresAt(step, item.unit, places.groups.d2) + at;
  const TreeBuffers<kDim, kValueDim> buffers;
  for (uint32_t first = threadIdx.x / 32 * kTreeRows; first < groups;
       first += kTreeWarps * kTreeRows) {
    const TreeRowSet set = RowsInOrder(first, groups);
    __syncwarp();
    const TreeRowScores scores = ScoreTreeRows<kDim>(
        queries, item.head, part, set, attention::kGroupOptimism, buffers.rows, buffers.squares);
    if (lane < step.group) StoreTreeScores(scores, first, log_mass, d2);
    AddToTotals(scores.best, best);
    const auto& x = scores.log_mass;
    RaiseMax(fmaxf(fmaxf(x[0][0], x[0][1]), fmaxf(x[1][0], x[1][1])), sums);
    uint32_t rows[2][2];
    RowsOfThread(set, rows);
    const TreeNumbers norms = TreeNumbers::Load(item.head + part.value_norm2, rows);
    float weight[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        weight[n][c] = Weight(x[n][c], sums->max);
        sums->moments += weight[n][c] * norms.x[n][c];
      }
    }
    AddTreeEstimates(item.head, part, set, weight, scores.d2, buffers.rows, buffers.squares, sums);
  }
}

template <int kDim, int kValueDim>
__global__ void __launch_bounds__(kTreeThreads, (kTreeBlocks<kDim, kValueDim>))
    TreeGroupsKernel(const __grid_constant__ StepHeader step) {
  __shared__ TreeBlock<kDim> block;
  const TreeItem item(step, blockIdx.x);
  PrefetchGroups<kDim, kValueDim>(item);
  LoadTreeQueries<kDim>(step, item, &block);
  RotateQueries<kDim>(item, &block);
  SquareQueries<kDim>(&block);
  StoreQueries<kDim>(step, item, block);
  TreeSums<kDim, kValueDim> sums;
  Totals best = {-INFINITY, 0};
  StoreGroupInfo(step, item);
  SumGroups(step, item, block.q, &sums, &best);
  TreeFinisher<kDim, kValueDim>(
      item, LanesOf(step, item.unit, item.tile),
      step.tree_states + uint64_t{item.number} * TreeStateFloats(kValueDim), &block)
      .Run(&sums, best);
}

// ---- leaves ----

// Items [begin, end) of a unit's opened leaves are those of the segment.
struct LeafItems {
  const uint32_t* items;
  uint32_t begin, end;

  __device__ __forceinline__ LeafItems(const StepHeader& step, const TreeItem& item) {
    const uint32_t* words = UnitTreeWords(step, item.unit);
    items = words + TreeItems(*item.row);
    begin = words[kTreeLaneWords + item.segment];
    end = words[kTreeLaneWords + item.segment + 1];
  }
  // Sixteen items from `first` on.
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

// Adds the masses of the segment's groups that stay closed; of lane g, partial over warps and t.
template <int kDim>
__device__ __forceinline__ void AddClosedGroups(const StepHeader& step, const TreeItem& item,
                                                Totals* totals) {
  const uint32_t g = threadIdx.x % 32 / 4, lane = item.tile * kLanes + g;
  if (lane >= step.group) return;
  const TreeScores places = TreeScoresOf(*item.row, step.group);
  const float* log_mass = TreeScoresAt(step, item.unit, places.groups.log_mass) +
                          uint64_t{lane} * item.row->group_slots + item.tree->first_group_slot;
  const uint8_t* fates = UnitFates(step, item.unit) + item.row->slots + item.tree->first_group_slot;
  const uint32_t groups = item.CountOf(item.tree->offsets.groups);
  const uint32_t own = threadIdx.x / 32 * 4 + threadIdx.x % 4;
  constexpr uint32_t kAtOnce = 8;
  for (uint32_t first = own; first < groups; first += kAtOnce * kTreeWarps * 4) {
    float x[kAtOnce];
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t i = first + k * kTreeWarps * 4, at = min(i, groups - 1);
      const float mass = log_mass[at];
      const bool closed = i < groups && fates[at] != kFateExact;
      x[k] = closed ? mass : -INFINITY;
    }
    totals->Add(x);
  }
}

// The item's partial sums: masses of its leaves and closed groups, optimistic masses of its leaves.
__device__ __forceinline__ void StorePartials(const StepHeader& step, const TreeItem& item,
                                              Totals (&totals)[2]) {
  __shared__ float2 parts[2][kTreeWarps][kLanes];
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    totals[kind].Join();
    if (threadIdx.x % 4 == 0)
      parts[kind][warp][g] = make_float2(totals[kind].max, totals[kind].sum);
  }
  __syncthreads();
  if (threadIdx.x >= 2 * kLanes) return;
  const uint32_t kind = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  float max = -INFINITY, sum = 0;
  for (uint32_t w = 0; w < kTreeWarps; ++w) max = fmaxf(max, parts[kind][w][lane].x);
  for (uint32_t w = 0; w < kTreeWarps; ++w) {
    sum += Weight(parts[kind][w][lane].x, max) * parts[kind][w][lane].y;
  }
  float* out = step.tree_partials + (uint64_t{item.number} * kLanes + lane) * kStateHead + kind * 2;
  out[0] = max;
  out[1] = sum;
}

template <int kDim, int kValueDim>
__global__ void __launch_bounds__(kTreeThreads, (kTreeBlocks<kDim, kValueDim>))
    TreeLeavesKernel(const __grid_constant__ StepHeader step) {
  __shared__ TreeBlock<kDim> block;
  const TreeItem item(step, blockIdx.x);
  const LeafItems leaves(step, item);
  Totals totals[2] = {{-INFINITY, 0}, {-INFINITY, 0}};
  AddClosedGroups<kDim>(step, item, &totals[0]);
  if (leaves.begin < leaves.end) {
    StoreLeafInfo(step, item, leaves);
    LoadStoredQueries<kDim>(step, item, TreeQueryWords(kDim), &block);
  }
  const uint32_t lane = item.tile * kLanes + threadIdx.x % 32 / 4;
  const TreeScores places = TreeScoresOf(*item.row, step.group);
  const uint64_t at = uint64_t{lane} * item.row->slots;
  float* log_mass = TreeScoresAt(step, item.unit, places.leaves.log_mass) + at;
  float* d2 = TreeScoresAt(step, item.unit, places.leaves.d2) + at;
  const TreeBuffers<kDim, kValueDim> buffers;
  for (uint32_t first = leaves.begin + threadIdx.x / 32 * kTreeRows; first < leaves.end;
       first += kTreeWarps * kTreeRows) {
    const TreeRowSet set = leaves.Rows(first);
    __syncwarp();
    const TreeRowScores scores =
        ScoreTreeRows<kDim>(block.q, item.head, item.tree->offsets.leaves, set,
                            attention::kOptimism, buffers.rows, buffers.squares);
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
    AddToTotals(scores.log_mass, &totals[0]);
    AddToTotals(scores.best, &totals[1]);
  }
  StorePartials(step, item, totals);
}

// ---- estimate ----

// Some rows of one part, their scores and whether they are estimated.
struct EstimatedRows {
  const TreePart* part;
  const float* log_mass;  // of lane g, at row 0 of the warp's sixteen
  const float* d2;
  TreeRowSet set;        // of rows that are there
  TreeRowSet estimated;  // the same, but for those that are not estimated
};

// What estimated rows add to the sums of errors.
template <int kDim, int kValueDim>
__device__ __forceinline__ void AddErrors(float weight, float d2, float size, float spread,
                                          float norm2, TreeSums<kDim, kValueDim>* sums) {
  const float capped = fminf(d2, kVarianceCap), half = capped / 2;
  // Among s weights none can have more than all: their relative variance is at most s - 1.
  const float growth = fminf(Expm1(capped), size - 1);
  const float rest = weight * spread, mass = weight * half;
  sums->errors +=
      rest * rest * __fdividef(growth, size) + attention::kMassErrorShare * mass * mass * norm2;
  sums->mass_errors += attention::kMassErrorShare * mass * mass;
}

template <int kDim, int kValueDim>
__device__ __forceinline__ void AddEstimatedRows(const TreeItem& item, const EstimatedRows& source,
                                                 bool used, TreeSums<kDim, kValueDim>* sums) {
  const TreeBuffers<kDim, kValueDim> buffers;
  const uint32_t t = threadIdx.x % 4;
  uint32_t rows[2][2], estimated[2][2];
  RowsOfThread(source.set, rows);
  RowsOfThread(source.estimated, estimated);
  const TreeNumbers norms = TreeNumbers::Load(item.head + source.part->value_norm2, rows);
  const TreeNumbers spreads = TreeNumbers::Load(item.head + source.part->spread, estimated);
  const TreeNumbers sizes = TreeNumbers::Load(item.head + source.part->log_size, estimated);
  float weight[2][2], d2[2][2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t at = n * 8 + 2 * t + c;
      const bool there = used && rows[n][c] != kNoRow;
      const float p = there ? Weight(source.log_mass[at], sums->max) : 0.0f;
      const bool is = there && estimated[n][c] != kNoRow;
      sums->moments += p * norms.x[n][c];
      d2[n][c] = is ? source.d2[at] : 0.0f;
      weight[n][c] = is ? p : 0.0f;
      if (!is) continue;
      const float size = rintf(Exp2(sizes.x[n][c] * kLog2E));
      AddErrors(p, d2[n][c], size, spreads.x[n][c], norms.x[n][c], sums);
    }
  }
  if (!__any_sync(~0u, source.estimated.own != kNoRow)) return;
  __syncwarp();
  ExpandSquares<kDim>(item.head + source.part->deviation_codes, source.estimated, buffers.squares);
  AddTreeEstimates(item.head, *source.part, source.estimated, weight, d2, buffers.rows,
                   buffers.squares, sums);
}

// The rows of an item that may be estimated, sixteen at a time: first its groups, of which those
// that are opened count as missing, then its leaves.
class EstimatedRowsOf {
 public:
  __device__ EstimatedRowsOf(const StepHeader& step, const TreeItem& item)
      : item_(item),
        row_(*item.row),
        leaves_(step, item),
        lane_(item.tile * kLanes + threadIdx.x % 32 / 4),
        fates_(UnitFates(step, item.unit)),
        groups_(item.CountOf(item.tree->offsets.groups)),
        group_batches_((groups_ + kTreeRows - 1) / kTreeRows) {
    const TreeScores places = TreeScoresOf(row_, step.group);
    group_log_mass_ = TreeScoresAt(step, item.unit, places.groups.log_mass);
    group_d2_ = TreeScoresAt(step, item.unit, places.groups.d2);
    leaf_log_mass_ = TreeScoresAt(step, item.unit, places.leaves.log_mass);
    leaf_d2_ = TreeScoresAt(step, item.unit, places.leaves.d2);
  }

  __device__ __forceinline__ uint32_t batches() const {
    return group_batches_ + (leaves_.end - leaves_.begin + kTreeRows - 1) / kTreeRows;
  }
  __device__ __forceinline__ EstimatedRows Batch(uint32_t number) const {
    const bool groups = number < group_batches_;
    const uint32_t first =
        groups ? number * kTreeRows : leaves_.begin + (number - group_batches_) * kTreeRows;
    const uint64_t at =
        groups ? uint64_t{lane_} * row_.group_slots + item_.tree->first_group_slot + first
               : uint64_t{lane_} * row_.slots + first;
    EstimatedRows rows;
    rows.part = groups ? &item_.tree->offsets.groups : &item_.tree->offsets.leaves;
    rows.log_mass = (groups ? group_log_mass_ : leaf_log_mass_) + at;
    rows.d2 = (groups ? group_d2_ : leaf_d2_) + at;
    rows.set = groups ? RowsInOrder(first, groups_) : leaves_.Rows(first);
    rows.estimated = rows.set;
    const uint32_t own = rows.set.own;
    if (own == kNoRow) return rows;
    const uint8_t fate = groups ? fates_[row_.slots + item_.tree->first_group_slot + own]
                                : fates_[item_.ref->first_slot + own];
    if (fate != kFateExact) return rows;
    rows.estimated.own = kNoRow;
    if (groups) rows.set.own = kNoRow;
    return rows;
  }

 private:
  const TreeItem& item_;
  const RowRef& row_;
  const LeafItems leaves_;
  const uint32_t lane_;
  const uint8_t* const fates_;
  const float *group_log_mass_, *group_d2_, *leaf_log_mass_, *leaf_d2_;
  const uint32_t groups_;
  const uint32_t group_batches_;
};

template <int kDim, int kValueDim>
__device__ __forceinline__ void SumEstimates(const StepHeader& step, const TreeItem& item,
                                             TreeSums<kDim, kValueDim>* sums) {
  const bool used = item.tile * kLanes + threadIdx.x % 32 / 4 < step.group;
  const EstimatedRowsOf source(step, item);
#pragma unroll 1
  for (uint32_t i = threadIdx.x / 32; i < source.batches(); i += kTreeWarps) {
    AddEstimatedRows(item, source.Batch(i), used, sums);
  }
}

// The item's estimate as a state of the tile.
template <int kValueDim>
__device__ __forceinline__ void StoreEstimate(const StepHeader& step, const TreeItem& item,
                                              uint32_t lanes) {
  constexpr uint32_t kFrom = kStateHead + 2 * kValueDim, kTo = kStateHead + kValueDim;
  const float* from = step.tree_states + uint64_t{item.number} * TreeStateFloats(kValueDim);
  constexpr uint32_t kFloats = StateFloats(kValueDim);
  float* to = TileStates(step, item.unit, item.tile, kFloats) +
              (uint64_t{item.row->read_pieces} + item.segment) * kFloats;
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
  head_out[kHeadDropped] = 0;
  head_out[kHeadMassErrors] = head[kTreeMassErrors];
}

template <int kDim, int kValueDim>
__global__ void __launch_bounds__(kTreeThreads, (kTreeBlocks<kDim, kValueDim>))
    TreeEstimateKernel(const __grid_constant__ StepHeader step) {
  __shared__ TreeBlock<kDim> block;
  const TreeItem item(step, blockIdx.x);
  PrefetchBytes(item.head + item.tree->offsets.slopes, kDim * kValueDim * 2);
  LoadStoredQueries<kDim>(step, item, kLanes * kDim, &block);
  TreeSums<kDim, kValueDim> sums;
  const uint64_t tile_number = uint64_t{item.unit.unit} * step.tiles_max + item.tile;
  sums.max = step.lane_scales[tile_number * kLanes + threadIdx.x % 32 / 4].max;
  SumEstimates(step, item, &sums);
  const uint32_t lanes = LanesOf(step, item.unit, item.tile);
  TreeFinisher<kDim, kValueDim>(
      item, lanes, step.tree_states + uint64_t{item.number} * TreeStateFloats(kValueDim), &block)
      .Run(&sums, {-INFINITY, 0});
  StoreEstimate<kValueDim>(step, item, lanes);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_STAGES_CUH_
