// SPDX-License-Identifier: Apache-2.0
//
// Scores of the clusters of one item: kSlotChunk slots of one segment, for all tiles of a unit.
#ifndef ATTND_GPU_CUDA_SCORE_CUH_
#define ATTND_GPU_CUDA_SCORE_CUH_

#include <cstdint>

#include "gpu/cuda/matrix.cuh"
#include "gpu/cuda/place.cuh"

namespace attnd::gpu {

inline constexpr uint32_t kScoreWarps = 4;
// What a warp scores at once; more would not fit its registers.
inline constexpr uint32_t kWarpClusters = 16;
inline constexpr float kVarianceCap = 8.0f;  // docs/POLICIES.md: d2 is capped before it is used

// The greatest of some logarithms, and the sum of exp2(x - greatest); of lane g, partial over t.
struct Totals {
  float max;
  float sum;

  template <int kCount>
  __device__ __forceinline__ void Add(const float (&x)[kCount]) {
    float greatest = max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) greatest = fmaxf(greatest, x[i]);
    sum *= Weight(max, greatest);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += Weight(x[i], greatest);
    max = greatest;
  }
  // Over the threads that share g.
  __device__ __forceinline__ void Join() {
    const float greatest = MaxOverT(max);
    sum = SumOverT(sum * Weight(max, greatest));
    max = greatest;
  }
};

// Products of one warp's clusters with one tile: dot[n][c] for cluster 8 n + 2t + c, lane g.
template <typename T, int kDim>
struct ClusterProducts {
  uint4 centroids[kWarpClusters / 8][kDim / 32];
  uint2 codes[kWarpClusters / 8][kDim / 64];

  // Clusters from `first` on. Those that the head does not have hold anything; nobody looks at what
  // comes of them.
  __device__ __forceinline__ void Load(const IndexPlace& index, uint32_t first, bool second_order) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kWarpClusters / 8; ++n) {
      const uint32_t cluster = min(first + n * 8 + g, index.segment->max_clusters - 1);
      const std::byte* row =
          index.head + index.segment->centroids + uint64_t{cluster} * (kDim * 2) + t * 16;
#pragma unroll
      for (int block = 0; block < kDim / 32; ++block) {
        centroids[n][block] = LoadStream16(row + block * 64);
      }
      if (!second_order) continue;
      const std::byte* code = index.head + index.segment->deviation_codes +
                              uint64_t{cluster} * (kDim / 2) + t * (kDim / 8);
#pragma unroll
      for (int i = 0; i < kDim / 64; ++i) codes[n][i] = LoadStream8(code + i * 8);
    }
  }

  __device__ __forceinline__ void Dot(const uint32_t* fragments,
                                      float (&dot)[kWarpClusters / 8][4]) const {
    const uint4* q = reinterpret_cast<const uint4*>(fragments) + threadIdx.x % 32 * 2;
#pragma unroll
    for (int block = 0; block < kDim / 32; ++block) {
      const uint4 q0 = q[block * 64], q1 = q[block * 64 + 1];
      const uint32_t a0[4] = {q0.x, q0.y, q0.z, q0.w};
      const uint32_t a1[4] = {q1.x, q1.y, q1.z, q1.w};
#pragma unroll
      for (int n = 0; n < kWarpClusters / 8; ++n) {
        MultiplyAdd<T>(dot[n], a0, centroids[n][block].x, centroids[n][block].y);
        MultiplyAdd<T>(dot[n], a1, centroids[n][block].z, centroids[n][block].w);
      }
    }
  }

  __device__ __forceinline__ void Variance(const uint32_t* fragments,
                                           float (&sum)[kWarpClusters / 8][4]) const {
    const uint4* q =
        reinterpret_cast<const uint4*>(fragments + FragmentWords(kDim)) + threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kDim / 16; ++m) {
      const uint4 q0 = q[m * 32];
      const uint32_t a[4] = {q0.x, q0.y, q0.z, q0.w};
#pragma unroll
      for (int n = 0; n < kWarpClusters / 8; ++n) {
        const uint2 pair = codes[n][m / 4];
        const uint32_t word = (m / 2 % 2 == 0 ? pair.x : pair.y) >> (m % 2 * 8);
        MultiplyAdd<T>(sum[n], a, CodeSquares<T>(word), CodeSquares<T>(word >> 4));
      }
    }
  }
};

