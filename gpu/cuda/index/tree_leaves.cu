// SPDX-License-Identifier: Apache-2.0
//
// The leaves of a tree: k-means inside each group by one thread block, all iterations in one
// launch. Groups of usual sizes have their points and centroids in shared memory; larger ones have
// a launch with more of it, where they are usual; those that do not fit work in global memory. The
// code is the same.
//
// A group's members are numbered from 0, by token. Nothing depends on timing: members are put in
// leaf order by one warp, and sums are over members in that order.
#include <math_constants.h>

#include "gpu/cuda/index/index_block.cuh"
#include "gpu/cuda/index/index_mma.cuh"
#include "gpu/cuda/index/tree_kernels.cuh"
#include "gpu/cuda/launch.h"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kWarps = 8;
constexpr uint32_t kThreads = kWarps * 32;
constexpr uint32_t kRowPadding = 8;  // halves, so that eight rows' 16 bytes lie in eight banks

// What groups have at most that a launch divides.
struct GroupRoom {
  uint32_t members, leaves;
};
// Of points of 256 channels a multiprocessor's shared memory holds two of the first, or one of the
// second; longer points leave no room for the second.
constexpr GroupRoom kUsualRoom = {176, 32}, kLargeRoom = {336, 64};
constexpr uint32_t kLargeRoomDim = 256;
// Where groups have more than this on average, the second has a launch.
constexpr uint32_t kUsualGroupTokens = 64;
enum class Place { kUsual, kLarge, kGlobal };

// A group that is divided. Arrays lie in shared or in global memory.
struct Group {
  uint32_t members, leaves;
  uint32_t active;         // leaves that have a centroid: without the late ones at first
  uint16_t* assignment;    // [members] leaf
  uint16_t* list;          // [members] by leaf, then by number
  __half* centroids;       // [leaves][stride]
  float* half_norms;       // [leaves] of centroids, half of the squared length
  float* spreads;          // [leaves] sum of squared distances from the centroid
  uint32_t* starts;        // [leaves + 1] in list
  uint32_t* cursors;       // [leaves]
  uint32_t* farthest;      // [leaves] member
  const __half* points;    // [members][stride] in shared memory, else [tokens][stride]
  const uint16_t* tokens;  // of the members; null: points are the members' own
  uint32_t stride;         // of points and of centroids

  __device__ __forceinline__ uint32_t PointNumber(uint32_t member) const {
    return tokens == nullptr ? member : tokens[member];
  }
  __device__ __forceinline__ const __half* Point(uint32_t member) const {
    return points + uint64_t{PointNumber(member)} * stride;
  }
  __device__ __forceinline__ __half* Centroid(uint32_t leaf) const {
    return centroids + uint64_t{leaf} * stride;
  }
};

// The arrays of a group that fits.
template <uint32_t kDim, GroupRoom kRoom>
struct SharedGroup {
  __half points[kRoom.members][kDim + kRowPadding];
  __half centroids[kRoom.leaves][kDim + kRowPadding];
  float half_norms[kRoom.leaves];
  float spreads[kRoom.leaves];
  uint32_t starts[kRoom.leaves + 1];
  uint32_t cursors[kRoom.leaves];
  uint32_t farthest[kRoom.leaves];
  uint16_t assignment[kRoom.members];
  uint16_t list[kRoom.members];
};

// Rows of a warp: leaf or member `row`'s channels of this lane, all kDim of them two at a time.
template <uint32_t kDim, typename Use>
__device__ __forceinline__ void ForPairs(const __half* row, Use use) {
#pragma unroll
  for (uint32_t p = 0; p < kDim / 64; ++p) {
    const uint32_t pair = threadIdx.x % 32 + 32 * p;
    use(p, pair, Fp16::Unpack(reinterpret_cast<const uint32_t*>(row)[pair]));
  }
}

template <uint32_t kDim>
__device__ __forceinline__ void CopyRow(const __half* from, __half* to) {
#pragma unroll
  for (uint32_t p = 0; p < kDim / 64; ++p) {
    const uint32_t pair = threadIdx.x % 32 + 32 * p;
    reinterpret_cast<uint32_t*>(to)[pair] = reinterpret_cast<const uint32_t*>(from)[pair];
  }
}

