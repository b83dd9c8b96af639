// SPDX-License-Identifier: Apache-2.0
//
// CUDA's language on the host, in place of CUDA's own header of this name: sources of kernels,
// compiled as C++ with this header before their first line (as nvcc does with its own), become
// functions that the threads of an emulated launch call (grid.h). A variable in shared memory is a
// static one, of which the checks of memory keep one value for each thread block.
#ifndef ATTND_TESTS_GPU_EMULATED_CUDA_RUNTIME_H_
#define ATTND_TESTS_GPU_EMULATED_CUDA_RUNTIME_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/gpu/emulated/grid.h"

#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __CUDA_ARCH__ 900

// ---- memory, as C++ has it ----

template <typename T>
cudaError_t cudaMalloc(T** memory, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(memory), bytes);
}

// ---- types ----

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned blocks) : x(blocks) {}  // NOLINT(google-explicit-constructor)
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- places ----

inline constexpr auto& threadIdx = attnd::gpu::emulated::running.thread;
inline constexpr auto& blockIdx = attnd::gpu::emulated::running.block;
inline constexpr auto& blockDim = attnd::gpu::emulated::running.block_size;
inline constexpr auto& gridDim = attnd::gpu::emulated::running.grid;

// ---- numbers ----

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using Both = std::common_type_t<A, B>;
  return static_cast<Both>(b) < static_cast<Both>(a) ? static_cast<Both>(b) : static_cast<Both>(a);
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using Both = std::common_type_t<A, B>;
  return static_cast<Both>(a) < static_cast<Both>(b) ? static_cast<Both>(b) : static_cast<Both>(a);
}
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline unsigned long long __float2ull_rn(float x) {
  return static_cast<unsigned long long>(std::nearbyint(static_cast<double>(x)));
}
inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<uint32_t>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<uint32_t>(x)) + 1; }
// A selector's fourth bit repeats the byte's highest bit instead.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selectors) {
  const uint64_t table = uint64_t{high} << 32 | low;
  uint32_t bytes = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> i * 4 & 15;
    uint32_t byte = table >> (selector & 7) * 8 & 0xFF;
    if ((selector & 8) != 0) byte = (byte & 0x80) != 0 ? 0xFF : 0;
    bytes |= byte << i * 8;
  }
  return bytes;
}

// ---- memory ----

template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
// No thread runs between the parts of it, and no part is an access of its own.
template <typename T, typename Change>
__attribute__((no_sanitize("thread"))) T ChangeAtomically(T* at, Change change) {
  attnd::gpu::emulated::BeginAtomic(at, sizeof(T));
  const T was = *at;
  *at = change(was);
  return was;
}
template <typename T, typename By>
T atomicAdd(T* at, By by) {
  return ChangeAtomically(at, [by](T was) { return static_cast<T>(was + static_cast<T>(by)); });
}
template <typename T, typename By>
T atomicOr(T* at, By by) {
  return ChangeAtomically(at, [by](T was) { return static_cast<T>(was | static_cast<T>(by)); });
}
template <typename T>
T atomicCAS(T* at, std::type_identity_t<T> from, std::type_identity_t<T> to) {
  return ChangeAtomically(at, [=](T was) { return was == from ? to : was; });
}
inline size_t __cvta_generic_to_shared(const void* place) {
  return attnd::gpu::emulated::SharedOffset(place);
}

// ---- barriers, and the exchange between the threads of a warp ----

inline void __syncthreads() { attnd::gpu::emulated::SyncBlock(0); }
inline int __syncthreads_and(int x) {
  return attnd::gpu::emulated::SyncBlock(x != 0) == attnd::gpu::emulated::BlockThreads();
}
inline void __threadfence() {}  // one thread of the host runs all
inline void __syncwarp() { attnd::gpu::emulated::SyncWarp(); }

