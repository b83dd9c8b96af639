// SPDX-License-Identifier: Apache-2.0
//
// What layer.cu asks of CUDA that C++ has no words for. The tests have the same in C++
// (tests/python/emulated_layer.cc).
#ifndef ATTND_CLIENT_PYTHON_ATTND_CUDA_LAYER_DEVICE_CUH_
#define ATTND_CLIENT_PYTHON_ATTND_CUDA_LAYER_DEVICE_CUH_

#define ATTND_DEVICE __device__

namespace {
typedef uint4 Quad;
__device__ unsigned Thread() { return threadIdx.x; }
__device__ unsigned Threads() { return blockDim.x; }
__device__ unsigned Block() { return blockIdx.x; }
__device__ unsigned Blocks() { return gridDim.x; }
__device__ void Barrier() { __syncthreads(); }
// Not __threadfence_system(), which also puts all fences into one order and takes longer.
__device__ void FenceSystem() { asm volatile("fence.acq_rel.sys;" : : : "memory"); }
__device__ unsigned AddOne(unsigned* word) { return atomicAdd(word, 1u); }
__device__ unsigned long long Nanos() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ unsigned LoadAcquire(const unsigned* word) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ unsigned long long LoadAcquire(const unsigned long long* word) {
  unsigned long long value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
// Ends when all that the stream had before this kernel has: it may have been launched to begin
// beside that (launch.py).
__device__ void AwaitStream() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}
// Ends after some such time.
__device__ void Pause(unsigned nanos) { __nanosleep(nanos); }
__device__ void StoreRelease(unsigned* word, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
}
// Of what no other write needs to be seen before.
__device__ void StoreRelaxed(unsigned* word, unsigned value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
}
// Of memory that the host writes.
__device__ Quad LoadHost(const Quad* from) {
  Quad value;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}
__device__ unsigned LoadHost(const unsigned* from) {
  unsigned value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

}  // namespace

#endif  // ATTND_CLIENT_PYTHON_ATTND_CUDA_LAYER_DEVICE_CUH_