// The active leaves' norms, a warp each. Leaves no thread behind.
template <uint32_t kDim>
__device__ __forceinline__ void SetNorms(const Group& group) {
  __syncthreads();
  for (uint32_t c = threadIdx.x / 32; c < group.active; c += kWarps) {
    float norm2 = 0;
    ForPairs<kDim>(group.Centroid(c),
                   [&](uint32_t, uint32_t, float2 x) { norm2 += x.x * x.x + x.y * x.y; });
    norm2 = WarpSum(norm2);
    if (threadIdx.x % 32 == 0) group.half_norms[c] = norm2 / 2;
  }
  __syncthreads();
}

// Leaf c of the early ones starts at member floor(c members / early).
template <uint32_t kDim>
__device__ __forceinline__ void Seed(const Group& group) {
  for (uint32_t c = threadIdx.x / 32; c < group.active; c += kWarps) {
    const auto member = static_cast<uint32_t>(uint64_t{c} * group.members / group.active);
    CopyRow<kDim>(group.Point(member), group.Centroid(c));
  }
  SetNorms<kDim>(group);
}

// The scores of 16 members, as A operands, and the 8 leaves from `first` on: those of this lane's
// two rows and two leaves, as MultiplyAdd has them.
template <uint32_t kDim>
__device__ __forceinline__ void ScoreTile(const Group& group, const uint32_t (&a)[kDim / 16][4],
                                          uint32_t first, float (&scores)[4]) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t own = min(first + lane / 4, group.active - 1);
  const auto* row = reinterpret_cast<const uint4*>(group.Centroid(own)) + lane % 4;
  // Two sums, so that a product need not wait for the one before.
  float sums[2][4] = {};
#pragma unroll
  for (uint32_t i = 0; i < kDim / 32; ++i) {
    const uint4 b = row[i * 4];
    MultiplyAdd<Fp16>(sums[0], a[2 * i], b.x, b.y, sums[0]);
    MultiplyAdd<Fp16>(sums[1], a[2 * i + 1], b.z, b.w, sums[1]);
  }
#pragma unroll
  for (uint32_t j = 0; j < 2; ++j) {
    const uint32_t leaf = first + lane % 4 * 2 + j;
    const float bias = leaf < group.active ? -group.half_norms[leaf] : -CUDART_INF_F;
    scores[j] = sums[0][j] + sums[1][j] + bias;
    scores[j + 2] = sums[0][j + 2] + sums[1][j + 2] + bias;
  }
}

// Each member's closest centroid. A warp has 16 members at a time.
template <uint32_t kDim>
__device__ __forceinline__ void Assign(const Group& group) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t base = threadIdx.x / 32 * 16; base < group.members; base += kWarps * 16) {
    uint32_t a[kDim / 16][4];
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
      const uint32_t member = min(base + lane / 4 + 8 * r, group.members - 1);
      const auto* row = reinterpret_cast<const uint4*>(group.Point(member)) + lane % 4;
#pragma unroll
      for (uint32_t i = 0; i < kDim / 32; ++i) {
        const uint4 v = row[i * 4];
        a[2 * i][r] = v.x;
        a[2 * i][r + 2] = v.y;
        a[2 * i + 1][r] = v.z;
        a[2 * i + 1][r + 2] = v.w;
      }
    }
    float best[2] = {-CUDART_INF_F, -CUDART_INF_F};
    uint32_t leaf[2] = {0, 0};
    for (uint32_t first = 0; first < group.active; first += 8) {
      float scores[4];
      ScoreTile<kDim>(group, a, first, scores);
#pragma unroll
      for (uint32_t s = 0; s < 4; ++s) {
        if (scores[s] > best[s / 2]) {
          best[s / 2] = scores[s];
          leaf[s / 2] = first + lane % 4 * 2 + s % 2;
        }
      }
    }
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
      const uint32_t member = base + lane / 4 + 8 * r;
      const uint32_t chosen = BestOfLanes(best[r], leaf[r]);
      if (lane % 4 == 0 && member < group.members) {
        group.assignment[member] = static_cast<uint16_t>(chosen);
      }
    }
  }
  __syncthreads();
}

