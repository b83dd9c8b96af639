// SPDX-License-Identifier: Apache-2.0
#include "server/net/unix_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"

namespace attnd::server {
namespace {

constexpr mode_t kOthers = S_IRWXG | S_IRWXO;

// `excuse`: the mode bits with which the directory may be open to others.
absl::Status CheckDirectory(absl::string_view option, const std::string& directory, uid_t user,
                            mode_t excuse) {
  struct stat info {};
  if (stat(directory.c_str(), &info) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(option, ": directory ", directory, ": ", std::strerror(errno)));
  }
  if (info.st_uid != user && info.st_uid != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        option, ": directory ", directory, " belongs to user ", info.st_uid,
        ", who could replace what is in it; allowed are directories of user ", user, " or root"));
  }
  if ((info.st_mode & kOthers) != 0 && (info.st_mode & excuse) == 0) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: directory %s has mode %04o and is open to other users; make it 0700, or name a "
        "directory that is not there yet, which is then made so",
        option, directory, info.st_mode & 07777u));
  }
  return absl::OkStatus();
}

absl::StatusOr<FileLock> LockSocket(const std::string& path) {
  const std::string file = path + ".lock";
  struct stat info {};
  // Another user's file could be locked by them for ever. In a directory of our own there is none.
  if (lstat(file.c_str(), &info) == 0 && (info.st_uid != geteuid() || !S_ISREG(info.st_mode))) {
    return absl::FailedPreconditionError(absl::StrCat(
        "listen: ", file, " is no file of this user; remove it or choose another path"));
  }
  auto lock = FileLock::Acquire(file, O_RDWR | O_CREAT | O_NOFOLLOW);
  if (lock.ok()) return lock;
  return absl::Status(lock.status().code(), absl::StrCat("listen: ", lock.status().message()));
}

}  // namespace

absl::StatusOr<FileLock> AwaitSocketLock(const std::string& path,
                                         std::chrono::milliseconds timeout) {
  const auto limit = std::chrono::steady_clock::now() + timeout;
  auto lock = LockSocket(path);
  while (absl::IsAlreadyExists(lock.status()) && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    lock = LockSocket(path);
  }
  return lock;
}

absl::Status CheckSocketDirectory(const std::string& directory, uid_t user) {
  return CheckDirectory("listen", directory, user, S_ISVTX);
}

absl::Status CheckPrivateDirectory(absl::string_view option, const std::string& directory,
                                   uid_t user) {
  return CheckDirectory(option, directory, user, 0);
}

bool SomebodyListens(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return false;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return false;
  const bool refused =
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 &&
      (errno == ECONNREFUSED || errno == ENOENT);
  close(fd);
  return !refused;  // a full backlog or a lack of permission means that somebody does
}

absl::StatusOr<FileLock> PrepareSocket(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const std::string directory = parent.empty() ? "." : parent;
  ATTND_RETURN_IF_ERROR(MakePrivateDirectory(directory));
  ATTND_RETURN_IF_ERROR(CheckSocketDirectory(directory, geteuid()));
  ATTND_ASSIGN_OR_RETURN(FileLock lock, LockSocket(path));
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) return lock;  // nothing there
  if (!S_ISSOCK(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat("listen: ", path, " is there and no socket"));
  }
  if (SomebodyListens(path)) {
    return absl::AlreadyExistsError(absl::StrCat("listen: a server already listens at ", path));
  }
  if (unlink(path.c_str()) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("listen: stale socket ", path, ": ", std::strerror(errno)));
  }
  return lock;
}

}  // namespace attnd::server
