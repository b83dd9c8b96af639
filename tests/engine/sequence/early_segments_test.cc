// SPDX-License-Identifier: Apache-2.0
//
// Goal: early segments stand for the tail's oldest tokens in steps, each token once, and nowhere
// else; they go when their tokens go or a full segment comes, and are built only where they may be.
// Method: Sequence driven directly, its views compared with a plain history.
#include "engine/sequence/early_segments.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tests/cross.h"
#include "tests/engine/sequence/sequence_fixture.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

constexpr uint32_t kEarly = EarlySegments::kTokens;
constexpr uint32_t kMost = 16 * kEarly;
constexpr uint32_t kFirst = 512;  // tokens of the first segment
constexpr uint64_t kWindow = 64;

class EarlySegmentsTest : public SequenceFixture {
 protected:
  EarlySegmentsTest() : SequenceFixture(attention::kTreeIndexes) {}

  // Steps of the sequence: tokens that are not the newest step's may become segments.
  void StepBy(Sequence* sequence, History* history, uint64_t tokens) {
    for (const uint64_t part : {tokens - 1, uint64_t{1}}) {
      const Kv kv = RandomKv(shape_, part, &random_);
      ASSERT_TRUE(
          sequence->AppendAndRead(kWriter, StepTokensOf(history->committed(), kv), 1.0f).ok());
      history->Append(0, kv);
    }
  }
  // A prompt with one segment, and so many tokens behind that segment.
  void Begin(Sequence* sequence, History* history, uint64_t tail) {
    AppendTo(sequence, history, kFirst + kWindow);
    const auto job = sequence->NextSegment(kFirst, kFirst);
    ASSERT_TRUE(job.has_value());
    ASSERT_TRUE(sequence->Install(*job, Build(*job)));
    StepBy(sequence, history, tail - kWindow);
  }
  // As many early segments as there are to build; those of kEarly tokens take no other's place.
  int BuildEarly(Sequence* sequence, uint32_t max_tokens = kEarly) {
    int built = 0;
    for (; const auto job = sequence->NextEarly(max_tokens); ++built) {
      EXPECT_TRUE(sequence->Install(*job, Build(*job)));
    }
    return built;
  }
  // Lengths of the early segments, in kEarly.
  std::vector<uint64_t> Lengths(Sequence* sequence) {
    std::vector<uint64_t> lengths;
    for (const auto& segment : ViewOf(sequence)->segments) {
      if (segment->first_position() >= sequence->Info().segmented_tokens) {
        lengths.push_back(segment->tokens() / kEarly);
      }
    }
    return lengths;
  }
  std::shared_ptr<const attention::SequenceView> ViewOf(Sequence* sequence) {
    const uint64_t length = sequence->Info().committed_tokens;
    const auto snapshot = sequence->Read(0, length, 1.0f);
    EXPECT_TRUE(snapshot.ok()) << snapshot.status();
    return snapshot->view;
  }
  // How many early segments steps read, and whether view and history hold every token once.
  void Expect(size_t early, Sequence* sequence, const History& history) {
    const auto view = ViewOf(sequence);
    const HistorySnapshot written = sequence->SnapshotHistory();
    ASSERT_EQ(view->segments.size(), written.view->segments.size() + early);
    EXPECT_EQ(view->tail_begin, written.view->tail_begin + early * kEarly);
    EXPECT_EQ(written.view->tail_begin, sequence->Info().segmented_tokens);
    EXPECT_TRUE(Holds(*view, history));
    EXPECT_TRUE(Holds(*written.view, history));
  }

  History history_{shape_};
};

TEST_F(EarlySegmentsTest, StandForTheOldestTokensOfTheTail) {
  Begin(&sequence_, &history_, kEarly + kWindow - 1);
  EXPECT_FALSE(sequence_.NextEarly(kEarly).has_value()) << "a token is in the window";
  StepBy(&sequence_, &history_, 2);
  EXPECT_EQ(BuildEarly(&sequence_), 1);
  Expect(1, &sequence_, history_);
  StepBy(&sequence_, &history_, 2 * kEarly);
  EXPECT_EQ(BuildEarly(&sequence_), 2);
  Expect(3, &sequence_, history_);
  EXPECT_EQ(sequence_.Info().segments, 1u);
}

