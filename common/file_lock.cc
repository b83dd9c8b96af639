// SPDX-License-Identifier: Apache-2.0
#include "common/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd {

absl::StatusOr<FileLock> FileLock::Acquire(const std::string& path, int flags) {
  FileLock lock(open(path.c_str(), flags | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (lock.fd_ < 0) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  if (flock(lock.fd_, LOCK_EX | LOCK_NB) == 0) return lock;
  if (errno == EWOULDBLOCK) {
    return absl::AlreadyExistsError(absl::StrCat(path, " is locked by another process"));
  }
  return absl::FailedPreconditionError(absl::StrCat(path, ": flock: ", std::strerror(errno)));
}

FileLock::~FileLock() {
  if (fd_ >= 0) close(fd_);
}

absl::Status MakePrivateDirectory(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return absl::OkStatus();
  const std::string parent = std::filesystem::path(path).parent_path().string();
  if (!parent.empty() && parent != path) ATTND_RETURN_IF_ERROR(MakePrivateDirectory(parent));
  if (mkdir(path.c_str(), S_IRWXU) == 0 || std::filesystem::is_directory(path, error)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("directory ", path, ": ", std::strerror(errno)));
}

absl::StatusOr<FileLock> LockDataDir(const std::string& path) {
  ATTND_RETURN_IF_ERROR(MakePrivateDirectory(path));
  auto lock = FileLock::Acquire(path + "/LOCK", O_RDWR | O_CREAT);
  if (lock.ok()) return lock;
  return absl::Status(lock.status().code(), absl::StrCat("data_dir: ", lock.status().message()));
}

}  // namespace attnd
