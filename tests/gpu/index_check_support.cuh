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
// Tokens of a cluster, and of a tree's group; 0: no tree.
struct RowTokens {
  uint32_t cluster = kClusterTokens;
  uint32_t group = 0;
};
inline constexpr RowTokens kTreeTokens = {8, 64};
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

// Gives parts of an index their places.
class PartPlacer {
 public:
  uint32_t Place(size_t bytes) {
    const size_t offset = end_;
    end_ = (end_ + bytes + 63) / 64 * 64;
    return static_cast<uint32_t>(offset);
  }
  size_t end() const { return end_; }

 private:
  size_t end_ = 64;  // behind the numbers of clusters and groups
};

inline TreePart PlaceTreePart(const KernelShape& shape, size_t n, PartPlacer* placer) {
  TreePart part = {};
  part.centroids = placer->Place(n * shape.head_dim);
  part.centroid_scales = placer->Place(n * 4);
  part.mean_values = placer->Place(n * shape.value_dim);
  part.mean_value_scales = placer->Place(n * 4);
  part.deviation_codes = placer->Place(n * shape.head_dim / 2);
  part.variance_unit = placer->Place(n * 4);
  part.log_size = placer->Place(n * 4);
  part.spread = placer->Place(n * 4);
  part.value_norm2 = placer->Place(n * 4);
  part.starts = placer->Place((n + 1) * 4);
  return part;
}

struct Layout {
  Layout(const KernelShape& shape, uint32_t tokens, uint32_t unclustered, RowTokens each = {})
      : key_bytes(shape.head_dim * 2),
        value_bytes(shape.value_dim * 2),
        page_bytes(kPageTokens * (key_bytes + value_bytes)),
        pages_bytes(size_t{(tokens + kPageTokens - 1) / kPageTokens} * page_bytes),
        tokens(tokens) {
    max_clusters = (tokens - unclustered + each.cluster - 1) / each.cluster;
    if (each.group != 0) {
      max_groups = (tokens - unclustered + each.group - 1) / each.group;
      PlaceTree(shape, tokens);
    } else {
      PlaceClusters(shape, tokens);
    }
  }
  void PlaceClusters(const KernelShape& shape, uint32_t tokens) {
    const size_t n = max_clusters;
    PartPlacer placer;
    offsets.centroids = placer.Place(n * key_bytes);
    offsets.mean_values = placer.Place(n * value_bytes);
    offsets.deviation_codes = placer.Place(n * shape.head_dim / 2);
    offsets.variance_unit = placer.Place(n * 4);
    offsets.log_size = placer.Place(n * 4);
    offsets.spread = placer.Place(n * 4);
    offsets.value_norm2 = placer.Place(n * 4);
    offsets.starts = placer.Place((n + 1) * 4);
    offsets.positions = placer.Place(tokens * 2);
    head_bytes = placer.end();
  }
  void PlaceTree(const KernelShape& shape, uint32_t tokens) {
    PartPlacer placer;
    tree.leaves = PlaceTreePart(shape, max_clusters, &placer);
    tree.positions = offsets.positions = placer.Place(tokens * 2);
    tree.axes = placer.Place(size_t{2} * shape.head_dim * shape.head_dim);
    tree.slopes = placer.Place(size_t{2} * shape.head_dim * shape.value_dim);
    tree.key_base = placer.Place(shape.head_dim * 4);
    tree.value_base = placer.Place(shape.value_dim * 4);
    tree.groups = PlaceTreePart(shape, max_groups, &placer);
    tree.groups.first_members = placer.Place((max_groups + 1) * 4);
    tree.groups.count = 4;
    head_bytes = placer.end();
  }
  IndexSizes sizes() const { return {tokens, max_clusters, max_groups}; }
  size_t Key(uint32_t place) const {
    return place / kPageTokens * page_bytes + place % kPageTokens * key_bytes;
  }
  size_t Value(uint32_t place) const {
    return place / kPageTokens * page_bytes + kPageTokens * key_bytes +
           place % kPageTokens * value_bytes;
  }

  uint32_t max_clusters = 0;  // of a tree: leaves
  uint32_t max_groups = 0;    // of a tree alone
  size_t key_bytes, value_bytes, page_bytes;
  size_t pages_bytes;  // of one head's payload
  uint32_t tokens;
  size_t head_bytes = 0;
  IndexOffsets offsets = {};
  TreeOffsets tree = {};
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
