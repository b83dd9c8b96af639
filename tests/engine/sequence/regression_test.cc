// SPDX-License-Identifier: Apache-2.0
//
// Goal: sequences with a regression live as those with clusters do (opened, forked, cut short,
// sealed, resumed), and those that were sealed with clusters go on under error-target. Method: an
// engine with a data folder beside plain models of every sequence; answers compared bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/support.h"
#include "tests/temporary_folder.h"
#include "tests/tree_indexes.h"

namespace attnd::engine::test {
namespace {

using attention::IndexKind;
using attention::IndexSet;
using testing::HasSubstr;

constexpr IndexSet kWithLabels = {IndexKind::kRegression, IndexKind::kLabels};
constexpr IndexSet kSmallFan = attnd::test::TreeOf({12, 4, 3});

class RegressionSequences : public testing::TestWithParam<std::tuple<IndexSet, bool>> {
 protected:
  RegressionSequences() { Start(); }

  static IndexSet indexes() { return std::get<0>(GetParam()); }

  void Start() {
    EngineOptions options = SmallOptions();
    options.archive.data_dir = folder_.path();
    engine_.reset();
    engine_ = MakeEngine(options);
  }
  TestSequence Open(std::optional<attention::Policy> policy = std::nullopt,
                    std::optional<IndexSet> given = std::nullopt) {
    OpenArgs args = ArgsOf(shape_, std::move(policy));
    args.indexes = given;
    const auto id = engine_->Open(kTenant, args);
    EXPECT_TRUE(id.ok()) << id.status();
    return TestSequence(engine_.get(), id.value_or(0), shape_);
  }
  // A prompt in segments.
  TestSequence OpenPrompt() {
    TestSequence sequence = Open(PolicyOf("error-target"), indexes());
    Prefill(&sequence, 1500, &random_);
    FinishPrefill(&sequence);
    return sequence;
  }
  TestSequence Resume(uint64_t sealed_id, const History& history,
                      std::optional<attention::Policy> policy = std::nullopt) {
    const auto opened =
        engine_->Resume(kTenant, ArgsOf(shape_, std::move(policy)), sealed_id, nullptr);
    EXPECT_TRUE(opened.ok()) << opened.status();
    TestSequence sequence(engine_.get(), opened.ok() ? opened->sequence_id : 0, shape_);
    sequence.history = history;
    return sequence;
  }

  struct Question {
    attention::Policy policy;
    Numbers q;
  };
  std::vector<Question> Questions(TestSequence* sequence) {
    std::vector<Question> questions;
    for (const auto& policy :
         {PolicyOf("error-target"), PolicyOf("error-target", {{"tolerance", "0.01"}}),
          PolicyOf("double-p"), PolicyOf("double-p", {{"p1", "1"}, {"estimator", "second-order"}}),
          PolicyOf("clusters-top-k"), PolicyOf("dense")}) {
      questions.push_back({policy, QueryOnlyRow(sequence, 0, 3, &random_).q});
    }
    return questions;
  }
  // The answers, each with what it predicts of itself.
  std::vector<std::pair<RowAnswer, std::optional<float>>> Ask(
      TestSequence* of, const std::vector<Question>& questions) {
    std::vector<std::pair<RowAnswer, std::optional<float>>> answers;
    for (const Question& question : questions) {
      Row row = QueryOnlyRow(of, 0, 3, &random_);
      row.policy = question.policy;
      row.q = question.q;
      const Message message(0, {row});
      const Answer answer = Send(engine_.get(), message);
      EXPECT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
      if (!answer.row_status(0).ok()) break;
      answers.emplace_back(AnswerOf(message, answer, 0),
                           answer.result.rows[0].stats.predicted_error_mean);
    }
    return answers;
  }

