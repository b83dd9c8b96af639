// SPDX-License-Identifier: Apache-2.0
//
// Goal: a Decode answer is attention over exactly the tokens of the sequence, whatever became of
// them: chunked upload, segments of a prefill, a tail, segments built in the background and swapped
// in while steps go on. Method: dense answers are compared with the double-precision oracle over a
// plain model of the history; where two ways must give the same answer (batch order, batch mates,
// chunking), bits are compared.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

struct ShapeCase {
  const char* name;
  ModelShape shape;
  DType query_dtype;
};

void PrintTo(const ShapeCase& c, std::ostream* out) { *out << c.name << " seed " << TestSeed(); }

class ShapesTest : public testing::TestWithParam<ShapeCase> {};

// The life of a sequence: prefill, segments, generation with background segments, multi-token rows,
// query_only rows.
TEST_P(ShapesTest, DenseEqualsTheOracleThroughoutALife) {
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  TestSequence sequence = OpenSequence(engine.get(), GetParam().shape);
  ASSERT_TRUE(MatchesModel(&sequence, &random));  // nothing there: zeros and -infinity

  Prefill(&sequence, 1300, &random);
  ASSERT_TRUE(MatchesModel(&sequence, &random));
  const PrefillResult prefill = FinishPrefill(&sequence);
  EXPECT_EQ(prefill.committed_tokens, 1300u);
  EXPECT_EQ(prefill.segmented_tokens,
            1024u);  // the rest outside the window is shorter than a segment
  EXPECT_EQ(sequence.Info().segments, 2u);
  ASSERT_TRUE(MatchesModel(&sequence, &random));

  for (const uint32_t tokens : {1u, 2u, 5u, 130u}) {
    for (uint32_t layer = 0; layer < sequence.shape().layers; ++layer) {
      const Message message(layer,
                            {NextRow(&sequence, layer, tokens, &random, GetParam().query_dtype)});
      ASSERT_TRUE(IsDense(message, Send(engine.get(), message), 0)) << tokens << " tokens";
    }
  }
  Generate(&sequence, 200, &random);
  engine->WaitForBackground();
  EXPECT_EQ(sequence.Info().segments, 3u);
  EXPECT_EQ(sequence.Info().segmented_tokens, 1536u);
  ASSERT_TRUE(MatchesModel(&sequence, &random));
  const Message message(0, {QueryOnlyRow(&sequence, 0, 7, &random)});
  EXPECT_TRUE(IsDense(message, Send(engine.get(), message), 0));
}

INSTANTIATE_TEST_SUITE_P(
    All, ShapesTest,
    testing::Values(
        ShapeCase{"Fp32", MakeShape(2, 2, 2, 16, 16, DType::kFp32), DType::kFp32},
        ShapeCase{"Bf16Group5", MakeShape(2, 10, 2, 32, 32, DType::kBf16), DType::kBf16},
        ShapeCase{"Fp16Group3", MakeShape(1, 3, 1, 48, 48, DType::kFp16), DType::kFp16},
        ShapeCase{"WideValues", MakeShape(3, 4, 2, 16, 48, DType::kFp32), DType::kBf16},
        ShapeCase{"LatentHead", MakeShape(1, 8, 1, 576, 512, DType::kBf16), DType::kBf16},
        ShapeCase{"Latent", MakeLatentShape(2, 16, 80, 64, DType::kFp32), DType::kBf16},
        ShapeCase{"LatentBf16", MakeLatentShape(1, 8, 576, 512, DType::kBf16), DType::kBf16},
        ShapeCase{"NarrowValues", MakeShape(2, 4, 1, 64, 16, DType::kBf16), DType::kFp32}),
    [](const testing::TestParamInfo<ShapeCase>& c) { return std::string(c.param.name); });

// Runs that end in the middle of a block, and a last one of its own length.
TEST(EngineDecodeTest, SegmentsThatEndAnywhere) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  for (const uint32_t segment_tokens : {540u, 575u, 639u, 700u}) {
    EngineOptions options = SmallOptions();
    options.segment_tokens = segment_tokens;
    const auto engine = MakeEngine(options);
    TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 2, 1, 16, 16, DType::kFp32));
    Prefill(&sequence, segment_tokens + 601, &random);
    EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, segment_tokens + 537);
    ASSERT_TRUE(MatchesModel(&sequence, &random));
    Generate(&sequence, segment_tokens, &random);
    engine->WaitForBackground();
    EXPECT_EQ(sequence.Info().segments, 3u);
    ASSERT_TRUE(MatchesModel(&sequence, &random)) << segment_tokens;
    Generate(&sequence, 2, &random, /*check=*/true);
  }
}

// Every step is checked while segments are built and swapped in behind it.
TEST(EngineDecodeTest, EveryStepIsRightWhileSegmentsAreSwappedIn) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  TestSequence sequence = OpenSequence(engine.get(), MakeShape(2, 2, 1, 16, 16, DType::kFp32));
  Prefill(&sequence, 400, &random);
  Generate(&sequence, 900, &random, /*check=*/true);
  engine->WaitForBackground();
  EXPECT_EQ(sequence.Info().segments, 2u);
  EXPECT_TRUE(MatchesModel(&sequence, &random));
}

