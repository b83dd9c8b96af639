// SPDX-License-Identifier: Apache-2.0
//
// Goal: sequences in token order live as those in cluster order do (built, forked, cut short,
// sealed, resumed, shared), and policies are refused on sequences that lack what they read. Method:
// an engine with a data folder beside plain models of every sequence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/sequence/token_order_fixture.h"

namespace attnd::engine::test {
namespace {

using attention::IndexKind;
using attention::IndexSet;
using testing::HasSubstr;

std::vector<attention::Policy> TokenPolicies() {
  return {PolicyOf("quest", {{"budget", "64"}}),
          PolicyOf("double-sparsity", {{"budget", "64"}}),
          PolicyOf("twilight", {{"budget", "30%"}}),
          PolicyOf("twilight", {{"selector", "exhaustive"}, {"budget", "90"}, {"p", "0.8"}}),
          PolicyOf("twilight", {{"selector", "asynctls"}, {"blocks", "4"}, {"p", "0.8"}}),
          PolicyOf("asynctls", {{"blocks", "4"}, {"budget", "64"}})};
}
constexpr IndexSet kAll = {IndexKind::kBlocks16, IndexKind::kBlocks64, IndexKind::kLabels,
                           IndexKind::kKeys4};

TEST_F(TokenOrderTest, ASequenceGetsTheIndexesThatItsPolicyNeeds) {
  for (const attention::Policy& policy : TokenPolicies()) {
    const TestSequence sequence = Open(policy);
    EXPECT_EQ(sequence.Info().args.indexes, policy.Indexes()) << policy.preset;
  }
  EXPECT_EQ(Open(PolicyOf("dense")).Info().args.indexes, attention::kClusterIndexes);
  EXPECT_EQ(Open(PolicyOf("double-p")).Info().args.indexes, attention::kClusterIndexes);
  EXPECT_EQ(Open(PolicyOf("snapkv")).Info().args.indexes, IndexSet());
}

TEST_F(TokenOrderTest, WhatDoesNotFitIsRefused) {
  const auto wrong = TryOpen(PolicyOf("quest"), attention::kClusterIndexes).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(wrong));
  EXPECT_THAT(std::string(wrong.message()), HasSubstr("blocks-16"));
  const auto both =
      TryOpen(PolicyOf("dense"), IndexSet{IndexKind::kClusters, IndexKind::kBlocks16}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(both));
  const auto layers = TryOpen(PolicyOf("streaming", {{"dense_layers", "3"}})).status();
  EXPECT_TRUE(absl::IsInvalidArgument(layers));
  EXPECT_THAT(std::string(layers.message()), HasSubstr("dense_layers"));

