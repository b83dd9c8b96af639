// SPDX-License-Identifier: Apache-2.0
//
// Goal: budgets and limits are asked before anything is taken, nothing leaks, and numbers beyond
// what single precision can answer are refused rather than answered wrongly. Method: engines with
// limits of a few tokens, sequences or mebibytes; bytes in use are compared before and after each
// refusal, and are zero when everything is closed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

using absl::StatusCode;
using testing::HasSubstr;

TEST(EngineLimitsTest, Options) {
  const auto refused = [](const char* option, auto change) {
    EngineOptions options = SmallOptions();
    change(&options);
    const absl::Status status = options.Validate();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << option;
    EXPECT_THAT(std::string(status.message()), HasSubstr(option));
  };
  EXPECT_TRUE(SmallOptions().Validate().ok());
  EXPECT_TRUE(EngineOptions().Validate().ok());
  refused("memory_budget_bytes", [](EngineOptions* o) { o->memory_budget_bytes = 0; });
  refused("max_sequences", [](EngineOptions* o) { o->max_sequences = 0; });
  refused("max_sequence_tokens", [](EngineOptions* o) { o->max_sequence_tokens = 0; });
  refused("max_rows", [](EngineOptions* o) { o->max_rows = 0; });
  refused("max_query_tokens", [](EngineOptions* o) { o->max_query_tokens = 0; });
  refused("segment_tokens", [](EngineOptions* o) { o->segment_tokens = 511; });
  refused("segment_tokens", [](EngineOptions* o) { o->segment_tokens = 65537; });
  refused("index_threads", [](EngineOptions* o) { o->index_threads = 0; });
}

TEST(EngineLimitsTest, OpenNamesTheFieldOfTheShape) {
  const auto engine = MakeEngine(SmallOptions());
  const ModelShape good = MakeShape(2, 4, 2, 16, 16, DType::kBf16);
  const auto refused = [&](const char* field, auto change) {
    OpenArgs args = ArgsOf(good);
    change(&args);
    const absl::Status status = engine->Open(kTenant, args).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
  };
  refused("layers", [](OpenArgs* a) { a->shape.layers = 0; });
  refused("layers", [](OpenArgs* a) { a->shape.layers = 4000000000u; });
  refused("query_heads", [](OpenArgs* a) { a->shape.query_heads = 5; });
  refused("kv_heads", [](OpenArgs* a) { a->shape.kv_heads = 0; });
  refused("head_dim", [](OpenArgs* a) { a->shape.head_dim = 20; });
  refused("value_dim", [](OpenArgs* a) { a->shape.value_dim = kHeadDimMax + 16; });
  refused("softmax_scale", [](OpenArgs* a) { a->shape.softmax_scale = NAN; });
  refused("shard", [](OpenArgs* a) { a->shard.count = 0; });
  refused("shard", [](OpenArgs* a) { a->shard.index = 1; });
  EXPECT_EQ(engine->usage().sequences, 0u);
}

