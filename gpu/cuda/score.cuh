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

struct ScoreMemory {
  Totals totals[2][kScoreWarps][kLanes];  // of the mass, of the optimistic mass
};

// Products of one warp's clusters with one tile: dot[n][c] for cluster 8 n + 2t + c, lane g.
template <typename T, int kDim>
struct ClusterProducts {
  uint4 centroids[kWarpClusters / 8][kDim / 32];
  uint2 codes[kWarpClusters / 8][kDim / 64];

  // Clusters from `first` on; those at `count` and beyond stand for the last one.
  __device__ __forceinline__ void Load(const IndexPlace& index, uint32_t first, uint32_t count,
                                       bool second_order) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kWarpClusters / 8; ++n) {
      const uint32_t cluster = min(first + n * 8 + g, count - 1);
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

// Scores kWarpClusters clusters from `first` on for one tile: writes log_mass and d2 from `slot` on,
// adds to totals (of the mass, of the optimistic mass).
template <typename T, int kDim>
__device__ __forceinline__ void ScoreClusters(const StepHeader& step, const UnitPlace& unit,
                                              uint32_t tile, const IndexPlace& index, uint32_t slot,
                                              uint32_t first, uint32_t count, Totals (&totals)[2]) {
  constexpr int kColumns = kWarpClusters / 8;
  const RowRef& row = *unit.row;
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const bool second_order = row.second_order != 0;
  const uint64_t tile_number = uint64_t{unit.unit} * step.tiles_max + tile;
  const uint32_t* fragments = step.query_fragments + tile_number * TileFragmentWords(kDim);
  const float* factors = reinterpret_cast<const float*>(fragments + 2 * FragmentWords(kDim));
  float dot[kColumns][4] = {}, variance[kColumns][4] = {};
  if (first < count) {
    ClusterProducts<T, kDim> products;
    products.Load(index, first, count, second_order);
    products.Dot(fragments, dot);
    if (second_order) products.Variance(fragments, variance);
  }

  const uint32_t lane = tile * kLanes + g;
  float* log_mass = UnitScores(step, unit) + uint64_t{lane} * row.slots + slot;
  float* d2 = log_mass + uint64_t{step.group} * row.slots;
  float mass[kColumns * 2], optimistic[kColumns * 2];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    float v[2] = {0, 0};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t cluster = first + n * 8 + 2 * t + c;
      float x = -INFINITY, best = -INFINITY;
      if (cluster < count) {
        x = factors[g] * (dot[n][c] + dot[n][c + 2]) +
            kLog2E * index.part<float>(index.segment->log_size)[cluster];
        if (second_order) {
          v[c] = factors[kLanes + g] * (variance[n][c] + variance[n][c + 2]) *
                 index.part<float>(index.segment->variance_unit)[cluster];
          best = x + 2 * kLog2E * sqrtf(v[c]);
          x += kLog2E / 2 * fminf(v[c], kVarianceCap);
        }
      }
      mass[n * 2 + c] = x;
      optimistic[n * 2 + c] = best;
    }
    if (lane >= step.group) continue;
    const uint32_t at = n * 8 + 2 * t;
    *reinterpret_cast<float2*>(log_mass + at) = make_float2(mass[n * 2], mass[n * 2 + 1]);
    if (second_order) *reinterpret_cast<float2*>(d2 + at) = make_float2(v[0], v[1]);
  }
  totals[0].Add(mass);
  totals[1].Add(optimistic);
}

// Item `item` of the row's score items.
template <typename T, int kDim>
__device__ void ScoreItem(const StepHeader& step, const RowRef* row, uint32_t item,
                          ScoreMemory* memory) {
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint32_t chunks = row->slots / kSlotChunk;
  const UnitPlace unit(step, row, item / chunks);
  const uint32_t chunk = item % chunks * kSlotChunk;
  const uint32_t s = SegmentOfSlot(step, *row, chunk);
  const IndexPlace index(step, *row, s, unit.kv_head);
  const uint32_t count = index.clusters();
  float* partials = step.score_partials +
                    (uint64_t{row->first_score_item} + item) * step.tiles_max * (kLanes * 4);
  for (uint32_t tile = 0; tile < step.tiles_max; ++tile) {
    Totals totals[2] = {{-INFINITY, 0}, {-INFINITY, 0}};
#pragma unroll 1
    for (uint32_t i = 0; i < kSlotChunk; i += kScoreWarps * kWarpClusters) {
      const uint32_t slot = chunk + i + warp * kWarpClusters;
      ScoreClusters<T, kDim>(step, unit, tile, index, slot, slot - index.segment->first_slot, count,
                             totals);
    }
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
      float* to = partials + ((tile * kLanes + lane) * 2 + kind) * 2;
      to[0] = max;
      to[1] = sum;
    }
    __syncthreads();
  }
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_SCORE_CUH_