// Each takes the place of those before it that are at most twice as long as what follows them: by
// hand.
TEST_F(EarlySegmentsTest, LongerOnesTakeThePlaceOfShort) {
  const std::vector<uint64_t> lengths[] = {{1},    {2},     {3},     {3, 1}, {5},    {5, 1},
                                           {5, 2}, {8},     {8, 1},  {8, 2}, {8, 3}, {8, 3, 1},
                                           {13},   {13, 1}, {13, 2}, {13, 3}};
  Begin(&sequence_, &history_, kWindow + 2);
  uint64_t end = kFirst;
  for (const std::vector<uint64_t>& expected : lengths) {
    SCOPED_TRACE(testing::Message() << "behind " << end);
    StepBy(&sequence_, &history_, kEarly);
    end += kEarly;
    const auto before = ViewOf(&sequence_);
    EXPECT_EQ(BuildEarly(&sequence_, kMost), 1);
    EXPECT_EQ(Lengths(&sequence_), expected);
    const auto after = ViewOf(&sequence_);
    EXPECT_EQ(after->tail_begin, end);
    EXPECT_TRUE(Holds(*after, history_));
    EXPECT_TRUE(Holds(*before, history_)) << "of a step under way";
    EXPECT_TRUE(Holds(*sequence_.SnapshotHistory().view, history_));
  }
}

// Of a latent head axes and slopes are larger.
TEST_F(EarlySegmentsTest, HaveMoreBytesOfTokensThanOfAxes) {
  ModelShape latent = MakeShape(1, 16, 1, 576, 512, DType::kBf16);
  latent.latent = true;
  EXPECT_EQ(EarlySegments::LeastTokens(latent), 1536u);
  latent.dtype = DType::kFp32;
  EXPECT_EQ(EarlySegments::LeastTokens(latent), 1024u);
  for (const DType dtype : {DType::kBf16, DType::kFp32}) {
    EXPECT_EQ(EarlySegments::LeastTokens(MakeShape(2, 8, 2, 256, 256, dtype)), kEarly);
  }
}

// The background may be late, and may have failed to build the longer ones.
TEST_F(EarlySegmentsTest, TakeWhatHasGathered) {
  Begin(&sequence_, &history_, 3 * kEarly + kWindow + 2);
  EXPECT_EQ(BuildEarly(&sequence_, kMost), 1);
  EXPECT_EQ(Lengths(&sequence_), std::vector<uint64_t>{3});
  for (int i = 0; i < 3; ++i) {
    StepBy(&sequence_, &history_, kEarly);
    EXPECT_EQ(BuildEarly(&sequence_, kEarly), 1);
  }
  EXPECT_EQ(Lengths(&sequence_), (std::vector<uint64_t>{3, 1, 1, 1}));
  StepBy(&sequence_, &history_, kEarly);
  const auto job = sequence_.NextEarly(6 * kEarly);
  ASSERT_TRUE(job.has_value());
  EXPECT_EQ(job->tokens, 4 * kEarly) << "no longer than it may be";
  EXPECT_EQ(BuildEarly(&sequence_, kMost), 1);
  EXPECT_EQ(Lengths(&sequence_), std::vector<uint64_t>{7});
  EXPECT_TRUE(Holds(*ViewOf(&sequence_), history_));
}

