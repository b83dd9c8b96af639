// SPDX-License-Identifier: Apache-2.0
//
// Where rankings of a tree's rows are cut, by the thread blocks of one thread block cluster, each
// of which has a range of the rows. The digits of a cut's key are found by histograms, the highest
// first. Weights are integers (counts, or shares in fixed point), so that no sum depends on the
// order in which threads come, nor on how many thread blocks there are.
#ifndef ATTND_GPU_CUDA_STEP_TREE_CUT_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_CUT_CUH_

#include <cstdint>
#include <type_traits>

#include "gpu/cuda/step/cooperative_group.cuh"
#include "gpu/cuda/step/cut_range.cuh"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

// The thread blocks that share a unit: one where there are no thread block clusters.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
using CutBlocks = ThreadBlock;
#else
using CutBlocks = ThreadBlockCluster;
#endif
// Those of fifteen units are on an H100 at once, each alone on its multiprocessor. More gain
// nothing.
inline constexpr uint32_t kCutBlocksMax = 7;
// A thread block that is alone in its cluster may not write to itself as to another.
inline constexpr uint32_t kCutBlocksMin = 2;
inline constexpr uint32_t kCutThreads = 512;
inline constexpr uint32_t kCutWarps = kCutThreads / 32;
// A digit a thread.
static_assert(kCutThreads >= kCutDigits);

using CutWeight = unsigned long long;

// Weights are added up in words of 32 bits, kCutWordBits of each weight to a word: shared memory
// adds those at once, and 64 bits by trying. So many rows fit. A further word counts rows.
inline constexpr uint32_t kCutWords = 3;
inline constexpr uint32_t kCutWordBits = 12;
static_assert(kTreeRowsMax <= 1u << (32 - kCutWordBits));

// One, in fixed point. A row weighs twice that at most.
inline constexpr CutWeight kCutOne = CutWeight{1} << 34;
static_assert(2 * kCutOne < CutWeight{1} << kCutWords * kCutWordBits);

// In the weights of a digit that thread blocks send each other, the highest bits say how many rows
// have it, at least up to two.
inline constexpr uint32_t kCutRowsShift = 60;
static_assert(2 * kCutOne * kTreeRowsMax < CutWeight{1} << kCutRowsShift);
static_assert(2 * kCutBlocksMax < CutWeight{1} << (64 - kCutRowsShift));

__device__ __forceinline__ CutWeight FixedShare(float share) {
  return __float2ull_rn(fminf(share, 2.0f) * static_cast<float>(kCutOne));
}

// Most rows share a few digits, and shared memory adds to one place one after another: so a warp's
// threads add to several copies of a sum.
inline constexpr uint32_t kCutCopies = 4;
struct __align__(16) CutSum {
  uint32_t copies[kCutCopies];

  __device__ __forceinline__ void Add(uint32_t x) {
    atomicAdd(&copies[threadIdx.x % kCutCopies], x);
  }
  // The sum, which is 0 from then on.
  __device__ __forceinline__ uint32_t Take() {
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kCutCopies; i += 4) {
      auto* four = reinterpret_cast<uint4*>(copies + i);
      sum += four->x + four->y + four->z + four->w;
      *four = {};
    }
    return sum;
  }
};

// Rows are taken in the order of descending keys, the lower number first among equals, as long as
// those before weigh less than `limit`.
struct TreeCut {
  uint32_t key = 0;     // rows with greater keys are taken, ...
  uint32_t equals = 0;  // ... and of the thread block's rows with this key, so many, ...
  CutWeight above = 0;  // ... those before which this and the equals before them weigh less than
  CutWeight limit = 0;  // this
  bool known = false;
};

// What a cut is to leave: rows above it weigh at least `weight`, or rows below it at most that.
enum class CutLimit { kTaken, kLeft };

// In shared memory.
struct CutMemory {
  // What thread blocks send each other, in turn to the first and the second half.
  CutWeight weights[2][kCutBlocksMax][kCutDigits];
  uint32_t rows[2][kCutBlocksMax][kCutDigits];
  CutWeight shares[2][kCutBlocksMax];
  CutBlocks::Mailbox boxes[2];
  // Of the thread block's rows that have a digit: of a cut by count their number; of one by weight
  // the words of their weights, and in the last word their number.
  CutSum row_counts[kCutDigits];
  CutSum weight_words[kCutWords + 1][kCutDigits];
  CutWeight parts[2][kCutWarps];
  struct Found {
    uint32_t digit;
    bool only;  // one row alone has it
    CutWeight above, before;
  } found[2];  // of two cuts
};

// A thread's number; what those of the threads before come to, and all.
template <typename Number>
struct Scanned {
  Number own, before = 0, total = 0;
};

