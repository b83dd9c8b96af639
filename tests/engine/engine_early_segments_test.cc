// SPDX-License-Identifier: Apache-2.0
//
// Goal: early segments, also those that take the place of shorter ones, change what a step reads
// and nothing else: answers, what is sealed, and what callers are told; and their memory is
// counted, left to others where it is short, and given back. Method: engines whose policies read
// every token, so that each answer must be the oracle's.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <thread>

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
    if (trigger == BuildTrigger::kEarly) last_early = tokens;
  }
  void OnSegmentBuildFailed(BuildTrigger, const absl::Status&) override { ++failed; }
  uint64_t early() const { return built[static_cast<size_t>(BuildTrigger::kEarly)]; }
  uint64_t full() const { return built[static_cast<size_t>(BuildTrigger::kBackground)]; }

  std::array<std::atomic<uint64_t>, 3> built{};
  std::atomic<uint64_t> last_early{0};  // its tokens
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

  uint64_t TokenBytes() const {
    return uint64_t{shape_.layers} * shape_.kv_heads * shape_.token_bytes();
  }
  // What a segment takes of the budget, and with its builder.
  uint64_t Bytes(uint32_t tokens) const {
    const attention::SegmentForm form = {shape_, attention::kTreeIndexes, tokens, 0};
    return attention::Segment::IndexBytes(form) + attention::Segment::PayloadBytes(form);
  }
  uint64_t BytesOfBuilding(uint32_t tokens) const {
    return Bytes(tokens) +
           attention::HeadBuilder::ScratchBytes({shape_, attention::kTreeIndexes, tokens, 0});
  }
  // Another sequence takes memory until at most so much is free.
  TestSequence FillUntilFree(uint64_t bytes) {
    TestSequence filler = OpenSequence(engine_.get(), shape_);
    const Usage usage = engine_->usage();
    while (!HasFailure() && engine_->usage().resident_bytes + bytes < usage.capacity_bytes) {
      Prefill(&filler, 64, &random_, false);
    }
    return filler;
  }

  static constexpr uint32_t kSegment = 6 * kEarly;
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
    GenerateDense(&sequence, 5 * kEarly + 128);
    EXPECT_EQ(observer_.early(), 5u);
    EXPECT_EQ(observer_.last_early.load(), 5 * kEarly);
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
  ASSERT_EQ(observer_.last_early.load(), 2 * kEarly);
  const uint64_t copies = Bytes(2 * kEarly);
  const uint64_t tail = 2 * kEarly * TokenBytes();
  EXPECT_GE(sequence.Info().resident_bytes, before + tail + copies);
  EXPECT_GE(engine_->usage().resident_bytes, used + tail + copies);
  EXPECT_LT(engine_->usage().resident_bytes, used + tail + copies + Bytes(kEarly));
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
  const TestSequence filler = FillUntilFree(options.memory_budget_bytes * 3 / 16);
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
  GenerateDense(&sequence, 4 * kEarly + 128);
  ASSERT_EQ(observer_.early(), 4u);
  // Of 3 and 1 times the least. With these copies there is half of their room too little, and
  // without them half of it too much.
  const uint64_t copies = Bytes(3 * kEarly) + Bytes(kEarly);
  const uint64_t tail = 2 * kEarly * TokenBytes();
  const TestSequence filler = FillUntilFree(BytesOfBuilding(kSegment) + tail - copies / 2);
  GenerateDense(&sequence, 2 * kEarly);
  EXPECT_EQ(observer_.full(), 1u);
  EXPECT_EQ(sequence.Info().segments, 2u);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

