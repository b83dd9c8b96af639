// SPDX-License-Identifier: Apache-2.0
//
// FileSystem and File: all that storage asks of a disk, except reading and writing bytes, which
// io_queue does. A seam: tests replace the file system by a double that forgets bytes that were not
// synced.
#ifndef ATTND_STORAGE_IO_FILE_SYSTEM_H_
#define ATTND_STORAGE_IO_FILE_SYSTEM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attnd::storage {

// Offsets, sizes and addresses of every transfer are multiples of this: O_DIRECT takes 512 on some
// machines and refuses it on others.
inline constexpr uint64_t kBlockBytes = 4096;

// An open file. Closes it when destroyed. Thread-safe.
class File {
 public:
  virtual ~File() = default;
  virtual int fd() const = 0;
  virtual uint64_t bytes() const = 0;  // when it was opened, or that it was created with
  // Returns when all written bytes are on the disk (fdatasync). After an error the content on the
  // disk is unknown: the file must be thrown away. A further call returns the first call's error
  // without a sync.
  virtual absl::Status Sync() = 0;
};

struct FolderEntry {
  std::string name;
  bool folder = false;
  uint64_t bytes = 0;
};

// Paths are absolute. Thread-safe. Errors, of every method: NotFound, AlreadyExists,
// PermissionDenied; ResourceExhausted for a full disk or quota (ENOSPC, EDQUOT), for too many open
// files (EMFILE, ENFILE) and for want of memory (ENOMEM); Unavailable for everything else the
// system says, with its text.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // For reading.
  virtual absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path) = 0;
  // A new file of `bytes` (a multiple of kBlockBytes), for writing. Its room is taken at once, so
  // that a full disk says so here. InvalidArgument for another size.
  virtual absl::StatusOr<std::unique_ptr<File>> Create(const std::string& path, uint64_t bytes) = 0;
  // Replaces `to`. Durable after SyncFolder of its folder.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status SyncFolder(const std::string& folder) = 0;
  virtual absl::Status Remove(const std::string& path) = 0;
  // Makes a folder and its parents, mode 0700; a folder that exists is no error. Parents that were
  // made are durable when the call returns, the folder itself after SyncFolder of its parent.
  virtual absl::Status MakeFolder(const std::string& folder) = 0;
  // By ascending name, without "." and "..".
  virtual absl::StatusOr<std::vector<FolderEntry>> List(const std::string& folder) = 0;
  virtual absl::StatusOr<uint64_t> FreeBytes(const std::string& folder) = 0;
  // False once a file system has refused O_DIRECT: transfers then go by way of the page cache.
  virtual bool direct() const = 0;
};

// The operating system's.
std::unique_ptr<FileSystem> MakePosixFileSystem();

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_IO_FILE_SYSTEM_H_
