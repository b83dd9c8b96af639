// SPDX-License-Identifier: Apache-2.0
//
// Principal axes: the eigenvectors of each head's matrix of moments by Jacobi rotations, one thread
// block for a head. A round rotates head_dim / 2 pairs of rows and columns at once, each row in one
// pair, and head_dim - 1 rounds have every pair once: a sweep. A thread has whole 2 x 2 blocks of
// the matrix, which two pairs' rotations turn into themselves, so that a round reads and writes the
// matrix once.
#include "gpu/cuda/index/tree_kernels.cuh"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kThreads = 1024;
constexpr uint32_t kSweepsMax = 14;  // convergence is quadratic: some eight sweeps do
// Elements of at most this share of the trace count as 0: axes are stored with 8 bits.
constexpr float kNothing = 1e-6f;
constexpr uint32_t kSharedBytesMax = 200 << 10;

template <uint32_t kDim>
struct Places {
  static constexpr uint32_t kMatrixBytes = kDim * kDim * sizeof(float);
  // What is in shared memory; the rest is in scratch memory, which L2 holds.
  static constexpr bool kMatrix = kMatrixBytes <= kSharedBytesMax;
  static constexpr bool kVectors = 2 * kMatrixBytes <= kSharedBytesMax;
  static constexpr uint32_t kSharedBytes = kMatrixBytes * (kMatrix + kVectors);
};

// Rows that are rotated together, and the rotation: (p, q) becomes (c p - s q, s p + c q).
struct Rotation {
  uint32_t p, q;
  float c, s;
};

// Pair i of a round: a tournament's rounds, in which the last row stays and the others move on.
template <uint32_t kDim>
__device__ __forceinline__ void PairOf(uint32_t round, uint32_t i, Rotation* rotation) {
  constexpr uint32_t kMoving = kDim - 1;
  rotation->p = i == 0 ? kMoving : (round + i) % kMoving;
  rotation->q = (round + kMoving - i) % kMoving;
}

// The rotation that makes the pair's element nothing; whether it is anything.
template <uint32_t kDim>
__device__ __forceinline__ bool SetRotation(const float* matrix, Rotation* rotation) {
  const uint32_t p = rotation->p, q = rotation->q;
  const float off = matrix[p * kDim + q];
  rotation->c = 1;
  rotation->s = 0;
  if (!(fabsf(off) > kNothing)) return false;
  const float theta = (matrix[q * kDim + q] - matrix[p * kDim + p]) / (2 * off);
  const float t = copysignf(1 / (fabsf(theta) + sqrtf(theta * theta + 1)), theta);
  rotation->c = rsqrtf(t * t + 1);
  rotation->s = t * rotation->c;
  return true;
}

template <uint32_t kDim>
__device__ __forceinline__ void RotateMatrix(const Rotation* rotations, float* matrix) {
  constexpr uint32_t kPairs = kDim / 2;
  for (uint32_t i = threadIdx.x; i < kPairs * kPairs; i += kThreads) {
    const Rotation rows = rotations[i / kPairs], columns = rotations[i % kPairs];
    float* low = matrix + rows.p * kDim;
    float* high = matrix + rows.q * kDim;
    const float a = low[columns.p], b = low[columns.q];
    const float c = high[columns.p], d = high[columns.q];
    const float low_p = rows.c * a - rows.s * c, high_p = rows.s * a + rows.c * c;
    const float low_q = rows.c * b - rows.s * d, high_q = rows.s * b + rows.c * d;
    const bool diagonal = i / kPairs == i % kPairs && rows.s != 0;
    low[columns.p] = columns.c * low_p - columns.s * low_q;
    low[columns.q] = diagonal ? 0 : columns.s * low_p + columns.c * low_q;
    high[columns.p] = diagonal ? 0 : columns.c * high_p - columns.s * high_q;
    high[columns.q] = columns.s * high_p + columns.c * high_q;
  }
}

template <uint32_t kDim>
__device__ __forceinline__ void RotateVectors(const Rotation* rotations, float* vectors) {
  for (uint32_t i = threadIdx.x; i < kDim / 2 * kDim; i += kThreads) {
    const Rotation rows = rotations[i / kDim];
    if (rows.s == 0) continue;
    float* low = vectors + rows.p * kDim + i % kDim;
    float* high = vectors + rows.q * kDim + i % kDim;
    const float a = *low, b = *high;
    *low = rows.c * a - rows.s * b;
    *high = rows.s * a + rows.c * b;
  }
}

