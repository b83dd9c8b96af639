// SPDX-License-Identifier: Apache-2.0
//
// The estimate over one piece of clusters, for one tile of queries: a softmax state whose weights
// are the clusters' masses and whose values are their mean values, with the sums that errors are
// told from.
#ifndef ATTND_GPU_CUDA_STEP_ESTIMATE_CUH_
#define ATTND_GPU_CUDA_STEP_ESTIMATE_CUH_

#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/attend.cuh"
#include "gpu/cuda/step/chunk_feed.cuh"
#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/rows.cuh"

namespace attnd::gpu {

// e^x - 1 for x in [0, 8], to some 1e-6 of it.
__device__ __forceinline__ float Expm1(float x) {
  const float series =
      x * (1 + x * (1.0f / 2 + x * (1.0f / 6 + x * (1.0f / 24 + x * (1.0f / 120)))));
  return x < 0.1f ? series : Exp2(x * kLog2E) - 1;
}

// What a tile's estimate is made from.
struct EstimateSource {
  uint32_t lane;  // of the group
  uint32_t group;
  float max;  // of lane g's weights
  bool used;  // whether lane g is a query head
  bool all;   // every cluster, whatever became of it
};

// What lane g needs of clusters 4t .. 4t + 3 of 16: a product may take its tokens in any order, so
// a thread's are neighbours.
struct ClusterInputs {
  float4 log_mass, d2, norm2, spread;
  uint32_t fates;  // a byte each
};

// As the order of a product's rows is that of ClusterInputs: rows 0, 1, 4, 5, 8, ... are read at a
// time, then the others.
template <int kRowBytes>
__device__ __forceinline__ uint32_t MeanChunk(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + (chunk ^ (row / 4 * 2 + row % 2)) * 16;
}

// A step of 16 clusters in shared memory, in a warp's ring: mean values and inputs.
template <int kValueDim>
struct EstimateBuffer {
  static constexpr uint32_t kRowBytes = kValueDim * 2;
  static constexpr uint32_t kLogMass = kStepSlots * kRowBytes;  // [lanes][clusters]
  static constexpr uint32_t kD2 = kLogMass + kLanes * kStepSlots * 4;
  static constexpr uint32_t kNorm2 = kD2 + kLanes * kStepSlots * 4;
  static constexpr uint32_t kSpread = kNorm2 + kStepSlots * 4;
  static constexpr uint32_t kFates = kSpread + kStepSlots * 4;
  static constexpr uint32_t kBytes = kFates + kStepSlots;
};

// Asks for a chunk's mean values and inputs, a step at a time. A thread's copies of scores are its
// own; see LoadInputs.
template <int kValueDim>
class EstimateCopier {
 public:
  using Buffer = EstimateBuffer<kValueDim>;

  __device__ __forceinline__ EstimateCopier(const EstimateSource& source, const ChunkRef& chunk)
      : source_(source) {
    Begin(chunk);
  }
  __device__ __forceinline__ void Begin(const ChunkRef& chunk) {
    const uint32_t thread = threadIdx.x % 32, quarter = thread % 4;
    values_ = chunk.head + chunk.offsets.mean_values + uint64_t{chunk.first} * Buffer::kRowBytes;
    const uint32_t part = thread < 4 ? chunk.offsets.value_norm2 : chunk.offsets.spread;
    parts_ = chunk.head + part + uint64_t{chunk.first} * 4;
    log_mass_ = chunk.scores + uint64_t{source_.lane} * chunk.slots + quarter * 4;
    d2_ = log_mass_ + uint64_t{source_.group} * chunk.slots;
    fates_ = chunk.fates;
    rows_ = max(chunk.clusters, chunk.first) - chunk.first;
    steps_ = chunk.steps;
    second_order_ = chunk.second_order != 0;
  }
  __device__ __forceinline__ bool done() const { return steps_ == 0; }

  __device__ __forceinline__ void Copy(uint32_t to) {
    const uint32_t thread = threadIdx.x % 32, at = thread * 16;  // (g, t) of [lanes][clusters]
    if (source_.used) {
      CopyTo(to + Buffer::kLogMass + at, log_mass_);
      if (second_order_) CopyTo(to + Buffer::kD2 + at, d2_);
    }
    // Slots without a cluster weigh 0, but 0 times what nobody wrote may be NaN: the last cluster
    // stands for them, or what a step before left. Parts have room for a multiple of four.
    if (rows_ > 0) {
      if (thread < 8)
        CopyTo(to + Buffer::kNorm2 + at, parts_ + min(thread % 4, (rows_ - 1) / 4) * 16);
      CopyRun<Buffer::kRowBytes, MeanChunk<Buffer::kRowBytes>>(to, values_, rows_);
    } else {
      ClearRows(to);
    }
    if (thread == 8) CopyTo(to + Buffer::kFates, fates_);
    values_ += kStepSlots * Buffer::kRowBytes;
    parts_ += kStepSlots * 4;
    log_mass_ += kStepSlots;
    d2_ += kStepSlots;
    fates_ += kStepSlots;
    rows_ -= min(rows_, kStepSlots);
    --steps_;
  }

