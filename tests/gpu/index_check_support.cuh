// SPDX-License-Identifier: Apache-2.0
//
// What the check and the benchmark of index builds share: device memory, and a segment's layout as
// attention::IndexLayout and attention::PageGeometry have it, said again.
#ifndef ATTND_TESTS_GPU_INDEX_CHECK_SUPPORT_CUH_
#define ATTND_TESTS_GPU_INDEX_CHECK_SUPPORT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "gpu/cuda/index/index_build.cuh"

namespace attnd::gpu::test {

inline constexpr uint32_t kPageTokens = 16, kTailBlockTokens = 64, kClusterTokens = 16;
inline constexpr uint32_t kIterations = 10;

inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#define CHECK_CUDA(call) ::attnd::gpu::test::Check(call, #call)

// Device memory that frees itself.
class DeviceBytes {
 public:
  explicit DeviceBytes(size_t bytes) : bytes_(bytes) { CHECK_CUDA(cudaMalloc(&data_, bytes)); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { cudaFree(data_); }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t size() const { return bytes_; }
  void Upload(const void* from) {
    CHECK_CUDA(cudaMemcpy(data_, from, bytes_, cudaMemcpyHostToDevice));
  }
  std::vector<std::byte> Download() const {
    std::vector<std::byte> bytes(bytes_);
    CHECK_CUDA(cudaMemcpy(bytes.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return bytes;
  }

 private:
  const size_t bytes_;
  void* data_ = nullptr;
};

struct Layout {
  Layout(const KernelShape& shape, uint32_t tokens, uint32_t unclustered)
      : max_clusters((tokens - unclustered + kClusterTokens - 1) / kClusterTokens),
        key_bytes(shape.head_dim * 2),
        value_bytes(shape.value_dim * 2),
        page_bytes(kPageTokens * (key_bytes + value_bytes)),
        pages_bytes(size_t{(tokens + kPageTokens - 1) / kPageTokens} * page_bytes) {
    const size_t n = max_clusters;
    size_t end = 64;
    const auto place = [&end](size_t bytes) {
      const size_t offset = end;
      end = (end + bytes + 63) / 64 * 64;
      return static_cast<uint32_t>(offset);
    };
    offsets.centroids = place(n * key_bytes);
    offsets.mean_values = place(n * value_bytes);
    offsets.deviation_codes = place(n * shape.head_dim / 2);
    offsets.variance_unit = place(n * 4);
    offsets.log_size = place(n * 4);
    offsets.spread = place(n * 4);
    offsets.value_norm2 = place(n * 4);
    offsets.starts = place((n + 1) * 4);
    offsets.positions = place(tokens * 2);
    head_bytes = end;
  }
  size_t Key(uint32_t place) const {
    return place / kPageTokens * page_bytes + place % kPageTokens * key_bytes;
  }
  size_t Value(uint32_t place) const {
    return place / kPageTokens * page_bytes + kPageTokens * key_bytes +
           place % kPageTokens * value_bytes;
  }

  uint32_t max_clusters;
  size_t key_bytes, value_bytes, page_bytes;
  size_t pages_bytes;  // of one head's payload
  size_t head_bytes = 0;
  IndexOffsets offsets;
};

inline double ToDouble(DType type, uint16_t bits) {
  if (type == DType::kFp16) return __half2float(__half(__half_raw{bits}));
  return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits}));
}

inline uint16_t FromDouble(DType type, double value) {
  if (type == DType::kFp16) {
    return static_cast<__half_raw>(__float2half_rn(static_cast<float>(value))).x;
  }
  return static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(static_cast<float>(value))).x;
}

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_INDEX_CHECK_SUPPORT_CUH_
