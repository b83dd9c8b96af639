// SPDX-License-Identifier: Apache-2.0
//
// Attention of one tile of queries over one piece of tokens, and the estimate over one piece of
// clusters: both end in a softmax state. Logits are in log2 units throughout.
//
// Each warp has a ring of its own in shared memory, a few pages deep, that asynchronous copies fill
// ahead of it: whole lines, in the order of memory. From there rows go into registers as the tensor
// cores want them: a product sums over k in any order as long as both sides agree, and its columns
// may be any tokens or channels, so a thread takes 16 bytes of a key row as the k of two products,
// and 16 bytes of a value row as the columns of eight. (Loading rows into registers directly was
// tried: no ring, but a warp's loads of keys are half lines, and L2 was 90% busy at 80% of the
// memory's speed.)
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

// Rows of 16-byte chunks in shared memory. Chunks change places within a row so that the eight
// threads that are served at a time meet different banks: keys are read by two rows at a time,
// values by every second of eight rows.
template <int kRowBytes>
__device__ __forceinline__ uint32_t KeyChunk(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + (chunk ^ (row & 1) * 4) * 16;
}
template <int kRowBytes>
__device__ __forceinline__ uint32_t ValueChunk(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + (chunk ^ (row / 2 % 4) * 2) * 16;
}

// Asks for 16 rows of kRowBytes; lane r < 16 of the warp has row r's address.
template <int kRowBytes, uint32_t (*kPlace)(uint32_t, uint32_t)>
__device__ __forceinline__ void CopyRows(const std::byte* row_of_lane, uint32_t to_shared) {
  constexpr uint32_t kChunks = kRowBytes / 16;
  const uint32_t thread = threadIdx.x % 32;
#pragma unroll
  for (uint32_t i = 0; i < kPageRows * kChunks / 32; ++i) {
    const uint32_t row = (i * 32 + thread) / kChunks, chunk = (i * 32 + thread) % kChunks;
    CopyAsync16(to_shared + kPlace(row, chunk), ShuffleAddress(row_of_lane, row) + chunk * 16);
  }
}

// values += weights * the 16 value rows at `rows`.
template <typename T, int kValueDim>
__device__ __forceinline__ void AddValues(const uint32_t (&weights)[4], uint32_t rows,
                                          float (&values)[kValueDim / 64][8][4]) {
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int v = 0; v < kValueDim / 64; ++v) {
    uint4 r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[i] = LoadShared16(rows + ValueChunk<kValueDim * 2>(2 * t + i % 2 + i / 2 * 8, v * 8 + g));
    }
    AddValueChunk<T, kValueDim>(weights, r[0], r[1], r[2], r[3], values[v]);
  }
}

// Pages that a warp's ring holds.
template <int kKeyDim, int kValueDim>
inline constexpr int kRingPages = kKeyDim + kValueDim <= 128   ? 4
                                  : kKeyDim + kValueDim == 320 ? 2
                                                               : 3;
template <int kKeyDim, int kValueDim>
inline constexpr uint32_t kRingBytes =
    kRingPages<kKeyDim, kValueDim> * kPageRows * (kKeyDim + kValueDim) * 2;

// Attention of a warp over every kAttendWarps-th page of a piece.
template <typename T, int kKeyDim, int kValueDim>
class PageReader {
 public:
  static constexpr uint32_t kKeyBytes = kKeyDim * 2;
  static constexpr uint32_t kValueBytes = kValueDim * 2;
  static constexpr uint32_t kPageBytes = kPageRows * (kKeyBytes + kValueBytes);
  static constexpr int kStages = kRingPages<kKeyDim, kValueDim>;

  // fragments: the tile's queries; lane_end: lane g sees tokens below it; ring: of this warp, in
  // shared memory.
  __device__ PageReader(const TokenSource& source, const uint32_t* fragments, uint32_t lane_end,
                        uint32_t ring)
      : source_(source),
        fragments_(reinterpret_cast<const uint4*>(fragments) + threadIdx.x % 32 * 2),
        lane_end_(lane_end),
        ring_(ring),
        t_(threadIdx.x % 4) {
    const uint32_t g = threadIdx.x % 32 / 4;
    factor_ = reinterpret_cast<const float*>(fragments + 2 * FragmentWords(kKeyDim))[g];
  }

