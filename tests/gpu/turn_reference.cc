// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/turn_reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "common/dtype.h"

namespace attnd::gpu::test {
namespace {

uint64_t LanesOf(const StepHeader& header) {
  return uint64_t{header.query_tokens} * header.kv_heads * header.group;
}
uint64_t OutBytes(const StepHeader& header) {
  return LanesOf(header) * header.value_dim * DTypeBytes(static_cast<DType>(header.out_dtype));
}

}  // namespace

uint32_t LoadWord(const uint32_t* word) {
  return std::atomic_ref(*const_cast<uint32_t*>(word)).load(std::memory_order_acquire);
}

void ExpectTurn(const StepRun& run, const StepGate& gate, const TurnMemory& memory) {
  EXPECT_LE(gate.ring_is_near, 1u);
  const auto& clients = gate.ring_is_near != 0 ? memory.shared : memory.mapped;
  EXPECT_TRUE(clients(gate.ring, sizeof(*gate.ring)));
  for (uint32_t i = 0; i < gate.moves_count; ++i) {
    EXPECT_TRUE(clients(gate.tokens + uint64_t{gate.moves[i].from} * kMoveBytes, kMoveBytes));
    EXPECT_LE((uint64_t{gate.moves[i].to} + 1) * kMoveBytes, run.input_bytes);
  }
  const AnswerPlaces& answer = gate.answer;
  EXPECT_EQ(answer.taken, 1u);
  EXPECT_EQ(answer.allowed, 0u);
  const uint64_t lanes = LanesOf(run.header);
  const uint64_t out_bytes = OutBytes(run.header);
  EXPECT_TRUE(memory.mapped(answer.out, out_bytes) || memory.pinned(answer.out, out_bytes));
  EXPECT_TRUE(answer.lse == nullptr || memory.mapped(answer.lse, lanes * sizeof(float)));
  EXPECT_TRUE(answer.turn == nullptr || clients(answer.turn, sizeof(uint64_t)));
  const bool in_twin = gate.ring_is_near != 0 && answer.turn != nullptr;
  EXPECT_EQ(answer.twin_out != nullptr, in_twin);
  EXPECT_EQ(answer.twin_lse != nullptr, in_twin && answer.lse != nullptr);
  EXPECT_TRUE(answer.twin_out == nullptr || memory.shared(answer.twin_out, out_bytes));
  EXPECT_TRUE(answer.twin_lse == nullptr || memory.shared(answer.twin_lse, lanes * sizeof(float)));
}

void TakeTokens(const StepRun& run, const std::vector<std::byte>& early_input,
                const std::byte* tokens, StepGate* gate) {
  std::copy(early_input.begin(), early_input.end(), run.input);
  for (uint32_t i = 0; i < gate->moves_count; ++i) {
    std::memcpy(run.input + uint64_t{gate->moves[i].to} * kMoveBytes,
                tokens + uint64_t{gate->moves[i].from} * kMoveBytes, kMoveBytes);
  }
  gate->taken = 1;
}

uint32_t TellClient(const StepHeader& header) {
  const AnswerPlaces& places = *header.answer;
  const uint64_t lanes = LanesOf(header);
  if (places.lse != nullptr) std::copy_n(header.lse, lanes, places.lse);
  if (places.twin_out != nullptr) std::memcpy(places.twin_out, places.out, OutBytes(header));
  if (places.twin_lse != nullptr) std::copy_n(header.lse, lanes, places.twin_lse);
  const bool flawless =
      std::all_of(header.lse, header.lse + lanes, [](float lse) { return std::isfinite(lse); });
  if (places.turn == nullptr || places.allowed == 0 || !flawless) return kAnswered;
  std::atomic_ref(*places.turn).store(places.epoch, std::memory_order_release);
  return kAnsweredAndTold;
}

}  // namespace attnd::gpu::test
