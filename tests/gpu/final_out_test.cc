// SPDX-License-Identifier: Apache-2.0
//
// Goal: the backend writes a row's out in the caller's dtype, with the bits that the host would
// have rounded it to, or says that it has not. Method: over the fake device the same step with and
// without such a place; prepared and begun; with rows that the CPU answers.
#include "tests/gpu/final_out.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "tests/attention/client_memory.h"
#include "tests/gpu/prepared_steps.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::test::BeginAndRun;
using attention::test::ClientMemory;
using attention::test::PrepareStep;
using attention::test::RunPrepared;
using attention::test::RunStep;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSequence;

constexpr DType kFinalDTypes[] = {DType::kBf16, DType::kFp16};

class FinalOut : public testing::TestWithParam<attention::IndexSet> {};
INSTANTIATE_TEST_SUITE_P(Indexes, FinalOut,
                         testing::Values(attention::kClusterIndexes, attention::kTreeIndexes),
                         [](const auto& c) {
                           return c.param == attention::kTreeIndexes ? "tree" : "clusters";
                         });

// Of every policy, of several query tokens, in waves of their own.
TEST_P(FinalOut, IsRoundedAsTheHostDoes) {
  const FakeBackend fake = MakeFakeBackend();
  TestSequence sequence = MakeHistory(0, GetParam());
  for (const DType dtype : kFinalDTypes) {
    ExpectFinalOut(fake.backend.get(), 1, RowsOfPolicies(&sequence, 1, 5, DType::kFp32), dtype);
  }
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

// Rows with other places for out, or none, are answered beside each other.
TEST_P(FinalOut, RowsMayDiffer) {
  const FakeBackend fake = MakeFakeBackend();
  TestSequence sequence = MakeHistory(0, GetParam());
  std::vector<TestRow> rows = RowsOfPolicies(&sequence, 0, 2, DType::kFp32);
  const StepResult floats = RunStep(fake.backend.get(), 0, rows);
  for (size_t r = 0; r < rows.size(); ++r) {
    if (r % 3 > 0) rows[r].final_dtype = kFinalDTypes[r % 3 - 1];
  }
  const StepResult found = RunStep(fake.backend.get(), 0, rows);
  ASSERT_TRUE(found.status.ok()) << found.status;
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_EQ(found.rows[r].out_is_final, r % 3 > 0) << r;
    if (r % 3 == 0) {
      EXPECT_EQ(found.rows[r].out, floats.rows[r].out) << r;
    } else {
      EXPECT_EQ(found.rows[r].final_out, RoundedTo(rows[r].final_dtype, floats.rows[r].out)) << r;
    }
  }
}

TEST_P(FinalOut, OfStepsThatArePreparedAndHaveBegun) {
  for (const bool begun : {false, true}) {
    SCOPED_TRACE(begun ? "begun" : "prepared");
    LateRows step(GetParam());
    auto& [fake, sequence, late, original] = step;
    std::vector<TestRow> rows = original;
    for (TestRow& row : rows) row.final_dtype = DType::kBf16;
    ClientMemory client(*fake.backend, rows, MessagesOf(rows));
    const auto prepared =
        PrepareStep(fake.backend.get(), 0, rows, begun ? &client.turn() : nullptr);
    ASSERT_NE(prepared, nullptr);
    if (!begun) late.PutBack();
    const StepResult found =
        begun ? BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), MessagesOf(rows), &client)
              : RunPrepared(fake.backend.get(), 0, rows, prepared.get());
    late.PutBack();
    EXPECT_EQ(fake.backend->stats().steps_ahead, 1u);
    for (TestRow& row : rows) row.final_dtype = DType::kFp32;
    ExpectFinalOut(found, RunStep(fake.backend.get(), 0, rows), DType::kBf16);
  }
}

// What was prepared for one dtype is not for another.
TEST_P(FinalOut, AnotherOneIsAnotherStep) {
  LateRows step(GetParam());
  auto& [fake, sequence, late, original] = step;
  late.PutBack();
  std::vector<TestRow> rows = original;
  for (TestRow& row : rows) row.final_dtype = DType::kBf16;
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  for (TestRow& row : rows) row.final_dtype = DType::kFp32;
  const StepResult found = RunPrepared(fake.backend.get(), 0, rows, prepared.get());
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 1u);
  ExpectSameRows(found, RunStep(fake.backend.get(), 0, rows));
}

// The CPU writes floats, and what the device wrote before it failed does not count.
TEST_P(FinalOut, IsNotWrittenByTheCpu) {
  const FakeBackend fake = MakeFakeBackend();
  TestSequence sequence = MakeHistory(0, GetParam());
  std::vector<TestRow> rows = RowsOfPolicies(&sequence, 0, 1, DType::kFp32);
  for (TestRow& row : rows) row.final_dtype = DType::kBf16;
  fake.control->Set({.call = 0});
  const StepResult found = RunStep(fake.backend.get(), 0, rows);
  const StepResult cpu = RunStep(MakeCpu().get(), 0, rows);
  ASSERT_TRUE(found.status.ok()) << found.status;
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_FALSE(found.rows[r].out_is_final);
    EXPECT_EQ(found.rows[r].out, cpu.rows[r].out);
  }
}

// A number of out that is none shows in lse, as nobody looks at out.
TEST_P(FinalOut, WhatIsNoNumberShowsInLse) {
  const FakeBackend fake = MakeFakeBackend();
  TestSequence sequence = MakeHistory(0, GetParam());
  std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  rows[0].final_dtype = DType::kFp16;
  fake.control->Set({.nan_output = true});
  const StepResult found = RunStep(fake.backend.get(), 0, rows);
  ASSERT_TRUE(found.status.ok()) << found.status;
  EXPECT_TRUE(std::isnan(found.rows[0].lse.back()));
}

}  // namespace
}  // namespace attnd::gpu::test
