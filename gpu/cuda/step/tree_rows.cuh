// SPDX-License-Identifier: Apache-2.0
//
// Rows of a tree's index in products of integers. In memory means are bytes and deviations 4-bit
// codes, whose squares are bytes, too. So the other side, which is numbers, is made bytes as well:
// each number is an integer of three digits of eight bits, which take a product each.
//
// Queries times rows: a warp works on 16 rows, whose bytes its threads load from memory in just the
// order in which a product wants them; as it may take its channels in any order, a thread's are
// neighbours. Weights times rows: a warp works on 32 channels of all rows of a thread block, which
// lie in shared memory. The kernels over trees do not depend on the model's dtype.
#ifndef ATTND_GPU_CUDA_STEP_TREE_ROWS_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_ROWS_CUH_

#include <cstdint>

#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/place.cuh"

namespace attnd::gpu {

inline constexpr uint32_t kTreeWarps = 8;
inline constexpr uint32_t kTreeThreads = kTreeWarps * 32;
inline constexpr uint32_t kTreeRows = 16;                      // that a warp works on at a time
inline constexpr uint32_t kTileRows = kTreeWarps * kTreeRows;  // that a thread block works on
inline constexpr uint32_t kNoRow = ~0u;

// Sixteen rows of one head's index. Thread i of the warp holds the number of row i % 16, or kNoRow.
struct TreeRowSet {
  uint32_t own;
  __device__ __forceinline__ uint32_t At(uint32_t i) const { return __shfl_sync(~0u, own, i); }
};

// ---- numbers as bytes ----

// An integer of three bytes, the greatest first: a number from -1 to 1, to 2^-23.
inline constexpr uint32_t kDigits = 3;
// Of 1, as an integer: its first byte is 127, the others are 0.
inline constexpr float kDigitsOne = 127 << 16;

// Of x, at most 1 but for rounding. Each digit is the number's byte less 128, which was added
// before.
struct ByteDigits {
  uint32_t bytes;

  __device__ __forceinline__ explicit ByteDigits(float x) {
    bytes = (static_cast<uint32_t>(__float2int_rn(x * kDigitsOne)) + kMiddle) ^ kMiddle;
  }
  __device__ __forceinline__ std::byte operator[](uint32_t digit) const {
    return static_cast<std::byte>(bytes >> (16 - 8 * digit));
  }

 private:
  static constexpr uint32_t kMiddle = 0x808080u;
};

// Sums of products with each digit, in units of 1 / kDigitsOne.
__device__ __forceinline__ float SumOfDigits(const int (&sums)[kDigits][4], int i) {
  return fmaf(static_cast<float>(sums[0][i]), 65536.0f,
              fmaf(static_cast<float>(sums[1][i]), 256.0f, static_cast<float>(sums[2][i])));
}

// ---- queries times rows ----

// A tile's vectors as the right sides of products: the digits of 64 channels of all lanes lie
// together, each digit's apart.
template <int kDim>
struct VectorDigits {
  __align__(16) std::byte of[kDigits][kDim / 64][kLanes][64];

  // Of x, of channel `channel` (in the order of products) of a lane.
  __device__ __forceinline__ void Store(float x, uint32_t channel, uint32_t lane) {
    const ByteDigits digits(fminf(fmaxf(x, -1.0f), 1.0f));
#pragma unroll
    for (uint32_t d = 0; d < kDigits; ++d) of[d][channel / 64][lane][channel % 64] = digits[d];
  }
  // A thread's, of 64 channels of lane g.
  __device__ __forceinline__ void Load(uint32_t block, uint4 (&to)[kDigits]) const {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (uint32_t d = 0; d < kDigits; ++d) {
      to[d] = *reinterpret_cast<const uint4*>(&of[d][block][g][t * 16]);
    }
  }
};

// Sums of products of a warp's sixteen rows with a tile's vectors.
struct RowProducts {
  int sums[kDigits][4] = {};  // [c]: of row g and lane 2t + c; [c + 2]: of row g + 8

