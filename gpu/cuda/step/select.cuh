// SPDX-License-Identifier: Apache-2.0
//
// Finding where a ranking is cut, by one cooperative group and without sorting: the cut's key is
// found bit by bit, each time weighing the keys above a candidate. Weights are integers (counts, or
// shares in fixed point), so that no sum depends on the order in which threads come. Histograms of
// digits take fewer passes, but a softmax puts most scores in a few bins, whose atomics then wait
// for each other: measured 70 us where this takes a few.
#ifndef ATTND_GPU_CUDA_STEP_SELECT_CUH_
#define ATTND_GPU_CUDA_STEP_SELECT_CUH_

#include <cstdint>

#include "gpu/cuda/step/cooperative_group.cuh"

namespace attnd::gpu {

// One, in fixed point: 2^-36 is far below what float32 scores tell apart near a cut, and 2^20
// clusters (of weight 2 at most) sum to less than CoopSums holds.
inline constexpr uint64_t kOne = uint64_t{1} << 36;

// What is above a cut: keys greater than `key`, and the first `ties` of those equal to it; 0 if
// that is none, or known to be all of them.
struct RankCut {
  uint32_t key;
  uint32_t ties;
};
inline constexpr RankCut kTakeAll = {0, 0};  // keys of clusters are at least 1
inline constexpr RankCut kTakeNone = {~0u, 0};

using Weight64 = unsigned long long;

// Keys that one warp decides between alone.
inline constexpr uint32_t kUndecidedMax = 128;

// In the shared memory of each thread block.
template <typename Threads>
struct SelectMemory {
  Weight64 parts[2][Threads::kWarpsMax];  // of its warps; used in turn, so that one wait a sum
                                          // is enough
  typename Threads::Mailbox part_boxes[2];
  typename Threads::Mailbox list_box;
  uint32_t key;
  uint32_t equal;
  Weight64 above;
};

// A score, not negative, as a key in the same order, below 2^31. 0 is kept for slots without a
// cluster; the greatest is that of what is no number.
__device__ __forceinline__ uint32_t KeyOf(float score) {
  return min(__float_as_uint(score), 0x7FFFFFFEu) + 1;
}
__device__ __forceinline__ float ScoreOf(uint32_t key) { return __uint_as_float(key - 1); }

// Over a warp. In two halves, as the hardware adds 32-bit numbers at once.
__device__ __forceinline__ uint32_t SumOverWarp(uint32_t x) { return __reduce_add_sync(~0u, x); }
__device__ __forceinline__ Weight64 SumOverWarp(Weight64 x) {
  constexpr uint32_t kBits = 26;  // 32 of them fit
  const uint32_t low = __reduce_add_sync(~0u, static_cast<uint32_t>(x) & ((1u << kBits) - 1));
  const uint32_t high = __reduce_add_sync(~0u, static_cast<uint32_t>(x >> kBits));
  return (static_cast<Weight64>(high) << kBits) + low;
}

// Counts of three things, each below 2^21.
struct ThreeCounts {
  uint32_t first, second, third;
};

// Sums over a cooperative group; every thread calls them, in the same order.
template <typename Threads>
class CoopSums {
 public:
  explicit __device__ CoopSums(SelectMemory<Threads>* memory) : memory_(memory) {}

  // Totals below 2^57.
  __device__ __forceinline__ Weight64 Sum(Weight64 x) {
    const Weight64* parts = Publish(SumOverWarp(x));
    return SumOverWarp(OfParts(parts, [](Weight64 part, uint32_t) { return part; }));
  }
  // The same of a count, which is below 2^32.
  __device__ __forceinline__ uint32_t Count(uint32_t x) {
    const Weight64* parts = Publish(SumOverWarp(x));
    return SumOverWarp(
        static_cast<uint32_t>(OfParts(parts, [](Weight64 part, uint32_t) { return part; })));
  }
  __device__ __forceinline__ ThreeCounts Count(ThreeCounts x) {
    constexpr uint32_t kBits = 21, kMask = (1u << kBits) - 1;
    const Weight64* parts =
        Publish(SumOverWarp(x.first) | static_cast<Weight64>(SumOverWarp(x.second)) << kBits |
                static_cast<Weight64>(SumOverWarp(x.third)) << 2 * kBits);
    const Weight64 own = OfParts(parts, [](Weight64 part, uint32_t) { return part; });
    return {SumOverWarp(static_cast<uint32_t>(own) & kMask),
            SumOverWarp(static_cast<uint32_t>(own >> kBits) & kMask),
            SumOverWarp(static_cast<uint32_t>(own >> 2 * kBits))};
  }
  // Sum over the threads before this one, and *total over all.
  __device__ __forceinline__ Weight64 Scan(Weight64 x, Weight64* total) {
    const uint32_t thread = threadIdx.x % 32, warp = CoopWarp<Threads>();
    Weight64 sum = x;
#pragma unroll 1
    for (int offset = 1; offset < 32; offset *= 2) {
      const Weight64 other = __shfl_up_sync(~0u, sum, offset);
      if (thread >= offset) sum += other;
    }
    const Weight64* parts = Publish(__shfl_sync(~0u, sum, 31));
    Weight64 before =
        OfParts(parts, [warp](Weight64 part, uint32_t w) { return w < warp ? part : 0; });
    Weight64 all = OfParts(parts, [](Weight64 part, uint32_t) { return part; });
    *total = SumOverWarp(all);
    return SumOverWarp(before) + sum - x;
  }

