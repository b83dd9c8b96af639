// SPDX-License-Identifier: Apache-2.0
//
// The select and the measure stage: what of a unit's clusters is read exactly.
#include <cstdint>

#include "gpu/cuda/attend.cuh"
#include "gpu/cuda/matrix.cuh"
#include "gpu/cuda/merge.cuh"
#include "gpu/cuda/place.cuh"
#include "gpu/cuda/score.cuh"
#include "gpu/cuda/select.cuh"
#include "gpu/cuda/step_kernels.h"

namespace attnd::gpu {
namespace {

constexpr uint32_t kGroupLanes = 32;        // room for a group's heads
constexpr uint32_t kSharedSlots = 16384;    // keys of so many slots fit shared memory
constexpr double kShareRounding = 1e-9;     // 0.07 * 100 is a little above 7
constexpr float kErrorMax = 1e14f;          // of a cluster; a sum of squares over all stays a float

// Segments whose places are kept in shared memory; those beyond are looked up each time.
constexpr uint32_t kTableSegments = 256;

// What selection needs of a segment, for the unit's KV head.
struct SegmentPlace {
  const uint32_t* starts;
  const float* spread;
  uint32_t first_slot;
  uint32_t end_slot;
  uint32_t clusters;
};

struct UnitMemory {
  SelectMemory select;
  SegmentPlace segments[kTableSegments];
  float max[2][kGroupLanes];  // of the mass, of the optimistic mass
  float sum[2][kGroupLanes];
  float unit[kGroupLanes];    // error of a weight of 1 and a spread of 1, relative to the output
  uint32_t first_item;
};

// ceil(share * n), at least one and at most n.
__device__ __forceinline__ uint32_t ShareOf(double share, uint32_t n) {
  const double count = ceil(share * n * (1 - kShareRounding));
  return static_cast<uint32_t>(fmin(fmax(count, 0.0), static_cast<double>(n)));
}

// One block's work on one unit.
class UnitSelector {
 public:
  __device__ UnitSelector(const StepHeader& step, const UnitPlace& unit, UnitMemory* memory,
                          uint32_t* shared_keys)
      : step_(step),
        unit_(unit),
        row_(*unit.row),
        memory_(memory),
        sums_(&memory->select),
        scores_(UnitScores(step, unit)),
        d2_(scores_ + uint64_t{step.group} * row_.slots),
        fates_(UnitFates(step, unit)) {
    uint32_t* own = reinterpret_cast<uint32_t*>(scores_ + UnitScoreFloats(step, row_) - row_.slots);
    keys_ = row_.slots <= kSharedSlots ? shared_keys : own;
  }

  // Fills the table of segments, and the scales of the weights from the score items' totals.
  __device__ void Start() {
    uint32_t clusters = 0;
    for (uint32_t s = threadIdx.x; s < row_.segment_count; s += kSelectThreads) {
      const SegmentPlace place = Lookup(s);
      clusters += place.clusters;
      if (s < kTableSegments) memory_->segments[s] = place;
    }
    clusters_ = sums_.Count(clusters);
  }

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
    return CutByCount(RankedKeys(keys_, row_.slots), count, &sums_, &memory_->select);
  }
  __device__ RankCut CutByMass(double p) {
    if (p >= 1) return kTakeAll;
    const auto weight = [](uint32_t key) {
      return __float2ull_rn(ScoreOf(key) * static_cast<float>(kOne));
    };
    const auto limit = static_cast<Weight64>(ceil(p * static_cast<double>(kOne)));
    return CutByWeight<true>(RankedKeys(keys_, row_.slots), limit, weight, &sums_,
                             &memory_->select);
  }
  // Above it lies what must be read for the rest's squared errors to stay within tolerance^2.
  __device__ RankCut CutByError(double tolerance) {
    const auto per_budget = static_cast<float>(1 / (tolerance * tolerance));
    const auto weight = [per_budget](uint32_t key) {
      return __float2ull_rn(fminf(ScoreOf(key) * per_budget, 2.0f) * static_cast<float>(kOne));
    };
    return CutByWeight<false>(RankedKeys(keys_, row_.slots), kOne, weight, &sums_,
                             &memory_->select);
  }

  // Marks the floor, before errors are known.
  __device__ void MarkFloor(RankCut floor);
  // Fates from the cuts, the exact clusters' tokens in order, and the finish stage's items.
  // keep: clusters that are exact already stay so.
  __device__ void Assign(RankCut exact, RankCut kept, bool keep);
  // Fills memory_->unit from the zones' states and the estimate of all clusters; a warp a lane.
  __device__ void MeasureOutputs(uint32_t value_dim);

 private:
  // The slots of one thread: neighbours, so that one scan over threads is a scan over slots.
  struct Share {
    uint32_t begin, end;
    __device__ explicit Share(uint32_t slots) {
      const uint32_t each = (slots + kSelectThreads - 1) / kSelectThreads;
      begin = min(threadIdx.x * each, slots);
      end = min(begin + each, slots);
    }
  };

