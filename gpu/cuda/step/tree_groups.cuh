// SPDX-License-Identifier: Apache-2.0
//
// The groups stage: scores of one tree item's groups, and the sums of their estimates.
#ifndef ATTND_GPU_CUDA_STEP_TREE_GROUPS_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_GROUPS_CUH_

#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/tree_sums.cuh"

namespace attnd::gpu {

// Rows [first, first + 16) of `count`.
__device__ __forceinline__ TreeRowSet RowsInOrder(uint32_t first, uint32_t count) {
  const uint32_t row = first + threadIdx.x % kTreeRows;
  return {row < count ? row : kNoRow};
}

// What the thread block does not ask for at once.
template <int kDim, int kValueDim>
__device__ __forceinline__ void PrefetchGroups(const TreeItem& item) {
  const TreeOffsets& offsets = *item.offsets;
  if (!TreeQueryMaker<kDim>::kHoldsAxes) PrefetchBytes(item.head + offsets.axes, kDim * kDim * 2);
  PrefetchBytes(item.head + offsets.slopes, kDim * kValueDim * 2);
  const TreePart& part = offsets.groups;
  const uint32_t first = item.first_group, bytes = 4 * (item.room_end - first);
  for (const uint32_t of : {part.starts, part.first_members, part.spread, part.value_norm2}) {
    PrefetchBytes(item.head + of + first * 4, bytes);
  }
}

// Stores what choosing needs of an item's groups; of slots without a group zeros.
__device__ __forceinline__ void StoreGroupInfos(const StepHeader& step, const TreeItem& item) {
  if (item.tile != 0) return;  // the other tiles store none
  const TreeScores places = TreeScoresOf(*item.row, step.group);
  auto* to = reinterpret_cast<TreeRowInfo*>(TreeScoresAt(step, item.unit, places.groups.info)) +
             item.first_group_slot;
  const TreePart& part = item.offsets->groups;
  const auto* members = reinterpret_cast<const uint32_t*>(item.head + part.first_members);
  for (uint32_t i = item.first_group + threadIdx.x; i < item.slots_end; i += kTreeThreads) {
    TreeRowInfo info = {};
    if (i < item.groups_end) {
      info = IndexInfo(item, part, i).info();
      const uint32_t first = __ldg(members + i), next = __ldg(members + i + 1);
      info.place = first | (next - first) << 16;
    }
    to[i] = info;
  }
}

// Numbers of a tile's groups, as the index has them.
struct GroupNumbers {
  __align__(16) float centroid_scales[kTileRows], log_sizes[kTileRows], units[kTileRows];
  __align__(16) float value_scales[kTileRows], value_norms2[kTileRows];

  // Asks for those of `count` groups from `first` on.
  __device__ __forceinline__ void Ask(const TreeItem& item, uint32_t first, uint32_t count) {
    const TreePart& part = item.offsets->groups;
    const uint32_t parts[] = {part.centroid_scales, part.log_size, part.variance_unit,
                              part.mean_value_scales, part.value_norm2};
    float* to[] = {centroid_scales, log_sizes, units, value_scales, value_norms2};
    const uint32_t at = threadIdx.x % 32 * 4;
#pragma unroll
    for (uint32_t i = 0; i < 5; ++i) {
      if (threadIdx.x / 32 != i || at >= count) continue;
      CopyAsync16(static_cast<uint32_t>(__cvta_generic_to_shared(to[i] + at)),
                  reinterpret_cast<const std::byte*>(item.Floats(parts[i]) + first + at));
    }
  }
};

template <int kDim, int kValueDim>
struct GroupsMemory {
  // A tile's.
  struct Rows {
    SummedRows<kDim, kValueDim> summed;
    GroupNumbers numbers;
  };

  TreeQueries<kDim> q;
  union {
    TileProducts products;
    TileWeights weights;
    SumsExchange<kDim, kValueDim> exchange;  // behind the last tile
  };
  Rows first;
  union {
    typename TreeQueryMaker<kDim>::Memory making;  // until the second tile is asked for
    Rows second;
  };
  WarpTops tops;
  WarpHeads heads;

