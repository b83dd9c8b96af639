// SPDX-License-Identifier: Apache-2.0
//
// Goal: a prepared step that takes a client's tokens by itself, before these are checked and
// appended, answers with the bits of one that does not; what it has brought counts only once it has
// been answered; and the client is told of its answer if, and only if, it is one. Method: over the
// fake device the sequence's own memory holds rubbish in the tokens' places while steps run, and
// the client's once they are taken; or the client's does, and the step is given up.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/prepared_step.h"
#include "tests/attention/client_memory.h"
#include "tests/gpu/agreement.h"
#include "tests/gpu/final_out.h"
#include "tests/gpu/final_row.h"
#include "tests/gpu/prepared_steps.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::RowTokens;
using attention::test::BeginAndRun;
using attention::test::ClientMemory;
using attention::test::MakeRow;
using attention::test::PrepareStep;
using attention::test::RowMessage;
using attention::test::RunPrepared;
using attention::test::RunStep;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSeed;
using attention::test::TestSequence;
using attnd::test::SharedPages;

// Bit by bit what a step answers that comes after it, and that is right.
void ExpectRight(const FakeBackend& fake, const std::vector<TestRow>& rows,
                 const StepResult& found) {
  const StepResult after = RunStep(fake.backend.get(), 0, rows);
  ExpectSameRows(found, after);
  EXPECT_TRUE(Agree(after, RunStep(MakeCpu().get(), 0, rows), rows));
}

// A prepared step that takes its client's turn, and its answer.
StepResult TakeTurn(const FakeBackend& fake, uint32_t layer, const std::vector<TestRow>& rows) {
  const std::vector<RowMessage> messages = MessagesOf(rows, layer);
  ClientMemory client(*fake.backend, rows, messages);
  const auto prepared = PrepareStep(fake.backend.get(), layer, rows, &client.turn());
  if (prepared == nullptr) return {};
  EXPECT_TRUE(prepared->takes_turn());
  return BeginAndRun(fake.backend.get(), layer, rows, prepared.get(), messages, &client);
}

class BegunSteps : public testing::TestWithParam<attention::IndexSet> {};

// Every policy, some of several query tokens, beside rows that append nothing.
TEST_P(BegunSteps, BitsAreThoseOfAStep) {
  const FakeBackend fake = MakePreparingBackend();
  TestSequence sequence = MakeHistory(0, GetParam());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    RunStep(fake.backend.get(), layer, {{LastToken(&sequence, "dense", layer)}});
    const TestRow reader = MakeRow(&sequence, Parse("dense"), sequence.spec.tokens() - 3, 2,
                                   /*query_only=*/true, DType::kFp32, layer, TestSeed());
    for (const TestRow& row : RowsOfPolicies(&sequence, layer, 3, DType::kFp32)) {
      const std::vector<TestRow> rows = {row, reader};
      ExpectSameRows(TakeTurn(fake, layer, rows), RunStep(fake.backend.get(), layer, rows));
    }
  }
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 0u);
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

// The tokens are the message's: the sequence has none of them before the step is answered.
TEST_P(BegunSteps, TokensAreTheMessages) {
  LateRows step(GetParam());
  auto& [fake, sequence, late, rows] = step;
  const StepResult found = TakeTurn(fake, 0, rows);
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
    const FakeBackend fake = MakePreparingBackend();
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
    ExpectRight(fake, rows, TakeTurn(fake, 0, rows));
    EXPECT_EQ(fake.backend->stats().steps_ahead, 1u);
  }
}

// Where the device lacks earlier tokens, too, the sequence has them, not the client: the step
// begins when the host says so.
TEST_P(BegunSteps, EarlierTokensAreTheSequences) {
  const FakeBackend fake = MakePreparingBackend();
  TestSequence sequence = MakeHistory(0, GetParam());
  TestRow earlier = LastToken(&sequence, "dense");
  earlier.past_tokens -= 3;
  ASSERT_TRUE(RunStep(fake.backend.get(), 0, {{earlier}}).status.ok());
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  const std::vector<RowMessage> messages = MessagesOf(rows);
  ClientMemory client(*fake.backend, rows, messages);
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows, &client.turn());
  ASSERT_NE(prepared, nullptr);
  EXPECT_FALSE(prepared->takes_turn());
  ExpectRight(fake, rows,
              BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), messages, &client));
  EXPECT_EQ(fake.control->turns(), 0u);
}

