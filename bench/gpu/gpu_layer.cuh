// SPDX-License-Identifier: Apache-2.0
//
// One layer in device memory, as the service would hold it, and what a step over it should answer.
#ifndef ATTND_BENCH_GPU_GPU_LAYER_CUH_
#define ATTND_BENCH_GPU_GPU_LAYER_CUH_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "gpu/cuda/step/place.cuh"
#include "gpu/layout/step_layout.h"
#include "gpu/step/row_description.h"

namespace attnd::gpu {

// Lengths in tokens; dim is of keys and of values.
struct Shape {
  uint32_t rows = 1, tokens = 8192, kv_heads = 8, group = 4, dim = 128, query_tokens = 1, tail = 64;
};
struct Policy {
  const char* name;
  UnitKind kind = UnitKind::kDense;
  CutKind cut = CutKind::kTopK;
  bool second_order = false;
  double exact_share = 0, estimated_share = 0, p1 = 1, p2 = 1;
  double tolerance = std::numeric_limits<double>::infinity(), floor = 0.02;
};

// One segment of one row: an index of clusters of 16 neighbours, and pages.
struct HostSegment {
  uint32_t tokens = 0, unclustered = 0, clusters = 0;
  uint64_t index_head_bytes = 0, pages_head_bytes = 0;
  IndexOffsets offsets = {};
  std::byte* index = nullptr;
  std::byte* pages = nullptr;
};

// Rows of random queries over random keys and values, in segments with clusters of 16 neighbours,
// and a tail. consistent: keys and values lie around centres and the index describes them, so that
// answers can be checked; otherwise the index is random bytes of the right kind, for speed alone.
class Layer {
 public:
  Layer(const Shape& shape, bool consistent);
  ~Layer();

  uint32_t heads() const { return shape_.kv_heads * shape_.group; }

  // Plans the step with the service's StepWriter; the memory that the step takes lives as long as
  // the layer. cooperative_groups: whether they may answer units.
  StepHeader Plan(const Policy& policy, bool cooperative_groups);

  // Compares what the step's kernels left with plain loops and prints the differences. Returns the
  // greatest of an output, relative to its norm, of lse, and a tenth of the predicted error's; more
  // than 1 if more than one unit in 50 read other clusters, infinity if a number is NaN.
  double Reference(const Policy& policy, const StepHeader& step);

 private:
  // Parts of Reference (gpu_layer_reference.cu).
  struct HostCopy;
  class UnitReference;

  template <typename T>
  T* Keep(T* device) {
    memory_.push_back(const_cast<std::remove_const_t<T>*>(device));
    return device;
  }
  uint64_t RowBytes() const { return shape_.dim * 2; }
  uint64_t PageBytes() const { return kPageRows * 2 * RowBytes(); }
  uint64_t BlockHeadBytes() const { return kTailBlockRows / kPageRows * PageBytes(); }

  // One row of the layer; its segments go to `segments`.
  RowDescription Describe(const Policy& policy, uint32_t number,
                          std::vector<SegmentDescription>* segments) const;
  RowMemory MemoryOf(uint32_t number) const;

  void AddSegment(uint32_t tokens, uint32_t unclustered, bool consistent);

  // Moves each group of 16 tokens towards a centre of its own.
  void SmoothClusters(HostSegment* segment);

  uint16_t* Row(std::byte* pages, uint32_t token, bool value) const;

  // Clusters of 16 neighbours; if not consistent, random bytes of the right kind.
  void WriteIndex(const HostSegment& segment, bool consistent);

  void AddTails();

  const Shape shape_;
  std::mt19937 random_;
  std::vector<HostSegment> segments_;
  uint32_t segments_of_row_ = 0;
  std::vector<const std::byte*> blocks_;
  uint32_t blocks_of_row_ = 0;
  std::vector<uint16_t> queries_;
  std::vector<void*> memory_;
};

}  // namespace attnd::gpu

#endif  // ATTND_BENCH_GPU_GPU_LAYER_CUH_
