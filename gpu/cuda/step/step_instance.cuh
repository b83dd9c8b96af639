// SPDX-License-Identifier: Apache-2.0
//
// The kernels of one shape, and their launchers.
#ifndef ATTND_GPU_CUDA_STEP_STEP_INSTANCE_CUH_
#define ATTND_GPU_CUDA_STEP_STEP_INSTANCE_CUH_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "gpu/cuda/launch.h"
#include "gpu/cuda/step/attend.cuh"
#include "gpu/cuda/step/cluster_launch.h"
#include "gpu/cuda/step/coop_step.cuh"
#include "gpu/cuda/step/estimate.cuh"
#include "gpu/cuda/step/merge.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/prepare.cuh"
#include "gpu/cuda/step/score.cuh"
#include "gpu/cuda/step/step_kernels.h"

namespace attnd::gpu {

// Thread blocks that a multiprocessor should hold: as shared memory and registers allow.
template <int kKeyDim, int kValueDim>
inline constexpr int kAttendBlocks = kKeyDim + kValueDim <= 128   ? 3
                                     : kKeyDim + kValueDim <= 320 ? 2
                                                                  : 1;
template <int kKeyDim, int kValueDim>
inline constexpr int kChosenBlocks = kKeyDim + kValueDim <= 256   ? 3
                                     : kKeyDim + kValueDim <= 320 ? 2
                                                                  : 1;
template <int kValueDim>
inline constexpr int kEstimateBlocks = kValueDim <= 64    ? 6
                                       : kValueDim <= 128 ? 3
                                                          : 2;
template <int kKeyDim>
inline constexpr int kScoreBlocks = kKeyDim <= 64    ? 4
                                    : kKeyDim <= 128 ? 3
                                    : kKeyDim <= 192 ? 2
                                                     : 1;

// ---- kernels ----

// Calls work(piece, take) for a thread block's share of `count` pieces: first the piece of its own
// number, then such as no thread block has taken. work calls take() when it has read its piece: the
// next one is asked for while the state is stored, which ends with a barrier. A piece's result does
// not depend on the thread block that takes it, and a slow thread block takes fewer pieces. cursor:
// 0 in the beginning.
template <typename Work>
__device__ __forceinline__ void ForPieces(uint32_t* cursor, uint32_t count, Work work) {
  __shared__ uint32_t taken;
  uint32_t piece = blockIdx.x;
  while (piece < count) {
    uint32_t next = 0;
    work(piece, [&] {
      if (threadIdx.x == 0) next = gridDim.x + atomicAdd(cursor, 1);
    });
    if (threadIdx.x == 0) taken = next;
    __syncthreads();
    piece = taken;
  }
}

template <typename T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kAttendWarps * 32, (kAttendBlocks<kKeyDim, kValueDim>))
    ReadKernel(const __grid_constant__ StepHeader step) {
  WaitForKernelBefore();
  ForPieces(&step.cursors[kTakenReadPieces], step.read_items, [&](uint32_t item, auto take) {
    if (item + gridDim.x >= step.read_items) LetNextKernelStart();
    const RowRef* row = RowOf(step, item, &RowRef::first_read_item);
    const uint32_t number = item - row->first_read_item;
    const uint32_t tile = number / row->read_pieces;
    const UnitPlace unit(step, row, tile / step.tiles_max);
    ReadPiece<T, kKeyDim, kValueDim>(step, unit, tile % step.tiles_max, number % row->read_pieces,
                                     take);
  });
}

