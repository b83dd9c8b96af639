// SPDX-License-Identifier: Apache-2.0
//
// Goal: early segments change what a step reads and nothing else: answers, what is sealed, and what
// callers are told; and their memory is counted, left to others where it is short, and given back.
// Method: engines whose policies read every token, so that each answer must be the oracle's.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "attention/index/segment_builder.h"
#include "attention/segment/segment.h"
#include "engine/sequence/early_segments.h"
#include "engine/sequence/sequence.h"
#include "tests/engine/archive/archive_fixture.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

constexpr uint32_t kEarly = EarlySegments::kTokens;

// Counts what is built, by trigger.
class TriggerObserver : public EventListener {
 public:
  void OnSegmentBuilt(BuildTrigger trigger, uint64_t tokens, std::chrono::nanoseconds) override {
    ++built[static_cast<size_t>(trigger)];
    EXPECT_TRUE(trigger != BuildTrigger::kEarly || tokens == kEarly) << tokens;
  }
  void OnSegmentBuildFailed(BuildTrigger, const absl::Status&) override { ++failed; }
  uint64_t early() const { return built[static_cast<size_t>(BuildTrigger::kEarly)]; }
  uint64_t full() const { return built[static_cast<size_t>(BuildTrigger::kBackground)]; }

  std::array<std::atomic<uint64_t>, 3> built{};
  std::atomic<uint64_t> failed{0};
};

class EarlyEngineTest : public ArchiveFixture {
 protected:
  EarlyEngineTest() : ArchiveFixture(MakeShape(2, 4, 2, 16, 16, DType::kBf16)) {}
  ~EarlyEngineTest() override { engine_.reset(); }  // before its observer

  EngineOptions Options(uint64_t budget) const {
    EngineOptions options = ArchiveFixture::Options();
    options.segment_tokens = kSegment;
    options.memory_budget_bytes = budget;
    return options;
  }
  // A prompt with one segment, over a tree.
  TestSequence OpenPrompt(const std::optional<attention::Policy>& policy) {
    OpenArgs args = Args();
    args.policy = policy;
    args.indexes = attention::kTreeIndexes;
    TestSequence sequence = Open(args);
    Prefill(&sequence, 700, &random_);
    FinishPrefill(&sequence);
    return sequence;
  }
  // Steps of some tokens, every fourth answer compared with the oracle.
  void GenerateDense(TestSequence* sequence, uint64_t tokens) {
    for (uint64_t done = 0; done < tokens; done += kStep) {
      for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const Message message(layer, {NextRow(sequence, layer, kStep, &random_)});
        const Answer answer = Send(engine_.get(), message);
        ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
        if (done / kStep % 4 == 0) {
          ASSERT_TRUE(IsDense(message, answer, 0)) << "at " << sequence->history.committed();
        }
        zone_tokens_ = answer.result.rows[0].stats.zone_tokens;
      }
      engine_->WaitForBackground();
    }
  }

  static constexpr uint32_t kSegment = 3 * kEarly;
  static constexpr uint32_t kStep = 64;
  TriggerObserver observer_;
  uint64_t zone_tokens_ = 0;  // of the last step, summed over its tokens and KV heads
};

// Every token is read exactly, in segments or in the tail: once each, or the sums would differ.
TEST_F(EarlyEngineTest, PoliciesThatReadAllAnswerDensely) {
  for (const attention::Policy& policy :
       {PolicyOf("dense"), PolicyOf("error-target", {{"tolerance", "0"}}),
        PolicyOf("double-p", {{"p1", "1"}, {"p2", "1"}})}) {
    SCOPED_TRACE(policy.preset);
    Start(Options(uint64_t{256} << 20), &observer_);
    observer_.built[2] = observer_.built[1] = 0;
    const uint64_t before = engine_->usage().resident_bytes;
    TestSequence sequence = OpenPrompt(policy);
    GenerateDense(&sequence, 2 * kEarly + 128);
    EXPECT_EQ(observer_.early(), 2u);
    EXPECT_EQ(observer_.full(), 0u);
    // Of each token: the sink and the tail behind the early segments.
    EXPECT_LT(zone_tokens_, uint64_t{kStep} * 2 * (4 + kEarly));
    EXPECT_EQ(sequence.Info().segments, 1u);
    GenerateDense(&sequence, kEarly + 128);
    EXPECT_EQ(observer_.full(), 1u);
    EXPECT_EQ(sequence.Info().segments, 2u);
    GenerateDense(&sequence, kEarly);
    EXPECT_EQ(observer_.failed.load(), 0u);
    EXPECT_TRUE(MatchesModel(&sequence, &random_));
    ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
    EXPECT_EQ(engine_->usage().resident_bytes, before);
  }
}

