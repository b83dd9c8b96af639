// SPDX-License-Identifier: Apache-2.0
//
// A warp's way through chunks of clusters, with what resolves them already in shared memory when it
// comes to them.
#ifndef ATTND_GPU_CUDA_STEP_CHUNK_FEED_CUH_
#define ATTND_GPU_CUDA_STEP_CHUNK_FEED_CUH_

#include <cstdint>

#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/rows.cuh"

namespace attnd::gpu {

// Chunks first, first + stride ... below end, in order. One warp; its copies belong to the warp's
// groups of asynchronous copies (CommitCopies).
class ChunkFeed {
 public:
  static constexpr uint32_t kRefs = 3;  // this chunk's, the next one's, and one on its way
  static constexpr uint32_t kSharedBytes = kRefs * sizeof(ChunkRef);

  // memory: the place of kSharedBytes of this warp, 16-byte aligned.
  __device__ ChunkFeed(const ChunkRef* chunks, uint32_t first, uint32_t end, uint32_t stride,
                       uint32_t memory)
      : chunks_(chunks), item_(first), end_(end), stride_(stride), memory_(memory) {
    Fetch(item_, 0);
    Fetch(item_ + stride_, 1);
    CommitCopies();
    WaitCopies<0>();
    __syncwarp();
  }

  __device__ __forceinline__ bool done() const { return item_ >= end_; }
  __device__ __forceinline__ bool has_next() const { return item_ + stride_ < end_; }
  __device__ __forceinline__ uint32_t item() const { return item_; }
  __device__ __forceinline__ const ChunkRef& now() const { return Ref(place_); }
  __device__ __forceinline__ const ChunkRef& next() const { return Ref(Following(place_)); }

  // Asks for the chunk behind the next. Once for each chunk, at least two groups before Advance.
  __device__ __forceinline__ void FetchAhead() const {
    Fetch(item_ + 2 * stride_, Following(Following(place_)));
  }
  __device__ __forceinline__ void Advance() {
    item_ += stride_;
    place_ = Following(place_);
  }

 private:
  static __device__ __forceinline__ uint32_t Following(uint32_t place) {
    return place + 1 == kRefs ? 0 : place + 1;
  }
  __device__ __forceinline__ const ChunkRef& Ref(uint32_t place) const {
    return reinterpret_cast<const ChunkRef*>(block_memory + memory_)[place];
  }
  __device__ __forceinline__ void Fetch(uint32_t item, uint32_t place) const {
    const uint32_t thread = threadIdx.x % 32;
    if (item >= end_ || thread >= sizeof(ChunkRef) / 16) return;
    const auto* from = reinterpret_cast<const std::byte*>(chunks_ + item) + thread * 16;
    const uint32_t ref_bytes = sizeof(ChunkRef);
    CopyAsync16(SharedAddress(memory_ + place * ref_bytes + thread * 16), from);
  }

  const ChunkRef* const chunks_;
  uint32_t item_;
  const uint32_t end_;
  const uint32_t stride_;
  const uint32_t memory_;
  uint32_t place_ = 0;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_CHUNK_FEED_CUH_
