// SPDX-License-Identifier: Apache-2.0
//
// Goal: what steps keep of a view from one step to the next is never stale: a step reads its own
// view's segments and tail blocks, whatever became of the device's memory and of other views since.
// Method: between two steps over a view its device copies are given up, or the sequence gets
// another view; every answer is compared with the CPU's over the same view.
#include "gpu/step/device_history.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/memory/arena.h"
#include "tests/gpu/agreement.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::kTailBlockTokens;
using attention::SequenceView;
using attention::TailBlock;
using attention::test::MakeRow;
using attention::test::RunStep;
using attention::test::SequenceSpec;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSeed;
using attention::test::TestSequence;

std::vector<TestRow> RowsOverHistory(TestSequence* sequence, uint32_t layer) {
  std::vector<TestRow> rows;
  for (const char* preset : {"error-target", "streaming", "dense"}) {
    rows.push_back(MakeRow(sequence, Parse(preset), sequence->spec.tokens() - 1, 1, false,
                           DType::kBf16, layer, TestSeed() + rows.size()));
  }
  return rows;
}

// Steps of both layers over the sequence's view, compared with the CPU's.
void ExpectCpusAnswers(attention::Backend* backend, TestSequence* sequence) {
  const auto cpu = MakeCpu();
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const std::vector<TestRow> rows = RowsOverHistory(sequence, layer);
    EXPECT_TRUE(Agree(RunStep(backend, layer, rows), RunStep(cpu.get(), layer, rows), rows))
        << "layer " << layer;
  }
}

// ---- the store and the history, without a backend ----

class DeviceHistoryTest : public testing::Test {
 protected:
  std::shared_ptr<DeviceCopyStore> MakeStore(uint64_t bytes) {
    FakePair fake = MakeFakeDevice(2 * bytes);
    auto pages = Arena::Create(fake.device.get(), "page", bytes);
    auto index = Arena::Create(fake.device.get(), "index", bytes);
    EXPECT_TRUE(pages.ok() && index.ok());
    return std::make_shared<DeviceCopyStore>(std::move(fake.device), *std::move(pages),
                                             *std::move(index));
  }
  static std::vector<std::shared_ptr<Resident>> Pin(DeviceCopyStore* store,
                                                    DeviceHistory::Copies copies) {
    std::vector<std::shared_ptr<Resident>> pins;
    EXPECT_TRUE(store->Pin(copies, PagesIn::kAnyMemory, &pins).ok());
    EXPECT_EQ(pins.size(), copies.size());
    return pins;
  }

  TestSequence sequence_ = MakeHistory(0);
};

TEST_F(DeviceHistoryTest, IsFoundWithItsViewAndDiesWithIt) {
  const auto store = MakeStore(uint64_t{8} << 20);
  std::weak_ptr<const DeviceHistory> weak;
  {
    const auto view = std::make_shared<SequenceView>(*sequence_.view);
    weak = DeviceHistory::Of(*view, store.get());
    EXPECT_EQ(DeviceHistory::Of(*view, store.get()), weak.lock());
    EXPECT_EQ(weak.lock()->segments().size(), 2u);
    EXPECT_EQ(weak.lock()->tail_blocks().size(), view->tail.size());
  }
  EXPECT_TRUE(weak.expired());
}

// Views that share segments and blocks share their copies; the history is each view's own.
TEST_F(DeviceHistoryTest, ACopiedViewHasItsOwn) {
  const auto store = MakeStore(uint64_t{8} << 20);
  const auto first = DeviceHistory::Of(*sequence_.view, store.get());
  auto longer = std::make_shared<SequenceView>(*sequence_.view);
  longer->tail.push_back(std::make_shared<TailBlock>(longer->shape));
  const auto second = DeviceHistory::Of(*longer, store.get());
  EXPECT_NE(first, second);
  EXPECT_EQ(first->segments()[1], second->segments()[1]);
  EXPECT_EQ(first->tail_blocks()[0], second->tail_blocks()[0]);
  EXPECT_EQ(second->tail_blocks().size(), first->tail_blocks().size() + 1);
  EXPECT_EQ(DeviceHistory::Of(*sequence_.view, store.get()), first);
}

