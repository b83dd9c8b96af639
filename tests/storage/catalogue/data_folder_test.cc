// SPDX-License-Identifier: Apache-2.0
//
// Goal: a data folder is made once and found again, its secret is made durable before it is used
// and is refused when it is not one, and its files are told from everything else. Method: the
// system's files, behind a double that notes what is made durable in which order and fails at any
// point.
#include "storage/catalogue/data_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "storage/files/segment_file.h"
#include "tests/storage/catalogue/catalogue_support.h"
#include "tests/storage/io/forwarding_files.h"

namespace attnd::storage::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// The system's, with a list of what was done to names, which ends with an error after `left` of
// them.
class NotingFileSystem final : public ForwardingFiles {
 public:
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return Note("rename " + to, [&] { return ForwardingFiles::Rename(from, to); });
  }
  absl::Status SyncFolder(const std::string& folder) override {
    return Note("sync " + folder, [&] { return ForwardingFiles::SyncFolder(folder); });
  }
  absl::Status Remove(const std::string& path) override {
    return Note("remove " + path, [&] { return ForwardingFiles::Remove(path); });
  }
  absl::Status MakeFolder(const std::string& folder) override {
    return Note("make " + folder, [&] { return ForwardingFiles::MakeFolder(folder); });
  }

  std::vector<std::string> noted;
  size_t left = SIZE_MAX;

 private:
  template <typename Do>
  absl::Status Note(const std::string& what, const Do& act) {
    if (left == 0) return absl::UnavailableError("the double's");
    --left;
    noted.push_back(what);
    return act();
  }
};

class DataFolderTest : public testing::Test {
 protected:
  absl::StatusOr<DataFolder> Open() { return DataFolder::Open(&files_, root_); }
  // Opens it, which must fail; the error.
  absl::Status Refused() { return Open().status(); }

  const TemporaryFolder temporary_;
  const std::string root_ = temporary_.path() + "/data";
  const std::string secret_path_ = root_ + "/secret";
  NotingFileSystem files_;
};

TEST_F(DataFolderTest, IsMadeAndFoundAgain) {
  const auto first = Open();
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->root(), root_);
  EXPECT_EQ(first->CataloguePath(), root_ + "/catalogue");
  EXPECT_EQ(first->SegmentPath(0x123456789abcdef0), root_ + "/segments/f0/123456789abcdef0.seg");
  EXPECT_EQ(first->SegmentPath(7), root_ + "/segments/07/0000000000000007.seg");
  EXPECT_THAT(NamesIn(root_), ElementsAre("quarantine", "secret", "segments"));
  EXPECT_EQ(NamesIn(root_ + "/segments").size(), 256u);
  for (const uint64_t number : {1u, 171u, 255u, 256u}) WriteFile(first->SegmentPath(number), "x");
  const auto again = DataFolder::Open(&files_, root_ + "/");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->secret(), first->secret());
  EXPECT_EQ(again->root(), root_);
  EXPECT_EQ(again->ListSegments()->size(), 4u);
}

TEST_F(DataFolderTest, RootsThatAreNone) {
  for (const char* root : {"", "/", "data", "./data"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(DataFolder::Open(&files_, root).status())) << root;
  }
  WriteFile(root_, "a file");
  EXPECT_FALSE(Refused().ok());
}

TEST_F(DataFolderTest, SecretsDifferAndAreTheirOwners) {
  std::set<Secret> secrets;
  for (const char* name : {"/a", "/b", "/c"}) {
    const auto folder = DataFolder::Open(&files_, temporary_.path() + name);
    ASSERT_TRUE(folder.ok()) << folder.status();
    secrets.insert(folder->secret());
    struct stat attributes {};
    ASSERT_EQ(stat((folder->root() + "/secret").c_str(), &attributes), 0);
    EXPECT_EQ(attributes.st_mode & 07777, 0600u);
    EXPECT_EQ(attributes.st_size, 32);
    ASSERT_EQ(stat(folder->root().c_str(), &attributes), 0);
    EXPECT_EQ(attributes.st_mode & 07777, 0700u);
  }
  EXPECT_EQ(secrets.size(), 3u);
  EXPECT_FALSE(secrets.contains(Secret{}));
}

