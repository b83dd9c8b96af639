// SPDX-License-Identifier: Apache-2.0
//
// What the stages that choose among a tree unit's rows have in common, whatever they rank by. A
// choice needs all of the unit's scores, so the thread blocks of one thread block cluster work on
// it: each ranks a range of the rows.
#ifndef ATTND_GPU_CUDA_STEP_TREE_UNIT_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_UNIT_CUH_

#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/chosen_pieces.cuh"
#include "gpu/cuda/step/merge.cuh"
#include "gpu/cuda/step/tree_block.cuh"
#include "gpu/cuda/step/tree_cut.cuh"
#include "gpu/cuda/step/tree_tile.cuh"

namespace attnd::gpu {

// Rows of a thread block whose ranking lies in shared memory: seven have the leaves of 128K tokens,
// and two thread blocks fit on a multiprocessor.
inline constexpr uint32_t kRankedRows = 3072;

// A unit's rows of one level, and of these the thread block's own, [begin, begin + own): what is
// ranked. Keys and errors are those of its own rows. Once rows have been marked, best_keys and
// error_keys hold what they list (ListedRow), and behind List error_keys the number of a row's
// first word.
struct TreeLevel {
  uint32_t count;
  uint32_t begin, own;
  uint32_t stride;  // of lanes
  const float* log_mass;
  const float* d2;
  const TreeRowInfo* info;
  uint32_t* best_keys;
  uint32_t* error_keys;
  float* errors;
  float optimism;
};

// What a marked row puts into a list: `size` words, of which the first is `first` and each other
// one more than the one before. No words of a row that is not marked.
struct ListedRow {
  uint32_t size = 0, first = 0;
};

// For each lane, of one level's rows.
struct TreeLaneScale {
  float max;         // of the logarithms of mass
  float best_max;    // of the optimistic ones
  float best_share;  // what a weight to that maximum counts in the mean over the group
  float error_unit;  // makes a weight a share of the output's mass over the output's length
  float mass_unit;   // a share of the mass
  float mass_share2;
};

// A warp's channels of an output, and how many warps share its states.
inline constexpr uint32_t kOutputChannels = 32;
inline constexpr uint32_t kOutputShares = 4;
inline constexpr uint32_t kOutputChunksMax = 8;  // of a lane

// Where a segment's groups are among the row's.
struct SegmentSlots {
  uint32_t first_group_slot, first_slice, slices;
};
// Segments of a row of which a thread block keeps that: looking it up in memory is a wait each
// time.
inline constexpr uint32_t kKnownSegments = 64;

struct TreeSelectMemory {
  CutMemory cut;
  uint32_t best_keys[kRankedRows];
  uint32_t error_keys[kRankedRows];
  float errors[kRankedRows];
  TreeLane lanes[kTreeLanesMax];
  TreeLaneScale scales[kTreeLanesMax];
  float4 sums[kTreeLanesMax];    // max and sum of masses, max and sum of optimistic masses
  float moments[kTreeLanesMax];  // second moments of values, by mass
  float2 outputs[kCutWarps][kOutputChannels];  // sums of shares of the states
  // Squared lengths of an output's channels (low half) and of the zones' mean.
  CutWeight norms[kTreeLanesMax * kOutputChunksMax];
  CutWeight closed_errors[kCutWarps];
  uint32_t level_rows;    // of all the unit's segments, chosen from or not
  uint32_t taken_anyway;  // how many rows of the level are taken whatever their errors
  SegmentSlots segments[kKnownSegments];
};

// By plain loads, as those of scores: the kernel before writes both while choose's thread blocks
// may have begun.
__device__ __forceinline__ TreeRowInfo InfoAt(const TreeLevel& level, uint32_t i) {
  const float4 info = reinterpret_cast<const float4*>(level.info)[i];
  return {info.x, info.y, info.z, __float_as_uint(info.w)};
}

// Of a choice's estimated tokens: all that are not chosen.
inline constexpr uint32_t kAllOthers = ~0u;

class TreeUnit {
 public:
  __device__ TreeUnit(const StepHeader& step, const UnitPlace& unit, TreeSelectMemory* memory)
      : step_(step),
        unit_(unit),
        row_(*unit.row),
        memory_(memory),
        exchange_(&memory->cut),
        places_(TreeScoresOf(row_, step.group)),
        scores_(UnitScores(step, unit)),
        fates_(UnitFates(step, unit)),
        words_(UnitTreeWords(step, unit)) {}

