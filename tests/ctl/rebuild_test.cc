// SPDX-License-Identifier: Apache-2.0
//
// Goal: a catalogue that is made again holds what the lost one held, record for record; what cannot
// be taken is put away and not destroyed; and a rebuild that ends anywhere leaves a catalogue that
// is whole, the old one or the new one. Method: data folders of an engine, and folders of files
// made by hand; processes that end in the middle, and what such an end leaves, made by hand.
#include "ctl/rebuild.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "common/file_lock.h"
#include "ctl/verify.h"
#include "engine/engine.h"
#include "tests/ctl/support.h"
#include "tests/engine/support.h"
#include "tests/storage/io/io_support.h"

namespace attnd::ctl::test {
namespace {

namespace fs = std::filesystem;
using storage::DataFolder;
using storage::test::Must;
using testing::ElementsAre;
using testing::HasSubstr;

class RebuildTest : public testing::Test {
 protected:
  RebuildTest() { fs::create_directory(root_); }

  // Made when it is first asked for.
  const DataFolder& Folder() {
    if (!folder_.has_value()) {
      folder_ = Must(DataFolder::OpenWithSecret(files_.get(), root_, storage::Secret()));
    }
    return *folder_;
  }
  void Put(const SampleFile& sample) {
    const absl::Status written = WriteSample(sample, Folder(), files_.get(), queue_.get());
    EXPECT_TRUE(written.ok()) << written;
    samples_[sample.number] = sample;
  }
  // Segments 1..count, each behind the one before, and a tail: files first_number + 0..count.
  void PutSequence(uint64_t first_number, uint64_t count, uint64_t sealed_id) {
    storage::ChainId parent{};
    for (uint64_t i = 0; i <= count; ++i) {
      SampleFile sample;
      sample.number = first_number + i;
      sample.chain = ChainOf(sample.number);
      sample.parent = parent;
      sample.segments_before = i;
      if (i == count) sample.sealed_id = sealed_id;
      Put(sample);
      parent = sample.chain;
    }
  }
  void Damage(uint64_t number, uint64_t at) {
    const std::string path = Folder().SegmentPath(number);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(at));
    file.put('?');
  }
  absl::StatusOr<RebuildResult> Rebuild(const FilesDone& done = {}) {
    const auto queue = ThreadQueue();  // one of its own: it may run in a process of its own
    return RebuildCatalogue(root_, files_.get(), queue.get(), done);
  }
  CatalogueContents Contents() { return Must(CatalogueContents::Read(root_ + "/catalogue")); }
  std::vector<uint64_t> SequenceIds() {
    std::vector<uint64_t> ids;
    for (const auto& [id, record] : Contents().sequences) ids.push_back(id);
    return ids;
  }
  std::set<std::string> NamesIn(const std::string& folder) {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_ + folder)) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }
  // Every segment file, wherever it lies, by name, with its size.
  std::map<std::string, uint64_t> AllFiles() {
    std::map<std::string, uint64_t> all;
    for (const char* folder : {"/segments", "/quarantine"}) {
      for (const auto& entry : fs::recursive_directory_iterator(root_ + folder)) {
        if (entry.is_regular_file()) all[entry.path().filename().string()] = entry.file_size();
      }
    }
    return all;
  }

  const uint64_t seed_ = storage::test::TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  const attnd::test::TemporaryFolder temporary_;
  const std::string root_ = temporary_.Path("data");
  const std::unique_ptr<storage::FileSystem> files_ = storage::MakePosixFileSystem();
  const std::unique_ptr<storage::IoQueue> queue_ = ThreadQueue();
  std::optional<DataFolder> folder_;
  std::map<uint64_t, SampleFile> samples_;
};