// Whatever becomes of a longer one, every token is read once, and short ones that it was to replace
// answer until then.
TEST_F(EarlySegmentsTest, LongerOnesComeInWholeOrNotAtAll) {
  Begin(&sequence_, &history_, 2 * kEarly + kWindow + 2);
  ASSERT_EQ(BuildEarly(&sequence_), 2);
  StepBy(&sequence_, &history_, 2 * kEarly);
  const auto job = sequence_.NextEarly(kMost);
  ASSERT_TRUE(job.has_value());
  EXPECT_EQ(job->tokens, 4 * kEarly);
  const auto longer = Build(*job);
  Expect(2, &sequence_, history_);

  // Some of the tokens got a segment of their own: it still fits, and takes that one's place.
  const auto next = sequence_.NextEarly(kEarly);
  ASSERT_TRUE(next.has_value() && sequence_.Install(*next, Build(*next)));
  Expect(3, &sequence_, history_);
  ASSERT_TRUE(sequence_.Install(*job, longer));
  EXPECT_EQ(Lengths(&sequence_), std::vector<uint64_t>{4});
  EXPECT_FALSE(sequence_.Install(*next, Build(*next))) << "it has these tokens";
  EXPECT_TRUE(Holds(*ViewOf(&sequence_), history_));

  // What lay before it is gone: it begins at no border any more.
  StepBy(&sequence_, &history_, kEarly);
  const auto behind = sequence_.NextEarly(kMost);
  ASSERT_TRUE(behind.has_value());
  EXPECT_EQ(behind->tokens, kEarly);
  ASSERT_TRUE(sequence_.DropEarly());
  EXPECT_FALSE(sequence_.Install(*behind, Build(*behind)));
  ASSERT_TRUE(sequence_.Install(*job, longer)) << "it needs nothing before it";

  // A truncation that cuts it drops the whole of it.
  const uint64_t length = kFirst + 3 * kEarly + kWindow;
  ASSERT_TRUE(sequence_.Truncate(length).ok());
  history_.Truncate(length);
  Expect(0, &sequence_, history_);
  EXPECT_FALSE(sequence_.Install(*job, longer));
  StepBy(&sequence_, &history_, kEarly);
  EXPECT_FALSE(sequence_.Install(*job, longer)) << "other tokens";
  EXPECT_EQ(BuildEarly(&sequence_, kMost), 1);
  EXPECT_TRUE(Holds(*ViewOf(&sequence_), history_));
}

TEST_F(EarlySegmentsTest, AreDueWhenNoFullSegmentIs) {
  Begin(&sequence_, &history_, 2 * kEarly + kWindow);
  EXPECT_EQ(sequence_.DueBuild(2 * kEarly), BuildKind::kSegment);
  EXPECT_EQ(sequence_.DueBuild(2 * kEarly + 1), BuildKind::kEarly);
  EXPECT_EQ(sequence_.DueBuild(3 * kEarly), BuildKind::kEarly);
  EXPECT_EQ(BuildEarly(&sequence_), 2);
  EXPECT_EQ(sequence_.DueBuild(2 * kEarly), BuildKind::kSegment);
  EXPECT_EQ(sequence_.DueBuild(3 * kEarly), std::nullopt);
}

// A full segment is no larger than an early one: there is nothing to gain.
TEST_F(EarlySegmentsTest, AreSmallerThanSegments) {
  Begin(&sequence_, &history_, kEarly + kWindow);
  EXPECT_EQ(sequence_.DueBuild(kEarly + 1), BuildKind::kEarly);
  sequence_.DelayBuild(BuildKind::kSegment);
  EXPECT_EQ(sequence_.DueBuild(kEarly), std::nullopt);
}

// While a full segment waits for memory, no copies take it.
TEST_F(EarlySegmentsTest, OfOneKindAloneAreDelayed) {
  Begin(&sequence_, &history_, 2 * kEarly + kWindow);
  sequence_.DelayBuild(BuildKind::kEarly);
  EXPECT_EQ(sequence_.DueBuild(3 * kEarly), std::nullopt);
  EXPECT_EQ(sequence_.DueBuild(2 * kEarly), BuildKind::kSegment);
  sequence_.DelayBuild(BuildKind::kSegment);
  EXPECT_EQ(sequence_.DueBuild(2 * kEarly), std::nullopt);
  EXPECT_EQ(sequence_.DueBuild(3 * kEarly), std::nullopt);  // that of early segments lasts
  StepBy(&sequence_, &history_, Sequence::kBuildDelayMin);
  EXPECT_EQ(sequence_.DueBuild(3 * kEarly), BuildKind::kEarly);
  EXPECT_EQ(sequence_.DueBuild(2 * kEarly), BuildKind::kSegment);
}

