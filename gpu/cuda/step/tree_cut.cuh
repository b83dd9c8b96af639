// SPDX-License-Identifier: Apache-2.0
//
// Where a ranking of a tree's rows is cut, by one thread block: the digits of the cut's key are
// found by histograms, the highest first. Weights are integers (counts, or shares in fixed point),
// so that no sum depends on the order in which threads come.
#ifndef ATTND_GPU_CUDA_STEP_TREE_CUT_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_CUT_CUH_

#include <cstdint>

#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

inline constexpr uint32_t kCutThreads = 512;
inline constexpr uint32_t kCutWarps = kCutThreads / 32;
inline constexpr uint32_t kCutDigitBits = 11;
inline constexpr uint32_t kCutDigits = 1u << kCutDigitBits;

using CutWeight = unsigned long long;

// Weights are added up in words of 32 bits, kCutWordBits of each weight to a word: shared memory
// adds those at once, and 64 bits by trying. So many rows fit.
inline constexpr uint32_t kCutWords = 3;
inline constexpr uint32_t kCutWordBits = 12;
static_assert(kTreeRowsMax <= 1u << (32 - kCutWordBits));

// In shared memory.
struct CutMemory {
  uint32_t histogram[kCutWords][kCutDigits];
  CutWeight parts[kCutWarps];
  CutWeight above;
  uint32_t digit;
};

// Sum over the threads before this one, and *total over all. The whole thread block.
__device__ __forceinline__ CutWeight ScanBlock(CutWeight x, CutMemory* memory, CutWeight* total) {
  const uint32_t thread = threadIdx.x % 32, warp = threadIdx.x / 32;
  CutWeight sum = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const CutWeight other = __shfl_up_sync(~0u, sum, offset);
    if (thread >= offset) sum += other;
  }
  __syncthreads();  // the parts of the scan before have been read
  if (thread == 31) memory->parts[warp] = sum;
  __syncthreads();
  CutWeight part = thread < kCutWarps ? memory->parts[thread] : 0;
#pragma unroll
  for (int offset = 1; offset < kCutWarps; offset *= 2) {
    const CutWeight other = __shfl_up_sync(~0u, part, offset);
    if (thread >= offset) part += other;
  }
  *total = __shfl_sync(~0u, part, kCutWarps - 1);
  const CutWeight before = __shfl_sync(~0u, part, warp > 0 ? warp - 1 : 0);
  return (warp > 0 ? before : 0) + sum - x;
}

// kWords: of the words, those that the weights have.
template <uint32_t kWords>
__device__ __forceinline__ void ClearHistogram(CutMemory* memory) {
  auto* words = reinterpret_cast<uint4*>(memory->histogram);
  for (uint32_t i = threadIdx.x; i < kWords * kCutDigits / 4; i += kCutThreads) {
    words[i] = make_uint4(0, 0, 0, 0);
  }
}
template <uint32_t kWords>
__device__ __forceinline__ void AddToHistogram(CutWeight weight, uint32_t digit,
                                               CutMemory* memory) {
#pragma unroll
  for (uint32_t w = 0; w < kWords; ++w) {
    const auto part =
        static_cast<uint32_t>(weight >> w * kCutWordBits) & ((1u << kCutWordBits) - 1);
    if (part != 0) atomicAdd(&memory->histogram[w][digit], part);
  }
}
template <uint32_t kWords>
__device__ __forceinline__ CutWeight OfDigit(const CutMemory& memory, uint32_t digit) {
  CutWeight sum = 0;
#pragma unroll
  for (uint32_t w = 0; w < kWords; ++w) {
    sum += static_cast<CutWeight>(memory.histogram[w][digit]) << w * kCutWordBits;
  }
  return sum;
}

// Rows are taken in the order of descending keys, the lower number first among equals, as long as
// those before weigh less than `limit`: rows with greater keys, and of those with `key` itself the
// ones before which `above` and the equals weigh less.
struct TreeCut {
  uint32_t key;
  CutWeight above;
  CutWeight limit;
};

