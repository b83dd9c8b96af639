// SPDX-License-Identifier: Apache-2.0
//
// FileLock and private directories.
#ifndef ATTND_COMMON_FILE_LOCK_H_
#define ATTND_COMMON_FILE_LOCK_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attnd {

// An advisory lock (flock) on a file or directory, released when this dies or the process does,
// however it does. Movable.
class FileLock {
 public:
  // Opens `path` with `flags` and locks it. AlreadyExists if another process holds it,
  // FailedPrecondition if it cannot be opened.
  static absl::StatusOr<FileLock> Acquire(const std::string& path, int flags);

  FileLock(FileLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileLock& operator=(FileLock&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileLock();

 private:
  explicit FileLock(int fd) : fd_(fd) {}
  int fd_;
};

// Makes `path` with mode 0700, and its missing parents. One that is there already stays as it is.
// FailedPrecondition if it cannot be made or is no directory.
absl::Status MakePrivateDirectory(const std::string& path);

// Makes the directory and locks it for this server: the file LOCK in it. AlreadyExists if another
// server runs there.
absl::StatusOr<FileLock> LockDataDir(const std::string& path);

}  // namespace attnd

#endif  // ATTND_COMMON_FILE_LOCK_H_
