// SPDX-License-Identifier: Apache-2.0
//
// Rows of keys and values on their way through shared memory.
#ifndef ATTND_GPU_CUDA_STEP_ROWS_CUH_
#define ATTND_GPU_CUDA_STEP_ROWS_CUH_

#include <cstdint>

#include "gpu/cuda/instructions.cuh"
#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/place.cuh"

namespace attnd::gpu {

// In block_memory warps have their rings. Places in it are byte offsets. It is read by plain loads,
// not by assembly, so that the compiler may move them forward as far as the waits for copies allow:
// with volatile ones, score was bound by their latency one after the other.
__device__ __forceinline__ uint32_t SharedAddress(uint32_t offset) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(block_memory)) + offset;
}
__device__ __forceinline__ uint4 LoadShared16(uint32_t offset) {
  return *reinterpret_cast<const uint4*>(block_memory + offset);
}
__device__ __forceinline__ uint32_t LoadShared4(uint32_t offset) {
  return *reinterpret_cast<const uint32_t*>(block_memory + offset);
}
__device__ __forceinline__ uint2 LoadShared8(uint32_t offset) {
  return *reinterpret_cast<const uint2*>(block_memory + offset);
}

__device__ __forceinline__ void LoadTransposed(uint32_t offset, uint32_t (&to)[4]) {
  LoadMatricesTransposed(SharedAddress(offset), to);
}

// Rows of 16-byte chunks in shared memory. Chunks change places within a row so that the eight
// threads that are served at a time meet different banks: keys are read by two rows at a time,
// values by eight neighbouring rows.
template <int kRowBytes>
__device__ __forceinline__ uint32_t KeyChunk(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + (chunk ^ (row & 1) * 4) * 16;
}
template <int kRowBytes>
__device__ __forceinline__ uint32_t ValueChunk(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + (chunk ^ row % 8) * 16;
}

template <int kRowBytes>
__device__ __forceinline__ uint32_t PlainChunk(uint32_t row, uint32_t chunk) {
  return row * kRowBytes + chunk * 16;
}

// Asks for 16 rows of kRowBytes, whose addresses address_of(row) gives.
template <int kRowBytes, uint32_t (*kPlace)(uint32_t, uint32_t), typename AddressOf>
__device__ __forceinline__ void CopyRows(uint32_t to, AddressOf address_of) {
  const uint32_t to_shared = SharedAddress(to);
  constexpr uint32_t kChunks = kRowBytes / 16;
  const uint32_t thread = threadIdx.x % 32;
#pragma unroll
  for (uint32_t i = 0; i < kPageRows * kChunks / 32; ++i) {
    const uint32_t row = (i * 32 + thread) / kChunks, chunk = (i * 32 + thread) % kChunks;
    CopyAsync16(to_shared + kPlace(row, chunk), address_of(row) + chunk * 16);
  }
}

// The same of 16 rows that follow one another; of those from `rows` on, at least 1, the last one
// stands. As a rule there are 16: then no address is worked out but the first.
template <int kRowBytes, uint32_t (*kPlace)(uint32_t, uint32_t)>
__device__ __forceinline__ void CopyRun(uint32_t to, const std::byte* from, uint32_t rows) {
  if (rows < kPageRows) {
    CopyRows<kRowBytes, kPlace>(
        to, [&](uint32_t row) { return from + min(row, rows - 1) * kRowBytes; });
    return;
  }
  const uint32_t to_shared = SharedAddress(to);
  constexpr uint32_t kChunks = kRowBytes / 16;
  const uint32_t thread = threadIdx.x % 32;
  from += thread * 16;
#pragma unroll
  for (uint32_t i = 0; i < kPageRows * kChunks / 32; ++i) {
    const uint32_t row = (i * 32 + thread) / kChunks, chunk = (i * 32 + thread) % kChunks;
    CopyAsync16(to_shared + kPlace(row, chunk), from + i * 512);
  }
}

// Products of 8 kBlocks rows in shared memory with a tile's vectors: (sum[n][c] + sum[n][c + 2]) is
// that of row 8 n + 2t + c and lane g. fragments: the vectors as the left sides of products.
template <typename T, int kDim, uint32_t (*kPlace)(uint32_t, uint32_t), int kBlocks>
__device__ __forceinline__ void DotRows(uint32_t rows, const uint32_t* fragments,
                                        float (&sum)[kBlocks][4]) {
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint4* q = reinterpret_cast<const uint4*>(fragments) + threadIdx.x % 32 * 2;
#pragma unroll
  for (int block = 0; block < kDim / 32; ++block) {
    const uint4 q0 = q[block * 64], q1 = q[block * 64 + 1];
    const uint32_t a0[4] = {q0.x, q0.y, q0.z, q0.w};
    const uint32_t a1[4] = {q1.x, q1.y, q1.z, q1.w};
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const uint4 row = LoadShared16(rows + kPlace(n * 8 + g, block * 4 + t));
      MultiplyAdd<T>(sum[n], a0, row.x, row.y);
      MultiplyAdd<T>(sum[n], a1, row.z, row.w);
    }
  }
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_ROWS_CUH_
