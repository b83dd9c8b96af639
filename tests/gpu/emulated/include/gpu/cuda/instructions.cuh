// SPDX-License-Identifier: Apache-2.0
//
// gpu/cuda/instructions.cuh on the emulated device: what its functions do is said there.
#ifndef ATTND_GPU_CUDA_INSTRUCTIONS_CUH_
#define ATTND_GPU_CUDA_INSTRUCTIONS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/dtype.h"
#include "tests/gpu/emulated/grid.h"
#include "tests/gpu/emulated/products.h"

// A pointer here, to the running thread block's memory.
#define block_memory (::attnd::gpu::emulated::running.shared)

namespace attnd::gpu {

// ---- matrix products, by a whole warp ----

template <typename T>
void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated::MultiplyAdd16(std::is_same_v<T, __half> ? DType::kFp16 : DType::kBf16, d, a, {b0, b1});
}
template <bool kSigned>
void MultiplyAddBytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                      uint32_t b1) {
  emulated::MultiplyAddBytes(kSigned, d, {a0, a1, a2, a3}, {b0, b1});
}
inline void LoadMatricesTransposed(uint32_t address, uint32_t (&to)[4]) {
  uint32_t row[4];
  std::memcpy(row, reinterpret_cast<const uint4*>(block_memory + address), sizeof row);
  emulated::TransposeMatrices(row, to);
}

// ---- numbers ----

inline float Exp2(float x) { return std::exp2(x); }
inline float Sqrt(float x) { return std::sqrt(x); }
inline uint32_t PermuteBytes(uint32_t low, uint32_t high, uint32_t selectors) {
  return __byte_perm(low, high, selectors);
}

// ---- copies ----

inline void CopyAsync16(uint32_t to_shared, const std::byte* from) {
  emulated::CopyLater(to_shared, from, 16);
}
inline void CommitCopies() { emulated::CommitCopyGroup(); }
template <int kLeft>
void WaitCopies() {
  emulated::AwaitCopyGroups(kLeft);
}
inline void Prefetch(const std::byte*) {}
inline void AssumeGlobal(const void*) {}

// ---- kernels of a stream: one runs after the other ----

inline void LetNextKernelStart() {}
inline void WaitForKernelBefore() {}
inline void LetNextKernelSee() {}
inline void SeeKernelBefore() {}

// ---- thread block clusters ----

class ClusterExchange {
 public:
  static uint32_t rank() { return emulated::ClusterRank(); }
  static uint32_t blocks() { return emulated::ClusterBlocks(); }
  static void Sync() {
    Arrive();
    Wait();
  }
  static void Arrive() { emulated::ArriveInCluster(); }
  static void Wait() { emulated::AwaitCluster(); }
  static void Write(float4* place, float4 word, uint32_t rank) {
    emulated::StoreInCluster(place, &word, sizeof word, rank);
  }

  class Mailbox {
   public:
    void Init() { emulated::InitByteBarrier(&barrier_); }
    template <typename Word>
    void Send(Word* place, Word word, uint32_t rank) {
      emulated::SendInCluster(place, word, sizeof(Word), &barrier_, rank);
    }
    void Await(uint32_t bytes, uint32_t use) {
      if (threadIdx.x == 0) emulated::ExpectBytes(&barrier_, bytes);
      emulated::AwaitBytes(&barrier_, use);
    }

   private:
    uint64_t barrier_;
  };
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_INSTRUCTIONS_CUH_
