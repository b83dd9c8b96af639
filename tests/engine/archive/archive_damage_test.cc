// SPDX-License-Identifier: Apache-2.0
//
// Goal: damage concerns only the sequences that need the damaged file; what was not acknowledged
// leaves nothing; a folder whose catalogue has gone or is an older one is refused and left alone.
// Method: bytes and files of a real data folder changed between an engine's end and the next one's
// start.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/engine/archive/archive_fixture.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class ArchiveDamageTest : public ArchiveFixture {
 protected:
  ArchiveDamageTest() { Start(); }

  // Of a dense step in each layer that only asks: the last layer's error, if there was one.
  absl::StatusCode StatusOfSteps(TestSequence* sequence) {
    absl::StatusCode code = absl::StatusCode::kOk;
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Message message(layer, {QueryOnlyRow(sequence, layer, 1, &random_)});
      const absl::Status status = Send(engine_.get(), message).row_status(0);
      if (!status.ok()) code = status.code();
    }
    return code;
  }
};

TEST_F(ArchiveDamageTest, DamageConcernsOnlyWhoNeedsTheFile) {
  const std::vector<uint32_t> ids = Ids(1300);
  const History contents = Contents(1300);
  TestSequence sequence = Open();
  Upload(&sequence, ids, 0, contents);
  const SealResult sealed = Seal(sequence);
  ASSERT_EQ(sealed.segments, 2u);
  TestSequence other = Open();
  Prefill(&other, 700, &random_);
  FinishPrefill(&other);
  const SealResult of_other = Seal(other);
  const History other_history = other.history;
  const std::vector<fs::path> files = Files();  // two segments and a tail, and the other's
  ASSERT_EQ(files.size(), 5u);
  Start();
  // A page: found by the step that reads it. Resuming reads indexes alone.
  FlipByte(files[1], fs::file_size(files[1]) / 2);
  auto damaged = Resume(sealed.sealed_id, contents);
  ASSERT_TRUE(damaged.ok()) << damaged.status();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(StatusOfSteps(&*damaged), absl::StatusCode::kDataLoss);
  }
  ASSERT_TRUE(engine_->Close(kTenant, damaged->id).ok());
  EXPECT_EQ(engine_->archive_stats().quarantined_files, 1u);
  EXPECT_FALSE(fs::exists(files[1])) << "out of the way";
  const absl::Status lost = engine_->Resume(kTenant, Args(), sealed.sealed_id, nullptr).status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss) << "and still known to be lost";
  EXPECT_THAT(std::string(lost.message()),
              HasSubstr("sealed sequence " + std::to_string(sealed.sealed_id)));
  EXPECT_EQ(Reused(ids), 512u) << "the first segment is as it was";
  auto resumed = Resume(of_other.sealed_id, other_history);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
  EXPECT_EQ(engine_->usage().sequences, 2u) << "of what could not be resumed nothing is left";

  // Whoever seals the same tokens again makes it whole.
  TestSequence again = Open();
  Upload(&again, ids, 0, contents);
  EXPECT_EQ(Seal(again).written_segments, 1u);
  auto whole = Resume(sealed.sealed_id, contents);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_TRUE(MatchesModel(&*whole, &random_));
}

TEST_F(ArchiveDamageTest, WhatWasNotAcknowledgedLeavesNothing) {
  TestSequence sequence = Open();
  Prefill(&sequence, 1300, &random_);
  FinishPrefill(&sequence);
  const std::atomic<bool> gone{true};
  EXPECT_EQ(engine_->Seal(kTenant, sequence.id, &gone).status().code(),
            absl::StatusCode::kCancelled);
  EXPECT_TRUE(engine_->ListSealed(kTenant, 0, 10)->empty());
  EXPECT_TRUE(MatchesModel(&sequence, &random_));

  // Files of a crash: temporary, and whole but in no catalogue.
  const SealResult sealed = Seal(sequence);
  const History history = sequence.history;
  const std::vector<fs::path> files = Files();
  fs::copy_file(files[0], folder_.Path("segments/00/0000000000000f00.seg"));
  fs::copy_file(files[0], files[0].string() + ".tmp");
  Start();
  EXPECT_EQ(Files(), files);
  EXPECT_EQ(engine_->archive_stats().orphan_files, 2u);
  EXPECT_TRUE(fs::exists(folder_.Path("orphans/0000000000000f00.seg"))) << "for a while";
  auto resumed = Resume(sealed.sealed_id, history);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
}

