// SPDX-License-Identifier: Apache-2.0
//
// What the thread blocks of a tree's stages share: which item they work on, their queries, and the
// scores of rows.
#ifndef ATTND_GPU_CUDA_STEP_TREE_BLOCK_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_BLOCK_CUH_

#include <algorithm>
#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/prepare.cuh"
#include "gpu/cuda/step/score.cuh"
#include "gpu/cuda/step/tree_rows.cuh"

namespace attnd::gpu {

// Longer queries count as this long: what is summed over channels stays a float.
inline constexpr float kTreeQueryMax = 1e17f;

__device__ __forceinline__ const RowRef* RowOfTreeItem(const StepHeader& step, uint32_t item) {
  return step.row_refs + LastNotAfter(step.rows, item,
                                      [&](uint32_t i) { return step.row_refs[i].first_tree_item; });
}

// The row's segment that a slice belongs to: the last one whose first slice is not behind it. The
// whole warp, whose threads look at 32 segments at once.
__device__ __forceinline__ uint32_t SegmentOfSlice(const StepHeader& step, const RowRef& row,
                                                   uint32_t slice) {
  uint32_t before = 0;
  for (uint32_t first = 0; first < row.segment_count; first += 32) {
    const uint32_t segment = first + threadIdx.x % 32;
    const bool begun =
        segment < row.segment_count && step.trees[row.trees_begin + segment].first_slice <= slice;
    before += __popc(__ballot_sync(~0u, begun));
  }
  return before - 1;
}

// A tree item: one slice of a unit's groups, for one tile of its queries.
struct TreeItem {
  const RowRef* row;
  uint32_t number;  // in the step
  uint32_t slice;   // of the row
  uint32_t segment;
  uint32_t tile;
  UnitPlace unit;
  const SegmentRef* ref;
  const TreeRef* tree;
  const std::byte* head;  // the KV head's index

  __device__ __forceinline__ TreeItem(const StepHeader& step, uint32_t item)
      : row(RowOfTreeItem(step, item)),
        number(item),
        slice((item - row->first_tree_item) % row->tree_slices),
        segment(SegmentOfSlice(step, *row, slice)),
        tile((item - row->first_tree_item) / row->tree_slices % row->tiles_per_unit),
        unit(step, row, (item - row->first_tree_item) / (row->tree_slices * row->tiles_per_unit)),
        ref(step.segments + row->segments_begin + segment),
        tree(step.trees + row->trees_begin + segment),
        head(ref->index + unit.kv_head * ref->index_head_bytes) {}

