// SPDX-License-Identifier: Apache-2.0
//
// Goal: what no record names is out of the way at once and gone after a day of the server's time,
// after an hour if the disk needs the room, and what records name is never dropped and lies in its
// place. Method: a real folder, a file system that says how much is free, and times of the test's
// choice.
#include "engine/archive/orphans.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "storage/files/segment_file.h"
#include "tests/storage/io/forwarding_files.h"
#include "tests/temporary_folder.h"

namespace attnd::engine::test {
namespace {

namespace fs = std::filesystem;
using std::chrono::hours;
using std::chrono::minutes;

// The system's, but for what it says is free, and files that cannot be removed.
class ForgedFiles final : public storage::test::ForwardingFiles {
 public:
  absl::Status Remove(const std::string& path) override {
    if (stuck.count(path) != 0) return absl::UnavailableError("it cannot be removed");
    return ForwardingFiles::Remove(path);
  }
  absl::StatusOr<uint64_t> FreeBytes(const std::string& /*folder*/) override { return free; }

  uint64_t free = uint64_t{1} << 40;
  std::set<std::string> stuck;
};

class OrphansTest : public testing::Test {
 protected:
  void Write(uint64_t number, const std::string& suffix = "") {
    std::ofstream(folder_.SegmentPath(number) + suffix) << std::string(1000, 'x');
  }
  std::vector<uint64_t> Stored() {
    std::vector<uint64_t> numbers;
    const auto stored = folder_.ListSegments();
    for (const auto& file : *stored) numbers.push_back(file.number);
    return numbers;
  }
  std::vector<uint64_t> Aside() {
    std::vector<uint64_t> numbers;
    const auto aside = folder_.ListOrphans();
    for (const auto& file : *aside) numbers.push_back(file.number);
    return numbers;
  }

  using Numbers = std::vector<uint64_t>;
  const attnd::test::TemporaryFolder temporary_;
  ForgedFiles files_;
  const storage::DataFolder folder_ =
      storage::DataFolder::OpenWithSecret(&files_, temporary_.Path("data"), storage::Secret())
          .value();
  const Orphans::TimePoint start_ = Orphans::TimePoint(hours(1000));
};

TEST_F(OrphansTest, TheyGoAfterTheGracePeriod) {
  for (const uint64_t number : {1, 2, 3, 258}) Write(number);
  Write(4, storage::kTemporarySuffix);
  Orphans orphans(&folder_, &files_);
  EXPECT_EQ(orphans.SetAside({2}, start_).value(), 4u);
  EXPECT_EQ(Stored(), Numbers({2}));
  EXPECT_EQ(Aside(), Numbers({1, 3, 258})) << "what was never whole is gone";
  orphans.DropSome(start_ + hours(23));
  EXPECT_EQ(Aside(), Numbers({1, 3, 258}));
  // A server that is started anew gives them as long again.
  Write(5);
  Orphans next(&folder_, &files_);
  EXPECT_EQ(next.SetAside({2}, start_ + hours(23)).value(), 1u);
  next.DropSome(start_ + hours(25));
  EXPECT_EQ(Aside(), Numbers({1, 3, 5, 258}));
  next.DropSome(start_ + hours(47));
  EXPECT_EQ(Aside(), Numbers());
  EXPECT_EQ(Stored(), Numbers({2}));
}

TEST_F(OrphansTest, TheyTakeNoMoreThanTheDiskHasFree) {
  for (uint64_t number = 1; number <= 5; ++number) Write(number);
  files_.free = 3500;
  Orphans orphans(&folder_, &files_);
  EXPECT_EQ(orphans.SetAside({5}, start_).value(), 4u);
  orphans.DropSome(start_ + minutes(59));
  EXPECT_EQ(Aside(), Numbers({1, 2, 3, 4})) << "a start drops nothing";
  orphans.DropSome(start_ + hours(1));
  EXPECT_EQ(Aside(), Numbers({2, 3, 4})) << "the oldest goes first";
  files_.free = 1000;
  orphans.DropSome(start_ + hours(2));
  EXPECT_EQ(Aside(), Numbers({4}));
}

// A catalogue that had lost records is there again.
TEST_F(OrphansTest, WhatRecordsNameAgainComesBack) {
  for (const uint64_t number : {1, 2, 3, 258}) Write(number);
  Orphans orphans(&folder_, &files_);
  ASSERT_EQ(orphans.SetAside({1}, start_).value(), 3u);
  Write(3);  // beside the one that lies aside
  Orphans next(&folder_, &files_);
  EXPECT_EQ(next.SetAside({1, 3, 258}, start_).value(), 0u);
  EXPECT_EQ(Stored(), Numbers({1, 3, 258}));
  EXPECT_EQ(Aside(), Numbers({2, 3}));
  next.DropSome(start_ + hours(24));
  EXPECT_EQ(Aside(), Numbers({3})) << "it may be the one that the record means";
  EXPECT_EQ(Stored(), Numbers({1, 3, 258}));
}

TEST_F(OrphansTest, OneThatCannotGoHoldsNoneUp) {
  constexpr uint64_t kCount = Orphans::kMostAtOnce + 10;
  for (uint64_t number = 1; number <= kCount; ++number) Write(number);
  Orphans orphans(&folder_, &files_);
  ASSERT_EQ(orphans.SetAside({}, start_).value(), kCount);
  files_.stuck.insert(folder_.ListOrphans()->front().path);
  orphans.DropSome(start_ + hours(24));
  EXPECT_EQ(Aside().size(), kCount - Orphans::kMostAtOnce + 1) << "so many at once";
  orphans.DropSome(start_ + hours(24));
  EXPECT_EQ(Aside(), Numbers({1}));
  files_.stuck.clear();
  orphans.DropSome(start_ + hours(24));
  EXPECT_EQ(Aside(), Numbers());
}

TEST_F(OrphansTest, SettingAsideTwiceStopsTheProcess) {
  Write(1);
  Orphans orphans(&folder_, &files_);
  ASSERT_TRUE(orphans.SetAside({}, start_).ok());
  EXPECT_DEATH(static_cast<void>(orphans.SetAside({}, start_)), "once, at the start");
}

TEST_F(OrphansTest, AllComeBackOrNone) {
  for (const uint64_t number : {1, 2, 300}) Write(number);
  Orphans orphans(&folder_, &files_);
  ASSERT_TRUE(orphans.SetAside({}, start_).ok());
  Write(300);
  EXPECT_TRUE(absl::IsAlreadyExists(folder_.TakeBackOrphans()));
  EXPECT_EQ(Aside(), Numbers({1, 2, 300}));
  fs::remove(folder_.SegmentPath(300));
  EXPECT_TRUE(folder_.TakeBackOrphans().ok());
  EXPECT_EQ(Stored(), Numbers({1, 2, 300}));
  EXPECT_EQ(Aside(), Numbers());
}

}  // namespace
}  // namespace attnd::engine::test
