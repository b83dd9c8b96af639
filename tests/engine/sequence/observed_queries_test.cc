// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a prompt's last queries are for reaches the steps: keep-sets follow forks, truncations
// and prompts beyond memory, wrong queries are refused, and what is kept of queries is counted.
// Method: an engine with a data folder beside plain models of every sequence; counts of a row's
// statistics say what was read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>

#include "tests/engine/sequence/token_order_fixture.h"

namespace attnd::engine::test {
namespace {

using attention::IndexKind;
using testing::HasSubstr;

class ObservedQueriesTest : public TokenOrderTest {
 protected:
  absl::Status Observe(const TestSequence& sequence, uint32_t layer, uint64_t tokens = 8) {
    const Numbers q =
        RandomNumbers(DType::kFp32, tokens * shape_.query_heads * shape_.head_dim, &random_);
    ObservedChunk chunk;
    chunk.layer = layer;
    chunk.tokens = tokens;
    chunk.heads = shape_.query_heads;
    chunk.head_dim = shape_.head_dim;
    chunk.queries = q.view();
    return engine_->Observe(kTenant, kWriter, sequence.id, chunk);
  }
  absl::Status Finish(const TestSequence& sequence) {
    return engine_->FinishPrefill(kTenant, kWriter, sequence.id, nullptr).status();
  }
};

TEST_F(ObservedQueriesTest, SnapKvKeepsWhatThePromptsEndLookedAt) {
  const uint64_t before = engine_->usage().resident_bytes;
  for (const char* preset : {"snapkv", "ada-snapkv"}) {
    const attention::Policy policy = PolicyOf(preset, {{"budget", "40"}});
    TestSequence sequence = Open(policy);
    Prefill(&sequence, 1500, &random_);
    const absl::Status missing = Finish(sequence);
    EXPECT_TRUE(absl::IsFailedPrecondition(missing)) << missing;
    EXPECT_THAT(std::string(missing.message()), HasSubstr("observed_queries"));
    const Answer early = SendRow(QueryRow(&sequence, policy), 0);
    EXPECT_TRUE(absl::IsFailedPrecondition(early.row_status(0))) << early.row_status(0);

    ASSERT_TRUE(Observe(sequence, 0).ok());
    EXPECT_TRUE(absl::IsFailedPrecondition(Finish(sequence))) << "of one layer only";
    ASSERT_TRUE(Observe(sequence, 1).ok());
    ASSERT_TRUE(Finish(sequence).ok());
    const uint64_t segmented = sequence.Info().segmented_tokens;
    ASSERT_GT(segmented, 512u);
    const Answer answer = SendRow(QueryRow(&sequence, policy), 0);
    ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
    EXPECT_EQ(answer.result.rows[0].stats.exact_tokens, 2 * 40u);
    EXPECT_EQ(answer.result.rows[0].stats.dropped_tokens, 2 * (segmented - 4 - 40));
    EXPECT_FALSE(answer.result.rows[0].stats.covered_mass.has_value());
    // Other parameters have no keep-set; other policies need none.
    EXPECT_TRUE(absl::IsFailedPrecondition(
        SendRow(QueryRow(&sequence, PolicyOf(preset, {{"budget", "41"}})), 0).row_status(0)));
    EXPECT_TRUE(MatchesModel(&sequence, &random_));

    // A fork has it, too; tokens behind a truncation are new ones, and read.
    const auto fork = engine_->Fork(kTenant, sequence.id, std::nullopt);
    ASSERT_TRUE(fork.ok());
    TestSequence child(engine_.get(), fork->id, shape_);
    child.history = sequence.history;
    EXPECT_TRUE(SendRow(QueryRow(&child, policy), 0).row_status(0).ok());
    ASSERT_TRUE(engine_->Truncate(kTenant, child.id, 700).ok());
    child.history.Truncate(700);
    Prefill(&child, 800, &random_);
    ASSERT_TRUE(Finish(child).ok());
    const Answer later = SendRow(QueryRow(&child, policy), 0);
    ASSERT_TRUE(later.row_status(0).ok()) << later.row_status(0);
    EXPECT_GE(later.result.rows[0].stats.exact_tokens, 2 * (child.Info().segmented_tokens - 700));
    EXPECT_TRUE(MatchesModel(&child, &random_));
    ASSERT_TRUE(engine_->Close(kTenant, child.id).ok());
    ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  }
  EXPECT_EQ(engine_->usage().resident_bytes, before) << "nothing of keep-sets is left";
}

// A keep-set is chosen from what lies in segments at the prompt's end. The prompt's window, and all
// of a prompt that is no longer than that, is read when segments have grown over it, too.
TEST_F(ObservedQueriesTest, WhatNoKeepSetWasChosenFromIsRead) {
  for (const char* preset : {"snapkv", "ada-snapkv"}) {
    for (const uint64_t prompt : {60u, 1500u}) {
      SCOPED_TRACE(testing::Message() << preset << ", a prompt of " << prompt);
      const attention::Policy policy = PolicyOf(preset, {{"budget", "40"}});
      TestSequence sequence = Open(policy);
      Prefill(&sequence, prompt, &random_);
      ASSERT_TRUE(Observe(sequence, 0).ok());
      ASSERT_TRUE(Observe(sequence, 1).ok());
      ASSERT_TRUE(Finish(sequence).ok());
      const uint64_t ranked = sequence.Info().segmented_tokens;
      ASSERT_EQ(ranked == 0, prompt == 60);
      Prefill(&sequence, 1400, &random_);
      ASSERT_TRUE(Finish(sequence).ok());
      const uint64_t segmented = sequence.Info().segmented_tokens;
      ASSERT_GT(segmented, prompt);
      const Answer answer = SendRow(QueryRow(&sequence, policy), 0);
      ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
      const uint64_t kept = ranked == 0 ? 0 : 40, sink = 4;
      const uint64_t unranked = segmented - std::max(ranked, sink);
      EXPECT_EQ(answer.result.rows[0].stats.exact_tokens, 2 * (kept + unranked));
      EXPECT_EQ(answer.result.rows[0].stats.dropped_tokens, ranked == 0 ? 0 : 2 * (ranked - 44));
    }
  }
}

// A truncation that comes while a keep-set is being chosen, which takes a while with so many
// queries: the tokens that take the old ones' places are new ones, and read.
TEST_F(ObservedQueriesTest, AKeepSetForgetsWhatIsTruncatedMeanwhile) {
  const attention::Policy policy = PolicyOf("snapkv", {{"budget", "40"}});
  TestSequence sequence = Open(policy);
  Prefill(&sequence, 6000, &random_);
  ASSERT_TRUE(Observe(sequence, 0, 256).ok());
  ASSERT_TRUE(Observe(sequence, 1, 256).ok());
  std::thread finishing([&] { EXPECT_TRUE(Finish(sequence).ok()); });
  while (sequence.Info().segmented_tokens < 5500) std::this_thread::yield();
  EXPECT_TRUE(engine_->Truncate(kTenant, sequence.id, 300).ok());
  finishing.join();
  sequence.history.Truncate(300);
  Prefill(&sequence, 1200, &random_);
  ASSERT_TRUE(Finish(sequence).ok());
  ASSERT_GT(sequence.Info().segmented_tokens, 1000u);
  const Answer answer = SendRow(QueryRow(&sequence, policy), 0);
  ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
  EXPECT_EQ(answer.result.rows[0].stats.dropped_tokens, 0u);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

TEST_F(ObservedQueriesTest, ObservedQueriesAreChecked) {
  TestSequence sequence = Open(PolicyOf("snapkv"));
  Prefill(&sequence, 100, &random_);
  EXPECT_TRUE(absl::IsInvalidArgument(Observe(sequence, 2)));
  EXPECT_TRUE(absl::IsInvalidArgument(Observe(sequence, 0, 257)));
  Numbers q = RandomNumbers(DType::kFp32, shape_.query_heads * shape_.head_dim, &random_);
  ObservedChunk chunk;
  chunk.tokens = 1;
  chunk.heads = shape_.query_heads;
  chunk.head_dim = shape_.head_dim;
  q.Set(3, std::numeric_limits<float>::quiet_NaN());
  chunk.queries = q.view();
  EXPECT_TRUE(absl::IsInvalidArgument(engine_->Observe(kTenant, kWriter, sequence.id, chunk)));
  q.Set(3, 1e30f);
  chunk.queries = q.view();
  EXPECT_TRUE(absl::IsOutOfRange(engine_->Observe(kTenant, kWriter, sequence.id, chunk)));
  q.Set(3, 1);
  chunk.queries = q.view();
  chunk.heads = 1;
  EXPECT_TRUE(absl::IsInvalidArgument(engine_->Observe(kTenant, kWriter, sequence.id, chunk)));
  EXPECT_TRUE(absl::IsNotFound(engine_->Observe("another", kWriter, sequence.id, chunk)));
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

// The queries, and where there are labels their magnitudes, with a view's copy.
TEST_F(ObservedQueriesTest, ObservedQueriesHoldTheirBytes) {
  for (const char* preset : {"snapkv", "double-sparsity"}) {
    TestSequence sequence = Open(PolicyOf(preset));
    const uint64_t before = engine_->usage().resident_bytes;
    ASSERT_TRUE(Observe(sequence, 0, 8).ok());
    const uint64_t queries = uint64_t{8} * shape_.query_heads * shape_.head_dim * sizeof(float);
    const uint64_t magnitudes =
        uint64_t{shape_.layers} * shape_.kv_heads * shape_.head_dim * sizeof(float);
    const bool labels = sequence.Info().args.indexes->Has(IndexKind::kLabels);
    EXPECT_EQ(labels, std::string(preset) == "double-sparsity");
    EXPECT_EQ(engine_->usage().resident_bytes - before, queries + (labels ? 2 * magnitudes : 0));
  }
}

TEST_F(ObservedQueriesTest, APromptBeyondMemoryIsObservedFromDisk) {
  Start(6 * kMiB);
  const attention::Policy policy = PolicyOf("snapkv", {{"budget", "40"}});
  TestSequence sequence = Open(policy);
  constexpr uint64_t kTokens = 24000;  // 6 MB of payload
  for (uint64_t done = 0; done < kTokens; done += 250) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Kv kv = RandomKv(shape_, 250, &random_);
      AppendChunk chunk = ChunkOf(layer, done, kv);
      chunk.may_wait = true;
      ASSERT_TRUE(engine_->Append(kTenant, kWriter, sequence.id, chunk).ok());
      sequence.history.Append(layer, kv);
    }
  }
  ASSERT_TRUE(Observe(sequence, 0, 2).ok());
  ASSERT_TRUE(Observe(sequence, 1, 2).ok());
  const absl::Status finished = Finish(sequence);
  ASSERT_TRUE(finished.ok()) << finished;
  EXPECT_GT(engine_->archive_stats().paged_out_segments, 0u);
  const Answer answer = SendRow(QueryRow(&sequence, policy), 0);
  ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
  EXPECT_EQ(answer.result.rows[0].stats.exact_tokens, 2 * 40u);
}

}  // namespace
}  // namespace attnd::engine::test
