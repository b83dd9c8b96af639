// SPDX-License-Identifier: Apache-2.0
//
// What a device does of a step that takes its client's turn (gpu/layout/step_gate.h).
#ifndef ATTND_TESTS_GPU_TURN_REFERENCE_H_
#define ATTND_TESTS_GPU_TURN_REFERENCE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "gpu/device/device.h"

namespace attnd::gpu::test {

// Whether [address, + bytes) is memory of the kind.
struct TurnMemory {
  std::function<bool(const void*address, uint64_t bytes)> mapped, shared, pinned;
};

uint32_t LoadWord(const uint32_t* word);

// Expects that all of the gate's places lie in such memory, and in the step's input.
void ExpectTurn(const StepRun& run, const StepGate& gate, const TurnMemory& memory);
// early_input: what the input was when the step was launched. The input is then that, with the
// client's tokens, which kernels find at `tokens`.
void TakeTokens(const StepRun& run, const std::vector<std::byte>& early_input,
                const std::byte* tokens, StepGate* gate);
// Writes what comes beside out and lse, tells the client if it may, and gives what
// AnswerSignal::answered becomes.
uint32_t TellClient(const StepHeader& header);

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_TURN_REFERENCE_H_
