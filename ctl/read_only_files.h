// SPDX-License-Identifier: Apache-2.0
//
// ReadOnlyFiles: a FileSystem that changes nothing. What looks at a data folder beside a running
// server goes by way of it, and so cannot touch anything there, whatever it calls.
#ifndef ATTND_CTL_READ_ONLY_FILES_H_
#define ATTND_CTL_READ_ONLY_FILES_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "storage/io/file_system.h"

namespace attnd::ctl {

// Thread-safe. Reading is the inner file system's. Create, Rename and Remove: PermissionDenied.
// MakeFolder and SyncFolder do nothing: a folder that is missing is found when it is listed.
class ReadOnlyFiles final : public storage::FileSystem {
 public:
  explicit ReadOnlyFiles(std::unique_ptr<storage::FileSystem> files) : files_(std::move(files)) {}

  absl::StatusOr<std::unique_ptr<storage::File>> Open(const std::string& path) override {
    return files_->Open(path);
  }
  absl::StatusOr<std::vector<storage::FolderEntry>> List(const std::string& folder) override {
    return files_->List(folder);
  }
  absl::StatusOr<uint64_t> FreeBytes(const std::string& folder) override {
    return files_->FreeBytes(folder);
  }
  bool direct() const override { return files_->direct(); }

  absl::StatusOr<std::unique_ptr<storage::File>> Create(const std::string& path,
                                                        uint64_t bytes) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status SyncFolder(const std::string& /*folder*/) override { return absl::OkStatus(); }
  absl::Status MakeFolder(const std::string& /*folder*/) override { return absl::OkStatus(); }

 private:
  const std::unique_ptr<storage::FileSystem> files_;
};

}  // namespace attnd::ctl

#endif  // ATTND_CTL_READ_ONLY_FILES_H_