// A unit's tile in shared memory: its fragments are read again for every cluster.
template <int kDim>
struct ScoreMemory {
  Totals totals[2][kScoreWarps][kLanes];  // of the mass, of the optimistic mass
  __align__(16) uint32_t fragments[TileFragmentWords(kDim)];
};

// Where the scores of the tile's lane g go, and what they are made with.
struct LaneScores {
  float* log_mass;  // [slots]
  float* d2;        // [slots]
  float logit_factor;
  float variance_factor;
  bool used;
  bool second_order;
};

// Scores kWarpClusters clusters from `first` on: writes log_mass and d2 from `slot` on, adds to
// totals (of the mass, of the optimistic mass).
template <typename T, int kDim>
__device__ __forceinline__ void ScoreClusters(const LaneScores& lane, const IndexPlace& index,
                                              uint32_t slot, uint32_t first, uint32_t count,
                                              const uint32_t* fragments, Totals (&totals)[2]) {
  constexpr int kColumns = kWarpClusters / 8;
  const uint32_t t = threadIdx.x % 4;
  // Everything that comes from memory is asked for before anything waits.
  ClusterProducts<T, kDim> products;
  products.Load(index, first, lane.second_order);
  float2 log_size[kColumns], unit[kColumns];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    // Parts are 64-byte aligned, and so have room for an even number.
    const uint32_t c = min(first + n * 8 + 2 * t, (index.segment->max_clusters - 1) / 2 * 2);
    log_size[n] = *reinterpret_cast<const float2*>(index.part<float>(index.segment->log_size) + c);
    unit[n] =
        *reinterpret_cast<const float2*>(index.part<float>(index.segment->variance_unit) + c);
  }
  float dot[kColumns][4] = {}, variance[kColumns][4] = {};
  products.Dot(fragments, dot);
  if (lane.second_order) products.Variance(fragments, variance);

  float mass[kColumns * 2], optimistic[kColumns * 2];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const uint32_t at = n * 8 + 2 * t;
    float d2[2] = {0, 0};
    const float sizes[2] = {log_size[n].x, log_size[n].y}, units[2] = {unit[n].x, unit[n].y};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float x = lane.logit_factor * (dot[n][c] + dot[n][c + 2]) + kLog2E * sizes[c];
      float best = -INFINITY;
      if (lane.second_order) {
        d2[c] = lane.variance_factor * (variance[n][c] + variance[n][c + 2]) * units[c];
        best = x + 2 * kLog2E * sqrtf(d2[c]);
        x += kLog2E / 2 * fminf(d2[c], kVarianceCap);
      }
      const bool cluster = first + at + c < count;
      mass[n * 2 + c] = cluster ? x : -INFINITY;
      optimistic[n * 2 + c] = cluster ? best : -INFINITY;
    }
    if (!lane.used) continue;
    *reinterpret_cast<float2*>(lane.log_mass + slot + at) =
        make_float2(mass[n * 2], mass[n * 2 + 1]);
    if (lane.second_order) {
      *reinterpret_cast<float2*>(lane.d2 + slot + at) = make_float2(d2[0], d2[1]);
    }
  }
  totals[0].Add(mass);
  if (lane.second_order) totals[1].Add(optimistic);
}

