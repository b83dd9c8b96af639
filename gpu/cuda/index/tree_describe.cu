// SPDX-License-Identifier: Apache-2.0
//
// Variances along the axes and what the slopes leave of values: of leaves from their tokens, then
// of groups from their leaves, by one kernel. Its rows are tokens that deviate from their leaf's
// means, or leaves' means that deviate from their group's; rows of a part (a leaf or a group)
// follow one another. A row's deviation times the maps (tree_kernels.cuh) is its coordinates and
// the predicted deviation of its value, on tensor cores in tf32.
#include "gpu/cuda/index/index_codes.cuh"
#include "gpu/cuda/index/index_mma.cuh"
#include "gpu/cuda/index/tree_deviations.cuh"
#include "gpu/cuda/index/tree_kernels.cuh"
#include "gpu/cuda/launch.h"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kWarps = 8;
constexpr uint32_t kThreads = kWarps * 32;
constexpr uint32_t kTileRows = 64;  // that are multiplied at once
// A thread block has the parts that begin in so many rows: with the last part's end they are most
// often one tile.
constexpr uint32_t kBlockRows = 56;
constexpr uint32_t kMapRows = 32;      // of the maps in shared memory at a time
constexpr uint32_t kLeftPadding = 4;   // puts eight rows' four columns in 32 banks
constexpr uint32_t kRightPadding = 8;  // and four rows' eight columns

template <typename Shape>
struct Tile {
  static constexpr uint32_t kDim = Shape::kHeadDim, kAll = kPointDim<Shape>;
  static constexpr uint32_t kLeftStride = kDim + kLeftPadding;
  static constexpr uint32_t kRightStride = kAll + kRightPadding;
  static constexpr uint32_t kOutStride = kAll + kLeftPadding;
  // uint32 [kTileRows][kLeftStride], then uint32 [kMapRows][kRightStride]; the product comes where
  // both were.
  static constexpr uint32_t kFactors = kTileRows * kLeftStride + kMapRows * kRightStride;
  static constexpr uint32_t kOut = kTileRows * kOutStride;
  static constexpr uint32_t kSharedBytes =
      (kFactors > kOut ? kFactors : kOut) * static_cast<uint32_t>(sizeof(float));
};

// The leaves of a head, whose rows are tokens.
template <typename Shape>
struct LeafRows {
  using S = Shape;
  const Head& head;
  const TreePlan& plan;

  __device__ __forceinline__ uint32_t rows() const { return plan.base.tokens; }
  __device__ __forceinline__ uint32_t parts() const { return CountOf(head, head.job.tree.leaves); }
  __device__ __forceinline__ uint32_t PartAt(uint32_t row) const {
    return head.At<const uint16_t>(plan.scratch.leaf_of_slot)[row];
  }
  __device__ __forceinline__ uint32_t Start(uint32_t part) const {
    return PartOf<const uint32_t>(head, head.job.tree.leaves.starts)[part] - plan.base.unclustered;
  }
  __device__ __forceinline__ uint32_t Tokens(uint32_t part) const {
    return Start(part + 1) - Start(part);
  }
  // What a row adds for each of its `Weight` tokens.
  __device__ __forceinline__ uint32_t Weight(uint32_t) const { return 1; }
  __device__ __forceinline__ float OwnVariance(uint32_t, uint32_t) const { return 0; }
  __device__ __forceinline__ float OwnRest(uint32_t) const { return 0; }
  __device__ __forceinline__ float* Variances() const {
    return head.At<float>(plan.scratch.variances);
  }
  __device__ __forceinline__ float* Rests() const { return head.At<float>(plan.scratch.rests); }

  // A row's deviation, tf32; one warp.
  __device__ __forceinline__ void StoreKey(uint32_t row, uint32_t* to) const {
    StoreRowDeviations<typename Shape::Element, Shape::kHeadDim / 32, true>(
        OrderedKey(head, plan.base.unclustered + row), Mean(row), to);
  }
  // The square of what the prediction leaves of a row's value, of this lane's channels.
  __device__ __forceinline__ float Rest(uint32_t row, const float* predicted) const {
    constexpr uint32_t kPart = Shape::kValueDim / 32;
    const uint32_t lane = threadIdx.x % 32;
    const float* mean = Mean(row) + Shape::kHeadDim;
    uint32_t pairs[kPart / 2];
    LoadPairs(OrderedValue(head, plan.base.unclustered + row), lane, pairs);
    float sum = 0;
#pragma unroll
    for (uint32_t p = 0; p < kPart / 2; ++p) {
      const uint32_t at = lane * kPart + 2 * p;
      const float2 x = Shape::Element::Unpack(pairs[p]);
      const float low = x.x - mean[at] - predicted[at];
      const float high = x.y - mean[at + 1] - predicted[at + 1];
      sum += low * low + high * high;
    }
    return sum;
  }
  __device__ __forceinline__ const float* Mean(uint32_t row) const {
    return head.At<const float>(plan.scratch.means) + uint64_t{PartAt(row)} * kPointDim<Shape>;
  }
};

