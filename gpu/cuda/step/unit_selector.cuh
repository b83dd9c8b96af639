// SPDX-License-Identifier: Apache-2.0
//
// What of a unit's clusters is read exactly: their ranking, its cut, and what follows from that.
#ifndef ATTND_GPU_CUDA_STEP_UNIT_SELECTOR_CUH_
#define ATTND_GPU_CUDA_STEP_UNIT_SELECTOR_CUH_

#include <cstdint>

#include "attention/policy/estimate_limits.h"
#include "gpu/cuda/step/estimate.cuh"
#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/merge.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/select.cuh"

namespace attnd::gpu {

inline constexpr uint32_t kGroupLanes = 32;  // room for a group's heads

// In the shared memory of each of the cooperative group's thread blocks.
template <typename Threads>
struct UnitMemory {
  SelectMemory<Threads> select;
  float max[2][kGroupLanes];  // of the mass, of the optimistic mass
  float sum[2][kGroupLanes];
  float unit[kGroupLanes];  // error of a weight of 1 and a spread of 1, relative to the output
};

// Where a slot's cluster is.
struct SlotPlace {
  const std::byte* head;
  uint32_t starts;  // offsets of parts
  uint32_t spread;
  uint32_t segment;  // of the row
  uint32_t cluster;
  uint32_t clusters;  // of the segment and KV head
};

// ceil(share * n), at most n.
__device__ __forceinline__ uint32_t ShareOf(double share, uint32_t n) {
  const double count = ceil(share * n * (1 - attention::kShareRounding));
  return static_cast<uint32_t>(fmin(fmax(count, 0.0), static_cast<double>(n)));
}

// Neighbouring floats of a lane's scores.
template <uint32_t kCount>
__device__ __forceinline__ void LoadGroup(const float* from, float (&to)[kCount]) {
#pragma unroll
  for (uint32_t i = 0; i < kCount; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
  }
}

// Lookup: gives a SlotPlace for a group's first slot.
template <typename Threads, typename Lookup>
class UnitSelector {
 public:
  static constexpr uint32_t kGroupSlots = Threads::kGroupSlots;

  // memory->max and ->sum must be there before clusters are ranked. undecided: see KeyFinder.
  __device__ UnitSelector(const StepHeader& step, const UnitPlace& unit, const Lookup& lookup,
                          uint32_t clusters, UnitMemory<Threads>* memory, uint32_t* undecided)
      : step_(step),
        unit_(unit),
        row_(*unit.row),
        lookup_(lookup),
        clusters_(clusters),
        memory_(memory),
        undecided_(undecided),
        sums_(&memory->select),
        scores_(UnitScores(step, unit)),
        d2_(scores_ + uint64_t{step.group} * row_.slots),
        fates_(UnitFates(step, unit)),
        keys_(reinterpret_cast<uint32_t*>(scores_ + ScoresPerUnit(row_, step.group) - row_.slots),
              row_.slots) {}

  // Keys by the group's mean share of the mass, or of the optimistic mass.
  __device__ __forceinline__ void RankByMass(bool optimistic);
  // Keys by the group's mean squared error; see docs/POLICIES.md, "error-target".
  __device__ void RankByError();

  // The cut above which clusters are read exactly (of rows with a tolerance, the floor), or at
  // least estimated.
  __device__ __forceinline__ RankCut CutAt(bool exact) {
    if (row_.cut == CutKind::kTopP) return CutByMass(exact ? row_.p2 : row_.p1);
    uint32_t count = clusters_;
    if (row_.cut == CutKind::kTopK) {
      count = ShareOf(row_.exact_share, clusters_) +
              (exact ? 0 : ShareOf(row_.estimated_share, clusters_));
    } else if (exact) {
      count = ShareOf(row_.floor, clusters_);
    }
    if (count >= clusters_) return kTakeAll;
    return CutByCount(keys_, count, &sums_, &memory_->select, undecided_, kShareBits);
  }
  __device__ __forceinline__ RankCut CutByMass(double p) {
    if (p >= 1) return kTakeAll;
    const auto weight = [](uint32_t key) {
      return __float2ull_rn(ScoreOf(key) * static_cast<float>(kOne));
    };
    const auto limit = static_cast<Weight64>(ceil(p * static_cast<double>(kOne)));
    return CutByWeight<true>(keys_, limit, weight, &sums_, &memory_->select, undecided_,
                             kShareBits);
  }
  // Above it lies what must be read for the rest's squared errors to stay within tolerance^2.
  __device__ RankCut CutByError(double tolerance) {
    const auto per_budget = static_cast<float>(1 / (tolerance * tolerance));
    const auto weight = [per_budget](uint32_t key) {
      return __float2ull_rn(fminf(ScoreOf(key) * per_budget, 2.0f) * static_cast<float>(kOne));
    };
    return CutByWeight<false>(keys_, kOne, weight, &sums_, &memory_->select, undecided_,
                              kErrorBits);
  }

