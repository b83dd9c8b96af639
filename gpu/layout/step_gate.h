// SPDX-License-Identifier: Apache-2.0
//
// StepGate: what a step that waits for its queries looks at, and where it finds them.
#ifndef ATTND_GPU_LAYOUT_STEP_GATE_H_
#define ATTND_GPU_LAYOUT_STEP_GATE_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

// Tokens go from a client's memory to a step's input in moves of this many bytes: rows of all
// KernelShapes are whole numbers of them, and memory that clients share is aligned so.
inline constexpr uint32_t kMoveBytes = 64;
// 128 KiB of queries, keys and values. A step with more begins when the host says so.
inline constexpr uint32_t kMovesMax = 2048;

// Above both numbers of every move: so a kernel numbers words of 16 bytes in 32 bits.
inline constexpr uint32_t kMovesEnd = 1u << 30;

// In units of kMoveBytes: of StepGate::tokens, of the input.
struct TokenMove {
  uint32_t from;
  uint32_t to;
};

// In pinned memory, one a stream. Two may open it, whoever comes first:
//
//   the host    sets `open`: the input is whole, and the device reads all of it
//   a client    sets the word at `ring` to `epoch`: the rest of the input was whole before the
//               launch, and the device takes the tokens from the client's memory. It leaves a copy
//               of what it has taken in the host's input, and sets `taken`. Once the host has
//               looked at that copy, it may set `allowed`. Word and tokens lie in the host's
//               memory, or, if the ring is near, in the device's.
//
// A step that both open may go either way; the host then asks for no answer of it.
struct StepGate {
  // Each of these lines is written by one side, while the step is under way.
  alignas(128) uint32_t open;
  alignas(128) uint32_t taken;
  alignas(128) uint32_t allowed;
  // What follows is written before the launch.
  alignas(128) const uint32_t* ring;  // null: no client opens it, and what follows says nothing
  const std::byte* tokens;
  uint32_t epoch;
  uint32_t moves_count;
  uint32_t ring_is_near;  // 1: it lies in the device's memory
  AnswerPlaces answer;    // what the input's become: taken is 1
  alignas(128) TokenMove moves[kMovesMax];
};
static_assert(std::is_trivially_copyable_v<StepGate> && offsetof(StepGate, moves) == 512);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_LAYOUT_STEP_GATE_H_