// Finds the sums of up to two kinds of numbers at once, those of the first kWarps warps: others
// have zeros. The whole thread block, whose threads have met since the scan before.
template <uint32_t kWarps, typename... Numbers>
__device__ __forceinline__ void ScanBlock(CutMemory* memory, Scanned<Numbers>&... numbers) {
  const uint32_t thread = threadIdx.x % 32, warp = threadIdx.x / 32;
  ((numbers.before = numbers.own), ...);  // with its own, of the warp alone, until they are joined
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const auto add = [&](auto& number) {
      const auto other = __shfl_up_sync(~0u, number.before, offset);
      if (thread >= offset) number.before += other;
    };
    (add(numbers), ...);
  }
  uint32_t kind = 0;
  if (thread == 31) ((memory->parts[kind++][warp] = numbers.before), ...);
  __syncthreads();
  kind = 0;
  const auto join = [&]<typename Number>(Scanned<Number>& number) {
    Number before = 0;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; ++w) {
      if (w == warp) before = number.total;
      number.total += static_cast<Number>(memory->parts[kind][w]);
    }
    number.before += before - number.own;
    ++kind;
  };
  (join(numbers), ...);
}
template <typename Number>
__device__ __forceinline__ Number SumOfBlock(Number own, CutMemory* memory) {
  Scanned<Number> sum{own};
  __syncthreads();
  ScanBlock<kCutWarps>(memory, sum);
  return sum.total;
}

// A thread block's rows; keys are 0 of rows that are not there.
struct RankedRows {
  const uint32_t* keys;
  uint32_t count;
};

// How rows are weighed: each as one, or by a function of their number in the thread block.
struct OneEach {
  static constexpr bool kOne = true;
  __device__ __forceinline__ CutWeight operator()(uint32_t) const { return 1; }
};
template <typename F>
struct WeightBy {
  static constexpr bool kOne = false;
  F f;
  __device__ __forceinline__ CutWeight operator()(uint32_t i) const { return f(i); }
};
template <typename F>
WeightBy(F) -> WeightBy<F>;

// What the thread blocks of a unit tell each other. Each use has a mailbox of two in turn: nobody
// begins with one before all have done with what it held.
class CutExchange {
 public:
  // The whole thread block; Begin must end before anything is sent.
  __device__ __forceinline__ explicit CutExchange(CutMemory* memory) : memory_(memory) {
    if (threadIdx.x == 0) {
      memory->boxes[0].Init();
      memory->boxes[1].Init();
    }
    if (threadIdx.x < kCutDigits) {
      memory->row_counts[threadIdx.x] = {};
#pragma unroll
      for (uint32_t w = 0; w <= kCutWords; ++w) memory->weight_words[w][threadIdx.x] = {};
    }
    CutBlocks::Arrive();
  }
  __device__ __forceinline__ void Begin() { CutBlocks::Wait(); }

  __device__ __forceinline__ uint32_t half() const { return uses_ % 2; }
  template <typename Word>
  __device__ __forceinline__ void Send(Word* place, Word word, uint32_t rank) {
    memory_->boxes[half()].Send(place, word, rank);
  }
  template <typename Word>
  __device__ __forceinline__ void SendToAll(Word* place, Word word) {
#pragma unroll
    for (uint32_t rank = 0; rank < kCutBlocksMax; ++rank) {
      if (rank < CutBlocks::blocks()) Send(place, word, rank);
    }
  }
  // bytes: that all thread blocks send to this one.
  __device__ __forceinline__ void Await(uint32_t bytes) {
    memory_->boxes[half()].Await(bytes, uses_ / 2);
    ++uses_;
  }

  // A sum over the thread blocks, and *before of those before this one. All threads have x.
  __device__ __forceinline__ CutWeight Sum(CutWeight x, CutWeight* before) {
    const uint32_t half = this->half();
    Await(SendShare(x));
    return SumOfShares(half, before);
  }
  // Sum in two halves, between which what else is sent is awaited, too. Returns how many bytes
  // every thread block gets.
  __device__ __forceinline__ uint32_t SendShare(CutWeight x) {
    const uint32_t blocks = CutBlocks::blocks();
    if (threadIdx.x < blocks) Send(memory_->shares[half()] + CutBlocks::rank(), x, threadIdx.x);
    return blocks * sizeof(CutWeight);
  }
  // half: of the use that was awaited.
  __device__ __forceinline__ CutWeight SumOfShares(uint32_t half, CutWeight* before) const {
    CutWeight sum = 0;
    for (uint32_t b = 0; b < CutBlocks::blocks(); ++b) {
      if (b == CutBlocks::rank()) *before = sum;
      sum += memory_->shares[half][b];
    }
    return sum;
  }

 private:
  CutMemory* const memory_;
  uint32_t uses_ = 0;
};

