// SPDX-License-Identifier: Apache-2.0
//
// Goal: numbers that single precision cannot answer are refused before anything is appended, and
// only for as long as the sequence has them. Method: keys of very different sizes in random
// histories (chunks, steps, segments of a prefill and of the background, truncations, forks); after
// each operation a question just within what the layer's greatest key allows is answered and one
// just beyond is refused. Values at and beyond their limit in chunks and rows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/sequence/magnitude.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

using absl::StatusCode;
using testing::HasSubstr;

// The product of query, key and head_dim that is still answered.
constexpr double kLogitMax = 1e18;

// Random keys of size 1, one of them a power of two.
Kv KvWithALargeKey(const ModelShape& shape, uint64_t tokens, Random* random) {
  Kv kv = RandomKv(shape, tokens, random);
  kv.k.Set(random->Below(kv.k.values.size()),
           std::ldexp(1.0f, static_cast<int>(random->Below(55))));
  return kv;
}

double GreatestKey(const TestSequence& sequence, uint32_t layer) {
  double greatest = 0;
  for (const double k : sequence.history.layers[layer].k.values) {
    greatest = std::max(greatest, std::abs(k));
  }
  return greatest;
}

// Whether each layer takes its queries for what its keys are.
testing::AssertionResult BoundsAreExact(TestSequence* sequence, Random* random) {
  const ModelShape& shape = sequence->shape();
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    const double greatest = GreatestKey(*sequence, layer);
    if (greatest == 0) continue;
    const double limit = kLogitMax / shape.softmax_scale / shape.head_dim / greatest;
    for (const double share : {0.99, 1.01}) {
      Row row = QueryOnlyRow(sequence, layer, 1, random);
      for (size_t i = 0; i < row.q.values.size(); ++i) row.q.Set(i, 0);
      row.q.Set(0, static_cast<float>(share * limit));
      const absl::Status status = SendRow(row, layer).row_status(0);
      if (status.code() == (share < 1 ? StatusCode::kOk : StatusCode::kOutOfRange)) continue;
      return testing::AssertionFailure() << "layer " << layer << ", greatest key " << greatest
                                         << ", " << share << " of the limit: " << status;
    }
  }
  return testing::AssertionSuccess();
}

TEST(MagnitudesTest, KeysCountForAsLongAsTheyAreThere) {
  Random random(TestSeed());
  const ModelShape shape = MakeShape(2, 2, 2, 16, 16, DType::kBf16);
  for (const char* window : {"0", "64"}) {
    EngineOptions options = SmallOptions();
    options.segment_tokens = 512 + static_cast<uint32_t>(random.Below(100));
    const auto engine = MakeEngine(options);
    TestSequence sequence =
        OpenSequence(engine.get(), shape, PolicyOf("dense", {{"window", window}}));
    for (int step = 0; step < 150; ++step) {
      SCOPED_TRACE(testing::Message()
                   << "seed " << TestSeed() << " window " << window << " step " << step);
      const uint64_t committed = sequence.history.committed();
      uint64_t length = random.Below(committed + 1);
      if (random.Below(2) == 0) length = committed - std::min(committed, random.Below(80));
      switch (random.Below(committed > 2500 ? 2 : 5)) {
        case 0:
          ASSERT_TRUE(engine->Truncate(kTenant, sequence.id, length).ok());
          sequence.history.Truncate(length);
          break;
        case 1: {
          const auto fork = engine->Fork(kTenant, sequence.id, length);
          ASSERT_TRUE(fork.ok()) << fork.status();
          TestSequence child(engine.get(), fork->id, shape);
          child.history = sequence.history;
          child.history.Truncate(length);
          ASSERT_TRUE(BoundsAreExact(&child, &random));
          ASSERT_TRUE(engine->Close(kTenant, child.id).ok());
          break;
        }
        case 2:
          FinishPrefill(&sequence);
          break;
        default: {
          const uint64_t tokens = 1 + random.Below(random.Below(2) == 0 ? 5 : 500);
          for (uint32_t layer = 0; layer < shape.layers; ++layer) {
            ASSERT_TRUE(AppendNext(&sequence, layer, KvWithALargeKey(shape, tokens, &random)).ok());
          }
        }
      }
      ASSERT_TRUE(BoundsAreExact(&sequence, &random));
    }
  }
}

// A chunk that repeats its first part adds only its new keys.
TEST(MagnitudesTest, KeysOfAChunkThatRepeatsInPart) {
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 1, 1, 16, 16, DType::kFp32));
  Prefill(&sequence, 100, &random);
  const Kv more = KvWithALargeKey(sequence.shape(), 200, &random);
  Kv chunk = sequence.history.Slice(0, 50, 50);
  chunk.k.Append(more.k);
  chunk.v.Append(more.v);
  chunk.tokens = 250;
  ASSERT_TRUE(engine->Append(kTenant, kWriter, sequence.id, ChunkOf(0, 50, chunk)).ok());
  sequence.history.Append(0, more);
  EXPECT_TRUE(BoundsAreExact(&sequence, &random));
}

