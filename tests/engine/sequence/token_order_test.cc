// SPDX-License-Identifier: Apache-2.0
//
// Goal: sequences in token order live as those in cluster order do (built, forked, cut short,
// sealed, resumed, moved to disk), policies are refused on sequences that lack what they read, and
// what a prompt's last queries are for reaches the steps. Method: an engine with a data folder
// beside plain models of every sequence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/engine/support.h"
#include "tests/temporary_folder.h"

namespace attnd::engine::test {
namespace {

using attention::IndexKind;
using attention::IndexSet;
using testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

class TokenOrderTest : public testing::Test {
 protected:
  TokenOrderTest() { Start(256 * kMiB); }

  void Start(uint64_t budget) {
    EngineOptions options = SmallOptions();
    options.memory_budget_bytes = budget;
    options.archive.data_dir = folder_.path();
    engine_.reset();
    engine_ = MakeEngine(options);
  }

  absl::StatusOr<uint64_t> TryOpen(const attention::Policy& policy,
                                   std::optional<IndexSet> indexes = std::nullopt) {
    OpenArgs args = ArgsOf(shape_, policy);
    args.fingerprint = "model";
    args.indexes = indexes;
    return engine_->Open(kTenant, args);
  }
  TestSequence Open(const attention::Policy& policy,
                    std::optional<IndexSet> indexes = std::nullopt) {
    const auto id = TryOpen(policy, indexes);
    EXPECT_TRUE(id.ok()) << id.status();
    return TestSequence(engine_.get(), id.value_or(0), shape_);
  }
  // A prompt in segments.
  TestSequence OpenPrompt(const attention::Policy& policy, uint64_t tokens = 1500,
                          std::optional<IndexSet> indexes = std::nullopt) {
    TestSequence sequence = Open(policy, indexes);
    Prefill(&sequence, tokens, &random_);
    FinishPrefill(&sequence);
    return sequence;
  }
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
  void CheckResumed(const IndexSet& indexes, const std::vector<attention::Policy>& policies);
  Row QueryRow(TestSequence* sequence, const attention::Policy& policy) {
    Row row = QueryOnlyRow(sequence, 0, 1, &random_);
    row.policy = policy;
    return row;
  }

  const ModelShape shape_ = MakeShape(2, 4, 2, 32, 32, DType::kBf16);
  Random random_{TestSeed()};
  const attnd::test::TemporaryFolder folder_;
  std::unique_ptr<Engine> engine_;
};

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

// Seals and resumes a sequence with these indexes: the policies' answers are the same, bit for bit.
void TokenOrderTest::CheckResumed(const IndexSet& indexes,
                                  const std::vector<attention::Policy>& policies) {
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

TEST_F(TokenOrderTest, SealedAndResumedItAnswersTheSame) { CheckResumed(kAll, TokenPolicies()); }

// The same of tokens that lie in cluster order, from pages where clusters meet.
TEST_F(TokenOrderTest, SealedAndResumedTokensOfClustersAreTheSame) {
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

TEST_F(TokenOrderTest, SnapKvKeepsWhatThePromptsEndLookedAt) {
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
TEST_F(TokenOrderTest, WhatNoKeepSetWasChosenFromIsRead) {
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
TEST_F(TokenOrderTest, AKeepSetForgetsWhatIsTruncatedMeanwhile) {
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

TEST_F(TokenOrderTest, ObservedQueriesAreChecked) {
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
TEST_F(TokenOrderTest, ObservedQueriesHoldTheirBytes) {
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

TEST_F(TokenOrderTest, APromptBeyondMemoryIsObservedFromDisk) {
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
