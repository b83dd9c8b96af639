// SPDX-License-Identifier: Apache-2.0
//
// Attention of one tile of queries over one piece of tokens, and the estimate over one piece of
// clusters: both end in a softmax state.
//
// Keys and values go from memory straight into registers in the order in which the tensor cores
// want them: a product sums over k in any order as long as both sides agree, and its columns may be
// any tokens or channels. So a thread takes 16 bytes of a key row as the k of two products, and 16
// bytes of a value row as the columns of eight; no shared memory, no shuffles. Logits are in log2
// units throughout.
#ifndef ATTND_GPU_CUDA_ATTEND_CUH_
#define ATTND_GPU_CUDA_ATTEND_CUH_

#include <cstdint>

#include "gpu/cuda/matrix.cuh"
#include "gpu/cuda/place.cuh"

namespace attnd::gpu {

inline constexpr uint32_t kAttendWarps = 4;
// A state's maximum may lag behind the greatest logit by this: weights up to 256 lose nothing, and
// values need not be rescaled each time the maximum creeps up.
inline constexpr float kLagLog2 = 8.0f;

// Where the tokens of a piece lie, 16 at a time. Tokens are numbered within a run of pages, a tail,
// or a list of chosen tokens.
struct TokenSource {
  const std::byte* pages = nullptr;          // of a run of pages, or
  const std::byte* const* blocks = nullptr;  // tail blocks, or
  const uint32_t* chosen = nullptr;          // segment << 16 | token
  const SegmentRef* segments = nullptr;
  uint64_t head_offset = 0;  // of the KV head in a tail block
  uint32_t kv_head = 0;
  uint32_t begin = 0;
  uint32_t end = 0;
};

// A softmax state spread over a warp: lane g's maximum and (partial) sum; values of lane g at
// channels 64 v + 16 t + i (values[v][i][0] + [2]) and + 8 ([1] + [3]).
template <int kValueDim>
struct WarpState {
  float max = -INFINITY;
  float sum = 0;
  float values[kValueDim / 64][8][4] = {};
};

// values += weights * the 16 value rows: p.. of tokens 2t, 2t + 1, 2t + 8, 2t + 9.
template <typename T, int kValueDim>
__device__ __forceinline__ void AddValueChunk(const uint32_t (&weights)[4], const uint4& r0,
                                              const uint4& r1, const uint4& r2, const uint4& r3,
                                              float (&values)[8][4]) {
  const uint32_t w0[4] = {r0.x, r0.y, r0.z, r0.w};
  const uint32_t w1[4] = {r1.x, r1.y, r1.z, r1.w};
  const uint32_t w2[4] = {r2.x, r2.y, r2.z, r2.w};
  const uint32_t w3[4] = {r3.x, r3.y, r3.z, r3.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    MultiplyAdd<T>(values[2 * i], weights, __byte_perm(w0[i], w1[i], 0x5410),
                   __byte_perm(w2[i], w3[i], 0x5410));
    MultiplyAdd<T>(values[2 * i + 1], weights, __byte_perm(w0[i], w1[i], 0x7632),
                   __byte_perm(w2[i], w3[i], 0x7632));
  }
}

// Weights of tokens 2t, 2t + 1 and 2t + 8, 2t + 9 as the left side of a product.
template <typename T>
__device__ __forceinline__ void WeightFragment(const float (&p)[2][2], uint32_t (&weights)[4]) {
  Split<T>(p[0][0], p[0][1], &weights[0], &weights[1]);
  Split<T>(p[1][0], p[1][1], &weights[2], &weights[3]);
}

// Attention of a warp over every kAttendWarps-th page of a piece.
template <typename T, int kKeyDim, int kValueDim>
class PageReader {
 public:
  static constexpr uint32_t kKeyBytes = kKeyDim * 2;
  static constexpr uint32_t kValueBytes = kValueDim * 2;
  static constexpr uint32_t kPageBytes = kPageRows * (kKeyBytes + kValueBytes);
  // Whether the next keys are asked for before this page's values are used: registers allow it.
  static constexpr bool kAhead = kKeyDim + kValueDim <= 320;