// A longer one that finds no room leaves those that it was to replace, and the rest of its tokens
// get one of their own; once there is room it comes.
TEST_F(EarlyEngineTest, AreLeftShortWhereMemoryIs) {
  // Room for building one of the least length beside what there is, not for twice as long a one; a
  // quarter of the budget, without which none is built.
  const uint64_t room = (BytesOfBuilding(kEarly) + BytesOfBuilding(2 * kEarly)) / 2;
  EngineOptions options = Options(room * 15 / 4);
  options.archive.data_dir.clear();  // nothing can move
  Start(options, &observer_);
  TestSequence sequence = OpenPrompt(PolicyOf("dense"));
  GenerateDense(&sequence, 2 * kEarly - 64);
  ASSERT_EQ(observer_.early(), 1u);
  const TestSequence filler = FillUntilFree(room + 128 * TokenBytes());
  GenerateDense(&sequence, 128);
  EXPECT_EQ(observer_.early(), 2u);
  EXPECT_EQ(observer_.last_early.load(), kEarly);
  EXPECT_LT(zone_tokens_, uint64_t{kStep} * 2 * (4 + 4 * kStep)) << "of each token";
  ASSERT_TRUE(engine_->Close(kTenant, filler.id).ok());
  GenerateDense(&sequence, kEarly);
  EXPECT_EQ(observer_.early(), 3u);
  EXPECT_EQ(observer_.last_early.load(), 3 * kEarly);
  EXPECT_EQ(observer_.failed.load(), 0u);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

// Who finds no room gets that of copies, those of the sequence first that was used longest ago.
TEST_F(EarlyEngineTest, MakeRoomForOthers) {
  EngineOptions options = Options(uint64_t{8} << 20);
  options.archive.data_dir.clear();  // nothing can move
  Start(options, &observer_);
  TestSequence idle = OpenPrompt(PolicyOf("dense")), used = OpenPrompt(PolicyOf("dense"));
  for (TestSequence* sequence : {&idle, &used}) GenerateDense(sequence, 2 * kEarly + 64);
  ASSERT_EQ(observer_.early(), 4u);
  const uint64_t of_idle = idle.Info().resident_bytes, of_used = used.Info().resident_bytes;
  // An upload.
  TestSequence filler = FillUntilFree(128 * TokenBytes());
  EXPECT_EQ(idle.Info().resident_bytes, of_idle);
  Prefill(&filler, 256, &random_, false);
  EXPECT_EQ(idle.Info().resident_bytes, of_idle - Bytes(2 * kEarly));
  EXPECT_EQ(used.Info().resident_bytes, of_used);
  // Steps.
  while (!HasFailure() &&
         engine_->usage().resident_bytes + 256 * TokenBytes() < options.memory_budget_bytes) {
    Prefill(&filler, 64, &random_, false);
  }
  GenerateDense(&idle, 256);
  EXPECT_LT(used.Info().resident_bytes, of_used);
  EXPECT_EQ(observer_.early(), 4u) << "none comes while memory is short";
  for (TestSequence* sequence : {&idle, &used}) EXPECT_TRUE(MatchesModel(sequence, &random_));
}

// What has to be read again from disk stays in memory while there are copies.
TEST_F(EarlyEngineTest, GoBeforeSegmentsMoveToDisk) {
  const EngineOptions options = Options(uint64_t{8} << 20);
  Start(options, &observer_);
  TestSequence idle = OpenPrompt(PolicyOf("dense")), used = OpenPrompt(PolicyOf("dense"));
  for (TestSequence* sequence : {&idle, &used}) GenerateDense(sequence, 2 * kEarly + 64);
  ASSERT_EQ(observer_.early(), 4u);
  const uint64_t of_idle = idle.Info().resident_bytes, of_used = used.Info().resident_bytes;
  // Others' tokens, too few for segments, up to the pager's mark of nine tenths; the last ones go
  // beyond it at once, by less than the copies of one sequence have.
  const uint64_t of_filler = 512 * TokenBytes(), mark = options.memory_budget_bytes * 9 / 10;
  const auto fill = [&] {
    TestSequence filler = OpenSequence(engine_.get(), shape_);
    Prefill(&filler, 512, &random_, false);
  };
  while (!HasFailure() && engine_->usage().resident_bytes + of_filler * 5 / 4 < mark) fill();
  for (TestSequence* sequence : {&idle, &used}) GenerateDense(sequence, kStep);
  fill();
  fill();
  // Sequences that nobody uses for ten seconds move to disk all the same: under the thread
  // sanitizer filling takes as long.
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(8);
  while (idle.Info().resident_bytes >= of_idle && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_LT(idle.Info().resident_bytes, of_idle) << "copies have gone";
  EXPECT_GE(used.Info().resident_bytes, of_used) << "and no more than had to";
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // further rounds
  EXPECT_EQ(engine_->archive_stats().paged_out_segments, 0u);
  for (TestSequence* sequence : {&idle, &used}) EXPECT_TRUE(MatchesModel(sequence, &random_));
}

// What is written down is the tail.
TEST_F(EarlyEngineTest, AreNotSealed) {
  Start(Options(uint64_t{256} << 20), &observer_);
  TestSequence sequence = OpenPrompt(PolicyOf("dense"));
  Generate(&sequence, 2 * kEarly + 64, &random_);
  engine_->WaitForBackground();
  ASSERT_EQ(observer_.last_early.load(), 2 * kEarly);
  const SealResult sealed = Seal(sequence);
  EXPECT_EQ(sealed.segments, 1u);
  EXPECT_EQ(Files().size(), 2u);  // the segment's and the tail's
  ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  Start(Options(uint64_t{256} << 20), &observer_);
  auto resumed = Resume(sealed.sealed_id, sequence.history);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->Info().segments, 1u);
  const uint64_t built = observer_.early();
  Generate(&*resumed, 2, &random_, /*check=*/false);
  engine_->WaitForBackground();
  EXPECT_EQ(observer_.early(), built + 1) << "of all tokens at once";
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
}

}  // namespace
}  // namespace attnd::engine::test
