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

class ThreadBlockCluster {
 public:
  static constexpr uint32_t kBlockThreads = kCoopWarps * 32;
  static constexpr uint32_t kBlockWarps = kCoopWarps;
  static constexpr uint32_t kWarpsMax = kCoopBlocksMax * kBlockWarps;
  static constexpr uint32_t kGroupSlots = 8;

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
  static __device__ __forceinline__ void Sync() {
    Arrive();
    Wait();
  }
  // Sync in two halves. The first Sync of a kernel has to end before any thread block writes into
  // another: that one may not have begun.
  static __device__ __forceinline__ void Arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  static __device__ __forceinline__ void Wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  // Puts a word into the same place of another thread block's shared memory; to be followed by
  // Sync.
  static __device__ __forceinline__ void Write(float4* place, float4 word, uint32_t rank) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(Remote(place, rank)),
                 "f"(word.x), "f"(word.y), "f"(word.z), "f"(word.w)
                 : "memory");
  }

  // Each thread block has a mailbox at the same place of its shared memory. In each use the threads
  // of every thread block send words to the mailboxes, and await as many bytes as all threads send
  // to their own.
  class Mailbox {
   public:
    // By one thread; the thread block cluster must Sync before the first use.
    __device__ __forceinline__ void Init() {
      asm volatile(
          "mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(
              Local(&barrier_))
          : "memory");
    }
    template <typename Word>
    __device__ __forceinline__ void Send(Word* place, Word word, uint32_t rank) {
      const uint32_t to = Remote(place, rank), barrier = Remote(&barrier_, rank);
      if constexpr (sizeof(Word) == 8) {
        asm volatile(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(
                to),
            "l"(word), "r"(barrier)
            : "memory");
      } else {
        asm volatile(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                to),
            "r"(word), "r"(barrier)
            : "memory");
      }
    }
    // By every thread. use: counts the mailbox's uses from 0 on. What else threads wrote elsewhere
    // is not awaited: acquiring it would empty the first-level cache.
    __device__ __forceinline__ void Await(uint32_t bytes, uint32_t use) {
      const uint32_t barrier = Local(&barrier_);
      if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(bytes)
                     : "memory");
      }
      asm volatile(
          "{\n\t.reg .pred done;\n\t"
          "waiting:\n\t"
          "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
          "@!done bra waiting;\n\t}" ::"r"(barrier),
          "r"(use & 1)
          : "memory");
    }

   private:
    uint64_t barrier_;
  };

 private:
  template <typename T>
  static __device__ __forceinline__ uint32_t Local(T* place) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(place));
  }
  template <typename T>
  static __device__ __forceinline__ uint32_t Remote(T* place, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(Local(place)), "r"(rank));
    return address;
  }
};

// The number of this thread's warp in its cooperative group.
template <typename Threads>
__device__ __forceinline__ uint32_t CoopWarp() {
  return Threads::rank() * Threads::kBlockWarps + threadIdx.x / 32;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_COOPERATIVE_GROUP_CUH_