 private:
  static __device__ __forceinline__ void CopyTo(uint32_t place, const void* from) {
    CopyAsync16(SharedAddress(place), static_cast<const std::byte*>(from));
  }
  static __device__ __forceinline__ void ClearRows(uint32_t to) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x % 32 * 16; i < kStepSlots * Buffer::kRowBytes; i += 512) {
      *reinterpret_cast<uint4*>(block_memory + to + i) = make_uint4(0, 0, 0, 0);
    }
  }
  const EstimateSource& source_;
  const std::byte* values_;
  const std::byte* parts_;  // of this thread's kind
  const float* log_mass_;
  const float* d2_;
  const uint8_t* fates_;
  uint32_t rows_;
  uint32_t steps_;
  bool second_order_;
};

template <int kValueDim>
__device__ __forceinline__ ClusterInputs LoadInputs(const EstimateSource& source, bool second_order,
                                                    uint32_t from) {
  using Buffer = EstimateBuffer<kValueDim>;
  const uint32_t thread = threadIdx.x % 32, t = thread % 4;
  const auto load = [&](uint32_t place) {
    const uint4 bits = LoadShared16(from + place);
    return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                       __uint_as_float(bits.w));
  };
  ClusterInputs in;
  in.log_mass = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
  in.d2 = in.norm2 = in.spread = make_float4(0, 0, 0, 0);
  in.fates = LoadShared4(from + Buffer::kFates + t * 4);
  if (!source.used) return in;
  in.log_mass = load(Buffer::kLogMass + thread * 16);
  if (!second_order) return in;
  in.d2 = load(Buffer::kD2 + thread * 16);
  in.norm2 = load(Buffer::kNorm2 + t * 16);
  in.spread = load(Buffer::kSpread + t * 16);
  return in;
}

// Weights of estimates are relative to the row's greatest cluster: fp16 would lose those below
// 2^-25, many of which add up; so they are held at a greater scale. At most 1 each, they have room.
template <typename T>
inline constexpr float kEstimateScale = 1.0f;
template <>
inline constexpr float kEstimateScale<__half> = 16384.0f;

// A warp's weights of 16 clusters, as the right side of products; adds to the sums.
template <typename T>
__device__ __forceinline__ void EstimateWeights(const EstimateSource& source, bool second_order,
                                                const ClusterInputs& in, float* sum,
                                                EstimateSums* sums, WeightFragment* weights) {
  const auto add = [&](float log_mass, uint32_t fate, float norm2, float spread, float d2) {
    const float weight = Weight(log_mass, source.max);
    const bool cluster = weight != 0;  // of empty slots the other numbers may be anything
    const bool estimated = source.all || fate == kFateEstimated;
    sums->dropped += estimated || fate == kFateExact ? 0.0f : weight;
    if (second_order) {
      const float error = weight * spread;
      const float error2 = error * error * Expm1(fminf(d2, attention::kVarianceCap));
      sums->moments += cluster ? weight * norm2 : 0.0f;
      sums->errors += cluster && estimated ? error2 : 0.0f;
    }
    return estimated ? weight : 0.0f;
  };
  const float p[2][2] = {
      {add(in.log_mass.x, in.fates & 0xFF, in.norm2.x, in.spread.x, in.d2.x),
       add(in.log_mass.y, in.fates >> 8 & 0xFF, in.norm2.y, in.spread.y, in.d2.y)},
      {add(in.log_mass.z, in.fates >> 16 & 0xFF, in.norm2.z, in.spread.z, in.d2.z),
       add(in.log_mass.w, in.fates >> 24 & 0xFF, in.norm2.w, in.spread.w, in.d2.w)}};
  *sum += (p[0][0] + p[0][1]) + (p[1][0] + p[1][1]);
  constexpr float kScale = kEstimateScale<T>;
  const float scaled[2][2] = {{p[0][0] * kScale, p[0][1] * kScale},
                              {p[1][0] * kScale, p[1][1] * kScale}};
  *weights = FragmentOf<T>(scaled);
}

// Mean values that a warp's ring holds unless it is told otherwise, 16 rows at a time.
inline constexpr int kEstimateBuffers = 3;

