// SPDX-License-Identifier: Apache-2.0
//
// Rows of a tree's index in matrix products. In memory means are bytes and deviations 4-bit codes.
// A warp works on 16 rows; its threads load them from memory in just the order in which a product
// wants them, so that nothing goes by way of shared memory. As a product may take its channels in
// any order, a thread's are neighbours. The kernels over trees do not depend on the model's dtype.
#ifndef ATTND_GPU_CUDA_STEP_TREE_ROWS_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_ROWS_CUH_

#include <cstdint>

#include "gpu/cuda/step/attend.cuh"
#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/place.cuh"

namespace attnd::gpu {

inline constexpr uint32_t kTreeWarps = 8;
inline constexpr uint32_t kTreeThreads = kTreeWarps * 32;
inline constexpr uint32_t kTreeRows = 16;  // that a warp works on at a time
inline constexpr uint32_t kNoRow = ~0u;

// Sixteen rows of one head's index. Thread i of the warp holds the number of row i % 16, or kNoRow.
struct TreeRowSet {
  uint32_t own;
  __device__ __forceinline__ uint32_t At(uint32_t i) const { return __shfl_sync(~0u, own, i); }
};

// A thread's rows of products that add rows up: 8 n + 2t + c.
__device__ __forceinline__ void RowsOfThread(const TreeRowSet& set, uint32_t (&rows)[2][2]) {
  const uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) rows[n][c] = set.At(n * 8 + 2 * t + c);
  }
}

// A thread's numbers of its rows.
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

// ---- queries times rows: products of integers ----

// Vectors as integers of three bytes each, the greatest first: the left sides of products with rows
// of bytes, to 2^-23 of a vector's greatest element. A product has 16 rows: 0..7 are the lanes'
// first bytes, 8..15 their second; the third ones have a product of their own.
inline constexpr uint32_t kQueryDigits = 3;
// Of 1, as an integer: its first byte is 127, the others are 0.
inline constexpr float kQueryOne = 127 << 16;
// Bytes of 64 channels of all lanes that are read together.
inline constexpr uint32_t kDigitBlockBytes = kLanes * 64;
template <int kDim>
inline constexpr uint32_t kDigitBytes = kLanes* kDim;

// The digits of x, from -1 to 1, of channel `channel` (in the order of products) of a lane.
template <int kDim>
__device__ __forceinline__ void StoreDigits(float x, uint32_t channel, uint32_t lane,
                                            std::byte* digits) {
  const int whole = __float2int_rn(fminf(fmaxf(x, -1.0f), 1.0f) * kQueryOne);
  const auto third = static_cast<int8_t>(whole);
  const int rest = (whole - third) >> 8;
  const auto second = static_cast<int8_t>(rest);
  const uint32_t at = channel / 64 * kDigitBlockBytes + lane * 64 + channel % 64;
  digits[at] = static_cast<std::byte>((rest - second) >> 8);
  digits[kDigitBytes<kDim> + at] = static_cast<std::byte>(second);
  digits[2 * kDigitBytes<kDim> + at] = static_cast<std::byte>(third);
}

// Products of eight rows with a tile's vectors.
struct ByteProducts {
  int high[4] = {};  // [c]: first digit of lane g and row 2t + c; [c + 2]: second digit
  int low[4] = {};   // [c]: third digit

  // 64 channels; b: a thread's bytes of row g.
  template <bool kSigned>
  __device__ __forceinline__ void Add(const uint4 (&digits)[kQueryDigits], uint4 b) {
    const auto &first = digits[0], &second = digits[1], &third = digits[2];
    MultiplyAddBytes<kSigned>(high, first.x, second.x, first.y, second.y, b.x, b.y);
    MultiplyAddBytes<kSigned>(high, first.z, second.z, first.w, second.w, b.z, b.w);
    MultiplyAddBytes<kSigned>(low, third.x, 0, third.y, 0, b.x, b.y);
    MultiplyAddBytes<kSigned>(low, third.z, 0, third.w, 0, b.z, b.w);
  }
  // In units of the vectors' 1 / kQueryOne.
  __device__ __forceinline__ float Sum(int c) const {
    return fmaf(static_cast<float>(high[c]), 65536.0f,
                fmaf(static_cast<float>(high[c + 2]), 256.0f, static_cast<float>(low[c])));
  }
};

// A thread's digits of 64 channels of lane g.
template <int kDim>
__device__ __forceinline__ void LoadDigits(const std::byte* digits, uint32_t block,
                                           uint4 (&to)[kQueryDigits]) {
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (uint32_t d = 0; d < kQueryDigits; ++d) {
    to[d] = *reinterpret_cast<const uint4*>(digits + d * kDigitBytes<kDim> +
                                            block * kDigitBlockBytes + g * 64 + t * 16);
  }
}

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