// Memory is what the books say, and a truncation or a full segment gives it back.
TEST_F(EarlyEngineTest, TheirMemoryIsCountedAndComesBack) {
  Start(Options(uint64_t{256} << 20), &observer_);
  TestSequence sequence = OpenPrompt(PolicyOf("dense"));
  Generate(&sequence, 64, &random_);
  const uint64_t length = sequence.history.committed();
  const uint64_t before = sequence.Info().resident_bytes, used = engine_->usage().resident_bytes;
  Generate(&sequence, 2 * kEarly, &random_);
  engine_->WaitForBackground();
  ASSERT_EQ(observer_.early(), 2u);
  const attention::SegmentForm form = {shape_, attention::kTreeIndexes, kEarly, 0};
  const uint64_t copies =
      2 * (attention::Segment::IndexBytes(form) + attention::Segment::PayloadBytes(form));
  const uint64_t tail = 2 * kEarly * shape_.token_bytes();
  EXPECT_GE(sequence.Info().resident_bytes, before + tail + copies);
  EXPECT_GE(engine_->usage().resident_bytes, used + tail + copies);
  ASSERT_TRUE(engine_->Truncate(kTenant, sequence.id, length).ok());
  sequence.history.Truncate(length);
  EXPECT_EQ(sequence.Info().resident_bytes, before);
  EXPECT_LE(engine_->usage().resident_bytes, used + 1024);  // lists may stay longer
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

// Copies leave the last quarter of memory to tokens that have no other place: the tail stays exact,
// nobody is told of an error, and once there is room they come.
TEST_F(EarlyEngineTest, ShortMemoryLeavesTheTailExact) {
  EngineOptions options = Options(uint64_t{4} << 20);
  options.archive.data_dir.clear();  // nothing can move
  Start(options, &observer_);
  TestSequence sequence = OpenPrompt(PolicyOf("dense"));
  TestSequence filler = OpenSequence(engine_.get(), shape_);
  while (engine_->usage().resident_bytes < options.memory_budget_bytes * 13 / 16) {
    Prefill(&filler, 64, &random_, false);
  }
  const uint64_t length = sequence.history.committed();
  GenerateDense(&sequence, kEarly + 128);
  EXPECT_EQ(observer_.early(), 0u);
  EXPECT_EQ(observer_.failed.load(), 0u);
  EXPECT_GT(zone_tokens_, uint64_t{kStep} * 2 * (sequence.history.committed() - length - kStep));
  ASSERT_TRUE(engine_->Close(kTenant, filler.id).ok());
  GenerateDense(&sequence, 3 * Sequence::kBuildDelayMin);
  EXPECT_EQ(observer_.early(), 1u);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

// Where memory is left for a full segment or for copies of its tokens, the copies go.
TEST_F(EarlyEngineTest, MakeRoomForTheFullSegment) {
  EngineOptions options = Options(uint64_t{16} << 20);
  options.archive.data_dir.clear();  // nothing can move
  Start(options, &observer_);
  TestSequence sequence = OpenPrompt(PolicyOf("dense"));
  GenerateDense(&sequence, 2 * kEarly + 128);
  ASSERT_EQ(observer_.early(), 2u);
  const auto bytes = [&](uint32_t tokens) {
    const attention::SegmentForm form = {shape_, attention::kTreeIndexes, tokens, 0};
    return attention::Segment::IndexBytes(form) + attention::Segment::PayloadBytes(form);
  };
  const uint64_t scratch =
      attention::HeadBuilder::ScratchBytes({shape_, attention::kTreeIndexes, kSegment, 0});
  const uint64_t tail = kEarly * shape_.token_bytes();
  // With the copies there is half of their room too little, and without them half of it too much.
  const uint64_t wanted = bytes(kSegment) + scratch + tail - bytes(kEarly);
  TestSequence filler = OpenSequence(engine_.get(), shape_);
  while (engine_->usage().resident_bytes + wanted < options.memory_budget_bytes) {
    Prefill(&filler, 64, &random_, false);
  }
  GenerateDense(&sequence, kEarly);
  EXPECT_EQ(observer_.full(), 1u);
  EXPECT_EQ(observer_.early(), 2u);
  EXPECT_EQ(sequence.Info().segments, 2u);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

// What is written down is the tail.
TEST_F(EarlyEngineTest, AreNotSealed) {
  Start(Options(uint64_t{256} << 20), &observer_);
  TestSequence sequence = OpenPrompt(PolicyOf("dense"));
  Generate(&sequence, 2 * kEarly + 64, &random_);
  engine_->WaitForBackground();
  ASSERT_EQ(observer_.early(), 2u);
  const SealResult sealed = Seal(sequence);
  EXPECT_EQ(sealed.segments, 1u);
  EXPECT_EQ(Files().size(), 2u);  // the segment's and the tail's
  ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  Start(Options(uint64_t{256} << 20), &observer_);
  auto resumed = Resume(sealed.sealed_id, sequence.history);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->Info().segments, 1u);
  Generate(&*resumed, 2, &random_, /*check=*/false);
  engine_->WaitForBackground();
  EXPECT_EQ(observer_.early(), 4u) << "they are built anew";
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
}

}  // namespace
}  // namespace attnd::engine::test
