// SPDX-License-Identifier: Apache-2.0
//
// Goal: what an engine wrote agrees with its catalogue, whatever became of a segment between its
// first file and the seal: `verify` finds nothing wrong, and with a catalogue that is made again
// every sealed sequence is resumed. Method: sequences whose segments were moved to disk and read
// whole again, sealed, then looked at by the means of attnctl; histories by hand and random ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ctl/rebuild.h"
#include "ctl/verify.h"
#include "engine/engine.h"
#include "tests/ctl/support.h"
#include "tests/engine/support.h"
#include "tests/storage/io/io_support.h"

namespace attnd::ctl::test {
namespace {

namespace fs = std::filesystem;
using engine::Engine;
using engine::test::FinishPrefill;
using engine::test::Generate;
using engine::test::History;
using engine::test::kTenant;
using engine::test::Kv;
using engine::test::kWriter;
using engine::test::MatchesModel;
using engine::test::TestSequence;
using storage::test::Must;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kBudget = 8 * kMiB;
constexpr uint64_t kSegment = 512;  // tokens, as SmallOptions says
constexpr uint64_t kWindow = 64;

class MovedSegmentsTest : public testing::Test {
 protected:
  MovedSegmentsTest() { Start(); }

  void Start() {
    engine_.reset();
    engine::EngineOptions options = engine::test::SmallOptions();
    options.memory_budget_bytes = kBudget;
    options.archive.data_dir = root_;
    options.archive.page_memory_bytes = kMiB;
    engine_ = engine::test::MakeEngine(options);
  }
  // Blocks: the cheapest indexes to build.
  TestSequence Open() {
    engine::OpenArgs args = engine::test::ArgsOf(shape_);
    args.indexes = attention::IndexSet{attention::IndexKind::kBlocks16};
    return TestSequence(engine_.get(), Must(engine_->Open(kTenant, args)), shape_);
  }
  // Without token ids, so that names of segments are random.
  void Append(TestSequence* sequence, uint64_t tokens) {
    for (uint64_t done = 0; done < tokens;) {
      const uint64_t now = std::min<uint64_t>(tokens - done, 250);
      const uint64_t first = sequence->history.committed();
      for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const Kv kv = engine::test::RandomKv(shape_, now, &random_);
        engine::AppendChunk chunk = engine::test::ChunkOf(layer, first, kv);
        chunk.may_wait = true;
        const absl::Status appended =
            engine_->Append(kTenant, sequence->writer, sequence->id, chunk);
        ASSERT_TRUE(appended.ok()) << appended;
        sequence->history.Append(layer, kv);
      }
      done += now;
    }
    FinishPrefill(sequence);
  }
  TestSequence Fork(const TestSequence& sequence, uint64_t length) {
    TestSequence fork(engine_.get(), Must(engine_->Fork(kTenant, sequence.id, length)).id, shape_);
    fork.writer = ++writers_;
    fork.history = sequence.history;
    fork.history.Truncate(length);
    return fork;
  }
  void Truncate(TestSequence* sequence, uint64_t length) {
    const auto truncated = engine_->Truncate(kTenant, sequence->id, length);
    ASSERT_TRUE(truncated.ok()) << truncated.status();
    sequence->history.Truncate(length);
  }
  void Close(const TestSequence& sequence) {
    ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  }
  void Seal(const TestSequence& sequence) {
    const auto sealed = Must(engine_->Seal(kTenant, sequence.id, nullptr));
    sealed_.emplace(sealed.sealed_id, sequence.history);
  }
  // Uploads until the pager has moved all that is older to disk; what it took is free afterwards.
  void TakeMemory() {
    TestSequence other = Open();
    Append(&other, 8000);
    Close(other);
    engine_->WaitForBackground();
    // The pager may hold it for a moment.
    for (int i = 0; i < 200 && engine_->usage().resident_bytes > kBudget / 2; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

  // Ends the engine. All that was sealed must be whole to `verify`, before and after its catalogue
  // was made again from the files alone, and answer as it did.
  void CheckAll() {
    engine_.reset();
    CheckVerifies();
    if (HasFailure()) return;
    fs::remove_all(root_ + "/catalogue");
    const auto files = storage::MakePosixFileSystem();
    const auto rebuilt = Must(RebuildCatalogue(root_, files.get(), queue_.get(), {}));
    EXPECT_EQ(rebuilt.plan.sequences.size(), sealed_.size());
    for (const UntakenFile& file : rebuilt.plan.untaken) {
      EXPECT_TRUE(file.harmless) << "file " << file.number << ": " << file.why;
    }
    CheckVerifies();
    Start();
    for (const auto& [id, history] : sealed_) {
      const auto opened = engine_->Resume(kTenant, engine::test::ArgsOf(shape_), id, nullptr);
      ASSERT_TRUE(opened.ok()) << id << ": " << opened.status();
      TestSequence resumed(engine_.get(), opened->sequence_id, shape_);
      resumed.history = history;
      EXPECT_TRUE(MatchesModel(&resumed, &random_)) << id;
      Close(resumed);
    }
    EXPECT_EQ(engine_->archive_stats().quarantined_files, 0u);
  }

  void CheckVerifies() {
    const auto reader = Must(DataReader::Open(storage::MakePosixFileSystem(), root_));
    const VerifyResult verified = Must(Verify(*reader, {}, queue_.get(), {}));
    for (const BadFile& file : verified.bad_files) ADD_FAILURE() << file.path << ": " << file.what;
    for (const auto& sequence : verified.broken_sequences) {
      ADD_FAILURE() << "sequence " << sequence.id << ": " << sequence.what;
    }
  }

  const ModelShape shape_ = engine::test::MakeShape(2, 4, 2, 64, 64, DType::kBf16);
  const uint64_t seed_ = storage::test::TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  engine::test::Random random_{seed_};
  const attnd::test::TemporaryFolder temporary_;
  const std::string root_ = temporary_.Path("data");
  const std::unique_ptr<storage::IoQueue> queue_ = ThreadQueue();
  engine::WriterId writers_ = kWriter;
  std::map<uint64_t, History> sealed_;
  std::unique_ptr<Engine> engine_;
};

// The second segment's file names the first one's as its parent, and stays on disk. The first one
// comes back to memory, and its paged version ends: its name must not end with that.
TEST_F(MovedSegmentsTest, AForkThatPagesASegmentInDoesNotRenameIt) {
  TestSequence sequence = Open();
  Append(&sequence, 2 * kSegment + kWindow);
  TakeMemory();
  ASSERT_TRUE(engine_->MayReadDisk(kTenant, sequence.id));
  Close(Fork(sequence, kSegment));
  TestSequence other = Open();
  Append(&other, 100);
  Seal(other);  // forgets what nobody holds any more
  Seal(sequence);
  CheckAll();
}

TEST_F(MovedSegmentsTest, ATruncationThatPagesASegmentInDoesNotRenameTheOneBefore) {
  TestSequence sequence = Open();
  Append(&sequence, 3 * kSegment + kWindow);
  TakeMemory();
  const TestSequence whole = Fork(sequence, 3 * kSegment + kWindow);
  Close(Fork(sequence, kSegment));         // reads the first segment whole
  Truncate(&sequence, 2 * kSegment + 10);  // and the last two, for its new tail
  TestSequence other = Open();
  Append(&other, 100);
  Seal(other);
  Seal(sequence);
  Seal(whole);
  CheckAll();
}

// Whatever comes in whatever order.
TEST_F(MovedSegmentsTest, RandomHistoriesAreWholeOnDisk) {
  std::vector<TestSequence> open;
  for (int round = 0; round < 25; ++round) {
    if (open.empty()) {
      open.push_back(Open());
      open.back().writer = ++writers_;
      Append(&open.back(), 200 + random_.Below(1400));
    }
    const size_t at = random_.Below(open.size());
    const uint64_t tokens = open[at].history.committed();
    switch (random_.Below(7)) {
      case 0:
        if (open.size() < 4) open.push_back(Fork(open[at], 1 + random_.Below(tokens)));
        break;
      case 1:
        Truncate(&open[at], 1 + random_.Below(tokens));
        break;
      case 2:
        if (tokens < 2000) Append(&open[at], 1 + random_.Below(700));
        break;
      case 3:
        TakeMemory();
        break;
      case 4:
        Close(open[at]);
        open.erase(open.begin() + static_cast<ptrdiff_t>(at));
        break;
      default:
        Seal(open[at]);
    }
    if (HasFatalFailure()) return;
  }
  for (const TestSequence& sequence : open) Seal(sequence);
  CheckAll();
}

}  // namespace
}  // namespace attnd::ctl::test