  // What a row without a tolerance reads exactly and estimates; ranks clusters first. Code that
  // runs once waits for its own instructions: so there is one copy of it for all cuts.
  __device__ __forceinline__ UnitResult Select() {
    PrefetchStarts();
    RankByMass(/*optimistic=*/row_.cut == CutKind::kErrorBudget);
    RankCut exact = kTakeAll, kept = kTakeAll;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const RankCut cut = CutAt(i == 0);
      (i == 0 ? exact : kept) = cut;
    }
    return Assign(exact, kept, /*keep=*/false);
  }

  // Marks the floor, before errors are known.
  __device__ void MarkFloor(RankCut floor);
  // Fates from the cuts, and the exact clusters' tokens in order; the result's pieces are left to
  // others. keep: clusters that are exact already stay so. The cooperative group must Sync before
  // others look.
  __device__ UnitResult Assign(RankCut exact, RankCut kept, bool keep);
  // Fills memory_->unit from the zones' states and the estimate of all clusters.
  template <int kValueDim>
  __device__ void MeasureOutputs();

 private:
  // Of keys: shares are at most 1, errors have the sign's bit to spare.
  static constexpr uint32_t kShareBits = 30;
  static constexpr uint32_t kErrorBits = 32;
  // Token counts of exact clusters (low bits) and of estimated ones go together: a unit has at most
  // kUnitTokensMax of both, and CoopSums holds twice that.
  static constexpr uint32_t kCountBits = 28;

  // Asks the second-level cache for what AssignGroup will read of the index in the first pass.
  __device__ __forceinline__ void PrefetchStarts() const {
    const uint32_t first = keys_.First(0);
    if (first >= row_.slots) return;
    const SlotPlace place = lookup_.Of(first);
    if (place.cluster >= place.clusters) return;
    Prefetch(place.head + place.starts + place.cluster * 4);
  }

  // Whether a key is above the cut; *ties: keys equal to it that came before.
  static __device__ __forceinline__ bool Above(uint32_t key, RankCut cut, uint32_t* ties) {
    return key > cut.key || (key == cut.key && (*ties)++ < cut.ties);
  }
  // Of the slots before the group: how many equal the first cut (low half), the second (high).
  // *before: of passes before this one; brought up to date.
  __device__ Weight64 TiesBefore(const uint32_t (&keys)[kGroupSlots], RankCut first, RankCut second,
                                 Weight64* before) {
    if (first.ties == 0 && second.ties == 0) return 0;
    Weight64 ties = 0, total;
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) {
      ties += (keys[i] == first.key ? 1ull : 0) + (keys[i] == second.key ? 1ull << 32 : 0);
    }
    const Weight64 own = *before + sums_.Scan(ties, &total);
    *before += total;
    return own;
  }
  __device__ void AssignGroup(uint32_t first, const uint32_t (&keys)[kGroupSlots], RankCut exact,
                              RankCut kept, bool keep, Weight64 ties, Weight64* tokens_before);
  __device__ __forceinline__ void ListTokens(const uint32_t (&starts)[kGroupSlots + 1],
                                             uint32_t chosen, uint32_t segment, uint32_t place);

  const StepHeader& step_;
  const UnitPlace& unit_;
  const RowRef& row_;
  const Lookup lookup_;
  const uint32_t clusters_;
  UnitMemory<Threads>* const memory_;
  uint32_t* const undecided_;
  CoopSums<Threads> sums_;
  float* const scores_;  // [group][slots] log masses
  float* const d2_;      // [group][slots]
  uint8_t* const fates_;
  RankedKeys<Threads> keys_;
};

