// SPDX-License-Identifier: Apache-2.0
//
// Goal: a sequence has one writer from the first token that it takes until that writer's stream
// ends, and what is counted as appended is what was new. Method: random appends (good, bad,
// repeated), steps, closed sequences and ended streams of several writers beside a plain model of
// who writes what.
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

using absl::StatusCode;

class AppendedObserver : public EventListener {
 public:
  void OnAppended(uint64_t tokens, bool prefill) override {
    EXPECT_GT(tokens, 0u);
    (prefill ? uploaded : generated) += tokens;
  }
  uint64_t uploaded = 0, generated = 0;
};

TEST(WritersTest, OneWriterUntilItsStreamEnds) {
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  const ModelShape shape = MakeShape(1, 1, 1, 16, 16, DType::kFp32);
  struct Written {
    TestSequence sequence;
    std::optional<WriterId> writer;
  };
  std::vector<Written> all;
  int aborted = 0;
  for (int step = 0; step < 3000; ++step) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << " step " << step);
    if (all.size() < 5) all.push_back({OpenSequence(engine.get(), shape), std::nullopt});
    const size_t number = random.Below(all.size());
    Written& written = all[number];
    const WriterId writer = 1 + random.Below(4);
    written.sequence.writer = writer;
    const bool mine = !written.writer.has_value() || *written.writer == writer;
    switch (random.Below(12)) {
      case 0:
        ASSERT_TRUE(engine->Close(kTenant, written.sequence.id).ok());
        all.erase(all.begin() + static_cast<ptrdiff_t>(number));
        break;
      case 1:
        engine->ReleaseWriter(writer);
        for (Written& each : all) {
          if (each.writer == writer) each.writer.reset();
        }
        break;
      case 2: {  // refused whoever sends it: makes nobody the writer
        Kv kv = RandomKv(shape, 1, &random);
        kv.v.Set(0, 1e30f);
        EXPECT_EQ(AppendNext(&written.sequence, 0, kv).code(),
                  mine ? StatusCode::kInvalidArgument : StatusCode::kAborted);
        break;
      }
      case 3:  // asking is not writing
        EXPECT_TRUE(SendRow(QueryOnlyRow(&written.sequence, 0, 1, &random), 0).row_status(0).ok());
        break;
      default: {
        const absl::Status status =
            random.Below(2) == 0
                ? AppendNext(&written.sequence, 0, RandomKv(shape, 1 + random.Below(3), &random))
                : DecodeNext(&written.sequence, 0, 1, &random).row_status(0);
        ASSERT_EQ(status.code(), mine ? StatusCode::kOk : StatusCode::kAborted) << status;
        if (mine) written.writer = writer;
        if (!mine) ++aborted;
      }
    }
  }
  EXPECT_GT(aborted, 100);
}

// Streams end while their sequences are closed: what one does the other finds done or half done.
TEST(WritersTest, StreamsEndWhileTheirSequencesClose) {
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  const ModelShape shape = MakeShape(1, 1, 1, 16, 16, DType::kFp32);
  constexpr WriterId kWriterOfAll = 7;
  for (int round = 0; round < 40; ++round) {
    std::vector<TestSequence> sequences;
    for (int i = 0; i < 5; ++i) {
      sequences.push_back(OpenSequence(engine.get(), shape));
      sequences.back().writer = kWriterOfAll;
      ASSERT_TRUE(AppendNext(&sequences.back(), 0, RandomKv(shape, 1, &random)).ok());
    }
    std::thread release([&] { engine->ReleaseWriter(kWriterOfAll); });
    for (const TestSequence& sequence : sequences) {
      EXPECT_TRUE(engine->Close(kTenant, sequence.id).ok());
    }
    release.join();
  }
}

TEST(WritersTest, RepeatsAreNotCountedAgain) {
  Random random(TestSeed());
  AppendedObserver observer;
  const auto engine = MakeEngine(SmallOptions(), &observer);
  const ModelShape shape = MakeShape(2, 1, 1, 16, 16, DType::kFp32);
  TestSequence sequence = OpenSequence(engine.get(), shape);
  Prefill(&sequence, 700, &random);
  FinishPrefill(&sequence);
  EXPECT_EQ(observer.uploaded, 700u);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const Kv all = sequence.history.Slice(layer, 0, 700);
    ASSERT_TRUE(engine->Append(kTenant, kWriter, sequence.id, ChunkOf(layer, 0, all)).ok());
  }
  EXPECT_EQ(observer.uploaded, 700u);
  Kv chunk = sequence.history.Slice(0, 600, 100);  // the last 100 and 20 new ones
  const Kv more = RandomKv(shape, 20, &random);
  chunk.k.Append(more.k);
  chunk.v.Append(more.v);
  chunk.tokens = 120;
  ASSERT_TRUE(engine->Append(kTenant, kWriter, sequence.id, ChunkOf(0, 600, chunk)).ok());
  sequence.history.Append(0, more);
  EXPECT_EQ(observer.uploaded, 720u);
  const Row row = NextRow(&sequence, 0, 3, &random);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(SendRow(row, 0).row_status(0).ok());
  EXPECT_EQ(observer.generated, 3u);
}

}  // namespace
}  // namespace attnd::engine::test
