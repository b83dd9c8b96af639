// SPDX-License-Identifier: Apache-2.0
//
// Attention of one tile of queries over one piece of tokens, which ends in a softmax state. Logits
// are in log2 units throughout.
//
// Each warp has a ring of its own in shared memory, a few pages deep, that asynchronous copies fill
// ahead of it: whole lines, in the order of memory. From there rows go into registers as the tensor
// cores want them: a product sums over k in any order as long as both sides agree, and its columns
// may be any tokens or channels, so a thread takes 16 bytes of a key row as the k of two products,
// and 16 bytes of a value row as the columns of eight. (Loading rows into registers directly was
// tried: no ring, but a warp's loads of keys are half lines, and L2 was 90% busy at 80% of the
// memory's speed.)
#ifndef ATTND_GPU_CUDA_STEP_ATTEND_CUH_
#define ATTND_GPU_CUDA_STEP_ATTEND_CUH_

#include <algorithm>
#include <cstdint>

#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/rows.cuh"

namespace attnd::gpu {

inline constexpr uint32_t kAttendWarps = 4;
// A state's maximum may lag behind the greatest logit by this: weights up to 256 lose nothing, and
// values need not be rescaled each time the maximum creeps up.
inline constexpr float kLagLog2 = 8.0f;

// Where the tokens of a piece lie, 16 at a time. Tokens are numbered within a run of pages, a tail,
// or a list of chosen tokens.
struct TokenSource {
  const std::byte* pages = nullptr;               // of a run of pages, or
  const std::byte* const* tail_blocks = nullptr;  // or
  const uint32_t* chosen = nullptr;               // as StepHeader::chosen
  const SegmentRef* segments = nullptr;
  const std::byte* frames = nullptr;  // of the page cache
  uint64_t head_offset = 0;           // of the KV head in a tail block
  uint32_t kv_head = 0;
  uint32_t begin = 0;
  uint32_t end = 0;
};

// A softmax state spread over a warp: lane g's maximum and (partial) sum; of every 16 channels,
// those numbered g and g + 8 of lanes 2t and 2t + 1: (g, 2t), (g, 2t + 1), (g + 8, 2t), ...
template <int kValueDim>
struct WarpState {
  float max = -INFINITY;
  float sum = 0;
  float values[kValueDim / 16][4] = {};
};

// factor: of lane g.
template <int kValueDim>
__device__ __forceinline__ void ScaleValues(float factor, WarpState<kValueDim>* state) {
  const uint32_t t = threadIdx.x % 4;
  const float even = __shfl_sync(~0u, factor, 8 * t), odd = __shfl_sync(~0u, factor, 8 * t + 4);
#pragma unroll
  for (int m = 0; m < kValueDim / 16; ++m) {
    state->values[m][0] *= even;
    state->values[m][1] *= odd;
    state->values[m][2] *= even;
    state->values[m][3] *= odd;
  }
}

// Weights of tokens 2t, 2t + 1 and 2t + 8, 2t + 9 as the right side of two products: what T holds
// of them, and the rest.
struct WeightFragment {
  uint32_t greater[2];
  uint32_t rest[2];
};
template <typename T>
__device__ __forceinline__ WeightFragment FragmentOf(const float (&p)[2][2]) {
  WeightFragment weights;
  Split<T>(p[0][0], p[0][1], &weights.greater[0], &weights.rest[0]);
  Split<T>(p[1][0], p[1][1], &weights.greater[1], &weights.rest[1]);
  return weights;
}

// values += weights * 16 value rows in shared memory: channels are the product's rows, lanes its
// columns. place(row, chunk): where a row's 16-byte chunk lies; row_of(k): the row whose weight is
// the product's k-th.
template <typename T, int kValueDim, typename Place, typename RowOf>
__device__ __forceinline__ void AddValues(const WeightFragment& weights, Place place, RowOf row_of,
                                          float (&values)[kValueDim / 16][4]) {
  const uint32_t thread = threadIdx.x % 32;
  const uint32_t row = row_of(thread / 16 * 8 + thread % 8), chunk = thread / 8 % 2;
#pragma unroll
  for (int m = 0; m < kValueDim / 16; ++m) {
    uint32_t channels[4];
    LoadTransposed(place(row, m * 2 + chunk), channels);
    MultiplyAdd<T>(values[m], channels, weights.greater[0], weights.greater[1]);
    MultiplyAdd<T>(values[m], channels, weights.rest[0], weights.rest[1]);
  }
}

// Pages that a warp's ring holds, but of chosen tokens.
template <int kKeyDim, int kValueDim>
inline constexpr int kRingPages = kKeyDim + kValueDim <= 128   ? 4
                                  : kKeyDim + kValueDim == 320 ? 2
                                                               : 3;

// Attention of a warp over every so many pages of a piece.
template <typename T, int kKeyDim, int kValueDim, int kBuffers = kRingPages<kKeyDim, kValueDim>>
class PageReader {
 public:
  static constexpr uint32_t kKeyBytes = kKeyDim * 2;
  static constexpr uint32_t kValueBytes = kValueDim * 2;
  static constexpr uint32_t kPageBytes = kPageRows * (kKeyBytes + kValueBytes);
  static constexpr uint32_t kRingBytes = kBuffers * kPageBytes;

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

