// SPDX-License-Identifier: Apache-2.0
//
// Goal: a prepared step that begins with a message's tokens, before these are checked and appended,
// answers with the bits of one that does not; and what it has brought counts only once it has been
// answered. Method: over the fake device the sequence's own memory holds rubbish in the tokens'
// places while steps run; or the message does, and the step is given up.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/prepared_step.h"
#include "tests/gpu/agreement.h"
#include "tests/gpu/prepared_steps.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::RowTokens;
using attention::test::BeginAndRun;
using attention::test::MakeRow;
using attention::test::PrepareStep;
using attention::test::RowMessage;
using attention::test::RunPrepared;
using attention::test::RunStep;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSeed;
using attention::test::TestSequence;

// Bit by bit what a step answers that comes after it, and that is right.
void ExpectRight(const FakeBackend& fake, const std::vector<TestRow>& rows,
                 const StepResult& found) {
  const StepResult after = RunStep(fake.backend.get(), 0, rows);
  ExpectSameRows(found, after);
  EXPECT_TRUE(Agree(after, RunStep(MakeCpu().get(), 0, rows), rows));
}

class BegunSteps : public testing::TestWithParam<attention::IndexSet> {};

// Every policy, some of several query tokens, beside rows that append nothing.
TEST_P(BegunSteps, BitsAreThoseOfAStep) {
  const FakeBackend fake = MakeFakeBackend(PreparingOptions());
  TestSequence sequence = MakeHistory(0, GetParam());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    RunStep(fake.backend.get(), layer, {{LastToken(&sequence, "dense", layer)}});
    const TestRow reader = MakeRow(&sequence, Parse("dense"), sequence.spec.tokens() - 3, 2,
                                   /*query_only=*/true, DType::kFp32, layer, TestSeed());
    for (const TestRow& row : RowsOfPolicies(&sequence, layer, 3, DType::kFp32)) {
      const std::vector<TestRow> rows = {row, reader};
      const auto prepared = PrepareStep(fake.backend.get(), layer, rows);
      ASSERT_NE(prepared, nullptr);
      const StepResult found =
          BeginAndRun(fake.backend.get(), layer, rows, prepared.get(), MessagesOf(rows, layer));
      ExpectSameRows(found, RunStep(fake.backend.get(), layer, rows));
    }
  }
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 0u);
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

// The tokens are the message's: the sequence has none of them before the step is answered.
TEST_P(BegunSteps, TokensAreTheMessages) {
  LateRows step(GetParam());
  auto& [fake, sequence, late, rows] = step;
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  const StepResult found =
      BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), MessagesOf(rows));
  late.PutBack();
  EXPECT_EQ(fake.backend->stats().steps_ahead, 1u);
  const uint64_t uploads = fake.control->uploads();
  ExpectRight(fake, rows, found);
  EXPECT_EQ(fake.control->uploads(), uploads) << "the token counts as brought";
}

// Tokens of two blocks: the message has head after head of each token, a page token after token of
// each head.
TEST_P(BegunSteps, ManyTokensComeInTheirOrder) {
  for (const uint32_t tokens : {2u, 5u, 9u}) {
    SCOPED_TRACE(tokens);
    const FakeBackend fake = MakeFakeBackend(PreparingOptions());
    TestSequence sequence = MakeHistory(0, GetParam(), /*tail=*/110);  // two in its last block
    const uint64_t past = sequence.spec.tokens() - tokens;
    const auto row = [&](uint64_t past_tokens, uint32_t query_tokens) {
      return MakeRow(&sequence, Parse("error-target"), past_tokens, query_tokens,
                     /*query_only=*/false, DType::kBf16, 0, TestSeed());
    };
    // The other layer's step brings the blocks, of which this layer's tokens are still missing.
    ASSERT_TRUE(RunStep(fake.backend.get(), 1, {{LastToken(&sequence, "dense", 1)}}).status.ok());
    ASSERT_TRUE(RunStep(fake.backend.get(), 0, {{row(past - 1, 1)}}).status.ok());
    const std::vector<TestRow> rows = {row(past, tokens)};
    const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
    ASSERT_NE(prepared, nullptr);
    const StepResult found =
        BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), MessagesOf(rows));
    ExpectRight(fake, rows, found);
    EXPECT_EQ(fake.backend->stats().steps_ahead, 1u);
  }
}