// Rotates until nothing is left off the diagonal; leaves the eigenvectors as rows of `vectors`.
template <uint32_t kDim>
__device__ __forceinline__ void Diagonalise(float* matrix, float* vectors) {
  __shared__ Rotation rotations[kDim / 2];
  for (uint32_t sweep = 0; sweep < kSweepsMax; ++sweep) {
    bool any = false;
    for (uint32_t round = 0; round < kDim - 1; ++round) {
      bool rotates = false;
      if (threadIdx.x < kDim / 2) {
        Rotation rotation;
        PairOf<kDim>(round, threadIdx.x, &rotation);
        rotates = SetRotation<kDim>(matrix, &rotation);
        rotations[threadIdx.x] = rotation;
      }
      if (__syncthreads_or(rotates) == 0) continue;
      any = true;
      RotateMatrix<kDim>(rotations, matrix);
      RotateVectors<kDim>(rotations, vectors);
      __syncthreads();
    }
    if (!any) return;
  }
}

// The moments of keys over their trace, made symmetric; and no rotation yet.
template <uint32_t kDim>
__device__ __forceinline__ void LoadMatrix(const float* moments, uint32_t stride, float* matrix,
                                           float* vectors) {
  __shared__ float trace;
  if (threadIdx.x < 32) {
    float sum = 0;
    for (uint32_t i = threadIdx.x; i < kDim; i += 32) sum += moments[i * stride + i];
    sum = WarpSum(sum);
    if (threadIdx.x == 0) trace = sum;
  }
  __syncthreads();
  const float scale = trace > 0 ? 1 / trace : 0;
  for (uint32_t i = threadIdx.x; i < kDim * kDim; i += kThreads) {
    const uint32_t row = i / kDim, column = i % kDim;
    matrix[i] = (moments[row * stride + column] + moments[column * stride + row]) * (scale / 2);
    vectors[i] = row == column;
  }
  __syncthreads();
}

// Thread block b: head b.
template <typename Shape>
__global__ void __launch_bounds__(kThreads) AxesKernel(const __grid_constant__ TreePlan plan) {
  constexpr uint32_t kDim = Shape::kHeadDim;
  extern __shared__ __align__(16) float shared[];
  const Head head(plan.base, blockIdx.x);
  auto* scratch = head.At<float>(plan.scratch.rotation);
  float* matrix = Places<kDim>::kMatrix ? shared : scratch;
  float* vectors = Places<kDim>::kVectors ? shared + kDim * kDim : scratch + kDim * kDim;
  LoadMatrix<kDim>(head.At<const float>(plan.scratch.moments), kPointDim<Shape>, matrix, vectors);
  Diagonalise<kDim>(matrix, vectors);
  __shared__ uint32_t ranks[kDim];
  __syncthreads();
  if (threadIdx.x < kDim) {
    const float own = matrix[threadIdx.x * (kDim + 1)];
    uint32_t rank = 0;
    for (uint32_t other = 0; other < kDim; ++other) {
      const float value = matrix[other * (kDim + 1)];
      rank += value > own || (value == own && other < threadIdx.x);
    }
    ranks[threadIdx.x] = rank;
  }
  __syncthreads();
  auto* axes = PartOf<uint32_t>(head, head.job.tree.axes);
  for (uint32_t i = threadIdx.x; i < kDim * kDim / 2; i += kThreads) {
    const uint32_t row = i / (kDim / 2), pair = i % (kDim / 2);
    const float* from = vectors + row * kDim + 2 * pair;
    axes[ranks[row] * (kDim / 2) + pair] = Bf16::Pack(from[0], from[1]);
  }
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launcher.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchTreeAxes(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    using Shape = decltype(constant);
    constexpr uint32_t kSharedBytes = Places<Shape::kHeadDim>::kSharedBytes;
    const cudaError_t error = cudaFuncSetAttribute(
        AxesKernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    AxesKernel<Shape><<<plan.base.heads, kThreads, kSharedBytes, stream>>>(plan);
    return cudaGetLastError();
  });
}

}  // namespace attnd::gpu::cuda