// A message that is refused once it is looked at.
TEST_P(BegunSteps, WhatARefusedMessageBroughtIsNotCounted) {
  const FakeBackend fake = MakePreparingBackend();
  TestSequence sequence = MakeHistory(0, GetParam());
  Bring(fake, &sequence);
  const std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
  std::vector<RowMessage> messages = MessagesOf(rows);
  for (std::vector<std::byte>* bytes : {&messages[0].keys, &messages[0].values}) {
    std::fill(bytes->begin(), bytes->end(), std::byte{0x41});
  }
  ClientMemory client(*fake.backend, rows, messages);
  auto prepared = PrepareStep(fake.backend.get(), 0, rows, &client.turn());
  ASSERT_NE(prepared, nullptr);
  client.Ring();
  EXPECT_TRUE(prepared->HasBegunWith({{messages[0].tokens()}}));
  prepared.reset();
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 1u);
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
}

// The answer goes to the client's own memory, and the client is told; rows of every policy.
TEST_P(BegunSteps, TheClientIsTold) {
  const FakeBackend fake = MakePreparingBackend();
  TestSequence sequence = MakeHistory(0, GetParam());
  RunStep(fake.backend.get(), 1, {{LastToken(&sequence, "dense", 1)}});  // brings the tail
  const std::vector<TestRow> all = RowsOfPolicies(&sequence, 1, 3, DType::kFp32);
  for (size_t first = 0; first < all.size(); ++first) {
    const DType dtype = first % 2 == 0 ? DType::kBf16 : DType::kFp16;
    std::vector<TestRow> rows = {all[first], all[(first + 1) % all.size()]};
    const StepResult floats = RunStep(fake.backend.get(), 1, rows);
    for (TestRow& row : rows) row.final_dtype = dtype;
    const std::vector<RowMessage> messages = MessagesOf(rows, 1);
    ClientMemory client(*fake.backend, rows, messages);
    const auto prepared = PrepareStep(fake.backend.get(), 1, rows, &client.turn());
    ASSERT_NE(prepared, nullptr);
    EXPECT_FALSE(prepared->has_told());
    const StepResult found =
        BeginAndRun(fake.backend.get(), 1, rows, prepared.get(), messages, &client);
    ExpectFinalOut(found, floats, dtype);
    EXPECT_TRUE(prepared->has_told());
    EXPECT_EQ(fake.backend->stats().steps_told, first + 1);
    EXPECT_TRUE(client.told());
    std::vector<float> lse;
    for (const auto& row : found.rows) lse.insert(lse.end(), row.lse.begin(), row.lse.end());
    EXPECT_TRUE(std::equal(lse.begin(), lse.end(), client.lse().begin(), client.lse().end()));
  }
}

// An answer of which the caller wants to tell the client itself.
TEST_P(BegunSteps, TheHostMayTell) {
  FinalRow step(GetParam());
  auto& [fake, sequence, floats, rows, messages, client] = step;
  attention::ClientTurn turn = client.turn();
  turn.answer = nullptr;
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows, &turn);
  ASSERT_NE(prepared, nullptr);
  ASSERT_TRUE(prepared->takes_turn());
  const StepResult found =
      BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), messages, &client);
  ExpectFinalOut(found, RunStep(fake.backend.get(), 0, floats), DType::kBf16);
  EXPECT_FALSE(prepared->has_told());
  EXPECT_TRUE(client.untouched());
  const std::vector<float>& lse = found.rows[0].lse;
  EXPECT_TRUE(std::equal(lse.begin(), lse.end(), client.lse().begin(), client.lse().end()));
  EXPECT_EQ(fake.backend->stats().steps_ahead, 1u);
}