  // The piece's pages from number `first` on, every stride-th.
  __device__ __forceinline__ void Run(uint32_t first, uint32_t stride,
                                      WarpState<kValueDim>* state) {
    const uint32_t pages = (source_.end - 1) / kPageRows + 1;
    uint32_t page = source_.begin / kPageRows + first;
    uint32_t ahead = page;
    uint32_t token = TokenAt(ahead);
    int buffer_ahead = 0, buffer = 0;
#pragma unroll
    for (int i = 0; i < kBuffers - 1; ++i) {
      if (ahead < pages) CopyPage(ahead, token, buffer_ahead);
      CommitCopies();
      ahead += stride;
      token = TokenAt(ahead);
      buffer_ahead = Next(buffer_ahead);
    }
    for (; page < pages; page += stride) {
      if (ahead < pages) CopyPage(ahead, token, buffer_ahead);
      CommitCopies();
      ahead += stride;
      token = TokenAt(ahead);
      buffer_ahead = Next(buffer_ahead);
      WaitCopies<kBuffers - 1>();
      __syncwarp();
      Attend(page, ring_ + buffer * kPageBytes, state);
      buffer = Next(buffer);
      __syncwarp();
    }
  }

 private:
  static __device__ __forceinline__ int Next(int buffer) {
    return buffer + 1 == kBuffers ? 0 : buffer + 1;
  }

  // What lane r needs to know of row r of a page of chosen tokens to find it; asked for a page
  // early, as the list is memory, too. Rows outside a piece stand for one inside, here and below,
  // so that what nobody wrote is never read; their weight is 0.
  __device__ __forceinline__ uint32_t TokenAt(uint32_t page) const {
    if (source_.chosen == nullptr) return 0;
    const uint32_t token = page * kPageRows + threadIdx.x % kPageRows;
    return source_.chosen[min(token, source_.end - 1)];
  }

  // The page of an entry of the list.
  __device__ __forceinline__ const std::byte* ChosenPage(uint32_t token) const {
    if ((token & kCachedToken) != 0) {
      return source_.frames + uint64_t{(token & ~kCachedToken) / kPageRows} * kPageBytes;
    }
    const SegmentRef& segment = source_.segments[token >> 16];
    return segment.pages + source_.kv_head * segment.pages_head_bytes +
           uint64_t{(token & 0xFFFF) / kPageRows} * kPageBytes;
  }

