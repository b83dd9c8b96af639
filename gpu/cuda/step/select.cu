// SPDX-License-Identifier: Apache-2.0
//
// The select and the measure stage: which of a unit's clusters are read exactly. One thread block
// works on one unit, as its cut needs all of the unit's scores.
#include <cstdint>

#include "gpu/cuda/launch.h"
#include "gpu/cuda/step/chosen_pieces.cuh"
#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/cuda/step/unit_selector.cuh"

namespace attnd::gpu {
namespace {

constexpr uint32_t kSelectThreads = ThreadBlock::kBlockThreads;

struct BlockMemory {
  UnitMemory<ThreadBlock> unit;
  uint32_t undecided[kUndecidedMax];
};

// Slots by the chunks that prepare has resolved.
class ChunkLookup {
 public:
  __device__ ChunkLookup(const StepHeader& step, const UnitPlace& unit)
      : count_(unit.row->slots / kSlotChunk),
        chunks_(step.chunks + unit.row->first_score_item + unit.in_row * count_) {}

  __device__ __forceinline__ SlotPlace Of(uint32_t slot) const {
    const ChunkRef& chunk = chunks_[slot / kSlotChunk];
    return {chunk.head,
            chunk.offsets.starts,
            chunk.offsets.spread,
            chunk.segment,
            chunk.first + slot % kSlotChunk,
            chunk.clusters};
  }
  // Of the unit; every thread calls it.
  __device__ uint32_t CountClusters(SelectMemory<ThreadBlock>* memory) const {
    uint32_t clusters = 0;
    for (uint32_t i = threadIdx.x; i < count_; i += kSelectThreads) {
      const uint32_t first = chunks_[i].first, all = chunks_[i].clusters;
      clusters += min(max(all, first) - first, kSlotChunk);
    }
    clusters = CoopSums<ThreadBlock>(memory).Count(clusters);
    __syncthreads();  // the next sums use the same memory
    return clusters;
  }

 private:
  const uint32_t count_;
  const ChunkRef* const chunks_;
};

using BlockSelector = UnitSelector<ThreadBlock, ChunkLookup>;

// The scales of weights, from the score items' totals.
__device__ void ReduceTotals(const StepHeader& step, const UnitPlace& unit,
                             UnitMemory<ThreadBlock>* memory) {
  const RowRef& row = *unit.row;
  const uint32_t lane = threadIdx.x / 32, thread = threadIdx.x % 32;
  const uint32_t chunks = row.slots / kSlotChunk;
  const uint64_t stride = uint64_t{step.tiles_max} * kLanes * 4;  // tile * kLanes + lane is lane
  const float* partials = step.score_partials +
                          (uint64_t{row.first_score_item} + unit.in_row * chunks) * stride +
                          lane * 4;
  if (lane < step.group) {
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
      if (thread == 0) memory->max[kind][lane] = greatest, memory->sum[kind][lane] = total;
    }
  }
  __syncthreads();
}

__device__ void StoreScales(const StepHeader& step, uint32_t unit,
                            const UnitMemory<ThreadBlock>& memory) {
  for (uint32_t i = threadIdx.x; i < step.tiles_max * kLanes; i += kSelectThreads) {
    LaneScale scale = {};
    scale.max = i < step.group ? memory.max[0][i] : -INFINITY;
    scale.sum = i < step.group ? memory.sum[0][i] : 0.0f;
    step.lane_scales[uint64_t{unit} * step.tiles_max * kLanes + i] = scale;
  }
}

// What StoreScales left.
__device__ void LoadScales(const StepHeader& step, uint32_t unit, UnitMemory<ThreadBlock>* memory) {
  if (threadIdx.x < step.group) {
    const LaneScale scale =
        step.lane_scales[uint64_t{unit} * step.tiles_max * kLanes + threadIdx.x];
    memory->max[0][threadIdx.x] = scale.max;
    memory->sum[0][threadIdx.x] = scale.sum;
  }
  __syncthreads();
}

// ---- kernels ----

// One thread block selects one unit's clusters; of units with a tolerance it marks only the floor.
__global__ void __launch_bounds__(kSelectThreads)
    SelectKernel(const __grid_constant__ StepHeader step) {
  __shared__ BlockMemory memory;
  const RowRef* row = RowOfUnit(step, blockIdx.x);
  if (row->kind != UnitKind::kClusters || row->coop_blocks != 0) return;
  const UnitPlace unit(step, row, blockIdx.x - row->first_unit);
  const ChunkLookup lookup(step, unit);
  const uint32_t clusters = lookup.CountClusters(&memory.unit.select);
  ReduceTotals(step, unit, &memory.unit);
  StoreScales(step, unit.unit, memory.unit);
  BlockSelector selector(step, unit, lookup, clusters, &memory.unit, memory.undecided);
  if (HasTolerance(*row)) {
    selector.RankByMass(/*optimistic=*/true);
    return selector.MarkFloor(selector.CutAt(/*exact=*/true));
  }
  const UnitResult result = selector.Select();
  if (threadIdx.x < 32) ReportChoice(step, unit, result);
}

// One thread block weighs the errors of one unit with a tolerance, and chooses its clusters.
template <int kValueDim>
__global__ void __launch_bounds__(kSelectThreads)
    MeasureKernel(const __grid_constant__ StepHeader step) {
  __shared__ BlockMemory memory;
  const RowRef* row = RowOfUnit(step, blockIdx.x);
  if (!HasTolerance(*row)) return;
  const UnitPlace unit(step, row, blockIdx.x - row->first_unit);
  const ChunkLookup lookup(step, unit);
  const uint32_t clusters = lookup.CountClusters(&memory.unit.select);
  LoadScales(step, unit.unit, &memory.unit);
  BlockSelector selector(step, unit, lookup, clusters, &memory.unit, memory.undecided);
  selector.MeasureOutputs<kValueDim>();
  selector.RankByError();
  const RankCut cut = selector.CutByError(row->tolerance);
  const UnitResult result = selector.Assign(cut, kTakeAll, /*keep=*/true);
  if (threadIdx.x < 32) ReportChoice(step, unit, result);
}

}  // namespace

// ---- launchers ----

cudaError_t ProbeKernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, SelectKernel);
}

cudaError_t LaunchSelect(const StepHeader& step, cudaStream_t stream) {
  return Launch(SelectKernel, step.units, kSelectThreads, 0, stream, step);
}

cudaError_t LaunchMeasure(const StepHeader& step, uint32_t value_dim, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  DispatchListedShape([&](const KernelShape& listed) { return listed.value_dim == value_dim; },
                      [&]<typename Shape>(Shape) {
                        error = Launch(MeasureKernel<int{Shape::kValueDim}>, step.units,
                                       kSelectThreads, 0, stream, step);
                      });
  return error;
}

}  // namespace attnd::gpu