// Not of an answer that is none: the caller refuses the row.
TEST_P(BegunSteps, TheClientIsNotToldOfWhatIsNoNumber) {
  FinalRow step(GetParam());
  auto& [fake, sequence, floats, rows, messages, client] = step;
  fake.control->Set({.nan_output = true});
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows, &client.turn());
  ASSERT_NE(prepared, nullptr);
  const StepResult found =
      BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), messages, &client);
  EXPECT_TRUE(std::isnan(found.rows[0].lse.back()));
  EXPECT_FALSE(prepared->has_told());
  EXPECT_TRUE(client.untouched());
}

INSTANTIATE_TEST_SUITE_P(Indexes, BegunSteps,
                         testing::Values(attention::kClusterIndexes, attention::kTreeIndexes),
                         [](const auto& c) {
                           return c.param == attention::kTreeIndexes ? "tree" : "clusters";
                         });

// What has begun with other queries than those that are asked for has begun for nothing; and so has
// what nobody has asked about.
TEST(BegunStep, OtherQueriesAreAnswered) {
  for (const bool asked : {true, false}) {
    SCOPED_TRACE(asked);
    const FakeBackend fake = MakePreparingBackend();
    TestSequence sequence = MakeHistory(0);
    Bring(fake, &sequence);
    std::vector<TestRow> rows = {LastToken(&sequence, "error-target")};
    const std::vector<RowMessage> messages = MessagesOf(rows);
    ClientMemory client(*fake.backend, rows, messages);
    const auto prepared = PrepareStep(fake.backend.get(), 0, rows, &client.turn());
    ASSERT_NE(prepared, nullptr);
    client.Ring();
    if (asked) {
      EXPECT_TRUE(prepared->HasBegunWith({{messages[0].tokens()}}));
    }
    for (float& x : rows[0].queries) x = -x;
    const StepResult found = RunPrepared(fake.backend.get(), 0, rows, prepared.get());
    EXPECT_EQ(fake.backend->stats().steps_in_vain, 1u);
    ExpectSameRows(found, RunStep(fake.backend.get(), 0, rows));
  }
}

// A failure when the client may have its answer: no other one takes its place. Where it cannot have
// been told, the CPU answers; and a device that was short of memory goes on.
TEST(BegunStep, WhatFailsBehindItsAnswerIsNotAnsweredAgain) {
  using enum absl::StatusCode;
  for (const bool tells : {true, false}) {
    for (const absl::StatusCode failure : {kInternal, kResourceExhausted}) {
      SCOPED_TRACE(testing::Message() << "tells " << tells << ", " << failure);
      FinalRow step;
      auto& [fake, sequence, floats, rows, messages, client] = step;
      attention::ClientTurn turn = client.turn();
      if (!tells) turn.answer = nullptr;
      const auto prepared = PrepareStep(fake.backend.get(), 0, rows, &turn);
      ASSERT_NE(prepared, nullptr);
      fake.control->Set({.behind_answer = failure});
      const StepResult found =
          BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), messages, &client);
      EXPECT_EQ(found.status.code(), tells ? kUnavailable : kOk) << found.status;
      EXPECT_EQ(client.told(), tells);
      EXPECT_EQ(fake.backend->Health().ok(), failure == kResourceExhausted);
      EXPECT_EQ(fake.backend->stats().fallback_steps, tells ? 0u : 1u);
    }
  }
}

// Nor is it told of an answer whose place the caller does not name.
TEST(BegunStep, AnotherPlaceIsAnotherStep) {
  LateRows step(attention::kTreeIndexes);
  auto& [fake, sequence, late, rows] = step;
  late.PutBack();
  std::vector<TestRow> final_rows = rows;
  for (TestRow& row : final_rows) row.final_dtype = DType::kBf16;
  const std::vector<RowMessage> messages = MessagesOf(final_rows);
  ClientMemory client(*fake.backend, final_rows, messages);
  const auto prepared = PrepareStep(fake.backend.get(), 0, final_rows, &client.turn());
  ASSERT_NE(prepared, nullptr);
  client.Ring();
  EXPECT_TRUE(prepared->HasBegunWith(client.tokens()));
  const StepResult found = RunPrepared(fake.backend.get(), 0, final_rows, prepared.get());
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 1u);
  EXPECT_TRUE(client.untouched());
  ExpectFinalOut(found, RunStep(fake.backend.get(), 0, rows), DType::kBf16);
}