// The first segment fixes what all have in common, and takes the sink.
TEST_F(EarlySegmentsTest, NeedASegmentBeforeThem) {
  StepBy(&sequence_, &history_, 2 * kEarly);
  EXPECT_FALSE(sequence_.NextEarly(kEarly).has_value());
}

// The end of a prompt makes segments of it. What is generated afterwards may be early again.
TEST_F(EarlySegmentsTest, AreNotBuiltWhileTokensAreUploaded) {
  Begin(&sequence_, &history_, kWindow + 2);
  AppendTo(&sequence_, &history_, 2 * kEarly);
  EXPECT_FALSE(sequence_.NextEarly(kEarly).has_value());
  ASSERT_TRUE(sequence_.CompletePrefill(kWriter).ok());
  EXPECT_FALSE(sequence_.NextEarly(kEarly).has_value());
  StepBy(&sequence_, &history_, 2);
  EXPECT_TRUE(sequence_.NextEarly(kEarly).has_value());
}

// The papers' policies read their generated tokens exactly until a segment is full.
TEST_F(EarlySegmentsTest, AreOfTreesAlone) {
  using attention::IndexKind;
  for (const attention::IndexSet indexes :
       {attention::kClusterIndexes, attention::kRegressionIndexes,
        attention::IndexSet{IndexKind::kBlocks16}, attention::kTreeIndexes,
        attention::IndexSet{IndexKind::kTree, IndexKind::kKeys4}}) {
    OpenArgs args = ArgsFor(PolicyOf("dense"));
    args.indexes = indexes;
    Sequence sequence(2, "", args, 1 << 20, &budget_);
    History history(shape_);
    Begin(&sequence, &history, 2 * kEarly);
    EXPECT_EQ(sequence.NextEarly(kEarly).has_value(), indexes.Has(IndexKind::kTree))
        << indexes.ToString();
  }
}

// What a step has answered it answers again, although an early segment has its tokens: they are in
// the tail.
TEST_F(EarlySegmentsTest, LeaveRepeatsOfStepsToTheTail) {
  Begin(&sequence_, &history_, 2 * kEarly + kWindow);
  ASSERT_EQ(BuildEarly(&sequence_), 2);
  for (const uint64_t position :
       {uint64_t{kFirst}, uint64_t{kFirst + kEarly - 1}, uint64_t{kFirst + 2 * kEarly - 1},
        uint64_t{kFirst + 2 * kEarly}}) {
    const Kv again = history_.Slice(0, position, 1);
    const auto snapshot = sequence_.AppendAndRead(kWriter, StepTokensOf(position, again), 1.0f);
    ASSERT_TRUE(snapshot.ok()) << snapshot.status();
    EXPECT_EQ(snapshot->new_tokens, 0u);
    EXPECT_LE(snapshot->view->tail_begin, position);
    EXPECT_EQ(snapshot->view->segments.size(), position < kFirst + 2 * kEarly ? 1u : 3u);
    EXPECT_TRUE(Holds(*snapshot->view, history_));
  }
}

TEST_F(EarlySegmentsTest, AFullSegmentTakesTheirPlace) {
  // Ends on a border, on another, and amid the second: the third then begins at no tail's begin.
  for (const auto& [tokens, left] : {std::pair{2 * kEarly, 1u},
                                     {3 * kEarly, 0u},
                                     {2 * kEarly - 24, 0u},
                                     {2 * kEarly + 24, 0u}}) {
    SCOPED_TRACE(testing::Message() << tokens << " tokens");
    Sequence sequence(2, "", ArgsFor(PolicyOf("dense")), 1 << 20, &budget_);
    History history(shape_);
    Begin(&sequence, &history, 3 * kEarly + kWindow + 100);
    ASSERT_EQ(BuildEarly(&sequence), 3);
    const auto old_view = ViewOf(&sequence);
    const auto job = sequence.NextSegment(tokens, tokens);
    ASSERT_TRUE(job.has_value());
    EXPECT_EQ(job->view->tail_begin, kFirst);
    ASSERT_TRUE(sequence.Install(*job, Build(*job)));
    Expect(left, &sequence, history);
    EXPECT_EQ(sequence.Info().segments, 2u);
    EXPECT_TRUE(Holds(*old_view, history)) << "of a step under way";
  }
}

