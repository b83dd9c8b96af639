// SPDX-License-Identifier: Apache-2.0
//
// Goal: payload that steps will read in place is mapped before the first of them comes, each piece
// once and never ahead of a step that maps; it is unmapped before its memory goes, and whatever is
// refused, fails or ends meanwhile costs nothing but speed. Method: the parts, and a backend, over
// a fake device that can hold a mapping up.
#include "gpu/memory/host_mapper.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "common/aligned_buffer.h"
#include "gpu/memory/host_pages.h"
#include "tests/gpu/agreement.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::kTreeIndexes;
using attention::test::RunStep;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSequence;

constexpr uint64_t kPage = 4096;

// ---- pieces ----

// Layers that begin and end within a page of the system's, and such of several pieces.
TEST(HostPagesTest, PiecesOfAllLayersAreTheMemory) {
  for (const uint64_t layer_bytes : {kPage, kPage / 2 * 5, uint64_t{1280}, kPage * 3 + 256}) {
    for (const uint32_t layers : {1u, 2u, 5u, 9u}) {
      for (const uint64_t most : {kPage, 2 * kPage, HostPages::kPieceBytesMax}) {
        FakePair fake = MakeFakeDevice(uint64_t{1} << 20, true);
        const AlignedBuffer memory(layer_bytes * layers);
        const uint64_t whole = (memory.size() + kPage - 1) / kPage * kPage;
        const std::span<const std::byte> span = {memory.data(), memory.size()};
        {
          HostPages by_steps(fake.device.get(), span, layers, 1, most);
          for (uint32_t layer = layers; layer-- > 0;) ASSERT_TRUE(by_steps.MapLayer(layer).ok());
          EXPECT_EQ(fake.control->mapped_bytes(), whole);
          EXPECT_FALSE(*by_steps.MapPiece());
        }
        EXPECT_EQ(fake.control->mapped_bytes(), 0u);
        HostPages pages(fake.device.get(), span, layers, 1, most);
        ASSERT_TRUE(pages.MapLayer(layers / 2).ok());
        EXPECT_GE(fake.control->mapped_bytes(), layer_bytes);
        EXPECT_LE(fake.control->mapped_bytes(), 2 * (layer_bytes + kPage));
        for (uint64_t before = fake.control->mapped_bytes(); *pages.MapPiece();) {
          const uint64_t now = fake.control->mapped_bytes();
          EXPECT_GT(now, before);
          EXPECT_LE(now - before, most);
          before = now;
        }
        EXPECT_EQ(fake.control->mapped_bytes(), whole);
        pages.Close();
        EXPECT_EQ(fake.control->mapped_bytes(), 0u);
        EXPECT_FALSE(*pages.MapPiece());
      }
    }
  }
}

// ---- the thread ----

class HostMapperTest : public testing::Test {
 protected:
  static constexpr uint32_t kPieces = 6;

  FakePair fake_ = MakeFakeDevice(uint64_t{1} << 20, true);
  const AlignedBuffer memory_{kPieces * kPage};
  const std::shared_ptr<HostPages> pages_ = std::make_shared<HostPages>(
      fake_.device.get(), std::span<const std::byte>(memory_.data(), memory_.size()), kPieces, 1);
};

TEST_F(HostMapperTest, AStepThatMapsGoesFirst) {
  HostMapper mapper([](const absl::Status&) {});
  fake_.control->HoldMaps(0);
  mapper.Add(pages_);
  fake_.control->AwaitHeldMap();  // the first piece, in the background
  const std::thread::id own = std::this_thread::get_id();
  {
    const HostMapper::Pause pause(&mapper);
    fake_.control->HoldMaps(kNever);
    for (const uint32_t layer : {3, 4}) ASSERT_TRUE(pages_->MapLayer(layer).ok());
    const std::vector<std::thread::id> mappers = fake_.control->mappers();
    ASSERT_EQ(mappers.size(), 3u);
    EXPECT_NE(mappers[0], own);
    EXPECT_EQ(mappers[1], own);
    EXPECT_EQ(mappers[2], own);
  }
  Await([&] { return fake_.control->mapped_bytes() == kPieces * kPage; });
  EXPECT_EQ(fake_.control->mappers().size(), kPieces) << "each piece once";
}

TEST_F(HostMapperTest, ShutdownEndsWithThePieceUnderWay) {
  HostMapper mapper([](const absl::Status&) {});
  fake_.control->HoldMaps(0);
  mapper.Add(pages_);
  fake_.control->AwaitHeldMap();
  {
    const HostMapper::Pause pause(&mapper);  // so that no second piece begins before
    fake_.control->HoldMaps(kNever);
    mapper.Shutdown();
  }
  mapper.Add(pages_);
  mapper.Shutdown();
  EXPECT_EQ(fake_.control->mapped_bytes(), kPage);
}

TEST_F(HostMapperTest, WhatIsRefusedIsToldOnceAndForgotten) {
  std::vector<absl::Status> told;
  {
    HostMapper mapper([&](const absl::Status& status) { told.push_back(status); });
    fake_.control->Set({.mapping = 2});
    mapper.Add(pages_);
    Await([&] { return fake_.control->refused_maps() > 0; });
  }
  ASSERT_EQ(told.size(), 1u);
  EXPECT_TRUE(absl::IsResourceExhausted(told[0])) << told[0];
  EXPECT_EQ(fake_.control->mapped_bytes(), 2 * kPage);
}

// ---- a backend ----

