// SPDX-License-Identifier: Apache-2.0
//
// The estimate over one piece of clusters, for one tile of queries: a softmax state whose weights
// are the clusters' masses and whose values are their mean values, with the sums that errors are
// told from.
#ifndef ATTND_GPU_CUDA_ESTIMATE_CUH_
#define ATTND_GPU_CUDA_ESTIMATE_CUH_

#include <cstdint>

#include "attention/estimate_limits.h"
#include "gpu/cuda/attend.cuh"
#include "gpu/cuda/chunk_feed.cuh"
#include "gpu/cuda/matrix.cuh"
#include "gpu/cuda/place.cuh"
#include "gpu/cuda/rows.cuh"

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

// A step of 16 clusters in shared memory, in a warp's ring: mean values and inputs.
template <int kValueDim>
struct EstimateStage {
  static constexpr uint32_t kRowBytes = kValueDim * 2;
  static constexpr uint32_t kLogMass = kStepSlots * kRowBytes;  // [lanes][clusters]
  static constexpr uint32_t kD2 = kLogMass + kLanes * kStepSlots * 4;
  static constexpr uint32_t kNorm2 = kD2 + kLanes * kStepSlots * 4;
  static constexpr uint32_t kSpread = kNorm2 + kStepSlots * 4;
  static constexpr uint32_t kFates = kSpread + kStepSlots * 4;
  static constexpr uint32_t kBytes = kFates + kStepSlots;
};

// Asks for the inputs of a step. A thread's copies of scores are its own; see LoadInputs.
template <int kValueDim>
__device__ __forceinline__ void CopyInputs(const EstimateSource& source, const ChunkRef& chunk,
                                           uint32_t step, uint32_t to) {
  using Stage = EstimateStage<kValueDim>;
  const uint32_t thread = threadIdx.x % 32, quarter = thread % 4, first = step * kStepSlots;
  const uint32_t at = thread * 16;  // (g, t) of [lanes][clusters]
  const auto copy = [](uint32_t place, const void* from) {
    CopyAsync16(SharedAddress(place), static_cast<const std::byte*>(from));
  };
  if (source.used) {
    const float* scores = chunk.scores + uint64_t{source.lane} * chunk.slots + first + quarter * 4;
    copy(to + Stage::kLogMass + at, scores);
    if (chunk.second_order != 0) {
      copy(to + Stage::kD2 + at, scores + uint64_t{source.group} * chunk.slots);
    }
  }
  if (thread < 8) {
    // Parts are 64-byte aligned, and so have room for a multiple of four.
    const uint32_t c = min(chunk.first + first + quarter * 4, (chunk.max_clusters - 1) / 4 * 4);
    const uint32_t part = thread < 4 ? chunk.offsets.value_norm2 : chunk.offsets.spread;
    copy(to + Stage::kNorm2 + at, Part<float>(chunk, part) + c);
  }
  if (thread == 8) copy(to + Stage::kFates, chunk.fates + first);
}

template <int kValueDim>
__device__ __forceinline__ ClusterInputs LoadInputs(const EstimateSource& source, bool second_order,
                                                    uint32_t from) {
  using Stage = EstimateStage<kValueDim>;
  const uint32_t thread = threadIdx.x % 32, t = thread % 4;
  const auto load = [&](uint32_t place) {
    const uint4 bits = LoadShared16(from + place);
    return make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                       __uint_as_float(bits.w));
  };
  ClusterInputs in;
  in.log_mass = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
  in.d2 = in.norm2 = in.spread = make_float4(0, 0, 0, 0);
  in.fates = LoadShared4(from + Stage::kFates + t * 4);
  if (!source.used) return in;
  in.log_mass = load(Stage::kLogMass + thread * 16);
  if (!second_order) return in;
  in.d2 = load(Stage::kD2 + thread * 16);
  in.norm2 = load(Stage::kNorm2 + t * 16);
  in.spread = load(Stage::kSpread + t * 16);
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
inline constexpr int kEstimateStages = 3;

// As the order of a product's rows is that of ClusterInputs: rows 0, 1, 4, 5, 8, ... are read at a
// time, then the others.
template <int kRowBytes>
__device__ __forceinline__ uint32_t MeanChunk(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + (chunk ^ (row / 4 * 2 + row % 2)) * 16;
}

// The estimate over some chunks. Weights are known, so this is the values' half of attention.
template <typename T, int kValueDim, int kStages = kEstimateStages>
class ChunkEstimator {
 public:
  static constexpr uint32_t kRowBytes = kValueDim * 2;
  static constexpr uint32_t kStageBytes = EstimateStage<kValueDim>::kBytes;
  static constexpr uint32_t kRingBytes = kStages * kStageBytes;
  static constexpr uint32_t kAhead = kStages - 1;  // no chunk has fewer steps

  // ring: of this warp, in shared memory.
  __device__ ChunkEstimator(const EstimateSource& source, uint32_t ring)
      : source_(source), ring_(ring) {}

  template <typename Feed>
  __device__ __forceinline__ void Run(Feed feed, WarpState<kValueDim>* state, EstimateSums* sums) {
    if (feed.done()) return;
    uint32_t stage = 0;
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) Copy(feed.now(), i, i);
    for (; !feed.done(); feed.Advance()) {
      const ChunkRef& chunk = feed.now();
      feed.FetchAhead();
#pragma unroll 1
      for (uint32_t i = 0; i < chunk.steps; ++i) {
        const uint32_t to = (stage + kAhead) % kStages;
        if (i + kAhead < chunk.steps) {
          Copy(chunk, i + kAhead, to);
        } else if (feed.has_next()) {
          Copy(feed.next(), i + kAhead - chunk.steps, to);
        } else {
          CommitCopies();
        }
        WaitCopies<kAhead>();
        __syncwarp();
        Add(chunk.second_order != 0, ring_ + stage * kStageBytes, state, sums);
        __syncwarp();
        stage = (stage + 1) % kStages;
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

  // Asks for the inputs and the mean values of 16 clusters. Slots without a cluster stand for the
  // last one: their weight is 0, but 0 times what nobody wrote may be NaN.
  __device__ __forceinline__ void Copy(const ChunkRef& chunk, uint32_t step, uint32_t stage) const {
    const std::byte* values = chunk.head + chunk.offsets.mean_values;
    const uint32_t first = chunk.first + step * 16, last = max(chunk.clusters, 1u) - 1;
    CopyInputs<kValueDim>(source_, chunk, step, ring_ + stage * kStageBytes);
    CopyRows<kRowBytes, MeanChunk<kRowBytes>>(ring_ + stage * kStageBytes, [&](uint32_t i) {
      return values + uint64_t{min(first + i, last)} * kRowBytes;
    });
    CommitCopies();
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

#endif  // ATTND_GPU_CUDA_ESTIMATE_CUH_