// The groups of a head, whose rows are leaves. A group's square along an axis is that of each
// leaf's tokens about the leaf's mean, and that of this mean about the group's; so is the square of
// its rest, as a leaf's rests sum to nothing.
template <typename Shape>
struct GroupRows {
  using S = Shape;
  const Head& head;
  const TreePlan& plan;

  __device__ __forceinline__ uint32_t rows() const { return CountOf(head, head.job.tree.leaves); }
  __device__ __forceinline__ uint32_t parts() const { return CountOf(head, head.job.tree.groups); }
  __device__ __forceinline__ uint32_t PartAt(uint32_t row) const {
    return head.At<const uint16_t>(plan.scratch.group_of_leaf)[row];
  }
  __device__ __forceinline__ uint32_t Start(uint32_t part) const {
    return PartOf<const uint32_t>(head, head.job.tree.groups.first_members)[part];
  }
  __device__ __forceinline__ uint32_t Tokens(uint32_t part) const {
    const auto* starts = PartOf<const uint32_t>(head, head.job.tree.groups.starts);
    return starts[part + 1] - starts[part];
  }
  __device__ __forceinline__ uint32_t Weight(uint32_t row) const {
    const auto* starts = PartOf<const uint32_t>(head, head.job.tree.leaves.starts);
    return starts[row + 1] - starts[row];
  }
  __device__ __forceinline__ float OwnVariance(uint32_t row, uint32_t axis) const {
    return head.At<const float>(plan.scratch.variances)[row * Shape::kHeadDim + axis];
  }
  __device__ __forceinline__ float OwnRest(uint32_t row) const {
    return head.At<const float>(plan.scratch.rests)[row];
  }
  __device__ __forceinline__ float* Variances() const {
    return head.At<float>(plan.scratch.group_variances);
  }
  __device__ __forceinline__ float* Rests() const {
    return head.At<float>(plan.scratch.group_rests);
  }

  __device__ __forceinline__ void StoreKey(uint32_t row, uint32_t* to) const {
    const float* own = Own(row);
    const float* mean = Mean(row);
    for (uint32_t c = threadIdx.x % 32; c < Shape::kHeadDim; c += 32) {
      to[c] = ToTf32(BoundedDeviation(own[c] - mean[c]));
    }
  }
  __device__ __forceinline__ float Rest(uint32_t row, const float* predicted) const {
    const float* own = Own(row) + Shape::kHeadDim;
    const float* mean = Mean(row) + Shape::kHeadDim;
    float sum = 0;
    for (uint32_t c = threadIdx.x % 32; c < Shape::kValueDim; c += 32) {
      const float rest = own[c] - mean[c] - predicted[c];
      sum += rest * rest;
    }
    return sum;
  }
  __device__ __forceinline__ const float* Own(uint32_t row) const {
    return head.At<const float>(plan.scratch.means) + uint64_t{row} * kPointDim<Shape>;
  }
  __device__ __forceinline__ const float* Mean(uint32_t row) const {
    return head.At<const float>(plan.scratch.group_means) +
           uint64_t{PartAt(row)} * kPointDim<Shape>;
  }
};

// The first part that begins at row `row` or later.
template <typename Rows>
__device__ __forceinline__ uint32_t FirstPart(const Rows& rows, uint32_t row) {
  if (row >= rows.rows()) return rows.parts();
  const uint32_t part = rows.PartAt(row);
  return rows.Start(part) == row ? part : part + 1;
}

// This warp's columns of a tile's product with the maps: [kTileRows] by kColumns of them.
template <uint32_t kColumns>
struct Product {
  float d[kTileRows / 16][kColumns / 8][4] = {};