  // The keys of which keep is true, into list[] of each thread block, in the order of threads;
  // returns how many there are.
  template <typename Keys, typename Keep>
  __device__ uint32_t Gather(const Keys& keys, Keep keep, uint32_t* list) {
    uint32_t count = 0;
    keys.ForEach([&](uint32_t k) { count += keep(k) ? 1 : 0; });
    Weight64 all;
    uint32_t place = static_cast<uint32_t>(Scan(count, &all));
    auto* box = &memory_->list_box;
    keys.ForEach([&](uint32_t k) {
      if (!keep(k)) return;
#pragma unroll 1
      for (uint32_t rank = 0; rank < Threads::blocks(); ++rank) box->Send(&list[place], k, rank);
      ++place;
    });
    box->Await(static_cast<uint32_t>(all) * sizeof(uint32_t), lists_++);
    return static_cast<uint32_t>(all);
  }

 private:
  // Each warp's word goes to every thread block; returns all words. What a warp read of the words
  // of the use before last was read before it sent its own of the last: so no word is overwritten
  // too early.
  __device__ __forceinline__ const Weight64* Publish(Weight64 of_warp) {
    const uint32_t turn = uses_ & 1;
    Weight64* parts = memory_->parts[turn];
    auto* box = &memory_->part_boxes[turn];
    const uint32_t rank = threadIdx.x % 32;
    if (rank < Threads::blocks()) box->Send(&parts[CoopWarp<Threads>()], of_warp, rank);
    box->Await(Threads::blocks() * Threads::kBlockWarps * sizeof(Weight64), uses_++ >> 1);
    return parts;
  }
  // This thread's share of the sum of f(part, its warp).
  template <typename F>
  static __device__ __forceinline__ Weight64 OfParts(const Weight64* parts, F f) {
    const uint32_t warps = Threads::blocks() * Threads::kBlockWarps;
    Weight64 own = 0;
#pragma unroll
    for (uint32_t first = 0; first < Threads::kWarpsMax; first += 32) {
      const uint32_t warp = first + threadIdx.x % 32;
      if (warp < warps) own += f(parts[warp], warp);
    }
    return own;
  }
  SelectMemory<Threads>* const memory_;
  uint32_t uses_ = 0;
  uint32_t lists_ = 0;
};

// The keys of a unit's slots. The cooperative group goes through them in passes of so many that
// each thread has at most one group of Threads::kGroupSlots neighbours in a pass; a pass is shared
// evenly by the thread blocks. A row of several passes keeps its keys in memory, but for the first
// pass's.
template <typename Threads>
class RankedKeys {
 public:
  static constexpr uint32_t kGroupSlots = Threads::kGroupSlots;

  // memory: [slots], for the passes behind the first. slots: a multiple of kGroupSlots.
  __device__ RankedKeys(uint32_t* memory, uint32_t slots) : memory_(memory), slots_(slots) {}

  __device__ __forceinline__ uint32_t slots() const { return slots_; }
  __device__ __forceinline__ uint32_t pass_slots() const {
    return Threads::blocks() * Threads::kBlockThreads * kGroupSlots;
  }
  // The thread's group in the pass that starts at slot `pass`; slots() or more if it has none.
  __device__ __forceinline__ uint32_t First(uint32_t pass) const {
    const uint32_t groups = min(slots_ - pass, pass_slots()) / kGroupSlots;
    const uint32_t each = (groups + Threads::blocks() - 1) / Threads::blocks();
    const uint32_t group = Threads::rank() * each + threadIdx.x;
    return threadIdx.x < each && group < groups ? pass + group * kGroupSlots : slots_;
  }

