// SPDX-License-Identifier: Apache-2.0
//
// A tile of kTileRows rows of one head's index, which a thread block works on at a time: their
// scores, and which thread works out which numbers.
#ifndef ATTND_GPU_CUDA_STEP_TREE_TILE_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_TILE_CUH_

#include <cstdint>

#include "gpu/cuda/step/score.cuh"
#include "gpu/cuda/step/tree_block.cuh"

namespace attnd::gpu {

// Pairs of a row and a lane, of which a thread has up to kPairs: all of one lane, which some whole
// warps share, so that neighbouring threads have neighbouring rows.
class TilePairs {
 public:
  static constexpr uint32_t kPairs = kTileRows / 32;

  // lanes: of the tile, 1 to kLanes.
  __device__ __forceinline__ explicit TilePairs(uint32_t lanes)
      : lane_step_(lanes > 4   ? 8
                   : lanes > 2 ? 4
                               : lanes),
        lane_(threadIdx.x / 32 % lane_step_),
        first_(threadIdx.x / 32 / lane_step_ * 32 + threadIdx.x % 32),
        row_step_(kTreeThreads / lane_step_),
        used_(lane_ < lanes) {}

  __device__ __forceinline__ bool used() const { return used_; }  // whether the lane is a query
  __device__ __forceinline__ uint32_t lane() const { return lane_; }
  __device__ __forceinline__ uint32_t first() const { return first_; }
  __device__ __forceinline__ uint32_t row_step() const { return row_step_; }
  // Row of pair k; kTileRows or more if there is no such pair.
  __device__ __forceinline__ uint32_t Row(uint32_t k) const { return first_ + k * row_step_; }

  // put(warp) for the warps of a lane.
  template <typename Put>
  __device__ __forceinline__ void ForWarpsOf(uint32_t lane, Put put) const {
    for (uint32_t w = lane; w < kTreeWarps; w += lane_step_) put(w);
  }

 private:
  const uint32_t lane_step_, lane_, first_, row_step_;
  const bool used_;
};

// ---- scores ----

// Products of each lane's query with the rows' means, and of its squares with their variances, in
// units of 1 / kDigitsOne.
struct TileProducts {
  float means[kLanes][kTileRows + 4];
  float variances[kLanes][kTileRows + 4];
};

// The products of a warp's sixteen rows. squares(n, block): those of a thread's 64 channels.
template <int kDim, typename Squares>
__device__ __forceinline__ void MultiplyRows(const TreeQueries<kDim>& queries,
                                             const ScoredRows<kDim>& rows, Squares squares,
                                             TileProducts* to) {
  RowProducts means, variances;
#pragma unroll
  for (uint32_t block = 0; block < ScoredRows<kDim>::kBlocks; ++block) {
    means.template Add<true>(queries.queries, block, rows.bytes[0][block], rows.bytes[1][block]);
    variances.template Add<false>(queries.squares, block, squares(0, block), squares(1, block));
  }
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint32_t row = threadIdx.x / 32 * kTreeRows + g;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to->means[2 * t + i % 2][row + i / 2 * 8] = SumOfDigits(means.sums, i);
    to->variances[2 * t + i % 2][row + i / 2 * 8] = SumOfDigits(variances.sums, i);
  }
}

// What a row's score is made of beside its products.
struct RowNumbers {
  float scale, log_size, unit;
};
__device__ __forceinline__ RowNumbers NumbersOf(const TreeItem& item, const TreePart& part,
                                                uint32_t row) {
  return {__ldg(item.Floats(part.centroid_scales) + row), __ldg(item.Floats(part.log_size) + row),
          __ldg(item.Floats(part.variance_unit) + row)};
}

// In log2 units; -infinity of a missing row.
struct RowScore {
  float log_mass = -INFINITY;
  float best = -INFINITY;  // the optimistic mass
  float d2 = 0;
};
// What scores of a lane have in common.
struct LaneFactors {
  float logit, square, base_dot;

  template <int kDim>
  __device__ __forceinline__ LaneFactors(const TreeQueries<kDim>& queries, uint32_t lane)
      : logit(queries.logit_factor[lane] * (1 / kDigitsOne)),
        square(queries.square_factor[lane] * (1 / kDigitsOne)),
        base_dot(queries.base_dot[lane]) {}

  __device__ __forceinline__ RowScore ScoreOf(const TileProducts& products, uint32_t lane,
                                              uint32_t row, const RowNumbers& of,
                                              float optimism) const {
    const float product = products.means[lane][row];
    const float variance = products.variances[lane][row];
    const float mean = logit * product * of.scale + base_dot + kLog2E * of.log_size;
    RowScore score;
    score.d2 = fminf(square * variance * of.unit, kVarianceMax);
    score.best = mean + optimism * kLog2E * Sqrt(score.d2);
    score.log_mass = mean + kLog2E / 2 * fminf(score.d2, kVarianceCap);
    return score;
  }
};