// Those that the shorter history's window leaves alone stay, the others go, and new ones come.
TEST_F(EarlySegmentsTest, ATruncationDropsThoseThatItCuts) {
  constexpr uint64_t kBegin = kFirst + 2 * kEarly;  // of the third
  for (const auto& [length, left] : {std::pair<uint64_t, size_t>{kBegin + kEarly + kWindow, 3},
                                     {kBegin + kEarly + kWindow - 1, 2},
                                     {kBegin + 5, 1},
                                     {kBegin - kEarly + kWindow, 1},
                                     {kBegin - kEarly, 0},
                                     {kFirst + kWindow, 0},
                                     {kFirst, 0},
                                     {0, 0}}) {
    SCOPED_TRACE(testing::Message() << "length " << length);
    Sequence sequence(2, "", ArgsFor(PolicyOf("dense")), 1 << 20, &budget_);
    History history(shape_);
    Begin(&sequence, &history, 3 * kEarly + kWindow + 50);
    ASSERT_EQ(BuildEarly(&sequence), 3);
    ASSERT_TRUE(sequence.Truncate(length).ok());
    history.Truncate(length);
    Expect(left, &sequence, history);
    StepBy(&sequence, &history, 2 * kEarly);
    if (length < kFirst + kWindow) continue;  // no segment before them
    EXPECT_GT(BuildEarly(&sequence), 0);
    Expect((history.committed() - 1 - kFirst - kWindow + 1) / kEarly, &sequence, history);
  }
}

// What was built of tokens that a truncation has taken away since does not come in.
TEST_F(EarlySegmentsTest, OfOtherTokensAreRefused) {
  Begin(&sequence_, &history_, 2 * kEarly + kWindow + 50);
  ASSERT_EQ(BuildEarly(&sequence_), 2);
  StepBy(&sequence_, &history_, kEarly);
  const auto job = sequence_.NextEarly(kEarly);
  ASSERT_TRUE(job.has_value());
  EXPECT_EQ(job->view->tail_begin, kFirst + 2 * kEarly);
  const auto segment = Build(*job);
  const uint64_t length = history_.committed();
  ASSERT_TRUE(sequence_.Truncate(length - kEarly / 2).ok());
  history_.Truncate(length - kEarly / 2);
  EXPECT_FALSE(sequence_.Install(*job, segment)) << "too short now";
  StepBy(&sequence_, &history_, kEarly);
  EXPECT_FALSE(sequence_.Install(*job, segment)) << "other tokens";
  const auto next = sequence_.NextEarly(kEarly);
  ASSERT_TRUE(next.has_value());
  const auto built = Build(*next);
  EXPECT_TRUE(sequence_.Install(*next, built));
  EXPECT_FALSE(sequence_.Install(*next, built)) << "a second time";
  Expect(3, &sequence_, history_);
  const auto full = sequence_.NextSegment(3 * kEarly, 3 * kEarly);
  ASSERT_TRUE(full.has_value() && sequence_.Install(*full, Build(*full)));
  EXPECT_FALSE(sequence_.Install(*next, built)) << "in a full segment";
  Expect(0, &sequence_, history_);
}

