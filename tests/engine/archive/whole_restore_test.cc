// SPDX-License-Identifier: Apache-2.0
//
// Goal: a backend that prefers whole segments has them for what is resumed, also while others have
// the same segments open page by page; where memory has no room for them, it has paged ones, until
// there is room.
// Method: the CPU's backend that says that it does.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "tests/engine/forwarding_backend.h"
#include "tests/engine/support.h"
#include "tests/temporary_folder.h"

namespace attnd::engine::test {
namespace {

class WholeBackend : public ForwardingBackend {
 public:
  bool PrefersWhole() const override { return true; }
};

// Appends tokens that wait for room in memory.
void FillMemory(Engine* engine, const TestSequence& sequence, uint64_t tokens, Random* random) {
  for (uint64_t done = 0; done < tokens; done += 250) {
    for (uint32_t layer = 0; layer < sequence.shape().layers; ++layer) {
      const Kv kv = RandomKv(sequence.shape(), 250, random);
      AppendChunk chunk = ChunkOf(layer, done, kv);
      chunk.may_wait = true;
      ASSERT_TRUE(engine->Append(kTenant, kWriter, sequence.id, chunk).ok());
    }
  }
}

TEST(WholeRestoreTest, APagedVersionIsNoneForWhoPrefersWholeOnes) {
  const attnd::test::TemporaryFolder folder;
  EngineOptions options = SmallOptions();
  options.memory_budget_bytes = uint64_t{8} << 20;
  options.archive.data_dir = folder.path();
  options.archive.page_memory_bytes = uint64_t{1} << 20;
  auto made = Engine::Create(options, std::make_unique<WholeBackend>(), nullptr);
  ASSERT_TRUE(made.ok()) << made.status();
  Engine* const engine = made->get();
  const ModelShape shape = MakeShape(2, 4, 2, 64, 64, DType::kBf16);
  Random random(TestSeed());

  TestSequence sequence = OpenSequence(engine, shape);
  Prefill(&sequence, 1100, &random);
  FinishPrefill(&sequence);
  const auto sealed = engine->Seal(kTenant, sequence.id, nullptr);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  // Another one takes the memory until the segments lie on disk, and gives it back.
  TestSequence other = OpenSequence(engine, shape);
  FillMemory(engine, other, 8000, &random);
  ASSERT_TRUE(engine->MayReadDisk(kTenant, sequence.id));
  ASSERT_TRUE(engine->Close(kTenant, other.id).ok());
  // Threads in the background may hold some of it for a moment.
  for (int i = 0; i < 20000 && engine->usage().resident_bytes > options.memory_budget_bytes / 2;
       ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  const auto opened = engine->Resume(kTenant, ArgsOf(shape), sealed->sealed_id, nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_FALSE(engine->MayReadDisk(kTenant, opened->sequence_id));
  TestSequence resumed(engine, opened->sequence_id, shape);
  resumed.history = sequence.history;
  EXPECT_TRUE(MatchesModel(&resumed, &random));
  EXPECT_TRUE(MatchesModel(&sequence, &random));
}

TEST(WholeRestoreTest, WhatHasMovedComesBack) {
  constexpr std::chrono::milliseconds kAfter{100}, kBetweenSteps{20};
  const ModelShape shape = MakeShape(2, 4, 2, 64, 64, DType::kBf16);
  Random random(TestSeed());
  for (const bool prefers_whole : {true, false}) {
    SCOPED_TRACE(prefers_whole);
    const attnd::test::TemporaryFolder folder;
    EngineOptions options = SmallOptions();
    options.memory_budget_bytes = uint64_t{8} << 20;
    options.archive.data_dir = folder.path();
    options.archive.page_memory_bytes = uint64_t{1} << 20;
    options.archive.comes_back_after = kAfter;
    auto backend =
        prefers_whole ? std::make_unique<WholeBackend>() : std::make_unique<ForwardingBackend>();
    auto made = Engine::Create(options, std::move(backend), nullptr);
    ASSERT_TRUE(made.ok()) << made.status();
    Engine* const engine = made->get();
    TestSequence used = OpenSequence(engine, shape), unused = OpenSequence(engine, shape);
    for (TestSequence* sequence : {&unused, &used}) {
      Prefill(sequence, 1100, &random);
      FinishPrefill(sequence);
    }
    TestSequence other = OpenSequence(engine, shape);
    FillMemory(engine, other, 8000, &random);
    const auto on_disk = [&] { return engine->MayReadDisk(kTenant, used.id); };
    ASSERT_GT(engine->archive_stats().paged_out_segments, 0u);
    ASSERT_TRUE(prefers_whole || on_disk()) << "some may have come back";
    ASSERT_TRUE(engine->Close(kTenant, other.id).ok());
    for (int i = 0; i < (prefers_whole ? 1000 : 20) && on_disk(); ++i) {
      EXPECT_TRUE(AnswersDense(&used, &random));
      std::this_thread::sleep_for(kBetweenSteps);
    }
    EXPECT_EQ(on_disk(), !prefers_whole);
    EXPECT_EQ(engine->archive_stats().paged_in_segments > 0, prefers_whole);
    EXPECT_TRUE(MatchesModel(&used, &random));
    EXPECT_TRUE(MatchesModel(&unused, &random));
  }
}

TEST(WholeRestoreTest, WhatHasNoRoomIsPaged) {
  const attnd::test::TemporaryFolder folder;
  const ModelShape shape = MakeShape(2, 4, 2, 64, 64, DType::kBf16);
  Random random(TestSeed());
  EngineOptions options = SmallOptions();
  options.archive.data_dir = folder.path();
  options.archive.page_memory_bytes = uint64_t{1} << 20;
  std::optional<History> history;
  uint64_t sealed_id = 0;
  for (const uint64_t budget : {uint64_t{64} << 20, uint64_t{6} << 20}) {
    options.memory_budget_bytes = budget;
    auto made = Engine::Create(options, std::make_unique<WholeBackend>(), nullptr);
    ASSERT_TRUE(made.ok()) << made.status();
    Engine* const engine = made->get();
    if (!history.has_value()) {
      TestSequence sequence = OpenSequence(engine, shape);
      Prefill(&sequence, 8000, &random);
      FinishPrefill(&sequence);
      const auto sealed = engine->Seal(kTenant, sequence.id, nullptr);
      ASSERT_TRUE(sealed.ok()) << sealed.status();
      sealed_id = sealed->sealed_id;
      history = sequence.history;
      continue;
    }
    const auto opened = engine->Resume(kTenant, ArgsOf(shape), sealed_id, nullptr);
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_TRUE(engine->MayReadDisk(kTenant, opened->sequence_id));
    TestSequence resumed(engine, opened->sequence_id, shape);
    resumed.history = *history;
    EXPECT_TRUE(AnswersDense(&resumed, &random));
  }
}

}  // namespace
}  // namespace attnd::engine::test