// Where the device lacks earlier tokens, too, the sequence has them, not the message.
TEST_P(BegunSteps, EarlierTokensAreTheSequences) {
  const FakeBackend fake = MakeFakeBackend(PreparingOptions());
  TestSequence sequence = MakeHistory(0, GetParam());
  TestRow earlier = LastToken(&sequence, "dense");
  earlier.past_tokens -= 3;
  ASSERT_TRUE(RunStep(fake.backend.get(), 0, {{earlier}}).status.ok());
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  const StepResult found =
      BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), MessagesOf(rows));
  ExpectRight(fake, rows, found);
}

// A message that is refused once it is looked at.
TEST_P(BegunSteps, WhatARefusedMessageBroughtIsNotCounted) {
  const FakeBackend fake = MakeFakeBackend(PreparingOptions());
  TestSequence sequence = MakeHistory(0, GetParam());
  Bring(fake, &sequence);
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  std::vector<RowMessage> messages = MessagesOf(rows);
  for (std::vector<std::byte>* bytes : {&messages[0].keys, &messages[0].values}) {
    std::fill(bytes->begin(), bytes->end(), std::byte{0x41});
  }
  auto prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  EXPECT_TRUE(prepared->Begin({{messages[0].tokens()}}));
  prepared.reset();
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 1u);
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
}

INSTANTIATE_TEST_SUITE_P(Indexes, BegunSteps,
                         testing::Values(attention::kClusterIndexes, attention::kTreeIndexes),
                         [](const auto& c) {
                           return c.param == attention::kTreeIndexes ? "tree" : "clusters";
                         });

// What has begun with other queries than those that are asked for has begun for nothing.
TEST(BegunStep, OtherQueriesAreAnswered) {
  const FakeBackend fake = MakeFakeBackend(PreparingOptions());
  TestSequence sequence = MakeHistory(0);
  Bring(fake, &sequence);
  std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  const std::vector<RowMessage> messages = MessagesOf(rows);
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  EXPECT_TRUE(prepared->Begin({{messages[0].tokens()}}));
  EXPECT_TRUE(prepared->HasBegunWith({{messages[0].tokens()}}));
  for (float& x : rows[0].queries) x = -x;
  const StepResult found = RunPrepared(fake.backend.get(), 0, rows, prepared.get());
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 1u);
  ExpectSameRows(found, RunStep(fake.backend.get(), 0, rows));
}

// A caller whose memory others write asks what the step has begun with: any byte tells.
TEST(BegunStep, ItTellsWhatItHasBegunWith) {
  LateRows step(attention::kTreeIndexes);
  auto& [fake, sequence, late, rows] = step;
  std::vector<RowMessage> messages = MessagesOf(rows);
  const auto tokens_of_all = [&] {
    std::vector<RowTokens> tokens;
    for (const RowMessage& message : messages) tokens.push_back(message.tokens());
    return tokens;
  };
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  EXPECT_FALSE(prepared->HasBegunWith(tokens_of_all())) << "it has not begun";
  ASSERT_TRUE(prepared->Begin(tokens_of_all()));
  for (RowMessage& message : messages) {
    for (std::vector<std::byte>* bytes : {&message.queries, &message.keys, &message.values}) {
      if (bytes->empty()) continue;  // of a row that appends none
      for (const size_t at : {size_t{0}, bytes->size() - 1}) {
        (*bytes)[at] ^= std::byte{1};
        EXPECT_FALSE(prepared->HasBegunWith(tokens_of_all()));
        (*bytes)[at] ^= std::byte{1};
      }
    }
  }
  EXPECT_TRUE(prepared->HasBegunWith(tokens_of_all()));
  prepared->GiveUp();
  EXPECT_FALSE(prepared->HasBegunWith(tokens_of_all())) << "it was given up";
  late.PutBack();
}

// Whatever was given up has nothing to begin with, and what is not launched yet begins later.
TEST(BegunStep, ThereMayBeNothingToBegin) {
  const FakeBackend fake = MakeFakeBackend(PreparingOptions());
  TestSequence sequence = MakeHistory(0);
  Bring(fake, &sequence);
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  const std::vector<RowMessage> messages = MessagesOf(rows);
  auto prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  prepared->GiveUp();
  ExpectSameRows(BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), messages),
                 RunStep(fake.backend.get(), 0, rows));
  fake.control->Set({.no_gates = true});
  prepared = PrepareStep(fake.backend.get(), 0, rows);
  ASSERT_NE(prepared, nullptr);
  ExpectSameRows(BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), messages),
                 RunStep(fake.backend.get(), 0, rows));
  EXPECT_EQ(fake.backend->stats().steps_ahead, 0u);
}

}  // namespace
}  // namespace attnd::gpu::test