template <typename T, int kKeyDim>
__global__ void __launch_bounds__(kScoreWarps * 32, (kScoreBlocks<kKeyDim>))
    ScoreKernel(const __grid_constant__ StepHeader step) {
  constexpr uint32_t kBytes = kScoreWarpBytes<kKeyDim>;
  const uint32_t ring = threadIdx.x / 32 * kBytes;
  for (uint32_t tile = 0; tile < step.tiles_max; ++tile) {
    const ChunkFeed feed(step.chunks, blockIdx.x * kScoreWarps + threadIdx.x / 32, step.score_items,
                         gridDim.x * kScoreWarps, ring + kBytes - ChunkFeed::kSharedBytes);
    const auto fragments_of = [&](const ChunkRef& chunk) {
      const uint64_t tile_number = uint64_t{chunk.unit} * step.tiles_max + tile;
      return step.query_fragments + tile_number * TileFragmentWords(kKeyDim);
    };
    Totals totals[2] = {{-INFINITY, 0}, {-INFINITY, 0}};
    ScoreChunks<T, kKeyDim, kScoreBuffers>(step, feed, tile, ring, fragments_of,
                                           StoreEach{step, tile}, totals);
  }
}

template <typename T, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(kAttendWarps * 32, (kChosenBlocks<kKeyDim, kValueDim>))
    ChosenKernel(const __grid_constant__ StepHeader step) {
  ForPieces(&step.cursors[kTakenFinishPieces], step.cursors[kQueuedPieces],
            [&](uint32_t i, auto take) {
              AttendChosen<T, kKeyDim, kValueDim>(step.chosen_pieces[i], take);
            });
}

// A thread block for each piece of a tile, pieces fastest. all: of units with a tolerance, every
// cluster, whatever became of it.
template <typename T, int kValueDim>
__global__ void __launch_bounds__(kAttendWarps * 32, (kEstimateBlocks<kValueDim>))
    EstimateKernel(const __grid_constant__ StepHeader step, bool all) {
  const uint32_t piece = blockIdx.x % step.estimate_pieces_max;
  const uint32_t tile = blockIdx.x / step.estimate_pieces_max;
  const uint32_t unit_number = tile / step.tiles_max;
  const RowRef* row = RowOfUnit(step, unit_number);
  if (row->kind != UnitKind::kClusters || row->coop_blocks != 0) return;
  if (piece >= row->estimate_pieces || (all && !HasTolerance(*row))) return;
  const UnitPlace unit(step, row, unit_number - row->first_unit);
  EstimatePiece<T, kValueDim>(step, unit, tile % step.tiles_max, piece, all);
}

