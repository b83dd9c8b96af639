// SPDX-License-Identifier: Apache-2.0
//
// Scores of the clusters of one item: kSlotChunk slots of one segment, for all tiles of a unit.
#ifndef ATTND_GPU_CUDA_STEP_SCORE_CUH_
#define ATTND_GPU_CUDA_STEP_SCORE_CUH_

#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/chunk_feed.cuh"
#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/rows.cuh"

namespace attnd::gpu {

inline constexpr uint32_t kScoreWarps = 4;
// What a warp scores at once; more would not fit its registers.
inline constexpr uint32_t kWarpClusters = kStepSlots;
inline constexpr float kVarianceMax = 1e32f;  // so that what is made of it stays a number
using attention::kVarianceCap;

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

// kWarpClusters clusters in shared memory, in a warp's ring: centroids, codes, sizes and units.
template <int kDim>
struct ClusterBuffer {
  static constexpr uint32_t kKeyBytes = kDim * 2;
  static constexpr uint32_t kCodeBytes = kDim / 2;
  static constexpr uint32_t kCodes = kWarpClusters * kKeyBytes;
  static constexpr uint32_t kSizes = kCodes + kWarpClusters * kCodeBytes;
  static constexpr uint32_t kUnits = kSizes + kWarpClusters * 4;
  static constexpr uint32_t kBytes = kUnits + kWarpClusters * 4;
};

// Asks for a chunk's clusters, a step at a time. Of those that the head does not have comes what
// lies there, or the last; nobody looks at what comes of them.
template <int kDim>
class ClusterCopier {
 public:
  using Buffer = ClusterBuffer<kDim>;

  __device__ __forceinline__ explicit ClusterCopier(const ChunkRef& chunk) { Begin(chunk); }
  __device__ __forceinline__ void Begin(const ChunkRef& chunk) {
    const uint32_t thread = threadIdx.x % 32;
    keys_ = chunk.head + chunk.offsets.centroids + uint64_t{chunk.first} * Buffer::kKeyBytes;
    codes_ =
        chunk.head + chunk.offsets.deviation_codes + uint64_t{chunk.first} * Buffer::kCodeBytes;
    parts_ = chunk.head + (thread < 4 ? chunk.offsets.log_size : chunk.offsets.variance_unit) +
             uint64_t{chunk.first} * 4;
    // Slots are padded, so the last ones may lie beyond the index.
    rows_ = max(chunk.max_clusters, chunk.first) - chunk.first;
    steps_ = chunk.steps;
    second_order_ = chunk.second_order != 0;
  }
  __device__ __forceinline__ bool done() const { return steps_ == 0; }

  __device__ __forceinline__ void Copy(uint32_t to) {
    const uint32_t thread = threadIdx.x % 32;
    if (rows_ > 0) {
      CopyRun<Buffer::kKeyBytes, KeyChunk<Buffer::kKeyBytes>>(to, keys_, rows_);
      if (second_order_) {
        CopyRun<Buffer::kCodeBytes, PlainChunk<Buffer::kCodeBytes>>(to + Buffer::kCodes, codes_,
                                                                    rows_);
      }
      // Parts are 64-byte aligned, and so have room for a multiple of four.
      if (thread < 8) {
        CopyAsync16(SharedAddress(to + Buffer::kSizes + thread * 16),
                    parts_ + min(thread % 4, (rows_ - 1) / 4) * 16);
      }
    }
    keys_ += kWarpClusters * Buffer::kKeyBytes;
    codes_ += kWarpClusters * Buffer::kCodeBytes;
    parts_ += kWarpClusters * 4;
    rows_ -= min(rows_, kWarpClusters);
    --steps_;
  }