// Finds one ranking's cut, a digit a round, until it is known. All thread blocks do the same, in
// each round in this order: Add, a __syncthreads, Send, the exchange's Await, Narrow or NarrowWith.
template <typename WeightOf>
class CutFinder {
 public:
  // Of weights of rows.
  using Sum = std::conditional_t<WeightOf::kOne, uint32_t, CutWeight>;
  struct DigitWeight {
    Sum own = 0, before = 0;
    uint32_t rows = 0;  // how many have it; of more than one perhaps too few
  };

  __device__ __forceinline__ CutFinder(const RankedRows& rows, CutLimit kind, CutWeight weight,
                                       const WeightOf& weight_of, CutMemory* memory)
      : rows_(rows), kind_(kind), weight_(weight), weight_of_(weight_of), memory_(memory) {}

  __device__ __forceinline__ void Add() const {
    if (cut_.known) return;
#pragma unroll 2
    for (uint32_t i = threadIdx.x; i < rows_.count; i += kCutThreads) {
      const uint32_t key = rows_.keys[i];
      if (key != 0 && range_.Has(key)) AddRow(weight_of_(i), range_.DigitOf(key));
    }
  }

  // A digit a thread, the greatest first; returns how many bytes every thread block gets.
  __device__ __forceinline__ uint32_t Send(CutExchange* exchange) {
    if (cut_.known) return 0;
    if (threadIdx.x < kCutDigits) SendDigit(exchange);
    return CutBlocks::blocks() * kCutDigits * (WeightOf::kOne ? 4 : 8);
  }

  // Before the first Narrow: another weight than that which it was made with.
  __device__ __forceinline__ void SetWeight(CutWeight weight) { weight_ = weight; }

  // half: of the exchange that was awaited.
  __device__ __forceinline__ void Narrow(uint32_t half) {
    const DigitWeight digit = Gather(half);
    Scanned<Sum> sum{digit.own};
    ScanBlock<kDigitWarps>(memory_, sum);
    const bool goes_on = NoteDigit(digit, sum, &memory_->found[0]);
    __syncthreads();
    if (goes_on) Take(memory_->found[0]);
  }
  // The same of two cuts together.
  template <typename OtherWeight>
  __device__ __forceinline__ void NarrowWith(CutFinder<OtherWeight>* other, uint32_t half) {
    const DigitWeight digit = Gather(half);
    const auto of_other = other->Gather(half);
    Scanned<Sum> sum{digit.own};
    Scanned<typename CutFinder<OtherWeight>::Sum> other_sum{of_other.own};
    ScanBlock<kDigitWarps>(memory_, sum, other_sum);
    const bool goes_on = NoteDigit(digit, sum, &memory_->found[0]);
    const bool other_goes_on = other->NoteDigit(of_other, other_sum, &memory_->found[1]);
    __syncthreads();
    if (goes_on) Take(memory_->found[0]);
    if (other_goes_on) other->Take(memory_->found[1]);
  }

  // The parts of Narrow.

  // What weighs this thread's digit: of all thread blocks, and of those before this one.
  __device__ __forceinline__ DigitWeight Gather(uint32_t half) const {
    DigitWeight digit;
    if (cut_.known || threadIdx.x >= kCutDigits) return digit;
#pragma unroll
    for (uint32_t rank = 0; rank < kCutBlocksMax; ++rank) {
      if (rank >= CutBlocks::blocks()) continue;
      Sum part;
      if constexpr (WeightOf::kOne) {
        part = memory_->rows[half][rank][Digit()];
      } else {
        part = memory_->weights[half][rank][Digit()];
      }
      if (rank < CutBlocks::rank()) digit.before += part;
      digit.own += part;
    }
    if constexpr (WeightOf::kOne) {
      digit.rows = digit.own;
    } else {
      constexpr CutWeight kWeight = (CutWeight{1} << kCutRowsShift) - 1;
      digit.rows = static_cast<uint32_t>(digit.own >> kCutRowsShift);
      digit.own &= kWeight;
      digit.before &= kWeight;
    }
    return digit;
  }
  // Notes the digit that the cut has, by the thread whose it is. sum.before: what the greater
  // digits weigh. Whether there is a cut to look for.
  __device__ __forceinline__ bool NoteDigit(const DigitWeight& digit, const Scanned<Sum>& sum,
                                            CutMemory::Found* found) {
    if (cut_.known || (range_.whole() && !Begin(sum.total))) return false;
    const CutWeight above = cut_.above + sum.before;
    if (above < cut_.limit && cut_.limit <= above + digit.own) {
      *found = {Digit(), digit.rows == 1, above, digit.before};
    }
    return true;
  }
  __device__ __forceinline__ void Take(const CutMemory::Found& found) {
    range_.Narrow(found.digit);
    cut_.above = found.above;
    if (found.only) {
      // The one row is taken: without it the others weigh too little.
      cut_.key = max(range_.first(), 1u) - 1;
      cut_.known = true;
    } else if (range_.single()) {
      cut_.key = range_.first();
      cut_.above += found.before;
      CountEquals();
      cut_.known = true;
    }
  }