// A caller whose memory others write asks what the step has begun with: any byte tells.
TEST(BegunStep, ItTellsWhatItHasBegunWith) {
  LateRows step(attention::kTreeIndexes);
  auto& [fake, sequence, late, rows] = step;
  const std::vector<RowMessage> messages = MessagesOf(rows);
  ClientMemory client(*fake.backend, rows, messages);
  const auto prepared = PrepareStep(fake.backend.get(), 0, rows, &client.turn());
  ASSERT_NE(prepared, nullptr);
  EXPECT_FALSE(prepared->HasBegunWith(client.tokens())) << "nobody has rung";
  client.Ring();
  EXPECT_TRUE(prepared->HasBegunWith(client.tokens()));
  for (const std::span<std::byte> tensor : client.tensors()) {
    for (std::byte* byte : {&tensor.front(), &tensor.back()}) {
      *byte ^= std::byte{1};
      EXPECT_FALSE(prepared->HasBegunWith(client.tokens()));
      *byte ^= std::byte{1};
    }
  }
  EXPECT_TRUE(prepared->HasBegunWith(client.tokens()));
  prepared->GiveUp();
  EXPECT_FALSE(prepared->HasBegunWith(client.tokens())) << "it was given up";
  late.PutBack();
}

// A device that does not take the tokens in time, or at all, is not waited for.
TEST(BegunStep, WhatIsNotTakenIsGivenUp) {
  LateRows step(attention::kTreeIndexes);
  auto& [fake, sequence, late, rows] = step;
  ClientMemory client(*fake.backend, rows, MessagesOf(rows));
  fake.control->Set({.takes_late = true});
  auto prepared = PrepareStep(fake.backend.get(), 0, rows, &client.turn());
  ASSERT_NE(prepared, nullptr);
  client.Ring();
  EXPECT_FALSE(prepared->HasBegunWith(client.tokens()));
  prepared->GiveUp();
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 1u);
  EXPECT_EQ(fake.control->turns(), 1u) << "the device may take them all the same";
  late.PutBack();
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
}

// A client that has not rung when a step is given up finds nothing in its memory.
TEST(BegunStep, WhatIsGivenUpBeforeTheRingTouchesNothing) {
  LateRows step(attention::kTreeIndexes);
  auto& [fake, sequence, late, original] = step;
  std::vector<TestRow> rows = original;
  for (TestRow& row : rows) row.final_dtype = DType::kBf16;
  ClientMemory client(*fake.backend, rows, MessagesOf(rows));
  PrepareStep(fake.backend.get(), 0, rows, &client.turn()).reset();
  EXPECT_EQ(fake.backend->stats().steps_in_vain, 1u);
  EXPECT_EQ(fake.control->turns(), 0u);
  EXPECT_TRUE(client.untouched());
  EXPECT_EQ(*client.out(), std::byte{0});
  for (const float lse : client.lse()) EXPECT_EQ(lse, 0.0f);
  late.PutBack();
}

// Whatever was given up has nothing to begin with, and what is not launched yet begins later; so
// does a step with more tokens than a gate lists.
TEST(BegunStep, ThereMayBeNothingToBegin) {
  FinalRow step;
  auto& [fake, sequence, floats, rows, messages, client] = step;
  auto prepared = PrepareStep(fake.backend.get(), 0, rows, &client.turn());
  ASSERT_NE(prepared, nullptr);
  prepared->GiveUp();
  StepResult found = RunPrepared(fake.backend.get(), 0, rows, prepared.get());
  const StepResult expected = RunStep(fake.backend.get(), 0, rows);
  EXPECT_EQ(found.rows[0].final_out, expected.rows[0].final_out);
  fake.control->Set({.no_gates = true});
  prepared = PrepareStep(fake.backend.get(), 0, rows, &client.turn());
  ASSERT_NE(prepared, nullptr);
  EXPECT_FALSE(prepared->takes_turn());
  found = BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), messages, &client);
  EXPECT_EQ(found.rows[0].final_out, expected.rows[0].final_out)
      << "it is where the caller wants it";
  EXPECT_TRUE(client.untouched());
  EXPECT_EQ(fake.backend->stats().steps_ahead, 0u);
}