  // Of tile i: tiles take turns.
  __device__ __forceinline__ Rows* RowsOf(uint32_t i) { return i % 2 == 0 ? &first : &second; }
};

// One thread block's work on an item. kBesideGate: it begins before the step's queries are there,
// behind a gate that has placed the items.
template <int kDim, int kValueDim, bool kBesideGate>
class GroupsWorker {
 public:
  using Memory = GroupsMemory<kDim, kValueDim>;
  using Sums = TreeSums<kDim, kValueDim>;

  __device__ __forceinline__ GroupsWorker(const StepHeader& step, const TreeItem& item,
                                          Memory* memory)
      : step_(step),
        item_(item),
        memory_(memory),
        lanes_(LanesOf(step, item.unit, item.tile)),
        pairs_(lanes_) {}

  __device__ __forceinline__ void Run() {
    TreeQueryMaker<kDim> maker(step_, item_);
    // On their way while queries are made.
    AskForValues(0);
    CommitCopies();
    ScoredRows<kDim> rows(item_.head, part(), OwnRows(0));
    if (kBesideGate) WaitForKernelBefore();  // and for its gate: the step's queries are there
    const auto x = maker.QueryOf(step_, item_);
    maker.Make(x, /*rotates=*/true, &memory_->making, &memory_->q);
    StoreQueries<kDim>(step_, memory_->q);
    if (!kBesideGate) StoreItem(step_, item_);
    const uint32_t tiles = Tiles();
    if (tiles == 0) {
      AskForSlopes();
      CommitCopies();
    }
#pragma unroll 1
    for (uint32_t i = 0; i < tiles; ++i) {
      AddTile(i, tiles, &rows);
      __syncthreads();  // the tile has been read
    }
    StoreGroupInfos(step_, item_);
    StoreState();
  }

 private:
  __device__ __forceinline__ const TreePart& part() const { return item_.offsets->groups; }
  __device__ __forceinline__ uint32_t Tiles() const {
    return (item_.groups_end - item_.first_group + kTileRows - 1) / kTileRows;
  }
  __device__ __forceinline__ uint32_t FirstOf(uint32_t i) const {
    return item_.first_group + i * kTileRows;
  }
  // Of rows before `end`, those of tile i.
  __device__ __forceinline__ uint32_t CountOf(uint32_t i, uint32_t end) const {
    return min(max(end, FirstOf(i)) - FirstOf(i), kTileRows);
  }
  // The warp's sixteen of a tile's rows.
  __device__ __forceinline__ TreeRowSet OwnRows(uint32_t i) const {
    return RowsInOrder(FirstOf(i) + threadIdx.x / 32 * kTreeRows, item_.room_end);
  }