TEST(EngineLimitsTest, Sequences) {
  EngineOptions options = SmallOptions();
  options.max_sequences = 2;
  const auto engine = MakeEngine(options);
  const ModelShape shape = MakeShape(1, 1, 1, 16, 16, DType::kBf16);
  const TestSequence first = OpenSequence(engine.get(), shape);
  const TestSequence second = OpenSequence(engine.get(), shape);
  EXPECT_NE(first.id, 0u);
  EXPECT_LT(first.id, second.id);
  EXPECT_EQ(engine->Open(kTenant, ArgsOf(shape)).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(engine->Open("other", ArgsOf(shape)).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(engine->Fork(kTenant, first.id, std::nullopt).status().code(),
            StatusCode::kResourceExhausted);
  ASSERT_TRUE(engine->Close(kTenant, first.id).ok());
  const TestSequence third = OpenSequence(engine.get(), shape);
  EXPECT_LT(second.id, third.id);  // never used again
  EXPECT_EQ(engine->List(kTenant, 0, 10).size(), 2u);
  EXPECT_EQ(engine->List(kTenant, second.id, 10).at(0).id, third.id);
  EXPECT_EQ(engine->List(kTenant, 0, 1).at(0).id, second.id);

  ASSERT_TRUE(engine->Close(kTenant, second.id).ok());
  engine->StopOpening();
  EXPECT_EQ(engine->Open(kTenant, ArgsOf(shape)).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(engine->Fork(kTenant, third.id, std::nullopt).status().code(),
            StatusCode::kUnavailable);
}

TEST(EngineLimitsTest, TokensOfASequence) {
  Random random(TestSeed());
  EngineOptions options = SmallOptions();
  options.max_sequence_tokens = 100;
  const auto engine = MakeEngine(options);
  TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 1, 1, 16, 16, DType::kBf16));
  Prefill(&sequence, 99, &random);
  const State state = StateOf(&sequence);
  EXPECT_EQ(AppendNext(&sequence, 0, RandomKv(sequence.shape(), 2, &random)).code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(DecodeNext(&sequence, 0, 2, &random).row_status(0).code(),
            StatusCode::kResourceExhausted);
  EXPECT_TRUE(Unchanged(&sequence, state));
  EXPECT_TRUE(DecodeNext(&sequence, 0, 1, &random).row_status(0).ok());
  EXPECT_TRUE(MatchesModel(&sequence, &random));
}

// ---- the memory budget ----

// A budget of 2 MiB: 8 KiB a tail block of 64 tokens, so about 16,000 tokens.
class BudgetTest : public testing::Test {
 protected:
  static EngineOptions Options() {
    EngineOptions options = SmallOptions();
    options.memory_budget_bytes = 2 << 20;
    return options;
  }
  uint64_t used() const { return engine_->usage().resident_bytes; }

  Random random_{TestSeed()};
  const std::unique_ptr<Engine> engine_ = MakeEngine(Options());
  const ModelShape shape_ = MakeShape(2, 2, 1, 16, 16, DType::kBf16);
};

TEST_F(BudgetTest, AppendAndDecode) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  Prefill(&sequence, 16000, &random_);
  const State state = StateOf(&sequence);
  const uint64_t before = used();
  EXPECT_GE(before, 16000u * 2 * 64);
  const absl::Status status = AppendNext(&sequence, 0, RandomKv(shape_, 1000, &random_));
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("budget"));
  EXPECT_EQ(used(), before);
  EXPECT_EQ(DecodeNext(&sequence, 1, 1000, &random_).row_status(0).code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(used(), before);
  EXPECT_TRUE(Unchanged(&sequence, state));
  EXPECT_TRUE(DecodeNext(&sequence, 0, 1, &random_).row_status(0).ok());  // what fits goes on
  ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  EXPECT_EQ(used(), 0u);
}

TEST_F(BudgetTest, FinishPrefill) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  Prefill(&sequence, 16000, &random_);
  const State state = StateOf(&sequence);
  const uint64_t before = used();
  const auto result = engine_->FinishPrefill(kTenant, kWriter, sequence.id, nullptr);
  EXPECT_EQ(result.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(used(), before);
  EXPECT_TRUE(Unchanged(&sequence, state));
  ASSERT_TRUE(engine_->Truncate(kTenant, sequence.id, 8000).ok());
  sequence.history.Truncate(8000);
  EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, 7680u);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
  ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  EXPECT_EQ(used(), 0u);
}

// Generation goes on, exact, when there is no room for a background segment.
TEST_F(BudgetTest, BackgroundSegments) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  Prefill(&sequence, 16000, &random_);
  Generate(&sequence, 5, &random_);
  engine_->WaitForBackground();
  EXPECT_EQ(sequence.Info().segments, 0u);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
  ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  EXPECT_EQ(used(), 0u);
}

