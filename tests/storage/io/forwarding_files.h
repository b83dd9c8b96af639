// SPDX-License-Identifier: Apache-2.0
//
// ForwardingFiles: the operating system's files, for doubles that change one thing about them.
#ifndef ATTND_TESTS_STORAGE_IO_FORWARDING_FILES_H_
#define ATTND_TESTS_STORAGE_IO_FORWARDING_FILES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "storage/io/file_system.h"

namespace attnd::storage::test {

class ForwardingFiles : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path) override {
    return files_->Open(path);
  }
  absl::StatusOr<std::unique_ptr<File>> Create(const std::string& path, uint64_t bytes) override {
    return files_->Create(path, bytes);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return files_->Rename(from, to);
  }
  absl::Status SyncFolder(const std::string& folder) override { return files_->SyncFolder(folder); }
  absl::Status Remove(const std::string& path) override { return files_->Remove(path); }
  absl::Status MakeFolder(const std::string& folder) override { return files_->MakeFolder(folder); }
  absl::StatusOr<std::vector<FolderEntry>> List(const std::string& folder) override {
    return files_->List(folder);
  }
  absl::StatusOr<uint64_t> FreeBytes(const std::string& folder) override {
    return files_->FreeBytes(folder);
  }
  bool direct() const override { return files_->direct(); }

 private:
  const std::unique_ptr<FileSystem> files_ = MakePosixFileSystem();
};

}  // namespace attnd::storage::test

#endif  // ATTND_TESTS_STORAGE_IO_FORWARDING_FILES_H_