  // left: [kTileRows][left_stride] from the maps' first row on; right: [kMapRows][right_stride]
  // from the first column on.
  __device__ __forceinline__ void Add(const uint32_t* left, uint32_t left_stride,
                                      const uint32_t* right, uint32_t right_stride) {
    const uint32_t g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (uint32_t k = 0; k < kMapRows; k += 8) {
      uint32_t a[kTileRows / 16][4];
#pragma unroll
      for (uint32_t m = 0; m < kTileRows / 16; ++m) {
        const uint32_t* low = left + (m * 16 + g) * left_stride + k + q;
        const uint32_t* high = low + 8 * left_stride;
        a[m][0] = low[0];
        a[m][1] = high[0];
        a[m][2] = low[4];
        a[m][3] = high[4];
      }
#pragma unroll
      for (uint32_t n = 0; n < kColumns / 8; ++n) {
        const uint32_t b0 = right[(k + q) * right_stride + n * 8 + g];
        const uint32_t b1 = right[(k + q + 4) * right_stride + n * 8 + g];
#pragma unroll
        for (uint32_t m = 0; m < kTileRows / 16; ++m) MultiplyAddTf32(d[m][n], a[m], b0, b1);
      }
    }
  }

  // out: [kTileRows][stride] from the first column on.
  __device__ __forceinline__ void Store(float* out, uint32_t stride) const {
    const uint32_t g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (uint32_t m = 0; m < kTileRows / 16; ++m) {
#pragma unroll
      for (uint32_t n = 0; n < kColumns / 8; ++n) {
        float* to = out + (m * 16 + g) * stride + n * 8 + 2 * q;
        *reinterpret_cast<float2*>(to) = float2{d[m][n][0], d[m][n][1]};
        *reinterpret_cast<float2*>(to + 8 * stride) = float2{d[m][n][2], d[m][n][3]};
      }
    }
  }
};

// Multiplies rows [first, end) with the maps; leaves the product in shared memory,
// [kTileRows][kOutStride].
template <typename Rows>
__device__ __forceinline__ void MultiplyTile(const Rows& rows, uint32_t first, uint32_t end,
                                             uint32_t* shared) {
  using Sizes = Tile<typename Rows::S>;
  constexpr uint32_t kColumns = Sizes::kAll / kWarps;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t* right = shared + kTileRows * Sizes::kLeftStride;
  const auto* maps = rows.head.template At<const float>(rows.plan.scratch.maps);
  for (uint32_t r = warp; r < kTileRows; r += kWarps) {
    uint32_t* to = shared + r * Sizes::kLeftStride;
    if (first + r < end) {
      rows.StoreKey(first + r, to);
    } else {
      for (uint32_t c = lane; c < Sizes::kDim; c += 32) to[c] = 0;
    }
  }
  Product<kColumns> product;
  for (uint32_t k = 0; k < Sizes::kDim; k += kMapRows) {
    __syncthreads();  // none still reads the last rows of the maps
    for (uint32_t i = threadIdx.x; i < kMapRows * Sizes::kAll; i += kThreads) {
      const uint32_t row = i / Sizes::kAll, column = i % Sizes::kAll;
      right[row * Sizes::kRightStride + column] = ToTf32(maps[(k + row) * Sizes::kAll + column]);
    }
    __syncthreads();
    product.Add(shared + k, Sizes::kLeftStride, right + warp * kColumns, Sizes::kRightStride);
  }
  __syncthreads();
  product.Store(reinterpret_cast<float*>(shared) + warp * kColumns, Sizes::kOutStride);
  __syncthreads();
}

// Sums of the part that a thread block is in, of this thread's axis or, of one thread, of rests.
struct PartSum {
  double sum = 0;

  // Adds a row; `mean` gets the part's mean square where this is its last row.
  template <typename Rows>
  __device__ __forceinline__ void Add(const Rows& rows, uint32_t row, double square, float* means,
                                      uint32_t stride, uint32_t at) {
    const uint32_t part = rows.PartAt(row);
    sum += rows.Weight(row) * square;
    if (row + 1 != rows.Start(part + 1)) return;
    means[part * stride + at] = static_cast<float>(sum / rows.Tokens(part));
    sum = 0;
  }
};

