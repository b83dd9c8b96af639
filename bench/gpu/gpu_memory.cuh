// SPDX-License-Identifier: Apache-2.0
//
// Device memory and bf16 for the benchmarks of kernels: every call checked, a failure ends the
// program.
#ifndef ATTND_BENCH_GPU_GPU_MEMORY_CUH_
#define ATTND_BENCH_GPU_GPU_MEMORY_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace attnd::gpu {

inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#define CHECK_CUDA(call) ::attnd::gpu::Check(call, #call)

template <typename T>
T* OnDevice(const std::vector<T>& host) {
  T* device = nullptr;
  CHECK_CUDA(cudaMalloc(&device, std::max<size_t>(16, host.size() * sizeof(T))));
  CHECK_CUDA(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}
template <typename T>
T* NewOnDevice(size_t count) {
  T* device = nullptr;
  CHECK_CUDA(cudaMalloc(&device, std::max<size_t>(16, count * sizeof(T))));
  CHECK_CUDA(cudaMemset(device, 0xFF, std::max<size_t>(16, count * sizeof(T))));  // NaN
  return device;
}
template <typename T>
std::vector<T> ToHost(const T* device, size_t count) {
  std::vector<T> host(count);
  CHECK_CUDA(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

inline uint16_t Bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float FromBf16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace attnd::gpu

#endif  // ATTND_BENCH_GPU_GPU_MEMORY_CUH_
