// SPDX-License-Identifier: Apache-2.0
//
// Finding where a ranking is cut, by one block and without sorting: digit by digit of the scores'
// bits, from histograms of what each digit weighs. Weights are integers (counts, or shares in fixed
// point), so that no sum depends on the order in which threads come.
#ifndef ATTND_GPU_CUDA_SELECT_CUH_
#define ATTND_GPU_CUDA_SELECT_CUH_

#include <cstdint>

namespace attnd::gpu {

inline constexpr uint32_t kSelectThreads = 1024;
// A key's digits, from the highest.
struct Digit {
  uint32_t shift;
  uint32_t bits;
};
__device__ __forceinline__ constexpr Digit KeyDigit(int pass) {
  return pass == 0 ? Digit{21, 11} : pass == 1 ? Digit{10, 11} : Digit{0, 10};
}
inline constexpr uint32_t kDigits = 1u << 11;
// One, in fixed point: 2^-40 is far below what float32 scores tell apart near a cut, and 2^24
// clusters of weight 2 still fit.
inline constexpr uint64_t kOne = uint64_t{1} << 40;

// What is above a cut: keys greater than `key`, and the first `ties` of those equal to it.
struct RankCut {
  uint32_t key;
  uint32_t ties;
};
inline constexpr RankCut kTakeAll = {0, 0};  // keys of clusters are at least 1
inline constexpr RankCut kTakeNone = {~0u, 0};

struct SelectMemory {
  unsigned long long histogram[kDigits];
  unsigned long long scan[32];
  unsigned long long before;
  unsigned long long weight;
  uint32_t digit;
};

// A score, not negative, as a key in the same order. 0 is kept for slots without a cluster.
__device__ __forceinline__ uint32_t KeyOf(float score) { return __float_as_uint(score) + 1; }
__device__ __forceinline__ float ScoreOf(uint32_t key) { return __uint_as_float(key - 1); }

// Sum of x over the threads before this one, and *total over all. Every thread calls it.
__device__ __forceinline__ unsigned long long BlockScan(unsigned long long x, SelectMemory* memory,
                                                        unsigned long long* total) {
  const uint32_t thread = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned long long sum = x;
  for (int offset = 1; offset < 32; offset *= 2) {
    const unsigned long long other = __shfl_up_sync(~0u, sum, offset);
    if (thread >= offset) sum += other;
  }
  __syncthreads();
  if (thread == 31) memory->scan[warp] = sum;
  __syncthreads();
  unsigned long long before = 0, all = 0;
  for (uint32_t w = 0; w < kSelectThreads / 32; ++w) {
    if (w == warp) before = all;
    all += memory->scan[w];
  }
  *total = all;
  return before + sum - x;
}

// Weighs the keys that agree with `prefix` above the digit, by the digit.
template <typename WeightOf>
__device__ void Histogram(const uint32_t* keys, uint32_t slots, uint32_t prefix, Digit digit,
                          WeightOf weight_of, SelectMemory* memory) {
  const uint32_t above = digit.shift + digit.bits;
  for (uint32_t i = threadIdx.x; i < kDigits; i += kSelectThreads) memory->histogram[i] = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < slots; i += kSelectThreads) {
    const uint32_t key = keys[i];
    if (key == 0) continue;
    if (uint64_t{key} >> above != uint64_t{prefix} >> above) continue;
    const unsigned long long weight = weight_of(key);
    if (weight == 0) continue;
    atomicAdd(&memory->histogram[key >> digit.shift & ((1u << digit.bits) - 1)], weight);
  }
  __syncthreads();
}

// Descending: the cut above which lie the fewest keys that weigh at least `limit`, in descending
// order (a key is above it if those before it weigh less than limit). Ascending: the cut below
// which lie the most keys that weigh at most `limit` together.
template <bool kDescending, typename WeightOf>
__device__ RankCut FindCut(const uint32_t* keys, uint32_t slots, unsigned long long limit,
                           WeightOf weight_of, SelectMemory* memory) {
  uint32_t prefix = 0;
  unsigned long long before = 0;
  for (int pass = 0; pass < 3; ++pass) {
    const Digit digit = KeyDigit(pass);
    Histogram(keys, slots, prefix, digit, weight_of, memory);
    const uint32_t first = threadIdx.x * 2;
    const auto bin = [&](uint32_t i) {
      return memory->histogram[kDescending ? kDigits - 1 - (first + i) : first + i];
    };
    const unsigned long long own[2] = {bin(0), bin(1)};
    unsigned long long total;
    unsigned long long sum = before + BlockScan(own[0] + own[1], memory, &total);
    const bool all_fit = kDescending ? before + total < limit : before + total <= limit;
    if (all_fit) return kDescending ? kTakeAll : kTakeNone;
    for (uint32_t i = 0; i < 2; ++i) {
      const unsigned long long with = sum + own[i];
      const bool crosses = kDescending ? sum < limit && with >= limit : sum <= limit && with > limit;
      if (crosses) {
        memory->digit = kDescending ? kDigits - 1 - (first + i) : first + i;
        memory->before = sum;
        memory->weight = own[i];
      }
      sum = with;
    }
    __syncthreads();
    prefix |= memory->digit << digit.shift;
    before = memory->before;
    __syncthreads();
  }
  const unsigned long long each = weight_of(prefix);
  const unsigned long long equals = memory->weight / each;
  if constexpr (kDescending) {
    return {prefix, static_cast<uint32_t>((limit - before + each - 1) / each)};
  } else {
    return {prefix, static_cast<uint32_t>(equals - (limit - before) / each)};
  }
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_SELECT_CUH_