TEST_F(BudgetTest, ForkAndTruncate) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  Prefill(&sequence, 12000, &random_);
  FinishPrefill(&sequence);
  // Closed when the budget is full: its few KiB are for the answers of steps. What the filler
  // leaves may be less than one answer; that is chance, and changes with the size of a sequence.
  TestSequence spare = OpenSequence(engine_.get(), shape_);
  Prefill(&spare, 64, &random_);
  TestSequence filler = OpenSequence(engine_.get(), shape_);
  while (AppendNext(&filler, 0, RandomKv(shape_, 64, &random_)).ok()) {
  }
  ASSERT_TRUE(engine_->Close(kTenant, spare.id).ok());
  const State state = StateOf(&sequence);
  const uint64_t before = used();
  // Both need blocks of their own for tokens that a segment holds.
  EXPECT_EQ(engine_->Fork(kTenant, sequence.id, 5000).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->Truncate(kTenant, sequence.id, 5000).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(used(), before);
  EXPECT_EQ(engine_->usage().sequences, 2u);
  EXPECT_TRUE(Unchanged(&sequence, state));
  ASSERT_TRUE(engine_->Truncate(kTenant, sequence.id, 0).ok());  // needs nothing
  EXPECT_LT(used(), before);
  ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  ASSERT_TRUE(engine_->Close(kTenant, filler.id).ok());
  EXPECT_EQ(used(), 0u);
}

