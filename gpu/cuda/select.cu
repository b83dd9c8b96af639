// SPDX-License-Identifier: Apache-2.0
//
// The select and the measure stage: what of a unit's clusters is read exactly. One block works on
// one unit, as its cut needs all of the unit's scores.
#include <cstdint>

#include "attention/estimate_limits.h"
#include "gpu/cuda/estimate.cuh"
#include "gpu/cuda/matrix.cuh"
#include "gpu/cuda/merge.cuh"
#include "gpu/cuda/place.cuh"
#include "gpu/cuda/score.cuh"
#include "gpu/cuda/select.cuh"
#include "gpu/cuda/step_kernels.h"

namespace attnd::gpu {
namespace {

using attention::kErrorMax;
using attention::kShareRounding;

constexpr uint32_t kGroupLanes = 32;  // room for a group's heads; a warp each

struct UnitMemory {
  SelectMemory select;
  float max[2][kGroupLanes];  // of the mass, of the optimistic mass
  float sum[2][kGroupLanes];
  float unit[kGroupLanes];  // error of a weight of 1 and a spread of 1, relative to the output
  uint32_t first_item;
};

// ceil(share * n), at most n.
__device__ __forceinline__ uint32_t ShareOf(double share, uint32_t n) {
  const double count = ceil(share * n * (1 - kShareRounding));
  return static_cast<uint32_t>(fmin(fmax(count, 0.0), static_cast<double>(n)));
}

// Eight floats of a lane's scores.
__device__ __forceinline__ void LoadGroup(const float* from, float (&to)[kGroupSlots]) {
  const float4 low = *reinterpret_cast<const float4*>(from);
  const float4 high = *reinterpret_cast<const float4*>(from + 4);
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

class UnitSelector {
 public:
  __device__ UnitSelector(const StepHeader& step, const UnitPlace& unit, UnitMemory* memory)
      : step_(step),
        unit_(unit),
        row_(*unit.row),
        memory_(memory),
        sums_(&memory->select),
        scores_(UnitScores(step, unit)),
        d2_(scores_ + uint64_t{step.group} * row_.slots),
        fates_(UnitFates(step, unit)),
        keys_(reinterpret_cast<uint32_t*>(scores_ + ScoresPerUnit(row_, step.group) - row_.slots),
              row_.slots) {
    const uint32_t chunks = row_.slots / kSlotChunk;
    chunks_ = step.chunks + row_.first_score_item + unit.in_row * chunks;
    uint32_t clusters = 0;
    for (uint32_t i = threadIdx.x; i < chunks; i += kSelectThreads) {
      const uint32_t first = chunks_[i].first, all = chunks_[i].clusters;
      clusters += min(max(all, first) - first, kSlotChunk);
    }
    clusters_ = sums_.Count(clusters);
  }

  // The scales of weights: from the score items' totals, or from what select left.
  __device__ void ReduceTotals();
  __device__ void StoreScales() const;
  __device__ void LoadScales();

  // Keys by the group's mean share of the mass, or of the optimistic mass.
  template <bool kOptimistic>
  __device__ void RankByMass();
  // Keys by the group's mean squared error; see docs/POLICIES.md, "error-target".
  __device__ void RankByError();

  __device__ RankCut CutByShare(double share, double more = 0) {
    const uint32_t count =
        min(clusters_, ShareOf(share, clusters_) + (more > 0 ? ShareOf(more, clusters_) : 0));
    return CutByCount(keys_, count, &sums_, &memory_->select);
  }
  __device__ RankCut CutByMass(double p) {
    if (p >= 1) return kTakeAll;
    const auto weight = [](uint32_t key) {
      return __float2ull_rn(ScoreOf(key) * static_cast<float>(kOne));
    };
    const auto limit = static_cast<Weight64>(ceil(p * static_cast<double>(kOne)));
    return CutByWeight<true>(keys_, limit, weight, &sums_, &memory_->select);
  }
  // Above it lies what must be read for the rest's squared errors to stay within tolerance^2.
  __device__ RankCut CutByError(double tolerance) {
    const auto per_budget = static_cast<float>(1 / (tolerance * tolerance));
    const auto weight = [per_budget](uint32_t key) {
      return __float2ull_rn(fminf(ScoreOf(key) * per_budget, 2.0f) * static_cast<float>(kOne));
    };
    return CutByWeight<false>(keys_, kOne, weight, &sums_, &memory_->select);
  }

  // Marks the floor, before errors are known.
  __device__ void MarkFloor(RankCut floor);
  // Fates from the cuts, the exact clusters' tokens in order, and their pieces.
  // keep: clusters that are exact already stay so.
  __device__ void Assign(RankCut exact, RankCut kept, bool keep);
  // Fills memory_->unit from the zones' states and the estimate of all clusters.
  template <int kValueDim>
  __device__ void MeasureOutputs();

 private:
  // Token counts of a unit, over all passes.
  struct Totals {
    Weight64 exact = 0;
    Weight64 rest = 0;  // estimated (low half) and dropped (high half)
  };

  // Whether a key is above the cut; *ties: keys equal to it that came before.
  static __device__ __forceinline__ bool Above(uint32_t key, RankCut cut, uint32_t* ties) {
    return key > cut.key || (key == cut.key && (*ties)++ < cut.ties);
  }
  // Of the slots before the group: how many equal the first cut (low half), the second (high).
  // *before: of passes before this one; brought up to date.
  __device__ Weight64 TiesBefore(const uint32_t (&keys)[kGroupSlots], RankCut first, RankCut second,
                                 Weight64* before) {
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
                              RankCut kept, bool keep, Weight64 ties, Totals* totals);
  __device__ void QueuePieces(const UnitResult& result);

  const StepHeader& step_;
  const UnitPlace& unit_;
  const RowRef& row_;
  UnitMemory* const memory_;
  BlockSums sums_;
  float* const scores_;  // [group][slots] log masses
  float* const d2_;      // [group][slots]
  uint8_t* const fates_;
  RankedKeys keys_;
  const ChunkRef* chunks_;
  uint32_t clusters_ = 0;
};

__device__ void UnitSelector::ReduceTotals() {
  const uint32_t lane = threadIdx.x / 32, thread = threadIdx.x % 32;
  const uint32_t chunks = row_.slots / kSlotChunk;
  const uint64_t stride = uint64_t{step_.tiles_max} * kLanes * 4;  // tile * kLanes + lane is lane
  const float* partials = step_.score_partials +
                          (uint64_t{row_.first_score_item} + unit_.in_row * chunks) * stride +
                          lane * 4;
  if (lane < step_.group) {
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
#pragma unroll 4
    for (uint32_t i = thread; i < chunks; i += 32) {
      const float4 part = *reinterpret_cast<const float4*>(partials + i * stride);
      const float part_max[2] = {part.x, part.z}, part_sum[2] = {part.y, part.w};
#pragma unroll
      for (int kind = 0; kind < 2; ++kind) {
        const float greater = fmaxf(max[kind], part_max[kind]);
        sum[kind] = sum[kind] * Weight(max[kind], greater) +
                    part_sum[kind] * Weight(part_max[kind], greater);
        max[kind] = greater;
      }
    }
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
      float greatest = max[kind];
      for (int offset = 16; offset > 0; offset /= 2) {
        greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, offset));
      }
      float total = sum[kind] * Weight(max[kind], greatest);
      for (int offset = 16; offset > 0; offset /= 2) {
        total += __shfl_xor_sync(~0u, total, offset);
      }
      if (thread == 0) memory_->max[kind][lane] = greatest, memory_->sum[kind][lane] = total;
    }
  }
  __syncthreads();
}