 private:
  const std::byte* keys_;
  const std::byte* codes_;
  const std::byte* parts_;  // of this thread's kind
  uint32_t rows_;
  uint32_t steps_;
  bool second_order_;
};

template <typename T, int kDim>
__device__ __forceinline__ void SumVariances(uint32_t buffer, const uint32_t* fragments,
                                             float (&sum)[kWarpClusters / 8][4]) {
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint4* q =
      reinterpret_cast<const uint4*>(fragments + FragmentWords(kDim)) + threadIdx.x % 32;
#pragma unroll
  for (int pair = 0; pair < kDim / 64; ++pair) {  // of code words
    uint2 codes[kWarpClusters / 8];
#pragma unroll
    for (int n = 0; n < kWarpClusters / 8; ++n) {
      codes[n] = LoadShared8(buffer + ClusterBuffer<kDim>::kCodes + (n * 8 + g) * (kDim / 2) +
                             t * (kDim / 8) + pair * 8);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 q0 = q[(pair * 4 + i) * 32];
      const uint32_t a[4] = {q0.x, q0.y, q0.z, q0.w};
#pragma unroll
      for (int n = 0; n < kWarpClusters / 8; ++n) {
        const uint32_t word = (i < 2 ? codes[n].x : codes[n].y) >> i % 2 * 8;
        MultiplyAdd<T>(sum[n], a, CodeSquares<T>(word), CodeSquares<T>(word >> 4));
      }
    }
  }
}

// Where the scores of the tile's lane g go, and what they are made with.
struct LaneScores {
  float* log_mass;  // of the first cluster
  float* d2;
  float logit_factor;
  float variance_factor;
  bool used;
  bool second_order;
};

// Scores a buffer's clusters, from cluster `first` of the head on: writes log_mass and d2, adds to
// totals (of the mass, of the optimistic mass).
template <typename T, int kDim>
__device__ __forceinline__ void ScoreClusters(const LaneScores& lane, uint32_t buffer,
                                              uint32_t first, uint32_t count,
                                              const uint32_t* fragments, Totals (&totals)[2]) {
  using Buffer = ClusterBuffer<kDim>;
  constexpr int kColumns = kWarpClusters / 8;
  const uint32_t t = threadIdx.x % 4;
  float dot[kColumns][4] = {}, variance[kColumns][4] = {};
  DotRows<T, kDim, KeyChunk<kDim * 2>>(buffer, fragments, dot);
  if (lane.second_order) SumVariances<T, kDim>(buffer, fragments, variance);

  float mass[kColumns * 2], optimistic[kColumns * 2];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const uint32_t at = n * 8 + 2 * t;
    float d2[2] = {0, 0};
    const uint2 size_bits = LoadShared8(buffer + Buffer::kSizes + at * 4);
    const uint2 unit_bits = LoadShared8(buffer + Buffer::kUnits + at * 4);
    const float sizes[2] = {__uint_as_float(size_bits.x), __uint_as_float(size_bits.y)};
    const float units[2] = {__uint_as_float(unit_bits.x), __uint_as_float(unit_bits.y)};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float x = lane.logit_factor * (dot[n][c] + dot[n][c + 2]) + kLog2E * sizes[c];
      float best = -INFINITY;
      if (lane.second_order) {
        d2[c] = lane.variance_factor * (variance[n][c] + variance[n][c + 2]) * units[c];
        d2[c] = fminf(d2[c], kVarianceMax);
        best = x + 2 * kLog2E * Sqrt(d2[c]);
        x += kLog2E / 2 * fminf(d2[c], kVarianceCap);
      }
      const bool cluster = first + at + c < count;
      mass[n * 2 + c] = cluster ? x : -INFINITY;
      optimistic[n * 2 + c] = cluster ? best : -INFINITY;
    }
    if (!lane.used) continue;
    *reinterpret_cast<float2*>(lane.log_mass + at) = make_float2(mass[n * 2], mass[n * 2 + 1]);
    if (lane.second_order) {
      *reinterpret_cast<float2*>(lane.d2 + at) = make_float2(d2[0], d2[1]);
    }
  }
  totals[0].Add(mass);
  if (lane.second_order) totals[1].Add(optimistic);
}

// Buffers of a warp's ring.
inline constexpr uint32_t kScoreBuffers = 3;
template <int kDim>
inline constexpr uint32_t kScoreWarpBytes =
    kScoreBuffers* ClusterBuffer<kDim>::kBytes + ChunkFeed::kSharedBytes;