TEST(EngineDecodeTest, RowsOfABatchBelongToTheirSequences) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  const ModelShape shape = MakeShape(2, 4, 2, 32, 16, DType::kBf16);
  std::vector<TestSequence> sequences;
  for (const uint64_t tokens : {0u, 10u, 64u, 700u, 1200u}) {
    sequences.push_back(OpenSequence(engine.get(), shape));
    if (tokens > 0) Prefill(&sequences.back(), tokens, &random);
    FinishPrefill(&sequences.back());
  }
  for (int step = 0; step < 4; ++step) {
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      std::vector<Row> rows;
      for (TestSequence& sequence : sequences) {
        const uint32_t tokens = 1 + static_cast<uint32_t>(random.Below(3));
        // The second sequence is only asked.
        rows.push_back(rows.size() == 1 ? QueryOnlyRow(&sequence, layer, tokens, &random)
                                        : NextRow(&sequence, layer, tokens, &random));
      }
      const Message message(layer, rows);
      const Answer answer = Send(engine.get(), message);
      for (size_t row = 0; row < rows.size(); ++row) EXPECT_TRUE(IsDense(message, answer, row));
      // Layers of one step have the same length.
      if (layer + 1 < shape.layers) continue;
      for (TestSequence& sequence : sequences) {
        const uint64_t missing =
            sequence.history.layers[0].tokens - sequence.history.layers[layer].tokens;
        if (missing > 0 && missing < 100) {
          ASSERT_TRUE(AppendNext(&sequence, layer, RandomKv(shape, missing, &random)).ok());
        }
      }
    }
  }
}

// The same rows alone, in a batch and in the batch reversed; cluster policies too.
TEST(EngineDecodeTest, MatesAndOrderDoNotChangeABit) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions(), nullptr, 4);
  const ModelShape shape = MakeShape(1, 6, 2, 32, 32, DType::kBf16);
  const std::vector<attention::Policy> policies = {
      PolicyOf("dense"),    PolicyOf("streaming"),    PolicyOf("clusters-top-k"),
      PolicyOf("double-p"), PolicyOf("error-target"), PolicyOf("dense")};
  std::vector<TestSequence> sequences;
  std::vector<Row> rows;
  sequences.reserve(policies.size());
  for (const attention::Policy& policy : policies) {
    sequences.push_back(OpenSequence(engine.get(), shape));
    Prefill(&sequences.back(), 600 + 400 * rows.size(), &random);
    FinishPrefill(&sequences.back());
    const uint32_t tokens = 1 + static_cast<uint32_t>(random.Below(4));
    rows.push_back(NextRow(&sequences.back(), 0, tokens, &random));
    rows.back().policy = policy;
  }
  std::vector<RowAnswer> alone;
  for (const Row& row : rows) {
    const Message message(0, {row});
    const Answer answer = Send(engine.get(), message);
    ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
    alone.push_back(AnswerOf(message, answer, 0));
  }
  for (int round = 0; round < 6; ++round) {  // all of these repeat the steps
    std::vector<size_t> order(rows.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random.generator());
    order.resize(1 + random.Below(order.size()));
    std::vector<Row> batch;
    for (const size_t i : order) batch.push_back(rows[i]);
    const Message message(0, batch);
    const Answer answer = Send(engine.get(), message);
    for (size_t i = 0; i < order.size(); ++i) {
      ASSERT_TRUE(answer.row_status(i).ok()) << answer.row_status(i);
      EXPECT_EQ(AnswerOf(message, answer, i), alone[order[i]])
          << "row " << order[i] << " in place " << i << " of round " << round;
    }
  }
}

// The same history uploaded whole and in pieces: segments, tail and later answers are the same, bit
// for bit.
TEST(EngineDecodeTest, ChunkingOfAPrefillDoesNotChangeABit) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  const ModelShape shape = MakeShape(3, 4, 2, 32, 16, DType::kBf16);
  TestSequence whole = OpenSequence(engine.get(), shape);
  Prefill(&whole, 1777, &random, /*chunked=*/false);
  FinishPrefill(&whole);
  for (int round = 0; round < 3; ++round) {
    TestSequence pieces = OpenSequence(engine.get(), shape);
    while (pieces.history.committed() < 1777) {
      const uint32_t layer = static_cast<uint32_t>(random.Below(shape.layers));
      const uint64_t have = pieces.history.layers[layer].tokens;
      if (have == 1777) continue;
      const uint64_t most = std::min<uint64_t>(1777 - have, round == 0 ? 70 : 900);
      const Kv kv = whole.history.Slice(layer, have, 1 + random.Below(most));
      ASSERT_TRUE(AppendNext(&pieces, layer, kv).ok());
    }
    FinishPrefill(&pieces);
    EXPECT_EQ(pieces.Info().segments, whole.Info().segments);
    for (const char* preset :
         {"dense", "streaming", "clusters-top-k", "double-p", "error-target"}) {
      for (uint32_t layer = 0; layer < shape.layers; ++layer) {
        Row row = QueryOnlyRow(&whole, layer, 2, &random);
        row.policy = PolicyOf(preset);
        const Message first(layer, {row});
        row.sequence = &pieces;
        const Message second(layer, {row});
        EXPECT_EQ(AnswerOf(first, Send(engine.get(), first), 0),
                  AnswerOf(second, Send(engine.get(), second), 0))
            << preset << " layer " << layer << " round " << round;
      }
    }
  }
}

