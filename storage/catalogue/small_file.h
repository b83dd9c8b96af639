// SPDX-License-Identifier: Apache-2.0
//
// SmallFile: the few files, and names of folders, that do not go by way of FileSystem and IoQueue,
// as they are a few bytes long and no block.
#ifndef ATTND_STORAGE_CATALOGUE_SMALL_FILE_H_
#define ATTND_STORAGE_CATALOGUE_SMALL_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attnd::storage {

// Open until destroyed. One thread at a time. Errors as ErrnoStatus'.
class SmallFile {
 public:
  // As open(2), with O_CLOEXEC; mode 0600 for a new file.
  static absl::StatusOr<SmallFile> Open(const std::string& path, int flags);
  ~SmallFile();
  SmallFile(SmallFile&& other) noexcept
      : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}
  SmallFile& operator=(SmallFile&&) = delete;

  int get() const { return fd_; }
  const std::string& path() const { return path_; }
  // Until all is read, or the file ends: bytes read.
  absl::StatusOr<size_t> Read(void* to, size_t bytes, uint64_t offset) const;
  absl::Status Write(const void* from, size_t bytes, uint64_t offset) const;
  // Returns when what was written is on the disk; of a folder: its names.
  absl::Status Sync() const;

 private:
  SmallFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::string path_;
  int fd_;
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_CATALOGUE_SMALL_FILE_H_
