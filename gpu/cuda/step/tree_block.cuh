// SPDX-License-Identifier: Apache-2.0
//
// What the thread blocks of a tree's stages share: which item they work on, and their queries.
#ifndef ATTND_GPU_CUDA_STEP_TREE_BLOCK_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_BLOCK_CUH_

#include <cstdint>

#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/prepare.cuh"
#include "gpu/cuda/step/tree_rows.cuh"

namespace attnd::gpu {

// Thread blocks of a tree's stages that a multiprocessor should hold: more leave their threads too
// few registers.
template <int kDim, int kValueDim>
inline constexpr int kTreeBlocks = kDim + kValueDim <= 320 ? 2 : 1;

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
struct alignas(16) TreeItem {
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
  // The end of the slice's group slots.
  __device__ __forceinline__ uint32_t slots_end() const {
    return min(tree->group_slots, first_group() + row->tree_slice_groups);
  }
  // The end of the rows that the index has room for, of the slice's groups: what is asked for
  // before it is known how many groups there are.
  __device__ __forceinline__ uint32_t room_end() const {
    return max(first_group(), min(tree->max_groups, first_group() + row->tree_slice_groups));
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

// Where the first stage over an item leaves it, for those that follow: looking it up is several
// waits for memory, one after another, and reading it one.
__device__ __forceinline__ TreeItem* PlaceOfItem(const StepHeader& step, uint32_t item) {
  static_assert(sizeof(TreeItem) == kTreePlaceBytes && kTreePlaceBytes % alignof(TreeItem) == 0);
  return reinterpret_cast<TreeItem*>(step.tree_places + uint64_t{item} * kTreePlaceBytes);
}
__device__ __forceinline__ void StoreItem(const StepHeader& step, const TreeItem& item) {
  if (threadIdx.x == 0) *PlaceOfItem(step, item.number) = item;
}
__device__ __forceinline__ TreeItem ReadItem(const StepHeader& step, uint32_t number) {
  const TreeItem item = *PlaceOfItem(step, number);
  AssumeGlobal(item.row);
  AssumeGlobal(item.unit.row);
  AssumeGlobal(item.ref);
  AssumeGlobal(item.tree);
  AssumeGlobal(item.head);
  return item;
}

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
  float rotated[kLanes][kDim];          // the scaled queries along the axes
  float logit_factor[kLanes];           // of dot products with `queries`, in log2 units
  float square_factor[kLanes];          // of dot products with `squares`
  float base_dot[kLanes];               // the logit of the key base, in log2 units
  VectorDigits<kDim> queries, squares;  // squares: of `rotated`
};

// What they are made with.
template <int kDim>
struct TreeQueryMaking {
  // Queries times a power of two, within [-1, 1] unless they are beyond 2^100.
  float vectors[kLanes][kDim];
  __align__(16) uint32_t query_words[FragmentWords(kDim)];  // of the same
};

template <int kDim>
__device__ __forceinline__ uint4* StoredQueries(const StepHeader& step, uint32_t item) {
  static_assert(sizeof(TreeQueries<kDim>) == TreeQueryWords(kDim) * sizeof(float));
  return reinterpret_cast<uint4*>(step.tree_queries + uint64_t{item} * TreeQueryWords(kDim));
}
template <int kDim>
__device__ __forceinline__ void StoreQueries(const StepHeader& step, const TreeItem& item,
                                             const TreeQueries<kDim>& queries) {
  uint4* to = StoredQueries<kDim>(step, item.number);
  const auto* from = reinterpret_cast<const uint4*>(&queries);
  for (uint32_t i = threadIdx.x; i < TreeQueryWords(kDim) / 4; i += kTreeThreads) to[i] = from[i];
}

// A thread's share of the first kWords words of an item's: on their way before the thread block
// knows more of the item than its number.
template <int kDim, uint32_t kWords = TreeQueryWords(kDim)>
class StoredWords {
 public:
  __device__ __forceinline__ StoredWords(const StepHeader& step, uint32_t item) {
    const uint4* from = StoredQueries<kDim>(step, item);
#pragma unroll
    for (uint32_t k = 0; k < kShare; ++k) {
      const uint32_t i = threadIdx.x + k * kTreeThreads;
      if (i < kWords / 4) words_[k] = from[i];
    }
  }
  // For whoever looks behind the next barrier.
  __device__ __forceinline__ void Store(void* to) const {
#pragma unroll
    for (uint32_t k = 0; k < kShare; ++k) {
      const uint32_t i = threadIdx.x + k * kTreeThreads;
      if (i < kWords / 4) static_cast<uint4*>(to)[i] = words_[k];
    }
  }

