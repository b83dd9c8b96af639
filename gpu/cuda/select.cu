// SPDX-License-Identifier: Apache-2.0
//
// The select and the measure stage: what of a unit's clusters is read exactly.
#include <cstdint>

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

struct UnitMemory {
  SelectMemory select;
  float max[2][kGroupLanes];  // of the mass, of the optimistic mass
  float sum[2][kGroupLanes];
  float unit[kGroupLanes];    // error of a weight of 1 and a spread of 1, relative to the output
  uint32_t clusters;
};

// ceil(share * n), at least one and at most n.
__device__ __forceinline__ unsigned long long ShareOf(double share, uint32_t n) {
  const double count = ceil(share * n * (1 - kShareRounding));
  return static_cast<unsigned long long>(fmin(fmax(count, 0.0), static_cast<double>(n)));
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
        scores_(UnitScores(step, unit)),
        d2_(scores_ + uint64_t{step.group} * row_.slots),
        fates_(UnitFates(step, unit)) {
    uint32_t* own = reinterpret_cast<uint32_t*>(scores_ + UnitScoreFloats(step, row_) - row_.slots);
    keys_ = row_.slots <= kSharedSlots ? shared_keys : own;
  }

  // Scales of the weights, from the score items' totals; a warp for each lane.
  __device__ void ReduceTotals() {
    const uint32_t lane = threadIdx.x / 32, thread = threadIdx.x % 32;
    const uint32_t chunks = row_.slots / kSlotChunk;
    const float* partials =
        step_.score_partials + (uint64_t{row_.first_score_item} + unit_.in_row * chunks) *
                                   step_.tiles_max * (kLanes * 4);
    if (lane < step_.group) {
      const float* own = partials + lane * 4;  // tile * kLanes + lane in tile is lane
      const uint64_t stride = uint64_t{step_.tiles_max} * kLanes * 4;
      for (uint32_t kind = 0; kind < 2; ++kind) {
        float max = -INFINITY, sum = 0;
        for (uint32_t i = thread; i < chunks; i += 32) {
          const float2 part = *reinterpret_cast<const float2*>(own + i * stride + kind * 2);
          const float greater = fmaxf(max, part.x);
          sum = sum * Weight(max, greater) + part.y * Weight(part.x, greater);
          max = greater;
        }
        for (int offset = 16; offset > 0; offset /= 2) {
          const float other_max = __shfl_xor_sync(~0u, max, offset);
          const float other_sum = __shfl_xor_sync(~0u, sum, offset);
          const float greater = fmaxf(max, other_max);
          // The same order in both threads, so that all have the same bits.
          const float low = thread & offset ? other_sum * Weight(other_max, greater)
                                            : sum * Weight(max, greater);
          const float high = thread & offset ? sum * Weight(max, greater)
                                             : other_sum * Weight(other_max, greater);
          sum = low + high;
          max = greater;
        }
        if (thread == 0) memory_->max[kind][lane] = max, memory_->sum[kind][lane] = sum;
      }
    }
    CountClusters();
  }

  __device__ uint32_t clusters() const { return memory_->clusters; }

  // Keys by the group's mean share of the mass, or of the optimistic mass.
  __device__ void RankByMass(bool optimistic) {
    const uint32_t kind = optimistic ? 1 : 0;
    for (uint32_t slot = threadIdx.x; slot < row_.slots; slot += kSelectThreads) {
      float score = 0;
      bool cluster = false;
      for (uint32_t lane = 0; lane < step_.group; ++lane) {
        float x = scores_[uint64_t{lane} * row_.slots + slot];
        cluster |= x != -INFINITY;
        if (optimistic) {
          const float d2 = d2_[uint64_t{lane} * row_.slots + slot];
          x += kLog2E * (2 * sqrtf(d2) - fminf(d2, kVarianceCap) / 2);
        }
        score += Weight(x, memory_->max[kind][lane]) / memory_->sum[kind][lane];
      }
      keys_[slot] = cluster ? KeyOf(score / step_.group) : 0;
    }
    __syncthreads();
  }

  // Keys by the group's mean squared error; see docs/POLICIES.md, "error-target".
  __device__ void RankByError() {
    for (uint32_t first = 0; first < row_.slots; first += kSlotChunk) {
      // One segment at a time, as a chunk lies in one.
      const uint32_t slot = first + threadIdx.x % kSlotChunk;
      if (threadIdx.x / kSlotChunk != first / kSlotChunk % (kSelectThreads / kSlotChunk)) continue;
      const uint32_t s = SegmentOfSlot(step_, row_, slot);
      const IndexPlace index(step_, row_, s, unit_.kv_head);
      const uint32_t cluster = slot - index.segment->first_slot;
      if (cluster >= index.clusters()) {
        keys_[slot] = 0;
        continue;
      }
      const float spread = index.part<float>(index.segment->spread)[cluster];
      float score = 0;
      for (uint32_t lane = 0; lane < step_.group; ++lane) {
        const float weight =
            Weight(scores_[uint64_t{lane} * row_.slots + slot], memory_->max[0][lane]);
        const float error = fminf(weight * memory_->unit[lane] * spread, kErrorMax);
        const float d2 = d2_[uint64_t{lane} * row_.slots + slot];
        score += error * error * expm1f(fminf(d2, kVarianceCap));
      }
      keys_[slot] = KeyOf(score / step_.group);
    }
    __syncthreads();
  }

  __device__ RankCut CutByCount(unsigned long long count) {
    if (count == 0) return kTakeNone;
    return FindCut<true>(
        keys_, row_.slots, count, [](uint32_t) { return 1ull; }, &memory_->select);
  }
  __device__ RankCut CutByMass(double p) {
    if (p >= 1) return kTakeAll;
    const auto weight = [](uint32_t key) {
      return __float2ull_rn(ScoreOf(key) * static_cast<float>(kOne));
    };
    const auto limit = static_cast<unsigned long long>(ceil(p * static_cast<double>(kOne)));
    return FindCut<true>(keys_, row_.slots, limit, weight, &memory_->select);
  }
  // Above it lies what must be read for the rest's squared errors to stay within tolerance^2.
  __device__ RankCut CutByError(double tolerance) {
    const double budget = tolerance * tolerance;
    const auto weight = [budget](uint32_t key) {
      return static_cast<unsigned long long>(
          fmin(static_cast<double>(ScoreOf(key)) / budget, 2.0) * static_cast<double>(kOne));
    };
    return FindCut<false>(keys_, row_.slots, kOne, weight, &memory_->select);
  }

  // Fates from the cuts, the exact clusters' tokens in order, and the finish stage's items.
  // keep: clusters that are exact already stay so.
  __device__ void Assign(RankCut exact, RankCut kept, bool keep);

  // Marks the floor, before errors are known.
  __device__ void MarkFloor() {
    const RankCut floor = CutByCount(ShareOf(row_.floor, clusters()));
    const Share own(row_.slots);
    const unsigned long long before = TiesBefore(own, floor, kTakeAll);
    uint32_t ties = static_cast<uint32_t>(before);
    for (uint32_t slot = own.begin; slot < own.end; ++slot) {
      fates_[slot] = Above(keys_[slot], floor, &ties) ? kFateExact : kFateEstimated;
    }
  }

  __device__ void StoreScales() {
    for (uint32_t i = threadIdx.x; i < step_.tiles_max * kLanes; i += kSelectThreads) {
      LaneScale scale = {};
      scale.max = i < step_.group ? memory_->max[0][i] : -INFINITY;
      scale.sum = i < step_.group ? memory_->sum[0][i] : 0.0f;
      step_.lane_scales[uint64_t{unit_.unit} * step_.tiles_max * kLanes + i] = scale;
    }
  }
  __device__ void LoadScales() {
    if (threadIdx.x < step_.group) {
      const LaneScale scale =
          step_.lane_scales[uint64_t{unit_.unit} * step_.tiles_max * kLanes + threadIdx.x];
      memory_->max[0][threadIdx.x] = scale.max;
      memory_->sum[0][threadIdx.x] = scale.sum;
    }
    CountClusters();
  }

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

  // Whether a key is above the cut; *ties: keys equal to it that came before.
  static __device__ __forceinline__ bool Above(uint32_t key, RankCut cut, uint32_t* ties) {
    return key > cut.key || (key == cut.key && (*ties)++ < cut.ties);
  }

  // Of the slots before the thread's: how many equal the first cut (low half), the second (high).
  __device__ unsigned long long TiesBefore(const Share& own, RankCut first, RankCut second) {
    unsigned long long ties = 0;
    for (uint32_t slot = own.begin; slot < own.end; ++slot) {
      ties += (keys_[slot] == first.key ? 1ull : 0) + (keys_[slot] == second.key ? 1ull << 32 : 0);
    }
    unsigned long long total;
    return BlockScan(ties, &memory_->select, &total);
  }

  __device__ void CountClusters() {
    uint32_t count = 0;
    for (uint32_t s = threadIdx.x; s < row_.segment_count; s += kSelectThreads) {
      count += IndexPlace(step_, row_, s, unit_.kv_head).clusters();
    }
    unsigned long long total;
    BlockScan(count, &memory_->select, &total);
    memory_->clusters = static_cast<uint32_t>(total);  // the same from every thread
    __syncthreads();
  }

  __device__ void QueuePieces(const UnitResult& result);

  const StepHeader& step_;
  const UnitPlace& unit_;
  const RowRef& row_;
  UnitMemory* const memory_;
  float* const scores_;  // [group][slots] log masses
  float* const d2_;      // [group][slots]
  uint8_t* const fates_;
  uint32_t* keys_;
};