  // A row's policy too, before anything is appended.
  TestSequence clusters = OpenPrompt(PolicyOf("error-target"));
  for (const attention::Policy& policy : TokenPolicies()) {
    Row row = NextRow(&clusters, 0, 1, &random_);
    row.policy = policy;
    const Answer answer = SendRow(row, 0);
    EXPECT_TRUE(absl::IsFailedPrecondition(answer.row_status(0))) << policy.preset;
    EXPECT_THAT(std::string(answer.row_status(0).message()),
                HasSubstr(policy.Indexes().ToString()));
  }
  EXPECT_TRUE(MatchesModel(&clusters, &random_));
  TestSequence tokens = OpenPrompt(PolicyOf("quest"));
  const Answer answer = SendRow(QueryRow(&tokens, PolicyOf("double-p")), 0);
  EXPECT_THAT(std::string(answer.row_status(0).message()), HasSubstr("cluster order"));
}

TEST_F(TokenOrderTest, HistoriesAreThoseOfTheModel) {
  TestSequence sequence = OpenPrompt(PolicyOf("quest"), 1500, kAll);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
  Generate(&sequence, 5, &random_);
  for (const attention::Policy& policy : TokenPolicies()) {
    const Answer answer = SendRow(QueryRow(&sequence, policy), 0);
    ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
    const attention::RowStats& stats = answer.result.rows[0].stats;
    EXPECT_GT(stats.exact_tokens, 0u);
    EXPECT_GT(stats.dropped_tokens, 0u);
  }
  const auto fork = engine_->Fork(kTenant, sequence.id, 1200);
  ASSERT_TRUE(fork.ok());
  TestSequence child(engine_.get(), fork->id, shape_);
  child.history = sequence.history;
  child.history.Truncate(1200);
  EXPECT_EQ(child.Info().args.indexes, kAll);
  EXPECT_TRUE(MatchesModel(&child, &random_));
  ASSERT_TRUE(engine_->Truncate(kTenant, sequence.id, 700).ok());
  sequence.history.Truncate(700);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
  Generate(&sequence, 700, &random_);  // a further segment
  engine_->WaitForBackground();
  EXPECT_GT(sequence.Info().segmented_tokens, 700u);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

class ResumedTokenOrderTest : public TokenOrderTest {
 protected:
  // Seals and resumes a sequence with these indexes: the policies' answers are the same, bit for
  // bit.
  void CheckResumed(const IndexSet& indexes, const std::vector<attention::Policy>& policies) {
    TestSequence sequence = OpenPrompt(PolicyOf("dense"), 1500, indexes);
    std::vector<std::pair<attention::Policy, Numbers>> asked;
    std::vector<RowAnswer> answers;
    const auto ask = [&](TestSequence* of, const attention::Policy& policy, const Numbers& q) {
      Row row = QueryRow(of, policy);
      row.q = q;
      const Message message(0, {row});
      const Answer answer = Send(engine_.get(), message);
      EXPECT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
      return AnswerOf(message, answer, 0);
    };
    for (const attention::Policy& policy : policies) {
      asked.emplace_back(policy, QueryRow(&sequence, policy).q);
      answers.push_back(ask(&sequence, policy, asked.back().second));
    }
    const auto sealed = engine_->Seal(kTenant, sequence.id, nullptr);
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    const History history = sequence.history;
    Start(256 * kMiB);
    OpenArgs args = ArgsOf(shape_);
    args.fingerprint = "model";
    OpenArgs others = args;
    others.indexes = IndexSet{IndexKind::kRegression};
    EXPECT_TRUE(absl::IsFailedPrecondition(
        engine_->Resume(kTenant, others, sealed->sealed_id, nullptr).status()));
    const auto opened = engine_->Resume(kTenant, args, sealed->sealed_id, nullptr);
    ASSERT_TRUE(opened.ok()) << opened.status();
    TestSequence resumed(engine_.get(), opened->sequence_id, shape_);
    resumed.history = history;
    EXPECT_EQ(resumed.Info().args.indexes, indexes);
    for (size_t i = 0; i < asked.size(); ++i) {
      EXPECT_EQ(ask(&resumed, asked[i].first, asked[i].second), answers[i])
          << asked[i].first.preset << ": the same bits, from disk";
    }
    EXPECT_TRUE(MatchesModel(&resumed, &random_));
    Generate(&resumed, 3, &random_);
  }
};

TEST_F(ResumedTokenOrderTest, SealedAndResumedItAnswersTheSame) {
  CheckResumed(kAll, TokenPolicies());
}

// The same of tokens that lie in cluster order, from pages where clusters meet.
TEST_F(ResumedTokenOrderTest, SealedAndResumedTokensOfClustersAreTheSame) {
  CheckResumed({IndexKind::kClusters, IndexKind::kKeys4},
               {PolicyOf("twilight", {{"selector", "clusters"}}),
                PolicyOf("twilight", {{"selector", "clusters"}, {"budget", "70"}, {"p", "0.6"}}),
                PolicyOf("twilight", {{"selector", "full"}, {"p", "0.7"}})});
}

TEST_F(TokenOrderTest, AStepThatIsRepeatedRepeatsItsAnswer) {
  TestSequence sequence = OpenPrompt(PolicyOf("asynctls", {{"blocks", "3"}, {"budget", "48"}}));
  for (int step = 0; step < 4; ++step) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Message message(layer, {NextRow(&sequence, layer, 1, &random_)});
      const Answer first = Send(engine_.get(), message);
      ASSERT_TRUE(first.row_status(0).ok()) << first.row_status(0);
      const Answer again = Send(engine_.get(), message);
      ASSERT_TRUE(again.row_status(0).ok());
      EXPECT_EQ(AnswerOf(message, first, 0), AnswerOf(message, again, 0));
    }
  }
}

// Blocks of segments that came between two steps were in the tail when the earlier one chose: they
// count as chosen. With everything in the budget every answer is dense, whatever becomes of the
// sequence meanwhile.
class AsyncTlsBudgetOfAll : public TokenOrderTest {
 protected:
  // A prompt, and more tokens behind it that are no segments yet.
  TestSequence OpenGrown(uint64_t more) {
    TestSequence sequence = OpenPrompt(policy_, 700);
    Prefill(&sequence, more, &random_);
    return sequence;
  }
  // A step through all layers, whose answers read every token.
  void StepReadsAll(TestSequence* sequence) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Message message(layer, {NextRow(sequence, layer, 1, &random_)});
      const Answer answer = Send(engine_.get(), message);
      ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
      EXPECT_EQ(answer.result.rows[0].stats.dropped_tokens, 0u) << "layer " << layer;
      EXPECT_TRUE(IsDense(message, answer, 0));
    }
  }
  const attention::Policy policy_ = PolicyOf("asynctls", {{"blocks", "1000"}, {"budget", "100%"}});
};

