// SPDX-License-Identifier: Apache-2.0
//
// Goal: a pass answers what messages of single layers answer, and appends a row's tokens to all
// layers or to none, whatever ends it. Method: a sequence and its fork get the same tokens, one by
// passes, the other by single layers, and answers are compared bit for bit; random histories of
// passes that are completed, given up, replayed, replaced and truncated are compared with a plain
// model and the dense oracle after each event; two threads share a sequence.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/engine/passes_support.h"
#include "tests/engine/random_passes.h"

namespace attnd::engine::test {
namespace {

using absl::StatusCode;

class PassesTest : public testing::Test {
 protected:
  Random random_{TestSeed()};
  const testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(TestSeed())};
  std::unique_ptr<Engine> engine_ = MakeEngine(SmallOptions());
  const ModelShape shape_ = MakeShape(3, 4, 2, 16, 16, DType::kBf16);
};

// Two sequences and their forks, over segments of estimates.
TEST_F(PassesTest, AnswersAreThoseOfSingleLayers) {
  std::vector<TestSequence> all;
  for (int i = 0; i < 2; ++i) {
    all.push_back(OpenSequence(engine_.get(), shape_, PolicyOf("error-target")));
    Prefill(&all.back(), 1200, &random_);
    FinishPrefill(&all.back());
  }
  for (int i = 0; i < 2; ++i) {
    const auto fork = engine_->Fork(kTenant, all[i].id, std::nullopt);
    ASSERT_TRUE(fork.ok());
    all.emplace_back(engine_.get(), fork->id, shape_);
    all.back().history = all[i].history;
  }
  for (int token = 0; token < 30; ++token) {
    SCOPED_TRACE(token);
    const Layers layers = NextPass({&all[0], &all[1]}, 1 + token % 4, &random_);
    const std::unique_ptr<Pass> pass = Begin(engine_.get(), layers);
    for (const auto& message : layers) {
      const Answer answer = StepOf(pass.get(), *message);
      ASSERT_TRUE(answer.status.ok()) << answer.status;
      std::vector<Row> twins = message->rows;
      for (size_t i = 0; i < 2; ++i) twins[i].sequence = &all[2 + i];
      const Message single(message->args.layer, twins);
      const Answer expected = Send(engine_.get(), single);
      for (size_t i = 0; i < 2; ++i) {
        ASSERT_TRUE(answer.row_status(i).ok()) << answer.row_status(i);
        ASSERT_TRUE(expected.row_status(i).ok()) << expected.row_status(i);
        EXPECT_EQ(AnswerOf(*message, answer, i), AnswerOf(single, expected, i));
      }
    }
    for (size_t i = 0; i < 2; ++i) Keep(layers, i);
  }
  for (TestSequence& sequence : all) EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

TEST_F(PassesTest, RandomHistories) {
  RandomPasses passes(engine_.get(), shape_, &random_);
  passes.Run(600);
  EXPECT_GT(passes.given_up, 50);
  EXPECT_GT(passes.replays, 20);
  EXPECT_GT(passes.failed, 20);
  EXPECT_GT(passes.cut, 20);
}

// The same tokens once more, of a pass that is complete: answered, not appended.
TEST_F(PassesTest, ACompletePassIsAnsweredAgain) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  Prefill(&sequence, 100, &random_);
  const Layers layers = NextPass({&sequence}, 2, &random_);
  std::vector<RowAnswer> first;
  for (int round = 0; round < 3; ++round) {
    const std::unique_ptr<Pass> pass = Begin(engine_.get(), layers);
    for (uint32_t layer = 0; layer < layers.size(); ++layer) {
      if (round == 1 && layer == 2) break;  // given up: nothing of it was new
      const Answer answer = StepOf(pass.get(), *layers[layer]);
      ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
      const RowAnswer row = AnswerOf(*layers[layer], answer, 0);
      if (round == 0) first.push_back(row);
      EXPECT_EQ(row, first[layer]);
    }
    if (round == 0) Keep(layers, 0);
  }
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

// A key that was given up bounds no query.
TEST_F(PassesTest, AGivenUpKeyIsNoBound) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  Layers layers = NextPass({&sequence}, 1, &random_);
  Row huge = layers[0]->rows[0];
  for (size_t i = 0; i < huge.kv.k.values.size(); ++i) huge.kv.k.Set(i, 1e17f);
  for (size_t i = 0; i < huge.q.values.size(); ++i) huge.q.Set(i, 1e-10f);
  const Message message(0, {huge});
  std::unique_ptr<Pass> pass = Begin(engine_.get(), layers);
  EXPECT_TRUE(StepOf(pass.get(), message).row_status(0).ok());
  pass.reset();
  Row large = NextRow(&sequence, 0, 1, &random_);
  for (size_t i = 0; i < large.q.values.size(); ++i) large.q.Set(i, 1e6f);
  const Answer answer = SendRow(large, 0);
  EXPECT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

TEST_F(PassesTest, ATruncationMeanwhileEndsTheRow) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  Prefill(&sequence, 10, &random_);
  for (const uint64_t length : {10, 7}) {
    const Layers layers = NextPass({&sequence}, 1, &random_);
    const std::unique_ptr<Pass> pass = Begin(engine_.get(), layers);
    EXPECT_TRUE(StepOf(pass.get(), *layers[0]).row_status(0).ok());
    ASSERT_TRUE(engine_->Truncate(kTenant, sequence.id, length).ok());
    sequence.history.Truncate(length);
    for (uint32_t layer = 1; layer < layers.size(); ++layer) {
      EXPECT_EQ(StepOf(pass.get(), *layers[layer]).row_status(0).code(),
                StatusCode::kFailedPrecondition);
    }
    EXPECT_TRUE(MatchesModel(&sequence, &random_));
  }
}

TEST_F(PassesTest, ASequenceClosedMeanwhileIsNotFound) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  const Layers layers = NextPass({&sequence}, 1, &random_);
  const std::unique_ptr<Pass> pass = Begin(engine_.get(), layers);
  EXPECT_TRUE(StepOf(pass.get(), *layers[0]).row_status(0).ok());
  ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  EXPECT_EQ(StepOf(pass.get(), *layers[1]).row_status(0).code(), StatusCode::kNotFound);
}