  // 64 channels; row, row8: a thread's bytes of rows g and g + 8. kSigned: whether they are.
  template <bool kSigned, int kDim>
  __device__ __forceinline__ void Add(const VectorDigits<kDim>& vectors, uint32_t block,
                                      const uint4& row, const uint4& row8) {
    uint4 digits[kDigits];
    vectors.Load(block, digits);
#pragma unroll
    for (uint32_t d = 0; d < kDigits; ++d) {
      const uint4& x = digits[d];
      MultiplyAddBytes<kSigned>(sums[d], row.x, row8.x, row.y, row8.y, x.x, x.y);
      MultiplyAddBytes<kSigned>(sums[d], row.z, row8.z, row.w, row8.w, x.z, x.w);
    }
  }
};

// The squares of the four 4-bit codes in the low half of `codes`, as bytes. A byte of a table that
// is below 128 becomes 0 where its selector's highest bit is set: so each half of the codes has a
// table of its own, and the greater squares, which need eight bits, are half, twice, and the rest.
__device__ __forceinline__ uint32_t ByteSquares(uint32_t codes) {
  const uint32_t greater = codes ^ 0x8888u;
  return PermuteBytes(0x09040100u, 0x31241910u, codes) +
         2 * PermuteBytes(0x3C322820u, 0x70625448u, greater) +
         PermuteBytes(0x01000100u, 0x01000100u, greater);
}

// Those of a thread's codes, in the order of products.
__device__ __forceinline__ uint4 SixteenSquares(uint2 codes) {
  return make_uint4(ByteSquares(codes.x), ByteSquares(codes.x >> 16), ByteSquares(codes.y),
                    ByteSquares(codes.y >> 16));
}

// Where the products with squared codes have an axis: a byte of codes is those of axes i and
// kDim / 2 + i, which follow one another.
template <int kDim>
__device__ __forceinline__ uint32_t ChannelOfAxis(uint32_t axis) {
  return axis % (kDim / 2) * 2 + axis / (kDim / 2);
}

// A thread's bytes of row g of eight rows, or zeros.
template <typename Word, uint32_t kCount>
__device__ __forceinline__ void LoadRow(const std::byte* part, uint32_t row, uint32_t row_bytes,
                                        Word (&to)[kCount]) {
  const uint32_t t = threadIdx.x % 4;
  const auto* from = reinterpret_cast<const Word*>(part + uint64_t{row} * row_bytes) + t;
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    to[i] = Word{};
    if (row != kNoRow) to[i] = __ldg(from + i * 4);
  }
}

// Sixteen rows' bytes and codes, as products with queries want them.
template <int kDim>
struct ScoredRows {
  static constexpr uint32_t kBlocks = kDim / 64;
  uint4 bytes[2][kBlocks];
  uint2 codes[2][kBlocks];

  __device__ __forceinline__ ScoredRows(const std::byte* head, const TreePart& part,
                                        const TreeRowSet& set) {
    const uint32_t g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t row = set.At(n * 8 + g);
      LoadRow(head + part.centroids, row, kDim, bytes[n]);
      LoadRow(head + part.deviation_codes, row, kDim / 2, codes[n]);
    }
  }
};

// ---- weights times rows ----

// Where a row's bytes lie in shared memory: sectors of 32 bytes change places within a row, so that
// the same sector of four neighbouring rows lies in different banks.
template <int kRowBytes>
struct RowPlace {
  static_assert(kRowBytes % 64 == 0);
  static __device__ __forceinline__ uint32_t Of(uint32_t row, uint32_t byte) {
    const uint32_t other = kRowBytes % 128 == 0 ? row % 4 : row % 4 / 2;
    return row * kRowBytes + (byte / 32 ^ other) * 32 + byte % 32;
  }
};