template <typename Threads, typename Lookup>
__device__ __forceinline__ void UnitSelector<Threads, Lookup>::RankByMass(bool optimistic) {
  const uint32_t kind = optimistic ? 1 : 0;
  for (uint32_t pass = 0; pass < row_.slots; pass += keys_.pass_slots()) {
    const uint32_t first = keys_.First(pass);
    if (first >= row_.slots) continue;
    float score[kGroupSlots] = {};
    uint32_t keys[kGroupSlots];
    bool cluster[kGroupSlots] = {};
#pragma unroll 2
    for (uint32_t lane = 0; lane < step_.group; ++lane) {
      const float max = memory_->max[kind][lane];
      const float share = 1 / (memory_->sum[kind][lane] * step_.group);
      float x[kGroupSlots], d2[kGroupSlots] = {};
      LoadGroup(scores_ + uint64_t{lane} * row_.slots + first, x);
      if (optimistic) LoadGroup(d2_ + uint64_t{lane} * row_.slots + first, d2);
#pragma unroll
      for (uint32_t i = 0; i < kGroupSlots; ++i) {
        cluster[i] |= x[i] != -INFINITY;
        if (optimistic) {
          x[i] += 2 * kLog2E * Sqrt(d2[i]) - kLog2E / 2 * fminf(d2[i], attention::kVarianceCap);
        }
        score[i] += Weight(x[i], max) * share;
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) {
      keys[i] = cluster[i] ? KeyOf(fminf(score[i], 1.0f)) : 0;
    }
    keys_.Store(pass, first, keys);
  }
}

template <typename Threads, typename Lookup>
__device__ void UnitSelector<Threads, Lookup>::RankByError() {
  for (uint32_t pass = 0; pass < row_.slots; pass += keys_.pass_slots()) {
    const uint32_t first = keys_.First(pass);
    if (first >= row_.slots) continue;
    const SlotPlace place = lookup_.Of(first);
    float score[kGroupSlots] = {}, spread[kGroupSlots] = {};
    uint32_t keys[kGroupSlots];
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) {
      if (place.cluster + i < place.clusters) {
        spread[i] = reinterpret_cast<const float*>(place.head + place.spread)[place.cluster + i];
      }
    }
#pragma unroll 2
    for (uint32_t lane = 0; lane < step_.group; ++lane) {
      const float max = memory_->max[0][lane], unit = memory_->unit[lane];
      float x[kGroupSlots], d2[kGroupSlots];
      LoadGroup(scores_ + uint64_t{lane} * row_.slots + first, x);
      LoadGroup(d2_ + uint64_t{lane} * row_.slots + first, d2);
#pragma unroll
      for (uint32_t i = 0; i < kGroupSlots; ++i) {
        const float error = fminf(Weight(x[i], max) * unit * spread[i], attention::kErrorMax);
        score[i] += error * error * Expm1(fminf(d2[i], attention::kVarianceCap));
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) {
      keys[i] = place.cluster + i < place.clusters ? KeyOf(score[i] / step_.group) : 0;
    }
    keys_.Store(pass, first, keys);
  }
}

template <typename Threads, typename Lookup>
__device__ void UnitSelector<Threads, Lookup>::MarkFloor(RankCut floor) {
  Weight64 before = 0;
  for (uint32_t pass = 0; pass < row_.slots; pass += keys_.pass_slots()) {
    const uint32_t first = keys_.First(pass);
    uint32_t keys[kGroupSlots];
    keys_.Load(pass, first, keys);
    auto ties = static_cast<uint32_t>(TiesBefore(keys, floor, kTakeNone, &before));
    if (first >= row_.slots) continue;
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) {
      fates_[first + i] = Above(keys[i], floor, &ties) ? kFateExact : kFateEstimated;
    }
  }
}