TEST_F(ArchiveDamageTest, WithoutItsCatalogueAFolderIsRefusedAndKept) {
  TestSequence sequence = Open();
  Prefill(&sequence, 600, &random_);
  FinishPrefill(&sequence);
  Seal(sequence);
  const size_t files = Files().size();
  engine_.reset();
  fs::rename(folder_.Path("catalogue"), folder_.Path("elsewhere"));
  const absl::Status refused = StartStatus();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("rebuild-catalogue"));
  EXPECT_EQ(Files().size(), files);
}

// As a disk leaves them that loses the contents of files and not their names; and worse.
TEST_F(ArchiveDamageTest, WithAnEmptiedCatalogueAFolderIsRefusedAndKept) {
  TestSequence sequence = Open();
  Prefill(&sequence, 600, &random_);
  FinishPrefill(&sequence);
  Seal(sequence);
  const std::vector<fs::path> files = Files();
  engine_.reset();
  const fs::path catalogue = folder_.Path("catalogue"), whole = folder_.Path("whole");
  fs::copy(catalogue, whole, fs::copy_options::recursive);
  enum Loss { kContents, kFiles, kEverything };
  for (const Loss loss : {kContents, kFiles, kEverything}) {
    SCOPED_TRACE(loss);
    fs::remove_all(catalogue);
    fs::copy(whole, catalogue, fs::copy_options::recursive);
    for (const fs::path& file : std::vector<fs::path>(fs::directory_iterator(catalogue), {})) {
      const bool lost = file.extension() == ".log" || file.filename() == "LAST_COMMIT";
      if (loss == kEverything || (lost && loss == kFiles)) fs::remove(file);
      if (lost && loss == kContents) fs::resize_file(file, 0);
    }
    for (int start = 0; start < 2; ++start) {
      const absl::Status refused = StartStatus();
      EXPECT_FALSE(refused.ok());
      EXPECT_THAT(std::string(refused.message()), HasSubstr("rebuild-catalogue"));
      EXPECT_EQ(Files(), files);
      EXPECT_FALSE(fs::exists(folder_.Path("orphans")));
    }
  }
}

// A catalogue from a backup beside newer files is no reason to take these for orphans.
TEST_F(ArchiveDamageTest, WithAnOlderCatalogueAFolderIsRefusedAndKept) {
  engine_.reset();  // has made one
  const fs::path catalogue = folder_.Path("catalogue"), older = folder_.Path("older");
  fs::copy(catalogue, older, fs::copy_options::recursive);
  Start();
  TestSequence sequence = Open();
  Prefill(&sequence, 600, &random_);
  FinishPrefill(&sequence);
  const SealResult sealed = Seal(sequence);
  const size_t files = Files().size();
  engine_.reset();
  fs::rename(catalogue, folder_.Path("newer"));
  fs::rename(older, catalogue);
  EXPECT_EQ(StartStatus().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Files().size(), files);

  // As an older one leaves the folder that has given their numbers, and lost their records: a
  // rebuild needs them, and so does the catalogue that names them.
  fs::create_directory(folder_.Path("orphans"));
  for (const fs::path& file : Files()) {
    fs::rename(file, fs::path(folder_.Path("orphans")) / file.filename());
  }
  EXPECT_THAT(std::string(StartStatus().message()), HasSubstr("rebuild-catalogue --orphans"));
  fs::remove_all(catalogue);
  fs::rename(folder_.Path("newer"), catalogue);
  Start();
  EXPECT_TRUE(Resume(sealed.sealed_id, sequence.history).ok());
}

}  // namespace
}  // namespace attnd::engine::test
