// SPDX-License-Identifier: Apache-2.0
//
// Principal axes: the eigenvectors of each head's matrix of moments by Jacobi rotations. A round
// rotates head_dim / 2 pairs of rows and columns at once, each row in one pair, and head_dim - 1
// rounds have every pair once: a sweep. A thread has whole 2 x 2 blocks of the matrix, which two
// pairs' rotations turn into themselves, so that a round reads and writes the matrix once. One
// thread block for a head diagonalises and writes the rotations down; several then apply them to
// the eigenvectors, each to some channels of all, as channels do not mix.
#include "gpu/cuda/index/tree_kernels.cuh"
#include "gpu/cuda/launch.h"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kThreads = 1024;
constexpr uint32_t kVectorThreads = 256;  // of a thread block that applies rotations
// Elements of at most this share of the trace count as 0: axes are stored with 8 bits.
constexpr float kNothing = 1e-6f;
constexpr uint32_t kSharedBytesMax = 200 << 10;

// A matrix is in shared memory if it fits, else in scratch memory, which L2 holds.
template <uint32_t kDim>
inline constexpr bool kFits = sizeof(float[kDim][kDim]) <= kSharedBytesMax;

// Rows that are rotated together, and the rotation: (p, q) becomes (c p - s q, s p + c q).
struct Rotation {
  uint32_t p, q;
  float c, s;
};

// Pair i of a round: a tournament's rounds, in which the last row stays and the others move on.
template <uint32_t kDim>
__device__ __forceinline__ Rotation RotationOf(uint32_t round, uint32_t i, float s) {
  constexpr uint32_t kMoving = kDim - 1;
  return {i == 0 ? kMoving : (round + i) % kMoving, (round + kMoving - i) % kMoving,
          sqrtf(1 - s * s), s};
}

// The sine of the rotation that makes the pair's element nothing; 0 if it is nothing.
template <uint32_t kDim>
__device__ __forceinline__ float SineOf(const float* matrix, uint32_t p, uint32_t q) {
  const float off = matrix[p * kDim + q];
  if (!(fabsf(off) > kNothing)) return 0;
  const float theta = (matrix[q * kDim + q] - matrix[p * kDim + p]) / (2 * off);
  const float t = copysignf(1 / (fabsf(theta) + sqrtf(theta * theta + 1)), theta);
  return t * rsqrtf(t * t + 1);
}

// Where a head's scratch words are.
template <uint32_t kDim>
struct Words {
  __device__ __forceinline__ Words(const Head& head, const TreePlan& plan)
      : matrix(head.At<float>(plan.scratch.rotations)),
        sines(matrix + kDim * kDim),
        rounds(reinterpret_cast<uint32_t*>(sines + RoundsMax(kDim) * (kDim / 2))),
        count(rounds + RoundsMax(kDim)),
        ranks(count + 1) {}

  float* matrix;     // [kDim][kDim], of heads whose matrix does not fit shared memory
  float* sines;      // [rounds that rotate][kDim / 2] of pairs
  uint32_t* rounds;  // their numbers in their sweeps
  uint32_t* count;
  uint32_t* ranks;  // [kDim] of eigenvalues, the greatest first
};

template <uint32_t kDim>
__device__ __forceinline__ void RotateMatrix(const Rotation* rotations, float* matrix) {
  constexpr uint32_t kPairs = kDim / 2;
  for (uint32_t i = threadIdx.x; i < kPairs * kPairs; i += kThreads) {
    const Rotation rows = rotations[i / kPairs], columns = rotations[i % kPairs];
    if (rows.s == 0 && columns.s == 0) continue;
    float* low = matrix + rows.p * kDim;
    float* high = matrix + rows.q * kDim;
    const float a = low[columns.p], b = low[columns.q];
    const float c = high[columns.p], d = high[columns.q];
    const float low_p = rows.c * a - rows.s * c, high_p = rows.s * a + rows.c * c;
    const float low_q = rows.c * b - rows.s * d, high_q = rows.s * b + rows.c * d;
    const bool diagonal = i / kPairs == i % kPairs;
    low[columns.p] = columns.c * low_p - columns.s * low_q;
    low[columns.q] = diagonal ? 0 : columns.s * low_p + columns.c * low_q;
    high[columns.p] = diagonal ? 0 : columns.c * high_p - columns.s * high_q;
    high[columns.q] = columns.s * high_p + columns.c * high_q;
  }
}

// Rotates until nothing is left off the diagonal, and writes the rotations down.
template <uint32_t kDim>
__device__ __forceinline__ void Diagonalise(float* matrix, const Words<kDim>& words) {
  __shared__ Rotation rotations[kDim / 2];
  uint32_t count = 0;
  for (uint32_t sweep = 0; sweep < kSweepsMax; ++sweep) {
    const uint32_t before = count;
    for (uint32_t round = 0; round < kDim - 1; ++round) {
      float sine = 0;
      if (threadIdx.x < kDim / 2) {
        Rotation rotation = RotationOf<kDim>(round, threadIdx.x, 0);
        sine = SineOf<kDim>(matrix, rotation.p, rotation.q);
        rotations[threadIdx.x] = RotationOf<kDim>(round, threadIdx.x, sine);
      }
      if (__syncthreads_or(sine != 0) == 0) continue;
      if (threadIdx.x < kDim / 2) words.sines[count * (kDim / 2) + threadIdx.x] = sine;
      if (threadIdx.x == 0) words.rounds[count] = round;
      ++count;
      RotateMatrix<kDim>(rotations, matrix);
      __syncthreads();
    }
    if (count == before) break;
  }
  if (threadIdx.x == 0) *words.count = count;
}

