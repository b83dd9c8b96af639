// SPDX-License-Identifier: Apache-2.0
//
// The cooperative groups that work on one unit: one thread block, or the thread blocks of a
// thread block cluster, each of which can write the others' shared memory (compute capability 9.0
// and later). "Cluster" alone means a cluster of keys here.
//
// A cooperative group's warps are numbered through its thread blocks. Sync waits for all its
// threads, and makes all that they wrote, to shared and to global memory, visible to them. A
// Mailbox is faster: words that each thread block awaits in its shared memory.
#ifndef ATTND_GPU_CUDA_STEP_COOPERATIVE_GROUP_CUH_
#define ATTND_GPU_CUDA_STEP_COOPERATIVE_GROUP_CUH_

#include <cstdint>

#include "gpu/cuda/instructions.cuh"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

class ThreadBlock {
 public:
  static constexpr uint32_t kBlockThreads = 1024;
  static constexpr uint32_t kBlockWarps = kBlockThreads / 32;
  static constexpr uint32_t kWarpsMax = kBlockWarps;
  static constexpr uint32_t kGroupSlots = 8;  // that a thread has at a time, neighbours

  static __device__ __forceinline__ uint32_t rank() { return 0; }
  static __device__ __forceinline__ uint32_t blocks() { return 1; }
  static __device__ __forceinline__ void Arrive() {}
  static __device__ __forceinline__ void Wait() { __syncthreads(); }

  struct Mailbox {
    __device__ __forceinline__ void Init() {}
    template <typename Word>
    __device__ __forceinline__ void Send(Word* place, Word word, uint32_t /*rank*/) {
      *place = word;
    }
    __device__ __forceinline__ void Await(uint32_t /*bytes*/, uint32_t /*use*/) { __syncthreads(); }
  };
};

class ThreadBlockCluster : public ClusterExchange {
 public:
  static constexpr uint32_t kBlockThreads = kCoopWarps * 32;
  static constexpr uint32_t kBlockWarps = kCoopWarps;
  static constexpr uint32_t kWarpsMax = kCoopBlocksMax * kBlockWarps;
  static constexpr uint32_t kGroupSlots = 8;
};

// The number of this thread's warp in its cooperative group.
template <typename Threads>
__device__ __forceinline__ uint32_t CoopWarp() {
  return Threads::rank() * Threads::kBlockWarps + threadIdx.x / 32;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_COOPERATIVE_GROUP_CUH_