__device__ void UnitSelector::StoreScales() const {
  for (uint32_t i = threadIdx.x; i < step_.tiles_max * kLanes; i += kSelectThreads) {
    LaneScale scale = {};
    scale.max = i < step_.group ? memory_->max[0][i] : -INFINITY;
    scale.sum = i < step_.group ? memory_->sum[0][i] : 0.0f;
    step_.lane_scales[uint64_t{unit_.unit} * step_.tiles_max * kLanes + i] = scale;
  }
}

__device__ void UnitSelector::LoadScales() {
  if (threadIdx.x < step_.group) {
    const LaneScale scale =
        step_.lane_scales[uint64_t{unit_.unit} * step_.tiles_max * kLanes + threadIdx.x];
    memory_->max[0][threadIdx.x] = scale.max;
    memory_->sum[0][threadIdx.x] = scale.sum;
  }
  __syncthreads();
}

template <bool kOptimistic>
__device__ void UnitSelector::RankByMass() {
  constexpr uint32_t kKind = kOptimistic ? 1 : 0;
  for (uint32_t first = threadIdx.x * kGroupSlots; first < row_.slots; first += kPassSlots) {
    float score[kGroupSlots] = {};
    uint32_t keys[kGroupSlots];
    bool cluster[kGroupSlots] = {};
#pragma unroll 4
    for (uint32_t lane = 0; lane < step_.group; ++lane) {
      const float max = memory_->max[kKind][lane];
      const float share = 1 / (memory_->sum[kKind][lane] * step_.group);
      float x[kGroupSlots], d2[kGroupSlots] = {};
      LoadGroup(scores_ + uint64_t{lane} * row_.slots + first, x);
      if constexpr (kOptimistic) LoadGroup(d2_ + uint64_t{lane} * row_.slots + first, d2);
#pragma unroll
      for (uint32_t i = 0; i < kGroupSlots; ++i) {
        cluster[i] |= x[i] != -INFINITY;
        if (kOptimistic) {
          x[i] += 2 * kLog2E * Sqrt(d2[i]) - kLog2E / 2 * fminf(d2[i], kVarianceCap);
        }
        score[i] += Weight(x[i], max) * share;
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) keys[i] = cluster[i] ? KeyOf(score[i]) : 0;
    keys_.Store(first, keys);
  }
}

__device__ void UnitSelector::RankByError() {
  for (uint32_t first = threadIdx.x * kGroupSlots; first < row_.slots; first += kPassSlots) {
    const ChunkRef& chunk = chunks_[first / kSlotChunk];
    const uint32_t cluster = chunk.first + first % kSlotChunk;
    float score[kGroupSlots] = {}, spread[kGroupSlots] = {};
    uint32_t keys[kGroupSlots];
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) {
      if (cluster + i < chunk.clusters)
        spread[i] = Part<float>(chunk, chunk.offsets.spread)[cluster + i];
    }
#pragma unroll 2
    for (uint32_t lane = 0; lane < step_.group; ++lane) {
      const float max = memory_->max[0][lane], unit = memory_->unit[lane];
      float x[kGroupSlots], d2[kGroupSlots];
      LoadGroup(scores_ + uint64_t{lane} * row_.slots + first, x);
      LoadGroup(d2_ + uint64_t{lane} * row_.slots + first, d2);
#pragma unroll
      for (uint32_t i = 0; i < kGroupSlots; ++i) {
        const float error = fminf(Weight(x[i], max) * unit * spread[i], kErrorMax);
        score[i] += error * error * Expm1(fminf(d2[i], kVarianceCap));
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) {
      keys[i] = cluster + i < chunk.clusters ? KeyOf(score[i] / step_.group) : 0;
    }
    keys_.Store(first, keys);
  }
}

__device__ void UnitSelector::MarkFloor(RankCut floor) {
  Weight64 before = 0;
  for (uint32_t pass = 0; pass < row_.slots; pass += kPassSlots) {
    const uint32_t first = pass + threadIdx.x * kGroupSlots;
    uint32_t keys[kGroupSlots] = {};
    if (first < row_.slots) keys_.Load(first, keys);
    auto ties = static_cast<uint32_t>(TiesBefore(keys, floor, kTakeNone, &before));
    if (first >= row_.slots) continue;
#pragma unroll
    for (uint32_t i = 0; i < kGroupSlots; ++i) {
      fates_[first + i] = Above(keys[i], floor, &ties) ? kFateExact : kFateEstimated;
    }
  }
}

__device__ void UnitSelector::Assign(RankCut exact, RankCut kept, bool keep) {
  Weight64 before = 0;
  Totals totals;
  for (uint32_t pass = 0; pass < row_.slots; pass += kPassSlots) {
    const uint32_t first = pass + threadIdx.x * kGroupSlots;
    uint32_t keys[kGroupSlots] = {};
    if (first < row_.slots) keys_.Load(first, keys);
    const Weight64 ties = TiesBefore(keys, exact, kept, &before);
    AssignGroup(first, keys, exact, kept, keep, ties, &totals);
  }
  UnitResult result;
  result.clusters = clusters_;
  result.chosen_tokens = static_cast<uint32_t>(totals.exact);
  const uint32_t even = (result.chosen_tokens + kChosenPiecesMax - 1) / kChosenPiecesMax;
  result.chosen_piece_tokens =
      max(kChosenPieceTokens, (even + kPageRows - 1) / kPageRows * kPageRows);
  result.chosen_pieces =
      (result.chosen_tokens + result.chosen_piece_tokens - 1) / result.chosen_piece_tokens;
  result.estimated_tokens = totals.rest & 0xFFFFFFFFu;
  result.dropped_tokens = totals.rest >> 32;
  if (threadIdx.x == 0) step_.unit_results[unit_.unit] = result;
  QueuePieces(result);
}

// One group's fates and tokens; slots from `first` on, or none. Every thread calls it.
__device__ void UnitSelector::AssignGroup(uint32_t first, const uint32_t (&keys)[kGroupSlots],
                                          RankCut exact, RankCut kept, bool keep, Weight64 ties,
                                          Totals* totals) {
  const bool used = first < row_.slots;
  const ChunkRef& chunk = chunks_[used ? first / kSlotChunk : 0];
  const uint32_t cluster = chunk.first + first % kSlotChunk;
  uint32_t starts[kGroupSlots + 1] = {};
  if (used && cluster < chunk.clusters) {
    const uint32_t* all = Part<uint32_t>(chunk, chunk.offsets.starts);
#pragma unroll
    for (uint32_t i = 0; i <= kGroupSlots; ++i) starts[i] = all[min(cluster + i, chunk.clusters)];
  }
  uint2 old = make_uint2(0, 0), fates = old;
  if (used && keep) old = *reinterpret_cast<const uint2*>(fates_ + first);

  uint32_t exact_ties = static_cast<uint32_t>(ties), kept_ties = static_cast<uint32_t>(ties >> 32);
  Weight64 tokens = 0, rest = 0;
  uint32_t chosen = 0;  // a bit for each exact cluster
#pragma unroll
  for (uint32_t i = 0; i < kGroupSlots; ++i) {
    const uint32_t size = starts[i + 1] - starts[i];
    uint32_t& fates_word = i < 4 ? fates.x : fates.y;
    const uint32_t old_fate = (i < 4 ? old.x : old.y) >> i % 4 * 8 & 0xFF;
    const bool above = Above(keys[i], exact, &exact_ties);
    const bool within = Above(keys[i], kept, &kept_ties);
    uint32_t fate = kFateDropped;
    if (keys[i] != 0 && (above || (keep && old_fate == kFateExact))) {
      fate = kFateExact;
      chosen |= 1u << i;
      tokens += size;
    } else if (keys[i] != 0) {
      fate = within ? kFateEstimated : kFateDropped;
      rest += within ? size : static_cast<Weight64>(size) << 32;
    }
    fates_word |= fate << i % 4 * 8;
  }
  if (used) *reinterpret_cast<uint2*>(fates_ + first) = fates;

  Weight64 total;
  uint32_t next = static_cast<uint32_t>(totals->exact + sums_.Scan(tokens, &total));
  totals->exact += total;
  sums_.Scan(rest, &total);
  totals->rest += total;
  uint32_t* list = UnitChosen(step_, unit_);
#pragma unroll
  for (uint32_t i = 0; i < kGroupSlots; ++i) {
    if ((chosen >> i & 1) == 0) continue;
    for (uint32_t token = starts[i]; token < starts[i + 1]; ++token) {
      list[next++] = chunk.segment << 16 | token;
    }
  }
}

__device__ void UnitSelector::QueuePieces(const UnitResult& result) {
  const uint32_t count = result.chosen_pieces * step_.tiles_max;
  if (threadIdx.x == 0) {
    memory_->first_item = atomicAdd(&step_.cursors[kQueuedPieces], count);
  }
  __syncthreads();
  const uint32_t floats = StateFloats(step_.value_dim);
  for (uint32_t i = threadIdx.x; i < count; i += kSelectThreads) {
    const uint32_t tile = i / result.chosen_pieces, number = i % result.chosen_pieces;
    const uint64_t state = row_.read_pieces + row_.estimate_pieces + number;
    const uint64_t tile_number = uint64_t{unit_.unit} * step_.tiles_max + tile;
    ChosenPiece piece = {};
    piece.chosen = UnitChosen(step_, unit_);
    piece.segments = step_.segments + row_.segments_begin;
    piece.fragments = step_.query_fragments + tile_number * TileFragmentWords(step_.head_dim);
    piece.state = TileStates(step_, unit_, tile, floats) + state * floats;
    piece.begin = number * result.chosen_piece_tokens;
    piece.end = min(piece.begin + result.chosen_piece_tokens, result.chosen_tokens);
    piece.kv_head = unit_.kv_head;
    piece.lanes = LanesOf(step_, unit_, tile);
    step_.chosen_pieces[memory_->first_item + i] = piece;
  }
}

// A warp for each lane: a thread has the heads of some states, and some channels of all.
template <int kValueDim>
__device__ void UnitSelector::MeasureOutputs() {
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

// ---- kernels ----

// One block selects one unit's clusters; of units with a tolerance it marks only the floor.
__global__ void __launch_bounds__(kSelectThreads)
    SelectKernel(const __grid_constant__ StepHeader step) {
  __shared__ UnitMemory memory;
  const RowRef* row = RowOfUnit(step, blockIdx.x);
  if (row->kind != UnitKind::kClusters) return;
  const UnitPlace unit(step, row, blockIdx.x - row->first_unit);
  UnitSelector selector(step, unit, &memory);
  selector.ReduceTotals();
  selector.StoreScales();
  switch (row->cut) {
    case CutKind::kTopK: {
      selector.RankByMass<false>();
      const RankCut exact = selector.CutByShare(row->exact_share);
      return selector.Assign(exact, selector.CutByShare(row->exact_share, row->estimated_share),
                             /*keep=*/false);
    }
    case CutKind::kTopP: {
      selector.RankByMass<false>();
      const RankCut exact = selector.CutByMass(row->p2);
      return selector.Assign(exact, selector.CutByMass(row->p1), /*keep=*/false);
    }
    case CutKind::kErrorBudget: {
      selector.RankByMass<true>();
      const RankCut floor = selector.CutByShare(row->floor);
      if (HasTolerance(*row)) return selector.MarkFloor(floor);
      return selector.Assign(floor, kTakeAll, /*keep=*/false);
    }
  }
}

// One block weighs the errors of one unit with a tolerance, and chooses.
template <int kValueDim>
__global__ void __launch_bounds__(kSelectThreads)
    MeasureKernel(const __grid_constant__ StepHeader step) {
  __shared__ UnitMemory memory;
  const RowRef* row = RowOfUnit(step, blockIdx.x);
  if (!HasTolerance(*row)) return;
  const UnitPlace unit(step, row, blockIdx.x - row->first_unit);
  UnitSelector selector(step, unit, &memory);
  selector.LoadScales();
  selector.MeasureOutputs<kValueDim>();
  selector.RankByError();
  selector.Assign(selector.CutByError(row->tolerance), kTakeAll, /*keep=*/true);
}

}  // namespace

// ---- launchers ----

cudaError_t ProbeKernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, SelectKernel);
}

cudaError_t LaunchSelect(const StepHeader& step, cudaStream_t stream) {
  SelectKernel<<<step.units, kSelectThreads, 0, stream>>>(step);
  return cudaPeekAtLastError();
}

cudaError_t LaunchMeasure(const StepHeader& step, uint32_t value_dim, cudaStream_t stream) {
  switch (value_dim) {
    case 64:
      MeasureKernel<64><<<step.units, kSelectThreads, 0, stream>>>(step);
      break;
    case 128:
      MeasureKernel<128><<<step.units, kSelectThreads, 0, stream>>>(step);
      break;
    case 256:
      MeasureKernel<256><<<step.units, kSelectThreads, 0, stream>>>(step);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaPeekAtLastError();
}

}  // namespace attnd::gpu