  const ModelShape shape_ = std::get<1>(GetParam()) ? MakeLatentShape(2, 4, 48, 32, DType::kBf16)
                                                    : MakeShape(2, 4, 2, 32, 48, DType::kBf16);
  const testing::ScopedTrace trace_{__FILE__, __LINE__,
                                    testing::Message() << "seed " << TestSeed()};
  Random random_{TestSeed()};
  const attnd::test::TemporaryFolder folder_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(RegressionSequences, HistoriesAreThoseOfTheModel) {
  TestSequence sequence = OpenPrompt();
  EXPECT_EQ(sequence.Info().args.indexes, indexes());
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
  Generate(&sequence, 5, &random_);
  // Both into the middle of a segment: what is left of it is built anew.
  const auto fork = engine_->Fork(kTenant, sequence.id, 1200);
  ASSERT_TRUE(fork.ok());
  TestSequence child(engine_.get(), fork->id, shape_);
  child.history = sequence.history;
  child.history.Truncate(1200);
  EXPECT_EQ(child.Info().args.indexes, indexes());
  EXPECT_TRUE(MatchesModel(&child, &random_));
  ASSERT_TRUE(engine_->Truncate(kTenant, sequence.id, 700).ok());
  sequence.history.Truncate(700);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
  for (TestSequence* each : {&sequence, &child}) {
    Generate(each, 700, &random_);  // a further segment
    engine_->WaitForBackground();
    EXPECT_GT(each->Info().segmented_tokens, 700u);
    EXPECT_TRUE(MatchesModel(each, &random_));
    const auto answers = Ask(each, Questions(each));
    ASSERT_EQ(answers.size(), 6u);
    for (const size_t i : {0u, 3u}) EXPECT_GT(answers[i].second.value_or(0), 0.0f);
  }
}

TEST_P(RegressionSequences, SealedAndResumedTheyAnswerTheSame) {
  TestSequence sequence = OpenPrompt();
  const std::vector<Question> questions = Questions(&sequence);
  const auto answers = Ask(&sequence, questions);
  ASSERT_EQ(answers.size(), questions.size());
  const auto sealed = engine_->Seal(kTenant, sequence.id, nullptr);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  const History history = sequence.history;
  Start();
  OpenArgs others = ArgsOf(shape_);
  others.indexes = attention::kClusterIndexes;
  const absl::Status refused =
      engine_->Resume(kTenant, others, sealed->sealed_id, nullptr).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr(indexes().ToString()));
  TestSequence resumed = Resume(sealed->sealed_id, history);
  EXPECT_EQ(resumed.Info().args.indexes, indexes());
  EXPECT_EQ(Ask(&resumed, questions), answers) << "the same bits, from disk";
  EXPECT_TRUE(MatchesModel(&resumed, &random_));
  Generate(&resumed, 3, &random_);
}

// Those of before there were regressions.
TEST_P(RegressionSequences, SealedWithClustersTheyGoOnUnderErrorTarget) {
  for (const std::string preset : {"double-p", "error-target"}) {
    SCOPED_TRACE(preset);
    TestSequence sequence = Open(PolicyOf(preset), attention::kClusterIndexes);
    Prefill(&sequence, 1500, &random_);
    FinishPrefill(&sequence);
    const std::vector<Question> questions = Questions(&sequence);
    const auto answers = Ask(&sequence, questions);
    ASSERT_EQ(answers.size(), questions.size());
    const auto sealed = engine_->Seal(kTenant, sequence.id, nullptr);
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    const History history = sequence.history;
    Start();
    TestSequence resumed = Resume(sealed->sealed_id, history, PolicyOf("error-target"));
    EXPECT_EQ(resumed.Info().args.indexes, attention::kClusterIndexes);
    EXPECT_EQ(Ask(&resumed, questions), answers);
    Generate(&resumed, 600, &random_);  // a further segment, of clusters too
    engine_->WaitForBackground();
    EXPECT_TRUE(MatchesModel(&resumed, &random_));
    ASSERT_EQ(Ask(&resumed, Questions(&resumed)).size(), 6u);
  }
}

INSTANTIATE_TEST_SUITE_P(Indexes, RegressionSequences,
                         testing::Combine(testing::Values(attention::kRegressionIndexes,
                                                          kWithLabels, attention::kTreeIndexes),
                                          testing::Bool()),
                         [](const auto& both) {
                           const IndexSet& indexes = std::get<0>(both.param);
                           return std::string(indexes == kWithLabels               ? "WithLabels"
                                              : indexes == attention::kTreeIndexes ? "Tree"
                                                                                   : "Alone") +
                                  (std::get<1>(both.param) ? "Latent" : "");
                         });
INSTANTIATE_TEST_SUITE_P(SmallFan, RegressionSequences,
                         testing::Values(std::tuple(kSmallFan, false)));

TEST(RegressionOpening, APolicyWithoutIndexesNamedGetsItsOwn) {
  const auto engine = MakeEngine(SmallOptions());
  const ModelShape shape = MakeShape(1, 2, 1, 32, 32, DType::kBf16);
  const auto indexes_of = [&](const char* preset) {
    return OpenSequence(engine.get(), shape, PolicyOf(preset)).Info().args.indexes;
  };
  EXPECT_EQ(indexes_of("error-target"), attention::kTreeIndexes);
  EXPECT_EQ(indexes_of("double-p"), attention::kClusterIndexes);
  EXPECT_EQ(indexes_of("clusters-top-k"), attention::kClusterIndexes);
  EXPECT_EQ(indexes_of("dense"), attention::kClusterIndexes);
  EXPECT_EQ(indexes_of("streaming"), attention::kClusterIndexes);
}

TEST(RegressionOpening, LatentShapesGetWhatOtherShapesGet) {
  const auto engine = MakeEngine(SmallOptions());
  const ModelShape latent = MakeLatentShape(1, 4, 48, 32, DType::kBf16);
  const auto indexes_of = [&](const char* preset) {
    return OpenSequence(engine.get(), latent, PolicyOf(preset)).Info().args.indexes;
  };
  EXPECT_EQ(indexes_of("error-target"), attention::kTreeIndexes);
  EXPECT_EQ(indexes_of("double-p"), attention::kClusterIndexes);
}

TEST(RegressionOpening, ClusterOrderAloneIsTheClustersOfThePolicy) {
  const auto engine = MakeEngine(SmallOptions());
  const auto open = [&](const char* preset) {
    OpenArgs args = ArgsOf(MakeShape(1, 2, 1, 32, 32, DType::kBf16), PolicyOf(preset));
    args.cluster_order = true;
    return engine->Open(kTenant, args);
  };
  const auto indexes_of = [&](const char* preset) {
    const auto id = open(preset);
    EXPECT_TRUE(id.ok()) << id.status();
    return engine->Info(kTenant, id.value_or(0))->args.indexes;
  };
  EXPECT_EQ(indexes_of("error-target"), attention::kTreeIndexes);
  EXPECT_EQ(indexes_of("double-p"), attention::kClusterIndexes);
  EXPECT_EQ(indexes_of("dense"), attention::kClusterIndexes);
  const absl::Status status = open("quest").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("blocks-16"));
}

// The sizes that are asked for go with the indexes that are asked for, or with the policy's; forks
// have them, too.
TEST(RegressionOpening, ATreeHasTheSizesThatAreAskedFor) {
  const auto engine = MakeEngine(SmallOptions());
  const auto open = [&](const char* preset, const std::optional<IndexSet>& indexes,
                        const attention::TreeSizes& sizes) {
    OpenArgs args = ArgsOf(MakeShape(1, 2, 1, 32, 32, DType::kBf16), PolicyOf(preset));
    args.indexes = indexes;
    args.tree = sizes;
    return engine->Open(kTenant, args);
  };
  for (const auto& [preset, indexes] :
       {std::pair("error-target", std::optional<IndexSet>()),
        std::pair("dense", std::optional<IndexSet>(attention::kTreeIndexes))}) {
    const auto id = open(preset, indexes, {12, 16, 2});
    ASSERT_TRUE(id.ok()) << id.status();
    const IndexSet expected = attnd::test::TreeOf({12, 16, 2});
    EXPECT_EQ(engine->Info(kTenant, *id)->args.indexes, expected);
    const auto fork = engine->Fork(kTenant, *id, std::nullopt);
    ASSERT_TRUE(fork.ok()) << fork.status();
    EXPECT_EQ(fork->args.indexes, expected);
  }
  const auto refusal = [&](const char* preset, const std::optional<IndexSet>& indexes,
                           const attention::TreeSizes& sizes) {
    const absl::Status status = open(preset, indexes, sizes).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal("error-target", std::nullopt, {10, 8, 3}), HasSubstr("8, 12, 16"));
  EXPECT_THAT(refusal("dense", std::nullopt, {}), HasSubstr("indexes are none"));
  EXPECT_THAT(refusal("error-target", attention::kRegressionIndexes, {}),
              HasSubstr("indexes are regression"));
}

TEST(RegressionOpening, WhatDoesNotFitIsRefused) {
  const auto engine = MakeEngine(SmallOptions());
  const ModelShape shape = MakeShape(1, 2, 1, 32, 32, DType::kBf16);
  for (const auto& [other, named] : {std::pair(IndexKind::kClusters, "regression"),
                                     std::pair(IndexKind::kBlocks16, "beside blocks"),
                                     std::pair(IndexKind::kBlocks64, "beside blocks")}) {
    OpenArgs args = ArgsOf(shape, PolicyOf("dense"));
    args.indexes = IndexSet{IndexKind::kRegression, other};
    const absl::Status status = engine->Open(kTenant, args).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(named));
  }
  OpenArgs blocks = ArgsOf(shape, PolicyOf("error-target"));
  blocks.indexes = IndexSet{IndexKind::kBlocks16};
  const absl::Status status = engine->Open(kTenant, blocks).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("clusters or regression"));
}

}  // namespace
}  // namespace attnd::engine::test
