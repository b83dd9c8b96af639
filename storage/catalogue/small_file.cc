// SPDX-License-Identifier: Apache-2.0
#include "storage/catalogue/small_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "storage/io/errno_status.h"

namespace attnd::storage {
absl::StatusOr<SmallFile> SmallFile::Open(const std::string& path, int flags) {
  int fd = -1;
  do {
    fd = open(path.c_str(), flags | O_CLOEXEC, 0600);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("open ", path));
  return SmallFile(path, fd);
}

SmallFile::~SmallFile() {
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<size_t> SmallFile::Read(void* to, size_t bytes, uint64_t offset) const {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t now =
        pread(fd_, static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(offset + done));
    if (now == 0) break;
    if (now > 0) done += static_cast<size_t>(now);
    if (now < 0 && errno != EINTR) return ErrnoStatus(errno, absl::StrCat("read ", path_));
  }
  return done;
}

absl::Status SmallFile::Write(const void* from, size_t bytes, uint64_t offset) const {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t now = pwrite(fd_, static_cast<const char*>(from) + done, bytes - done,
                               static_cast<off_t>(offset + done));
    if (now >= 0) done += static_cast<size_t>(now);
    if (now < 0 && errno != EINTR) return ErrnoStatus(errno, absl::StrCat("write ", path_));
  }
  return absl::OkStatus();
}

absl::Status SmallFile::Sync() const {
  return fsync(fd_) == 0 ? absl::OkStatus() : ErrnoStatus(errno, absl::StrCat("sync ", path_));
}

}  // namespace attnd::storage