  __device__ __forceinline__ const TreeCut& cut() const { return cut_; }

  // Whether a row with this key is taken, if at most one of the thread block's rows has the cut's
  // key.
  __device__ __forceinline__ bool Takes(uint32_t key) const {
    return key > cut_.key || (cut_.equals != 0 && key == cut_.key && cut_.above < cut_.limit);
  }
  // Whether row `i` is taken, however many rows have the cut's key. The whole thread block, which
  // asks for kCutThreads neighbouring rows at a time, in their order; i may lie behind the last
  // one.
  __device__ __forceinline__ bool TakesInOrder(uint32_t i) {
    const uint32_t key = i < rows_.count ? rows_.keys[i] : 0;
    if (cut_.equals <= 1) return key != 0 && Takes(key);
    const bool equal = key == cut_.key;
    Scanned<Sum> sum{equal ? static_cast<Sum>(weight_of_(i)) : 0};
    __syncthreads();
    ScanBlock<kCutWarps>(memory_, sum);
    const bool takes = key > cut_.key || (equal && cut_.above + sum.before < cut_.limit);
    cut_.above += sum.total;
    return takes;
  }

 private:
  static constexpr uint32_t kDigitWarps = kCutDigits / 32;  // a digit a thread
  static __device__ __forceinline__ uint32_t Digit() { return kCutDigits - 1 - threadIdx.x; }

  static __device__ __forceinline__ uint32_t WordOf(CutWeight weight, uint32_t word) {
    return static_cast<uint32_t>(weight >> word * kCutWordBits) & ((1u << kCutWordBits) - 1);
  }
  // The words that weights of a digit are added up in.
  static constexpr uint32_t kWords = WeightOf::kOne ? 1 : kCutWords;
  __device__ __forceinline__ CutSum& Place(uint32_t word, uint32_t digit) const {
    return WeightOf::kOne ? memory_->row_counts[digit] : memory_->weight_words[word][digit];
  }
  __device__ __forceinline__ void AddRow(CutWeight weight, uint32_t digit) const {
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      const uint32_t part = WordOf(weight, w);
      if (part != 0) Place(w, digit).Add(part);
    }
    if constexpr (!WeightOf::kOne) Place(kCutWords, digit).Add(1);
  }

  __device__ __forceinline__ void SendDigit(CutExchange* exchange) const {
    const uint32_t digit = Digit(), rank = CutBlocks::rank(), half = exchange->half();
    CutWeight weight = 0;
#pragma unroll
    for (uint32_t w = 0; w < kWords; ++w) {
      weight += static_cast<CutWeight>(Place(w, digit).Take()) << w * kCutWordBits;
    }
    if constexpr (WeightOf::kOne) {
      exchange->SendToAll(&memory_->rows[half][rank][digit], static_cast<uint32_t>(weight));
    } else {
      const CutWeight some = min(Place(kCutWords, digit).Take(), 2u);
      exchange->SendToAll(&memory_->weights[half][rank][digit], some << kCutRowsShift | weight);
    }
  }

  // How many of the thread block's rows have the cut's key.
  __device__ __forceinline__ void CountEquals() {
    uint32_t equals = 0;
    for (uint32_t i = threadIdx.x; i < rows_.count; i += kCutThreads) {
      equals += rows_.keys[i] == cut_.key && cut_.key != 0 ? 1 : 0;
    }
    cut_.equals = SumOfBlock(equals, memory_);
  }

  // With the weight of all rows; whether there is a cut to look for.
  __device__ __forceinline__ bool Begin(CutWeight total) {
    cut_.limit = kind_ == CutLimit::kTaken ? weight_ : total > weight_ ? total - weight_ : 0;
    if (cut_.limit > 0 && total >= cut_.limit) return true;
    cut_.key = cut_.limit == 0 ? ~0u : 0;  // none, or all
    cut_.known = true;
    return false;
  }

  const RankedRows rows_;
  const CutLimit kind_;
  CutWeight weight_;
  const WeightOf weight_of_;
  CutMemory* const memory_;
  CutRange range_;
  TreeCut cut_;
};

// Finds one cut.
template <typename WeightOf>
__device__ void FindCut(CutFinder<WeightOf>* cut, CutExchange* exchange) {
#pragma unroll 1
  while (!cut->cut().known) {
    cut->Add();
    __syncthreads();
    const uint32_t half = exchange->half();
    exchange->Await(cut->Send(exchange));
    cut->Narrow(half);
  }
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_CUT_CUH_