// Members by leaf; the first warp's work.
__device__ __forceinline__ void Sort(const Group& group) {
  const uint32_t lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    for (uint32_t c = lane; c < group.leaves; c += 32) group.cursors[c] = 0;
    __syncwarp();
    ForTokens(group.assignment, 0, group.members,
              [&](bool valid, uint32_t, uint32_t leaf, uint32_t rank, uint32_t size) {
                if (valid && rank == 0) group.cursors[leaf] += size;
                __syncwarp();
              });
    uint32_t next = 0;
    for (uint32_t base = 0; base < group.leaves; base += 32) {
      const uint32_t c = base + lane;
      const uint32_t size = c < group.leaves ? group.cursors[c] : 0;
      uint32_t prefix = size;
#pragma unroll
      for (uint32_t step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(kAllLanes, prefix, step);
        if (lane >= step) prefix += other;
      }
      if (c < group.leaves) group.starts[c] = group.cursors[c] = next + prefix - size;
      next += __shfl_sync(kAllLanes, prefix, 31);
    }
    if (lane == 0) group.starts[group.leaves] = group.members;
    __syncwarp();
    ForTokens(group.assignment, 0, group.members,
              [&](bool valid, uint32_t member, uint32_t leaf, uint32_t rank, uint32_t size) {
                if (valid) group.list[group.cursors[leaf] + rank] = static_cast<uint16_t>(member);
                __syncwarp();
                if (valid && rank == 0) group.cursors[leaf] += size;
                __syncwarp();
              });
  }
  __syncthreads();
}

// Centroids to their members' means, a warp each. An empty leaf keeps its place.
template <uint32_t kDim>
__device__ __forceinline__ void Move(const Group& group) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t c = threadIdx.x / 32; c < group.active; c += kWarps) {
    const uint32_t begin = group.starts[c], end = group.starts[c + 1];
    if (begin == end) continue;
    float2 sum[kDim / 64] = {};
    for (uint32_t run = begin; run < end; run += 32) {  // as in MoveKernel of the groups
      const uint32_t own = group.PointNumber(group.list[min(run + lane, end - 1)]);
      float2 some[kDim / 64] = {};
#pragma unroll 4
      for (uint32_t i = 0; i < min(32u, end - run); ++i) {
        const uint32_t number = __shfl_sync(kAllLanes, own, i);
        ForPairs<kDim>(group.points + uint64_t{number} * group.stride,
                       [&](uint32_t p, uint32_t, float2 x) {
                         some[p].x += x.x;
                         some[p].y += x.y;
                       });
      }
#pragma unroll
      for (uint32_t p = 0; p < kDim / 64; ++p) {
        sum[p].x += some[p].x;
        sum[p].y += some[p].y;
      }
    }
    const auto size = static_cast<float>(end - begin);
    float norm2 = 0;
#pragma unroll
    for (uint32_t p = 0; p < kDim / 64; ++p) {
      const uint32_t stored = Fp16::Pack(sum[p].x / size, sum[p].y / size);
      reinterpret_cast<uint32_t*>(group.Centroid(c))[lane + 32 * p] = stored;
      const float2 x = Fp16::Unpack(stored);
      norm2 += x.x * x.x + x.y * x.y;
    }
    norm2 = WarpSum(norm2);
    if (lane == 0) group.half_norms[c] = norm2 / 2;
  }
  __syncthreads();
}

// The late leaves, as SpreadKernel and SplitKernel make late groups. Returns the active ones.
template <uint32_t kDim>
__device__ __forceinline__ uint32_t Split(const Group& group) {
  for (uint32_t c = threadIdx.x / 32; c < group.active; c += kWarps) {
    float2 centroid[kDim / 64];
    ForPairs<kDim>(group.Centroid(c), [&](uint32_t p, uint32_t, float2 x) { centroid[p] = x; });
    float squares = 0, greatest = -1;
    uint32_t farthest = 0;
    for (uint32_t place = group.starts[c]; place < group.starts[c + 1]; ++place) {
      const uint32_t member = group.list[place];
      float square = 0;
      ForPairs<kDim>(group.Point(member), [&](uint32_t p, uint32_t, float2 x) {
        const float low = x.x - centroid[p].x, high = x.y - centroid[p].y;
        square += low * low + high * high;
      });
      square = WarpSum(square);
      squares += square;
      if (square > greatest) {
        greatest = square;
        farthest = member;
      }
    }
    if (threadIdx.x % 32 == 0) {
      group.spreads[c] = squares;
      group.farthest[c] = farthest;
    }
  }
  __syncthreads();
  const uint32_t late = group.leaves - group.active;
  uint32_t made = 0;
  for (uint32_t c = threadIdx.x / 32; c < group.active; c += kWarps) {
    const float own = group.spreads[c];
    uint32_t wider = 0;
    for (uint32_t other = threadIdx.x % 32; other < group.active; other += 32) {
      const float spread = group.spreads[other];
      wider += spread > own || (spread == own && other < c);
    }
    wider = WarpSum(wider);
    if (wider >= late || !(own > 0)) continue;
    CopyRow<kDim>(group.Point(group.farthest[c]), group.Centroid(group.active + wider));
    ++made;
  }
  // A warp's leaves were counted by each of its lanes.
  const int leaders = threadIdx.x % 32 == 0 ? static_cast<int>(made) : 0;
  __shared__ int counts[kWarps];
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = leaders;
  __syncthreads();
  uint32_t active = group.active;
  for (uint32_t w = 0; w < kWarps; ++w) active += static_cast<uint32_t>(counts[w]);
  return active;
}