  __device__ __forceinline__ SegmentPlace Lookup(uint32_t s) const {
    const IndexPlace index(step_, row_, s, unit_.kv_head);
    const SegmentRef& segment = *index.segment;
    return {index.part<uint32_t>(segment.starts), index.part<float>(segment.spread),
            segment.first_slot, segment.first_slot + segment.slots, index.clusters()};
  }
  __device__ __forceinline__ SegmentPlace Segment(uint32_t s) const {
    return s < kTableSegments ? memory_->segments[s] : Lookup(s);
  }
  __device__ __forceinline__ uint32_t SegmentOf(uint32_t slot) const {
    return LastNotAfter(row_.segment_count, slot, [&](uint32_t s) { return Segment(s).first_slot; });
  }

  // Whether a key is above the cut; *ties: keys equal to it that came before.
  static __device__ __forceinline__ bool Above(uint32_t key, RankCut cut, uint32_t* ties) {
    return key > cut.key || (key == cut.key && (*ties)++ < cut.ties);
  }
  // Of the slots before the thread's: how many equal the first cut (low half), the second (high).
  __device__ Weight64 TiesBefore(const Share& own, RankCut first, RankCut second) {
    Weight64 ties = 0, total;
    for (uint32_t slot = own.begin; slot < own.end; ++slot) {
      ties += (keys_[slot] == first.key ? 1ull : 0) + (keys_[slot] == second.key ? 1ull << 32 : 0);
    }
    return sums_.Scan(ties, &total);
  }
  __device__ void ListTokens(const Share& own, uint32_t next) const;
  __device__ void QueuePieces(const UnitResult& result);