// A row's own policy counts for that row alone.
TEST(EngineDecodeTest, RowsMayHaveTheirOwnPolicy) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  const ModelShape shape = MakeShape(1, 4, 2, 16, 16, DType::kFp32);
  TestSequence a = OpenSequence(engine.get(), shape, PolicyOf("double-p"));
  TestSequence b = OpenSequence(engine.get(), shape);
  for (TestSequence* sequence : {&a, &b}) {
    Prefill(sequence, 2200, &random);
    FinishPrefill(sequence);
  }
  Row dense = QueryOnlyRow(&a, 0, 1, &random);
  dense.policy = PolicyOf("dense");
  Row streaming = QueryOnlyRow(&b, 0, 1, &random);
  streaming.policy = PolicyOf("streaming");
  const Message message(0, {dense, streaming});
  const Answer answer = Send(engine.get(), message);
  ASSERT_TRUE(IsDense(message, answer, 0));
  ASSERT_TRUE(answer.row_status(1).ok());
  const attention::RowStats& all = answer.result.rows[0].stats;
  const attention::RowStats& zones = answer.result.rows[1].stats;
  const uint64_t middle = 2 * (b.Info().segmented_tokens - 4);  // two KV heads
  EXPECT_EQ(all.exact_tokens, middle);
  EXPECT_EQ(all.zone_tokens, 2 * 2200 - middle);
  EXPECT_EQ(zones.dropped_tokens, middle);
  EXPECT_EQ(zones.exact_tokens, 0u);
  EXPECT_FALSE(zones.covered_mass.has_value());

  // The sequence's own policy, when a row names none.
  const Answer own = SendRow(QueryOnlyRow(&a, 0, 1, &random), 0);
  ASSERT_TRUE(own.row_status(0).ok());
  EXPECT_LT(own.result.rows[0].stats.exact_tokens, middle);
}

// A repeated step gives the same bits and appends nothing, at every layer of a half-sent step too.
TEST(EngineDecodeTest, RepeatedStepsAnswerTheSame) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  const ModelShape shape = MakeShape(2, 2, 1, 16, 32, DType::kBf16);
  TestSequence sequence = OpenSequence(engine.get(), shape);
  Prefill(&sequence, 777, &random);
  FinishPrefill(&sequence);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const Message message(layer, {NextRow(&sequence, layer, 3, &random)});
    const Answer first = Send(engine.get(), message);
    ASSERT_TRUE(IsDense(message, first, 0));
    const SequenceInfo info = sequence.Info();
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Answer again = Send(engine.get(), message);
      ASSERT_TRUE(again.row_status(0).ok()) << again.row_status(0);
      EXPECT_EQ(AnswerOf(message, again, 0), AnswerOf(message, first, 0));
    }
    EXPECT_EQ(sequence.Info().layer_tokens, info.layer_tokens);
  }
}

// A row longer than the window is answered although its own first tokens leave the window with it,
// and again after the background has built every segment that it may: the newest step stays outside
// them.
TEST(EngineDecodeTest, RowsLongerThanTheWindow) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  for (const char* window : {"0", "64"}) {
    TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 2, 1, 16, 16, DType::kFp32),
                                         PolicyOf("dense", {{"window", window}}));
    for (int i = 0; i < 4; ++i) {
      const Message message(0, {NextRow(&sequence, 0, 600, &random)});
      ASSERT_TRUE(IsDense(message, Send(engine.get(), message), 0)) << window;
    }
    const Message newest(0, {NextRow(&sequence, 0, 600, &random)});
    ASSERT_TRUE(IsDense(newest, Send(engine.get(), newest), 0)) << window;
    engine->WaitForBackground();
    EXPECT_EQ(sequence.Info().segmented_tokens, 4u * 512u) << window;  // of the 4 * 600 before it
    ASSERT_TRUE(IsDense(newest, Send(engine.get(), newest), 0)) << window;
    ASSERT_TRUE(MatchesModel(&sequence, &random));
  }
}

// After a wait no full run of generated tokens is left, however fast they came.
TEST(EngineDecodeTest, TheBackgroundKeepsUp) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 1, 1, 16, 16, DType::kBf16));
  Prefill(&sequence, 5000, &random);  // never finished
  Generate(&sequence, 1, &random);
  engine->WaitForBackground();
  EXPECT_EQ(sequence.Info().segmented_tokens, (5001u - 64u) / 512 * 512);
  EXPECT_TRUE(MatchesModel(&sequence, &random));
}

}  // namespace
}  // namespace attnd::engine::test