// The tile's weights of one kind of rows, as digits. Of 32 rows a product takes rows t, t + 4, ...
// of each thread: they are neighbours here.
struct TileDigits {
  static constexpr uint32_t kStride = kTileRows + 32;  // lanes lie in different banks
  __align__(16) std::byte of[kDigits][kLanes][kStride];

  __device__ __forceinline__ void Store(float x, uint32_t row, uint32_t lane) {
    const ByteDigits bytes(x);
    const uint32_t at = row / 32 * 32 + row % 4 * 8 + row % 32 / 4;
#pragma unroll
    for (uint32_t d = 0; d < kDigits; ++d) of[d][lane][at] = bytes[d];
  }
  // A thread's, of lane g, of rows [32 step, 32 step + 32). Lanes without a query have zeros.
  __device__ __forceinline__ void Load(uint32_t step, uint32_t lanes, uint2 (&to)[kDigits]) const {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (uint32_t d = 0; d < kDigits; ++d) {
      to[d] = {};
      if (g < lanes) to[d] = *reinterpret_cast<const uint2*>(&of[d][g][step * 32 + t * 8]);
    }
  }
};

// Word i of `to`: byte i of each word of `from`.
__device__ __forceinline__ void TransposeBytes(const uint32_t* from, uint32_t (&to)[4]) {
  const uint32_t low01 = PermuteBytes(from[0], from[1], 0x5140);
  const uint32_t low23 = PermuteBytes(from[2], from[3], 0x5140);
  const uint32_t high01 = PermuteBytes(from[0], from[1], 0x7362);
  const uint32_t high23 = PermuteBytes(from[2], from[3], 0x7362);
  to[0] = PermuteBytes(low01, low23, 0x5410);
  to[1] = PermuteBytes(low01, low23, 0x7632);
  to[2] = PermuteBytes(high01, high23, 0x5410);
  to[3] = PermuteBytes(high01, high23, 0x7632);
}

// Channels that a warp sums up at a time: a thread has 4g .. 4g + 3 of lanes 2t and 2t + 1.
inline constexpr uint32_t kSumChannels = 32;
struct ChannelSums {
  float x[2][4] = {};  // [lane 2t + c][channel]

  // Adds weights times bytes, of rows [0, 32 steps) and kSumChannels channels. units: of the
  // weights of lanes 2t and 2t + 1.
  template <bool kSigned, int kRowBytes>
  __device__ __forceinline__ void Add(const std::byte* rows, uint32_t channel,
                                      const TileDigits& digits, uint32_t steps, uint32_t lanes,
                                      const float (&units)[2]) {
    using Place = RowPlace<kRowBytes>;
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const std::byte* own = rows + Place::Of(t, channel + 4 * g);  // as of all rows 4j + t
    int sums[2][kDigits][4] = {};                                 // [p]: channels 2p and 2p + 1
#pragma unroll 2
    for (uint32_t step = 0; step < steps; ++step) {
      uint2 weights[kDigits];
      digits.Load(step, lanes, weights);
      uint32_t words[8], bytes[2][4];
#pragma unroll
      for (uint32_t j = 0; j < 8; ++j) {
        words[j] = *reinterpret_cast<const uint32_t*>(own + (step * 32 + 4 * j) * kRowBytes);
      }
      TransposeBytes(words, bytes[0]);
      TransposeBytes(words + 4, bytes[1]);
#pragma unroll
      for (uint32_t p = 0; p < 2; ++p) {
#pragma unroll
        for (uint32_t d = 0; d < kDigits; ++d) {
          MultiplyAddBytes<kSigned>(sums[p][d], bytes[0][2 * p], bytes[0][2 * p + 1],
                                    bytes[1][2 * p], bytes[1][2 * p + 1], weights[d].x,
                                    weights[d].y);
        }
      }
    }
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        x[c][i] += SumOfDigits(sums[i / 2], c + i % 2 * 2) * (1 / kDigitsOne) * units[c];
      }
    }
  }
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_ROWS_CUH_