class HostMapping : public testing::Test {
 protected:
  // A backend whose page memory has become a cache, for a sequence that has been mapped.
  void Start(CudaBackendOptions options = OfPages(kFewPages)) {
    fake_ = MakeFakeBackend(options, /*maps_host_memory=*/true);
    Step(&first_);
    ASSERT_GT(fake_.backend->stats().cache.bytes, 0u);
    Await([&] { return mapped() == PayloadOf(first_); });
  }
  static uint64_t PayloadOf(const TestSequence& sequence) {
    uint64_t bytes = 0;
    for (const auto& segment : sequence.view->segments) {
      bytes += (segment->payload_block().size() + kPage - 1) / kPage * kPage;
    }
    return bytes;
  }
  uint64_t mapped() const { return fake_.control->mapped_bytes(); }
  void Expect(const TestSequence& sequence) const {
    for (const auto& segment : sequence.view->segments) fake_.backend->Expect(*segment);
  }
  // In the background, up to the first piece.
  void ExpectHeld(const TestSequence& sequence) const {
    fake_.control->HoldMaps(0);
    Expect(sequence);
    fake_.control->AwaitHeldMap();
  }
  void Step(TestSequence* sequence) const {
    std::vector<TestRow> rows = RowsOfLayer(sequence, 1);
    rows.resize(3);
    EXPECT_TRUE(
        Agree(RunStep(fake_.backend.get(), 1, rows), RunStep(MakeCpu().get(), 1, rows), rows));
  }

  const uint64_t seed_ = attention::test::TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  FakeBackend fake_;  // before the sequences, which it may outlive or not
  TestSequence first_ = HostSequence(0, kTreeIndexes);
  std::optional<TestSequence> second_ = HostSequence(1, kTreeIndexes);
};

TEST_F(HostMapping, NothingIsMappedWhileAllFits) {
  fake_ = MakeFakeBackend(OfPages(kFewPages), /*maps_host_memory=*/true);
  Expect(*second_);
  fake_.backend.reset();
  EXPECT_EQ(mapped(), 0u);
}

TEST_F(HostMapping, ItNeedsNoStepAndAStepMapsNothingMore) {
  Start();
  Expect(*second_);
  Await([&] { return mapped() == PayloadOf(first_) + PayloadOf(*second_); });
  const uint64_t maps = fake_.control->mappers().size();
  Step(&*second_);
  Expect(*second_);
  EXPECT_EQ(fake_.control->mappers().size(), maps);
  EXPECT_EQ(fake_.backend->stats().fallback_steps, 0u);
}

TEST_F(HostMapping, AStepThatComesMeanwhileDoesNotMapTwice) {
  Start();
  ExpectHeld(*second_);
  std::thread step([&] { Step(&*second_); });
  fake_.control->HoldMaps(kNever);
  step.join();
  Await([&] { return mapped() == PayloadOf(first_) + PayloadOf(*second_); });
  EXPECT_EQ(fake_.backend->stats().fallback_steps, 0u);
}

// The segments die while the background maps a piece of theirs.
TEST_F(HostMapping, FreedMemoryIsUnmappedFirst) {
  Start();
  ExpectHeld(*second_);
  std::atomic<bool> freed{false};
  std::thread free([&] {
    second_.reset();
    freed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(freed) << "memory went while it was being mapped";
  fake_.control->HoldMaps(kNever);
  free.join();
  EXPECT_EQ(mapped(), PayloadOf(first_));
  Step(&first_);
}

TEST_F(HostMapping, WithoutAStepTheCacheStaysAsLongAsTheSegments) {
  Start();
  Expect(*second_);
  first_ = TestSequence();
  EXPECT_GT(fake_.backend->stats().cache.bytes, 0u);
  second_.reset();
  EXPECT_EQ(mapped(), 0u);
  EXPECT_EQ(fake_.backend->stats().cache.bytes, 0u);
  EXPECT_EQ(fake_.backend->stats().pages.used_bytes, 0u);
}

// What no step has read yet gives its memory back, and what steps read keeps theirs.
TEST_F(HostMapping, ARefusalEndsWhatIsAheadOfSteps) {
  Start();
  const uint64_t of_steps = mapped();
  ASSERT_GT(of_steps, 0u);
  fake_.control->Set({.mapping = 1});
  Expect(*second_);
  Await([&] { return fake_.control->refused_maps() > 0 && mapped() == of_steps; });
  Expect(*second_);
  Step(&first_);
  EXPECT_EQ(fake_.backend->stats().fallback_steps, 0u);
  EXPECT_EQ(mapped(), of_steps);
  EXPECT_EQ(fake_.control->refused_maps(), 1u) << "it is not tried again";
}

TEST_F(HostMapping, ARefusalInAStepEndsAll) {
  Start();
  fake_.control->Set({.mapping = 0});
  Step(&*second_);
  Step(&first_);
  EXPECT_GT(fake_.backend->stats().fallback_steps, 0u) << "neither fits alone";
  EXPECT_EQ(mapped(), 0u);
  EXPECT_TRUE(fake_.backend->Health().ok());
}

TEST_F(HostMapping, AFaultIsTheDevices) {
  std::atomic<int> told{0};
  CudaBackendOptions options = OfPages(kFewPages);
  options.on_degraded = [&](const absl::Status& status) {
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    ++told;
  };
  Start(options);
  fake_.control->Set({.mapping_fault = 1});
  Expect(*second_);
  Await([&] { return told > 0; });
  EXPECT_FALSE(fake_.backend->Health().ok());
  Step(&*second_);
  Expect(*second_);
  EXPECT_EQ(told, 1);
}

TEST_F(HostMapping, ABackendMayEndMeanwhile) {
  Start();
  ExpectHeld(*second_);
  std::thread end([&] { fake_.backend.reset(); });
  fake_.control->HoldMaps(kNever);
  end.join();
  second_.reset();
  first_ = TestSequence();
  EXPECT_EQ(mapped(), 0u) << "the copies of segments outlive the backend";
}

}  // namespace
}  // namespace attnd::gpu::test