// A warp's sums over rows have channels in this order: a thread's are kRun neighbours of each
// kRun * 8, those of threads with greater g behind. sums[m][i]: channel ChannelOf(m, i / 2) of lane
// 2t + i % 2.
template <int kValueDim>
struct SumOrder {
  // Words of bytes that a thread loads at once.
  static constexpr uint32_t kWords = kValueDim % 128 == 0 ? 4 : kValueDim % 64 == 0 ? 2 : 1;
  static constexpr uint32_t kRun = kWords * 4;
  static __device__ __forceinline__ uint32_t ChannelOf(uint32_t m, uint32_t odd) {
    const uint32_t g = threadIdx.x % 32 / 4, at = m * 2 + odd;
    return at / kRun * kRun * 8 + g * kRun + at % kRun;
  }
};

// A thread's words of four rows of kWords words in all for each g: those of a thread are neighbours
// by kRunWords.
template <uint32_t kRunWords, uint32_t kWords>
__device__ __forceinline__ void LoadRowWords(const std::byte* part, const uint32_t (&rows)[2][2],
                                             uint32_t (&to)[2][2][kWords]) {
  const uint32_t g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t row = rows[n][c];
      const auto* from = reinterpret_cast<const uint32_t*>(part) + uint64_t{row} * (kWords * 8);
#pragma unroll
      for (uint32_t i = 0; i < kWords; i += kRunWords) {
        const uint32_t* at = from + i * 8 + g * kRunWords;
        uint32_t* words = &to[n][c][i];
#pragma unroll
        for (uint32_t w = 0; w < kRunWords; ++w) words[w] = 0;
        if (row == kNoRow) continue;
        if constexpr (kRunWords == 4) {
          const uint4 four = __ldg(reinterpret_cast<const uint4*>(at));
          words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
        } else if constexpr (kRunWords == 2) {
          const uint2 two = __ldg(reinterpret_cast<const uint2*>(at));
          words[0] = two.x, words[1] = two.y;
        } else {
          words[0] = __ldg(at);
        }
      }
    }
  }
}

// Byte kByte of a and of b, from -127 to 127, as a pair of bf16. 0x4300 | (x % 128) is 128 + x %
// 128, from which 256 is taken if x is negative, else 128.
template <int kByte>
__device__ __forceinline__ uint32_t BytePair(uint32_t a, uint32_t b) {
  const uint32_t x = __byte_perm(a, b, kByte | kByte << 4 | (4 + kByte) << 8 | (4 + kByte) << 12);
  uint32_t low = (x & 0x007F007Fu) | 0x43004300u;
  uint32_t less = (x & 0x00800080u) | 0x43004300u;
  return Bits(
      __hsub2(*reinterpret_cast<__nv_bfloat162*>(&low), *reinterpret_cast<__nv_bfloat162*>(&less)));
}
// The squares of the low or the high code in byte kByte of a and of b.
template <int kByte, bool kHigh>
__device__ __forceinline__ uint32_t SquarePair(uint32_t a, uint32_t b) {
  const uint32_t x = __byte_perm(a, b, kByte | kByte << 4 | (4 + kByte) << 8 | (4 + kByte) << 12);
  return CodeSquares<__nv_bfloat16>(kHigh ? x >> 4 : x);
}

// Adds weights times rows for two neighbouring channels of each thread. first(n), second(n): of a
// channel, rows 8n + 2t and 8n + 2t + 1 as a pair of bf16.
template <typename First, typename Second>
__device__ __forceinline__ void AddTwoChannels(const WeightFragment& weights, First first,
                                               Second second, float (&sum)[4]) {
  const uint32_t a[4] = {first(0), second(0), first(1), second(1)};
  MultiplyAdd<__nv_bfloat16>(sum, a, weights.greater[0], weights.greater[1]);
  MultiplyAdd<__nv_bfloat16>(sum, a, weights.rest[0], weights.rest[1]);
}

// Sixteen rows of bytes, as sums over rows want them.
template <int kValueDim>
struct ByteRows {
  static constexpr uint32_t kWords = kValueDim / 32;
  uint32_t words[2][2][kWords];

  __device__ __forceinline__ ByteRows(const std::byte* part, const uint32_t (&rows)[2][2]) {
    LoadRowWords<SumOrder<kValueDim>::kWords>(part, rows, words);
  }
  __device__ __forceinline__ void AddTo(const float (&weights)[2][2],
                                        float (&sums)[kValueDim / 16][4]) const {
    const WeightFragment fragment = FragmentOf<__nv_bfloat16>(weights);
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      const auto pair = [&]<int kByte>(int n) {
        return BytePair<kByte>(words[n][0][w], words[n][1][w]);
      };
      AddTwoChannels(
          fragment, [&](int n) { return pair.template operator()<0>(n); },
          [&](int n) { return pair.template operator()<1>(n); }, sums[2 * w]);
      AddTwoChannels(
          fragment, [&](int n) { return pair.template operator()<2>(n); },
          [&](int n) { return pair.template operator()<3>(n); }, sums[2 * w + 1]);
    }
  }
};