// What a tile's scores of a chunk are made with.
template <int kDim>
__device__ __forceinline__ LaneScores LaneOfChunk(const StepHeader& step, const ChunkRef& chunk,
                                                  uint32_t tile, const uint32_t* fragments) {
  const uint32_t g = threadIdx.x % 32 / 4;
  const float* factors = reinterpret_cast<const float*>(fragments + 2 * FragmentWords(kDim));
  LaneScores lane;
  lane.log_mass = chunk.scores + (uint64_t{tile} * kLanes + g) * chunk.slots;
  lane.d2 = lane.log_mass + uint64_t{step.group} * chunk.slots;
  lane.logit_factor = factors[g];
  lane.variance_factor = factors[kLanes + g];
  lane.used = tile * kLanes + g < step.group;
  lane.second_order = chunk.second_order != 0;
  return lane;
}

__device__ __forceinline__ void StoreTotals(Totals (&totals)[2], float* partials) {
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (uint32_t kind = 0; kind < 2; ++kind) {
    totals[kind].Join();
    if (t == 0) {
      *reinterpret_cast<float2*>(partials + (g * 2 + kind) * 2) =
          make_float2(totals[kind].max, totals[kind].sum);
    }
  }
}

// What becomes of a chunk's totals: the score stage stores them, a warp of a thread block cluster
// adds them up.
struct StoreEach {
  const StepHeader& step;
  uint32_t tile;
  template <typename Feed>
  __device__ __forceinline__ void operator()(const Feed& feed, Totals (&totals)[2]) const {
    StoreTotals(totals, step.score_partials +
                            (uint64_t{feed.item()} * step.tiles_max + tile) * (kLanes * 4));
    totals[0] = totals[1] = {-INFINITY, 0};
  }
};
struct KeepAll {
  template <typename Feed>
  __device__ __forceinline__ void operator()(const Feed&, Totals (&)[2]) const {}
};

// One warp scores the feed's chunks for one tile. Warps share nothing, so none waits. fragments_of:
// a chunk's queries. ring: of kBuffers buffers.
template <typename T, int kDim, int kBuffers, typename Feed, typename FragmentsOf, typename Finish>
__device__ __forceinline__ void ScoreChunks(const StepHeader& step, Feed feed, uint32_t tile,
                                            uint32_t ring, FragmentsOf fragments_of, Finish finish,
                                            Totals (&totals)[2]) {
  constexpr uint32_t kBufferBytes = ClusterBuffer<kDim>::kBytes;
  constexpr uint32_t kAhead = kBuffers - 1;  // no chunk has fewer steps
  if (feed.done()) return;
  ClusterCopier<kDim> copier(feed.now());
  uint32_t buffer = 0;
#pragma unroll
  for (uint32_t i = 0; i < kAhead; ++i) {
    copier.Copy(ring + i * kBufferBytes);
    CommitCopies();
  }
  for (; !feed.done(); feed.Advance()) {
    const ChunkRef& chunk = feed.now();
    const uint32_t* fragments = fragments_of(chunk);
    LaneScores lane = LaneOfChunk<kDim>(step, chunk, tile, fragments);
    const uint32_t count = chunk.clusters, steps = chunk.steps;
    uint32_t first = chunk.first;
    feed.FetchAhead();
#pragma unroll 1
    for (uint32_t i = 0; i < steps; ++i) {
      if (copier.done() && feed.has_next()) copier.Begin(feed.next());
      if (!copier.done()) copier.Copy(ring + (buffer + kAhead) % kBuffers * kBufferBytes);
      CommitCopies();
      WaitCopies<kAhead>();
      __syncwarp();
      ScoreClusters<T, kDim>(lane, ring + buffer * kBufferBytes, first, count, fragments, totals);
      __syncwarp();
      lane.log_mass += kWarpClusters;
      lane.d2 += kWarpClusters;
      first += kWarpClusters;
      buffer = (buffer + 1) % kBuffers;
    }
    finish(feed, totals);
  }
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_SCORE_CUH_