 private:
  static constexpr uint32_t kShare = (kWords / 4 + kTreeThreads - 1) / kTreeThreads;
  uint4 words_[kShare];
};

// Asks the second-level cache for what the thread block will read, so that later loads wait for no
// more than that cache.
__device__ __forceinline__ void PrefetchBytes(const std::byte* from, uint32_t bytes) {
  for (uint32_t at = threadIdx.x * 128; at < bytes; at += kTreeThreads * 128) {
    Prefetch(from + at);
  }
}
// As integers that have the order of the numbers, the hardware finds the greatest at once.
__device__ __forceinline__ float MaxOverWarp(float x) {
  constexpr uint32_t kSign = 1u << 31;
  const uint32_t bits = __float_as_uint(x), key = bits & kSign ? ~bits : bits | kSign;
  const uint32_t greatest = __reduce_max_sync(~0u, key);
  return __uint_as_float(greatest & kSign ? greatest ^ kSign : ~greatest);
}
__device__ __forceinline__ float SumOfWarp(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// The sum over the warp's threads up to this one, its own number included.
__device__ __forceinline__ uint32_t SumThrough(uint32_t x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, x, offset);
    if (threadIdx.x % 32 >= offset) x += other;
  }
  return x;
}

// Fills `making`, `queries`, logit_factor and base_dot.
template <int kDim>
__device__ __forceinline__ void LoadTreeQueries(const StepHeader& step, const TreeItem& item,
                                                TreeQueryMaking<kDim>* making,
                                                TreeQueries<kDim>* queries) {
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
      making->vectors[lane][i * 32 + thread] = scaled;
      queries->queries.Store(scaled, i * 32 + thread, lane);
      dot += scaled * __ldg(base + i * 32 + thread);
    }
    dot = SumOfWarp(dot);
    if (thread == 0) {
      const float factor = ldexpf(step.softmax_scale, exponent) * kLog2E;
      queries->logit_factor[lane] = factor;
      queries->base_dot[lane] = factor * dot;
    }
  }
  __syncthreads();
  WriteTreeFragments<kDim>(making->vectors, making->query_words);
  __syncthreads();
}

// Fills `rotated`.
template <int kDim>
__device__ __forceinline__ void RotateQueries(const TreeItem& item,
                                              const TreeQueryMaking<kDim>& making,
                                              TreeQueries<kDim>* queries) {
  const uint32_t warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const uint32_t g = thread / 4, t = thread % 4;
  const std::byte* axes = item.head + item.tree->offsets.axes;
  const uint4* q = reinterpret_cast<const uint4*>(making.query_words) + thread * 2;
  const float factor = fminf(queries->logit_factor[g] / kLog2E, kTreeQueryMax);
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
    queries->rotated[g][n * 8 + 2 * t] = factor * (sum[0] + sum[2]);
    queries->rotated[g][n * 8 + 2 * t + 1] = factor * (sum[1] + sum[3]);
  }
  __syncthreads();
}

// Fills `squares` and square_factor from `rotated`.
template <int kDim>
__device__ __forceinline__ void SquareQueries(TreeQueries<kDim>* queries) {
  const uint32_t thread = threadIdx.x % 32;
  for (uint32_t lane = threadIdx.x / 32; lane < kLanes; lane += kTreeWarps) {
    float greatest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kDim / 32; ++i) {
      greatest = fmaxf(greatest, fabsf(queries->rotated[lane][i * 32 + thread]));
    }
    greatest = MaxOverWarp(greatest);
    const float down = greatest > 0 ? 1 / greatest : 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kDim / 32; ++i) {
      const float share = queries->rotated[lane][i * 32 + thread] * down;
      queries->squares.Store(share * share, ChannelOfAxis<kDim>(i * 32 + thread), lane);
    }
    if (thread == 0) queries->square_factor[lane] = greatest * greatest;
  }
  __syncthreads();
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_BLOCK_CUH_