// ---- launchers ----

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchPrepare(const StepHeader& step, bool beside_gate, cudaStream_t stream) {
  const PrepareBlocks parts(step);
  const uint32_t blocks = parts.tiles + parts.chunks + parts.uploads;
  return Launch({.kernel_before = beside_gate},
                beside_gate ? PrepareKernel<T, kKeyDim, true> : PrepareKernel<T, kKeyDim, false>,
                blocks, kPrepareWarps * 32, 0, stream, step);
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchRead(const StepHeader& step, uint32_t multiprocessors, bool overlap,
                       cudaStream_t stream) {
  const uint32_t blocks =
      std::min(step.read_items, multiprocessors * kAttendBlocks<kKeyDim, kValueDim>);
  return LaunchLarge(
      {.kernel_before = overlap}, ReadKernel<T, kKeyDim, kValueDim>, blocks, kAttendWarps * 32,
      kReaderSharedBytes<PageReader<T, kKeyDim, kValueDim>, kValueDim>, stream, step);
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchScore(const StepHeader& step, uint32_t multiprocessors, cudaStream_t stream) {
  const uint32_t blocks = std::min((step.score_items + kScoreWarps - 1) / kScoreWarps,
                                   multiprocessors * kScoreBlocks<kKeyDim>);
  return LaunchLarge({}, ScoreKernel<T, kKeyDim>, blocks, kScoreWarps * 32,
                     kScoreWarps * kScoreWarpBytes<kKeyDim>, stream, step);
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchChosen(const StepHeader& step, uint32_t multiprocessors, cudaStream_t stream) {
  return LaunchLarge({}, ChosenKernel<T, kKeyDim, kValueDim>,
                     multiprocessors * kChosenBlocks<kKeyDim, kValueDim>, kAttendWarps * 32,
                     kReaderSharedBytes<ChosenReader<T, kKeyDim, kValueDim>, kValueDim>, stream,
                     step);
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchEstimate(const StepHeader& step, bool all, cudaStream_t stream) {
  return LaunchLarge({}, EstimateKernel<T, kValueDim>, step.estimate_pieces_max * step.tiles,
                     kAttendWarps * 32, kEstimateSharedBytes<kValueDim>, stream, step, all);
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchMerge(const StepHeader& step, bool overlap, cudaStream_t stream) {
  return Launch({.kernel_before = overlap}, MergeKernel<kValueDim>, step.units * step.group,
                kMergeThreads, 0, stream, step);
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t LaunchCooperative(const StepHeader& step, uint32_t size, bool overlap,
                              cudaStream_t stream) {
  const auto kernel = CoopKernel<T, kKeyDim, kValueDim>;
  constexpr uint32_t kSharedBytes = CoopStep<T, kKeyDim, kValueDim>::kSharedBytes;
  const cudaError_t error = ClusterLaunch::Allow(kernel, kSharedBytes);
  if (error != cudaSuccess) return error;
  uint32_t first = 0;
  for (uint32_t smaller = 0; smaller < size; ++smaller) first += step.coop_counts[smaller];
  const ClusterLaunch launch(step.coop_counts[size], kCoopBlocks[size], kCoopThreads, kSharedBytes,
                             overlap, stream);
  return cudaLaunchKernelEx(&launch.config(), kernel, step, first);
}

template <typename T, int kKeyDim, int kValueDim>
cudaError_t CountGroups(int* at_once) {
  const auto kernel = CoopKernel<T, kKeyDim, kValueDim>;
  constexpr uint32_t kSharedBytes = CoopStep<T, kKeyDim, kValueDim>::kSharedBytes;
  *at_once = 0;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) error = ClusterLaunch::Allow(kernel, kSharedBytes);
  if (error != cudaSuccess) return error;
  if (attributes.ptxVersion < kClusterPtxVersion) return cudaSuccess;
  *at_once = ClusterLaunch::AtOnce(kernel, kCoopBlocksMax, kCoopThreads, kSharedBytes);
  return cudaSuccess;
}

template <typename T, int kKeyDim, int kValueDim>
constexpr StepKernels MakeStepKernels() {
  StepKernels kernels = {LaunchPrepare<T, kKeyDim, kValueDim>,
                         LaunchRead<T, kKeyDim, kValueDim>,
                         LaunchScore<T, kKeyDim, kValueDim>,
                         LaunchChosen<T, kKeyDim, kValueDim>,
                         LaunchEstimate<T, kKeyDim, kValueDim>,
                         LaunchMerge<T, kKeyDim, kValueDim>,
                         /*cooperative=*/nullptr,
                         /*count_groups=*/nullptr};
  if constexpr (kValueDim <= kCoopValueDimMax) {
    kernels.cooperative = LaunchCooperative<T, kKeyDim, kValueDim>;
    kernels.count_groups = CountGroups<T, kKeyDim, kValueDim>;
  }
  return kernels;
}

// What keys and values of a dtype are in kernels.
template <DType kDtype>
using ElementOf = std::conditional_t<kDtype == DType::kBf16, __nv_bfloat16, __half>;

template <DType kDtype, uint32_t kHeadDim, uint32_t kValueDim>
const StepKernels& StepKernelsOf() {
  static_assert(HasKernels({kDtype, kHeadDim, kValueDim}), "kKernelShapes has no such entry");
  static_assert(kDtype == DType::kBf16 || kDtype == DType::kFp16);
  static constexpr StepKernels kKernels =
      MakeStepKernels<ElementOf<kDtype>, int{kHeadDim}, int{kValueDim}>();
  return kKernels;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_STEP_INSTANCE_CUH_
