// SPDX-License-Identifier: Apache-2.0
//
// Goal: nobody else gets at the socket and the data directory, and two servers never share either.
// Method: real files in a temporary directory; modes are read back.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>

#include "common/file_lock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/net/unix_socket.h"

namespace attnd::server {
namespace {

class FilesTest : public ::testing::Test {
 protected:
  FilesTest() {
    std::string pattern = ::testing::TempDir() + "/attnd-files-XXXXXX";
    root_ = mkdtemp(pattern.data());
  }
  ~FilesTest() override { std::filesystem::remove_all(root_); }

  static mode_t Mode(const std::string& path) {
    struct stat info {};
    return stat(path.c_str(), &info) == 0 ? info.st_mode & 0777u : 0u;
  }
  // Binds a socket at `path`; returns it, listening or not.
  static int Bind(const std::string& path, bool listening) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    if (listening) {
      EXPECT_EQ(listen(fd, 1), 0);
    }
    return fd;
  }
  std::string root_;
};

TEST_F(FilesTest, DirectoriesArePrivate) {
  ASSERT_TRUE(MakePrivateDirectory(root_ + "/a/b").ok());
  EXPECT_EQ(Mode(root_ + "/a"), 0700u);
  EXPECT_EQ(Mode(root_ + "/a/b"), 0700u);
  EXPECT_TRUE(MakePrivateDirectory(root_ + "/a/b").ok());
  std::ofstream(root_ + "/file") << "x";
  EXPECT_TRUE(absl::IsFailedPrecondition(MakePrivateDirectory(root_ + "/file")));
  EXPECT_TRUE(absl::IsFailedPrecondition(MakePrivateDirectory(root_ + "/file/below")));
}

TEST_F(FilesTest, ADataDirHasOneOwner) {
  {
    const auto first = LockDataDir(root_ + "/data");
    ASSERT_TRUE(first.ok()) << first.status();
    EXPECT_EQ(Mode(root_ + "/data"), 0700u);
    EXPECT_EQ(Mode(root_ + "/data/LOCK"), 0600u);
    const auto second = LockDataDir(root_ + "/data");
    EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
  }
  EXPECT_TRUE(LockDataDir(root_ + "/data").ok());  // the first one's end released it
}

TEST_F(FilesTest, AStaleSocketIsRemoved) {
  const std::string path = root_ + "/s/a.sock";
  ASSERT_TRUE(PrepareSocket(path).ok());
  close(Bind(path, true));  // nobody listens any more
  EXPECT_FALSE(SomebodyListens(path));
  EXPECT_TRUE(PrepareSocket(path).ok());
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(FilesTest, ASocketInUseIsLeftAlone) {
  const std::string path = root_ + "/a.sock";
  const int fd = Bind(path, true);
  EXPECT_TRUE(absl::IsAlreadyExists(PrepareSocket(path).status()));
  EXPECT_TRUE(std::filesystem::exists(path));
  close(fd);
}

// A server that starts holds it for moments: one that ends waits for it, and not for ever.
TEST_F(FilesTest, TheLockOfASocketIsAwaited) {
  using std::chrono::hours;
  using std::chrono::milliseconds;
  const std::string path = root_ + "/a.sock";
  std::future<absl::Status> waits;
  {
    const auto lock = AwaitSocketLock(path, milliseconds(0));
    ASSERT_TRUE(lock.ok()) << lock.status();
    EXPECT_TRUE(absl::IsAlreadyExists(AwaitSocketLock(path, milliseconds(1)).status()));
    waits =
        std::async(std::launch::async, [&] { return AwaitSocketLock(path, hours(1)).status(); });
  }
  EXPECT_TRUE(waits.get().ok());
}

TEST_F(FilesTest, WhatIsNoSocketIsLeftAlone) {
  const std::string path = root_ + "/precious";
  std::ofstream(path) << "data";
  EXPECT_TRUE(absl::IsFailedPrecondition(PrepareSocket(path).status()));
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST_F(FilesTest, ADataDirOpenToOthersIsRefused) {
  const std::string path = root_ + "/data";
  std::filesystem::create_directory(path);
  for (const mode_t mode : {0755u, 0710u, 0770u, 0704u, 01777u}) {
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
    const absl::Status status = CheckPrivateDirectory("data_dir", path, geteuid());
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << std::oct << mode << ": " << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("data_dir: "));
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("0700"));
  }
  ASSERT_EQ(chmod(path.c_str(), 0700), 0);
  EXPECT_TRUE(CheckPrivateDirectory("data_dir", path, geteuid()).ok());
  if (geteuid() == 0) {
    EXPECT_EQ(chown(path.c_str(), 12345, 12345), 0);
    EXPECT_FALSE(CheckPrivateDirectory("data_dir", path, 12346).ok());
  }
}

TEST_F(FilesTest, ADirectoryOpenToOthersIsRefused) {
  const std::string path = root_ + "/open/a.sock";
  std::filesystem::create_directory(root_ + "/open");
  for (const mode_t mode : {0755u, 0710u, 0770u, 0777u, 0701u, 02770u}) {
    ASSERT_EQ(chmod((root_ + "/open").c_str(), mode), 0);
    const absl::Status status = PrepareSocket(path).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << std::oct << mode << ": " << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("0700"));
    EXPECT_FALSE(std::filesystem::exists(path + ".lock"));
  }
  for (const mode_t mode : {0700u, 0500u | S_IWUSR, 01777u}) {
    ASSERT_EQ(chmod((root_ + "/open").c_str(), mode), 0);
    EXPECT_TRUE(PrepareSocket(path).ok()) << std::oct << mode;
  }
}