// Thread block b: the parts of head b / blocks that begin in rows [b % blocks * kBlockRows, +
// kBlockRows). A thread for each axis sums in row order.
template <typename Rows>
__global__ void __launch_bounds__(kThreads)
    RotateKernel(const __grid_constant__ TreePlan plan, uint32_t blocks) {
  using Sizes = Tile<typename Rows::S>;
  extern __shared__ __align__(16) uint32_t shared[];
  __shared__ float rests[kTileRows];
  const Head head(plan.base, blockIdx.x / blocks);
  const Rows rows{head, plan};
  const uint32_t first_row = blockIdx.x % blocks * kBlockRows;
  const uint32_t begin_part = FirstPart(rows, first_row);
  const uint32_t end_part = FirstPart(rows, first_row + kBlockRows);
  if (begin_part == end_part) return;
  const uint32_t begin = rows.Start(begin_part), end = rows.Start(end_part);
  const auto* out = reinterpret_cast<const float*>(shared);
  PartSum squares, rest;
  for (uint32_t first = begin; first < end; first += kTileRows) {
    __syncthreads();  // none still reads the last tile's product
    MultiplyTile(rows, first, end, shared);
    const uint32_t count = min(kTileRows, end - first);
    for (uint32_t r = threadIdx.x / 32; r < count; r += kWarps) {
      const float* predicted = out + r * Sizes::kOutStride + Sizes::kDim;
      const float sum = WarpSum(rows.Rest(first + r, predicted));
      if (threadIdx.x % 32 == 0) rests[r] = sum;
    }
    __syncthreads();
    for (uint32_t r = 0; r < count && threadIdx.x < Sizes::kDim; ++r) {
      const double y = out[r * Sizes::kOutStride + threadIdx.x];
      squares.Add(rows, first + r, rows.OwnVariance(first + r, threadIdx.x) + y * y,
                  rows.Variances(), Sizes::kDim, threadIdx.x);
    }
    for (uint32_t r = 0; r < count && threadIdx.x == kThreads - 1; ++r) {
      const double own = rows.OwnRest(first + r);
      rest.Add(rows, first + r, own + rests[r], rows.Rests(), 1, 0);
    }
  }
}

// Each warp of a thread block: a leaf's or a group's variances in 4 bits and its spread. Head b /
// blocks; `groups` says which of the two.
template <typename Shape>
__global__ void __launch_bounds__(kThreads)
    CodeKernel(const __grid_constant__ TreePlan plan, uint32_t blocks, bool groups) {
  constexpr uint32_t kPart = Shape::kHeadDim / 32;
  const Head head(plan.base, blockIdx.x / blocks);
  const TreePart& part = groups ? head.job.tree.groups : head.job.tree.leaves;
  const uint32_t number = blockIdx.x % blocks * kWarps + threadIdx.x / 32;
  if (number >= CountOf(head, part)) return;
  const auto* variances =
      head.At<const float>(groups ? plan.scratch.group_variances : plan.scratch.variances) +
      uint64_t{number} * Shape::kHeadDim + threadIdx.x % 32 * kPart;
  double deviations[kPart];
#pragma unroll
  for (uint32_t e = 0; e < kPart; ++e) deviations[e] = sqrt(static_cast<double>(variances[e]));
  const double unit = StoreCodes(
      deviations, PartOf<uint8_t>(head, part.deviation_codes) + number * (Shape::kHeadDim / 2));
  if (threadIdx.x % 32 != 0) return;
  const auto* rests = head.At<const float>(groups ? plan.scratch.group_rests : plan.scratch.rests);
  PartOf<float>(head, part.variance_unit)[number] = static_cast<float>(unit * unit);
  PartOf<float>(head, part.spread)[number] =
      static_cast<float>(sqrt(static_cast<double>(rests[number])));
}

template <typename Rows>
cudaError_t Launch(const TreePlan& plan, uint32_t rows, cudaStream_t stream) {
  constexpr uint32_t kSharedBytes = Tile<typename Rows::S>::kSharedBytes;
  const cudaError_t error = AllowShared(RotateKernel<Rows>, kSharedBytes);
  if (error != cudaSuccess) return error;
  const uint32_t blocks = CeilDiv(rows, kBlockRows);
  RotateKernel<Rows><<<plan.base.heads * blocks, kThreads, kSharedBytes, stream>>>(plan, blocks);
  return cudaGetLastError();
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launcher.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchTreeDescribe(const KernelShape& shape, const TreePlan& plan,
                               cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    using Shape = decltype(constant);
    cudaError_t error = Launch<LeafRows<Shape>>(plan, plan.base.tokens, stream);
    if (error != cudaSuccess) return error;
    error = Launch<GroupRows<Shape>>(plan, plan.leaves, stream);
    if (error != cudaSuccess) return error;
    for (const bool groups : {false, true}) {
      const uint32_t blocks = CeilDiv(groups ? plan.base.clusters : plan.leaves, kWarps);
      CodeKernel<Shape><<<plan.base.heads * blocks, kThreads, 0, stream>>>(plan, blocks, groups);
    }
    return cudaGetLastError();
  });
}

}  // namespace attnd::gpu::cuda
