// SPDX-License-Identifier: Apache-2.0
//
// The instructions that C++ has no words for, a function each: matrix products, asynchronous
// copies, fast functions, the exchange between the thread blocks of a thread block cluster. No
// other file of step/ has assembly: tests run the same kernels on the host over a form of this
// header in C++ (tests/gpu/emulated). Addresses in shared memory are 32 bits wide.
//
// A thread's names in its warp: `g` = lane / 4 and `t` = lane % 4, as PTX's fragment tables have
// them.
#ifndef ATTND_GPU_CUDA_INSTRUCTIONS_CUH_
#define ATTND_GPU_CUDA_INSTRUCTIONS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

namespace attnd::gpu {

// A thread block's dynamic shared memory.
extern __shared__ __align__(128) std::byte block_memory[];

// ---- matrix products, by a whole warp ----

// d += a b. a: rows g and g + 8, k 2t.. and 2t + 8..; b: column g, the same k; d: rows g and g + 8,
// columns 2t and 2t + 1 (PTX ISA, "Matrix Fragments for mma.m16n8k16").
template <typename T>
__device__ __forceinline__ void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1);

template <>
__device__ __forceinline__ void MultiplyAdd<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                           uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void MultiplyAdd<__half>(float (&d)[4], const uint32_t (&a)[4],
                                                    uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of bytes, with k 4t.. and 16 + 4t.. (PTX ISA, "Matrix Fragments for mma.m16n8k32"). b's
// bytes are signed; kSigned: whether a's are.
template <bool kSigned>
__device__ __forceinline__ void MultiplyAddBytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                                 uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (kSigned) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Four 8 x 8 matrices of 16-bit numbers, transposed: thread i gives the address of row i % 8 of
// matrix i / 8, and gets of each matrix rows 2t and 2t + 1 of column g.
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t address, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// ---- numbers ----

// 2^x; 0 for -infinity.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float Sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of the table of the eight bytes of low and high, four: a selector is the low three bits of four.
// A fourth bit repeats the byte's own highest bit instead.
__device__ __forceinline__ uint32_t PermuteBytes(uint32_t low, uint32_t high, uint32_t selectors) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
  return bytes;
}

// ---- copies ----

// 16 bytes from memory to shared memory, without waiting; complete after WaitCopies.
__device__ __forceinline__ void CopyAsync16(uint32_t to_shared, const std::byte* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_shared), "l"(from) : "memory");
}
// Ends a group of this thread's copies.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kLeft of this thread's groups are under way.
template <int kLeft>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
// Asks the second-level cache for what will be read.
__device__ __forceinline__ void Prefetch(const std::byte* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
// Tells the compiler that an address, which was itself read from memory, is none of shared memory:
// loads from anywhere wait for stores there.
__device__ __forceinline__ void AssumeGlobal(const void* address) {
  __builtin_assume(__isGlobal(address));
}

// ---- kernels of a stream ----

// Lets the next kernel of the stream start beside this one, if it was launched to; it must wait for
// this one before it looks at what this one writes.
__device__ __forceinline__ void LetNextKernelStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void WaitForKernelBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// LetNextKernelStart by one thread: what it, and the threads that it met at a barrier, have written
// is there for the next kernel's threads behind SeeKernelBefore, though they have not waited. That
// a start is a message, of which fences make an order, is the GPU's doing, not PTX's promise.
__device__ __forceinline__ void LetNextKernelSee() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  LetNextKernelStart();
}
__device__ __forceinline__ void SeeKernelBefore() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// ---- thread block clusters (compute capability 9.0 and later) ----

// How a thread block cluster's thread blocks wait for each other and write into each other's shared
// memory.
class ClusterExchange {
 public:
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

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_INSTRUCTIONS_CUH_