template <uint32_t kDim>
__device__ __forceinline__ void DivideGroup(Group group) {
  Seed<kDim>(group);
  for (uint32_t iteration = 0; iteration < kIndexIterations; ++iteration) {
    if (iteration != 0) {
      Sort(group);
      Move<kDim>(group);
    }
    if (iteration == kIndexIterations / 2 && group.active < group.leaves) {
      group.active = Split<kDim>(group);
      SetNorms<kDim>(group);
    }
    Assign<kDim>(group);
  }
  Sort(group);
}

// Where a group that fits works, its points copied there.
template <uint32_t kDim, GroupRoom kRoom>
__device__ __forceinline__ void PlaceShared(const Head& head, const uint16_t* tokens,
                                            SharedGroup<kDim, kRoom>* shared, Group* group) {
  const __half* points = PointsOf(head);
  for (uint32_t i = threadIdx.x; i < group->members * (kDim / 8); i += kThreads) {
    const uint32_t member = i / (kDim / 8), piece = i % (kDim / 8);
    reinterpret_cast<uint4*>(shared->points[member])[piece] =
        reinterpret_cast<const uint4*>(points + uint64_t{tokens[member]} * kDim)[piece];
  }
  group->points = &shared->points[0][0];
  group->tokens = nullptr;
  group->stride = kDim + kRowPadding;
  group->centroids = &shared->centroids[0][0];
  group->half_norms = shared->half_norms;
  group->spreads = shared->spreads;
  group->starts = shared->starts;
  group->cursors = shared->cursors;
  group->farthest = shared->farthest;
  group->assignment = shared->assignment;
  group->list = shared->list;
  __syncthreads();
}

// Where one that does not fit works. `begin`: its first place in the order.
template <uint32_t kDim>
__device__ __forceinline__ void PlaceGlobal(const Head& head, const TreePlan& plan, uint32_t number,
                                            uint32_t begin, uint32_t first_leaf, Group* group) {
  const uint32_t room = plan.leaves + 8 * plan.base.clusters, first = first_leaf + 8 * number;
  group->points = PointsOf(head);
  group->tokens = head.At<const uint16_t>(plan.base.layout.order) + begin;
  group->stride = kDim;
  group->centroids = head.At<__half>(plan.scratch.large_centroids) + uint64_t{first} * kDim;
  auto* floats = head.At<float>(plan.scratch.large_floats) + first;
  group->half_norms = floats;
  group->spreads = floats + room;
  auto* words = head.At<uint32_t>(plan.scratch.large_words) + first;
  group->starts = words;
  group->cursors = words + room;
  group->farthest = words + 2 * room;
  group->assignment = head.At<uint16_t>(plan.base.layout.assignment) + begin;
  group->list = head.At<uint16_t>(plan.scratch.leaf_of_slot) + begin;
}