 protected:
  __device__ __forceinline__ uint32_t* first_items() const { return words_ + kTreeLaneWords; }
  __device__ __forceinline__ uint32_t* items() const { return words_ + TreeItems(row_); }
  __device__ __forceinline__ uint8_t& LeafFate(uint32_t item) const { return fates_[item]; }
  __device__ __forceinline__ uint64_t ItemNumber(uint32_t tile, uint32_t slice) const {
    return row_.first_tree_item +
           (uint64_t{unit_.in_row} * row_.tiles_per_unit + tile) * row_.tree_slices + slice;
  }
  __device__ TreeLevel LevelOf(const TreeLevelScores& places, uint32_t count, uint32_t stride,
                               float optimism) const;
  __device__ TreeLevel Leaves() const;
  __device__ void CombinePartials();
  __device__ __forceinline__ void CombinePartialsOf(uint32_t lane);
  __device__ __forceinline__ void StoreLaneScales() const;
  static __device__ __forceinline__ void NoteListed(const TreeLevel& level, uint32_t i,
                                                    ListedRow row) {
    level.best_keys[i] = row.size;
    level.error_keys[i] = row.first;
  }
  template <typename Counted>
  __device__ void List(const TreeLevel& level, uint32_t* list, Counted counted);
  __device__ void ListTokens(const TreeLevel& leaves, uint32_t estimated = kAllOthers);
  template <typename Number>
  __device__ __forceinline__ Number SumOfBlock(Number own) const {
    return gpu::SumOfBlock(own, &memory_->cut);
  }
  // The tokens of a chosen leaf; info: of the item.
  __device__ __forceinline__ ListedRow TokensOf(uint32_t item, const TreeRowInfo& info) const {
    return {static_cast<uint32_t>(info.tokens), (items()[item] >> 16 << 16) + info.place};
  }