// What an engine wrote: shared prefixes, a fork, tails alone, one that was dropped.
TEST_F(RebuildTest, HoldsWhatTheEnginesCatalogueHeld) {
  using namespace engine::test;  // NOLINT
  Random random(seed_);
  engine::EngineOptions options = SmallOptions();
  options.archive.data_dir = root_;
  auto engine = MakeEngine(options);
  const ModelShape shape = MakeShape(2, 4, 2, 64, 64, DType::kBf16);
  TestSequence sequence = OpenSequence(engine.get(), shape);
  Prefill(&sequence, 1700, &random);
  FinishPrefill(&sequence);
  const auto seal = [&](uint64_t id) { return Must(engine->Seal(kTenant, id, nullptr)).sealed_id; };
  seal(sequence.id);
  seal(Must(engine->Fork(kTenant, sequence.id, 1100)).id);
  TestSequence alone = OpenSequence(engine.get(), shape);
  Prefill(&alone, 100, &random);
  seal(alone.id);
  const uint64_t dropped = seal(alone.id);
  ASSERT_TRUE(engine->DropSealed(kTenant, dropped).ok());

  // It has the catalogue open.
  EXPECT_TRUE(absl::IsAlreadyExists(Rebuild().status())) << Rebuild().status();
  engine.reset();
  const CatalogueContents before = Contents();
  ASSERT_EQ(before.sequences.size(), 3u);
  ASSERT_GE(before.segments.size(), 3u);
  fs::remove_all(root_ + "/catalogue");
  const auto rebuilt = Rebuild();
  ASSERT_TRUE(rebuilt.ok()) << rebuilt.status();
  EXPECT_TRUE(rebuilt->plan.untaken.empty());
  EXPECT_EQ(rebuilt->old_catalogue, "");
  CatalogueContents after = Contents();
  // In no file: it counts as used now.
  for (auto& [chain, record] : after.segments) {
    EXPECT_GE(record.used_unix_s, before.segments.at(chain).used_unix_s);
    record.used_unix_s = before.segments.at(chain).used_unix_s;
  }
  for (auto& [id, record] : after.sequences) {
    EXPECT_GE(record.used_unix_s, before.sequences.at(id).used_unix_s);
    record.used_unix_s = before.sequences.at(id).used_unix_s;
  }
  EXPECT_EQ(Difference(before, after), "");

  engine = MakeEngine(options);
  const engine::OpenArgs args = ArgsOf(shape);
  for (const auto& [id, record] : before.sequences) {
    const auto opened = engine->Resume(kTenant, args, id, nullptr);
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ(opened->tokens_present, record.tokens);
  }
  EXPECT_GT(seal(Must(engine->Resume(kTenant, args, before.sequences.begin()->first, nullptr))
                     .sequence_id),
            dropped);
}

// What a server refuses to start with, so that it takes no file for an orphan.
TEST_F(RebuildTest, AnEmptiedCatalogueIsMadeAgain) {
  using namespace engine::test;  // NOLINT
  Random random(seed_);
  engine::EngineOptions options = SmallOptions();
  options.archive.data_dir = root_;
  auto engine = MakeEngine(options);
  TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 2, 1, 64, 64, DType::kBf16));
  Prefill(&sequence, 1200, &random);
  FinishPrefill(&sequence);
  const uint64_t sealed = Must(engine->Seal(kTenant, sequence.id, nullptr)).sealed_id;
  engine.reset();
  for (const auto& file : fs::directory_iterator(root_ + "/catalogue")) {
    if (file.path().extension() == ".log" || file.path().filename() == "LAST_COMMIT") {
      fs::resize_file(file.path(), 0);
    }
  }
  for (int start = 0; start < 2; ++start) {
    EXPECT_FALSE(
        engine::Engine::Create(options, attention::MakeCpuBackend({.threads = 1}), nullptr).ok());
  }
  const auto rebuilt = Rebuild();
  ASSERT_TRUE(rebuilt.ok()) << rebuilt.status();
  EXPECT_TRUE(rebuilt->plan.untaken.empty());
  engine = MakeEngine(options);
  const auto opened = engine->Resume(kTenant, ArgsOf(sequence.shape()), sealed, nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status();
  TestSequence resumed(engine.get(), opened->sequence_id, sequence.shape());
  resumed.history = sequence.history;
  EXPECT_TRUE(MatchesModel(&resumed, &random));
}