__device__ void UnitSelector::Assign(RankCut exact, RankCut kept, bool keep) {
  const Share own(row_.slots);
  const unsigned long long before = TiesBefore(own, exact, kept);
  uint32_t exact_ties = static_cast<uint32_t>(before);
  uint32_t kept_ties = static_cast<uint32_t>(before >> 32);
  const uint32_t first_segment = own.begin < own.end ? SegmentOfSlot(step_, row_, own.begin) : 0;
  const SegmentRef* segments = step_.segments + row_.segments_begin;

  const auto size_of = [&](const IndexPlace& index, uint32_t cluster) {
    const uint32_t* starts = index.part<uint32_t>(index.segment->starts);
    return starts[cluster + 1] - starts[cluster];
  };
  unsigned long long tokens = 0, rest = 0;  // exact; estimated (low half) and dropped (high)
  uint32_t s = first_segment;
  for (uint32_t slot = own.begin; slot < own.end; ++slot) {
    while (slot >= segments[s].first_slot + segments[s].slots) ++s;
    const uint32_t key = keys_[slot];
    if (key == 0) {
      fates_[slot] = kFateDropped;
      continue;
    }
    const IndexPlace index(step_, row_, s, unit_.kv_head);
    const uint32_t size = size_of(index, slot - segments[s].first_slot);
    const bool was_exact = keep && fates_[slot] == kFateExact;
    const bool above = Above(key, exact, &exact_ties);
    const bool within = Above(key, kept, &kept_ties);
    if (above || was_exact) {
      fates_[slot] = kFateExact;
      tokens += size;
    } else if (within) {
      fates_[slot] = kFateEstimated;
      rest += size;
    } else {
      fates_[slot] = kFateDropped;
      rest += static_cast<unsigned long long>(size) << 32;
    }
  }
  unsigned long long total, total_rest;
  uint32_t next = static_cast<uint32_t>(BlockScan(tokens, &memory_->select, &total));
  BlockScan(rest, &memory_->select, &total_rest);

  uint32_t* chosen = UnitChosen(step_, unit_);
  s = first_segment;
  for (uint32_t slot = own.begin; slot < own.end && tokens > 0; ++slot) {
    while (slot >= segments[s].first_slot + segments[s].slots) ++s;
    if (fates_[slot] != kFateExact) continue;
    const IndexPlace index(step_, row_, s, unit_.kv_head);
    const uint32_t cluster = slot - segments[s].first_slot;
    const uint32_t* starts = index.part<uint32_t>(index.segment->starts);
    const uint32_t end = starts[cluster + 1];
    for (uint32_t token = starts[cluster]; token < end; ++token) chosen[next++] = s << 16 | token;
  }

  UnitResult result;
  result.clusters = clusters();
  result.chosen_tokens = static_cast<uint32_t>(total);
  const uint32_t even = (result.chosen_tokens + kChosenPiecesMax - 1) / kChosenPiecesMax;
  result.chosen_piece_tokens =
      max(kChosenPieceTokens, (even + kPageRows - 1) / kPageRows * kPageRows);
  result.chosen_pieces =
      (result.chosen_tokens + result.chosen_piece_tokens - 1) / result.chosen_piece_tokens;
  result.estimated_tokens = total_rest & 0xFFFFFFFFu;
  result.dropped_tokens = total_rest >> 32;
  if (threadIdx.x == 0) step_.unit_results[unit_.unit] = result;
  QueuePieces(result);
}

