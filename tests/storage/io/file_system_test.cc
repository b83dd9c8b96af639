// SPDX-License-Identifier: Apache-2.0
//
// Goal: the operating system's FileSystem does what file_system.h says, and tells each fault by its
// code. Method: real files in fresh folders; refusals are real, too (/proc has no O_DIRECT; seccomp
// filters and resource limits in processes of their own).
#include "storage/io/file_system.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "storage/io/errno_status.h"
#include "tests/storage/io/io_support.h"

namespace attnd::storage::test {
namespace {

using absl::StatusCode;
using testing::HasSubstr;

class FileSystemTest : public testing::Test {
 protected:
  std::string Path(const std::string& name) const { return folder_.Path(name); }
  static mode_t ModeOf(const std::string& path) { return Stat(path).st_mode & 07777; }
  static struct stat Stat(const std::string& path) {
    struct stat info = {};
    EXPECT_EQ(stat(path.c_str(), &info), 0) << path;
    return info;
  }

  const TemporaryFolder folder_;
  const std::unique_ptr<FileSystem> files_ = MakePosixFileSystem();
};

void ExpectFault(const absl::Status& status, StatusCode code, const std::string& text) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(status.message(), HasSubstr(text));
}

TEST_F(FileSystemTest, ACreatedFileHasItsRoomAtOnce) {
  constexpr uint64_t kBytes = 64 * kBlockBytes;
  const auto file = Must(files_->Create(Path("a"), kBytes));
  EXPECT_EQ(file->bytes(), kBytes);
  EXPECT_EQ(Stat(Path("a")).st_size, static_cast<off_t>(kBytes));
  EXPECT_GE(static_cast<uint64_t>(Stat(Path("a")).st_blocks) * 512, kBytes);
  EXPECT_EQ(ModeOf(Path("a")), 0600u);
  EXPECT_NE(fcntl(file->fd(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ((fcntl(file->fd(), F_GETFL) & O_DIRECT) != 0, files_->direct());
  EXPECT_TRUE(file->Sync().ok());
  EXPECT_EQ(Must(files_->Open(Path("a")))->bytes(), kBytes);
  EXPECT_EQ(Must(files_->Create(Path("empty"), 0))->bytes(), 0u);
}

TEST_F(FileSystemTest, CreateReplacesNothing) {
  MakeFile(Path("a"), Bytes(10, std::byte{1}));
  ExpectFault(files_->Create(Path("a"), kBlockBytes).status(), StatusCode::kAlreadyExists,
              Path("a"));
  EXPECT_EQ(Contents(Path("a")), Bytes(10, std::byte{1}));
}

TEST_F(FileSystemTest, CreateChecksItsSize) {
  for (const uint64_t bytes : {uint64_t{1}, kBlockBytes - 1, uint64_t{1} << 63, ~uint64_t{0}}) {
    ExpectFault(files_->Create(Path("a"), bytes).status(), StatusCode::kInvalidArgument,
                std::to_string(bytes));
    EXPECT_FALSE(std::filesystem::exists(Path("a")));
  }
}

TEST_F(FileSystemTest, AFullDiskIsSeenByCreateAndNothingIsLeft) {
  const uint64_t free = Must(files_->FreeBytes(folder_.path()));
  EXPECT_GT(free, 0u);
  const uint64_t more = (free / kBlockBytes + 1) * 2 * kBlockBytes;
  ExpectFault(files_->Create(Path("a"), more).status(), StatusCode::kResourceExhausted, Path("a"));
  EXPECT_FALSE(std::filesystem::exists(Path("a")));
  EXPECT_TRUE(InChild([&] {
    RefuseSystemCall(SYS_fallocate, ENOSPC);  // full only now
    const auto status = files_->Create(Path("a"), kBlockBytes).status();
    return Expect(absl::IsResourceExhausted(status), status.ToString());
  }));
  EXPECT_FALSE(std::filesystem::exists(Path("a")));
}

TEST_F(FileSystemTest, WithoutFallocateAFileHasItsSizeAllTheSame) {
  EXPECT_TRUE(InChild([&] {
    RefuseSystemCall(SYS_fallocate, EOPNOTSUPP);
    const auto status = files_->Create(Path("a"), 5 * kBlockBytes).status();
    return Expect(status.ok(), status.ToString());
  }));
  EXPECT_EQ(Stat(Path("a")).st_size, static_cast<off_t>(5 * kBlockBytes));
}

TEST_F(FileSystemTest, RefusedDirectTransfersGoByThePageCache) {
  MakeFile(Path("a"), Bytes(kBlockBytes));
  EXPECT_TRUE(files_->direct());
  const auto proc = Must(files_->Open("/proc/self/status"));
  EXPECT_EQ(fcntl(proc->fd(), F_GETFL) & O_DIRECT, 0);
  EXPECT_FALSE(files_->direct());
  const auto file = Must(files_->Open(Path("a")));  // one rule for all from now on
  EXPECT_EQ(fcntl(file->fd(), F_GETFL) & O_DIRECT, 0);
  EXPECT_EQ(fcntl(Must(files_->Create(Path("b"), kBlockBytes))->fd(), F_GETFL) & O_DIRECT, 0);
  EXPECT_TRUE(MakePosixFileSystem()->direct());
}

TEST_F(FileSystemTest, AFailedSyncIsNotAskedAgain) {
  EXPECT_TRUE(InChild([&] {
    const auto file = Must(files_->Create(Path("a"), kBlockBytes));
    RefuseSystemCall(SYS_fdatasync, EIO);
    const absl::Status first = file->Sync();
    RefuseSystemCall(SYS_fdatasync, EBADF);  // filters add up: this one would be told, if asked
    const absl::Status second = file->Sync();
    return Expect(absl::IsUnavailable(first), first.ToString()) +
           Expect(first == second, second.ToString());
  }));
  // /proc cannot be synced.
  const auto proc = Must(files_->Open("/proc/self/status"));
  ExpectFault(proc->Sync(), StatusCode::kUnavailable, "sync /proc/self/status: Invalid argument");
}

TEST_F(FileSystemTest, WhatIsNotThereIsNotFound) {
  ExpectFault(files_->Open(Path("a")).status(), StatusCode::kNotFound, "open " + Path("a"));
  ExpectFault(files_->Create(Path("a/b"), 0).status(), StatusCode::kNotFound, Path("a/b"));
  ExpectFault(files_->Rename(Path("a"), Path("b")), StatusCode::kNotFound, Path("b"));
  ExpectFault(files_->Remove(Path("a")), StatusCode::kNotFound, "remove " + Path("a"));
  ExpectFault(files_->SyncFolder(Path("a")), StatusCode::kNotFound, Path("a"));
  ExpectFault(files_->List(Path("a")).status(), StatusCode::kNotFound, "list " + Path("a"));
  ExpectFault(files_->FreeBytes(Path("a")).status(), StatusCode::kNotFound, Path("a"));
  ExpectFault(files_->Open(folder_.path()).status(), StatusCode::kUnavailable, "Is a directory");
}

TEST_F(FileSystemTest, FilesOfOthersAreDenied) {
  std::filesystem::create_directory(Path("closed"));
  MakeFile(Path("closed/a"), Bytes(kBlockBytes));
  ASSERT_EQ(chmod(Path("closed/a").c_str(), 0), 0);
  ASSERT_EQ(chmod(Path("closed").c_str(), 0), 0);
  EXPECT_TRUE(InChild([&] {
    GiveUpRoot();
    return Expect(absl::IsPermissionDenied(files_->Open(Path("closed/a")).status()), "open") +
           Expect(absl::IsPermissionDenied(files_->Create(Path("closed/b"), 0).status()),
                  "create") +
           Expect(absl::IsPermissionDenied(files_->MakeFolder(Path("closed/c/d"))), "make");
  }));
  ASSERT_EQ(chmod(Path("closed").c_str(), 0700), 0);
}

TEST_F(FileSystemTest, TooManyOpenFilesAreExhaustion) {
  MakeFile(Path("a"), Bytes(kBlockBytes));
  EXPECT_TRUE(InChild([&] {
    const rlimit none = {.rlim_cur = 0, .rlim_max = 0};
    if (setrlimit(RLIMIT_NOFILE, &none) != 0) return std::string("no limit");
    const auto status = files_->Open(Path("a")).status();
    return Expect(absl::IsResourceExhausted(status), status.ToString());
  }));
}

TEST_F(FileSystemTest, RenameReplacesAndRemoveRemoves) {
  MakeFile(Path("a"), Bytes(1, std::byte{1}));
  MakeFile(Path("b"), Bytes(2, std::byte{2}));
  EXPECT_TRUE(files_->Rename(Path("a"), Path("b")).ok());
  EXPECT_TRUE(files_->SyncFolder(folder_.path()).ok());
  EXPECT_EQ(Contents(Path("b")), Bytes(1, std::byte{1}));
  EXPECT_FALSE(std::filesystem::exists(Path("a")));
  EXPECT_TRUE(files_->Remove(Path("b")).ok());
  EXPECT_FALSE(std::filesystem::exists(Path("b")));
}

TEST_F(FileSystemTest, FoldersAreMadeWithTheirParents) {
  EXPECT_TRUE(files_->MakeFolder(Path("a/b/c")).ok());
  EXPECT_TRUE(files_->MakeFolder(Path("a/b/c")).ok());
  EXPECT_TRUE(files_->MakeFolder(Path("d/e/")).ok());
  EXPECT_TRUE(files_->MakeFolder("/").ok());
  for (const char* folder : {"a", "a/b", "a/b/c", "d", "d/e"}) {
    EXPECT_EQ(ModeOf(Path(folder)), 0700u) << folder;
  }
  MakeFile(Path("file"), {});
  ExpectFault(files_->MakeFolder(Path("file")), StatusCode::kAlreadyExists, Path("file"));
  ExpectFault(files_->MakeFolder(Path("file/a")), StatusCode::kUnavailable, "Not a directory");
  ExpectFault(files_->MakeFolder(""), StatusCode::kNotFound, "make folder");
}

TEST_F(FileSystemTest, ListsFilesAndFolders) {
  EXPECT_TRUE(Must(files_->List(folder_.path())).empty());
  MakeFile(Path("b"), Bytes(12345));
  MakeFile(Path(".hidden"), {});
  std::filesystem::create_directory(Path("a"));
  std::filesystem::create_symlink("/nowhere", Path("c"));
  const auto entries = Must(files_->List(folder_.path()));
  ASSERT_EQ(entries.size(), 4u);
  const char* names[] = {".hidden", "a", "b", "c"};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(entries[i].name, names[i]);
    EXPECT_EQ(entries[i].folder, i == 1);
  }
  EXPECT_EQ(entries[0].bytes, 0u);
  EXPECT_EQ(entries[1].bytes, 0u);
  EXPECT_EQ(entries[2].bytes, 12345u);
}

TEST(ErrnoStatusTest, Codes) {
  const std::pair<int, StatusCode> codes[] = {
      {ENOENT, StatusCode::kNotFound},          {EEXIST, StatusCode::kAlreadyExists},
      {EACCES, StatusCode::kPermissionDenied},  {EPERM, StatusCode::kPermissionDenied},
      {ENOSPC, StatusCode::kResourceExhausted}, {EDQUOT, StatusCode::kResourceExhausted},
      {EMFILE, StatusCode::kResourceExhausted}, {ENFILE, StatusCode::kResourceExhausted},
      {ENOMEM, StatusCode::kResourceExhausted}, {EIO, StatusCode::kUnavailable},
      {EROFS, StatusCode::kUnavailable},        {EINVAL, StatusCode::kUnavailable}};
  for (const auto& [error, code] : codes) {
    EXPECT_EQ(ErrnoStatus(error, "x").code(), code) << error;
    const bool exhausted = code == StatusCode::kResourceExhausted;
    EXPECT_EQ(TransferErrnoStatus(error, "x").code(), exhausted ? code : StatusCode::kUnavailable);
  }
  EXPECT_EQ(ErrnoStatus(EIO, "read x").message(), "read x: Input/output error");
}

}  // namespace
}  // namespace attnd::storage::test