template <typename Threads, typename Lookup>
__device__ UnitResult UnitSelector<Threads, Lookup>::Assign(RankCut exact, RankCut kept,
                                                            bool keep) {
  Weight64 before = 0, tokens = 0;
  for (uint32_t pass = 0; pass < row_.slots; pass += keys_.pass_slots()) {
    const uint32_t first = keys_.First(pass);
    uint32_t keys[kGroupSlots];
    keys_.Load(pass, first, keys);
    const Weight64 ties = TiesBefore(keys, exact, kept, &before);
    AssignGroup(first, keys, exact, kept, keep, ties, &tokens);
  }
  UnitResult result = {};
  result.clusters = clusters_;
  result.chosen_tokens = static_cast<uint32_t>(tokens & ((1u << kCountBits) - 1));
  result.estimated_tokens = tokens >> kCountBits;
  result.dropped_tokens = row_.clustered_tokens - result.chosen_tokens - result.estimated_tokens;
  return result;
}

// One group's fates and tokens; slots from `first` on, or none. Every thread calls it.
template <typename Threads, typename Lookup>
__device__ void UnitSelector<Threads, Lookup>::AssignGroup(uint32_t first,
                                                           const uint32_t (&keys)[kGroupSlots],
                                                           RankCut exact, RankCut kept, bool keep,
                                                           Weight64 ties, Weight64* tokens_before) {
  const bool used = first < row_.slots;
  const SlotPlace place = lookup_.Of(used ? first : 0);
  uint32_t starts[kGroupSlots + 1] = {};
  if (used && place.cluster < place.clusters) {
    const auto* all = reinterpret_cast<const uint32_t*>(place.head + place.starts);
#pragma unroll
    for (uint32_t i = 0; i <= kGroupSlots; ++i) {
      starts[i] = all[min(place.cluster + i, place.clusters)];
    }
  }
  auto* fates = reinterpret_cast<uint32_t*>(fates_ + first);
  uint32_t exact_ties = static_cast<uint32_t>(ties), kept_ties = static_cast<uint32_t>(ties >> 32);
  Weight64 tokens = 0;
  uint32_t chosen = 0;  // a bit for each exact cluster
#pragma unroll
  for (uint32_t word = 0; word < kGroupSlots / 4; ++word) {
    const uint32_t old = used && keep ? fates[word] : 0;
    uint32_t now = 0;
#pragma unroll
    for (uint32_t b = 0; b < 4; ++b) {
      const uint32_t i = word * 4 + b;
      const uint32_t size = starts[i + 1] - starts[i];
      const bool above = Above(keys[i], exact, &exact_ties);
      const bool within = Above(keys[i], kept, &kept_ties);
      uint32_t fate = kFateDropped;
      if (keys[i] != 0 && (above || (keep && (old >> b * 8 & 0xFF) == kFateExact))) {
        fate = kFateExact;
        chosen |= 1u << i;
        tokens += size;
      } else if (keys[i] != 0 && within) {
        fate = kFateEstimated;
        tokens += static_cast<Weight64>(size) << kCountBits;
      }
      now |= fate << b * 8;
    }
    if (used) fates[word] = now;
  }

  Weight64 total;
  const Weight64 place_of_first = *tokens_before + sums_.Scan(tokens, &total);
  *tokens_before += total;
  ListTokens(starts, chosen, place.segment,
             static_cast<uint32_t>(place_of_first & ((1u << kCountBits) - 1)));
}