__device__ void UnitSelector::QueuePieces(const UnitResult& result) {
  const uint32_t of_tile = result.chosen_pieces + row_.estimate_pieces;
  const uint32_t count = of_tile * step_.tiles_max;
  __syncthreads();
  if (threadIdx.x == 0) memory_->select.digit = atomicAdd(&step_.finish_count[1], count);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < count; i += kSelectThreads) {
    FinishItem item;
    item.unit = unit_.unit;
    item.tile = i / of_tile;
    item.piece = i % of_tile;
    item.estimate = item.piece >= result.chosen_pieces ? 1 : 0;
    if (item.estimate != 0) item.piece -= result.chosen_pieces;
    step_.finish_items[memory_->select.digit + i] = item;
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
  selector.ReduceTotals();
  selector.StoreScales();
  selector.RankByMass(/*optimistic=*/row->cut == CutKind::kErrorBudget);
  const uint32_t clusters = selector.clusters();
  if (HasTolerance(*row)) return selector.MarkFloor();
  RankCut exact, kept = kTakeAll;
  if (row->cut == CutKind::kTopK) {
    const unsigned long long count = ShareOf(row->exact_share, clusters);
    exact = selector.CutByCount(count);
    kept = selector.CutByCount(
        min(count + ShareOf(row->estimated_share, clusters), (unsigned long long)clusters));
  } else if (row->cut == CutKind::kTopP) {
    exact = selector.CutByMass(row->p2);
    kept = selector.CutByMass(row->p1);
  } else {
    exact = selector.CutByCount(ShareOf(row->floor, clusters));
  }
  selector.Assign(exact, kept, /*keep=*/false);
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