TEST_F(FilesTest, ADirectoryOfAnotherUserIsRefused) {
  EXPECT_TRUE(CheckSocketDirectory(root_, geteuid()).ok());
  EXPECT_TRUE(CheckSocketDirectory("/tmp", 12345).ok()) << CheckSocketDirectory("/tmp", 12345);
  // Root's directories are anyone's.
  if (geteuid() == 0) {
    ASSERT_EQ(chown(root_.c_str(), 12345, 12345), 0);
  }
  const absl::Status status = CheckSocketDirectory(root_, geteuid() == 0 ? 0 : geteuid() + 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("belongs to user"));
}

// Whoever may read a directory may lock it.
TEST_F(FilesTest, ALockOnTheDirectoryDoesNotMatter) {
  const auto held = FileLock::Acquire(root_, O_RDONLY | O_DIRECTORY);
  ASSERT_TRUE(held.ok());
  EXPECT_TRUE(PrepareSocket(root_ + "/a.sock").ok());
}

TEST_F(FilesTest, OtherSocketsOfADirectoryDoNotMatter) {
  const auto first = PrepareSocket(root_ + "/a.sock");
  const auto second = PrepareSocket(root_ + "/b.sock");
  EXPECT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(Mode(root_ + "/a.sock.lock"), 0600u);
}

TEST_F(FilesTest, ALockThatIsNoFileIsRefused) {
  std::ofstream(root_ + "/elsewhere") << "";
  std::filesystem::create_symlink(root_ + "/elsewhere", root_ + "/a.sock.lock");
  EXPECT_TRUE(absl::IsFailedPrecondition(PrepareSocket(root_ + "/a.sock").status()));
}

TEST_F(FilesTest, TwoThatStartAtOnceDoNotMeet) {
  const std::string path = root_ + "/a.sock";
  const auto first = PrepareSocket(path);
  ASSERT_TRUE(first.ok());
  EXPECT_TRUE(absl::IsAlreadyExists(PrepareSocket(path).status()));
}

TEST_F(FilesTest, SocketsAreBornPrivate) {
  const std::string path = root_ + "/a.sock";
  const mode_t before = umask(0);
  {
    const PrivateUmask mask;
    close(Bind(path, false));
  }
  EXPECT_EQ(Mode(path), 0600u);
  EXPECT_EQ(umask(before), 0u);
}

}  // namespace
}  // namespace attnd::server
