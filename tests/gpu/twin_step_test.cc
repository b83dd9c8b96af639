// SPDX-License-Identifier: Apache-2.0
//
// Goal: a step takes its client's turn from a twin of the client's memory on the device, and tells
// of its answer there, with the bits that the client's memory has, too; what the host tells is not
// there. Method: a row in bf16 over the fake device, whose own memory the host cannot touch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/gpu/final_out.h"
#include "tests/gpu/final_row.h"
#include "tests/gpu/prepared_steps.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::test::BeginAndRun;
using attention::test::PrepareStep;
using attention::test::RunStep;
using attention::test::StepResult;

class TwinSteps : public testing::TestWithParam<attention::IndexSet> {};

// A client with a twin rings there, and finds its answer there; what the caller has is the same.
TEST_P(TwinSteps, TheClientIsToldInItsTwin) {
  FinalRow step(GetParam());
  auto& [fake, sequence, floats, rows, messages, client] = step;
  client.MakeTwin(*fake.backend);
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows, &client.turn());
  ASSERT_NE(prepared, nullptr);
  const StepResult found =
      BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), messages, &client);
  ExpectFinalOut(found, RunStep(fake.backend.get(), 0, floats), DType::kBf16);
  EXPECT_TRUE(prepared->has_told());
  EXPECT_TRUE(client.told());
  EXPECT_EQ(fake.control->near_turns(), 1u);
  const std::vector<std::byte>& out = found.rows[0].final_out;
  EXPECT_TRUE(std::equal(out.begin(), out.end(), client.InTwin(client.out())));
  const std::vector<float>& lse = found.rows[0].lse;
  EXPECT_TRUE(std::equal(lse.begin(), lse.end(), client.lse().data()));
  EXPECT_TRUE(std::equal(lse.begin(), lse.end(), client.InTwin(client.lse().data())));
}

// Of an answer that the caller tells, nothing is in the twin.
TEST_P(TwinSteps, WhatTheHostTellsIsNotInTheTwin) {
  FinalRow step(GetParam());
  auto& [fake, sequence, floats, rows, messages, client] = step;
  client.MakeTwin(*fake.backend);
  attention::ClientTurn turn = client.turn();
  turn.answer = nullptr;
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows, &turn);
  ASSERT_NE(prepared, nullptr);
  const StepResult found =
      BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), messages, &client);
  ExpectFinalOut(found, RunStep(fake.backend.get(), 0, floats), DType::kBf16);
  EXPECT_EQ(fake.control->near_turns(), 1u);
  EXPECT_FALSE(prepared->has_told());
  EXPECT_TRUE(client.untouched());
  const size_t bytes = found.rows[0].final_out.size();
  EXPECT_EQ(
      std::count(client.InTwin(client.out()), client.InTwin(client.out()) + bytes, std::byte{0}),
      static_cast<ptrdiff_t>(bytes));
}

// A client that has a twin, and rings without it, is not heard: the step is given up, and another
// one answers.
TEST_P(TwinSteps, ARingBesideTheTwinBeginsNothing) {
  FinalRow step(GetParam());
  auto& [fake, sequence, floats, rows, messages, client] = step;
  client.MakeTwin(*fake.backend);
  auto prepared = PrepareStep(fake.backend.get(), 0, rows, &client.turn());
  ASSERT_NE(prepared, nullptr);
  client.RingInMemoryAlone();
  EXPECT_FALSE(prepared->HasBegunWith({{messages[0].tokens()}}));
  prepared.reset();
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 1u);
  ExpectFinalOut(RunStep(fake.backend.get(), 0, rows), RunStep(fake.backend.get(), 0, floats),
                 DType::kBf16);
  EXPECT_TRUE(client.untouched());
}

INSTANTIATE_TEST_SUITE_P(Indexes, TwinSteps,
                         testing::Values(attention::kClusterIndexes, attention::kTreeIndexes),
                         [](const auto& c) { return c.index == 0 ? "Clusters" : "Tree"; });

// Memory of the device is the client's for as long as somebody holds it.
TEST(TwinStep, MemoryOfTheDeviceIsShared) {
  constexpr uint64_t kBytes = 2 * kSharedDeviceUnitBytes;
  const FakeBackend fake = MakePreparingBackend();
  auto shared = fake.backend->ShareMemory(kBytes);
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_TRUE(shared->descriptor.valid());
  EXPECT_EQ(fake.control->shared_bytes(), kBytes);
  shared->memory.reset();
  EXPECT_EQ(fake.control->shared_bytes(), 0u);
  EXPECT_EQ(fake.backend->sharing_device(), kFakeUuid);
  fake.control->Set({.no_sharing = true});
  EXPECT_TRUE(absl::IsResourceExhausted(fake.backend->ShareMemory(kBytes).status()));
  CudaBackendOptions in_turn = PreparingOptions();
  in_turn.launch_ahead = false;
  const FakeBackend never_ahead = MakeFakeBackend(in_turn, true);
  EXPECT_EQ(never_ahead.backend->sharing_device(), "");
  EXPECT_TRUE(absl::IsUnimplemented(never_ahead.backend->ShareMemory(kBytes).status()));
  EXPECT_TRUE(absl::IsUnimplemented(MakeCpu()->ShareMemory(kBytes).status()));
}

}  // namespace
}  // namespace attnd::gpu::test