// The chosen clusters' tokens, from `place` of the unit's list on. A warp lists them together: each
// thread's first cluster, then each one's second.
template <typename Threads, typename Lookup>
__device__ __forceinline__ void UnitSelector<Threads, Lookup>::ListTokens(
    const uint32_t (&starts)[kGroupSlots + 1], uint32_t chosen, uint32_t segment, uint32_t place) {
  uint32_t* list = UnitChosen(step_, unit_);
#pragma unroll 1
  for (uint32_t threads = __ballot_sync(~0u, chosen != 0); threads != 0;
       threads = __ballot_sync(~0u, chosen != 0)) {
    uint32_t begin = 0, end = 0;
    const uint32_t lowest = chosen & (0 - chosen);
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) {
      if (lowest == 1u << i) begin = starts[i], end = starts[i + 1];
    }
#pragma unroll 1
    for (; threads != 0; threads &= threads - 1) {
      const int thread = __ffs(static_cast<int>(threads)) - 1;
      const uint32_t first = __shfl_sync(~0u, begin, thread);
      const uint32_t last = __shfl_sync(~0u, end, thread);
      const uint32_t of_segment = __shfl_sync(~0u, segment, thread) << 16;
      uint32_t* to = list + __shfl_sync(~0u, place, thread);
#pragma unroll 1
      for (uint32_t token = first + threadIdx.x % 32; token < last; token += 32) {
        to[token - first] = of_segment | token;
      }
    }
    place += end - begin;
    chosen ^= lowest;
  }
}

// A warp for each lane: a thread has the heads of some states, and some channels of all.
template <typename Threads, typename Lookup>
template <int kValueDim>
__device__ void UnitSelector<Threads, Lookup>::MeasureOutputs() {
  constexpr uint32_t kFloats = StateFloats(kValueDim);
  constexpr uint32_t kChannels = kValueDim / 32;  // of a thread
  const uint32_t lane = threadIdx.x / 32, thread = threadIdx.x % 32;
  if (lane < step_.group) {
    const float* states =
        TileStates(step_, unit_, lane / kLanes, kFloats) + lane % kLanes * (kStateHead + kValueDim);
    const uint32_t zones = row_.read_pieces, end = zones + row_.estimate_pieces;
    const auto state = [&](uint32_t i) { return states + uint64_t{i} * kFloats; };
    float max = memory_->max[0][lane];
    for (uint32_t i = thread; i < zones; i += 32) {
      if (state(i)[1] > 0) max = fmaxf(max, state(i)[0]);
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      max = fmaxf(max, __shfl_xor_sync(~0u, max, offset));
    }
    float zone_sum = 0, cluster_sum = 0, moments = 0;
    float zone[kChannels] = {}, clusters[kChannels] = {};
    for (uint32_t first = 0; first < end; first += 32) {
      float factor = 0;
      if (first + thread < end) {
        const float4 head = *reinterpret_cast<const float4*>(state(first + thread));
        factor = head.y > 0 ? Exp2(head.x - max) : 0.0f;
        (first + thread < zones ? zone_sum : cluster_sum) += factor * head.y;
        moments += first + thread < zones ? 0.0f : factor * head.w;
      }
#pragma unroll 4
      for (uint32_t i = 0; i < 32; ++i) {
        const float of_state = __shfl_sync(~0u, factor, i);
        if (first + i >= end) continue;
#pragma unroll
        for (uint32_t c = 0; c < kChannels; ++c) {
          const float x = of_state * state(first + i)[kStateHead + c * 32 + thread];
          zone[c] += first + i < zones ? x : 0.0f;
          clusters[c] += first + i < zones ? 0.0f : x;
        }
      }
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      zone_sum += __shfl_xor_sync(~0u, zone_sum, offset);
      cluster_sum += __shfl_xor_sync(~0u, cluster_sum, offset);
      moments += __shfl_xor_sync(~0u, moments, offset);
    }
    const float sum = zone_sum + cluster_sum;
    float norm2 = 0, zone_norm2 = 0;  // of means: sums squared may leave float
#pragma unroll
    for (uint32_t c = 0; c < kChannels; ++c) {
      const float mean = (zone[c] + clusters[c]) / sum;
      const float zone_mean = zone_sum > 0 ? zone[c] / zone_sum : 0.0f;
      norm2 += mean * mean;
      zone_norm2 += zone_mean * zone_mean;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      norm2 += __shfl_xor_sync(~0u, norm2, offset);
      zone_norm2 += __shfl_xor_sync(~0u, zone_norm2, offset);
    }
    const float norm = fmaxf(sqrtf(norm2), LeastNorm(zone_sum, zone_norm2, moments, cluster_sum));
    if (thread == 0) memory_->unit[lane] = Weight(memory_->max[0][lane], max) / sum / norm;
  }
  __syncthreads();
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_UNIT_SELECTOR_CUH_