TEST(BegunStep, ManyTokensBeginWhenTheHostSaysSo) {
  CudaBackendOptions options = PreparingOptions();
  options.device_memory_bytes *= 4;  // one wave has room for all rows
  const FakeBackend fake = MakeFakeBackend(options, /*maps_host_memory=*/true);
  TestSequence sequence = MakeHistory(0);
  Bring(fake, &sequence);
  const ModelShape& shape = sequence.spec.shape;
  const uint64_t row_bytes =
      uint64_t{shape.query_heads} * shape.head_dim * DTypeBytes(DType::kFp32);
  const size_t count = uint64_t{kMovesMax} * kMoveBytes / row_bytes;
  for (const size_t more : {0, 1}) {
    std::vector<TestRow> rows;
    for (size_t r = 0; r < count + more; ++r) {
      rows.push_back(MakeRow(&sequence, Parse("dense"), sequence.spec.tokens() - 1, 1,
                             /*query_only=*/true, DType::kFp32, 0, TestSeed() + r));
    }
    const std::vector<RowMessage> messages = MessagesOf(rows);
    ClientMemory client(*fake.backend, rows, messages);
    const auto prepared = PrepareStep(fake.backend.get(), 0, rows, &client.turn());
    ASSERT_NE(prepared, nullptr);
    EXPECT_EQ(prepared->takes_turn(), more == 0);
    ExpectSameRows(BeginAndRun(fake.backend.get(), 0, rows, prepared.get(), messages, &client),
                   RunStep(fake.backend.get(), 0, rows));
  }
}

// Tensors so far apart that a gate's numbers cannot say where they are.
TEST(BegunStep, TensorsFarApartBeginWhenTheHostSaysSo) {
  constexpr ptrdiff_t kApart = ptrdiff_t{kMovesEnd} * kMoveBytes;
  LateRows step(attention::kTreeIndexes);
  auto& [fake, sequence, late, rows] = step;
  ClientMemory client(*fake.backend, rows, MessagesOf(rows));
  std::vector<RowTokens> tokens(client.tokens().begin(), client.tokens().end());
  const auto takes_turn = [&, &fake = fake, &rows = rows] {
    attention::ClientTurn turn = client.turn();
    turn.tokens = tokens;
    const auto prepared = PrepareStep(fake.backend.get(), 0, rows, &turn);
    return prepared != nullptr && prepared->takes_turn();
  };
  EXPECT_TRUE(takes_turn());
  tokens.back().values += kApart;
  EXPECT_FALSE(takes_turn());
  late.PutBack();
}

// Memory that a client shares is mapped for as long as somebody holds the mapping; where the device
// cannot, steps are prepared as without a client.
TEST(BegunStep, MemoryIsMappedForTheDevice) {
  constexpr size_t kBytes = 8192;
  const auto memory = SharedPages::FromTheHost(kBytes);
  const FakeBackend fake = MakePreparingBackend();
  auto mapping = fake.backend->MapMemory(memory.get(), kBytes);
  EXPECT_NE(mapping, nullptr);
  EXPECT_EQ(fake.control->mapped_bytes(), kBytes);
  mapping.reset();
  EXPECT_EQ(fake.control->mapped_bytes(), 0u);
  fake.control->Set({.mapping = 0});
  EXPECT_EQ(fake.backend->MapMemory(memory.get(), kBytes), nullptr);
  EXPECT_EQ(MakeFakeBackend(PreparingOptions()).backend->MapMemory(memory.get(), kBytes), nullptr);
  CudaBackendOptions in_turn = PreparingOptions();
  in_turn.launch_ahead = false;
  EXPECT_EQ(MakeFakeBackend(in_turn, true).backend->MapMemory(memory.get(), kBytes), nullptr);
  EXPECT_EQ(MakeCpu()->MapMemory(memory.get(), kBytes), nullptr);
}

}  // namespace
}  // namespace attnd::gpu::test
