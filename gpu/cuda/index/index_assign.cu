// SPDX-License-Identifier: Apache-2.0
//
// Assignment: each token's closest centroid, on tensor cores. A warp keeps its tokens' rows in
// registers, the centroids pass by through shared memory, and scores go straight into a running
// maximum: they are never stored. Rows are keys, or the points of a tree, which take as many
// channels as keys and values together.
#include <cuda_pipeline_primitives.h>
#include <math_constants.h>

#include "gpu/cuda/index/index_kernels.cuh"
#include "gpu/cuda/index/index_mma.cuh"
#include "gpu/cuda/index/tree_kernels.cuh"
#include "gpu/cuda/launch.h"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kWarps = 8;
constexpr uint32_t kThreads = kWarps * 32;
constexpr uint32_t kBuffers = 3;

// Row tiles: of a warp, each of 16 tokens; a B operand serves all. Columns: of 8 clusters, scored
// together. Rows take kDim / 4 registers of a thread for each row tile and scores 4 of each column,
// so that small heads leave room for two thread blocks: one loads its rows while the other
// computes.
template <uint32_t kDim>
struct Tuning {
  static constexpr uint32_t kRowTiles = kDim <= 256 ? 2 : 1;
  static constexpr uint32_t kColumns = 4;
  static constexpr uint32_t kBlocksPerSm = kDim <= 128 ? 2 : 1;
  static constexpr uint32_t kWarpTokens = kRowTiles * 16;
  static constexpr uint32_t kBlockTokens = kWarps * kWarpTokens;
};

// Where rows are.
struct KeyRows {
  static __device__ __forceinline__ const std::byte* At(const Head& head, uint32_t token) {
    return head.KeyRow(head.plan.unclustered + token);
  }
};
template <uint32_t kDim>
struct PointRows {
  static __device__ __forceinline__ const std::byte* At(const Head& head, uint32_t token) {
    return reinterpret_cast<const std::byte*>(PointsOf(head) + uint64_t{token} * kDim);
  }
};

// A buffer of the pipeline in shared memory.
template <uint32_t kHeadDim>
struct Tile {
  uint4 fragments[kTileClusters / 8][kHeadDim / 32][32];
  float bias[kTileClusters];
};

// A warp's keys as A operands. Lane 4 g + q has channels 32 i + 8 q + [0, 8) of tokens g and g + 8
// of a row tile, as the channels that FragmentOffset gives lane 4 g + q of cluster g.
template <uint32_t kHeadDim, typename Rows>
struct Keys {
  static constexpr uint32_t kRowTiles = Tuning<kHeadDim>::kRowTiles;
  uint32_t a[kRowTiles][kHeadDim / 16][4];

  // Rows beyond the last token repeat it.
  __device__ __forceinline__ void Load(const Head& head, uint32_t first_token) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t r = 0; r < kRowTiles * 2; ++r) {
      const uint32_t token = min(first_token + r * 8 + lane / 4, head.plan.tokens - 1);
      const auto* row = reinterpret_cast<const uint4*>(Rows::At(head, token)) + lane % 4;
#pragma unroll
      for (uint32_t i = 0; i < kHeadDim / 32; ++i) {
        const uint4 v = __ldg(row + i * 4);
        a[r / 2][2 * i][r % 2] = v.x;
        a[r / 2][2 * i][r % 2 + 2] = v.y;
        a[r / 2][2 * i + 1][r % 2] = v.z;
        a[r / 2][2 * i + 1][r % 2 + 2] = v.w;
      }
    }
  }
};

