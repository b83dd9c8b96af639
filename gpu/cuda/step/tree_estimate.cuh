// SPDX-License-Identifier: Apache-2.0
//
// The finish stage over trees: the estimate of one tree item's groups that stay closed, and of its
// leaves that are not read.
#ifndef ATTND_GPU_CUDA_STEP_TREE_ESTIMATE_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_ESTIMATE_CUH_

#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/estimate.cuh"
#include "gpu/cuda/step/tree_leaves.cuh"
#include "gpu/cuda/step/tree_sums.cuh"

namespace attnd::gpu {

template <int kDim, int kValueDim>
struct EstimateMemory {
  __align__(16) float rotated[kLanes][kDim];  // the scaled queries along the axes
  union {
    TileWeights weights;
    SumsExchange<kDim, kValueDim> exchange;
  };
  SummedRows<kDim, kValueDim> rows[2];  // of tiles in turn
  uint32_t leaves[2][kTileRows];        // of tiles of leaves: their numbers in the index
  WarpTops tops;
  WarpHeads heads;
};

// Some neighbouring rows that may be estimated: a tile of an item's groups, or of its share of
// opened leaves.
struct EstimatedTile {
  const TreePart* part;
  bool of_leaves;
  uint32_t first;           // of groups: the first row's number in the index
  uint32_t room;            // rows that may be asked for, ...
  uint32_t count;           // ... and of them those that are there
  const TreeRowInfo* info;  // of the first row, as the next three
  const uint8_t* fates;
  const float *log_mass, *d2;  // of the lane of the thread's pairs
};

// The tiles of an item: first its groups, of which those that are opened count as missing, then its
// leaves. with_groups: whether any may be closed.
class EstimatedTiles {
 public:
  __device__ __forceinline__ EstimatedTiles(const StepHeader& step, const TreeItem& item,
                                            uint32_t lane, bool with_groups)
      : step_(step),
        item_(item),
        leaves_(item),
        lane_(item.tile * kLanes + lane),
        first_group_(item.first_group),
        room_(with_groups ? item.room_end - first_group_ : 0),
        groups_(with_groups ? item.groups_end - first_group_ : 0),
        group_tiles_((room_ + kTileRows - 1) / kTileRows) {}

  __device__ __forceinline__ uint32_t count() const {
    return group_tiles_ + (leaves_.end - leaves_.begin + kTileRows - 1) / kTileRows;
  }
  __device__ __forceinline__ bool OfLeaves(uint32_t number) const {
    return group_tiles_ <= number && number < count();
  }
  // The number in the index of row `i` of a tile of leaves; 0 if it has no such row.
  __device__ __forceinline__ uint32_t Leaf(uint32_t number, uint32_t i) const {
    const uint32_t item = leaves_.begin + (number - group_tiles_) * kTileRows + i;
    return item < leaves_.end ? leaves_.items[item] & 0xFFFF : 0;
  }
  __device__ __forceinline__ EstimatedTile operator[](uint32_t number) const {
    const bool groups = !OfLeaves(number);
    const uint32_t before = (groups ? number : number - group_tiles_) * kTileRows;
    const RowRef& row = *item_.row;
    const TreeScores places = TreeScoresOf(row, step_.group);
    const auto place = [&](uint64_t TreeLevelScores::*of) {
      return TreeScoresAt(step_, item_.unit, groups ? places.groups.*of : places.leaves.*of);
    };
    // Among the row's group slots, or the unit's items.
    const uint32_t slot = before + (groups ? item_.first_group_slot + first_group_ : leaves_.begin);
    const uint64_t score = uint64_t{lane_} * (groups ? row.group_slots : row.slots) + slot;
    EstimatedTile tile;
    tile.part = groups ? &item_.offsets->groups : &item_.offsets->leaves;
    tile.of_leaves = !groups;
    tile.first = first_group_ + before;
    const uint32_t leaves = leaves_.end - leaves_.begin;
    tile.room = min(kTileRows, (groups ? room_ : leaves) - before);
    tile.count = min(tile.room, max(groups ? groups_ : leaves, before) - before);
    tile.info = reinterpret_cast<const TreeRowInfo*>(place(&TreeLevelScores::info)) + slot;
    tile.fates = UnitFates(step_, item_.unit) + (groups ? row.slots : 0) + slot;
    tile.log_mass = place(&TreeLevelScores::log_mass) + score;
    tile.d2 = place(&TreeLevelScores::d2) + score;
    return tile;
  }