// How rows are weighed: each as one, or by weight_of(i).
struct OneEach {
  static constexpr uint32_t kWords = 1;
  __device__ __forceinline__ CutWeight operator()(uint32_t) const { return 1; }
};
template <typename F>
struct WeightBy {
  static constexpr uint32_t kWords = kCutWords;
  F f;
  __device__ __forceinline__ CutWeight operator()(uint32_t i) const { return f(i); }
};
template <typename F>
WeightBy(F) -> WeightBy<F>;

// What a cut is to leave: rows above it weigh at least `weight`, or rows below it at most that.
enum class CutLimit { kTaken, kLeft };

// keys[i] > 0 of the rows that are there, 0 of others; weight_of(i) of a row.
template <typename WeightOf>
__device__ TreeCut FindCut(const uint32_t* keys, uint32_t count, CutLimit kind, CutWeight weight,
                           WeightOf weight_of, CutMemory* memory) {
  constexpr uint32_t kOwn = kCutDigits / kCutThreads, kWords = WeightOf::kWords;
  TreeCut cut = {0, 0, weight};
  uint32_t bits = 32;  // of the key that are not known
  while (bits > 0) {
    const uint32_t digit_bits = min(bits, kCutDigitBits), shift = bits - digit_bits;
    ClearHistogram<kWords>(memory);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += kCutThreads) {
      const uint32_t key = keys[i];
      if (key == 0 || (bits < 32 && key >> bits != cut.key >> bits)) continue;
      const uint32_t digit = key >> shift & ((1u << digit_bits) - 1);
      AddToHistogram<kWords>(weight_of(i), digit, memory);
    }
    __syncthreads();
    // A thread has some neighbouring digits, the first thread the greatest.
    const uint32_t top = kCutDigits - 1 - threadIdx.x * kOwn;
    CutWeight own = 0, total;
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) own += OfDigit<kWords>(*memory, top - i);
    CutWeight above = cut.above + ScanBlock(own, memory, &total);
    if (bits == 32) {
      if (kind == CutLimit::kLeft) cut.limit = total > weight ? total - weight : 0;
      if (cut.limit == 0) return {~0u, 0, 0};               // none
      if (total < cut.limit) return {0, total, cut.limit};  // all
    }
    if (above < cut.limit && cut.limit <= above + own) {
#pragma unroll
      for (uint32_t i = 0; i < kOwn; ++i) {
        const CutWeight of_digit = OfDigit<kWords>(*memory, top - i);
        if (above < cut.limit && cut.limit <= above + of_digit) {
          memory->digit = top - i;
          memory->above = above;
        }
        above += of_digit;
      }
    }
    __syncthreads();
    cut.key |= memory->digit << shift;
    cut.above = memory->above;
    bits = shift;
    __syncthreads();
  }
  return cut;
}

// Calls take(i) for every row that the cut takes.
template <typename WeightOf, typename Take>
__device__ void ApplyCut(const uint32_t* keys, uint32_t count, const TreeCut& cut,
                         WeightOf weight_of, CutMemory* memory, Take take) {
  uint32_t equals = 0;
  for (uint32_t i = threadIdx.x; i < count; i += kCutThreads) {
    const uint32_t key = keys[i];
    if (key > cut.key || (key != 0 && key == cut.key)) {
      equals += key == cut.key ? 1 : 0;
      if (key > cut.key) take(i);
    }
  }
  if (cut.key == 0 || cut.key == ~0u) return;
  // As a rule one row has the cut's key, and is taken: without it the others weigh too little.
  const bool one = __syncthreads_count(equals > 0) == 1 && !__syncthreads_or(equals > 1);
  CutWeight above = cut.above;
  for (uint32_t first = 0; first < count; first += kCutThreads) {
    const uint32_t i = first + threadIdx.x;
    const bool equal = i < count && keys[i] == cut.key;
    CutWeight total = 0, before = above;
    if (!one) before += ScanBlock(equal ? weight_of(i) : 0, memory, &total);
    if (equal && before < cut.limit) take(i);
    above += total;
  }
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_CUT_CUH_