  __device__ __forceinline__ void Run(uint32_t warp, WarpState<kValueDim>* state) {
    const uint32_t pages = (source_.end - 1) / kPageRows + 1;
    uint32_t page = source_.begin / kPageRows + warp;
    uint32_t ahead = page;
    uint32_t token = TokenAt(ahead);
    int stage_ahead = 0, stage = 0;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (ahead < pages) CopyPage(token, stage_ahead);
      CommitCopies();
      ahead += kAttendWarps;
      token = TokenAt(ahead);
      stage_ahead = Next(stage_ahead);
    }
    for (; page < pages; page += kAttendWarps) {
      if (ahead < pages) CopyPage(token, stage_ahead);
      CommitCopies();
      ahead += kAttendWarps;
      token = TokenAt(ahead);
      stage_ahead = Next(stage_ahead);
      WaitCopies<kStages - 1>();
      __syncwarp();
      Attend(page, ring_ + stage * kPageBytes, state);
      stage = Next(stage);
      __syncwarp();
    }
  }

 private:
  static __device__ __forceinline__ int Next(int stage) {
    return stage + 1 == kStages ? 0 : stage + 1;
  }

  // What lane r needs to know of row r of a page to find it: asked for a page early, as a list of
  // chosen tokens is memory, too. Rows outside the piece stand for one inside, so that what nobody
  // wrote is never read; their weight is 0.
  __device__ __forceinline__ uint32_t TokenAt(uint32_t page) const {
    const uint32_t token = page * kPageRows + threadIdx.x % kPageRows;
    const uint32_t inside = min(max(token, source_.begin), source_.end - 1);
    return source_.chosen != nullptr ? source_.chosen[inside] : inside;
  }

  __device__ __forceinline__ void CopyPage(uint32_t token, int stage) const {
    const std::byte* pages;
    if (source_.chosen != nullptr) {
      const SegmentRef& segment = source_.segments[token >> 16];
      pages = segment.pages + source_.kv_head * segment.pages_head_bytes;
      token &= 0xFFFF;
    } else if (source_.blocks != nullptr) {
      pages = source_.blocks[token / kBlockRows] + source_.head_offset;
      token %= kBlockRows;
    } else {
      pages = source_.pages;
    }
    pages += uint64_t{token / kPageRows} * kPageBytes;
    const uint32_t row = token % kPageRows;
    const uint32_t to = ring_ + stage * kPageBytes;
    CopyRows<kKeyBytes, KeyChunk<kKeyBytes>>(pages + row * kKeyBytes, to);
    CopyRows<kValueBytes, ValueChunk<kValueBytes>>(
        pages + kPageRows * kKeyBytes + row * kValueBytes, to + kPageRows * kKeyBytes);
  }

  __device__ __forceinline__ void Attend(uint32_t page, uint32_t rows,
                                         WarpState<kValueDim>* state) const {
    float logits[2][4] = {};
    Logits(rows, logits);
    uint32_t weights[4];
    Weigh(page, logits, state, weights);
    AddValues<T, kValueDim>(weights, rows + kPageRows * kKeyBytes, state->values);
  }

  // logits[half][c] + [c + 2]: lane g, token 8 half + 2t + c, not scaled.
  __device__ __forceinline__ void Logits(uint32_t rows, float (&logits)[2][4]) const {
    const uint32_t g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int block = 0; block < kKeyDim / 32; ++block) {
      const uint4 q0 = fragments_[block * 64];
      const uint4 q1 = fragments_[block * 64 + 1];
      const uint32_t a0[4] = {q0.x, q0.y, q0.z, q0.w};
      const uint32_t a1[4] = {q1.x, q1.y, q1.z, q1.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 key = LoadShared16(rows + KeyChunk<kKeyBytes>(half * 8 + g, block * 4 + t_));
        MultiplyAdd<T>(logits[half], a0, key.x, key.y);
        MultiplyAdd<T>(logits[half], a1, key.z, key.w);
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
  const uint32_t ring_;
  const uint32_t t_;
  float factor_;
};

// Shared memory of merging a block's warps, in the place of their rings.
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

template <int kKeyDim, int kValueDim>
inline constexpr uint32_t kAttendSharedBytes =
    kAttendWarps * kRingBytes<kKeyDim, kValueDim> > sizeof(MergeMemory<kValueDim>)
        ? kAttendWarps * kRingBytes<kKeyDim, kValueDim>
        : sizeof(MergeMemory<kValueDim>);

extern __shared__ __align__(128) std::byte attend_memory[];

// This warp's ring.
__device__ __forceinline__ uint32_t WarpRing(uint32_t ring_bytes) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(attend_memory)) +
         threadIdx.x / 32 * ring_bytes;
}

// Merges the block's warps, in their order, into lanes [0, lanes) of `out`
// [kLanes][kStateHead + kValueDim].
template <int kValueDim>
__device__ __forceinline__ void StoreState(const WarpState<kValueDim>& state,
                                           const EstimateSums& sums, uint32_t lanes, float* out) {
  auto* memory = reinterpret_cast<MergeMemory<kValueDim>*>(attend_memory);
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  __syncthreads();  // every warp has done with its ring
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
  for (uint32_t i = threadIdx.x; i < lanes * kValueDim; i += kAttendWarps * 32) {
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
                          uint32_t piece) {
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
        source, step.query_fragments + tile_number * TileFragmentWords(kKeyDim), lane_end,
        WarpRing(kRingBytes<kKeyDim, kValueDim>));
    reader.Run(threadIdx.x / 32, &state);
  }
  constexpr uint32_t kFloats = StateFloats(kValueDim);
  StoreState<kValueDim>(state, {}, LanesOf(step, unit, tile),
                        TileStates(step, unit, tile, kFloats) + uint64_t{piece} * kFloats);
}