  // The group of pass `pass`, which starts at `first`, if there is one.
  __device__ __forceinline__ void Store(uint32_t pass, uint32_t first,
                                        const uint32_t (&keys)[kGroupSlots]) {
    if (first >= slots_) return;
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) {
      if (pass == 0) {
        own_[i] = keys[i];
      } else {
        memory_[first + i] = keys[i];
      }
    }
  }
  __device__ __forceinline__ void Load(uint32_t pass, uint32_t first,
                                       uint32_t (&keys)[kGroupSlots]) const {
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) {
      keys[i] = first >= slots_ ? 0 : pass == 0 ? own_[i] : memory_[first + i];
    }
  }

  // Calls f with each of the thread's keys; keys of 0 among them.
  template <typename F>
  __device__ __forceinline__ void ForEach(F f) const {
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) f(own_[i]);
    for (uint32_t pass = pass_slots(); pass < slots_; pass += pass_slots()) {
      const uint32_t first = First(pass);
      if (first >= slots_) continue;
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
};
template <typename WeightOf>
struct WeighKeys {
  static constexpr bool kWeighs = true;
  using Sum = Weight64;
  WeightOf weight_of;
  __device__ __forceinline__ Sum Of(uint32_t key) const { return weight_of(key); }
};

// What is known of a cut's key on the way to it: it is at least `key` and less than `key + range`;
// the keys from key + range on weigh `above`, and so many keys lie between.
template <typename Sum>
struct Narrowed {
  uint32_t key = 0;
  uint32_t bits = 32;  // range is 2 to that; 1 or more while anything is undecided
  Sum above = 0;
  uint32_t undecided;
  uint32_t equal = ~0u;  // keys that are `key`, if it is known
};

// Finds the greatest key such that it and the keys above it weigh at least `limit`, and what those
// above it weigh; key 0 if all keys weigh less.
template <typename Threads, typename Weigh>
class KeyFinder {
 public:
  using Sum = typename Weigh::Sum;

  // undecided: [kUndecidedMax] in the same place of each thread block's shared memory. bits: of the
  // keys.
  __device__ KeyFinder(const RankedKeys<Threads>& keys, Sum limit, Weigh weigh,
                       CoopSums<Threads>* sums, SelectMemory<Threads>* memory, uint32_t* undecided,
                       uint32_t bits)
      : keys_(keys),
        limit_(limit),
        weigh_(weigh),
        sums_(sums),
        memory_(memory),
        list_(undecided),
        bits_(bits) {}

  __device__ Narrowed<Sum> Find() {
    Narrowed<Sum> cut;
    cut.bits = bits_;
    cut.undecided = keys_.slots();
    while (cut.bits > 0 && cut.undecided > kUndecidedMax) {
      if constexpr (Weigh::kWeighs) {
        NarrowByWeight(&cut);
      } else {
        NarrowByCount(&cut);
      }
    }
    if (cut.bits > 0) DecideTheRest(&cut);
    return cut;
  }

 private:
  // Two bits at a time.
  __device__ void NarrowByCount(Narrowed<Sum>* cut) {
    cut->bits -= 2;
    const uint32_t third = cut->key + (1u << cut->bits);
    const uint32_t second = third + (1u << cut->bits), first = second + (1u << cut->bits);
    ThreeCounts own = {0, 0, 0};
    keys_.ForEach([&](uint32_t k) {
      own.first += k >= first ? 1 : 0;
      own.second += k >= second ? 1 : 0;
      own.third += k >= third ? 1 : 0;
    });
    const ThreeCounts from = sums_->Count(own);
    const uint32_t from_key = cut->above + cut->undecided;
    if (from.first >= limit_) {
      *cut = {first, cut->bits, cut->above, from.first - cut->above};
    } else if (from.second >= limit_) {
      *cut = {second, cut->bits, from.first, from.second - from.first};
    } else if (from.third >= limit_) {
      *cut = {third, cut->bits, from.second, from.third - from.second};
    } else {
      *cut = {cut->key, cut->bits, from.third, from_key - from.third};
    }
  }