// Writes the block's totals of one chunk and tile.
template <int kDim>
__device__ __forceinline__ void StoreTotals(Totals (&totals)[2], ScoreMemory<kDim>* memory,
                                            float* partials) {
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (uint32_t kind = 0; kind < 2; ++kind) {
    totals[kind].Join();
    if (t == 0) memory->totals[kind][warp][g] = totals[kind];
  }
  __syncthreads();
  if (threadIdx.x < 2 * kLanes) {
    const uint32_t kind = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    float max = -INFINITY, sum = 0;
    for (uint32_t w = 0; w < kScoreWarps; ++w) max = fmaxf(max, memory->totals[kind][w][lane].max);
    for (uint32_t w = 0; w < kScoreWarps; ++w) {
      const Totals& part = memory->totals[kind][w][lane];
      sum += part.sum * Weight(part.max, max);
    }
    *reinterpret_cast<float2*>(partials + (lane * 2 + kind) * 2) = make_float2(max, sum);
  }
  __syncthreads();
}

// Items [begin, end) of those of one unit's tile that start at item `first_item`.
template <typename T, int kDim>
__device__ void ScoreChunks(const StepHeader& step, const UnitPlace& unit, uint32_t tile,
                            uint32_t first_item, uint32_t begin, uint32_t end,
                            ScoreMemory<kDim>* memory) {
  const RowRef& row = *unit.row;
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const uint64_t tile_number = uint64_t{unit.unit} * step.tiles_max + tile;
  const uint4* from = reinterpret_cast<const uint4*>(step.query_fragments +
                                                     tile_number * TileFragmentWords(kDim));
  for (uint32_t i = threadIdx.x; i < TileFragmentWords(kDim) / 4; i += kScoreWarps * 32) {
    reinterpret_cast<uint4*>(memory->fragments)[i] = from[i];
  }
  __syncthreads();
  const float* factors =
      reinterpret_cast<const float*>(memory->fragments + 2 * FragmentWords(kDim));
  LaneScores lane;
  lane.log_mass = UnitScores(step, unit) + (uint64_t{tile} * kLanes + g) * row.slots;
  lane.d2 = lane.log_mass + uint64_t{step.group} * row.slots;
  lane.logit_factor = factors[g];
  lane.variance_factor = factors[kLanes + g];
  lane.used = tile * kLanes + g < step.group;
  lane.second_order = row.second_order != 0;

  const SegmentRef* segments = step.segments + row.segments_begin;
  uint32_t s = SegmentOfSlot(step, row, (begin - first_item) * kSlotChunk);
  for (uint32_t item = begin; item < end; ++item) {
    const uint32_t chunk = (item - first_item) * kSlotChunk;
    while (chunk >= segments[s].first_slot + segments[s].slots) ++s;
    const IndexPlace index(step, row, s, unit.kv_head);
    const uint32_t count = index.clusters();
    Totals totals[2] = {{-INFINITY, 0}, {-INFINITY, 0}};
#pragma unroll 1
    for (uint32_t i = warp * kWarpClusters; i < kSlotChunk; i += kScoreWarps * kWarpClusters) {
      const uint32_t slot = chunk + i;
      ScoreClusters<T, kDim>(lane, index, slot, slot - segments[s].first_slot, count,
                             memory->fragments, totals);
    }
    StoreTotals<kDim>(totals, memory,
                      step.score_partials +
                          (uint64_t{item} * step.tiles_max + tile) * (kLanes * 4));
  }
}

// Score items [begin, end) of the step.
template <typename T, int kDim>
__device__ void ScoreItems(const StepHeader& step, uint32_t begin, uint32_t end,
                           ScoreMemory<kDim>* memory) {
  while (begin < end) {
    const RowRef* row = step.row_refs + LastNotAfter(step.rows, begin, [&](uint32_t i) {
                          return step.row_refs[i].first_score_item;
                        });
    const uint32_t chunks = row->slots / kSlotChunk;
    const UnitPlace unit(step, row, (begin - row->first_score_item) / chunks);
    const uint32_t first = row->first_score_item + unit.in_row * chunks;
    const uint32_t last = min(end, first + chunks);
    for (uint32_t tile = 0; tile < step.tiles_max; ++tile) {
      ScoreChunks<T, kDim>(step, unit, tile, first, begin, last, memory);
    }
    begin = last;
  }
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_SCORE_CUH_