  // fragments: the tile's queries; lane_end: lane g sees tokens below it.
  __device__ PageReader(const TokenSource& source, const uint32_t* fragments, uint32_t lane_end)
      : source_(source),
        fragments_(reinterpret_cast<const uint4*>(fragments)),
        lane_end_(lane_end),
        g_(threadIdx.x % 32 / 4),
        t_(threadIdx.x % 4) {
    factor_ = reinterpret_cast<const float*>(fragments + 2 * FragmentWords(kKeyDim))[g_];
  }

  __device__ __forceinline__ void Run(uint32_t warp, WarpState<kValueDim>* state) {
    const uint32_t last = (source_.end - 1) / kPageRows;
    uint32_t page = source_.begin / kPageRows + warp;
    if (page > last) return;
    uint4 keys[2][kKeyDim / 32];
    if constexpr (kAhead) LoadKeys(page, keys);
    for (; page <= last; page += kAttendWarps) {
      if constexpr (!kAhead) LoadKeys(page, keys);
      uint4 values[kValueDim / 64][4];
      if constexpr (kAhead) LoadValues(page, values);
      float logits[2][4] = {};
      Logits(keys, logits);
      if constexpr (kAhead) {
        if (page + kAttendWarps <= last) LoadKeys(page + kAttendWarps, keys);
      } else {
        LoadValues(page, values);
      }
      uint32_t weights[4];
      Weigh(page, logits, state, weights);
#pragma unroll
      for (int v = 0; v < kValueDim / 64; ++v) {
        AddValueChunk<T, kValueDim>(weights, values[v][0], values[v][1], values[v][2],
                                    values[v][3], state->values[v]);
      }
    }
  }

 private:
  // Row `row` of page `page`: its key. Rows outside the piece stand for one inside, so that what
  // nobody wrote is never read; their weight is 0.
  __device__ __forceinline__ const std::byte* Row(uint32_t page, uint32_t row, bool value) const {
    uint32_t token = min(max(page * kPageRows + row, source_.begin), source_.end - 1);
    const std::byte* pages;
    if (source_.chosen != nullptr) {
      const uint32_t chosen = source_.chosen[token];
      const SegmentRef& segment = source_.segments[chosen >> 16];
      pages = segment.pages + source_.kv_head * segment.pages_head_bytes;
      token = chosen & 0xFFFF;
    } else if (source_.blocks != nullptr) {
      pages = source_.blocks[token / kBlockRows] + source_.head_offset;
      token %= kBlockRows;
    } else {
      pages = source_.pages;
    }
    pages += uint64_t{token / kPageRows} * kPageBytes;
    return value ? pages + kPageRows * kKeyBytes + token % kPageRows * kValueBytes
                 : pages + token % kPageRows * kKeyBytes;
  }

  __device__ __forceinline__ void LoadKeys(uint32_t page, uint4 (&keys)[2][kKeyDim / 32]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::byte* row = Row(page, half * 8 + g_, false) + t_ * 16;
#pragma unroll
      for (int block = 0; block < kKeyDim / 32; ++block) {
        keys[half][block] = LoadStream16(row + block * 64);
      }
    }
  }

  __device__ __forceinline__ void LoadValues(uint32_t page,
                                             uint4 (&values)[kValueDim / 64][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::byte* row = Row(page, 2 * t_ + i % 2 + i / 2 * 8, true) + g_ * 16;
#pragma unroll
      for (int v = 0; v < kValueDim / 64; ++v) values[v][i] = LoadStream16(row + v * 128);
    }
  }

  // logits[half][c] + [c + 2]: lane g, token 8 half + 2t + c, not scaled.
  __device__ __forceinline__ void Logits(const uint4 (&keys)[2][kKeyDim / 32],
                                         float (&logits)[2][4]) const {
#pragma unroll
    for (int block = 0; block < kKeyDim / 32; ++block) {
      const uint4 q0 = fragments_[(block * 32 + threadIdx.x % 32) * 2];
      const uint4 q1 = fragments_[(block * 32 + threadIdx.x % 32) * 2 + 1];
      const uint32_t a0[4] = {q0.x, q0.y, q0.z, q0.w};
      const uint32_t a1[4] = {q1.x, q1.y, q1.z, q1.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        MultiplyAdd<T>(logits[half], a0, keys[half][block].x, keys[half][block].y);
        MultiplyAdd<T>(logits[half], a1, keys[half][block].z, keys[half][block].w);
      }
    }
  }