// Faults that a declaration finds: the row is out, the others are answered.
TEST_F(PassesTest, FaultsOfTheDeclaration) {
  TestSequence good = OpenSequence(engine_.get(), shape_);
  TestSequence other = OpenSequence(engine_.get(), shape_);
  TestSequence deep = OpenSequence(engine_.get(), MakeShape(4, 4, 2, 16, 16, DType::kBf16));
  for (TestSequence* each : {&good, &other, &deep}) Prefill(each, 5, &random_);
  struct Case {
    const char* name;
    StatusCode code;
    std::function<void(DecodeRow*)> spoil;
  };
  const std::vector<uint32_t> ids = {1, 2, 3};
  const attention::Policy quest = PolicyOf("quest");
  const Case cases[] = {
      {"gap", StatusCode::kFailedPrecondition, [](auto* row) { row->position = 6; }},
      {"unknown", StatusCode::kNotFound, [](auto* row) { row->sequence_id = 999; }},
      {"twice", StatusCode::kInvalidArgument, [&](auto* row) { row->sequence_id = good.id; }},
      {"layers", StatusCode::kInvalidArgument, [&](auto* row) { row->sequence_id = deep.id; }},
      {"ids", StatusCode::kInvalidArgument, [&](auto* row) { row->token_ids = ids; }},
      {"index", StatusCode::kFailedPrecondition, [&](auto* row) { row->policy = quest; }},
      {"precheck", StatusCode::kInvalidArgument,
       [](auto* row) { row->precheck = absl::InvalidArgumentError("policy"); }},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    Layers layers = NextPass({&good, &other}, 1, &random_);
    each.spoil(&layers[0]->decode_rows[1]);
    const State before = StateOf(&other);
    const std::unique_ptr<Pass> pass = Begin(engine_.get(), layers);
    for (const auto& message : layers) {
      const Answer answer = StepOf(pass.get(), *message);
      EXPECT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
      EXPECT_EQ(answer.row_status(1).code(), each.code) << answer.row_status(1);
    }
    Keep(layers, 0);
    EXPECT_TRUE(MatchesModel(&good, &random_));
    EXPECT_TRUE(Unchanged(&other, before));
  }
  EXPECT_EQ(engine_->BeginPass(kTenant, kWriter, {}, 3).status().code(),
            StatusCode::kInvalidArgument);
  const Layers layers = NextPass({&good}, 1, &random_);
  EXPECT_EQ(
      StepOf(Begin(engine_.get(), layers, kWriter + 1).get(), *layers[0]).row_status(0).code(),
      StatusCode::kAborted);
}

// A message that cannot be answered, and a deadline that has passed, end the whole pass.
TEST_F(PassesTest, AFaultOfTheMessageGivesThePassUp) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  Prefill(&sequence, 3, &random_);
  for (const bool late : {false, true}) {
    const Layers layers = NextPass({&sequence}, 1, &random_);
    const std::unique_ptr<Pass> pass = Begin(engine_.get(), layers);
    EXPECT_TRUE(StepOf(pass.get(), *layers[0]).status.ok());
    Message& message = *layers[1];
    if (late) {
      message.args.deadline = std::chrono::steady_clock::now() - std::chrono::seconds(1);
    } else {
      message.args.q.elements -= 1;
    }
    EXPECT_EQ(StepOf(pass.get(), message).status.code(),
              late ? StatusCode::kDeadlineExceeded : StatusCode::kInvalidArgument);
    EXPECT_TRUE(MatchesModel(&sequence, &random_));
  }
}