 private:
  const StepHeader& step_;
  const TreeItem& item_;
  const LeafItems leaves_;
  const uint32_t lane_, first_group_, room_, groups_, group_tiles_;
};

// What estimated rows add to the sums of errors.
__device__ __forceinline__ void AddErrors(float weight, float d2, const TreeRowInfo& info,
                                          PairTotals* totals) {
  const float capped = fminf(d2, kVarianceCap), half = capped / 2;
  // Among s weights none can have more than all: their relative variance is at most s - 1.
  const float growth = fminf(Expm1(capped), info.tokens - 1);
  const float mass = weight * half;
  const float rest = fminf(weight * info.spread, attention::kErrorMax);
  const float moved = fminf(mass * info.value_norm, attention::kErrorMax);
  totals->errors +=
      rest * rest * __fdividef(growth, info.tokens) + attention::kMassErrorShare * moved * moved;
  totals->mass_errors += attention::kMassErrorShare * mass * mass;
  totals->logit_variances += weight * capped;
}

// One thread block's work on an item.
template <int kDim, int kValueDim, TreeChoice kChoice>
class EstimateWorker {
 public:
  using Memory = EstimateMemory<kDim, kValueDim>;
  using Sums = TreeSums<kDim, kValueDim>;
  using Queries = StoredWords<kDim, kLanes * kDim>;  // along the axes
  static constexpr bool kByMass = kChoice == TreeChoice::kByMass;

  __device__ __forceinline__ EstimateWorker(const StepHeader& step, const TreeItem& item,
                                            const Queries& queries, Memory* memory)
      : step_(step),
        item_(item),
        queries_(queries),
        memory_(memory),
        lanes_(LanesOf(step, item.unit, item.tile)),
        pairs_(lanes_),
        tiles_(step, item, pairs_.lane(), /*with_groups=*/!kByMass) {}

  __device__ __forceinline__ void Run() {
    queries_.Store(memory_->rotated);
    const uint64_t tile = uint64_t{item_.unit.unit} * step_.tiles_max + item_.tile;
    totals_.max = step_.lane_scales[tile * kLanes + pairs_.lane()].max;
    totals_.best = {kByMass ? totals_.max : -INFINITY, 0};
    AskForLeaf(0);
    if (tiles_.OfLeaves(0)) {
      KeepLeaf(0);
      __syncthreads();
    }
    Loads loads;
    if (tiles_.count() > 0) {
      Ask(0, &loads);
    } else {
      AskForSlopes(0);
    }
    AskForLeaf(1);
    CommitCopies();
#pragma unroll 1
    for (uint32_t i = 0; i < tiles_.count(); ++i) AddTile(i, &loads);
    __syncthreads();
    StoreState();
  }

 private:
  using Values = RowParts<kValueDim, 16>;
  using Codes = RowParts<kDim / 2, 8>;
  // A thread's part of a tile, as scores, choices and the index have it.
  struct Loads {
    EstimatedTile tile;
    uint2 codes[Codes::kParts];
    // Of pairs.
    float4 info[TilePairs::kPairs];
    float log_mass[TilePairs::kPairs], d2[TilePairs::kPairs];
    float scale[TilePairs::kPairs], unit[TilePairs::kPairs];
    uint8_t fate[TilePairs::kPairs];
  };
  // Of a thread's pairs. A row that is not estimated has no weight.
  struct PairWeights {
    LaneWeights of[TilePairs::kPairs];
  };