  __device__ __forceinline__ void AskForValues(uint32_t i) {
    const uint32_t first = FirstOf(i), count = CountOf(i, item_.room_end);
    typename Memory::Rows* rows = memory_->RowsOf(i);
    rows->numbers.Ask(item_, first, count);
    using Parts = RowParts<kValueDim, 16>;
    const std::byte* values =
        item_.head + part().mean_values + uint64_t{first} * kValueDim + threadIdx.x * 16;
#pragma unroll
    for (uint32_t k = 0; k < Parts::kParts; ++k) {
      if (Parts::Row(k) >= count) continue;
      rows->summed.AskForValues(Parts::Row(k), Parts::Byte(k), values + k * kTreeThreads * 16);
    }
  }
  // Slopes take the place of rows that are none: behind the last tile, or, if there is no tile,
  // beside the first, whose rows have been asked for all the same.
  __device__ __forceinline__ SummedRows<kDim, kValueDim>* SlopesPlace() const {
    return &memory_->RowsOf(max(Tiles(), 1u))->summed;
  }
  __device__ __forceinline__ void AskForSlopes() { Sums::AskForSlopes(item_, SlopesPlace()); }
  // The tile's sums, relative to the greatest mass so far. rows: of tile i; in the end of the next
  // one, if there is one.
  __device__ __forceinline__ void AddTile(uint32_t i, uint32_t tiles, ScoredRows<kDim>* rows) {
    typename Memory::Rows* of = memory_->RowsOf(i);
    if (i + 1 == tiles) AskForSlopes();
    CommitCopies();
    Multiply(*rows, &of->summed);
    WaitCopies<1>();  // the tile's values are there, which were asked for before
    __syncthreads();
    const uint32_t count = CountOf(i, item_.groups_end), steps = (count + 31) / 32;
    float x[TilePairs::kPairs], d2[TilePairs::kPairs];
    Score(FirstOf(i), count, of->numbers, x, d2);
    __syncthreads();  // products have been read
    ScaleSums(i);
    Weigh(count, steps, of->numbers, x, d2);
    const uint32_t lane = 2 * (threadIdx.x % 4);
    const LaneWeights greatest[2] = {memory_->tops.WeightsOf(pairs_, lane),
                                     memory_->tops.WeightsOf(pairs_, lane + 1)};
    if (i + 1 < tiles) {
      AskForValues(i + 1);
      *rows = ScoredRows<kDim>(item_.head, part(), OwnRows(i + 1));
    }
    CommitCopies();
    __syncthreads();
    sums_.Add(of->summed, memory_->weights, steps, lanes_, greatest);
  }
  // The products of the warp's rows, and its rows' squared deviations.
  __device__ __forceinline__ void Multiply(const ScoredRows<kDim>& rows,
                                           SummedRows<kDim, kValueDim>* summed) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const auto place = [&](int n, uint32_t block) {
      const uint32_t row = threadIdx.x / 32 * kTreeRows + n * 8 + g;
      return summed->Squares(row, block * 64 + t * 16);
    };
#pragma unroll
    for (uint32_t block = 0; block < ScoredRows<kDim>::kBlocks; ++block) {
#pragma unroll
      for (int n = 0; n < 2; ++n) *place(n, block) = SixteenSquares(rows.codes[n][block]);
    }
    MultiplyRows(
        memory_->q, rows, [&](int n, uint32_t block) { return *place(n, block); },
        &memory_->products);
  }
  // Scores of the thread's pairs, which are kept for the stages that choose.
  __device__ __forceinline__ void Score(uint32_t first, uint32_t count, const GroupNumbers& numbers,
                                        float (&x)[TilePairs::kPairs],
                                        float (&d2)[TilePairs::kPairs]) {
    const TreeScores places = TreeScoresOf(*item_.row, step_.group);
    const uint64_t at = uint64_t{item_.tile * kLanes + pairs_.lane()} * item_.row->group_slots +
                        item_.first_group_slot + first;
    float* log_mass = TreeScoresAt(step_, item_.unit, places.groups.log_mass) + at;
    float* variances = TreeScoresAt(step_, item_.unit, places.groups.d2) + at;
    const LaneFactors factors(memory_->q, pairs_.lane());
    LaneWeights most;  // of weights, as masses are 1 at most
    float best[TilePairs::kPairs], greatest = -INFINITY;
#pragma unroll
    for (uint32_t k = 0; k < TilePairs::kPairs; ++k) {
      const uint32_t row = pairs_.Row(k);
      RowScore score;
      if (row < count) {
        score = factors.ScoreOf(
            memory_->products, pairs_.lane(), row,
            {numbers.centroid_scales[row], numbers.log_sizes[row], numbers.units[row]},
            attention::kGroupOptimism);
        most.values = fmaxf(most.values, numbers.value_scales[row]);
        most.variances = fmaxf(most.variances, numbers.units[row] * CappedShare(score.d2));
        if (pairs_.used()) {
          log_mass[row] = score.log_mass;
          variances[row] = score.d2;
        }
      }
      x[k] = score.log_mass;
      d2[k] = score.d2;
      best[k] = score.best;
      greatest = fmaxf(greatest, x[k]);
    }
    totals_.best.Add(best);
    memory_->tops.StoreMax(greatest);
    memory_->tops.StoreWeights(most);
  }
  __device__ __forceinline__ void ScaleSums(uint32_t i) {
    totals_.RaiseMax(fmaxf(totals_.max, memory_->tops.MaxOf(pairs_, pairs_.lane())));
    const uint32_t t = threadIdx.x % 4;
    float greatest[2];
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
      greatest[c] = fmaxf(max_of_sums_[c], memory_->tops.MaxOf(pairs_, 2 * t + c));
    }
    if (i > 0) {
      sums_.Scale(
          [&](uint32_t lane) { return Weight(max_of_sums_[lane % 2], greatest[lane % 2]); });
    }
    max_of_sums_[0] = greatest[0];
    max_of_sums_[1] = greatest[1];
  }
  __device__ __forceinline__ void Weigh(uint32_t count, uint32_t steps, const GroupNumbers& numbers,
                                        const float (&x)[TilePairs::kPairs],
                                        const float (&d2)[TilePairs::kPairs]) {
    if (!pairs_.used()) return;
    const LaneWeights greatest = memory_->tops.WeightsOf(pairs_, pairs_.lane());
#pragma unroll
    for (uint32_t k = 0; k < TilePairs::kPairs; ++k) {
      const uint32_t row = pairs_.Row(k);
      if (row >= steps * 32) continue;
      LaneWeights of;
      if (row < count) {
        const float weight = Weight(x[k], totals_.max);
        totals_.sum += weight;
        totals_.moments += weight * numbers.value_norms2[row];
        of = {weight * numbers.value_scales[row],
              weight * (numbers.units[row] * CappedShare(d2[k]))};
      }
      memory_->weights.Store(row, pairs_.lane(), of, greatest);
    }
  }
  __device__ __forceinline__ void StoreState() {
    float* state = step_.tree_states + uint64_t{item_.number} * TreeStateFloats(kValueDim);
    totals_.StoreMasses(&memory_->heads);
    sums_.Finish(
        item_, lanes_, memory_->q.rotated, *SlopesPlace(), &memory_->exchange,
        [&](uint32_t lane) { return SumOfLane(pairs_, memory_->heads, lane, kTreeSum); },
        [&](uint32_t lane, uint32_t channel, float2 value, float2 /*correction*/) {
          float* to = state + lane * Sums::kLaneFloats + kStateHead + channel;
          *reinterpret_cast<float2*>(to) = value;
        });
    if (threadIdx.x >= lanes_) return;
    float head[kStateHead] = {};
    MergeMasses(pairs_, memory_->heads, threadIdx.x, head);
#pragma unroll
    for (uint32_t i = 0; i < kStateHead; ++i) {
      state[threadIdx.x * Sums::kLaneFloats + i] = head[i];
    }
  }

  const StepHeader& step_;
  const TreeItem& item_;
  Memory* const memory_;
  const uint32_t lanes_;
  const TilePairs pairs_;
  PairTotals totals_;
  Sums sums_;
  float max_of_sums_[2] = {-INFINITY, -INFINITY};  // of lanes 2t and 2t + 1
};

template <int kDim, int kValueDim, bool kBesideGate>
__global__ void __launch_bounds__(kTreeThreads, (kTreeBlocks<kDim, kValueDim>))
    TreeGroupsKernel(const __grid_constant__ StepHeader step) {
  if (kBesideGate) SeeKernelBefore();
  const TreeItem item = kBesideGate ? ReadItem(step, blockIdx.x) : FindItem(step, blockIdx.x);
  if (item.choice == TreeChoice::kByMass) return;
  PrefetchGroups<kDim, kValueDim>(item);
  auto* memory = reinterpret_cast<GroupsMemory<kDim, kValueDim>*>(block_memory);
  GroupsWorker<kDim, kValueDim, kBesideGate>(step, item, memory).Run();
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_GROUPS_CUH_
