// SPDX-License-Identifier: Apache-2.0
//
// Finding where a ranking is cut, by one block and without sorting: the cut's key is found bit by
// bit, each time weighing the keys above a candidate. Weights are integers (counts, or shares in
// fixed point), so that no sum depends on the order in which threads come. Histograms of digits take
// fewer passes, but a softmax puts most scores in a few bins, whose atomics then wait for each other:
// measured 70 us where this takes a few.
#ifndef ATTND_GPU_CUDA_SELECT_CUH_
#define ATTND_GPU_CUDA_SELECT_CUH_

#include <cstdint>

namespace attnd::gpu {

inline constexpr uint32_t kSelectThreads = 1024;
inline constexpr uint32_t kSelectWarps = kSelectThreads / 32;
// Keys that a thread keeps in registers; it reads the others each time.
inline constexpr uint32_t kOwnKeys = 8;
// One, in fixed point: 2^-40 is far below what float32 scores tell apart near a cut, and 2^22
// clusters of weight 2 still fit.
inline constexpr uint64_t kOne = uint64_t{1} << 40;

// What is above a cut: keys greater than `key`, and the first `ties` of those equal to it.
struct RankCut {
  uint32_t key;
  uint32_t ties;
};
inline constexpr RankCut kTakeAll = {0, 0};  // keys of clusters are at least 1
inline constexpr RankCut kTakeNone = {~0u, 0};

using Weight64 = unsigned long long;

struct SelectMemory {
  Weight64 scan[2][kSelectWarps];   // used in turn, so that one barrier a sum is enough
  uint32_t undecided[kSelectThreads];
  uint32_t undecided_count;
};

// A score, not negative, as a key in the same order. 0 is kept for slots without a cluster.
__device__ __forceinline__ uint32_t KeyOf(float score) { return __float_as_uint(score) + 1; }
__device__ __forceinline__ float ScoreOf(uint32_t key) { return __uint_as_float(key - 1); }

// Sums over a block of kSelectThreads; every thread calls them, in the same order.
class BlockSums {
 public:
  explicit __device__ BlockSums(SelectMemory* memory) : memory_(memory) {}

  __device__ __forceinline__ Weight64 Sum(Weight64 x) {
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return OverWarps(x);
  }
  // The same of a count, which is below 2^32.
  __device__ __forceinline__ uint32_t Count(uint32_t x) {
    uint32_t* parts = reinterpret_cast<uint32_t*>(Next());
    const uint32_t of_warp = __reduce_add_sync(~0u, x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = of_warp;
    __syncthreads();
    return __reduce_add_sync(~0u, parts[threadIdx.x % 32]);
  }
  // Sum over the threads before this one, and *total over all.
  __device__ __forceinline__ Weight64 Scan(Weight64 x, Weight64* total) {
    const uint32_t thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    Weight64 sum = x;
    for (int offset = 1; offset < 32; offset *= 2) {
      const Weight64 other = __shfl_up_sync(~0u, sum, offset);
      if (thread >= offset) sum += other;
    }
    Weight64* parts = Next();
    if (thread == 31) parts[warp] = sum;
    __syncthreads();
    Weight64 before = thread < warp ? parts[thread] : 0, all = parts[thread];
    for (int offset = 16; offset > 0; offset /= 2) {
      before += __shfl_xor_sync(~0u, before, offset);
      all += __shfl_xor_sync(~0u, all, offset);
    }
    *total = all;
    return before + sum - x;
  }

 private:
  __device__ __forceinline__ Weight64* Next() {
    turn_ ^= 1;
    return memory_->scan[turn_];
  }
  __device__ __forceinline__ Weight64 OverWarps(Weight64 of_warp) {
    Weight64* parts = Next();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = of_warp;
    __syncthreads();
    Weight64 all = parts[threadIdx.x % 32];
    for (int offset = 16; offset > 0; offset /= 2) all += __shfl_xor_sync(~0u, all, offset);
    return all;
  }
  SelectMemory* const memory_;
  uint32_t turn_ = 0;
};

// The keys of a unit's slots, each slot's thread the one at threadIdx.x = slot % kSelectThreads.
class RankedKeys {
 public:
  // keys: [slots], complete.
  __device__ RankedKeys(const uint32_t* keys, uint32_t slots) : keys_(keys), slots_(slots) {
#pragma unroll
    for (uint32_t i = 0; i < kOwnKeys; ++i) {
      const uint32_t slot = i * kSelectThreads + threadIdx.x;
      own_[i] = slot < slots ? keys[slot] : 0;
    }
  }

  __device__ __forceinline__ uint32_t slots() const { return slots_; }

  // Calls f with each of the thread's keys; keys of 0 among them.
  template <typename F>
  __device__ __forceinline__ void ForEach(F f) const {
#pragma unroll
    for (uint32_t i = 0; i < kOwnKeys; ++i) f(own_[i]);
    for (uint32_t slot = kOwnKeys * kSelectThreads + threadIdx.x; slot < slots_;
         slot += kSelectThreads) {
      f(keys_[slot]);
    }
  }

