// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of an index build share: sizes, where things lie in scratch memory, and how rows
// are found and read. "Head" is one (job, KV head), numbered job * kv_heads + KV head; "token" here
// counts clustered tokens only, from 0, unless it says otherwise.
//
// Assignment. With the head's mean key m and a centroid m + d, the closest centroid to key k has
// the greatest k.d - (m.d + |d|^2 / 2). Keys enter as they are stored; d is rounded to the dtype
// and the bias (the part in brackets) is computed from the rounded d, so that each token goes to
// the closest of the rounded centroids, whatever m's own rounding.
//
// Scales are powers of two, which no result depends on but for overflow and underflow: d and m are
// kept in units of about the greatest key, and fragments have a further factor.
#ifndef ATTND_GPU_CUDA_INDEX_INDEX_KERNELS_CUH_
#define ATTND_GPU_CUDA_INDEX_INDEX_KERNELS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math_constants.h>

#include "gpu/cuda/index/index_build.cuh"

namespace attnd::gpu::cuda {

__host__ __device__ constexpr uint32_t CeilDiv(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
inline constexpr uint32_t kTileClusters = 64;       // of one buffer of the assignment's ring
inline constexpr uint32_t kMeanChunkTokens = 1024;  // of one thread block, summing keys

struct HeadScale {
  float to_unit;        // key * to_unit is about 1 at most
  float fragment;       // factor of d in fragments
  float from_fragment;  // 1 / fragment
  float bias;           // of scores, relative to (unit m) . (unit d)
};

// Byte offsets inside one head's scratch memory.
struct ScratchLayout {
  uint32_t scale;         // HeadScale
  uint32_t mean;          // float [head_dim], in units
  uint32_t partial_sums;  // double [mean chunk][head_dim]
  uint32_t partial_max;   // float [mean chunk], of absolute values
  // [padded clusters / 8][head_dim / 32][32 lanes][8]: B operands of two m16n8k16 products for each
  // lane; see FragmentOffset.
  uint32_t fragments;
  uint32_t bias;        // float [padded clusters]; minus infinity where there is no cluster
  uint32_t assignment;  // uint16 [tokens] cluster
  uint32_t order;       // uint16 [tokens] tokens by cluster, then by number
  uint32_t starts;      // uint32 [clusters + 1] in order
  uint32_t head_bytes;
};

struct IndexPlan {
  const IndexJob* jobs;  // [heads / kv_heads]
  std::byte* scratch;    // [heads][layout.head_bytes]
  uint32_t heads;
  uint32_t kv_heads;
  uint32_t unclustered;
  uint32_t tokens;  // clustered ones
  uint32_t clusters;
  uint32_t padded_clusters;
  uint32_t mean_chunks;
  uint32_t key_bytes;  // of a row
  uint32_t value_bytes;
  uint32_t page_bytes;
  ScratchLayout layout;
};

inline constexpr uint32_t kElementBytes = 2;
// A plan but for its layout. clusters: the index's, or a tree's groups.
inline IndexPlan PlanWithoutLayout(const KernelShape& shape, const IndexJob& first_job,
                                   const IndexJob* jobs, uint32_t count, std::byte* scratch,
                                   uint32_t clusters) {
  IndexPlan plan = {};
  plan.jobs = jobs;
  plan.scratch = scratch;
  plan.heads = count * first_job.kv_heads;
  plan.kv_heads = first_job.kv_heads;
  plan.unclustered = first_job.unclustered;
  plan.tokens = first_job.tokens - first_job.unclustered;
  plan.clusters = clusters;
  plan.padded_clusters = CeilDiv(plan.clusters, kTileClusters) * kTileClusters;
  plan.mean_chunks = CeilDiv(plan.tokens, kMeanChunkTokens);
  plan.key_bytes = shape.head_dim * kElementBytes;
  plan.value_bytes = shape.value_dim * kElementBytes;
  plan.page_bytes = kIndexPageTokens * (plan.key_bytes + plan.value_bytes);
  return plan;
}

// Launches one after another, until one fails.
class IndexLaunches {
 public:
  // listener: may be null.
  IndexLaunches(IndexLaunchListener* listener, cudaStream_t stream)
      : listener_(listener), stream_(stream) {}
  template <typename Launch>
  void Run(IndexLaunch kind, Launch launch) {
    if (error_ != cudaSuccess) return;
    if (listener_ != nullptr) listener_->Launching(kind, stream_);
    error_ = launch();
  }
  cudaError_t error() const { return error_; }

 private:
  IndexLaunchListener* const listener_;
  const cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

// Launchers, by IndexLaunch; cudaErrorInvalidValue for a shape that they have no kernel for.
cudaError_t LaunchCentre(const KernelShape& shape, const IndexPlan& plan, cudaStream_t stream);
cudaError_t LaunchSeed(const KernelShape& shape, const IndexPlan& plan, cudaStream_t stream);
cudaError_t LaunchAssign(const KernelShape& shape, const IndexPlan& plan, cudaStream_t stream);
// `last`: also writes cluster count and starts of the index, without the empty clusters.
cudaError_t LaunchSort(const IndexPlan& plan, bool last, cudaStream_t stream);
cudaError_t LaunchMove(const KernelShape& shape, const IndexPlan& plan, cudaStream_t stream);
cudaError_t LaunchDescribe(const KernelShape& shape, const IndexPlan& plan, cudaStream_t stream);
cudaError_t LaunchGather(const IndexPlan& plan, cudaStream_t stream);

// ---- Element types: how the kernels convert them. Pairs are 4 bytes, the lower channel first.
// ----

struct Bf16 {
  static constexpr DType kDtype = DType::kBf16;
  static __device__ __forceinline__ float2 Unpack(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
  static __device__ __forceinline__ uint32_t Pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

struct Fp16 {
  static constexpr DType kDtype = DType::kFp16;
  static __device__ __forceinline__ float2 Unpack(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
  static __device__ __forceinline__ uint32_t Pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

// ---- Shapes. ----

template <typename ElementT, uint32_t kHeadDimV, uint32_t kValueDimV>
struct ShapeConstant {
  using Element = ElementT;
  static constexpr uint32_t kHeadDim = kHeadDimV;
  static constexpr uint32_t kValueDim = kValueDimV;
};

template <DType kDtype>
struct ElementFor;
template <>
struct ElementFor<DType::kBf16> {
  using Type = Bf16;
};
template <>
struct ElementFor<DType::kFp16> {
  using Type = Fp16;
};

// Calls use(ShapeConstant) for the shape. cudaErrorInvalidValue if kKernelShapes has it not.
template <typename Use>
cudaError_t DispatchShape(const KernelShape& shape, Use use) {
  cudaError_t error = cudaErrorInvalidValue;
  DispatchListedShape([&](const KernelShape& listed) { return listed == shape; },
                      [&]<typename Listed>(Listed) {
                        using Element = typename ElementFor<Listed::kDtype>::Type;
                        error = use(ShapeConstant<Element, Listed::kHeadDim, Listed::kValueDim>());
                      });
  return error;
}

// ---- Places. ----

// The element of (cluster, channel) in ScratchLayout::fragments. A lane's 8 elements are 8 channels
// of one cluster that follow one another: the order of a product's channels is free, as long as
// keys have the same.
template <uint32_t kDim>
__device__ __forceinline__ uint32_t FragmentOffset(uint32_t cluster, uint32_t channel) {
  const uint32_t lane = cluster % 8 * 4 + channel % 32 / 8;
  return ((cluster / 8 * (kDim / 32) + channel / 32) * 32 + lane) * 8 + channel % 8;
}

// One head: its job and its scratch memory.
struct Head {
  __device__ __forceinline__ Head(const IndexPlan& plan, uint32_t head)
      : plan(plan),
        job(plan.jobs[head / plan.kv_heads]),
        kv_head(head % plan.kv_heads),
        scratch(plan.scratch + uint64_t{head} * plan.layout.head_bytes) {}

  template <typename T>
  __device__ __forceinline__ T* At(uint32_t offset) const {
    return reinterpret_cast<T*>(scratch + offset);
  }
  __device__ __forceinline__ std::byte* Index() const {
    return job.index + kv_head * job.index_head_bytes;
  }
  // The page row of a token of the segment (unclustered ones count).
  __device__ __forceinline__ const std::byte* KeyRow(uint32_t segment_token) const {
    const uint32_t place = job.first_row + segment_token;
    return PageOf(place) + place % kIndexPageTokens * plan.key_bytes;
  }
  __device__ __forceinline__ const std::byte* ValueRow(uint32_t segment_token) const {
    const uint32_t place = job.first_row + segment_token;
    return PageOf(place) + kIndexPageTokens * plan.key_bytes +
           place % kIndexPageTokens * plan.value_bytes;
  }
  __device__ __forceinline__ const std::byte* PageOf(uint32_t place) const {
    return job.tail_blocks[place / kIndexTailBlockTokens] + kv_head * job.tail_block_head_bytes +
           place % kIndexTailBlockTokens / kIndexPageTokens * plan.page_bytes;
  }

  const IndexPlan& plan;
  const IndexJob& job;
  const uint32_t kv_head;
  std::byte* const scratch;
};

// ---- A warp reads rows: lane l has channels [l * 2 kPairs, + 2 kPairs). ----

inline constexpr uint32_t kAllLanes = 0xffffffffu;

template <uint32_t kPairs>
__device__ __forceinline__ void LoadPairs(const std::byte* row, uint32_t lane,
                                          uint32_t (&pairs)[kPairs]) {
  const auto* from = reinterpret_cast<const uint32_t*>(row) + lane * kPairs;
  if constexpr (kPairs == 4) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
    pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
  } else if constexpr (kPairs == 2) {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(from));
    pairs[0] = v.x, pairs[1] = v.y;
  } else {
#pragma unroll
    for (uint32_t p = 0; p < kPairs; ++p) pairs[p] = __ldg(from + p);
  }
}

// Calls use(pairs) for rows [begin, end) in order, and fold() after every 32 of them and at the
// end. row(i) gives row i's address; each lane asks for its own, so that addresses are found in
// parallel, and several rows are on their way at a time.
template <uint32_t kPairs, typename Row, typename Use, typename Fold>
__device__ __forceinline__ void ForRows(uint32_t begin, uint32_t end, Row row, Use use, Fold fold) {
  constexpr uint32_t kInFlight = 8;
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t base = begin; base < end; base += 32) {
    const uint32_t count = min(32u, end - base);
    const auto mine = lane < count ? reinterpret_cast<unsigned long long>(row(base + lane)) : 0ull;
    for (uint32_t i = 0; i < count; i += kInFlight) {
      uint32_t pairs[kInFlight][kPairs];
#pragma unroll
      for (uint32_t f = 0; f < kInFlight; ++f) {
        const auto address = __shfl_sync(kAllLanes, mine, min(i + f, count - 1));
        LoadPairs(reinterpret_cast<const std::byte*>(address), lane, pairs[f]);
      }
#pragma unroll
      for (uint32_t f = 0; f < kInFlight; ++f) {
        if (i + f < count) use(pairs[f]);
      }
    }
    fold();
  }
}

// The number with the greatest score of the four lanes that share a row of a product, the lowest of
// equals.
__device__ __forceinline__ uint32_t BestOfLanes(float score, uint32_t number) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const float other_score = __shfl_xor_sync(kAllLanes, score, step);
    const uint32_t other = __shfl_xor_sync(kAllLanes, number, step);
    if (other_score > score || (other_score == score && other < number)) {
      score = other_score;
      number = other;
    }
  }
  return number;
}

// Every lane gets the result; the same on all lanes, as addition commutes.
template <typename T>
__device__ __forceinline__ T WarpSum(T value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

template <typename T>
__device__ __forceinline__ T WarpMax(T value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value = max(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_INDEX_INDEX_KERNELS_CUH_