// Sequences and token ids are of the budget, and so is the answer of a step while it is made.
TEST_F(BudgetTest, SequencesTokenIdsAndAnswers) {
  TestSequence sequence = OpenSequence(engine_.get(), shape_);
  const uint64_t opened = used();
  EXPECT_GT(opened, 300u);
  Prefill(&sequence, 64, &random_);
  const uint64_t without_ids = used();
  const std::vector<uint32_t> ids(64, 5);
  AppendChunk chunk = ChunkOf(0, 0, sequence.history.layers[0]);
  chunk.token_ids = ids;
  const absl::Status with_ids = engine_->Append(kTenant, kWriter, sequence.id, chunk);
  ASSERT_TRUE(with_ids.ok()) << with_ids;
  EXPECT_GE(used(), without_ids + 64 * 4);

  // 300 tokens of 2 heads of 16 and the log-sum-exp: 40 KiB.
  const Row large = QueryOnlyRow(&sequence, 0, 300, &random_);
  EXPECT_TRUE(SendRow(large, 0).row_status(0).ok());
  TestSequence filler = OpenSequence(engine_.get(), shape_);
  while (used() + 40000 < engine_->usage().capacity_bytes) {
    ASSERT_TRUE(AppendNext(&filler, 0, RandomKv(shape_, 64, &random_)).ok());
  }
  const State state = StateOf(&sequence);
  const uint64_t before = used();
  const absl::Status status = SendRow(large, 0).row_status(0);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the step's answer needs"));
  EXPECT_EQ(SendRow(NextRow(&sequence, 0, 300, &random_), 0).row_status(0).code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(used(), before);
  EXPECT_TRUE(Unchanged(&sequence, state));

  std::vector<uint64_t> opened_ids;
  absl::StatusOr<uint64_t> id = 0;
  while ((id = engine_->Open(kTenant, ArgsOf(shape_))).ok()) opened_ids.push_back(*id);
  EXPECT_EQ(id.status().code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(id.status().message()), HasSubstr("a sequence needs"));
  for (const uint64_t each : opened_ids) ASSERT_TRUE(engine_->Close(kTenant, each).ok());
  EXPECT_EQ(used(), before);
  ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  ASSERT_TRUE(engine_->Close(kTenant, filler.id).ok());
  EXPECT_EQ(used(), 0u);
}

// Shared segments are held once and live as long as the last sequence that has them.
TEST_F(BudgetTest, ForksShareSegments) {
  TestSequence parent = OpenSequence(engine_.get(), shape_);
  Prefill(&parent, 10304, &random_);
  FinishPrefill(&parent);
  const uint64_t before = used();
  std::vector<TestSequence> children;
  for (int i = 0; i < 20; ++i) {
    const auto fork = engine_->Fork(kTenant, parent.id, std::nullopt);
    ASSERT_TRUE(fork.ok()) << fork.status();
    EXPECT_EQ(fork->committed_tokens, 10304u);
    children.emplace_back(engine_.get(), fork->id, shape_);
    children.back().history = parent.history;
  }
  EXPECT_LE(used(), before + 20 * 2 * 8192);  // at most a partial block or two each
  ASSERT_TRUE(engine_->Close(kTenant, parent.id).ok());
  EXPECT_TRUE(MatchesModel(&children.back(), &random_));
  for (const TestSequence& child : children) ASSERT_TRUE(engine_->Close(kTenant, child.id).ok());
  EXPECT_EQ(used(), 0u);
}

// ---- numbers beyond single precision ----

struct Extreme {
  const char* name;
  float key, query;  // the magnitude of every channel of one token
  bool opposite;     // half of the channels negative in the key
};
void PrintTo(const Extreme& c, std::ostream* out) { *out << c.name; }

class ExtremesTest : public testing::TestWithParam<Extreme> {};

// q.k overflows (or, with opposite signs, its terms do): an error, never an answer that leaves the
// token out.
TEST_P(ExtremesTest, AreRefused) {
  Random random(TestSeed());
  const Extreme& extreme = GetParam();
  for (const uint64_t prompt : {0u, 700u}) {
    for (const char* preset : {"dense", "clusters-top-k", "double-p", "error-target"}) {
      const auto engine = MakeEngine(SmallOptions());
      TestSequence sequence =
          OpenSequence(engine.get(), MakeShape(1, 2, 1, 16, 16, DType::kFp32), PolicyOf(preset));
      Kv kv = RandomKv(sequence.shape(), prompt + 1, &random);
      for (size_t c = 0; c < 16; ++c) {
        kv.k.Set(c + 16 * prompt / 2, extreme.opposite && c % 2 == 1 ? -extreme.key : extreme.key);
      }
      ASSERT_TRUE(AppendNext(&sequence, 0, kv).ok());
      FinishPrefill(&sequence);
      Row row = NextRow(&sequence, 0, 1, &random);
      for (size_t c = 0; c < row.q.values.size(); ++c) row.q.Set(c, extreme.query);
      const absl::Status status = SendRow(row, 0).row_status(0);
      EXPECT_EQ(status.code(), StatusCode::kOutOfRange) << preset << " " << prompt << " " << status;
      EXPECT_EQ(sequence.Info().committed_tokens, prompt + 1) << preset;  // nothing was appended
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ExtremesTest,
                         testing::Values(Extreme{"Positive", 1e20f, 1e20f, false},
                                         Extreme{"Negative", -1e20f, 1e20f, false},
                                         Extreme{"Opposite", 1e20f, 1e20f, true},
                                         Extreme{"LargeKeys", 3e38f, 40.0f, false},
                                         Extreme{"LargeQueries", 40.0f, -3e38f, true}),
                         [](const testing::TestParamInfo<Extreme>& c) { return c.param.name; });

// Large but answerable: every policy gives finite numbers, statistics included.
TEST(EngineLimitsTest, LargeNumbersThatAreAnswered) {
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  for (const float key : {1.0f, 1e8f}) {
    for (const float value : {1.0f, 1e6f, 5e12f}) {
      TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 2, 1, 16, 16, DType::kFp32));
      Kv kv = RandomKv(sequence.shape(), 700, &random);
      for (size_t i = 0; i < kv.k.values.size(); ++i) {
        kv.k.Set(i, static_cast<float>(kv.k.values[i]) * key);
        kv.v.Set(i, static_cast<float>(kv.v.values[i]) * value);
      }
      ASSERT_TRUE(AppendNext(&sequence, 0, kv).ok());
      FinishPrefill(&sequence);
      for (const char* preset : {"dense", "clusters-top-k", "double-p", "error-target"}) {
        Row row = QueryOnlyRow(&sequence, 0, 1, &random);
        row.policy = PolicyOf(preset);
        const Message message(0, {row});
        const Answer answer = Send(engine.get(), message);
        ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
        const attention::RowStats& stats = answer.result.rows[0].stats;
        EXPECT_TRUE(std::isfinite(stats.covered_mass.value_or(0))) << preset << " " << value;
        EXPECT_TRUE(std::isfinite(stats.exact_mass.value_or(0))) << preset << " " << value;
        EXPECT_TRUE(std::isfinite(stats.predicted_error_mean.value_or(0)))
            << preset << " keys " << key << " values " << value;
        if (key == 1.0f && row.policy->selector == attention::Selector::kAll) {
          EXPECT_TRUE(IsDense(message, answer, 0)) << value;
        }
      }
    }
  }
}

}  // namespace
}  // namespace attnd::engine::test