// One key of 1e30 that has been truncated away, or was never forked, hinders nobody.
TEST(MagnitudesTest, AKeyThatIsGoneHindersNobody) {
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 1, 1, 16, 16, DType::kFp32));
  Prefill(&sequence, 1000, &random);
  Kv bad = RandomKv(sequence.shape(), 1, &random);
  bad.k.Set(3, 1e30f);
  ASSERT_TRUE(AppendNext(&sequence, 0, bad).ok());
  EXPECT_EQ(DecodeNext(&sequence, 0, 1, &random).row_status(0).code(), StatusCode::kOutOfRange);
  const auto fork = engine->Fork(kTenant, sequence.id, 1000);
  ASSERT_TRUE(fork.ok());
  TestSequence child(engine.get(), fork->id, sequence.shape());
  child.history = sequence.history;
  child.history.Truncate(1000);
  Generate(&child, 2, &random, true);
  ASSERT_TRUE(engine->Truncate(kTenant, sequence.id, 1000).ok());
  sequence.history.Truncate(1000);
  Generate(&sequence, 2, &random, true);
}

// Beyond kValueMax: refused by name, in chunks and in rows, and nothing is appended.
TEST(MagnitudesTest, ValuesBeyondTheirLimitAreRefused) {
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 2, 1, 16, 32, dtype));
    Prefill(&sequence, 700, &random);
    FinishPrefill(&sequence);
    const State state = StateOf(&sequence);
    for (const float value : {1.1e13f, -1e15f, 1e30f, -3e38f}) {
      Kv kv = RandomKv(sequence.shape(), 3, &random);
      kv.v.Set(random.Below(kv.v.values.size()), value);
      Row row = NextRow(&sequence, 0, 3, &random);
      row.kv = kv;
      for (const absl::Status& status :
           {AppendNext(&sequence, 0, kv), SendRow(row, 0).row_status(0)}) {
        EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
        EXPECT_THAT(std::string(status.message()), HasSubstr("v has numbers up to "));
        EXPECT_THAT(std::string(status.message()), HasSubstr("up to 1e+13"));
        EXPECT_TRUE(Unchanged(&sequence, state));
      }
    }
    Kv kv = RandomKv(sequence.shape(), 2, &random);
    kv.v.Set(5, dtype == DType::kFp32 ? -kValueMax : 9.9e12f);
    EXPECT_TRUE(AppendNext(&sequence, 0, kv).ok());
    Row row = NextRow(&sequence, 0, 2, &random);
    row.kv = kv;
    const Message message(0, {row});
    EXPECT_TRUE(IsDense(message, Send(engine.get(), message), 0));
  }
}

// A latent shape's values are the fronts of its keys: the limit is theirs, not the rest's.
TEST(MagnitudesTest, LatentValuesBeyondTheirLimitAreRefused) {
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    TestSequence sequence = OpenSequence(engine.get(), MakeLatentShape(1, 2, 48, 32, dtype));
    Prefill(&sequence, 70, &random);
    const State state = StateOf(&sequence);
    for (const size_t channel : {0u, 31u}) {
      Kv kv = RandomKv(sequence.shape(), 3, &random);
      kv.k.Set(48 + channel, -1.1e13f);
      Row row = NextRow(&sequence, 0, 3, &random);
      row.kv = kv;
      for (const absl::Status& status :
           {AppendNext(&sequence, 0, kv), SendRow(row, 0).row_status(0)}) {
        EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
        EXPECT_THAT(std::string(status.message()), HasSubstr("k, whose front is the value,"));
        EXPECT_THAT(std::string(status.message()), HasSubstr("up to 1e+13"));
        EXPECT_TRUE(Unchanged(&sequence, state));
      }
    }
    Kv kv = RandomKv(sequence.shape(), 3, &random);
    kv.k.Set(48 + 32, -1.1e13f);
    EXPECT_TRUE(AppendNext(&sequence, 0, kv).ok());
    Row row = NextRow(&sequence, 0, 3, &random);
    row.kv.k.Set(48 + 31, std::numeric_limits<float>::infinity());
    EXPECT_THAT(std::string(SendRow(row, 0).row_status(0).message()), HasSubstr("k has a NaN"));
  }
}

// All values at their limit, weights as equal as they can be: answers and statistics are finite.
TEST(MagnitudesTest, ValuesAtTheirLimitAreAnswered) {
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  TestSequence sequence =
      OpenSequence(engine.get(), MakeShape(1, 2, 1, 16, kHeadDimMax, DType::kFp32));
  Kv kv = RandomKv(sequence.shape(), 3000, &random);
  for (size_t i = 0; i < kv.k.values.size(); ++i) {
    kv.k.Set(i, static_cast<float>(kv.k.values[i]) * 1e-3f);
  }
  for (size_t i = 0; i < kv.v.values.size(); ++i) kv.v.Set(i, kValueMax);
  ASSERT_TRUE(AppendNext(&sequence, 0, kv).ok());
  FinishPrefill(&sequence);
  for (const char* preset : {"dense", "streaming", "clusters-top-k", "double-p", "error-target"}) {
    Row row = QueryOnlyRow(&sequence, 0, 1, &random);
    row.policy = PolicyOf(preset);
    const Message message(0, {row});
    const Answer answer = Send(engine.get(), message);
    ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
    for (const float out : AnswerOf(message, answer, 0).out) {
      EXPECT_NEAR(out / kValueMax, 1, 1e-4) << preset;
    }
    const attention::RowStats& stats = answer.result.rows[0].stats;
    EXPECT_TRUE(std::isfinite(stats.predicted_error_mean.value_or(0))) << preset;
    EXPECT_TRUE(std::isfinite(stats.predicted_error_max.value_or(0))) << preset;
  }
}

}  // namespace
}  // namespace attnd::engine::test