// Sixteen rows of codes, whose squares are summed up: the low codes' sums come first, in the order
// of SumOrder<kDim / 2>, then the high ones'.
template <int kDim>
struct CodeRows {
  static constexpr uint32_t kWords = kDim / 64;
  uint32_t words[2][2][kWords];

  __device__ __forceinline__ CodeRows(const std::byte* part, const uint32_t (&rows)[2][2]) {
    LoadRowWords<SumOrder<kDim / 2>::kWords>(part, rows, words);
  }
  __device__ __forceinline__ void AddTo(const float (&weights)[2][2],
                                        float (&sums)[kDim / 16][4]) const {
    const WeightFragment fragment = FragmentOf<__nv_bfloat16>(weights);
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      AddHalf<false>(fragment, w, sums[2 * w], sums[2 * w + 1]);
      AddHalf<true>(fragment, w, sums[kDim / 32 + 2 * w], sums[kDim / 32 + 2 * w + 1]);
    }
  }

 private:
  template <bool kHigh>
  __device__ __forceinline__ void AddHalf(const WeightFragment& fragment, uint32_t w,
                                          float (&first)[4], float (&second)[4]) const {
    const auto pair = [&]<int kByte>(int n) {
      return SquarePair<kByte, kHigh>(words[n][0][w], words[n][1][w]);
    };
    AddTwoChannels(
        fragment, [&](int n) { return pair.template operator()<0>(n); },
        [&](int n) { return pair.template operator()<1>(n); }, first);
    AddTwoChannels(
        fragment, [&](int n) { return pair.template operator()<2>(n); },
        [&](int n) { return pair.template operator()<3>(n); }, second);
  }
};

// Sixteen rows of bf16 that follow one another, with the channels of ByteRows.
template <int kValueDim>
struct HalfRows {
  static constexpr uint32_t kRun = SumOrder<kValueDim>::kRun, kRuns = kValueDim / kRun / 8;
  uint4 words[2][2][kValueDim / 64];

  __device__ __forceinline__ explicit HalfRows(const std::byte* from) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const std::byte* row = from + (n * 8 + 2 * t + c) * kValueDim * 2;
#pragma unroll
        for (uint32_t i = 0; i < kValueDim / 64; ++i) {
          const uint32_t channel = i * 8 / kRun * kRun * 8 + g * kRun + i * 8 % kRun;
          words[n][c][i] = __ldg(reinterpret_cast<const uint4*>(row + channel * 2));
        }
      }
    }
  }
  __device__ __forceinline__ void AddTo(const float (&weights)[2][2],
                                        float (&sums)[kValueDim / 16][4]) const {
    const WeightFragment fragment = FragmentOf<__nv_bfloat16>(weights);
#pragma unroll
    for (uint32_t i = 0; i < kValueDim / 64; ++i) {
      const auto add = [&](auto word, uint32_t m) {
        AddTwoChannels(
            fragment,
            [&](int n) { return __byte_perm(word(words[n][0][i]), word(words[n][1][i]), 0x5410); },
            [&](int n) { return __byte_perm(word(words[n][0][i]), word(words[n][1][i]), 0x7632); },
            sums[m]);
      };
      add([](const uint4& x) { return x.x; }, i * 4);
      add([](const uint4& x) { return x.y; }, i * 4 + 1);
      add([](const uint4& x) { return x.z; }, i * 4 + 2);
      add([](const uint4& x) { return x.w; }, i * 4 + 3);
    }
  }
};

// Stores a warp's sums as to[lane][channel]: four neighbouring channels at a time. kDim: channels
// of the SumOrder, which `sums` may hold several times, one behind another.
template <int kDim, int kRows, typename Array>
__device__ __forceinline__ void StoreSums(const float (&sums)[kRows][4], Array& to) {
  const uint32_t t = threadIdx.x % 4;
#pragma unroll
  for (uint32_t m = 0; m < kRows; m += 2) {
    const uint32_t channel = m / (kDim / 16) * kDim + SumOrder<kDim>::ChannelOf(m % (kDim / 16), 0);
#pragma unroll
    for (uint32_t odd = 0; odd < 2; ++odd) {
      *reinterpret_cast<float4*>(&to[2 * t + odd][channel]) =
          make_float4(sums[m][odd], sums[m][odd + 2], sums[m + 1][odd], sums[m + 1][odd + 2]);
    }
  }
}

// The left side of a product of vectors of bf16, of kLanes vectors x in shared memory. The whole
// thread block.
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

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_ROWS_CUH_