// The best cluster so far of a thread's tokens: rows g + 8 r of its warp.
template <uint32_t kRowTiles>
struct Best {
  float score[kRowTiles * 2];
  uint32_t cluster[kRowTiles * 2];  // without the lane's part of the number

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (uint32_t r = 0; r < kRowTiles * 2; ++r) {
      score[r] = -CUDART_INF_F;
      cluster[r] = 0;
    }
  }
  // Clusters come in ascending order: the lower one keeps a tie.
  __device__ __forceinline__ void Offer(uint32_t r, float s, uint32_t c) {
    if (s > score[r]) {
      score[r] = s;
      cluster[r] = c;
    }
  }
  // The best of the four lanes that share a row.
  __device__ __forceinline__ uint32_t Reduce(uint32_t r) {
    const uint32_t lane = threadIdx.x % 32;
    const float s = score[r];
    // A lane that was offered nothing finite would name a cluster of its own that may not exist.
    const uint32_t c = s == -CUDART_INF_F ? 0 : cluster[r] + lane % 4 * 2;
    return BestOfLanes(s, c);
  }
};

// Starts the copy of tile `number`; all threads, each some of it.
template <uint32_t kHeadDim>
__device__ __forceinline__ void CopyTile(const Head& head, uint32_t number, Tile<kHeadDim>* tile) {
  constexpr uint32_t kPieces = kTileClusters * kHeadDim / 8;
  static_assert(kPieces % kThreads == 0);
  const auto* from = head.At<const uint4>(head.plan.layout.fragments) + number * kPieces;
  auto* to = reinterpret_cast<uint4*>(tile->fragments);
#pragma unroll
  for (uint32_t i = 0; i < kPieces / kThreads; ++i) {
    const uint32_t piece = i * kThreads + threadIdx.x;
    __pipeline_memcpy_async(to + piece, from + piece, sizeof(uint4));
  }
  if (threadIdx.x < kTileClusters / 4) {
    const auto* bias = head.At<const float4>(head.plan.layout.bias) + number * (kTileClusters / 4);
    __pipeline_memcpy_async(reinterpret_cast<float4*>(tile->bias) + threadIdx.x, bias + threadIdx.x,
                            sizeof(float4));
  }
}