// Tokens of a unit's plan.
template <typename T, int kKeyDim, int kValueDim>
__device__ void ChosenPiece(const StepHeader& step, const UnitPlace& unit, uint32_t tile,
                            uint32_t piece) {
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
      source, step.query_fragments + tile_number * TileFragmentWords(kKeyDim), ~0u,
      WarpRing(kRingBytes<kKeyDim, kValueDim>));
  reader.Run(threadIdx.x / 32, &state);
  constexpr uint32_t kFloats = StateFloats(kValueDim);
  const uint64_t number = row.read_pieces + row.estimate_pieces + piece;
  StoreState<kValueDim>(state, {}, LanesOf(step, unit, tile),
                        TileStates(step, unit, tile, kFloats) + number * kFloats);
}

// e^x - 1 for x in [0, 8], to some 1e-6 of it.
__device__ __forceinline__ float Expm1(float x) {
  const float series = x * (1 + x * (1.0f / 2 + x * (1.0f / 6 + x * (1.0f / 24 + x * (1.0f / 120)))));
  return x < 0.1f ? series : Exp2(x * kLog2E) - 1;
}

// What a tile's estimate is made from.
struct EstimateSource {
  const float* log_mass;  // of lane g: [slots]
  const float* d2;        // the same
  const uint8_t* fates;   // [slots]
  float max;              // of lane g's weights
  bool used;              // whether lane g is a query head
  bool second_order;
  bool all;               // every cluster, whatever became of it
};

// What lane g needs of clusters 2t, 2t + 1 (half 0) and 2t + 8, 2t + 9 (half 1) of 16.
struct ClusterInputs {
  float2 log_mass[2], d2[2], norm2[2], spread[2];
  uchar2 fates[2];

  __device__ __forceinline__ void Load(const EstimateSource& source, const IndexPlace& index,
                                       uint32_t cluster, uint32_t slot) {
    const uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = slot + half * 8 + 2 * t;
      log_mass[half] = make_float2(-INFINITY, -INFINITY);
      d2[half] = norm2[half] = spread[half] = make_float2(0, 0);
      fates[half] = *reinterpret_cast<const uchar2*>(source.fates + at);
      if (!source.used) continue;
      log_mass[half] = *reinterpret_cast<const float2*>(source.log_mass + at);
      if (!source.second_order) continue;
      d2[half] = *reinterpret_cast<const float2*>(source.d2 + at);
      // Parts are 64-byte aligned, and so have room for an even number.
      const uint32_t c = min(cluster + half * 8 + 2 * t, (index.segment->max_clusters - 1) / 2 * 2);
      norm2[half] =
          *reinterpret_cast<const float2*>(index.part<float>(index.segment->value_norm2) + c);
      spread[half] = *reinterpret_cast<const float2*>(index.part<float>(index.segment->spread) + c);
    }
  }
};

// A warp's weights of 16 clusters, as the left side of a product; adds to the sums.
template <typename T>
__device__ __forceinline__ void EstimateWeights(const EstimateSource& source,
                                                const ClusterInputs& in, float* sum,
                                                EstimateSums* sums, uint32_t (&weights)[4]) {
  const auto add = [&](float log_mass, uint8_t fate, float norm2, float spread, float d2) {
    const float weight = Weight(log_mass, source.max);
    if (weight == 0) return 0.0f;  // empty slots, too, whose other numbers may be anything
    const bool estimated = source.all || fate == kFateEstimated;
    if (fate == kFateDropped && !source.all) sums->dropped += weight;
    sums->moments += weight * norm2;
    if (!estimated) return 0.0f;
    const float error = weight * spread;
    sums->errors += error * error * Expm1(fminf(d2, 8.0f));
    *sum += weight;
    return weight;
  };
  float p[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    p[half][0] = add(in.log_mass[half].x, in.fates[half].x, in.norm2[half].x, in.spread[half].x,
                     in.d2[half].x);
    p[half][1] = add(in.log_mass[half].y, in.fates[half].y, in.norm2[half].y, in.spread[half].y,
                     in.d2[half].y);
  }
  WeightFragment<T>(p, weights);
}

// Mean values that a warp's ring holds, 16 rows at a time.
inline constexpr int kEstimateStages = 4;

