// SPDX-License-Identifier: Apache-2.0
//
// The prepare stage: uploaded rows go to their pages; queries become the left sides of products.
#ifndef ATTND_GPU_CUDA_STEP_PREPARE_CUH_
#define ATTND_GPU_CUDA_STEP_PREPARE_CUH_

#include <cstdint>

#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/layout/kernel_shapes.h"

namespace attnd::gpu {

inline constexpr uint32_t kPrepareWarps = 8;

// ---- kernels ----

// A thread's share of a query: every 32nd element. It is on its way until it is looked at.
template <int kCount>
class QueryShare {
 public:
  // first: the query's first element; none: whether all are 0 instead.
  __device__ __forceinline__ QueryShare(const StepHeader& step, uint64_t first, bool none)
      : dtype_(step.query_dtype) {
    const uint64_t at = first + threadIdx.x % 32;
    const auto load = [&](auto* from) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) bits_[i] = from[at + i * 32];
    };
    if (none) return;
    if (dtype_ == static_cast<uint32_t>(DType::kFp32)) {
      load(reinterpret_cast<const uint32_t*>(step.queries));
    } else {
      load(reinterpret_cast<const uint16_t*>(step.queries));
    }
  }

  __device__ __forceinline__ float operator[](int i) const {
    const auto half = static_cast<uint16_t>(bits_[i]);
    switch (dtype_) {
      case static_cast<uint32_t>(DType::kBf16):
        return __uint_as_float(bits_[i] << 16);
      case static_cast<uint32_t>(DType::kFp16):
        return Element<__half>::ToFloat(*reinterpret_cast<const __half*>(&half));
      default:
        return __uint_as_float(bits_[i]);
    }
  }

 private:
  const uint32_t dtype_;
  uint32_t bits_[kCount] = {};
};

// A tile's queries in shared memory, scaled: the queries by a power of two into [-1, 1], so that
// fp16 holds them whatever they were; their squares by the greatest. The factors carry both.
template <int kDim>
struct TileQueries {
  float queries[kLanes][kDim];
  float squares[kLanes][kDim];
};

// One warp loads lane `lane` and writes its factors.
template <int kDim>
__device__ __forceinline__ void LoadLane(const StepHeader& step, const LanePlace& place,
                                         uint32_t lane, TileQueries<kDim>* tile, float* factors) {
  const uint32_t thread = threadIdx.x % 32;
  const QueryShare<kDim / 32> x(step, place.slot * kDim, !place.used);
  float greatest = 0;
#pragma unroll
  for (uint32_t i = 0; i < kDim / 32; ++i) greatest = fmaxf(greatest, fabsf(x[i]));
  for (int offset = 16; offset > 0; offset /= 2) {
    greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, offset));
  }
  int exponent = 0;
  if (greatest > 0) frexpf(greatest, &exponent);
  exponent = max(-100, min(exponent, 100));  // so that both factors are numbers
  // |softmax_scale q| is at most 1e18 where keys have a size at all; docs/DESIGN.md, "Limits".
  const float scaled = fminf(greatest * step.softmax_scale, 1e18f);
  const float query_factor = ldexpf(1.0f, -exponent);
  const float square_factor = scaled > 0 ? step.softmax_scale / scaled : 0.0f;
#pragma unroll
  for (uint32_t i = 0; i < kDim / 32; ++i) {
    const float share = fminf(fabsf(x[i]) * square_factor, 1.0f);
    tile->queries[lane][i * 32 + thread] = x[i] * query_factor;
    tile->squares[lane][i * 32 + thread] = share * share;
  }
  if (thread == 0) {
    factors[lane] = ldexpf(step.softmax_scale, exponent) * kLog2E;
    factors[kLanes + lane] = scaled * scaled;
  }
}

// One thread block of kWarps warps writes a tile's fragments to `words`. tile: in shared memory.
template <typename T, int kDim, uint32_t kWarps>
__device__ __forceinline__ void WriteFragments(const StepHeader& step, const UnitPlace& unit,
                                               uint32_t tile_of_unit, TileQueries<kDim>* tile,
                                               uint32_t* words) {
  const uint32_t warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  uint32_t* squares = words + FragmentWords(kDim);
  auto* factors = reinterpret_cast<float*>(squares + FragmentWords(kDim));
  for (uint32_t lane = warp; lane < kLanes; lane += kWarps) {
    LoadLane<kDim>(step, LanePlace(step, unit, tile_of_unit, lane), lane, tile, factors);
  }
  __syncthreads();

  const uint32_t g = thread / 4, t = thread % 4;
  for (uint32_t pair = warp; pair < kDim / 8; pair += kWarps) {
    const float* x = tile->queries[g] + pair / 4 * 32 + t * 8 + pair % 4 * 2;
    uint32_t* out = words + (pair / 4 * 32 + thread) * 8 + pair % 4 * 2;
    Split<T>(x[0], x[1], &out[0], &out[1]);
  }
  // Product m = 2 w + h takes bytes h and h + 2 of a thread's code word w: their low halves, then
  // their high ones.
  for (uint32_t m = warp; m < kDim / 16; m += kWarps) {
    const float* x = tile->squares[g] + t * (kDim / 8) + m / 2 * 4 + m % 2;
    uint32_t* out = squares + (m * 32 + thread) * 4;
    Split<T>(x[0], x[2], &out[0], &out[1]);
    Split<T>(x[kDim / 2], x[kDim / 2 + 2], &out[2], &out[3]);
  }
}