  // Leaves of tile i are asked for a tile ahead, and kept for the thread block.
  __device__ __forceinline__ void AskForLeaf(uint32_t i) {
    if (tiles_.OfLeaves(i) && threadIdx.x < kTileRows) leaf_ = tiles_.Leaf(i, threadIdx.x);
  }
  __device__ __forceinline__ void KeepLeaf(uint32_t i) {
    if (threadIdx.x < kTileRows) memory_->leaves[i % 2][threadIdx.x] = leaf_;
  }
  // Asks for tile i, whose leaves are known, so that it is on its way while the one before is
  // worked on.
  __device__ __forceinline__ void Ask(uint32_t i, Loads* loads) {
    loads->tile = tiles_[i];
    const EstimatedTile& tile = loads->tile;
    SummedRows<kDim, kValueDim>* rows = &memory_->rows[i % 2];
    const auto row_of = [&](uint32_t row) {
      return tile.of_leaves ? memory_->leaves[i % 2][row] : tile.first + row;
    };
    uint32_t own_rows[TilePairs::kPairs];
#pragma unroll
    for (uint32_t k = 0; k < TilePairs::kPairs; ++k) {
      const uint32_t row = pairs_.Row(k);
      if (row >= tile.room || !pairs_.used()) continue;
      own_rows[k] = row_of(row);
      loads->fate[k] = tile.fates[row];
      loads->info[k] = *reinterpret_cast<const float4*>(tile.info + row);
      loads->log_mass[k] = tile.log_mass[row];
      loads->d2[k] = tile.d2[row];
    }
    const std::byte* values = item_.head + tile.part->mean_values;
    const std::byte* codes = item_.head + tile.part->deviation_codes;
    const float* scales = item_.Floats(tile.part->mean_value_scales);
    const float* units = item_.Floats(tile.part->variance_unit);
#pragma unroll
    for (uint32_t k = 0; k < Codes::kParts; ++k) {
      const uint32_t row = Codes::Row(k) < tile.room ? row_of(Codes::Row(k)) : 0;
      const std::byte* from = codes + uint64_t{row} * (kDim / 2) + Codes::Byte(k);
      loads->codes[k] = __ldg(reinterpret_cast<const uint2*>(from));
    }
#pragma unroll
    for (uint32_t k = 0; k < TilePairs::kPairs; ++k) {
      if (pairs_.Row(k) >= tile.room || !pairs_.used()) continue;
      loads->scale[k] = __ldg(scales + own_rows[k]);
      loads->unit[k] = __ldg(units + own_rows[k]);
    }
#pragma unroll
    for (uint32_t k = 0; k < Values::kParts; ++k) {
      if (Values::Row(k) >= tile.room) continue;
      const uint32_t row = row_of(Values::Row(k));
      const std::byte* from = values + uint64_t{row} * kValueDim + Values::Byte(k);
      rows->AskForValues(Values::Row(k), Values::Byte(k), from);
    }
  }

  // By way of the rows of tile i, which is none.
  __device__ __forceinline__ void AskForSlopes(uint32_t i) {
    Sums::AskForSlopes(item_, &memory_->rows[i % 2]);
  }

  // loads: of tile i; in the end of the next one, if there is one.
  __device__ __forceinline__ void AddTile(uint32_t i, Loads* loads) {
    SummedRows<kDim, kValueDim>* rows = &memory_->rows[i % 2];
    const uint32_t steps = (loads->tile.count + 31) / 32;
    PairWeights weights;
    Weigh(*loads, &weights);
#pragma unroll
    for (uint32_t k = 0; k < Codes::kParts; ++k) {
      *rows->Squares(Codes::Row(k), Codes::Byte(k) * 2) = SixteenSquares(loads->codes[k]);
    }
    KeepLeaf(i + 1);
    __syncthreads();  // the tile before has been read, too
    if (pairs_.used()) {
      const LaneWeights greatest = memory_->tops.WeightsOf(pairs_, pairs_.lane());
#pragma unroll
      for (uint32_t k = 0; k < TilePairs::kPairs; ++k) {
        const uint32_t row = pairs_.Row(k);
        if (row >= steps * 32) continue;
        memory_->weights.Store(row, pairs_.lane(), weights.of[k], greatest);
      }
    }
    const uint32_t lane = 2 * (threadIdx.x % 4);
    const LaneWeights greatest[2] = {memory_->tops.WeightsOf(pairs_, lane),
                                     memory_->tops.WeightsOf(pairs_, lane + 1)};
    if (i + 1 < tiles_.count()) {
      Ask(i + 1, loads);
    } else {
      AskForSlopes(i + 1);
    }
    AskForLeaf(i + 2);
    CommitCopies();
    WaitCopies<1>();
    __syncthreads();
    sums_.Add(*rows, memory_->weights, steps, lanes_, greatest);
  }
  // What the thread's pairs add to the totals, and what their weights are made of.
  __device__ __forceinline__ void Weigh(const Loads& loads, PairWeights* weights) {
    LaneWeights most;
#pragma unroll
    for (uint32_t k = 0; k < TilePairs::kPairs; ++k) {
      if (pairs_.Row(k) >= loads.tile.count || !pairs_.used()) continue;
      const float4& four = loads.info[k];
      const TreeRowInfo info = {four.x, four.y, four.z, __float_as_uint(four.w)};
      const uint8_t fate = loads.fate[k];
      const float weight = Weight(loads.log_mass[k], totals_.max);
      if constexpr (kByMass) totals_.best.sum += fate == kFateDropped ? weight : 0.0f;
      // Leaves of opened groups stand for them.
      if (loads.tile.of_leaves || fate != kFateExact) {
        totals_.moments += weight * info.value_norm * info.value_norm;
      }
      if (fate != kFateEstimated) continue;
      LaneWeights& of = weights->of[k];
      of = {weight * loads.scale[k], weight * (loads.unit[k] * CappedShare(loads.d2[k]))};
      most.values = fmaxf(most.values, of.values);
      most.variances = fmaxf(most.variances, of.variances);
      totals_.sum += weight;
      AddErrors(weight, loads.d2[k], info, &totals_);
    }
    memory_->tops.StoreWeights(most);
  }