// The estimate over some chunks. Weights are known, so this is the values' half of attention.
template <typename T, int kValueDim, int kBuffers = kEstimateBuffers>
class ChunkEstimator {
 public:
  static constexpr uint32_t kRowBytes = kValueDim * 2;
  static constexpr uint32_t kBufferBytes = EstimateBuffer<kValueDim>::kBytes;
  static constexpr uint32_t kRingBytes = kBuffers * kBufferBytes;
  static constexpr uint32_t kAhead = kBuffers - 1;  // no chunk has fewer steps

  // ring: of this warp, in shared memory.
  __device__ ChunkEstimator(const EstimateSource& source, uint32_t ring)
      : source_(source), ring_(ring) {}

  template <typename Feed>
  __device__ __forceinline__ void Run(Feed feed, WarpState<kValueDim>* state, EstimateSums* sums) {
    if (feed.done()) return;
    EstimateCopier<kValueDim> copier(source_, feed.now());
    uint32_t buffer = 0;
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      copier.Copy(ring_ + i * kBufferBytes);
      CommitCopies();
    }
    for (; !feed.done(); feed.Advance()) {
      const bool second_order = feed.now().second_order != 0;
      const uint32_t steps = feed.now().steps;
      feed.FetchAhead();
#pragma unroll 1
      for (uint32_t i = 0; i < steps; ++i) {
        if (copier.done() && feed.has_next()) copier.Begin(feed.next());
        if (!copier.done()) copier.Copy(ring_ + (buffer + kAhead) % kBuffers * kBufferBytes);
        CommitCopies();
        WaitCopies<kAhead>();
        __syncwarp();
        Add(second_order, ring_ + buffer * kBufferBytes, state, sums);
        __syncwarp();
        buffer = (buffer + 1) % kBuffers;
      }
    }
  }

 private:
  __device__ __forceinline__ void Add(bool second_order, uint32_t from, WarpState<kValueDim>* state,
                                      EstimateSums* sums) const {
    WeightFragment weights;
    EstimateWeights<T>(source_, second_order, LoadInputs<kValueDim>(source_, second_order, from),
                       &state->sum, sums, &weights);
    AddValues<T, kValueDim>(
        weights, [&](uint32_t row, uint32_t at) { return from + MeanChunk<kRowBytes>(row, at); },
        [](uint32_t k) { return k % 8 / 2 * 4 + k / 8 * 2 + k % 2; }, state->values);
  }

  const EstimateSource& source_;
  const uint32_t ring_;
};

template <int kValueDim>
inline constexpr uint32_t kEstimateWarpBytes =
    ChunkEstimator<__half, kValueDim>::kRingBytes + ChunkFeed::kSharedBytes;

template <typename T, int kValueDim>
__device__ void EstimatePiece(const StepHeader& step, const UnitPlace& unit, uint32_t tile,
                              uint32_t piece, bool all) {
  const RowRef& row = *unit.row;
  const uint64_t tile_number = uint64_t{unit.unit} * step.tiles_max + tile;
  const uint32_t g = threadIdx.x % 32 / 4;
  EstimateSource source;
  source.lane = tile * kLanes + g;
  source.group = step.group;
  source.max = step.lane_scales[tile_number * kLanes + g].max;
  source.used = source.lane < step.group;
  source.all = all;
  WarpState<kValueDim> state;
  EstimateSums sums;
  state.max = source.max;
  const uint32_t begin = piece * row.estimate_piece_slots;
  const uint32_t end = min(begin + row.estimate_piece_slots, row.slots);
  using Estimator = ChunkEstimator<T, kValueDim>;
  constexpr uint32_t kWarpBytes = kEstimateWarpBytes<kValueDim>;
  const uint32_t ring = WarpRing(kWarpBytes);
  const ChunkFeed feed(step.chunks + row.first_score_item + unit.in_row * (row.slots / kSlotChunk),
                       begin / kSlotChunk + threadIdx.x / 32, end / kSlotChunk, kAttendWarps,
                       ring + Estimator::kRingBytes);
  Estimator(source, ring).Run(feed, &state, &sums);
  if constexpr (kEstimateScale<T> != 1) ScaleValues(1 / kEstimateScale<T>, &state);
  constexpr uint32_t kFloats = StateFloats(kValueDim);
  const uint64_t number = row.read_pieces + piece;
  StoreState<kValueDim>(state, sums, LanesOf(step, unit, tile),
                        TileStates(step, unit, tile, kFloats) + number * kFloats);
}

template <int kValueDim>
inline constexpr uint32_t kEstimateSharedBytes = std::max<uint32_t>(
    kAttendWarps*(kEstimateWarpBytes<kValueDim>), sizeof(MergeMemory<kValueDim>));

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_ESTIMATE_CUH_
