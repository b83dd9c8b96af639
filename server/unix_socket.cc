// SPDX-License-Identifier: Apache-2.0
#include "server/unix_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "glog/logging.h"

namespace attnd::server {
namespace {

constexpr mode_t kOthers = S_IRWXG | S_IRWXO;

void WarnIfOpenToOthers(const std::string& directory) {
  struct stat info {};
  if (stat(directory.c_str(), &info) == 0 && (info.st_mode & kOthers) != 0) {
    LOG(WARNING) << "directory " << directory
                 << " is open to other users; the socket in it has mode 0600";
  }
}

}  // namespace

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
  WarnIfOpenToOthers(directory);
  ATTND_ASSIGN_OR_RETURN(FileLock lock, FileLock::Acquire(directory, O_RDONLY | O_DIRECTORY));
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