  const StepHeader& step_;
  const UnitPlace& unit_;
  const RowRef& row_;
  TreeSelectMemory* const memory_;
  CutExchange exchange_;
  const TreeScores places_;
  float* const scores_;
  uint8_t* const fates_;
  uint32_t* const words_;
};

inline __device__ TreeLevel TreeUnit::LevelOf(const TreeLevelScores& places, uint32_t count,
                                              uint32_t stride, float optimism) const {
  TreeLevel level;
  const uint32_t each = (count + CutBlocks::blocks() - 1) / CutBlocks::blocks();
  level.count = count;
  level.begin = min(CutBlocks::rank() * each, count);
  level.own = min(each, count - level.begin);
  level.stride = stride;
  level.log_mass = scores_ + places.log_mass;
  level.d2 = scores_ + places.d2;
  level.info = reinterpret_cast<const TreeRowInfo*>(scores_ + places.info);
  const auto rows_of = [&](auto* shared, uint64_t place) {
    return each <= kRankedRows ? shared
                               : reinterpret_cast<decltype(shared)>(scores_ + place) + level.begin;
  };
  level.best_keys = rows_of(memory_->best_keys, places.best_key);
  level.error_keys = rows_of(memory_->error_keys, places.error_key);
  level.errors = rows_of(memory_->errors, places.error);
  level.optimism = optimism;
  return level;
}
inline __device__ TreeLevel TreeUnit::Leaves() const {
  return LevelOf(places_.leaves, first_items()[row_.tree_slices], row_.slots, attention::kOptimism);
}

// A warp for each lane: sums over the leaves and the closed groups.
inline __device__ void TreeUnit::CombinePartials() {
  for (uint32_t lane = threadIdx.x / 32; lane < step_.group; lane += kCutWarps) {
    CombinePartialsOf(lane);
  }
  __syncthreads();
}
// By a warp, for its first thread.
__device__ __forceinline__ void TreeUnit::CombinePartialsOf(uint32_t lane) {
  const uint32_t thread = threadIdx.x % 32;
  SumsOfHeads sums;
  for (uint32_t s = thread; s < row_.tree_slices; s += 32) {
    const uint64_t item = ItemNumber(lane / kLanes, s);
    sums.Add(step_.tree_partials + (item * kLanes + lane % kLanes) * kStateHead);
  }
  sums.Join();
  if (thread != 0) return;
  memory_->sums[lane] = make_float4(sums.max, sums.sum, sums.best_max, sums.best_sum);
  memory_->moments[lane] = sums.moments;
}

// The scale of the estimates' weights. One thread block of the unit.
__device__ __forceinline__ void TreeUnit::StoreLaneScales() const {
  for (uint32_t i = threadIdx.x; i < step_.tiles_max * kLanes; i += kCutThreads) {
    const float4 sums = i < step_.group ? memory_->sums[i] : make_float4(-INFINITY, 0, 0, 0);
    step_.lane_scales[uint64_t{unit_.unit} * step_.tiles_max * kLanes + i] = {sums.x, sums.y, 0, 0};
  }
}

// Lists what the thread blocks have noted of all their rows, in the rows' order. Puts the number of
// each row's first word in the place of its error's key. A warp has some neighbouring rows, and a
// thread every 32nd of their words. counted(all): by the last warp, which as a rule has no rows,
// once it is known how many words there are.
template <typename Counted>
__device__ void TreeUnit::List(const TreeLevel& level, uint32_t* list, Counted counted) {
  const uint32_t each = (level.own + kCutThreads - 1) / kCutThreads * 32;
  const uint32_t begin = min(threadIdx.x / 32 * each, level.own),
                 end = min(begin + each, level.own);
  const uint32_t thread = threadIdx.x % 32;
  __syncthreads();  // rows have been noted
  Scanned<uint32_t> sizes{0};
  for (uint32_t i = begin + thread; i < end; i += 32) sizes.own += level.best_keys[i];
  ScanBlock<kCutWarps>(&memory_->cut, sizes);
  CutWeight before;
  const CutWeight all = exchange_.Sum(sizes.total, &before);
  if (threadIdx.x / 32 == kCutWarps - 1) counted(static_cast<uint32_t>(all));
  uint32_t number = static_cast<uint32_t>(before) + __shfl_sync(~0u, sizes.before, 0);
#pragma unroll 1
  for (uint32_t first = begin; first < end; first += 32) {
    const uint32_t i = first + thread;
    ListedRow row;
    if (i < end) row = {level.best_keys[i], level.error_keys[i]};
    // The end of the row's words among those of the warp's rows.
    const uint32_t to = SumThrough(row.size);
    const uint32_t words = __shfl_sync(~0u, to, 31), from = to - row.size;
    if (i < end) level.error_keys[i] = number + from;
#pragma unroll 1
    for (uint32_t some = 0; some < words; some += 32) {
      const uint32_t word = some + thread;
      uint32_t of = 0;  // the row that has the word: how many end before it
#pragma unroll
      for (uint32_t step = 16; step > 0; step /= 2) {
        if (__shfl_sync(~0u, to, of + step - 1) <= word) of += step;
      }
      const uint32_t value = __shfl_sync(~0u, row.first - from, of) + word;
      if (word < words) list[number + word] = value;
    }
    number += words;
  }
}

// Lists the tokens of the leaves that have been noted, and reports the choice. estimated: how many
// other tokens are estimated; the rest is dropped.
inline __device__ void TreeUnit::ListTokens(const TreeLevel& leaves, uint32_t estimated) {
  List(leaves, UnitChosen(step_, unit_), [&](uint32_t chosen) {
    if (CutBlocks::rank() != 0) return;
    const uint32_t others = row_.clustered_tokens - chosen;
    UnitResult result = {};
    result.clusters = leaves.count;
    result.chosen_tokens = chosen;
    result.estimated_tokens = min(estimated, others);
    result.dropped_tokens = others - result.estimated_tokens;
    ReportChoice(step_, unit_, result);
  });
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_UNIT_CUH_
