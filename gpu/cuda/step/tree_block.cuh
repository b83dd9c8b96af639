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

template <typename Search>
__device__ __forceinline__ uint32_t SegmentOfSlice(const StepHeader& step, const RowRef& row,
                                                   uint32_t slice) {
  const TreeRef* trees = step.trees + row.trees_begin;
  return Search::Last(row.segment_count, slice, [&](uint32_t i) { return trees[i].first_slice; });
}

__device__ __forceinline__ uint32_t* UnitTreeWords(const StepHeader& step, const UnitPlace& unit) {
  return step.tree_words + unit.row->first_word + unit.in_row * TreeWordsPerUnit(*unit.row);
}
// A tree item: one slice of a unit's groups, for one tile of its queries. Finding one takes several
// look-ups, one after another.
struct alignas(16) TreeItem {
  const RowRef* row;
  const std::byte* head;       // the KV head's index of the slice's segment
  const TreeOffsets* offsets;  // of that index
  uint32_t* words;             // of the unit (TreeLane)
  UnitPlace unit;
  uint32_t number;  // in the step, by which states lie; its thread block has another one
  uint32_t slice;   // of the row
  uint32_t segment;
  uint32_t tile;
  TreeChoice choice;
  uint32_t first_slice, slices;  // of the segment
  uint32_t first_group_slot;     // of the segment, among the row's
  uint32_t first_group;          // of the slice, as the ends, among the segment's
  uint32_t groups_end;           // the segment may have fewer groups than its index has room for
  uint32_t room_end;             // of that room: asked for before it is known how many there are
  uint32_t slots_end;            // of the slice's group slots

  __device__ __forceinline__ const float* Floats(uint32_t offset) const {
    return reinterpret_cast<const float*>(head + offset);
  }
};

// The item of a thread block. Those of a row begin with its last slice, of every unit and tile:
// segments of a prompt without token ids grow, and who has most to do begins first.
template <typename Search = ByWarp>
__device__ __forceinline__ TreeItem FindItem(const StepHeader& step, uint32_t block) {
  const RowRef* row = RowOf<Search>(step, block, &RowRef::first_tree_item);
  const uint32_t tiles = row->query_tokens * step.kv_heads * row->tiles_per_unit;
  const uint32_t in_row = block - row->first_tree_item, tile_of_row = in_row % tiles;
  const uint32_t slice = row->tree_slices - 1 - in_row / tiles;
  const uint32_t segment = SegmentOfSlice<Search>(step, *row, slice);
  const TreeRef& tree = step.trees[row->trees_begin + segment];
  const SegmentRef& ref = step.segments[row->segments_begin + segment];
  const UnitPlace unit(step, row, tile_of_row / row->tiles_per_unit);
  const std::byte* head = ref.index + unit.kv_head * ref.index_head_bytes;
  const uint32_t first_group = (slice - tree.first_slice) * row->tree_slice_groups;
  const auto end_of = [&](uint32_t all) {
    return max(first_group, min(all, first_group + row->tree_slice_groups));
  };
  return {
      .row = row,
      .head = head,
      .offsets = &tree.offsets,
      .words = UnitTreeWords(step, unit),
      .unit = unit,
      .number = row->first_tree_item + tile_of_row * row->tree_slices + slice,
      .slice = slice,
      .segment = segment,
      .tile = tile_of_row % row->tiles_per_unit,
      .choice = ChoiceOf(*row),
      .first_slice = tree.first_slice,
      .slices = tree.slices,
      .first_group_slot = tree.first_group_slot,
      .first_group = first_group,
      .groups_end = end_of(*reinterpret_cast<const uint32_t*>(head + tree.offsets.groups.count)),
      .room_end = end_of(tree.max_groups),
      .slots_end = end_of(tree.group_slots)};
}