// Scores columns [column, + kColumns) of a tile and offers them; `first_cluster` is the first's.
template <typename Shape, typename Rows>
__device__ __forceinline__ void ScoreColumns(const Keys<Shape::kHeadDim, Rows>& keys,
                                             const Tile<Shape::kHeadDim>& tile, uint32_t column,
                                             uint32_t first_cluster,
                                             Best<Tuning<Shape::kHeadDim>::kRowTiles>* best) {
  constexpr uint32_t kColumns = Tuning<Shape::kHeadDim>::kColumns;
  constexpr uint32_t kRowTiles = Tuning<Shape::kHeadDim>::kRowTiles;
  const uint32_t lane = threadIdx.x % 32;
  float scores[kRowTiles][kColumns][4];
#pragma unroll
  for (uint32_t n = 0; n < kColumns; ++n) {
    const auto bias = reinterpret_cast<const float2*>(tile.bias)[(column + n) * 4 + lane % 4];
#pragma unroll
    for (uint32_t m = 0; m < kRowTiles; ++m) {
      scores[m][n][0] = scores[m][n][2] = bias.x;
      scores[m][n][1] = scores[m][n][3] = bias.y;
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < Shape::kHeadDim / 32; ++i) {
    uint4 b[kColumns];
#pragma unroll
    for (uint32_t n = 0; n < kColumns; ++n) b[n] = tile.fragments[column + n][i][lane];
#pragma unroll
    for (uint32_t n = 0; n < kColumns; ++n) {
#pragma unroll
      for (uint32_t m = 0; m < kRowTiles; ++m) {
        MultiplyAdd<typename Shape::Element>(scores[m][n], keys.a[m][2 * i], b[n].x, b[n].y,
                                             scores[m][n]);
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < kColumns; ++n) {
#pragma unroll
      for (uint32_t m = 0; m < kRowTiles; ++m) {
        MultiplyAdd<typename Shape::Element>(scores[m][n], keys.a[m][2 * i + 1], b[n].z, b[n].w,
                                             scores[m][n]);
      }
    }
  }
#pragma unroll
  for (uint32_t n = 0; n < kColumns; ++n) {
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
#pragma unroll
      for (uint32_t r = 0; r < kRowTiles * 2; ++r) {
        best->Offer(r, scores[r / 2][n][r % 2 * 2 + j], first_cluster + n * 8 + j);
      }
    }
  }
}

// -------------------------------------------------------------------------------------------------
// Kernel. Thread block b: tokens [b % tiles * kBlockTokens, + kBlockTokens) of head b / tiles.
// Tuning has kBlockTokens.
// -------------------------------------------------------------------------------------------------

template <typename Shape, typename Rows>
__global__ void __launch_bounds__(kThreads, Tuning<Shape::kHeadDim>::kBlocksPerSm)
    AssignKernel(const __grid_constant__ IndexPlan plan, uint32_t token_tiles) {
  using SharedTile = Tile<Shape::kHeadDim>;
  using Tuned = Tuning<Shape::kHeadDim>;
  constexpr uint32_t kColumns = Tuned::kColumns, kRowTiles = Tuned::kRowTiles;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* buffers = reinterpret_cast<SharedTile*>(shared);  // [kBuffers]

  const Head head(plan, blockIdx.x / token_tiles);
  const uint32_t cluster_tiles = plan.padded_clusters / kTileClusters;
  const uint32_t first_token =
      blockIdx.x % token_tiles * Tuned::kBlockTokens + threadIdx.x / 32 * Tuned::kWarpTokens;
#pragma unroll
  for (uint32_t t = 0; t < kBuffers - 1; ++t) {
    if (t < cluster_tiles) CopyTile(head, t, buffers + t);
    __pipeline_commit();
  }
  Keys<Shape::kHeadDim, Rows> keys;
  keys.Load(head, first_token);
  Best<kRowTiles> best;
  best.Clear();

  for (uint32_t t = 0; t < cluster_tiles; ++t) {
    __pipeline_wait_prior(kBuffers - 2);
    __syncthreads();  // tile t is there for all, and none still reads tile t - 1
    const uint32_t ahead = t + kBuffers - 1;
    if (ahead < cluster_tiles) CopyTile(head, ahead, buffers + ahead % kBuffers);
    __pipeline_commit();
    const SharedTile& tile = buffers[t % kBuffers];
#pragma unroll 1
    for (uint32_t column = 0; column < kTileClusters / 8; column += kColumns) {
      ScoreColumns<Shape, Rows>(keys, tile, column, t * kTileClusters + column * 8, &best);
    }
  }

  const uint32_t lane = threadIdx.x % 32;
  auto* assignment = head.At<uint16_t>(plan.layout.assignment);  // [tokens]
#pragma unroll
  for (uint32_t r = 0; r < kRowTiles * 2; ++r) {
    const uint32_t cluster = best.Reduce(r);
    const uint32_t token = first_token + r * 8 + lane / 4;
    if (lane % 4 == 0 && token < plan.tokens) assignment[token] = static_cast<uint16_t>(cluster);
  }
}

template <typename Shape, typename Rows>
cudaError_t Launch(const IndexPlan& plan, cudaStream_t stream) {
  constexpr uint32_t kSharedBytes = kBuffers * sizeof(Tile<Shape::kHeadDim>);
  const cudaError_t error = AllowShared(AssignKernel<Shape, Rows>, kSharedBytes);
  if (error != cudaSuccess) return error;
  const uint32_t token_tiles = CeilDiv(plan.tokens, Tuning<Shape::kHeadDim>::kBlockTokens);
  AssignKernel<Shape, Rows>
      <<<plan.heads * token_tiles, kThreads, kSharedBytes, stream>>>(plan, token_tiles);
  return cudaGetLastError();
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launcher.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchAssign(const KernelShape& shape, const IndexPlan& plan, cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    // Values' size is none of this kernel's business.
    using Given = decltype(constant);
    return Launch<ShapeConstant<typename Given::Element, Given::kHeadDim, 0>, KeyRows>(plan,
                                                                                       stream);
  });
}

cudaError_t LaunchAssignPoints(const KernelShape& shape, const IndexPlan& plan,
                               cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    constexpr uint32_t kDim = kPointDim<decltype(constant)>;
    return Launch<ShapeConstant<Fp16, kDim, 0>, PointRows<kDim>>(plan, stream);
  });
}

}  // namespace attnd::gpu::cuda