 private:
  const uint32_t* const keys_;
  const uint32_t slots_;
  uint32_t own_[kOwnKeys];
};

// How keys are weighed: each as one, or by weight_of.
struct CountKeys {
  using Sum = uint32_t;
  __device__ __forceinline__ Sum Of(uint32_t) const { return 1; }
  static __device__ __forceinline__ Sum Total(BlockSums* sums, Sum x) { return sums->Count(x); }
};
template <typename WeightOf>
struct WeighKeys {
  using Sum = Weight64;
  WeightOf weight_of;
  __device__ __forceinline__ Sum Of(uint32_t key) const { return weight_of(key); }
  static __device__ __forceinline__ Sum Total(BlockSums* sums, Sum x) { return sums->Sum(x); }
};

// The greatest key such that it and the keys above it weigh at least `limit`, and what those above
// it weigh; key 0 if all keys weigh less. Bit by bit: first over all keys, then, when few enough are
// undecided for a thread to have one each, over those.
template <typename Weigh>
__device__ uint32_t GreatestKey(const RankedKeys& keys, typename Weigh::Sum limit, Weigh weigh,
                                BlockSums* sums, SelectMemory* memory,
                                typename Weigh::Sum* above) {
  using Sum = typename Weigh::Sum;
  constexpr uint32_t kFirstBit = 1u << 30;  // finite scores have no higher one
  uint32_t key = 0, bit = kFirstBit;
  *above = 0;
  uint32_t at_key = keys.slots(), at_end = 0;  // counts of keys from `key`, and from key + 2 bit, on
  for (; bit != 0 && at_key - at_end > kSelectThreads; bit >>= 1) {
    const uint32_t candidate = key | bit;
    Sum own = 0;
    uint32_t count = 0;
    keys.ForEach([&](uint32_t k) {
      if (k < candidate) return;
      own += weigh.Of(k);
      ++count;
    });
    const Sum total = Weigh::Total(sums, own);
    const uint32_t all = sums->Count(count);
    if (total >= limit) {
      key = candidate;
      at_key = all;
    } else {
      *above = total;
      at_end = all;
    }
  }
  if (bit == 0) return key;

  // Keys in [key, key + 2 bit), one to a thread. Their order does not matter.
  if (threadIdx.x == 0) memory->undecided_count = 0;
  memory->undecided[threadIdx.x] = 0;
  __syncthreads();
  keys.ForEach([&](uint32_t k) {
    if (k != 0 && k >= key && k - key < 2 * bit) {
      memory->undecided[atomicAdd(&memory->undecided_count, 1)] = k;
    }
  });
  __syncthreads();
  const uint32_t own_key = memory->undecided[threadIdx.x];
  const Sum own = own_key != 0 ? weigh.Of(own_key) : 0;
  const Sum beyond = *above;
  for (; bit != 0; bit >>= 1) {
    const uint32_t candidate = key | bit;
    const Sum total = beyond + Weigh::Total(sums, own_key >= candidate ? own : 0);
    if (total >= limit) {
      key = candidate;
    } else {
      *above = total;
    }
  }
  return key;
}

// The cut above which lie the `count` greatest keys.
__device__ inline RankCut CutByCount(const RankedKeys& keys, uint32_t count, BlockSums* sums,
                                     SelectMemory* memory) {
  if (count == 0) return kTakeNone;
  uint32_t above;
  const uint32_t key = GreatestKey(keys, count, CountKeys(), sums, memory, &above);
  if (key == 0) return kTakeAll;
  return {key, count - above};
}

// Descending: the cut above which lie the fewest keys that weigh at least `limit` together (a key
// is above it if those before it weigh less). Ascending: the cut below which lie the most keys that
// weigh at most `limit` together.
template <bool kDescending, typename WeightOf>
__device__ RankCut CutByWeight(const RankedKeys& keys, Weight64 limit, WeightOf weight_of,
                               BlockSums* sums, SelectMemory* memory) {
  Weight64 own = 0;
  keys.ForEach([&](uint32_t key) { own += key != 0 ? weight_of(key) : 0; });
  const Weight64 total = sums->Sum(own);
  if constexpr (!kDescending) {
    if (total <= limit) return kTakeNone;
    // What is above weighs at least total - limit: the fewest keys of which that is true.
    limit = total - limit;
  } else if (total < limit) {
    return kTakeAll;
  }
  Weight64 above;
  const uint32_t key =
      GreatestKey(keys, limit, WeighKeys<WeightOf>{weight_of}, sums, memory, &above);
  const Weight64 each = weight_of(key);
  return {key, static_cast<uint32_t>((limit - above + each - 1) / each)};
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_SELECT_CUH_
