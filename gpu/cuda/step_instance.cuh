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

// Blocks that a multiprocessor should hold: as shared memory and registers allow.
template <int kKeyDim, int kValueDim>
inline constexpr int kAttendBlocks = kKeyDim + kValueDim <= 128   ? 3
                                     : kKeyDim + kValueDim <= 320 ? 2
                                                                  : 1;
template <int kKeyDim>
inline constexpr int kScoreBlocks = kKeyDim <= 64 ? 8 : kKeyDim <= 128 ? 5 : 3;

// ---- kernels ----

// The next of `count` pieces that no block has taken, from `cursor`. Which block takes a piece
// changes nothing in it, and a block that was slow takes fewer.
__device__ __forceinline__ uint32_t TakePiece(uint32_t* cursor) {
  __shared__ uint32_t taken;
  __syncthreads();
  if (threadIdx.x == 0) taken = atomicAdd(cursor, 1);
  __syncthreads();
  return taken;
}

template <typename T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kAttendWarps * 32, (kAttendBlocks<kKeyDim, kValueDim>))
    ReadKernel(const __grid_constant__ StepHeader step) {
  uint32_t* cursor = &step.cursors[kTakenReadPieces];
  for (uint32_t item = TakePiece(cursor); item < step.read_items; item = TakePiece(cursor)) {
    const RowRef* row = step.row_refs + LastNotAfter(step.rows, item, [&](uint32_t i) {
                          return step.row_refs[i].first_read_item;
                        });
    const uint32_t number = item - row->first_read_item;
    const uint32_t tile = number / row->read_pieces;
    const UnitPlace unit(step, row, tile / step.tiles_max);
    ReadPiece<T, kKeyDim, kValueDim>(step, unit, tile % step.tiles_max, number % row->read_pieces);
  }
}

// A block's items follow one another, so that most share a unit.
template <typename T, int kKeyDim>
__global__ void __launch_bounds__(kScoreWarps * 32, (kScoreBlocks<kKeyDim>))
    ScoreKernel(const __grid_constant__ StepHeader step) {
  __shared__ ScoreMemory<kKeyDim> memory;
  const uint32_t begin = static_cast<uint32_t>(uint64_t{step.score_items} * blockIdx.x / gridDim.x);
  const uint32_t end =
      static_cast<uint32_t>(uint64_t{step.score_items} * (blockIdx.x + 1) / gridDim.x);
  ScoreItems<T, kKeyDim>(step, begin, end, &memory);
}

template <typename T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kAttendWarps * 32, (kAttendBlocks<kKeyDim, kValueDim>))
    FinishKernel(const __grid_constant__ StepHeader step) {
  const uint32_t items = step.cursors[kQueuedPieces];
  uint32_t* cursor = &step.cursors[kTakenFinishPieces];
  for (uint32_t i = TakePiece(cursor); i < items; i = TakePiece(cursor)) {
    const FinishItem item = step.finish_items[i];
    const RowRef* row = RowOfUnit(step, item.unit);
    const UnitPlace unit(step, row, item.unit - row->first_unit);
    if (item.estimate != 0) {
      EstimatePiece<T, kValueDim>(step, unit, item.tile, item.piece, /*all=*/false);
    } else {
      ChosenPiece<T, kKeyDim, kValueDim>(step, unit, item.tile, item.piece);
    }
  }
}

// Block (tile, piece).
template <typename T, int kValueDim>
__global__ void __launch_bounds__(kAttendWarps * 32)
    EstimateAllKernel(const __grid_constant__ StepHeader step) {
  const uint32_t unit_number = blockIdx.x / step.tiles_max;
  const RowRef* row = RowOfUnit(step, unit_number);
  if (row->kind != UnitKind::kClusters || row->cut != CutKind::kErrorBudget ||
      isinf(row->tolerance) || blockIdx.y >= row->estimate_pieces) {
    return;
  }
  const UnitPlace unit(step, row, unit_number - row->first_unit);
  EstimatePiece<T, kValueDim>(step, unit, blockIdx.x % step.tiles_max, blockIdx.y, /*all=*/true);
}

// ---- launchers ----

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchPrepare(const StepHeader& step, cudaStream_t stream) {
  const uint32_t blocks = step.tiles + (step.uploads + kPrepareWarps - 1) / kPrepareWarps;
  PrepareKernel<T, kKeyDim><<<blocks, kPrepareWarps * 32, 0, stream>>>(step);
  return cudaPeekAtLastError();
}

// Launches a kernel with more shared memory than it gets without asking.
template <typename Kernel, typename... Args>
cudaError_t LaunchLarge(Kernel kernel, dim3 blocks, uint32_t threads, uint32_t shared_bytes,
                        cudaStream_t stream, const Args&... args) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  kernel<<<blocks, threads, shared_bytes, stream>>>(args...);
  return cudaPeekAtLastError();
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchRead(const StepHeader& step, uint32_t multiprocessors, cudaStream_t stream) {
  const uint32_t blocks =
      std::min(step.read_items, multiprocessors * kAttendBlocks<kKeyDim, kValueDim>);
  return LaunchLarge(ReadKernel<T, kKeyDim, kValueDim>, blocks, kAttendWarps * 32,
                     kAttendSharedBytes<kKeyDim, kValueDim>, stream, step);
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchScore(const StepHeader& step, uint32_t multiprocessors, cudaStream_t stream) {
  const uint32_t blocks = std::min(step.score_items, multiprocessors * kScoreBlocks<kKeyDim>);
  ScoreKernel<T, kKeyDim><<<blocks, kScoreWarps * 32, 0, stream>>>(step);
  return cudaPeekAtLastError();
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchEstimateAll(const StepHeader& step, cudaStream_t stream) {
  return LaunchLarge(EstimateAllKernel<T, kValueDim>, dim3(step.tiles, kEstimatePiecesMax),
                     kAttendWarps * 32, kEstimateSharedBytes<kValueDim>, stream, step);
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchFinish(const StepHeader& step, uint32_t multiprocessors, cudaStream_t stream) {
  constexpr uint32_t kShared =
      std::max(kAttendSharedBytes<kKeyDim, kValueDim>, kEstimateSharedBytes<kValueDim>);
  return LaunchLarge(FinishKernel<T, kKeyDim, kValueDim>,
                     multiprocessors * kAttendBlocks<kKeyDim, kValueDim>, kAttendWarps * 32,
                     kShared, stream, step);
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchMerge(const StepHeader& step, cudaStream_t stream) {
  MergeKernel<kValueDim><<<step.units * step.group, kMergeThreads, 0, stream>>>(step);
  return cudaPeekAtLastError();
}

template <typename T, int kKeyDim, int kValueDim>
inline constexpr StepKernels kStepInstance = {
    LaunchPrepare<T, kKeyDim, kValueDim>, LaunchRead<T, kKeyDim, kValueDim>,
    LaunchScore<T, kKeyDim, kValueDim>,   LaunchEstimateAll<T, kKeyDim, kValueDim>, LaunchFinish<T, kKeyDim, kValueDim>,
    LaunchMerge<T, kKeyDim, kValueDim>};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_INSTANCE_CUH_
