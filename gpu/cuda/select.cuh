// SPDX-License-Identifier: Apache-2.0
//
// Finding where a ranking is cut, by one block and without sorting: the cut's key is found bit by
// bit, each time weighing the keys above a candidate. Weights are integers (counts, or shares in
// fixed point), so that no sum depends on the order in which threads come. Histograms of digits
// take fewer passes, but a softmax puts most scores in a few bins, whose atomics then wait for each
// other: measured 70 us where this takes a few.
#ifndef ATTND_GPU_CUDA_SELECT_CUH_
#define ATTND_GPU_CUDA_SELECT_CUH_

#include <cstdint>

namespace attnd::gpu {

inline constexpr uint32_t kSelectThreads = 1024;
inline constexpr uint32_t kSelectWarps = kSelectThreads / 32;
// Slots that a thread has at a time, neighbours: those from kGroupSlots * threadIdx.x on, and from
// there every kPassSlots. A row of several passes keeps its keys in memory, but for the first.
inline constexpr uint32_t kGroupSlots = 8;
inline constexpr uint32_t kPassSlots = kGroupSlots * kSelectThreads;
// One, in fixed point: 2^-36 is far below what float32 scores tell apart near a cut, and 2^20
// clusters (of weight 2 at most) sum to less than BlockSums holds.
inline constexpr uint64_t kOne = uint64_t{1} << 36;

// What is above a cut: keys greater than `key`, and the first `ties` of those equal to it.
struct RankCut {
  uint32_t key;
  uint32_t ties;
};
inline constexpr RankCut kTakeAll = {0, 0};  // keys of clusters are at least 1
inline constexpr RankCut kTakeNone = {~0u, 0};

using Weight64 = unsigned long long;

// Keys that one warp decides between alone.
inline constexpr uint32_t kUndecidedMax = 512;

struct SelectMemory {
  Weight64 scan[2][kSelectWarps];  // used in turn, so that one barrier a sum is enough
  uint32_t undecided[kUndecidedMax];
  uint32_t key;
  Weight64 above;
};

// A score, not negative, as a key in the same order. 0 is kept for slots without a cluster.
__device__ __forceinline__ uint32_t KeyOf(float score) { return __float_as_uint(score) + 1; }
__device__ __forceinline__ float ScoreOf(uint32_t key) { return __uint_as_float(key - 1); }

// Sums over a block of kSelectThreads; every thread calls them, in the same order.
class BlockSums {
 public:
  explicit __device__ BlockSums(SelectMemory* memory) : memory_(memory) {}

  // Totals below 2^57.
  __device__ __forceinline__ Weight64 Sum(Weight64 x) {
    Weight64* parts = Next();
    const Weight64 of_warp = OverWarp(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = of_warp;
    __syncthreads();
    return OverWarp(parts[threadIdx.x % 32]);
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

  // Over a warp. In two halves, as the hardware adds 32-bit numbers at once.
  static __device__ __forceinline__ uint32_t OverWarp(uint32_t x) {
    return __reduce_add_sync(~0u, x);
  }
  static __device__ __forceinline__ Weight64 OverWarp(Weight64 x) {
    constexpr uint32_t kBits = 26;  // 32 of them fit
    const uint32_t low = __reduce_add_sync(~0u, static_cast<uint32_t>(x) & ((1u << kBits) - 1));
    const uint32_t high = __reduce_add_sync(~0u, static_cast<uint32_t>(x >> kBits));
    return (static_cast<Weight64>(high) << kBits) + low;
  }

 private:
  __device__ __forceinline__ Weight64* Next() {
    turn_ ^= 1;
    return memory_->scan[turn_];
  }
  SelectMemory* const memory_;
  uint32_t turn_ = 0;
};

// The keys of a unit's slots.
class RankedKeys {
 public:
  // memory: [slots], for the passes behind the first.
  __device__ RankedKeys(uint32_t* memory, uint32_t slots) : memory_(memory), slots_(slots) {}

  __device__ __forceinline__ uint32_t slots() const { return slots_; }

  // The group that starts at `first`, one of the thread's own.
  __device__ __forceinline__ void Store(uint32_t first, const uint32_t (&keys)[kGroupSlots]) {
    if (first < kPassSlots) {
#pragma unroll
      for (uint32_t i = 0; i < kGroupSlots; ++i) own_[i] = keys[i];
      return;
    }
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) memory_[first + i] = keys[i];
  }
  __device__ __forceinline__ void Load(uint32_t first, uint32_t (&keys)[kGroupSlots]) const {
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) {
      keys[i] = first < kPassSlots ? own_[i] : memory_[first + i];
    }
  }