  // The slice's first group, among the segment's.
  __device__ __forceinline__ uint32_t first_group() const {
    return (slice - tree->first_slice) * row->tree_slice_groups;
  }
  // The end of the slice's groups: the segment may have fewer than its index has room for.
  __device__ __forceinline__ uint32_t groups_end() const {
    const TreePart& part = tree->offsets.groups;
    const uint32_t groups = *reinterpret_cast<const uint32_t*>(head + part.count);
    return max(first_group(), min(groups, first_group() + row->tree_slice_groups));
  }
  __device__ __forceinline__ const float* Floats(uint32_t offset) const {
    return reinterpret_cast<const float*>(head + offset);
  }
};

__device__ __forceinline__ uint32_t* UnitTreeWords(const StepHeader& step, const UnitPlace& unit) {
  return step.tree_words + unit.row->first_word + unit.in_row * TreeWordsPerUnit(*unit.row);
}
// Of a unit of TreeChoice::kByHead.
__device__ __forceinline__ TreeTries* TriesOf(const StepHeader& step, const UnitPlace& unit) {
  uint32_t* words = UnitTreeWords(step, unit) + TreeItems(*unit.row) + unit.row->slots;
  return reinterpret_cast<TreeTries*>(words);
}
__device__ __forceinline__ TreePhase PhaseOf(const StepHeader& step, const UnitPlace& unit) {
  return TriesOf(step, unit)->phase;
}
// Lane 0's scores of the kind at `offset` (TreeScores).
__device__ __forceinline__ float* TreeScoresAt(const StepHeader& step, const UnitPlace& unit,
                                               uint64_t offset) {
  return UnitScores(step, unit) + offset;
}

// What the groups stage finds of an item's queries, and leaves for the other stages.
template <int kDim>
struct TreeQueries {
  float rotated[kLanes][kDim];  // the scaled queries along the axes
  std::byte query_digits[kQueryDigits * kDigitBytes<kDim>];
  std::byte square_digits[kQueryDigits * kDigitBytes<kDim>];  // of the squares of `rotated`
  float logit_factor[kLanes];   // of dot products with the queries' numbers, in log2 units
  float square_factor[kLanes];  // of dot products with the squares' numbers
  float base_dot[kLanes];       // the logit of the key base, in log2 units
};

// Static shared memory of a thread block.
template <int kDim>
struct TreeBlock {
  __align__(16) TreeQueries<kDim> q;
  // Queries times a power of two, within [-1, 1] unless they are beyond 2^100; later others.
  float vectors[kLanes][kDim];
  __align__(16) uint32_t query_words[FragmentWords(kDim)];  // of the same
};

template <int kDim>
__device__ __forceinline__ uint4* StoredQueries(const StepHeader& step, const TreeItem& item) {
  static_assert(sizeof(TreeQueries<kDim>) == TreeQueryWords(kDim) * sizeof(float));
  return reinterpret_cast<uint4*>(step.tree_queries + uint64_t{item.number} * TreeQueryWords(kDim));
}
template <int kDim>
__device__ __forceinline__ void StoreQueries(const StepHeader& step, const TreeItem& item,
                                             const TreeBlock<kDim>& block) {
  uint4* to = StoredQueries<kDim>(step, item);
  const auto* from = reinterpret_cast<const uint4*>(&block.q);
  for (uint32_t i = threadIdx.x; i < TreeQueryWords(kDim) / 4; i += kTreeThreads) to[i] = from[i];
}
// The first `words` words of them.
template <int kDim>
__device__ __forceinline__ void LoadStoredQueries(const StepHeader& step, const TreeItem& item,
                                                  uint32_t words, TreeBlock<kDim>* block) {
  const uint4* from = StoredQueries<kDim>(step, item);
  auto* to = reinterpret_cast<uint4*>(&block->q);
  for (uint32_t i = threadIdx.x; i < words / 4; i += kTreeThreads) to[i] = from[i];
  __syncthreads();
}

__device__ __forceinline__ float MaxOverWarp(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}
__device__ __forceinline__ float SumOfWarp(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// Fills vectors, query_words, query_digits, logit_factor and base_dot.
template <int kDim>
__device__ __forceinline__ void LoadTreeQueries(const StepHeader& step, const TreeItem& item,
                                                TreeBlock<kDim>* block) {
  const uint32_t thread = threadIdx.x % 32;
  const float* base = item.Floats(item.tree->offsets.key_base);
  for (uint32_t lane = threadIdx.x / 32; lane < kLanes; lane += kTreeWarps) {
    const LanePlace place(step, item.unit, item.tile, lane);
    float x[kDim / 32] = {};
    if (place.used) LoadQuery(step, place.slot * kDim, x);
    float greatest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kDim / 32; ++i) greatest = fmaxf(greatest, fabsf(x[i]));
    greatest = MaxOverWarp(greatest);
    int exponent = 0;
    if (greatest > 0) frexpf(greatest, &exponent);
    exponent = max(-100, min(exponent, 100));  // so that both factors are numbers
    const float down = ldexpf(1.0f, -exponent);
    float dot = 0;
#pragma unroll
    for (uint32_t i = 0; i < kDim / 32; ++i) {
      const float scaled = x[i] * down;
      block->vectors[lane][i * 32 + thread] = scaled;
      StoreDigits<kDim>(scaled, i * 32 + thread, lane, block->q.query_digits);
      dot += scaled * __ldg(base + i * 32 + thread);
    }
    dot = SumOfWarp(dot);
    if (thread == 0) {
      const float factor = ldexpf(step.softmax_scale, exponent) * kLog2E;
      block->q.logit_factor[lane] = factor;
      block->q.base_dot[lane] = factor * dot;
    }
  }
  __syncthreads();
  WriteTreeFragments<kDim>(block->vectors, block->query_words);
  __syncthreads();
}

// Fills rotated from the queries.
template <int kDim>
__device__ __forceinline__ void RotateQueries(const TreeItem& item, TreeBlock<kDim>* block) {
  const uint32_t warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const uint32_t g = thread / 4, t = thread % 4;
  const std::byte* axes = item.head + item.tree->offsets.axes;
  const uint4* q = reinterpret_cast<const uint4*>(block->query_words) + thread * 2;
  const float factor = fminf(block->q.logit_factor[g] / kLog2E, kTreeQueryMax);
#pragma unroll 2
  for (uint32_t n = warp; n < kDim / 8; n += kTreeWarps) {
    float sum[4] = {};
    const uint4* row = reinterpret_cast<const uint4*>(axes + (n * 8 + g) * kDim * 2) + t;
#pragma unroll
    for (int at = 0; at < kDim / 32; ++at) {
      const uint4 q0 = q[at * 64], q1 = q[at * 64 + 1];
      const uint32_t a0[4] = {q0.x, q0.y, q0.z, q0.w};
      const uint32_t a1[4] = {q1.x, q1.y, q1.z, q1.w};
      const uint4 x = __ldg(row + at * 4);
      MultiplyAdd<__nv_bfloat16>(sum, a0, x.x, x.y);
      MultiplyAdd<__nv_bfloat16>(sum, a1, x.z, x.w);
    }
    block->q.rotated[g][n * 8 + 2 * t] = factor * (sum[0] + sum[2]);
    block->q.rotated[g][n * 8 + 2 * t + 1] = factor * (sum[1] + sum[3]);
  }
  __syncthreads();
}

// Fills square_digits and square_factor from `rotated`.
template <int kDim>
__device__ __forceinline__ void SquareQueries(TreeBlock<kDim>* block) {
  const uint32_t thread = threadIdx.x % 32;
  for (uint32_t lane = threadIdx.x / 32; lane < kLanes; lane += kTreeWarps) {
    float greatest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kDim / 32; ++i) {
      greatest = fmaxf(greatest, fabsf(block->q.rotated[lane][i * 32 + thread]));
    }
    greatest = MaxOverWarp(greatest);
    const float down = greatest > 0 ? 1 / greatest : 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kDim / 32; ++i) {
      const float share = block->q.rotated[lane][i * 32 + thread] * down;
      StoreDigits<kDim>(share * share, ChannelOfAxis<kDim>(i * 32 + thread), lane,
                        block->q.square_digits);
    }
    if (thread == 0) block->q.square_factor[lane] = greatest * greatest;
  }
  __syncthreads();
}