TEST_F(DeviceHistoryTest, AnotherStoreMakesAnother) {
  const auto one = MakeStore(uint64_t{8} << 20), other = MakeStore(uint64_t{8} << 20);
  const auto first = DeviceHistory::Of(*sequence_.view, one.get());
  const auto second = DeviceHistory::Of(*sequence_.view, other.get());
  EXPECT_EQ(second->owner(), other.get());
  EXPECT_NE(first->segments()[0], second->segments()[0]);
  EXPECT_EQ(DeviceHistory::Of(*sequence_.view, one.get())->owner(), one.get());
}

TEST_F(DeviceHistoryTest, AChangedViewIsNoticed) {
  const auto store = MakeStore(uint64_t{8} << 20);
  const auto view = std::make_shared<SequenceView>(*sequence_.view);
  DeviceHistory::Of(*view, store.get());
  view->tail.pop_back();
  EXPECT_DEATH(DeviceHistory::Of(*view, store.get()), "a view has changed");
}

// A history keeps no memory: what no step pins can be given up, and comes back empty.
TEST_F(DeviceHistoryTest, PinsNothingByItself) {
  const uint64_t bytes = sequence_.view->segments[0]->payload_block().size();
  const auto store = MakeStore(bytes + bytes / 2);  // one of the two segments
  const auto history = DeviceHistory::Of(*sequence_.view, store.get());
  const auto segments = history->segments();
  {
    const auto pins = Pin(store.get(), segments.first(1));
    pins[0]->RaiseTokens(0, sequence_.view->segments[0]->tokens());
    std::vector<std::shared_ptr<Resident>> both;
    EXPECT_TRUE(absl::IsResourceExhausted(store->Pin(segments, PagesIn::kAnyMemory, &both)));
    EXPECT_EQ(both, pins) << "the copies before the one without room are pinned";
    EXPECT_EQ(store->evictions(), 0u);
  }
  EXPECT_GT(Pin(store.get(), segments.first(1))[0]->tokens(0), 0u);
  Pin(store.get(), segments.subspan(1));
  EXPECT_EQ(store->evictions(), 1u);
  EXPECT_EQ(Pin(store.get(), segments.first(1))[0]->tokens(0), 0u);
  EXPECT_EQ(store->evictions(), 2u);
}

TEST_F(DeviceHistoryTest, TheLeastRecentlyPinnedIsGivenUpFirst) {
  const uint64_t block = sequence_.view->tail[0]->size();
  const auto store = MakeStore(2 * block);
  const auto history = DeviceHistory::Of(*sequence_.view, store.get());
  const auto blocks = history->tail_blocks();
  ASSERT_GE(blocks.size(), 3u);
  const auto at = [&](size_t i) { return Pin(store.get(), blocks.subspan(i, 1))[0]; };
  at(0)->RaiseTokens(0, 1);
  at(1)->RaiseTokens(0, 1);
  EXPECT_EQ(at(0)->tokens(0), 1u);
  at(2);  // in place of block 1
  EXPECT_EQ(at(0)->tokens(0), 1u);
  EXPECT_EQ(at(1)->tokens(0), 0u);
}

// ---- steps ----

