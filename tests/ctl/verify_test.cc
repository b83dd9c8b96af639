// SPDX-License-Identifier: Apache-2.0
//
// Goal: every damaged byte of a file is found and named with those who need it, and what a server
// changes meanwhile is no damage. Method: folders of files made by hand with a catalogue that knows
// them; random bytes flipped; changes made between the catalogue's reading and the files'.
#include "ctl/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>

#include "ctl/metered_queue.h"
#include "ctl/rebuild.h"
#include "tests/ctl/support.h"
#include "tests/storage/io/io_support.h"

namespace attnd::ctl::test {
namespace {

namespace fs = std::filesystem;
using storage::test::Must;
using testing::ElementsAre;

// Two sequences on one segment: files 1 (segment), 2 and 3 (tails); and a segment nobody needs: 4.
class VerifyTest : public testing::Test {
 protected:
  VerifyTest() {
    fs::create_directory(root_);
    const auto files = storage::MakePosixFileSystem();
    const auto folder =
        Must(storage::DataFolder::OpenWithSecret(files.get(), root_, storage::Secret()));
    CataloguePlan plan;
    for (uint64_t number = 1; number <= 4; ++number) {
      SampleFile sample;
      sample.number = number;
      sample.chain = ChainOf(number);
      if (number == 2 || number == 3) {
        sample.parent = ChainOf(1);
        sample.segments_before = 1;
        sample.sealed_id = 100 + number;
        plan.sequences.push_back(sample.SequenceRecord());
      } else {
        plan.segments.push_back(sample.SegmentRecord(1000));
      }
      const absl::Status written = WriteSample(sample, folder, files.get(), queue_.get());
      EXPECT_TRUE(written.ok()) << written;
    }
    EXPECT_TRUE(WriteCatalogue(plan, root_ + "/catalogue").ok());
    reader_ = Must(DataReader::Open(storage::MakePosixFileSystem(), root_));
  }
  std::string Path(uint64_t number) { return reader_->folder().SegmentPath(number); }
  void Flip(uint64_t number, uint64_t at, int bit) {
    std::fstream file(Path(number), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(at));
    const int byte = file.get() ^ (1 << bit);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(byte));
  }
  VerifyResult Run(const std::vector<uint64_t>& ids = {}, const BytesToRead& before = {}) {
    return Must(Verify(*reader_, ids, queue_.get(), before));
  }
  void Drop(const std::vector<storage::ChainId>& segments, const std::vector<uint64_t>& ids) {
    const auto catalogue =
        Must(storage::Catalogue::Open(root_ + "/catalogue", storage::Catalogue::Mode::kReadWrite));
    storage::CatalogueChanges changes;
    changes.dropped_segments = segments;
    changes.dropped_sequences = ids;
    EXPECT_TRUE(catalogue->Commit(changes).ok());
  }

  const uint64_t seed_ = storage::test::TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  const attnd::test::TemporaryFolder temporary_;
  const std::string root_ = temporary_.Path("data");
  const std::unique_ptr<storage::IoQueue> queue_ = ThreadQueue();
  std::unique_ptr<DataReader> reader_;
};

TEST_F(VerifyTest, ReadsEveryByte) {
  uint64_t told = 0, moved = 0;
  MeteredQueue metered(ThreadQueue(), 0, [&](uint64_t bytes) { moved += bytes; });
  const auto result = Must(Verify(*reader_, {}, &metered, [&](uint64_t bytes) { told = bytes; }));
  EXPECT_TRUE(result.fine());
  EXPECT_EQ(result.files, 4u);
  uint64_t bytes = 0;
  for (uint64_t number = 1; number <= 4; ++number) bytes += fs::file_size(Path(number));
  EXPECT_EQ(told, bytes);
  EXPECT_GE(moved, bytes);
  EXPECT_THAT(result.unnamed_files, ElementsAre());
}

TEST_F(VerifyTest, FindsAnyFlippedBitAndWhoNeedsTheFile) {
  std::mt19937_64 random(seed_);
  const std::set<uint64_t> needed_by[] = {{102, 103}, {102}, {103}, {}};
  for (int round = 0; round < 30; ++round) {
    const uint64_t number = 1 + random() % 4, at = random() % fs::file_size(Path(number));
    const int bit = static_cast<int>(random() % 8);
    Flip(number, at, bit);
    const VerifyResult result = Run();
    ASSERT_EQ(result.bad_files.size(), 1u) << "file " << number << ", byte " << at;
    EXPECT_EQ(result.bad_files[0].path, Path(number));
    EXPECT_EQ(result.bad_files[0].sequences, needed_by[number - 1]);
    EXPECT_FALSE(result.bad_files[0].missing);
    EXPECT_EQ(Run({103}).fine(), needed_by[number - 1].count(103) == 0);
    Flip(number, at, bit);
  }
  EXPECT_TRUE(Run().fine());
}

TEST_F(VerifyTest, FindsMissingAndForeignFiles) {
  fs::remove(Path(1));
  fs::copy_file(Path(2), Path(3), fs::copy_options::overwrite_existing);
  std::ofstream(Path(9)) << "stray";
  const VerifyResult result = Run();
  ASSERT_EQ(result.bad_files.size(), 2u);
  EXPECT_TRUE(result.bad_files[0].missing);
  EXPECT_EQ(result.bad_files[1].path, Path(3));
  EXPECT_THAT(result.unnamed_files, ElementsAre(Path(9)));
  EXPECT_TRUE(absl::IsNotFound(Verify(*reader_, {7}, queue_.get(), {}).status()));
}

TEST_F(VerifyTest, NamesSequencesWhoseSegmentsAreNotKnown) {
  Drop({ChainOf(1)}, {});
  const VerifyResult result = Run();
  EXPECT_TRUE(result.bad_files.empty());
  ASSERT_EQ(result.broken_sequences.size(), 2u);
  EXPECT_EQ(result.broken_sequences[0].id, 102u);
  EXPECT_FALSE(result.fine());
  EXPECT_THAT(result.unnamed_files, ElementsAre(Path(1)));
}

TEST_F(VerifyTest, WhatIsDroppedMeanwhileIsNoDamage) {
  const VerifyResult result = Run({}, [&](uint64_t) {
    Drop({}, {103});
    fs::remove(Path(3));
    std::ofstream(Path(9)) << "a seal that is under way";
  });
  EXPECT_TRUE(result.fine());
  EXPECT_THAT(result.unnamed_files, ElementsAre());
}

}  // namespace
}  // namespace attnd::ctl::test