  // token: what TokenAt gave for `page`.
  __device__ __forceinline__ void CopyPage(uint32_t page, uint32_t token, int buffer) const {
    const uint32_t keys = ring_ + buffer * kPageBytes, values = keys + kPageRows * kKeyBytes;
    if (source_.chosen == nullptr) {
      const uint32_t first = page * kPageRows;
      const std::byte* at = source_.tail_blocks != nullptr
                                ? source_.tail_blocks[first / kTailBlockRows] +
                                      source_.head_offset +
                                      first % kTailBlockRows / kPageRows * kPageBytes
                                : source_.pages + uint64_t{page} * kPageBytes;
      if (first >= source_.begin && first + kPageRows <= source_.end) {
        CopyRun<kKeyBytes, KeyChunk<kKeyBytes>>(keys, at, kPageRows);
        CopyRun<kValueBytes, ValueChunk<kValueBytes>>(values, at + kPageRows * kKeyBytes,
                                                      kPageRows);
        return;
      }
      const auto inside = [&](uint32_t row) {
        return min(max(first + row, source_.begin), source_.end - 1) - first;
      };
      CopyRows<kKeyBytes, KeyChunk<kKeyBytes>>(
          keys, [&](uint32_t row) { return at + inside(row) * kKeyBytes; });
      CopyRows<kValueBytes, ValueChunk<kValueBytes>>(values, [&](uint32_t row) {
        return at + kPageRows * kKeyBytes + inside(row) * kValueBytes;
      });
      return;
    }
    const std::byte* at = ChosenPage(token);
    const std::byte* key = at + token % kPageRows * kKeyBytes;
    const std::byte* value = at + kPageRows * kKeyBytes + token % kPageRows * kValueBytes;
    CopyRows<kKeyBytes, KeyChunk<kKeyBytes>>(
        keys, [&](uint32_t row) { return ShuffleAddress(key, row); });
    CopyRows<kValueBytes, ValueChunk<kValueBytes>>(
        values, [&](uint32_t row) { return ShuffleAddress(value, row); });
  }