// What the first stage over an item, or the step's gate, leaves of it for the thread blocks with
// the same number in later stages: reading it is one wait. Its offsets lie beside it, so that they
// need not wait for it.
struct TreePlace {
  TreeItem item;
  TreeOffsets offsets;
};
__device__ __forceinline__ TreePlace* PlaceOfItem(const StepHeader& step, uint32_t block) {
  static_assert(sizeof(TreePlace) == kTreePlaceBytes && kTreePlaceBytes % alignof(TreePlace) == 0);
  return reinterpret_cast<TreePlace*>(step.tree_places + uint64_t{block} * kTreePlaceBytes);
}
// By the whole thread block.
__device__ __forceinline__ void StoreItem(const StepHeader& step, const TreeItem& item) {
  constexpr uint32_t kOffsets = sizeof(TreeOffsets) / sizeof(uint32_t);
  TreePlace* place = PlaceOfItem(step, blockIdx.x);
  if (threadIdx.x < kOffsets) {
    reinterpret_cast<uint32_t*>(&place->offsets)[threadIdx.x] =
        reinterpret_cast<const uint32_t*>(item.offsets)[threadIdx.x];
  }
  if (threadIdx.x == kTreeThreads - 1) place->item = item;
}
// By a thread.
__device__ __forceinline__ void PlaceItem(const StepHeader& step, uint32_t block) {
  const TreeItem item = FindItem<ByThread>(step, block);
  TreePlace* place = PlaceOfItem(step, block);
  place->offsets = *item.offsets;
  place->item = item;
}
__device__ __forceinline__ TreeItem ReadItem(const StepHeader& step, uint32_t block) {
  const TreePlace* place = PlaceOfItem(step, block);
  AssumeGlobal(place);
  TreeItem item = place->item;
  item.offsets = &place->offsets;
  AssumeGlobal(item.row);
  AssumeGlobal(item.unit.row);
  AssumeGlobal(item.head);
  AssumeGlobal(item.words);
  return item;
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

// What the groups stage finds of an item's queries, and leaves for the other stages' thread blocks
// with the same number.
template <int kDim>
struct TreeQueries {
  float rotated[kLanes][kDim];          // the scaled queries along the axes
  float logit_factor[kLanes];           // of dot products with `queries`, in log2 units
  float square_factor[kLanes];          // of dot products with `squares`
  float base_dot[kLanes];               // the logit of the key base, in log2 units
  VectorDigits<kDim> queries, squares;  // squares: of `rotated`
};

template <int kDim>
__device__ __forceinline__ uint4* StoredQueries(const StepHeader& step, uint32_t block) {
  static_assert(sizeof(TreeQueries<kDim>) == TreeQueryWords(kDim) * sizeof(float));
  return reinterpret_cast<uint4*>(step.tree_queries + uint64_t{block} * TreeQueryWords(kDim));
}
template <int kDim>
__device__ __forceinline__ void StoreQueries(const StepHeader& step,
                                             const TreeQueries<kDim>& queries) {
  uint4* to = StoredQueries<kDim>(step, blockIdx.x);
  const auto* from = reinterpret_cast<const uint4*>(&queries);
  for (uint32_t i = threadIdx.x; i < TreeQueryWords(kDim) / 4; i += kTreeThreads) to[i] = from[i];
}

// A thread's share of the first kWords words of a thread block's stored queries: on their way
// before it knows its item.
template <int kDim, uint32_t kWords = TreeQueryWords(kDim)>
class StoredWords {
 public:
  __device__ __forceinline__ StoredWords(const StepHeader& step, uint32_t block) {
    const uint4* from = StoredQueries<kDim>(step, block);
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

// How an item's queries are made, by the whole thread block: each warp has a lane.
template <int kDim>
class TreeQueryMaker {
 public:
  static constexpr bool kHoldsAxes = kDim <= 128;  // else only some are asked for ahead
  // The queries as the left sides of products with axes.
  struct Memory {
    __align__(16) uint32_t fragments[FragmentWords(kDim)];
  };

  using Query = QueryShare<kDim / 32>;

  // Asks for what they are made of beside the step's queries, which may come later.
  __device__ __forceinline__ TreeQueryMaker(const StepHeader& step, const TreeItem& item)
      : scale_(step.softmax_scale), axes_(item.head + item.offsets->axes) {
    const float* base = item.Floats(item.offsets->key_base) + threadIdx.x % 32;
#pragma unroll
    for (uint32_t i = 0; i < kPerThread; ++i) base_[i] = __ldg(base + i * 32);
#pragma unroll
    for (uint32_t i = 0; i < kHeld; ++i) held_[i] = Axes(i);
  }

  // Asks for this warp's lane of the step's queries.
  static __device__ __forceinline__ Query QueryOf(const StepHeader& step, const TreeItem& item) {
    const LanePlace place(step, item.unit, item.tile, Lane());
    return {step, place.slot * kDim, !place.used};
  }
  // x: QueryOf's. rotates: whether variances count; else queries have no length along the axes.
  __device__ __forceinline__ void Make(const Query& x, bool rotates, Memory* memory,
                                       TreeQueries<kDim>* to) {
    Scale(x, memory, to);
    __syncthreads();
    Rotate(rotates, *memory, to);
    __syncthreads();
    Square(to);
    __syncthreads();
  }

 private:
  static constexpr uint32_t kPerThread = kDim / 32;         // of a lane's channels
  static constexpr uint32_t kRuns = kDim / 8 / kTreeWarps;  // of eight axes, of a warp
  static constexpr uint32_t kHeld = kHoldsAxes ? kRuns : 1;
  static_assert(kLanes == kTreeWarps && kRuns * 8 * kTreeWarps == kDim);
  // A thread's share of eight axes, as the right side of products.
  struct AxisRun {
    uint4 words[kDim / 32];
  };

  static __device__ __forceinline__ uint32_t Lane() { return threadIdx.x / 32; }
  static __device__ __forceinline__ uint32_t FirstAxis(uint32_t run) {
    return (threadIdx.x / 32 + run * kTreeWarps) * 8;
  }
  __device__ __forceinline__ AxisRun Axes(uint32_t run) const {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const auto* from = reinterpret_cast<const uint4*>(axes_ + (FirstAxis(run) + g) * kDim * 2) + t;
    AxisRun axes;
#pragma unroll
    for (uint32_t at = 0; at < kDim / 32; ++at) axes.words[at] = __ldg(from + at * 4);
    return axes;
  }

  // Fills the lane's `queries`, logit_factor and base_dot, and its fragments.
  __device__ __forceinline__ void Scale(const Query& x, Memory* memory,
                                        TreeQueries<kDim>* to) const {
    const uint32_t thread = threadIdx.x % 32, lane = Lane();
    float greatest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kPerThread; ++i) greatest = fmaxf(greatest, fabsf(x[i]));
    greatest = MaxOverWarp(greatest);
    int exponent = 0;
    if (greatest > 0) frexpf(greatest, &exponent);
    exponent = max(-100, min(exponent, 100));  // so that both factors are numbers
    const float down = ldexpf(1.0f, -exponent);
    float dot = 0;
#pragma unroll
    for (uint32_t i = 0; i < kPerThread; ++i) {
      // Within [-1, 1] unless it is beyond 2^100.
      const float scaled = x[i] * down;
      to->queries.Store(scaled, i * 32 + thread, lane);
      StoreFragment(scaled, i, memory);
      dot += scaled * base_[i];
    }
    dot = SumOfWarp(dot);
    if (thread != 0) return;
    const float factor = ldexpf(scale_, exponent) * kLog2E;
    to->logit_factor[lane] = factor;
    to->base_dot[lane] = factor * dot;
  }
  // Of the warp's 32 neighbouring channels, which products take in pairs.
  static __device__ __forceinline__ void StoreFragment(float x, uint32_t block, Memory* memory) {
    const uint32_t thread = threadIdx.x % 32;
    const float next = __shfl_xor_sync(~0u, x, 1);  // of an even thread
    if (thread % 2 != 0) return;
    uint2 words;
    Split<__nv_bfloat16>(x, next, &words.x, &words.y);
    uint32_t* to = memory->fragments + (block * 32 + Lane() * 4 + thread / 8) * 8 + thread % 8;
    *reinterpret_cast<uint2*>(to) = words;
  }
  // Fills `rotated`.
  __device__ __forceinline__ void Rotate(bool rotates, const Memory& memory,
                                         TreeQueries<kDim>* to) const {
    const uint32_t thread = threadIdx.x % 32, g = thread / 4, t = thread % 4;
    const uint4* q = reinterpret_cast<const uint4*>(memory.fragments) + thread * 2;
    const float factor = fminf(to->logit_factor[g] / kLog2E, kTreeQueryMax);
#pragma unroll
    for (uint32_t i = 0; i < kRuns; ++i) {
      const AxisRun axes = i < kHeld ? held_[i] : Axes(i);
      float sum[4] = {};
#pragma unroll
      for (uint32_t at = 0; at < kDim / 32; ++at) {
        const uint4 q0 = q[at * 64], q1 = q[at * 64 + 1];
        const uint32_t a0[4] = {q0.x, q0.y, q0.z, q0.w};
        const uint32_t a1[4] = {q1.x, q1.y, q1.z, q1.w};
        const uint4& x = axes.words[at];
        MultiplyAdd<__nv_bfloat16>(sum, a0, x.x, x.y);
        MultiplyAdd<__nv_bfloat16>(sum, a1, x.z, x.w);
      }
      float* rotated = to->rotated[g] + FirstAxis(i) + 2 * t;
      rotated[0] = rotates ? factor * (sum[0] + sum[2]) : 0.0f;
      rotated[1] = rotates ? factor * (sum[1] + sum[3]) : 0.0f;
    }
  }
  // Fills the lane's `squares` and square_factor from `rotated`.
  static __device__ __forceinline__ void Square(TreeQueries<kDim>* to) {
    const uint32_t thread = threadIdx.x % 32, lane = Lane();
    float x[kPerThread], greatest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kPerThread; ++i) {
      x[i] = to->rotated[lane][i * 32 + thread];
      greatest = fmaxf(greatest, fabsf(x[i]));
    }
    greatest = MaxOverWarp(greatest);
    const float down = greatest > 0 ? 1 / greatest : 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kPerThread; ++i) {
      const float share = x[i] * down;
      to->squares.Store(share * share, ChannelOfAxis<kDim>(i * 32 + thread), lane);
    }
    if (thread == 0) to->square_factor[lane] = greatest * greatest;
  }

  const float scale_;
  const std::byte* const axes_;
  float base_[kPerThread];
  AxisRun held_[kHeld];
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_BLOCK_CUH_