// Memory for the tokens of all layers is taken when the pass is declared.
TEST_F(PassesTest, NoRoomIsSaidBeforeTheFirstLayer) {
  EngineOptions options = SmallOptions();
  options.memory_budget_bytes = uint64_t{1} << 20;
  engine_ = MakeEngine(options);
  TestSequence sequence = OpenSequence(engine_.get(), MakeShape(64, 4, 2, 64, 64, DType::kBf16));
  const Layers layers = NextPass({&sequence}, 1, &random_);
  const std::unique_ptr<Pass> pass = Begin(engine_.get(), layers);
  EXPECT_EQ(StepOf(pass.get(), *layers[0]).row_status(0).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(sequence.Info().layer_tokens[0], 0u);
}

// What a pass needs it takes when it is declared: later layers want no more.
TEST_F(PassesTest, RoomForAllLayersIsTakenAtOnce) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  Prefill(&sequence, 3, &random_);
  constexpr uint64_t kTokens = 300;
  const uint64_t used = engine_->usage().resident_bytes;
  const Layers layers = NextPass({&sequence}, kTokens, &random_);
  std::unique_ptr<Pass> pass = Begin(engine_.get(), layers);
  const uint64_t bytes = uint64_t{shape_.layers} * shape_.kv_heads * shape_.token_bytes();
  EXPECT_GE(engine_->usage().resident_bytes, used + kTokens * bytes);
  pass.reset();
  EXPECT_LE(engine_->usage().resident_bytes, used + 4096);
}

// A declaration whose first layer is refused makes nobody the writer, and gives its blocks back.
TEST_F(PassesTest, ARefusedFirstLayerLeavesNothing) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  Prefill(&sequence, 3, &random_);
  engine_->ReleaseWriter(kWriter);
  const State before = StateOf(&sequence);
  const uint64_t used = engine_->usage().resident_bytes;
  const Layers layers = NextPass({&sequence}, 300, &random_);
  std::unique_ptr<Pass> pass = Begin(engine_.get(), layers, kWriter + 1);
  layers[0]->args.q.elements -= 1;
  EXPECT_EQ(StepOf(pass.get(), *layers[0]).status.code(), StatusCode::kInvalidArgument);
  pass.reset();
  EXPECT_TRUE(Unchanged(&sequence, before));
  EXPECT_LE(engine_->usage().resident_bytes, used + 4096);
  EXPECT_TRUE(DecodeNext(&sequence, 0, 1, &random_).row_status(0).ok());
}

// Token ids are those of the tokens that stay.
TEST_F(PassesTest, TokenIdsGoWithTheirTokens) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  for (const uint32_t id : {7u, 8u}) {
    const Layers layers = NextPass({&sequence}, 1, &random_);
    const std::vector<uint32_t> ids = {id};
    layers[0]->decode_rows[0].token_ids = ids;
    std::unique_ptr<Pass> pass = Begin(engine_.get(), layers);
    for (const auto& message : layers) {
      if (id == 7 && message->args.layer == 1) break;
      const Answer answer = StepOf(pass.get(), *message);
      EXPECT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
    }
  }
  EXPECT_EQ(sequence.Info().committed_tokens, 1u);
}

// Readers see a sequence whose passes are given up and written again; for the thread sanitizer.
TEST_F(PassesTest, ReadersBesideAWriter) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  Prefill(&sequence, 130, &random_);
  std::atomic<bool> stop{false};
  std::thread reader([&, id = sequence.id] {
    Random random(TestSeed() + 1);
    while (!stop.load()) {
      for (const SequenceInfo& info : engine_->List(kTenant, 0, 10)) {
        TestSequence seen(engine_.get(), id, shape_);
        Row row = QueryOnlyRow(&seen, 0, 1, &random);
        row.position = info.layer_tokens[0];
        const absl::Status status = SendRow(row, 0).row_status(0);
        EXPECT_TRUE(status.ok() || absl::IsFailedPrecondition(status)) << status;
      }
      const auto fork = engine_->Fork(kTenant, id, std::nullopt);
      EXPECT_TRUE(fork.ok() && engine_->Close(kTenant, fork->id).ok());
    }
  });
  for (int i = 0; i < 200; ++i) {
    const Layers layers = NextPass({&sequence}, 1 + i % 3, &random_);
    const std::unique_ptr<Pass> pass = Begin(engine_.get(), layers);
    for (const auto& message : layers) {
      if (i % 2 == 0 && message->args.layer == 2) break;
      ASSERT_TRUE(StepOf(pass.get(), *message).row_status(0).ok());
    }
    if (i % 2 == 1) Keep(layers, 0);
  }
  stop = true;
  reader.join();
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

}  // namespace
}  // namespace attnd::engine::test