  // Calls f with each of the thread's keys; keys of 0 among them.
  template <typename F>
  __device__ __forceinline__ void ForEach(F f) const {
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) f(own_[i]);
    for (uint32_t first = kPassSlots + threadIdx.x * kGroupSlots; first < slots_;
         first += kPassSlots) {
#pragma unroll
      for (uint32_t i = 0; i < kGroupSlots; ++i) f(memory_[first + i]);
    }
  }

 private:
  uint32_t* const memory_;
  const uint32_t slots_;
  uint32_t own_[kGroupSlots] = {};
};

// How keys are weighed: each as one, or by weight_of.
struct CountKeys {
  static constexpr bool kWeighs = false;
  using Sum = uint32_t;
  __device__ __forceinline__ Sum Of(uint32_t) const { return 1; }
  static __device__ __forceinline__ Sum Total(BlockSums* sums, Sum x) { return sums->Count(x); }
};
template <typename WeightOf>
struct WeighKeys {
  static constexpr bool kWeighs = true;
  using Sum = Weight64;
  WeightOf weight_of;
  __device__ __forceinline__ Sum Of(uint32_t key) const { return weight_of(key); }
  static __device__ __forceinline__ Sum Total(BlockSums* sums, Sum x) { return sums->Sum(x); }
};

// The rest of GreatestKey, by one warp: `count` keys share the bits above `bit` with *key.
template <typename Weigh>
__device__ __forceinline__ void DecideInWarp(uint32_t count, typename Weigh::Sum limit, Weigh weigh,
                                             uint32_t bit, uint32_t* key,
                                             typename Weigh::Sum* above, SelectMemory* memory) {
  using Sum = typename Weigh::Sum;
  constexpr uint32_t kOwn = kUndecidedMax / 32;
  uint32_t keys[kOwn];
#pragma unroll
  for (uint32_t i = 0; i < kOwn; ++i) {
    const uint32_t place = i * 32 + threadIdx.x;
    keys[i] = place < count ? memory->undecided[place] : 0;
  }
  const Sum beyond = *above;
  for (; bit != 0; bit >>= 1) {
    const uint32_t candidate = *key | bit;
    Sum own = 0;
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) own += keys[i] >= candidate ? weigh.Of(keys[i]) : 0;
    const Sum total = beyond + BlockSums::OverWarp(own);
    if (total >= limit) {
      *key = candidate;
    } else {
      *above = total;
    }
  }
  if (threadIdx.x == 0) {
    memory->key = *key;
    memory->above = *above;
  }
}

// The greatest key such that it and the keys above it weigh at least `limit`, and what those above
// it weigh; key 0 if all keys weigh less. Bit by bit: over all keys, until few are undecided.
template <typename Weigh>
__device__ uint32_t GreatestKey(const RankedKeys& keys, typename Weigh::Sum limit, Weigh weigh,
                                BlockSums* sums, SelectMemory* memory, typename Weigh::Sum* above) {
  using Sum = typename Weigh::Sum;
  constexpr uint32_t kFirstBit = 1u << 30;  // finite scores have no higher one
  uint32_t key = 0, bit = kFirstBit;
  *above = 0;
  uint32_t at_key = keys.slots(),
           at_end = 0;  // counts of keys from `key`, and from key + 2 bit, on
  for (; bit != 0 && at_key - at_end > kUndecidedMax; bit >>= 1) {
    const uint32_t candidate = key | bit;
    Sum own = 0;
    uint32_t count = 0;
    keys.ForEach([&](uint32_t k) {
      count += k >= candidate ? 1 : 0;
      if constexpr (Weigh::kWeighs) own += k >= candidate ? weigh.Of(k) : 0;
    });
    const uint32_t all = sums->Count(count);
    Sum total = all;
    if constexpr (Weigh::kWeighs) total = Weigh::Total(sums, own);
    if (total >= limit) {
      key = candidate;
      at_key = all;
    } else {
      *above = total;
      at_end = all;
    }
  }
  if (bit == 0) return key;

  const auto undecided = [&](uint32_t k) { return k != 0 && k >= key && k - key < 2 * bit; };
  uint32_t count = 0;
  keys.ForEach([&](uint32_t k) { count += undecided(k) ? 1 : 0; });
  Weight64 undecided_count;
  uint32_t place = static_cast<uint32_t>(sums->Scan(count, &undecided_count));
  keys.ForEach([&](uint32_t k) {
    if (undecided(k)) memory->undecided[place++] = k;
  });
  __syncthreads();
  if (threadIdx.x < 32) {
    DecideInWarp(static_cast<uint32_t>(undecided_count), limit, weigh, bit, &key, above, memory);
  }
  __syncthreads();
  *above = static_cast<Sum>(memory->above);
  return memory->key;
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