  __device__ __forceinline__ void Attend(uint32_t page, uint32_t rows,
                                         WarpState<kValueDim>* state) const {
    float logits[2][4] = {};
    Logits(rows, logits);
    const WeightFragment weights = Weigh(page, logits, state);
    const uint32_t values = rows + kPageRows * kKeyBytes;
    AddValues<T, kValueDim>(
        weights,
        [&](uint32_t row, uint32_t chunk) { return values + ValueChunk<kValueBytes>(row, chunk); },
        [](uint32_t k) { return k; }, state->values);
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

  __device__ __forceinline__ WeightFragment Weigh(uint32_t page, const float (&logits)[2][4],
                                                  WarpState<kValueDim>* state) const {
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
    return FragmentOf<T>(p);
  }

  static __device__ __forceinline__ void Rescale(float greatest, WarpState<kValueDim>* state) {
    const float max = fmaxf(state->max, greatest);
    const float factor = Weight(state->max, max);
    state->max = max;
    state->sum *= factor;
    ScaleValues(factor, state);
  }

  const TokenSource& source_;
  const uint4* const fragments_;
  const uint32_t lane_end_;
  const uint32_t ring_;
  const uint32_t t_;
  float factor_;
};

// Shared memory for merging a thread block's warps, in the place of their rings.
template <int kValueDim>
struct MergeMemory {
  float max[kAttendWarps][kLanes];
  float sum[kAttendWarps][kLanes];
  float errors[kAttendWarps][kLanes];
  float moments[kAttendWarps][kLanes];
  float dropped[kAttendWarps][kLanes];
  float values[kAttendWarps][kLanes][kValueDim + 4];  // so that lanes begin in different banks
};

// Sums beside the state of an estimate piece, of lane g; partial over t.
struct EstimateSums {
  float errors = 0;
  float moments = 0;
  float dropped = 0;
};

// Of a thread block whose warps read by a Reader.
template <typename Reader, int kValueDim>
inline constexpr uint32_t kReaderSharedBytes = std::max<uint32_t>(kAttendWarps* Reader::kRingBytes,
                                                                  sizeof(MergeMemory<kValueDim>));

// Of chosen tokens a ring holds as many pages as a warp has of most pieces: so at 128 channels more
// thread blocks have room.
static_assert(kChosenPieceTokens % (kPageRows * kAttendWarps) == 0);
template <typename T, int kKeyDim, int kValueDim>
using ChosenReader =
    PageReader<T, kKeyDim, kValueDim, int{kChosenPieceTokens / kPageRows / kAttendWarps}>;

// This warp's ring.
__device__ __forceinline__ uint32_t WarpRing(uint32_t ring_bytes) {
  return threadIdx.x / 32 * ring_bytes;
}

// Merges the thread block's warps, in their order, into lanes [0, lanes) of `out`
// [kLanes][kStateHead + kValueDim].
template <int kValueDim>
__device__ __forceinline__ void StoreState(const WarpState<kValueDim>& state,
                                           const EstimateSums& sums, uint32_t lanes, float* out) {
  auto* memory = reinterpret_cast<MergeMemory<kValueDim>*>(block_memory);
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
  for (int m = 0; m < kValueDim / 16; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      memory->values[warp][2 * t + i % 2][m * 16 + i / 2 * 8 + g] = state.values[m][i];
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
      state_out[kHeadMax] = max;
      state_out[kHeadSum] = total;
      state_out[kHeadErrors] = error;
      state_out[kHeadMoments] = moment;
      state_out[kHeadDropped] = drop;
      state_out[kHeadMassErrors] = state_out[kHeadLogitVariances] = 0;  // of trees alone
    }
  }
  __syncthreads();
}

// ---- pieces ----

// Piece `piece` of a tile's read pieces. read() is called when everything has been read.
template <typename T, int kKeyDim, int kValueDim, typename Read>
__device__ void ReadPiece(const StepHeader& step, const UnitPlace& unit, uint32_t tile,
                          uint32_t piece, Read read) {
  const RowRef& row = *unit.row;
  const uint32_t g = threadIdx.x % 32 / 4;
  TokenSource source;
  uint32_t lane_end = ~0u;
  const SegmentRef* segments = step.segments + row.segments_begin;
  if (piece < row.dense_pieces) {
    const uint32_t s =
        LastNotAfter(row.segment_count, piece, [&](uint32_t i) { return segments[i].first_piece; });
    source.pages = segments[s].pages + unit.kv_head * segments[s].pages_head_bytes;
    source.begin = (piece - segments[s].first_piece) * row.dense_piece_tokens;
    source.end = min(source.begin + row.dense_piece_tokens, segments[s].tokens);
  } else if (piece < row.dense_pieces + row.tail_pieces) {
    const uint32_t first = (piece - row.dense_pieces) * row.tail_piece_tokens;
    const uint32_t limit = row.tail_limit + row.causal * (unit.first_token + unit.tokens - 1);
    source.tail_blocks = step.tail_blocks + row.tail_blocks_begin;
    source.head_offset = unit.kv_head * step.tail_block_head_bytes;
    source.begin = max(first, row.tail_begin);
    source.end = min(first + row.tail_piece_tokens, limit);
    const LanePlace lane(step, unit, tile, g);
    lane_end = row.tail_limit + row.causal * lane.token;
  } else if (row.segment_count > 0) {  // the sink
    source.pages = segments[0].pages + unit.kv_head * segments[0].pages_head_bytes;
    source.end = segments[0].unclustered;
  }
  WarpState<kValueDim> state;
  if (source.begin < source.end) {
    const uint64_t tile_number = uint64_t{unit.unit} * step.tiles_max + tile;
    using Reader = PageReader<T, kKeyDim, kValueDim>;
    Reader reader(source, step.query_fragments + tile_number * TileFragmentWords(kKeyDim), lane_end,
                  WarpRing(Reader::kRingBytes));
    reader.Run(threadIdx.x / 32, kAttendWarps, &state);
  }
  read();
  constexpr uint32_t kFloats = StateFloats(kValueDim);
  StoreState<kValueDim>(state, {}, LanesOf(step, unit, tile),
                        TileStates(step, unit, tile, kFloats) + uint64_t{piece} * kFloats);
}

// A piece of the tokens that a unit has chosen; read as ReadPiece's.
template <typename T, int kKeyDim, int kValueDim, typename Read>
__device__ void AttendChosen(const ChosenPiece& piece, Read read) {
  TokenSource source;
  source.chosen = piece.chosen;
  source.segments = piece.segments;
  source.frames = piece.frames;
  source.kv_head = piece.kv_head;
  source.begin = piece.begin;
  source.end = piece.end;
  WarpState<kValueDim> state;
  using Reader = ChosenReader<T, kKeyDim, kValueDim>;
  Reader reader(source, piece.fragments, ~0u, WarpRing(Reader::kRingBytes));
  reader.Run(threadIdx.x / 32, kAttendWarps, &state);
  read();
  StoreState<kValueDim>(state, {}, piece.lanes, piece.state);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_ATTEND_CUH_
