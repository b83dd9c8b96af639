// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/host_memory.cuh"
#include "gpu/cuda/instructions.cuh"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/step/step_gate.h"
#include "gpu/cuda/step/tree_block.cuh"

namespace attnd::gpu::cuda {
namespace {

constexpr uint32_t kGateThreads = 1024;
constexpr uint32_t kTakenThreads = 256;
// Quads that a thread asks for before it has the first: the way to the host is long.
constexpr uint32_t kAtOnce = 4;
constexpr uint32_t kTokensAtOnce = 8;
constexpr uint32_t kMoveQuads = kMoveBytes / sizeof(uint4);
static_assert(kMovesMax * kMoveQuads <= kGateThreads * kTokensAtOnce);
// Looks at what the host allows, of half a microsecond and the way there each. A host that takes
// longer tells the client itself.
constexpr uint32_t kLooksMax = 64;
// Looks at a near ring, some .7 us each, between two at the host's word.
constexpr uint32_t kNearLooks = 8;

// Copies quads by the whole thread block, kBatch of a thread at a time: all loads before the
// stores.
template <uint32_t kThreads, uint32_t kBatch, typename Load, typename Store>
__device__ __forceinline__ void CopyQuads(uint32_t count, Load load, Store store) {
  for (uint32_t first = threadIdx.x; first < count; first += kThreads * kBatch) {
    uint4 quads[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t at = first + i * kThreads;
      if (at < count) quads[i] = load(at);
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t at = first + i * kThreads;
      if (at < count) store(at, quads[i]);
    }
  }
}

__device__ __forceinline__ void CopyInput(uint4* to, const uint4* from, uint32_t count) {
  CopyQuads<kGateThreads, kAtOnce>(
      count, [&](uint32_t i) { return LoadHost(from + i); },
      [&](uint32_t i, const uint4& quad) { to[i] = quad; });
}

// Finds the places of so many of trees' items, when the input is copied.
__device__ __forceinline__ void PlaceItems(const StepHeader& step, uint32_t items) {
  if (items == 0) return;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < items; i += kGateThreads) PlaceItem(step, i);
}

// By the whole thread block; a barrier is to follow.
template <uint32_t kThreads>
__device__ __forceinline__ void LoadMoves(const StepGate* gate, TokenMove (&moves)[kMovesMax]) {
  for (uint32_t i = threadIdx.x; i < gate->moves_count; i += kThreads) {
    const uint2 move = LoadHost(reinterpret_cast<const uint2*>(gate->moves) + i);
    moves[i] = {move.x, move.y};
  }
}
// Where quad `i` of all moves lies, on one side of its move.
__device__ __forceinline__ uint32_t QuadAt(uint32_t side, uint32_t i) {
  return side * kMoveQuads + i % kMoveQuads;
}

// By one thread. Whether the client has opened the gate.
__device__ __forceinline__ bool AwaitGate(const StepGate* gate, const uint32_t* ring,
                                          uint32_t epoch, bool ring_is_near) {
  while (true) {
    // On its way while the ring is looked at.
    const uint32_t open = PeekHostWord(&gate->open);
    for (uint32_t look = 0; ring_is_near && look < kNearLooks; ++look) {
      if (LoadHostWord(ring) == epoch) return true;
      PauseForNear();
    }
    if (ring != nullptr && LoadHostWord(ring) == epoch) return true;
    if (open != 0) break;
    if (!ring_is_near) PauseForHost();
  }
  LoadHostWord(&gate->open);  // and with it the input
  return false;
}

__global__ void __launch_bounds__(kGateThreads)
    GateKernel(const StepGate* gate, uint4* to, const uint4* from, uint32_t count,
               AnswerPlaces* answer, const __grid_constant__ StepHeader step,
               uint32_t placed_items) {
  __shared__ TokenMove moves[kMovesMax];
  __shared__ uint32_t taken;
  const uint32_t* const ring = gate->ring;
  const uint32_t tokens = ring != nullptr ? gate->moves_count * kMoveQuads : 0;
  const auto* const client = reinterpret_cast<const uint4*>(gate->tokens);
  const AnswerPlaces places = gate->answer;
  const uint32_t epoch = gate->epoch;
  const bool near = ring != nullptr && gate->ring_is_near != 0;
  if (ring != nullptr) {  // all that can be done before
    LoadMoves<kGateThreads>(gate, moves);
    CopyInput(to, from, count);
    PlaceItems(step, placed_items);
  }
  __syncthreads();
  if (threadIdx.x == 0) taken = AwaitGate(gate, ring, epoch, near) ? 1 : 0;
  __syncthreads();
  if (taken == 0) {
    CopyInput(to, from, count);
    PlaceItems(step, placed_items);
    __syncthreads();
    if (threadIdx.x == 0) LetNextKernelSee();
    return;
  }
  // The next kernel looks at the rest of the input meanwhile. By a thread that has no tokens to
  // copy if they are few.
  if (threadIdx.x == kGateThreads - 1) LetNextKernelSee();
  CopyQuads<kGateThreads, kTokensAtOnce>(
      tokens, [&](uint32_t i) { return LoadHost(client + QuadAt(moves[i / kMoveQuads].from, i)); },
      [&](uint32_t i, const uint4& quad) { to[QuadAt(moves[i / kMoveQuads].to, i)] = quad; });
  if (threadIdx.x == 0) *answer = places;
}

__global__ void __launch_bounds__(kTakenThreads)
    TakenKernel(StepGate* gate, uint4* host, const uint4* device, AnswerPlaces* answer) {
  if (answer->taken == 0) return;
  __shared__ TokenMove moves[kMovesMax];
  LoadMoves<kTakenThreads>(gate, moves);
  __syncthreads();
  const auto at = [&](uint32_t i) { return QuadAt(moves[i / kMoveQuads].to, i); };
  CopyQuads<kTakenThreads, kTokensAtOnce>(
      gate->moves_count * kMoveQuads, [&](uint32_t i) { return device[at(i)]; },
      [&](uint32_t i, const uint4& quad) { host[at(i)] = quad; });
  __syncthreads();
  if (threadIdx.x != 0) return;
  FenceForHost();  // what all threads have written: the barrier puts that before
  SetHostWord(&gate->taken, 1);
  if (answer->turn == nullptr) return;
  for (uint32_t look = 0; look < kLooksMax; ++look) {
    if (LoadHostWord(&gate->allowed) != 0) {
      atomicAdd(&answer->allowed, 1u);
      return;
    }
    PauseForHost();
  }
}

}  // namespace

cudaError_t LaunchGate(const StepGate* gate, const GatedInput& input, const StepHeader& step,
                       bool places_items, cudaStream_t stream) {
  if (input.bytes > kGatedInputBytesMax) return cudaErrorInvalidValue;
  const auto count = static_cast<uint32_t>((input.bytes + sizeof(uint4) - 1) / sizeof(uint4));
  return Launch(GateKernel, 1, kGateThreads, 0, stream, gate,
                reinterpret_cast<uint4*>(input.device), reinterpret_cast<const uint4*>(input.host),
                count, input.answer, step, places_items ? step.tree_items : 0);
}

cudaError_t LaunchTaken(StepGate* gate, const GatedInput& input, cudaStream_t stream) {
  return Launch(TakenKernel, 1, kTakenThreads, 0, stream, gate,
                reinterpret_cast<uint4*>(input.host), reinterpret_cast<const uint4*>(input.device),
                input.answer);
}

}  // namespace attnd::gpu::cuda