TEST_F(RebuildTest, TakesWhatIsWholeAndPutsTheRestAway) {
  PutSequence(1, 3, 100);
  PutSequence(10, 3, 101);
  PutSequence(20, 2, 102);
  PutSequence(30, 0, 103);
  SampleFile fork = samples_.at(13);  // a tail behind two of the second one's segments
  fork.number = 40;
  fork.sealed_id = 104;
  fork.parent = ChainOf(11);
  fork.segments_before = 2;
  Put(fork);
  ASSERT_TRUE(Rebuild().ok());
  ASSERT_THAT(SequenceIds(), ElementsAre(100, 101, 102, 103, 104));

  Damage(12, 20);                        // the second one's last segment: header
  fs::remove(Folder().SegmentPath(20));  // the third one's first
  Damage(4, 4100);                       // the first one's tail: metadata
  std::ofstream(Folder().SegmentPath(50)) << "half";
  std::ofstream(Folder().SegmentPath(51) + ".tmp") << "half";
  const auto before = AllFiles();
  const auto rebuilt = Rebuild();
  ASSERT_TRUE(rebuilt.ok()) << rebuilt.status();
  EXPECT_THAT(SequenceIds(), ElementsAre(103, 104));
  EXPECT_EQ(Contents().segments.size(), 5u) << "1, 2, 3; 10, 11";
  EXPECT_EQ(rebuilt->plan.unneeded_segments, 3u);
  std::vector<uint64_t> untaken;
  for (const auto& file : rebuilt->plan.untaken) untaken.push_back(file.number);
  EXPECT_THAT(untaken, ElementsAre(4, 12, 13, 21, 22, 50));
  EXPECT_EQ(NamesIn("/quarantine").size(), 6u);
  EXPECT_EQ(AllFiles(), before) << "moved, not changed";
  EXPECT_EQ(rebuilt->old_catalogue, root_ + "/catalogue.old-1");
  EXPECT_EQ(Must(CatalogueContents::Read(rebuilt->old_catalogue)).sequences.size(), 5u);

  // Nothing that is left is wrong, and numbers go on behind all that were seen.
  const auto reader = Must(DataReader::Open(storage::MakePosixFileSystem(), root_));
  EXPECT_TRUE(Must(Verify(*reader, {}, queue_.get(), {})).fine());
  const auto catalogue =
      Must(storage::Catalogue::Open(root_ + "/catalogue", storage::Catalogue::Mode::kReadWrite));
  EXPECT_GT(Must(catalogue->TakeNumbers(1)), 104u);
}

// A file that comes back from quarantine, or from a backup, makes the rest whole again.
TEST_F(RebuildTest, WhatComesBackIsTakenByTheNextOne) {
  PutSequence(1, 3, 100);
  fs::rename(Folder().SegmentPath(2), root_ + "/backup");
  ASSERT_TRUE(Rebuild().ok());
  EXPECT_THAT(SequenceIds(), ElementsAre());
  EXPECT_EQ(NamesIn("/quarantine").size(), 2u);
  fs::rename(root_ + "/backup", Folder().SegmentPath(2));
  for (const uint64_t number : {3, 4}) {
    const fs::path path = Folder().SegmentPath(number);
    fs::rename(root_ + "/quarantine/" + path.filename().string(), path);
  }
  ASSERT_TRUE(Rebuild().ok());
  EXPECT_THAT(SequenceIds(), ElementsAre(100));
}

TEST_F(RebuildTest, OrphansComeBackIfTheyAreAskedFor) {
  PutSequence(1, 2, 100);
  PutSequence(10, 1, 101);
  ASSERT_TRUE(Folder().SetAside({1, 2, 3}).ok());
  const auto without = Rebuild();
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_THAT(SequenceIds(), ElementsAre(101));
  uint64_t bytes = 0;
  for (const auto& file : fs::directory_iterator(root_ + "/orphans")) bytes += file.file_size();
  EXPECT_EQ(without->orphan_files, 3u);
  EXPECT_EQ(without->orphan_bytes, bytes);
  const auto queue = ThreadQueue();
  const auto with = RebuildCatalogue(root_, files_.get(), queue.get(), {}, /*with_orphans=*/true);
  ASSERT_TRUE(with.ok()) << with.status();
  EXPECT_THAT(SequenceIds(), ElementsAre(100, 101));
  EXPECT_TRUE(with->plan.untaken.empty());
  EXPECT_EQ(with->orphan_files, 0u);
  EXPECT_TRUE(NamesIn("/orphans").empty());
}