TEST(DeviceHistorySteps, MemoryIsGivenUpBetweenSteps) {
  CudaBackendOptions options = SmallOptions();
  options.device_memory_bytes = kDeviceMemoryBytesMin;
  const FakeBackend fake = MakeFakeBackend(options);
  TestSequence sequence = MakeHistory(0);
  ExpectCpusAnswers(fake.backend.get(), &sequence);
  EXPECT_EQ(fake.backend->stats().evictions, 0u);
  std::vector<TestSequence> others;
  for (uint64_t s = 1; s <= 10; ++s) {
    others.push_back(MakeHistory(s));
    EXPECT_TRUE(RunStep(fake.backend.get(), 0, RowsOverHistory(&others.back(), 0)).status.ok());
  }
  const uint64_t evictions = fake.backend->stats().evictions;
  EXPECT_GT(evictions, 0u);
  ExpectCpusAnswers(fake.backend.get(), &sequence);
  EXPECT_GT(fake.backend->stats().evictions, evictions) << "the sequence was on the device";
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

// As after a truncation: blocks of other tokens, in place of those that steps have read.
TEST(DeviceHistorySteps, OtherBlocksInThePlaceOfOld) {
  const FakeBackend fake = MakeFakeBackend();
  TestSequence sequence = MakeHistory(0), other = MakeHistory(1);
  const std::shared_ptr<const SequenceView> old = sequence.view;
  ExpectCpusAnswers(fake.backend.get(), &sequence);
  const StepResult before = RunStep(fake.backend.get(), 0, RowsOverHistory(&sequence, 0));
  auto changed = std::make_shared<SequenceView>(*old);
  changed->tail.back() = other.view->tail.back();
  sequence.view = changed;
  ExpectCpusAnswers(fake.backend.get(), &sequence);
  const StepResult after = RunStep(fake.backend.get(), 0, RowsOverHistory(&sequence, 0));
  EXPECT_FALSE(SameBits(before.rows[0], after.rows[0]));
  sequence.view = old;
  const StepResult again = RunStep(fake.backend.get(), 0, RowsOverHistory(&sequence, 0));
  for (size_t r = 0; r < again.rows.size(); ++r) {
    EXPECT_TRUE(SameBits(before.rows[r], again.rows[r])) << "row " << r;
  }
}

// As where a segment is built of the tail, or dropped by a truncation or a fork.
TEST(DeviceHistorySteps, SegmentsComeAndGo) {
  const FakeBackend fake = MakeFakeBackend();
  for (const attention::IndexSet& indexes : {attention::kTreeIndexes, attention::kClusterIndexes}) {
    SequenceSpec whole = SpecOf({4, 2, 64, 64, {700, 600}, 120, indexes}, DType::kBf16);
    SequenceSpec fewer = whole;
    fewer.segment_tokens = {700};
    fewer.tail_tokens = 720;
    ASSERT_EQ(whole.tokens(), fewer.tokens());
    const auto heads = attention::test::MakeHeads(whole);
    TestSequence sequence = MakeSequenceOf(fewer, heads);
    ExpectCpusAnswers(fake.backend.get(), &sequence);
    const auto before = sequence.view;
    sequence.view = MakeSequenceOf(whole, heads).view;
    ExpectCpusAnswers(fake.backend.get(), &sequence);
    sequence.view = before;
    ExpectCpusAnswers(fake.backend.get(), &sequence);
  }
}

TEST(DeviceHistorySteps, BackendsTakeTurnsOverOneView) {
  TestSequence sequence = MakeHistory(0);
  const FakeBackend one = MakeFakeBackend(), other = MakeFakeBackend();
  for (int round = 0; round < 2; ++round) {
    ExpectCpusAnswers(one.backend.get(), &sequence);
    ExpectCpusAnswers(other.backend.get(), &sequence);
  }
}

// A view's memory on the device goes with the view, whoever was the last to refer to it.
TEST(DeviceHistorySteps, ADroppedViewLeavesNothing) {
  const FakeBackend fake = MakeFakeBackend();
  {
    TestSequence sequence = MakeHistory(0);
    ExpectCpusAnswers(fake.backend.get(), &sequence);
    sequence.view = std::make_shared<SequenceView>(*sequence.view);
    ExpectCpusAnswers(fake.backend.get(), &sequence);
    EXPECT_GT(fake.backend->stats().pages.used_bytes, 0u);
  }
  EXPECT_EQ(fake.backend->stats().pages.used_bytes, 0u);
  EXPECT_EQ(fake.backend->stats().index.used_bytes, 0u);
}

TEST(DeviceHistorySteps, ANewViewMayBeReadByManyAtOnce) {
  const FakeBackend fake = MakeFakeBackend();
  TestSequence sequence = MakeHistory(0);
  const std::vector<TestRow> rows = RowsOverHistory(&sequence, 0);
  const StepResult expected = RunStep(fake.backend.get(), 0, rows);
  for (int round = 0; round < 4; ++round) {
    sequence.view = std::make_shared<SequenceView>(*sequence.view);
    std::vector<StepResult> results(3);
    std::vector<std::thread> threads;
    for (StepResult& result : results) {
      threads.emplace_back([&] { result = RunStep(fake.backend.get(), 0, rows); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const StepResult& result : results) {
      ASSERT_TRUE(result.status.ok()) << result.status;
      for (size_t r = 0; r < rows.size(); ++r) {
        EXPECT_TRUE(SameBits(result.rows[r], expected.rows[r])) << "row " << r;
      }
    }
  }
}

}  // namespace
}  // namespace attnd::gpu::test
