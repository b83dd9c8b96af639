// SPDX-License-Identifier: Apache-2.0
//
// The kernels of one shape, and their launchers.
#ifndef ATTND_GPU_CUDA_STEP_INSTANCE_CUH_
#define ATTND_GPU_CUDA_STEP_INSTANCE_CUH_

#include <algorithm>
#include <cstdint>

#include "gpu/cuda/attend.cuh"
#include "gpu/cuda/merge.cuh"
#include "gpu/cuda/place.cuh"
#include "gpu/cuda/prepare.cuh"
#include "gpu/cuda/score.cuh"
#include "gpu/cuda/step_kernels.h"

namespace attnd::gpu {

static_assert(kAttendWarps == kScoreWarps, "read and score items share blocks");

// Blocks that a multiprocessor should hold: as registers allow, which is what hides memory's latency.
template <int kKeyDim, int kValueDim>
inline constexpr int kBlocksOfShape = kKeyDim + kValueDim <= 128   ? 4
                                      : kKeyDim + kValueDim <= 256 ? 3
                                                                   : 2;

// ---- kernels ----

// Exact pieces first, as they are the longest items, then scores.
template <typename T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kAttendWarps * 32, (kBlocksOfShape<kKeyDim, kValueDim>))
    ReadKernel(const __grid_constant__ StepHeader step) {
  __shared__ __align__(16) union Memory {
    MergeMemory<kValueDim> merge;
    ScoreMemory score;
  } memory;
  for (uint32_t item = blockIdx.x; item < step.read_items + step.score_items; item += gridDim.x) {
    if (item < step.read_items) {
      const RowRef* row = step.row_refs + LastNotAfter(step.rows, item, [&](uint32_t i) {
                            return step.row_refs[i].first_read_item;
                          });
      const uint32_t number = item - row->first_read_item;
      const uint32_t tile = number / row->read_pieces;
      const UnitPlace unit(step, row, tile / step.tiles_max);
      ReadPiece<T, kKeyDim, kValueDim>(step, unit, tile % step.tiles_max,
                                       number % row->read_pieces, &memory.merge);
    } else {
      const uint32_t score = item - step.read_items;
      const RowRef* row = step.row_refs + LastNotAfter(step.rows, score, [&](uint32_t i) {
                            return step.row_refs[i].first_score_item;
                          });
      ScoreItem<T, kKeyDim>(step, row, score - row->first_score_item, &memory.score);
    }
  }
}

template <typename T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kAttendWarps * 32, (kBlocksOfShape<kKeyDim, kValueDim>))
    FinishKernel(const __grid_constant__ StepHeader step) {
  __shared__ __align__(16) MergeMemory<kValueDim> memory;
  const uint32_t items = step.finish_count[1];
  for (uint32_t i = blockIdx.x; i < items; i += gridDim.x) {
    const FinishItem item = step.finish_items[i];
    const RowRef* row = RowOfUnit(step, item.unit);
    const UnitPlace unit(step, row, item.unit - row->first_unit);
    if (item.estimate != 0) {
      EstimatePiece<T, kValueDim>(step, unit, item.tile, item.piece, /*all=*/false, &memory);
    } else {
      ChosenPiece<T, kKeyDim, kValueDim>(step, unit, item.tile, item.piece, &memory);
    }
  }
}

// Block (tile, piece).
template <typename T, int kValueDim>
__global__ void __launch_bounds__(kAttendWarps * 32)
    EstimateAllKernel(const __grid_constant__ StepHeader step) {
  __shared__ __align__(16) MergeMemory<kValueDim> memory;
  const uint32_t unit_number = blockIdx.x / step.tiles_max;
  const RowRef* row = RowOfUnit(step, unit_number);
  if (row->kind != UnitKind::kClusters || row->cut != CutKind::kErrorBudget ||
      isinf(row->tolerance) || blockIdx.y >= row->estimate_pieces) {
    return;
  }
  const UnitPlace unit(step, row, unit_number - row->first_unit);
  EstimatePiece<T, kValueDim>(step, unit, blockIdx.x % step.tiles_max, blockIdx.y, /*all=*/true,
                              &memory);
}

// ---- launchers ----

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchPrepare(const StepHeader& step, uint32_t multiprocessors, cudaStream_t stream) {
  const uint32_t items = step.tiles + step.uploads;
  const uint32_t blocks = (items + kPrepareWarps - 1) / kPrepareWarps;
  PrepareKernel<T, kKeyDim><<<std::min(blocks, multiprocessors * 4), kPrepareWarps * 32, 0, stream>>>(
      step);
  return cudaPeekAtLastError();
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchRead(const StepHeader& step, uint32_t multiprocessors, cudaStream_t stream) {
  const uint32_t items = step.read_items + step.score_items;
  if (items == 0) return cudaSuccess;
  const uint32_t blocks = std::min(items, multiprocessors * kBlocksOfShape<kKeyDim, kValueDim>);
  ReadKernel<T, kKeyDim, kValueDim><<<blocks, kAttendWarps * 32, 0, stream>>>(step);
  return cudaPeekAtLastError();
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchEstimateAll(const StepHeader& step, cudaStream_t stream) {
  EstimateAllKernel<T, kValueDim>
      <<<dim3(step.tiles, kEstimatePiecesMax), kAttendWarps * 32, 0, stream>>>(step);
  return cudaPeekAtLastError();
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchFinish(const StepHeader& step, uint32_t multiprocessors, cudaStream_t stream) {
  const uint32_t blocks = multiprocessors * kBlocksOfShape<kKeyDim, kValueDim>;
  FinishKernel<T, kKeyDim, kValueDim><<<blocks, kAttendWarps * 32, 0, stream>>>(step);
  return cudaPeekAtLastError();
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchMerge(const StepHeader& step, cudaStream_t stream) {
  MergeKernel<kValueDim><<<step.tiles * kLanes, kMergeWarps * 32, 0, stream>>>(step);
  return cudaPeekAtLastError();
}

template <typename T, int kKeyDim, int kValueDim>
inline constexpr StepKernels kStepInstance = {
    LaunchPrepare<T, kKeyDim, kValueDim>, LaunchRead<T, kKeyDim, kValueDim>,
    LaunchEstimateAll<T, kKeyDim, kValueDim>, LaunchFinish<T, kKeyDim, kValueDim>,
    LaunchMerge<T, kKeyDim, kValueDim>};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_INSTANCE_CUH_