  const StepHeader& step_;
  const UnitPlace& unit_;
  const RowRef& row_;
  UnitMemory* const memory_;
  BlockSums sums_;
  float* const scores_;  // [group][slots] log masses
  float* const d2_;      // [group][slots]
  uint8_t* const fates_;
  uint32_t* keys_;
  uint32_t clusters_ = 0;
};

// A warp for each lane.
__device__ void UnitSelector::ReduceTotals() {
  const uint32_t lane = threadIdx.x / 32, thread = threadIdx.x % 32;
  const uint32_t chunks = row_.slots / kSlotChunk;
  const uint64_t stride = uint64_t{step_.tiles_max} * kLanes * 4;  // tile * kLanes + lane is lane
  const float* partials = step_.score_partials +
                          (uint64_t{row_.first_score_item} + unit_.in_row * chunks) * stride +
                          lane * 4;
  if (lane < step_.group) {
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
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
  constexpr uint32_t kAtOnce = 4;  // slots of a thread, so that their loads are under way together
  for (uint32_t first = 0; first < row_.slots; first += kAtOnce * kSelectThreads) {
    float score[kAtOnce] = {};
    bool cluster[kAtOnce] = {};
#pragma unroll 2
    for (uint32_t lane = 0; lane < step_.group; ++lane) {
      const float max = memory_->max[kKind][lane];
      const float share = 1 / (memory_->sum[kKind][lane] * step_.group);
      float x[kAtOnce], d2[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t slot = first + i * kSelectThreads + threadIdx.x;
        const uint64_t at = uint64_t{lane} * row_.slots + slot;
        x[i] = slot < row_.slots ? scores_[at] : -INFINITY;
        d2[i] = kOptimistic && slot < row_.slots ? d2_[at] : 0.0f;
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        cluster[i] |= x[i] != -INFINITY;
        if (kOptimistic) x[i] += kLog2E * (2 * sqrtf(d2[i]) - fminf(d2[i], kVarianceCap) / 2);
        score[i] += Weight(x[i], max) * share;
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t slot = first + i * kSelectThreads + threadIdx.x;
      if (slot < row_.slots) keys_[slot] = cluster[i] ? KeyOf(score[i]) : 0;
    }
  }
  __syncthreads();
}

__device__ void UnitSelector::RankByError() {
  for (uint32_t slot = threadIdx.x; slot < row_.slots; slot += kSelectThreads) {
    const SegmentPlace segment = Segment(SegmentOf(slot));
    const uint32_t cluster = slot - segment.first_slot;
    if (cluster >= segment.clusters) {
      keys_[slot] = 0;
      continue;
    }
    const float spread = segment.spread[cluster];
    float score = 0;
#pragma unroll 4
    for (uint32_t lane = 0; lane < step_.group; ++lane) {
      const uint64_t at = uint64_t{lane} * row_.slots + slot;
      const float weight = Weight(scores_[at], memory_->max[0][lane]);
      const float error = fminf(weight * memory_->unit[lane] * spread, kErrorMax);
      score += error * error * Expm1(fminf(d2_[at], kVarianceCap));
    }
    keys_[slot] = KeyOf(score / step_.group);
  }
  __syncthreads();
}

__device__ void UnitSelector::MarkFloor(RankCut floor) {
  const Share own(row_.slots);
  uint32_t ties = static_cast<uint32_t>(TiesBefore(own, floor, kTakeNone));
  for (uint32_t slot = own.begin; slot < own.end; ++slot) {
    fates_[slot] = Above(keys_[slot], floor, &ties) ? kFateExact : kFateEstimated;
  }
}

__device__ void UnitSelector::Assign(RankCut exact, RankCut kept, bool keep) {
  const Share own(row_.slots);
  const Weight64 before = TiesBefore(own, exact, kept);
  uint32_t exact_ties = static_cast<uint32_t>(before);
  uint32_t kept_ties = static_cast<uint32_t>(before >> 32);
  Weight64 tokens = 0, rest = 0;  // exact; estimated (low half) and dropped (high)
  SegmentPlace segment = {};
  for (uint32_t slot = own.begin; slot < own.end; ++slot) {
    if (slot >= segment.end_slot) segment = Segment(SegmentOf(slot));
    const uint32_t key = keys_[slot];
    uint8_t fate = kFateDropped;
    if (key != 0) {
      const uint32_t cluster = slot - segment.first_slot;
      const uint32_t size = segment.starts[cluster + 1] - segment.starts[cluster];
      const bool above = Above(key, exact, &exact_ties);
      const bool within = Above(key, kept, &kept_ties);
      if (above || (keep && fates_[slot] == kFateExact)) {
        fate = kFateExact;
        tokens += size;
      } else {
        fate = within ? kFateEstimated : kFateDropped;
        rest += within ? size : static_cast<Weight64>(size) << 32;
      }
    }
    fates_[slot] = fate;
  }
  Weight64 total;
  const auto next = static_cast<uint32_t>(sums_.Scan(tokens, &total));
  rest = sums_.Sum(rest);
  if (tokens > 0) ListTokens(own, next);

  UnitResult result;
  result.clusters = clusters_;
  result.chosen_tokens = static_cast<uint32_t>(total);
  const uint32_t even = (result.chosen_tokens + kChosenPiecesMax - 1) / kChosenPiecesMax;
  result.chosen_piece_tokens =
      max(kChosenPieceTokens, (even + kPageRows - 1) / kPageRows * kPageRows);
  result.chosen_pieces =
      (result.chosen_tokens + result.chosen_piece_tokens - 1) / result.chosen_piece_tokens;
  result.estimated_tokens = rest & 0xFFFFFFFFu;
  result.dropped_tokens = rest >> 32;
  if (threadIdx.x == 0) step_.unit_results[unit_.unit] = result;
  QueuePieces(result);
}

// The tokens of the thread's exact clusters, from place `next` of the unit's list on.
__device__ void UnitSelector::ListTokens(const Share& own, uint32_t next) const {
  uint32_t* chosen = UnitChosen(step_, unit_);
  SegmentPlace segment = {};
  uint32_t s = 0;
  for (uint32_t slot = own.begin; slot < own.end; ++slot) {
    if (fates_[slot] != kFateExact) continue;
    if (slot >= segment.end_slot) segment = Segment(s = SegmentOf(slot));
    const uint32_t cluster = slot - segment.first_slot;
    const uint32_t end = segment.starts[cluster + 1];
    for (uint32_t token = segment.starts[cluster]; token < end; ++token) {
      chosen[next++] = s << 16 | token;
    }
  }
}

__device__ void UnitSelector::QueuePieces(const UnitResult& result) {
  const uint32_t of_tile = result.chosen_pieces + row_.estimate_pieces;
  const uint32_t count = of_tile * step_.tiles_max;
  if (threadIdx.x == 0) memory_->first_item = atomicAdd(&step_.cursors[kQueuedPieces], count);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < count; i += kSelectThreads) {
    FinishItem item;
    item.unit = unit_.unit;
    item.tile = i / of_tile;
    item.piece = i % of_tile;
    item.estimate = item.piece >= result.chosen_pieces ? 1 : 0;
    if (item.estimate != 0) item.piece -= result.chosen_pieces;
    step_.finish_items[memory_->first_item + i] = item;
  }
}

__device__ void UnitSelector::MeasureOutputs(uint32_t value_dim) {
  const uint32_t lane = threadIdx.x / 32, thread = threadIdx.x % 32;
  if (lane < step_.group) {
    const uint32_t floats = StateFloats(value_dim);
    const float* states = TileStates(step_, unit_, lane / kLanes, floats) +
                          lane % kLanes * (kStateHead + value_dim);
    const uint32_t zones = row_.read_pieces, end = zones + row_.estimate_pieces;
    float max = memory_->max[0][lane];
    for (uint32_t i = 0; i < zones; ++i) {
      const float* state = states + uint64_t{i} * floats;
      if (state[1] > 0) max = fmaxf(max, state[0]);
    }
    float zone_sum = 0, sum = 0, moments = 0;
    for (uint32_t i = 0; i < end; ++i) {
      const float* state = states + uint64_t{i} * floats;
      const float factor = state[1] > 0 ? Exp2(state[0] - max) : 0.0f;
      sum += factor * state[1];
      if (i < zones) zone_sum += factor * state[1];
      if (i >= zones) moments += factor * state[3];
    }
    float norm2 = 0, zone_norm2 = 0;
    for (uint32_t channel = thread; channel < value_dim; channel += 32) {
      float value = 0, zone = 0;
#pragma unroll 4
      for (uint32_t i = 0; i < end; ++i) {
        const float* state = states + uint64_t{i} * floats;
        const float factor = state[1] > 0 ? Exp2(state[0] - max) : 0.0f;
        value += factor * state[kStateHead + channel];
        if (i < zones) zone = value;
      }
      norm2 += value * value;
      zone_norm2 += zone * zone;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      norm2 += __shfl_xor_sync(~0u, norm2, offset);
      zone_norm2 += __shfl_xor_sync(~0u, zone_norm2, offset);
    }
    const float least = LeastNorm(zone_sum, zone_norm2, moments, sum - zone_sum);
    const float norm = fmaxf(sqrtf(norm2) / sum, least);
    if (thread == 0) {
      memory_->unit[lane] = Weight(memory_->max[0][lane], max) / sum / norm;
    }
  }
  __syncthreads();
}

// ---- kernels ----

__device__ __forceinline__ bool HasTolerance(const RowRef& row) {
  return row.cut == CutKind::kErrorBudget && !isinf(row.tolerance);
}

// One block selects one unit's clusters; of units with a tolerance it marks only the floor.
__global__ void __launch_bounds__(kSelectThreads)
    SelectKernel(const __grid_constant__ StepHeader step) {
  extern __shared__ uint32_t shared_keys[];
  __shared__ UnitMemory memory;
  const RowRef* row = RowOfUnit(step, blockIdx.x);
  if (row->kind != UnitKind::kClusters) return;
  const UnitPlace unit(step, row, blockIdx.x - row->first_unit);
  UnitSelector selector(step, unit, &memory, shared_keys);
  selector.Start();
  selector.ReduceTotals();
  selector.StoreScales();
  switch (row->cut) {
    case CutKind::kTopK:
      selector.RankByMass<false>();
      return selector.Assign(selector.CutByShare(row->exact_share),
                             selector.CutByShare(row->exact_share, row->estimated_share), false);
    case CutKind::kTopP:
      selector.RankByMass<false>();
      return selector.Assign(selector.CutByMass(row->p2), selector.CutByMass(row->p1), false);
    case CutKind::kErrorBudget:
      selector.RankByMass<true>();
      const RankCut floor = selector.CutByShare(row->floor);
      if (HasTolerance(*row)) return selector.MarkFloor(floor);
      return selector.Assign(floor, kTakeAll, false);
  }
}

// One block weighs the errors of one unit with a tolerance, and chooses.
__global__ void __launch_bounds__(kSelectThreads)
    MeasureKernel(const __grid_constant__ StepHeader step, uint32_t value_dim) {
  extern __shared__ uint32_t shared_keys[];
  __shared__ UnitMemory memory;
  const RowRef* row = RowOfUnit(step, blockIdx.x);
  if (row->kind != UnitKind::kClusters || !HasTolerance(*row)) return;
  const UnitPlace unit(step, row, blockIdx.x - row->first_unit);
  UnitSelector selector(step, unit, &memory, shared_keys);
  selector.Start();
  selector.LoadScales();
  selector.MeasureOutputs(value_dim);
  selector.RankByError();
  selector.Assign(selector.CutByError(row->tolerance), kTakeAll, /*keep=*/true);
}

}  // namespace

// ---- launchers ----

cudaError_t LaunchSelect(const StepHeader& step, cudaStream_t stream) {
  constexpr size_t kShared = kSharedSlots * sizeof(uint32_t);
  cudaFuncSetAttribute(SelectKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  SelectKernel<<<step.units, kSelectThreads, kShared, stream>>>(step);
  return cudaPeekAtLastError();
}

cudaError_t LaunchMeasure(const StepHeader& step, uint32_t value_dim, cudaStream_t stream) {
  constexpr size_t kShared = kSharedSlots * sizeof(uint32_t);
  cudaFuncSetAttribute(MeasureKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  MeasureKernel<<<step.units, kSelectThreads, kShared, stream>>>(step, value_dim);
  return cudaPeekAtLastError();
}

}  // namespace attnd::gpu
