// SPDX-License-Identifier: Apache-2.0
//
// Rows of a tree's index on their way into matrix products. In memory means are bytes and
// deviations 4-bit codes; in shared memory all of them are bf16, which holds bytes and squared
// codes exactly. So the kernels over trees do not depend on the model's dtype.
#ifndef ATTND_GPU_CUDA_STEP_TREE_ROWS_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_ROWS_CUH_

#include <cstdint>

#include "gpu/cuda/step/attend.cuh"
#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/rows.cuh"

namespace attnd::gpu {

inline constexpr uint32_t kTreeWarps = 4;
inline constexpr uint32_t kTreeThreads = kTreeWarps * 32;
inline constexpr uint32_t kTreeRows = 16;  // that a warp works on at a time
inline constexpr uint32_t kNoRow = ~0u;

// Where a chunk of 16 bytes of a row of kRowBytes lies: both ways of reading rows (two neighbouring
// rows at a time, and eight rows' equal chunks at a time) meet different banks.
template <int kRowBytes>
__device__ __forceinline__ uint32_t TreeChunk(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + (chunk ^ row % 8 ^ (row & 1) * 4) * 16;
}

__device__ __forceinline__ void StoreShared16(uint32_t offset, uint4 x) {
  *reinterpret_cast<uint4*>(block_memory + offset) = x;
}

// Bytes 2i and 2i + 1 of a word of codes from -127 to 127, as a pair of bf16. With u = code + 128:
// 0x4300 | (u % 128) is 128 + u % 128, from which 256 is taken, or 128 if u is 128 or more.
template <int kPair>
__device__ __forceinline__ uint32_t BytePair(uint32_t word) {
  const uint32_t u = __byte_perm(word, 0, kPair == 0 ? 0x4140 : 0x4342) ^ 0x00800080u;
  uint32_t low = (u & 0x007F007Fu) | 0x43004300u;
  uint32_t less = 0x43804380u ^ (u & 0x00800080u);
  return Bits(
      __hsub2(*reinterpret_cast<__nv_bfloat162*>(&low), *reinterpret_cast<__nv_bfloat162*>(&less)));
}

// Sixteen rows of one head's index. Thread i of the warp holds the number of row i % 16, or kNoRow.
struct TreeRowSet {
  uint32_t own;
  __device__ __forceinline__ uint32_t At(uint32_t i) const { return __shfl_sync(~0u, own, i); }
};

// Rows of kRowBytes, 16 bytes a thread at a time; missing ones are 0.
template <int kRowBytes, uint32_t kLoads>
__device__ __forceinline__ void LoadTreeRows(const std::byte* from, const TreeRowSet& rows,
                                             uint4 (&raw)[kLoads]) {
  constexpr uint32_t kChunks = kRowBytes / 16;
#pragma unroll
  for (uint32_t i = 0; i < kLoads; ++i) {
    const uint32_t at = i * 32 + threadIdx.x % 32;
    const uint32_t row = rows.At(at / kChunks);
    raw[i] = make_uint4(0, 0, 0, 0);
    if (row != kNoRow) {
      raw[i] =
          __ldg(reinterpret_cast<const uint4*>(from + uint64_t{row} * kRowBytes) + at % kChunks);
    }
  }
}

// Rows of bytes into shared memory at `to`; missing ones become 0.
template <int kDim>
__device__ __forceinline__ void ExpandBytes(const std::byte* codes, const TreeRowSet& rows,
                                            uint32_t to) {
  constexpr uint32_t kChunks = kDim / 16;  // of a row in memory
  constexpr uint32_t kLoads = kTreeRows * kChunks / 32;
  const uint32_t thread = threadIdx.x % 32;
  uint4 raw[kLoads];
  LoadTreeRows<kDim>(codes, rows, raw);
#pragma unroll
  for (uint32_t i = 0; i < kLoads; ++i) {
    const uint32_t at = i * 32 + thread, row = at / kChunks, chunk = at % kChunks * 2;
    const uint4 x = raw[i];
    StoreShared16(
        to + TreeChunk<kDim * 2>(row, chunk),
        make_uint4(BytePair<0>(x.x), BytePair<1>(x.x), BytePair<0>(x.y), BytePair<1>(x.y)));
    StoreShared16(
        to + TreeChunk<kDim * 2>(row, chunk + 1),
        make_uint4(BytePair<0>(x.z), BytePair<1>(x.z), BytePair<0>(x.w), BytePair<1>(x.w)));
  }
}

// Eight neighbouring codes' squares, of the low or the high halves of eight bytes.
template <int kShift>
__device__ __forceinline__ uint4 EightSquares(uint32_t a, uint32_t b) {
  const auto pair = [](uint32_t word, uint32_t order) {
    return CodeSquares<__nv_bfloat16>(__byte_perm(word, 0, order) >> kShift);
  };
  return make_uint4(pair(a, 0x4140), pair(a, 0x4342), pair(b, 0x4140), pair(b, 0x4342));
}

// The squares of rows of deviation codes, in the order of axes.
template <int kDim>
__device__ __forceinline__ void ExpandSquares(const std::byte* codes, const TreeRowSet& rows,
                                              uint32_t to) {
  constexpr uint32_t kChunks = kDim / 32;  // of a row in memory
  constexpr uint32_t kLoads = kTreeRows * kChunks / 32;
  const uint32_t thread = threadIdx.x % 32;
  uint4 raw[kLoads];
  LoadTreeRows<kDim / 2>(codes, rows, raw);
#pragma unroll
  for (uint32_t i = 0; i < kLoads; ++i) {
    const uint32_t at = i * 32 + thread, row = at / kChunks, chunk = at % kChunks * 2;
    const uint4 x = raw[i];
    const auto store = [&](uint32_t c, uint4 squares) {
      StoreShared16(to + TreeChunk<kDim * 2>(row, c), squares);
    };
    store(chunk, EightSquares<0>(x.x, x.y));
    store(chunk + 1, EightSquares<0>(x.z, x.w));
    store(kDim / 16 + chunk, EightSquares<4>(x.x, x.y));
    store(kDim / 16 + chunk + 1, EightSquares<4>(x.z, x.w));
  }
}

// Rows of bf16 that follow one another.
template <int kDim>
__device__ __forceinline__ void CopyTreeRows(const std::byte* from, uint32_t to) {
  CopyRows<kDim * 2, TreeChunk<kDim * 2>>(to, [&](uint32_t row) { return from + row * kDim * 2; });
}

// Products of the 16 rows at `rows` with a tile's vectors: (sum[n][c] + sum[n][c + 2]) is that of
// row 8 n + 2t + c and lane g. fragments: of WriteTreeFragments.
template <int kDim>
__device__ __forceinline__ void DotTreeRows(uint32_t rows, const uint32_t* fragments,
                                            float (&sum)[2][4]) {
  DotRows<__nv_bfloat16, kDim, TreeChunk<kDim * 2>>(rows, fragments, sum);
}

// values += weights * the 16 rows at `rows`.
template <int kDim>
__device__ __forceinline__ void AddTreeRows(const float (&weights)[2][2], uint32_t rows,
                                            float (&values)[kDim / 16][4]) {
  AddValues<__nv_bfloat16, kDim>(
      FragmentOf<__nv_bfloat16>(weights),
      [&](uint32_t row, uint32_t chunk) { return rows + TreeChunk<kDim * 2>(row, chunk); },
      [](uint32_t k) { return k; }, values);
}

// The left side of DotTreeRows from kLanes vectors x in shared memory. The whole thread block.
template <int kDim>
__device__ __forceinline__ void WriteTreeFragments(const float (*x)[kDim], uint32_t* words) {
  const uint32_t warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const uint32_t g = thread / 4, t = thread % 4;
  for (uint32_t pair = warp; pair < kDim / 8; pair += kTreeWarps) {
    const float* from = x[g] + pair / 4 * 32 + t * 8 + pair % 4 * 2;
    uint32_t* out = words + (pair / 4 * 32 + thread) * 8 + pair % 4 * 2;
    Split<__nv_bfloat16>(from[0], from[1], &out[0], &out[1]);
  }
}

// A thread's numbers of its rows: [n][c] is that of row 8 n + 2t + c.
struct TreeNumbers {
  float x[2][2];

  __device__ __forceinline__ static TreeNumbers Load(const std::byte* part,
                                                     const uint32_t (&rows)[2][2]) {
    TreeNumbers numbers;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        numbers.x[n][c] =
            rows[n][c] != kNoRow ? __ldg(reinterpret_cast<const float*>(part) + rows[n][c]) : 0.0f;
      }
    }
    return numbers;
  }
};
__device__ __forceinline__ void RowsOfThread(const TreeRowSet& set, uint32_t (&rows)[2][2]) {
  const uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) rows[n][c] = set.At(n * 8 + 2 * t + c);
  }
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_ROWS_CUH_