TEST_F(DataFolderTest, SecretsThatAreNone) {
  ASSERT_TRUE(Open().ok());
  const std::string good = ReadFile(secret_path_);
  for (const std::string& bytes :
       {std::string(), good.substr(0, 31), good + "x", std::string(32, '\0')}) {
    WriteFile(secret_path_, bytes);
    const absl::Status status = Refused();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(secret_path_));
    EXPECT_EQ(ReadFile(secret_path_), bytes);  // left alone
  }
  WriteFile(secret_path_, good);
  EXPECT_TRUE(Open().ok());
  for (const mode_t mode : {0640, 0604, 0620, 0602, 0610, 0601, 0666}) {
    ASSERT_EQ(chmod(secret_path_.c_str(), mode), 0);
    const absl::Status status = Refused();
    EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("chmod 600"));
  }
  ASSERT_EQ(chmod(secret_path_.c_str(), 0400), 0);
  EXPECT_TRUE(Open().ok());
}

TEST_F(DataFolderTest, OtherThingsInTheSecretsPlace) {
  ASSERT_TRUE(Open().ok());
  std::filesystem::rename(secret_path_, root_ + "/elsewhere");
  std::filesystem::create_symlink(root_ + "/elsewhere", secret_path_);
  EXPECT_FALSE(Refused().ok());
  std::filesystem::remove(secret_path_);
  std::filesystem::create_directory(secret_path_);
  EXPECT_TRUE(absl::IsDataLoss(Refused())) << Refused();
  std::filesystem::remove(secret_path_);
  ASSERT_EQ(mkfifo(secret_path_.c_str(), 0600), 0);
  EXPECT_TRUE(absl::IsDataLoss(Refused())) << Refused();  // and does not wait
}

// Another one would make everything unfindable.
TEST_F(DataFolderTest, AMissingSecretIsNotMadeAnew) {
  ASSERT_TRUE(Open().ok());
  std::filesystem::remove(secret_path_);
  EXPECT_TRUE(absl::IsDataLoss(Refused())) << Refused();
  EXPECT_FALSE(std::filesystem::exists(secret_path_));
}

TEST_F(DataFolderTest, TheSecretIsDurableBeforeAnythingElse) {
  ASSERT_TRUE(Open().ok());
  const auto& noted = files_.noted;
  ASSERT_GE(noted.size(), 6u);
  const std::vector<std::string> first(noted.begin(), noted.begin() + 5);
  EXPECT_THAT(first, ElementsAre("make " + root_, "sync " + temporary_.path(),
                                 "remove " + secret_path_ + ".tmp", "rename " + secret_path_,
                                 "sync " + root_));
  EXPECT_EQ(noted.back(), "sync " + root_ + "/segments");
}

// A process that ends anywhere while it makes the folder: the next one finishes it, and a secret
// that anybody had is still the secret.
TEST_F(DataFolderTest, InterruptedAnywhere) {
  ASSERT_TRUE(Open().ok());
  const size_t steps = files_.noted.size();
  std::filesystem::remove_all(root_);
  for (const size_t left :
       {size_t{0}, size_t{1}, size_t{3}, size_t{4}, size_t{5}, size_t{100}, steps - 1}) {
    files_.left = left;
    ASSERT_TRUE(absl::IsUnavailable(Refused())) << left;
    const std::string secret = ReadFile(secret_path_);
    files_.left = SIZE_MAX;
    const auto folder = Open();
    ASSERT_TRUE(folder.ok()) << left << folder.status();
    EXPECT_TRUE(secret.empty() || ReadFile(secret_path_) == secret) << left;
    EXPECT_TRUE(folder->ListSegments().ok());
    EXPECT_FALSE(std::filesystem::exists(secret_path_ + ".tmp"));
    std::filesystem::remove_all(root_);
  }
}