// Of what each lane gives, what `lane` gives.
template <typename T>
T ShuffleFrom(uint32_t mask, T x, uint32_t lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  __builtin_memcpy(&word, &x, sizeof(T));
  word = attnd::gpu::emulated::Shuffle(mask, word, lane % 32);
  __builtin_memcpy(&x, &word, sizeof(T));
  return x;
}
inline uint32_t LaneOfThread() { return threadIdx.x % 32; }
template <typename T>
T __shfl_sync(uint32_t mask, T x, int lane) {
  return ShuffleFrom(mask, x, static_cast<uint32_t>(lane));
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T x, int bits) {
  return ShuffleFrom(mask, x, LaneOfThread() ^ static_cast<uint32_t>(bits));
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T x, uint32_t by) {
  return ShuffleFrom(mask, x, LaneOfThread() - (LaneOfThread() >= by ? by : 0));
}
// Adds up what `of` makes of each lane's word.
template <typename Of>
uint32_t SumOverWarp(uint32_t mask, uint32_t word, Of of) {
  const auto words = attnd::gpu::emulated::WordsOfWarp(mask, word);
  uint32_t sum = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) sum += of(lane, words.words[lane]);
  return sum;
}
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t x) {
  return SumOverWarp(mask, x, [](uint32_t, uint32_t word) { return word; });
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t x) {
  const auto words = attnd::gpu::emulated::WordsOfWarp(mask, x);
  return *std::max_element(std::begin(words.words), std::end(words.words));
}
inline uint32_t __ballot_sync(uint32_t mask, bool x) {
  return SumOverWarp(mask, x, [](uint32_t lane, uint32_t word) { return word << lane; });
}
inline int __any_sync(uint32_t mask, bool x) { return __ballot_sync(mask, x) != 0; }
[[noreturn]] inline void __trap() { attnd::gpu::emulated::Trap(); }

// ---- launches ----

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributeNonPortableClusterSizeAllowed,
};
struct cudaFuncAttributes {
  int ptxVersion;
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributePreferredSharedMemoryCarveout,
};
enum cudaSharedCarveout { cudaSharedmemCarveoutMaxShared = 100 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
    unsigned sharedMemCarveout;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim = 1, blockDim = 1;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute,
                                 int value) {
  return attnd::gpu::emulated::AllowKernel(
      reinterpret_cast<const void*>(kernel),
      attribute == cudaFuncAttributeNonPortableClusterSizeAllowed, static_cast<uint32_t>(value));
}
template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(Parameters...)) {
  *attributes = {.ptxVersion = 90};
  return cudaSuccess;
}
template <typename... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const std::type_identity_t<Parameters>&... args) {
  attnd::gpu::emulated::LaunchShape shape{config->gridDim.x, config->blockDim.x,
                                          static_cast<uint32_t>(config->dynamicSmemBytes)};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      shape.cluster_blocks = attribute.val.clusterDim.x;
    }
  }
  // Each thread has parameters of its own, and its accesses are a kernel's from then on.
  return attnd::gpu::emulated::EnqueueKernel(config->stream, reinterpret_cast<const void*>(kernel),
                                             shape, [=] {
                                               const auto call = kernel;
                                               const std::tuple<Parameters...> own(args...);
                                               attnd::gpu::emulated::BeginThread();
                                               std::apply(call, own);
                                             });
}
// So few that steps of several units have clusters of several sizes; half as many of thread blocks
// with more than half of the shared memory.
template <typename... Parameters>
cudaError_t cudaOccupancyMaxActiveClusters(int* count, void (*)(Parameters...),
                                           const cudaLaunchConfig_t* config) {
  const bool alone = config->dynamicSmemBytes >= attnd::gpu::emulated::kSharedBytesMax / 2;
  *count = static_cast<int>((alone ? 6 : 12) / config->gridDim.x);
  return cudaSuccess;
}

#endif  // ATTND_TESTS_GPU_EMULATED_CUDA_RUNTIME_H_
