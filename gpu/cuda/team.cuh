// SPDX-License-Identifier: Apache-2.0
//
// The threads that work on one unit together: one block, or the blocks of a thread-block cluster,
// whose shared memory each of them can write (compute capability 9.0 and later). Called a team, as
// a cluster here is one of keys.
//
// A team's warps are numbered through its blocks. Write puts a word into the same place of every
// block's shared memory, or of one block's; Sync waits for the whole team and makes all that its
// threads wrote, to shared and to global memory, visible to it.
#ifndef ATTND_GPU_CUDA_TEAM_CUH_
#define ATTND_GPU_CUDA_TEAM_CUH_

#include <cstdint>

#include "gpu/step_layout.h"

namespace attnd::gpu {

class BlockTeam {
 public:
  static constexpr uint32_t kBlockThreads = 1024;
  static constexpr uint32_t kBlockWarps = kBlockThreads / 32;
  static constexpr uint32_t kWarpsMax = kBlockWarps;
  // Slots that a thread has at a time, neighbours: those from kGroupSlots * thread() on.
  static constexpr uint32_t kGroupSlots = 8;

  static __device__ __forceinline__ uint32_t rank() { return 0; }
  static __device__ __forceinline__ uint32_t blocks() { return 1; }
  template <typename Word>
  static __device__ __forceinline__ void Write(Word* place, Word word, uint32_t /*rank*/) {
    *place = word;
  }
  static __device__ __forceinline__ void Sync() { __syncthreads(); }
};

class ClusterTeam {
 public:
  static constexpr uint32_t kBlockThreads = kTeamWarps * 32;
  static constexpr uint32_t kBlockWarps = kTeamWarps;
  static constexpr uint32_t kWarpsMax = kTeamBlocksMax * kBlockWarps;
  static constexpr uint32_t kGroupSlots = kTeamBlockSlots / kBlockThreads;

  static __device__ __forceinline__ uint32_t rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
  }
  static __device__ __forceinline__ uint32_t blocks() {
    uint32_t blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
  }
  // place: in this block's shared memory.
  template <typename Word>
  static __device__ __forceinline__ void Write(Word* place, Word word, uint32_t rank) {
    static_assert(sizeof(Word) == 4 || sizeof(Word) == 8 || sizeof(Word) == 16);
    uint32_t to;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(to)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(place))), "r"(rank));
    if constexpr (sizeof(Word) == 16) {
      const uint4 words = *reinterpret_cast<const uint4*>(&word);
      asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.x),
                   "r"(words.y), "r"(words.z), "r"(words.w)
                   : "memory");
    } else if constexpr (sizeof(Word) == 8) {
      asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(to),
                   "l"(*reinterpret_cast<const unsigned long long*>(&word))
                   : "memory");
    } else {
      asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to),
                   "r"(*reinterpret_cast<const uint32_t*>(&word))
                   : "memory");
    }
  }
  static __device__ __forceinline__ void Sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
  }
};

// Of this thread's place in the team.
template <typename Team>
__device__ __forceinline__ uint32_t TeamThread() {
  return Team::rank() * Team::kBlockThreads + threadIdx.x;
}
template <typename Team>
__device__ __forceinline__ uint32_t TeamThreads() {
  return Team::blocks() * Team::kBlockThreads;
}
template <typename Team>
__device__ __forceinline__ uint32_t TeamWarp() {
  return Team::rank() * Team::kBlockWarps + threadIdx.x / 32;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_TEAM_CUH_