TEST_F(EarlySegmentsTest, ForksShareThem) {
  Begin(&sequence_, &history_, 2 * kEarly + kWindow + 50);
  ASSERT_EQ(BuildEarly(&sequence_), 2);
  const auto parents = ViewOf(&sequence_)->segments;
  for (const uint64_t length :
       {history_.committed(), uint64_t{kFirst + kEarly + kWindow + 5}, uint64_t{kFirst + kEarly}}) {
    Sequence child(2, "", ArgsFor(PolicyOf("dense")), 1 << 20, &budget_);
    ASSERT_TRUE(sequence_.ForkInto(length, &child).ok());
    History history = history_;
    history.Truncate(length);
    const size_t shared = (length - kWindow - kFirst) / kEarly;
    Expect(shared, &child, history);
    const auto segments = ViewOf(&child)->segments;
    EXPECT_TRUE(std::equal(segments.begin(), segments.end(), parents.begin()));
    StepBy(&child, &history, 2 * kEarly);
    BuildEarly(&child);
    Expect((history.committed() - kWindow - kFirst) / kEarly, &child, history);
    Expect(2, &sequence_, history_);
  }
}

// Anything that changes a history, in any order: all that steps read and all that would be written
// down hold every token once.
TEST_F(EarlySegmentsTest, HoldTheHistoryWhateverHappens) {
  constexpr int kRounds = attnd::test::Repetitions(250);
  std::array<int, 3> installed = {};  // full, early, early of more than the least
  for (const char* window : {"0", "64"}) {
    auto sequence = std::make_unique<Sequence>(
        2, "", ArgsFor(PolicyOf("dense", {{"window", window}})), 1 << 20, &budget_);
    History history(shape_);
    AppendTo(sequence.get(), &history, 700);
    for (int round = 0; round < kRounds; ++round) {
      SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << " round " << round);
      StepBy(sequence.get(), &history, 200 + random_.Below(700));
      auto job = round % 8 == 0 ? sequence->NextSegment(512, 8 * kEarly)
                                : sequence->NextEarly(random_.Below(4) == 0 ? kEarly : kMost);
      const auto segment = job.has_value() ? Build(*job) : nullptr;
      if (random_.Below(4) == 0) {
        const uint64_t most = history.committed() > 10 * kEarly ? 9 * kEarly : 2 * kEarly;
        const uint64_t length =
            history.committed() - random_.Below(std::min(most, history.committed() - 700));
        ASSERT_TRUE(sequence->Truncate(length).ok());
        history.Truncate(length);
        StepBy(sequence.get(), &history, 2 + random_.Below(200));
      }
      if (random_.Below(8) == 0) {
        auto child = std::make_unique<Sequence>(
            2, "", ArgsFor(PolicyOf("dense", {{"window", window}})), 1 << 20, &budget_);
        ASSERT_TRUE(sequence->ForkInto(std::nullopt, child.get()).ok());
        sequence = std::move(child);
      }
      if (segment != nullptr && sequence->Install(*job, segment)) {
        ++installed[!job->early ? 0 : segment->tokens() == kEarly ? 1 : 2];
      }
      ASSERT_TRUE(Holds(*ViewOf(sequence.get()), history));
      ASSERT_TRUE(Holds(*sequence->SnapshotHistory().view, history));
    }
  }
  for (const int each : installed) EXPECT_GT(each, 30 * kRounds / 250);
}

class NoPages : public attention::PagedPayload {
 public:
  attention::PageStore* store() const override { return nullptr; }
  absl::Status status() const override { return absl::OkStatus(); }
};

// Segments move to disk because memory is short: copies go with them.
TEST_F(EarlySegmentsTest, GoWhenSegmentsMoveToDisk) {
  Begin(&sequence_, &history_, kEarly + kWindow);
  ASSERT_EQ(BuildEarly(&sequence_), 1);
  auto view = ViewOf(&sequence_);
  const std::weak_ptr<const attention::Segment> early = view->segments[1];
  const attention::Segment& whole = *view->segments[0];
  const auto paged = std::make_shared<const attention::Segment>(
      whole.id(), whole.form(), 0, std::make_shared<NoPages>(), whole.origin());
  const Swap swap{view->segments[0], paged};
  view.reset();
  sequence_.SwapSegments({&swap, 1});
  EXPECT_TRUE(early.expired());
  const auto after = ViewOf(&sequence_);
  EXPECT_EQ(after->segments.size(), 1u);
  EXPECT_EQ(after->tail_begin, kFirst);
}

}  // namespace
}  // namespace attnd::engine::test