// What choosing needs of a row beside its score, as the index has it. place: of its first token.
struct IndexInfo {
  uint32_t start, next;
  float spread, value_norm2;

  IndexInfo() = default;
  __device__ __forceinline__ IndexInfo(const TreeItem& item, const TreePart& part, uint32_t row) {
    const auto* starts = reinterpret_cast<const uint32_t*>(item.head + part.starts) + row;
    start = __ldg(starts);
    next = __ldg(starts + 1);
    spread = __ldg(item.Floats(part.spread) + row);
    value_norm2 = __ldg(item.Floats(part.value_norm2) + row);
  }
  __device__ __forceinline__ TreeRowInfo info() const {
    return {static_cast<float>(next - start), spread, Sqrt(value_norm2), start};
  }
};

// ---- sums over a lane ----

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

// Heads of a tree item's state and of its leaves' partial sums.
enum TreeHead {
  kTreeMax,
  kTreeSum,
  kTreeMoments,
  kTreeBestMax,
  kTreeBestSum,
  kTreeErrors,
  kTreeMassErrors,
  kTreeLogitVariances
};
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

// Of each warp, of the lane of its pairs.
using WarpHeads = float[kTreeWarps][kStateHead];

// What some pairs come to: masses and second moments of values, relative to `max`; optimistic
// masses; and what estimates err by.
struct PairTotals {
  float max = -INFINITY, sum = 0, moments = 0;
  Totals best = {-INFINITY, 0};
  float errors = 0;       // squared errors of values
  float mass_errors = 0;  // of masses
  float logit_variances = 0;

  __device__ __forceinline__ void RaiseMax(float greater) {
    const float factor = Weight(max, greater);
    sum *= factor;
    moments *= factor;
    max = greater;
  }
  // Some pairs by the logarithms of their masses.
  template <int kCount>
  __device__ __forceinline__ void Add(const float (&x)[kCount], const float (&norm2)[kCount]) {
    float greatest = max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) greatest = fmaxf(greatest, x[i]);
    RaiseMax(greatest);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float weight = Weight(x[i], greatest);
      sum += weight;
      moments += weight * norm2[i];
    }
  }

  // Over the warp, into its place.
  __device__ __forceinline__ void StoreMasses(WarpHeads* heads) {
    RaiseMax(MaxOverWarp(max));
    JoinStates(&best.max, &best.sum);
    static_assert(kTreeMax == 0 && kTreeSum == 1 && kTreeMoments == 2 && kTreeBestSum == 4);
    const float own[] = {max, SumOfWarp(sum), SumOfWarp(moments), best.max, best.sum};
    Store(own, 0, heads);
  }
  __device__ __forceinline__ void StoreErrors(WarpHeads* heads) {
    static_assert(kTreeMassErrors == kTreeErrors + 1 && kTreeLogitVariances == kTreeErrors + 2);
    const float own[] = {SumOfWarp(errors), SumOfWarp(mass_errors), SumOfWarp(logit_variances)};
    Store(own, kTreeErrors, heads);
  }

 private:
  template <int kCount>
  static __device__ __forceinline__ void Store(const float (&own)[kCount], uint32_t first,
                                               WarpHeads* heads) {
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) (*heads)[threadIdx.x / 32][first + i] = own[i];
  }
};

// What the warps' heads of a lane come to, without errors.
__device__ __forceinline__ void MergeMasses(const TilePairs& pairs, const WarpHeads& heads,
                                            uint32_t lane, float (&head)[kStateHead]) {
  float max = -INFINITY, best_max = -INFINITY;
  pairs.ForWarpsOf(lane, [&](uint32_t w) {
    max = fmaxf(max, heads[w][kTreeMax]);
    best_max = fmaxf(best_max, heads[w][kTreeBestMax]);
  });
  head[kTreeMax] = max;
  head[kTreeBestMax] = best_max;
  head[kTreeSum] = head[kTreeMoments] = head[kTreeBestSum] = 0;
  pairs.ForWarpsOf(lane, [&](uint32_t w) {
    const float factor = Weight(heads[w][kTreeMax], max);
    head[kTreeSum] += factor * heads[w][kTreeSum];
    head[kTreeMoments] += factor * heads[w][kTreeMoments];
    head[kTreeBestSum] += Weight(heads[w][kTreeBestMax], best_max) * heads[w][kTreeBestSum];
  });
}

// A lane's sum of one kind of heads.
__device__ __forceinline__ float SumOfLane(const TilePairs& pairs, const WarpHeads& heads,
                                           uint32_t lane, TreeHead kind) {
  float sum = 0;
  pairs.ForWarpsOf(lane, [&](uint32_t w) { sum += heads[w][kind]; });
  return sum;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_TILE_CUH_