// The moments of keys over their trace, made symmetric.
template <uint32_t kDim>
__device__ __forceinline__ void LoadMatrix(const float* moments, uint32_t stride, float* matrix) {
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
  }
  __syncthreads();
}

// Thread block b: head b.
template <typename Shape>
__global__ void __launch_bounds__(kThreads)
    DiagonaliseKernel(const __grid_constant__ TreePlan plan) {
  constexpr uint32_t kDim = Shape::kHeadDim;
  extern __shared__ __align__(16) float shared[];
  const Head head(plan.base, blockIdx.x);
  const Words<kDim> words(head, plan);
  float* matrix = kFits<kDim> ? shared : words.matrix;
  LoadMatrix<kDim>(head.At<const float>(plan.scratch.moments), kPointDim<Shape>, matrix);
  Diagonalise<kDim>(matrix, words);
  __syncthreads();
  if (threadIdx.x >= kDim) return;
  const float own = matrix[threadIdx.x * (kDim + 1)];
  uint32_t rank = 0;
  for (uint32_t other = 0; other < kDim; ++other) {
    const float value = matrix[other * (kDim + 1)];
    rank += value > own || (value == own && other < threadIdx.x);
  }
  words.ranks[threadIdx.x] = rank;
}

// Thread block b: channels [b % blocks * 32, + 32) of the axes of head b / blocks; a lane each.
template <typename Shape>
__global__ void __launch_bounds__(kVectorThreads)
    VectorKernel(const __grid_constant__ TreePlan plan) {
  constexpr uint32_t kDim = Shape::kHeadDim, kPairs = kDim / 2, kBlocks = kDim / 32;
  static_assert(kPairs <= kVectorThreads);
  __shared__ float vectors[kDim][32];
  __shared__ Rotation rotations[2][kPairs];
  const Head head(plan.base, blockIdx.x / kBlocks);
  const Words<kDim> words(head, plan);
  const uint32_t lane = threadIdx.x % 32, first = blockIdx.x % kBlocks * 32;
  const uint32_t count = *words.count;
  for (uint32_t row = threadIdx.x / 32; row < kDim; row += kVectorThreads / 32) {
    vectors[row][lane] = row == first + lane;
  }
  // The next round's rotations are on their way while this one's are applied; as there are two
  // buffers, each round waits for the others' threads once.
  const bool loads = threadIdx.x < kPairs;
  const auto load = [&](uint32_t i, uint32_t* round) {
    *round = words.rounds[i];
    return words.sines[i * kPairs + threadIdx.x];
  };
  uint32_t round = 0;
  float sine = loads && count > 0 ? load(0, &round) : 0;
  for (uint32_t i = 0; i < count; ++i) {
    Rotation* own = rotations[i % 2];
    if (loads) own[threadIdx.x] = RotationOf<kDim>(round, threadIdx.x, sine);
    __syncthreads();
    if (loads && i + 1 < count) sine = load(i + 1, &round);
    for (uint32_t pair = threadIdx.x / 32; pair < kPairs; pair += kVectorThreads / 32) {
      const Rotation rows = own[pair];
      if (rows.s == 0) continue;
      const float a = vectors[rows.p][lane], b = vectors[rows.q][lane];
      vectors[rows.p][lane] = rows.c * a - rows.s * b;
      vectors[rows.q][lane] = rows.s * a + rows.c * b;
    }
  }
  __syncthreads();
  auto* axes = PartOf<uint32_t>(head, head.job.tree.axes);
  for (uint32_t i = threadIdx.x; i < kDim * 16; i += kVectorThreads) {
    const uint32_t row = i / 16, pair = i % 16;
    const float* from = vectors[row] + 2 * pair;
    axes[words.ranks[row] * kPairs + first / 2 + pair] = Bf16::Pack(from[0], from[1]);
  }
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Launcher.
// -------------------------------------------------------------------------------------------------

cudaError_t LaunchTreeAxes(const KernelShape& shape, const TreePlan& plan, cudaStream_t stream) {
  return DispatchShape(shape, [&](auto constant) {
    using Shape = decltype(constant);
    constexpr uint32_t kDim = Shape::kHeadDim;
    constexpr uint32_t kSharedBytes = kFits<kDim> ? kDim * kDim * sizeof(float) : 0;
    const cudaError_t error = AllowShared(DiagonaliseKernel<Shape>, kSharedBytes);
    if (error != cudaSuccess) return error;
    DiagonaliseKernel<Shape><<<plan.base.heads, kThreads, kSharedBytes, stream>>>(plan);
    VectorKernel<Shape><<<plan.base.heads*(kDim / 32), kVectorThreads, 0, stream>>>(plan);
    return cudaGetLastError();
  });
}

}  // namespace attnd::gpu::cuda