template <GroupRoom kRoom>
__device__ __forceinline__ bool Holds(const Group& group) {
  return group.members <= kRoom.members && group.leaves <= kRoom.leaves;
}
// Whether there is a launch for Place::kLarge, of points of `dim` channels.
__host__ __device__ constexpr bool HasLargePlace(const TreePlan& plan, uint32_t dim) {
  return plan.base.tokens > kUsualGroupTokens * plan.base.clusters && dim <= kLargeRoomDim;
}
// Where a group is divided, of points of kDim channels.
template <uint32_t kDim>
__device__ __forceinline__ Place PlaceFor(const TreePlan& plan, const Group& group) {
  if (Holds<kUsualRoom>(group)) return Place::kUsual;
  const bool large = HasLargePlace(plan, kDim) && Holds<kLargeRoom>(group);
  return large ? Place::kLarge : Place::kGlobal;
}

// Thread block b: group b % groups of head b / groups, if it is divided in this place. Leaves the
// order by leaf in IndexPlan's order, whose part for the group no other block reads.
template <uint32_t kDim, Place kOwn>
__global__ void __launch_bounds__(kThreads) LeafKernel(const __grid_constant__ TreePlan plan) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Head head(plan.base, blockIdx.x / plan.base.clusters);
  const uint32_t number = blockIdx.x % plan.base.clusters;
  if (number >= *head.At<const uint32_t>(plan.scratch.group_count)) return;
  const auto* group_starts = head.At<const uint32_t>(plan.scratch.group_starts);
  const auto* leaf_firsts = head.At<const uint32_t>(plan.scratch.leaf_firsts);
  const uint32_t begin = group_starts[number], first_leaf = leaf_firsts[number];
  Group group;
  group.members = group_starts[number + 1] - begin;
  group.leaves = leaf_firsts[number + 1] - first_leaf;
  group.active = group.leaves - LateOf(group.leaves);
  if (PlaceFor<kDim>(plan, group) != kOwn) return;
  uint16_t* order = head.At<uint16_t>(plan.base.layout.order) + begin;
  if constexpr (kOwn != Place::kGlobal) {
    constexpr GroupRoom kRoom = kOwn == Place::kUsual ? kUsualRoom : kLargeRoom;
    using Shared = SharedGroup<kDim, kRoom>;
    PlaceShared<kDim, kRoom>(head, order, reinterpret_cast<Shared*>(shared), &group);
  } else {
    PlaceGlobal<kDim>(head, plan, number, begin, first_leaf, &group);
  }
  DivideGroup<kDim>(group);

  auto* sizes = head.At<uint32_t>(plan.scratch.leaf_sizes) + first_leaf;
  for (uint32_t c = threadIdx.x; c < group.leaves; c += kThreads) {
    sizes[c] = group.starts[c + 1] - group.starts[c];
  }
  // By way of the assignment's place, as the order's old tokens are still to be read.
  uint16_t* sorted = head.At<uint16_t>(plan.base.layout.assignment) + begin;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < group.members; i += kThreads) sorted[i] = order[group.list[i]];
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < group.members; i += kThreads) order[i] = sorted[i];
}

// What the least device has (kSharedBytesMin of cuda_device.cc), with some bytes for counts.
template <typename Shared>
constexpr uint32_t SharedBytesOf() {
  static_assert(sizeof(Shared) + 64 <= (216u << 10));
  return sizeof(Shared);
}

template <uint32_t kDim, Place kOwn>
cudaError_t Launch(const TreePlan& plan, uint32_t shared_bytes, cudaStream_t stream) {
  const cudaError_t error = AllowShared(LeafKernel<kDim, kOwn>, shared_bytes);
  if (error != cudaSuccess) return error;
  LeafKernel<kDim, kOwn>
      <<<plan.base.heads * plan.base.clusters, kThreads, shared_bytes, stream>>>(plan);
  return cudaGetLastError();
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launcher.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchTreeLeaves(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    constexpr uint32_t kDim = kPointDim<decltype(constant)>;
    cudaError_t error = Launch<kDim, Place::kGlobal>(plan, 0, stream);
    if constexpr (kDim <= kLargeRoomDim) {
      constexpr uint32_t kBytes = SharedBytesOf<SharedGroup<kDim, kLargeRoom>>();
      if (error == cudaSuccess && HasLargePlace(plan, kDim)) {
        error = Launch<kDim, Place::kLarge>(plan, kBytes, stream);
      }
    }
    constexpr uint32_t kBytes = SharedBytesOf<SharedGroup<kDim, kUsualRoom>>();
    return error == cudaSuccess ? Launch<kDim, Place::kUsual>(plan, kBytes, stream) : error;
  });
}

}  // namespace attnd::gpu::cuda