// An orphan's number is not given again while it lies there.
TEST_F(RebuildTest, NumbersGoOnBehindThoseOfOrphans) {
  PutSequence(1, 0, 100);
  constexpr uint64_t kFar = uint64_t{1} << 40;
  PutSequence(kFar, 0, 101);
  ASSERT_TRUE(Folder().SetAside({kFar}).ok());
  ASSERT_TRUE(Rebuild().ok());
  const auto catalogue =
      Must(storage::Catalogue::Open(root_ + "/catalogue", storage::Catalogue::Mode::kReadWrite));
  EXPECT_GT(catalogue->LastNumber(), kFar);
  EXPECT_GT(Must(catalogue->TakeNumbers(1)), kFar);
}

TEST_F(RebuildTest, NothingInQuarantineIsReplaced) {
  PutSequence(1, 0, 100);
  PutSequence(2, 0, 101);
  ASSERT_TRUE(Rebuild().ok());
  fs::copy_file(Folder().SegmentPath(1), root_ + "/quarantine/0000000000000001.seg");
  Damage(1, 20);
  const auto rebuilt = Rebuild();
  EXPECT_TRUE(absl::IsAlreadyExists(rebuilt.status()));
  EXPECT_THAT(std::string(rebuilt.status().message()), HasSubstr("quarantine"));
  EXPECT_THAT(SequenceIds(), ElementsAre(100, 101)) << "the old one is in its place";
}

TEST_F(RebuildTest, WhatIsNoDataFolderDoesNotBecomeOne) {
  EXPECT_TRUE(absl::IsNotFound(Rebuild().status()));
  EXPECT_TRUE(fs::is_empty(root_));
}

TEST_F(RebuildTest, AServersLockKeepsItOut) {
  PutSequence(1, 0, 100);
  const FileLock lock = Must(LockDataDir(root_));
  EXPECT_TRUE(absl::IsAlreadyExists(Rebuild().status()));
  EXPECT_FALSE(fs::exists(root_ + "/catalogue"));
}

// Processes that end while they read, one file further each time, and one that ends just before the
// new catalogue gets its place.
TEST_F(RebuildTest, AnEndInTheMiddleLeavesTheOldOne) {
  PutSequence(1, 4, 100);
  ASSERT_TRUE(Rebuild().ok());
  Damage(5, 20);  // so that the new one would differ
  const CatalogueContents old = Contents();
  for (uint64_t end = 0; end < 5; ++end) {
    EXPECT_TRUE(storage::test::InChild([&] {
      const auto rebuilt = Rebuild([&](uint64_t done, uint64_t) {
        if (done == end) _exit(0);
        return absl::OkStatus();
      });
      return std::string("it did not end");
    }));
    ASSERT_EQ(Difference(Contents(), old), "") << end;
  }
  // A half-made new one, as any end after that leaves it: made anew.
  fs::create_directory(root_ + "/catalogue.new");
  std::ofstream(root_ + "/catalogue.new/CURRENT") << "half";
  EXPECT_EQ(Difference(Contents(), old), "");
  // A new one that had the old one's name already: it stays beside, and nobody takes it for one.
  ASSERT_TRUE(WriteCatalogue({}, root_ + "/catalogue.old-1").ok());
  ASSERT_TRUE(Rebuild().ok());
  EXPECT_THAT(SequenceIds(), ElementsAre());
  EXPECT_EQ(Contents().segments.size(), 4u);
  EXPECT_EQ(Difference(Must(CatalogueContents::Read(root_ + "/catalogue.old-2")), old), "");
  EXPECT_FALSE(fs::exists(root_ + "/catalogue.new"));
}

// More records than one commit takes.
TEST_F(RebuildTest, WritesAnyNumberOfRecords) {
  CataloguePlan plan;
  SampleFile sample;
  for (uint64_t number = 1; number <= 10000; ++number) {
    storage::SegmentRecord record = {ChainOf(number), {}, "tenant", number, 8192, 0, 32, 0};
    plan.segments.push_back(record);
  }
  plan.last_number = storage::kNumberMax;
  const std::string path = temporary_.Path("catalogue");
  const absl::Status written = WriteCatalogue(plan, path);
  ASSERT_TRUE(written.ok()) << written;
  EXPECT_EQ(Must(CatalogueContents::Read(path)).segments.size(), 10000u);
}

}  // namespace
}  // namespace attnd::ctl::test