  // The item's sums, for judging them, and their sum as a state of the tile.
  __device__ __forceinline__ void StoreState() {
    float* own = step_.tree_states + uint64_t{item_.number} * TreeStateFloats(kValueDim);
    constexpr uint32_t kFloats = StateFloats(kValueDim), kTo = kStateHead + kValueDim;
    float* to = TileStates(step_, item_.unit, item_.tile, kFloats) +
                (uint64_t{item_.row->read_pieces} + item_.slice) * kFloats;
    totals_.StoreMasses(&memory_->heads);
    totals_.StoreErrors(&memory_->heads);
    sums_.Finish(
        item_, lanes_, memory_->rotated, memory_->rows[tiles_.count() % 2], &memory_->exchange,
        [&](uint32_t lane) { return SumOfLane(pairs_, memory_->heads, lane, kTreeSum); },
        [&](uint32_t lane, uint32_t channel, float2 value, float2 correction) {
          const uint32_t at = kStateHead + channel;
          float* state = own + lane * Sums::kLaneFloats + at;
          *reinterpret_cast<float2*>(state) = value;
          *reinterpret_cast<float2*>(state + kValueDim) = correction;
          *reinterpret_cast<float2*>(to + lane * kTo + at) = value;
        });
    if (threadIdx.x >= lanes_) return;
    const uint32_t lane = threadIdx.x;
    float head[kStateHead] = {};
    MergeMasses(pairs_, memory_->heads, lane, head);
    for (const TreeHead kind : {kTreeErrors, kTreeMassErrors, kTreeLogitVariances}) {
      head[kind] = SumOfLane(pairs_, memory_->heads, lane, kind);
    }
#pragma unroll
    for (uint32_t i = 0; i < kStateHead; ++i) own[lane * Sums::kLaneFloats + i] = head[i];
    float* head_out = to + lane * kTo;
    head_out[kHeadMax] = head[kTreeMax];
    head_out[kHeadSum] = head[kTreeSum];
    head_out[kHeadErrors] = head[kTreeErrors];
    head_out[kHeadMoments] = head[kTreeMoments];
    head_out[kHeadDropped] = kByMass ? head[kTreeBestSum] : 0.0f;
    head_out[kHeadMassErrors] = head[kTreeMassErrors];
    head_out[kHeadLogitVariances] = head[kTreeLogitVariances];
  }

  const StepHeader& step_;
  const TreeItem& item_;
  const Queries& queries_;
  Memory* const memory_;
  const uint32_t lanes_;
  const TilePairs pairs_;
  const EstimatedTiles tiles_;
  uint32_t leaf_ = 0;
  PairTotals totals_;
  Sums sums_;
};

template <int kDim, int kValueDim, TreeChoice kChoice>
__global__ void __launch_bounds__(kTreeThreads, (kTreeBlocks<kDim, kValueDim>))
    TreeEstimateKernel(const __grid_constant__ StepHeader step) {
  using Worker = EstimateWorker<kDim, kValueDim, kChoice>;
  const typename Worker::Queries queries(step, blockIdx.x);
  const TreeItem item = ReadItem(step, blockIdx.x);
  if (item.choice != kChoice) return;
  if constexpr (kChoice == TreeChoice::kByHead) {
    if (PhaseOf(step, item.unit) == TreePhase::kDone) return;
  }
  if constexpr (!Worker::Sums::kSlopesFit) {
    PrefetchBytes(item.head + item.offsets->slopes, kDim * kValueDim * 2);
  }
  Worker(step, item, queries, reinterpret_cast<EstimateMemory<kDim, kValueDim>*>(block_memory))
      .Run();
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_ESTIMATE_CUH_