TEST_F(DataFolderTest, OpenedByManyAtOnce) {
  std::vector<Secret> secrets(8);
  std::vector<std::thread> threads;
  threads.reserve(secrets.size());
  for (Secret& secret : secrets) {
    threads.emplace_back([&] {
      const auto files = MakePosixFileSystem();
      const auto folder = DataFolder::Open(files.get(), root_);
      EXPECT_TRUE(folder.ok()) << folder.status();
      if (folder.ok()) secret = folder->secret();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Secret& secret : secrets) EXPECT_EQ(secret, secrets[0]);
}

TEST_F(DataFolderTest, ListsItsOwnFilesOnly) {
  const auto folder = Open();
  ASSERT_TRUE(folder.ok()) << folder.status();
  const std::string segments = root_ + "/segments";
  for (const char* name :
       {"/0000000000000001.seg", "/01/0000000000000002.seg", "/01/1.seg", "/01/0000000000000001",
        "/01/000000000000001.seg", "/01/00000000000000001.seg", "/01/0000000000000001.seg.old",
        "/01/0000000000000001.tmp", "/ab/00000000000000AB.seg", "/01/0x00000000000001.seg",
        "/00/0000000000000000.seg", "/01/ 000000000000001.seg", "/01/-000000000000001.seg"}) {
    WriteFile(segments + name, "not ours");
  }
  std::filesystem::create_directory(segments + "/03/0000000000000003.seg");
  EXPECT_TRUE(folder->ListSegments()->empty());
  const std::vector<uint64_t> numbers = {1, 0x101, 0xfe, kNumberMax, 0xffffffffffffffff};
  for (const uint64_t number : numbers) {
    WriteFile(folder->SegmentPath(number), std::string(number % 1000, 'x'));
  }
  WriteFile(folder->SegmentPath(1) + kTemporarySuffix, "part");
  WriteFile(folder->SegmentPath(2) + kTemporarySuffix, "");
  const auto listed = folder->ListSegments();
  ASSERT_TRUE(listed.ok()) << listed.status();
  std::vector<std::pair<uint64_t, bool>> found;
  for (const StoredFile& file : *listed) {
    found.emplace_back(file.number, file.temporary);
    EXPECT_EQ(file.path,
              folder->SegmentPath(file.number) + (file.temporary ? kTemporarySuffix : ""));
    EXPECT_EQ(file.bytes, std::filesystem::file_size(file.path));
  }
  EXPECT_THAT(found, ElementsAre(std::pair(1, false), std::pair(1, true), std::pair(2, true),
                                 std::pair(0xfe, false), std::pair(0x101, false),
                                 std::pair(kNumberMax, false), std::pair(numbers[4], false)));
}

TEST_F(DataFolderTest, AMissingFolderOfSegmentsIsAnErrorUntilOpened) {
  const auto folder = Open();
  ASSERT_TRUE(folder.ok()) << folder.status();
  std::filesystem::remove(root_ + "/segments/77");
  EXPECT_TRUE(absl::IsNotFound(folder->ListSegments().status()));
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(folder->ListSegments().ok());
}

TEST_F(DataFolderTest, Quarantine) {
  const auto folder = Open();
  ASSERT_TRUE(folder.ok()) << folder.status();
  WriteFile(folder->SegmentPath(0x1ff), "damaged");
  files_.noted.clear();
  EXPECT_EQ(folder->Quarantine(0x1ff), absl::OkStatus());
  EXPECT_EQ(ReadFile(root_ + "/quarantine/00000000000001ff.seg"), "damaged");
  EXPECT_TRUE(folder->ListSegments()->empty());
  EXPECT_THAT(files_.noted,
              ElementsAre("rename " + root_ + "/quarantine/00000000000001ff.seg",
                          "sync " + root_ + "/quarantine", "sync " + root_ + "/segments/ff"));
  EXPECT_TRUE(absl::IsNotFound(folder->Quarantine(0x1ff)));
}

TEST_F(DataFolderTest, WithASecretFromElsewhere) {
  Secret secret{};
  secret[0] = 1;
  const auto folder = DataFolder::OpenWithSecret(&files_, root_, secret);
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(folder->secret(), secret);
  EXPECT_THAT(NamesIn(root_), ElementsAre("quarantine", "segments"));
  EXPECT_TRUE(absl::IsInvalidArgument(DataFolder::OpenWithSecret(&files_, "", secret).status()));
}

}  // namespace
}  // namespace attnd::storage::test