  __device__ void NarrowByWeight(Narrowed<Sum>* cut) {
    --cut->bits;
    const uint32_t candidate = cut->key + (1u << cut->bits);
    Sum own = 0;
    uint32_t upper = 0;  // of the keys between
    keys_.ForEach([&](uint32_t k) {
      own += k >= candidate ? weigh_.Of(k) : 0;
      upper += k >= candidate && k - candidate < 1u << cut->bits ? 1 : 0;
    });
    const Sum total = sums_->Sum(own);
    upper = sums_->Count(upper);
    if (total >= limit_) {
      cut->key = candidate;
      cut->undecided = upper;
    } else {
      cut->above = total;
      cut->undecided -= upper;
    }
  }

  // By one warp of each thread block, when few keys are undecided.
  __device__ void DecideTheRest(Narrowed<Sum>* cut) {
    const uint32_t range = ~0u >> (32 - cut->bits);
    const auto undecided = [&](uint32_t k) {
      return k != 0 && k >= cut->key && k - cut->key <= range;
    };
    const uint32_t count = sums_->Gather(keys_, undecided, list_);
    __syncthreads();  // every warp has read what was decided before
    if (threadIdx.x < 32) DecideInWarp(count, cut);
    __syncthreads();
    cut->key = memory_->key;
    cut->above = static_cast<Sum>(memory_->above);
    cut->equal = memory_->equal;
  }

  __device__ __forceinline__ void DecideInWarp(uint32_t count, Narrowed<Sum>* cut) {
    constexpr uint32_t kOwn = kUndecidedMax / 32;
    uint32_t keys[kOwn];
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) {
      const uint32_t place = i * 32 + threadIdx.x;
      keys[i] = place < count ? list_[place] : 0;
    }
    const Sum beyond = cut->above;
    uint32_t key = cut->key;
    Sum above = beyond;
#pragma unroll 1
    for (uint32_t bit = 1u << (cut->bits - 1); bit != 0; bit >>= 1) {
      const uint32_t candidate = key | bit;
      Sum own = 0;
#pragma unroll
      for (uint32_t i = 0; i < kOwn; ++i) own += keys[i] >= candidate ? weigh_.Of(keys[i]) : 0;
      const Sum total = beyond + SumOverWarp(own);
      if (total >= limit_) {
        key = candidate;
      } else {
        above = total;
      }
    }
    uint32_t equal = 0;
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) equal += keys[i] == key ? 1 : 0;
    equal = SumOverWarp(equal);
    if (threadIdx.x == 0) {
      memory_->key = key;
      memory_->above = above;
      memory_->equal = equal;
    }
  }

  const RankedKeys<Threads>& keys_;
  const Sum limit_;
  const Weigh weigh_;
  CoopSums<Threads>* const sums_;
  SelectMemory<Threads>* const memory_;
  uint32_t* const list_;
  const uint32_t bits_;
};

// The cut of which `ties` keys that equal the one found are above.
template <typename Sum>
__device__ __forceinline__ RankCut CutOf(const Narrowed<Sum>& found, uint32_t ties) {
  if (found.key == 0) return kTakeAll;
  return found.equal == ties ? RankCut{found.key - 1, 0} : RankCut{found.key, ties};
}

// The cut above which lie the `count` greatest keys.
template <typename Threads>
__device__ RankCut CutByCount(const RankedKeys<Threads>& keys, uint32_t count,
                              CoopSums<Threads>* sums, SelectMemory<Threads>* memory,
                              uint32_t* undecided, uint32_t bits) {
  if (count == 0) return kTakeNone;
  const auto found =
      KeyFinder<Threads, CountKeys>(keys, count, CountKeys(), sums, memory, undecided, bits).Find();
  return CutOf(found, count - found.above);
}

// Descending: the cut above which lie the fewest keys that weigh at least `limit` together (a key
// is above it if those before it weigh less). Ascending: the cut below which lie the most keys that
// weigh at most `limit` together.
template <bool kDescending, typename Threads, typename WeightOf>
__device__ RankCut CutByWeight(const RankedKeys<Threads>& keys, Weight64 limit, WeightOf weight_of,
                               CoopSums<Threads>* sums, SelectMemory<Threads>* memory,
                               uint32_t* undecided, uint32_t bits) {
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
  const auto found = KeyFinder<Threads, WeighKeys<WeightOf>>(keys, limit, {weight_of}, sums, memory,
                                                             undecided, bits)
                         .Find();
  const Weight64 each = weight_of(found.key);
  return CutOf(found, static_cast<uint32_t>((limit - found.above + each - 1) / each));
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_SELECT_CUH_