  __device__ __forceinline__ void Weigh(uint32_t page, const float (&logits)[2][4],
                                        WarpState<kValueDim>* state, uint32_t (&weights)[4]) const {
    const uint32_t end = min(source_.end, lane_end_);
    float x[2][2];
    float greatest = -INFINITY;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint32_t token = page * kPageRows + half * 8 + 2 * t_ + c;
        const bool seen = token >= source_.begin && token < end;
        x[half][c] = seen ? factor_ * (logits[half][c] + logits[half][c + 2]) : -INFINITY;
        greatest = fmaxf(greatest, x[half][c]);
      }
    }
    greatest = MaxOverT(greatest);
    if (__any_sync(~0u, greatest > state->max + kLagLog2)) Rescale(greatest, state);
    float p[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        p[half][c] = Weight(x[half][c], state->max);
        state->sum += p[half][c];
      }
    }
    WeightFragment<T>(p, weights);
  }

  static __device__ __forceinline__ void Rescale(float greatest, WarpState<kValueDim>* state) {
    const float max = fmaxf(state->max, greatest);
    const float factor = Weight(state->max, max);
    state->max = max;
    state->sum *= factor;
#pragma unroll
    for (int v = 0; v < kValueDim / 64; ++v) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) state->values[v][i][c] *= factor;
      }
    }
  }

  const TokenSource& source_;
  const uint4* const fragments_;
  const uint32_t lane_end_;
  const uint32_t g_;
  const uint32_t t_;
  float factor_;
};

// Shared memory of merging a block's warps.
template <int kValueDim>
struct MergeMemory {
  float max[kAttendWarps][kLanes];
  float sum[kAttendWarps][kLanes];
  float errors[kAttendWarps][kLanes];
  float moments[kAttendWarps][kLanes];
  float dropped[kAttendWarps][kLanes];
  float values[kAttendWarps][kLanes][kValueDim];
};

// Sums beside the state of an estimate piece, of lane g; partial over t.
struct EstimateSums {
  float errors = 0;
  float moments = 0;
  float dropped = 0;
};

// Merges the block's warps, in their order, into `out` [kLanes][kStateHead + kValueDim].
template <int kValueDim>
__device__ __forceinline__ void StoreState(const WarpState<kValueDim>& state,
                                           const EstimateSums& sums, MergeMemory<kValueDim>* memory,
                                           float* out) {
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float sum = SumOverT(state.sum);
  const float errors = SumOverT(sums.errors);
  const float moments = SumOverT(sums.moments);
  const float dropped = SumOverT(sums.dropped);
  if (t == 0) {
    memory->max[warp][g] = state.max;
    memory->sum[warp][g] = sum;
    memory->errors[warp][g] = errors;
    memory->moments[warp][g] = moments;
    memory->dropped[warp][g] = dropped;
  }
#pragma unroll
  for (int v = 0; v < kValueDim / 64; ++v) {
    float* to = memory->values[warp][g] + v * 64 + t * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      to[i] = state.values[v][i][0] + state.values[v][i][2];
      to[i + 8] = state.values[v][i][1] + state.values[v][i][3];
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kLanes * kValueDim; i += kAttendWarps * 32) {
    const uint32_t lane = i / kValueDim, channel = i % kValueDim;
    float max = -INFINITY;
    for (uint32_t w = 0; w < kAttendWarps; ++w) max = fmaxf(max, memory->max[w][lane]);
    float value = 0, total = 0, error = 0, moment = 0, drop = 0;
    for (uint32_t w = 0; w < kAttendWarps; ++w) {
      const float factor = Weight(memory->max[w][lane], max);
      value += factor * memory->values[w][lane][channel];
      total += factor * memory->sum[w][lane];
      error += memory->errors[w][lane];
      moment += memory->moments[w][lane];
      drop += memory->dropped[w][lane];
    }
    float* state_out = out + lane * (kStateHead + kValueDim);
    state_out[kStateHead + channel] = value;
    if (channel == 0) {
      state_out[0] = max;
      state_out[1] = total;
      state_out[2] = error;
      state_out[3] = moment;
      state_out[4] = drop;
    }
  }
  __syncthreads();
}