// Where a warp is in a piece's slots, 16 of each 64 its own. Segments start at whole chunks.
class SlotCursor {
 public:
  // segments: of the row; begin lies in segment `segment`.
  __device__ SlotCursor(const SegmentRef* segments, uint32_t segment, uint32_t begin, uint32_t end)
      : segments_(segments), slot_(begin + threadIdx.x / 32 * 16), end_(end), segment_(segment) {
    Settle();
  }
  __device__ __forceinline__ bool done() const { return slot_ >= end_; }
  __device__ __forceinline__ uint32_t slot() const { return slot_; }
  __device__ __forceinline__ uint32_t segment() const { return segment_; }
  __device__ __forceinline__ void Advance() {
    slot_ += kAttendWarps * 16;
    Settle();
  }

 private:
  __device__ __forceinline__ void Settle() {
    while (!done() && slot_ >= segments_[segment_].first_slot + segments_[segment_].slots) {
      ++segment_;
    }
  }
  const SegmentRef* segments_;
  uint32_t slot_;
  uint32_t end_;
  uint32_t segment_;
};

// Piece `piece` of a tile's estimate. Weights are known, so this is the values' half of attention.
template <typename T, int kValueDim>
__device__ void EstimatePiece(const StepHeader& step, const UnitPlace& unit, uint32_t tile,
                              uint32_t piece, bool all) {
  constexpr uint32_t kRowBytes = kValueDim * 2;
  constexpr uint32_t kStageBytes = kPageRows * kRowBytes;
  const RowRef& row = *unit.row;
  const uint32_t g = threadIdx.x % 32 / 4;
  const uint64_t tile_number = uint64_t{unit.unit} * step.tiles_max + tile;
  const uint32_t lane = tile * kLanes + g;
  EstimateSource source;
  source.log_mass = UnitScores(step, unit) + uint64_t{lane} * row.slots;
  source.d2 = source.log_mass + uint64_t{step.group} * row.slots;
  source.fates = UnitFates(step, unit);
  source.max = step.lane_scales[tile_number * kLanes + g].max;
  source.used = lane < step.group;
  source.second_order = row.second_order != 0;
  source.all = all;

  WarpState<kValueDim> state;
  EstimateSums sums;
  state.max = source.max;
  const uint32_t begin = piece * row.estimate_piece_slots;
  const uint32_t end = min(begin + row.estimate_piece_slots, row.slots);
  const uint32_t ring = WarpRing(kEstimateStages * kStageBytes);
  SlotCursor ahead(step.segments + row.segments_begin, SegmentOfSlot(step, row, begin), begin, end);
  SlotCursor now = ahead;
  const auto copy = [&](uint32_t stage) {
    if (!ahead.done()) {
      const IndexPlace index(step, row, ahead.segment(), unit.kv_head);
      const uint32_t c = min(ahead.slot() - index.segment->first_slot + threadIdx.x % 16,
                             index.segment->max_clusters - 1);
      CopyRows<kRowBytes, ValueChunk<kRowBytes>>(
          index.head + index.segment->mean_values + uint64_t{c} * kRowBytes,
          ring + stage * kStageBytes);
      ahead.Advance();
    }
    CommitCopies();
  };
  const auto load = [&](const SlotCursor& at, ClusterInputs* inputs) {
    if (at.done()) return;
    const IndexPlace index(step, row, at.segment(), unit.kv_head);
    inputs->Load(source, index, at.slot() - index.segment->first_slot, at.slot());
  };
#pragma unroll
  for (uint32_t i = 0; i < kEstimateStages - 1; ++i) copy(i);
  ClusterInputs inputs, next;
  load(now, &inputs);
  for (uint32_t stage = 0; !now.done(); stage = (stage + 1) % kEstimateStages) {
    copy((stage + kEstimateStages - 1) % kEstimateStages);
    SlotCursor following = now;
    following.Advance();
    load(following, &next);
    uint32_t weights[4];
    EstimateWeights<T>(source, inputs, &state.sum, &sums, weights);
    WaitCopies<kEstimateStages - 1>();
    __syncwarp();
    AddValues<T, kValueDim>(weights, ring + stage * kStageBytes, state.values);
    __syncwarp();
    now = following;
    inputs = next;
  }
  constexpr uint32_t kFloats = StateFloats(kValueDim);
  const uint64_t number = row.read_pieces + piece;
  StoreState<kValueDim>(state, sums, LanesOf(step, unit, tile),
                        TileStates(step, unit, tile, kFloats) + number * kFloats);
}

template <int kValueDim>
inline constexpr uint32_t kEstimateSharedBytes =
    kAttendWarps * kEstimateStages * kPageRows * kValueDim * 2 > sizeof(MergeMemory<kValueDim>)
        ? kAttendWarps * kEstimateStages * kPageRows * kValueDim * 2
        : sizeof(MergeMemory<kValueDim>);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_ATTEND_CUH_