template <typename T, int kDim>
__device__ void PrepareTile(const StepHeader& step, uint32_t tile_number, TileQueries<kDim>* tile) {
  const uint32_t unit_number = tile_number / step.tiles_max;
  const RowRef* row = RowOfUnit(step, unit_number);
  const UnitPlace unit(step, row, unit_number - row->first_unit);
  WaitForKernelBefore();  // a gate: the step's queries are there
  if (row->coop_blocks != 0) return;
  WriteFragments<T, kDim, kPrepareWarps>(
      step, unit, tile_number % step.tiles_max, tile,
      step.query_fragments + uint64_t{tile_number} * TileFragmentWords(kDim));
}

__device__ __forceinline__ void CopyUpload(const StepHeader& step, uint32_t number) {
  const UploadRef upload = step.upload_refs[number];
  WaitForKernelBefore();  // as PrepareTile
  const uint4* from = reinterpret_cast<const uint4*>(step.upload_data + upload.from);
  uint4* to = reinterpret_cast<uint4*>(upload.to);
  for (uint64_t i = threadIdx.x % 32; i < upload.bytes / 16; i += 32) to[i] = from[i];
}

// One thread resolves one score item.
__device__ __forceinline__ void ResolveChunk(const StepHeader& step, uint32_t item) {
  const RowRef* row = step.row_refs + LastNotAfter(step.rows, item, [&](uint32_t i) {
                        return step.row_refs[i].first_score_item;
                      });
  const uint32_t chunks = row->slots / kSlotChunk;
  const uint32_t number = item - row->first_score_item;
  const UnitPlace unit(step, row, number / chunks);
  const uint32_t slot = number % chunks * kSlotChunk;
  const uint32_t s = SegmentOfSlot(step, *row, slot);
  const IndexPlace index(step, *row, s, unit.kv_head);
  const SegmentRef& segment = *index.segment;
  ChunkRef chunk = {};
  chunk.head = index.head;
  chunk.scores = UnitScores(step, unit) + slot;
  chunk.fates = UnitFates(step, unit) + slot;
  chunk.offsets = segment.offsets;
  chunk.segment = s;
  chunk.first = slot - segment.first_slot;
  chunk.clusters = index.clusters();
  chunk.max_clusters = segment.max_clusters;
  chunk.unit = unit.unit;
  chunk.slots = row->slots;
  chunk.second_order = row->second_order;
  chunk.steps = kSlotChunk / kStepSlots;
  step.chunks[item] = chunk;
}

// Thread blocks of the prepare stage: one for each tile, if the stages answer any unit; then such
// with a thread for each score item; then such with a warp for each upload.
struct PrepareBlocks {
  uint32_t tiles, chunks, uploads;
  __host__ __device__ explicit PrepareBlocks(const StepHeader& step)
      : tiles(CoopUnits(step) == step.units ? 0 : step.tiles),
        chunks((step.score_items + kPrepareWarps * 32 - 1) / (kPrepareWarps * 32)),
        uploads((step.uploads + kPrepareWarps - 1) / kPrepareWarps) {}
};

// kBesideGate: it begins before a gate has ended.
template <typename T, int kDim, bool kBesideGate>
__global__ void __launch_bounds__(kPrepareWarps * 32)
    PrepareKernel(const __grid_constant__ StepHeader step) {
  __shared__ TileQueries<kDim> tile;
  if (kBesideGate) SeeKernelBefore();  // and passes what it sees on to the next
  LetNextKernelStart();
  const PrepareBlocks blocks(step);
  uint32_t block = blockIdx.x;
  if (block == 0 && threadIdx.x < kCursors) step.cursors[threadIdx.x] = 0;
  if (block == 0 && threadIdx.x == 0 && step.missing_count != nullptr) *step.missing_count = 0;
  if (block < blocks.tiles) return PrepareTile<T, kDim>(step, block, &tile);
  block -= blocks.tiles;
  if (block < blocks.chunks) {
    const uint32_t item = block * kPrepareWarps * 32 + threadIdx.x;
    if (item < step.score_items) ResolveChunk(step, item);
    return WaitForKernelBefore();  // what follows this kernel follows that one
  }
  const uint32_t upload = (block - blocks.chunks) * kPrepareWarps + threadIdx.x / 32;
  if (upload < step.uploads) return CopyUpload(step, upload);
  WaitForKernelBefore();
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_PREPARE_CUH_