// ---- pieces ----

// Piece `piece` of a tile's read pieces.
template <typename T, int kKeyDim, int kValueDim>
__device__ void ReadPiece(const StepHeader& step, const UnitPlace& unit, uint32_t tile,
                          uint32_t piece, MergeMemory<kValueDim>* memory) {
  const RowRef& row = *unit.row;
  const uint32_t g = threadIdx.x % 32 / 4;
  TokenSource source;
  uint32_t lane_end = ~0u;
  const SegmentRef* segments = step.segments + row.segments_begin;
  if (piece < row.dense_pieces) {
    const uint32_t s = LastNotAfter(row.segment_count, piece,
                                    [&](uint32_t i) { return segments[i].first_piece; });
    source.pages = segments[s].pages + unit.kv_head * segments[s].pages_head_bytes;
    source.begin = (piece - segments[s].first_piece) * row.dense_piece_tokens;
    source.end = min(source.begin + row.dense_piece_tokens, segments[s].tokens);
  } else if (piece < row.dense_pieces + row.tail_pieces) {
    const uint32_t first = (piece - row.dense_pieces) * kReadPieceTokens;
    const uint32_t limit = row.tail_limit + row.causal * (unit.first_token + unit.tokens - 1);
    source.blocks = step.blocks + row.blocks_begin;
    source.head_offset = unit.kv_head * step.block_head_bytes;
    source.begin = max(first, row.tail_begin);
    source.end = min(first + kReadPieceTokens, limit);
    const LanePlace lane(step, unit, tile, g);
    lane_end = row.tail_limit + row.causal * lane.token;
  } else {  // the sink
    source.pages = segments[0].pages + unit.kv_head * segments[0].pages_head_bytes;
    source.end = segments[0].unclustered;
  }
  WarpState<kValueDim> state;
  if (source.begin < source.end) {
    const uint64_t tile_number = uint64_t{unit.unit} * step.tiles_max + tile;
    PageReader<T, kKeyDim, kValueDim> reader(
        source, step.query_fragments + tile_number * TileFragmentWords(kKeyDim), lane_end);
    reader.Run(threadIdx.x / 32, &state);
  }
  constexpr uint32_t kFloats = StateFloats(kValueDim);
  StoreState<kValueDim>(state, {}, memory,
                        TileStates(step, unit, tile, kFloats) + uint64_t{piece} * kFloats);
}

// Tokens of a unit's plan.
template <typename T, int kKeyDim, int kValueDim>
__device__ void ChosenPiece(const StepHeader& step, const UnitPlace& unit, uint32_t tile,
                            uint32_t piece, MergeMemory<kValueDim>* memory) {
  const RowRef& row = *unit.row;
  const UnitResult& result = step.unit_results[unit.unit];
  TokenSource source;
  source.chosen = UnitChosen(step, unit);
  source.segments = step.segments + row.segments_begin;
  source.kv_head = unit.kv_head;
  source.begin = piece * result.chosen_piece_tokens;
  source.end = min(source.begin + result.chosen_piece_tokens, result.chosen_tokens);
  WarpState<kValueDim> state;
  const uint64_t tile_number = uint64_t{unit.unit} * step.tiles_max + tile;
  PageReader<T, kKeyDim, kValueDim> reader(
      source, step.query_fragments + tile_number * TileFragmentWords(kKeyDim), ~0u);
  reader.Run(threadIdx.x / 32, &state);
  constexpr uint32_t kFloats = StateFloats(kValueDim);
  const uint64_t number = row.read_pieces + row.estimate_pieces + piece;
  StoreState<kValueDim>(state, {}, memory, TileStates(step, unit, tile, kFloats) + number * kFloats);
}