// Of a thread's rows and lane g, in log2 units; -infinity for missing rows.
struct TreeRowScores {
  float log_mass[2][2];
  float best[2][2];  // the optimistic mass
  float d2[2][2];
};

// What scores of 16 rows of a part are made of.
template <int kDim>
struct TreeRows {
  uint32_t rows[2][2];
  ScoredRows<kDim> scored;
  TreeNumbers scales, sizes, units;

  __device__ __forceinline__ TreeRows(const std::byte* head, const TreePart& part,
                                      const TreeRowSet& set)
      : scored(head, part, set) {
    RowsOfThread(set, rows);
    scales = TreeNumbers::Load(head + part.centroid_scales, rows);
    sizes = TreeNumbers::Load(head + part.log_size, rows);
    units = TreeNumbers::Load(head + part.variance_unit, rows);
  }
};

template <int kDim>
__device__ __forceinline__ TreeRowScores ScoreTreeRows(const TreeQueries<kDim>& queries,
                                                       const TreeRows<kDim>& of, float optimism) {
  const uint32_t g = threadIdx.x % 32 / 4;
  ByteProducts dots[2], variances[2];
#pragma unroll
  for (uint32_t block = 0; block < ScoredRows<kDim>::kBlocks; ++block) {
    uint4 digits[kQueryDigits];
    LoadDigits<kDim>(queries.query_digits, block, digits);
#pragma unroll
    for (int n = 0; n < 2; ++n) dots[n].template Add<true>(digits, of.scored.bytes[n][block]);
    LoadDigits<kDim>(queries.square_digits, block, digits);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      variances[n].template Add<false>(digits, SixteenSquares(of.scored.codes[n][block]));
    }
  }
  const float logit_factor = queries.logit_factor[g] * (1 / kQueryOne);
  const float square_factor = queries.square_factor[g] * (1 / kQueryOne);
  TreeRowScores scores;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float logit = logit_factor * dots[n].Sum(c) * of.scales.x[n][c] + queries.base_dot[g];
      const float d2 = fminf(square_factor * variances[n].Sum(c) * of.units.x[n][c], kVarianceMax);
      const float mean = logit + kLog2E * of.sizes.x[n][c];
      const bool there = of.rows[n][c] != kNoRow;
      scores.d2[n][c] = d2;
      scores.best[n][c] = there ? mean + optimism * kLog2E * Sqrt(d2) : -INFINITY;
      scores.log_mass[n][c] = there ? mean + kLog2E / 2 * fminf(d2, kVarianceCap) : -INFINITY;
    }
  }
  return scores;
}

// Adds a thread's four numbers.
__device__ __forceinline__ void AddToTotals(const float (&x)[2][2], Totals* totals) {
  const float all[4] = {x[0][0], x[0][1], x[1][0], x[1][1]};
  totals->Add(all);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_BLOCK_CUH_