TEST_F(AsyncTlsBudgetOfAll, NewSegmentsAreReadBetweenSteps) {
  for (const uint64_t more : {600u, 1700u}) {  // one segment, and several
    SCOPED_TRACE(testing::Message() << more << " more tokens");
    TestSequence sequence = OpenGrown(more);
    const uint64_t before = sequence.Info().segments;
    StepReadsAll(&sequence);
    engine_->WaitForBackground();
    FinishPrefill(&sequence);
    ASSERT_GE(sequence.Info().segments, before + more / 600);
    StepReadsAll(&sequence);
    StepReadsAll(&sequence);
  }
}

TEST_F(AsyncTlsBudgetOfAll, NewSegmentsOfForksAndAfterTruncationsAreRead) {
  TestSequence sequence = OpenGrown(600);
  StepReadsAll(&sequence);
  const uint64_t length = sequence.history.committed();
  // The child's tail becomes segments of its own.
  const auto fork = engine_->Fork(kTenant, sequence.id, length);
  ASSERT_TRUE(fork.ok()) << fork.status();
  TestSequence child(engine_.get(), fork->id, shape_);
  child.history = sequence.history;
  FinishPrefill(&child);
  engine_->WaitForBackground();
  StepReadsAll(&child);
  StepReadsAll(&sequence);
  StepReadsAll(&sequence);
  // Back to a step that other segments have come after, and that cuts them anew.
  engine_->WaitForBackground();
  ASSERT_TRUE(engine_->Truncate(kTenant, sequence.id, length).ok());
  sequence.history.Truncate(length);
  StepReadsAll(&sequence);
  ASSERT_TRUE(engine_->Truncate(kTenant, child.id, length - 1).ok());
  child.history.Truncate(length - 1);
  Prefill(&child, 600, &random_);
  FinishPrefill(&child);
  StepReadsAll(&child);
  StepReadsAll(&child);
}

TEST_F(AsyncTlsBudgetOfAll, NewSegmentsAfterAResumeAreRead) {
  TestSequence sequence = OpenGrown(600);
  StepReadsAll(&sequence);
  engine_->WaitForBackground();
  const auto sealed = engine_->Seal(kTenant, sequence.id, nullptr);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  const History history = sequence.history;
  Start(256 * kMiB);
  OpenArgs args = ArgsOf(shape_);
  args.fingerprint = "model";
  const auto opened = engine_->Resume(kTenant, args, sealed->sealed_id, nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status();
  TestSequence resumed(engine_.get(), opened->sequence_id, shape_);
  resumed.history = history;
  StepReadsAll(&resumed);
  Prefill(&resumed, 600, &random_);
  StepReadsAll(&resumed);
  engine_->WaitForBackground();
  FinishPrefill(&resumed);
  StepReadsAll(&resumed);
}

TEST_F(TokenOrderTest, PrefixesAreSharedByThoseWithTheSameIndexes) {
  std::vector<uint32_t> ids(1500);
  for (uint32_t& id : ids) id = static_cast<uint32_t>(random_.Below(50000));
  OpenArgs args = ArgsOf(shape_, PolicyOf("quest"));
  args.fingerprint = "model";
  args.indexes = kAll;
  const auto first = engine_->OpenReusing(kTenant, args, ids, nullptr);
  ASSERT_TRUE(first.ok());
  TestSequence sequence(engine_.get(), first->sequence_id, shape_);
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const Kv kv = RandomKv(shape_, 1500, &random_);
    AppendChunk chunk = ChunkOf(layer, 0, kv);
    chunk.token_ids = ids;
    ASSERT_TRUE(engine_->Append(kTenant, kWriter, sequence.id, chunk).ok());
    sequence.history.Append(layer, kv);
  }
  FinishPrefill(&sequence);
  const auto present = [&](IndexSet indexes, const attention::Policy& policy) {
    OpenArgs other = args;
    other.indexes = indexes;
    other.policy = policy;
    const auto opened = engine_->OpenReusing(kTenant, other, ids, nullptr);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.value_or(OpenResult{}).tokens_present;
  };
  for (const bool sealed : {false, true}) {
    EXPECT_GE(present(kAll, PolicyOf("quest")), 1024u);
    EXPECT_EQ(present(attention::kClusterIndexes, PolicyOf("dense")), 0u);
    EXPECT_EQ(present({IndexKind::kBlocks16}, PolicyOf("quest")), 0u);
    if (sealed) break;
    ASSERT_TRUE(engine_->Seal(kTenant, sequence.id, nullptr).ok());
    Start(256 * kMiB);  // from disk
  }
}

}  // namespace
}  // namespace attnd::engine::test