// Estimates of clusters [16 slots at a time]: weights are known, so this is the values' half only.
// all: of every cluster, whatever became of it.
template <typename T, int kValueDim>
__device__ void EstimatePiece(const StepHeader& step, const UnitPlace& unit, uint32_t tile,
                              uint32_t piece, bool all, MergeMemory<kValueDim>* memory) {
  const RowRef& row = *unit.row;
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint64_t tile_number = uint64_t{unit.unit} * step.tiles_max + tile;
  const uint32_t lane = tile * kLanes + g;
  const bool used = lane < step.group;
  const float* log_mass = UnitScores(step, unit) + uint64_t{lane} * row.slots;
  const float* d2 = log_mass + uint64_t{step.group} * row.slots;
  const uint8_t* fates = UnitFates(step, unit);
  const float max = step.lane_scales[tile_number * kLanes + g].max;

  WarpState<kValueDim> state;
  EstimateSums sums;
  state.max = max;
  const uint32_t begin = piece * row.estimate_piece_slots;
  const uint32_t end = min(begin + row.estimate_piece_slots, row.slots);
  for (uint32_t first = begin + warp * 16; first < end; first += kAttendWarps * 16) {
    const uint32_t s = SegmentOfSlot(step, row, first);
    const IndexPlace index(step, row, s, unit.kv_head);
    const SegmentRef& segment = *index.segment;
    const uint32_t clusters = index.clusters();
    const uint32_t cluster = first - segment.first_slot;
    if (cluster >= clusters) continue;

    const std::byte* rows = index.head + segment.mean_values + g * 16;
    uint4 values[kValueDim / 64][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t c = min(cluster + 2 * t + i % 2 + i / 2 * 8, clusters - 1);
#pragma unroll
      for (int v = 0; v < kValueDim / 64; ++v) {
        values[v][i] = LoadStream16(rows + uint64_t{c} * (kValueDim * 2) + v * 128);
      }
    }
    float p[2][2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t slot = first + half * 8 + 2 * t;
      const uint32_t c = slot - segment.first_slot;
      const uchar2 fate = *reinterpret_cast<const uchar2*>(fates + slot);
      float2 x = make_float2(-INFINITY, -INFINITY), variance = make_float2(0, 0);
      if (used) x = *reinterpret_cast<const float2*>(log_mass + slot);
      if (used && row.second_order != 0) variance = *reinterpret_cast<const float2*>(d2 + slot);
      const float xs[2] = {x.x, x.y}, variances[2] = {variance.x, variance.y};
      const uint8_t fate_of[2] = {fate.x, fate.y};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (c + i >= clusters) continue;
        const float weight = Weight(xs[i], max);
        const bool estimated = all || fate_of[i] == kFateEstimated;
        if (estimated) p[half][i] = weight;
        if (fate_of[i] == kFateDropped && !all) sums.dropped += weight;
        if (row.second_order == 0) continue;
        sums.moments += weight * index.part<float>(segment.value_norm2)[c + i];
        if (estimated) {
          const float error = weight * index.part<float>(segment.spread)[c + i];
          sums.errors += error * error * expm1f(fminf(variances[i], 8.0f));
        }
      }
    }
    state.sum += p[0][0] + p[0][1] + p[1][0] + p[1][1];
    uint32_t weights[4];
    WeightFragment<T>(p, weights);
#pragma unroll
    for (int v = 0; v < kValueDim / 64; ++v) {
      AddValueChunk<T, kValueDim>(weights, values[v][0], values[v][1], values[v][2], values[v][3],
                                  state.values[v]);
    }
  }
  constexpr uint32_t kFloats = StateFloats(kValueDim);
  const uint64_t number = row.read_pieces + piece;
  StoreState<kValueDim>(state, sums, memory,
                        TileStates(step, unit, tile, kFloats) + number * kFloats);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_ATTEND_CUH_
