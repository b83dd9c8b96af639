// SPDX-License-Identifier: Apache-2.0
#include "ctl/catalogue_swap.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "storage/catalogue/small_file.h"
#include "storage/io/errno_status.h"

namespace attnd::ctl {
namespace {

namespace fs = std::filesystem;

absl::Status SyncFolder(const std::string& folder) {
  ATTND_ASSIGN_OR_RETURN(const auto names,
                         storage::SmallFile::Open(folder, O_RDONLY | O_DIRECTORY));
  return names.Sync();
}

absl::StatusOr<bool> IsThere(const std::string& path) {
  std::error_code error;
  const bool there = fs::exists(fs::symlink_status(path, error));
  if (error && error != std::errc::no_such_file_or_directory) {
    return storage::ErrnoStatus(error.value(), absl::StrCat("look at ", path));
  }
  return there;
}

absl::Status Rename(const std::string& from, const std::string& to, unsigned flags) {
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0) return absl::OkStatus();
  return storage::ErrnoStatus(errno, absl::StrCat("rename ", from, " to ", to));
}

absl::Status Exchange(const std::string& one, const std::string& other) {
  if (renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) == 0) {
    return absl::OkStatus();
  }
  const int error = errno;
  absl::Status status = storage::ErrnoStatus(error, absl::StrCat("exchange ", one, " and ", other));
  if (error != EINVAL && error != ENOSYS) return status;
  return absl::FailedPreconditionError(absl::StrCat(
      status.message(),
      "; the file system cannot exchange names, and without that a crash could leave no catalogue: "
      "copy the data folder to one that can (ext4, XFS, Btrfs, tmpfs) and rebuild there"));
}

}  // namespace

absl::StatusOr<std::string> OldNameFor(const std::string& path) {
  for (int number = 1;; ++number) {
    std::string name = absl::StrCat(path, ".old-", number);
    ATTND_ASSIGN_OR_RETURN(const bool there, IsThere(name));
    if (!there) return name;
  }
}

absl::StatusOr<CatalogueSwap> CatalogueSwap::Begin(const std::string& root) {
  CatalogueSwap swap(root);
  std::error_code error;
  fs::remove_all(swap.NewPath(), error);
  if (error) return storage::ErrnoStatus(error.value(), absl::StrCat("remove ", swap.NewPath()));
  return swap;
}

absl::StatusOr<std::string> CatalogueSwap::Finish() {
  const std::string catalogue = root_ + "/catalogue";
  ATTND_ASSIGN_OR_RETURN(const bool there, IsThere(catalogue));
  std::string old;
  if (there) {
    ATTND_ASSIGN_OR_RETURN(old, OldNameFor(catalogue));
    ATTND_RETURN_IF_ERROR(Rename(NewPath(), old, RENAME_NOREPLACE));
    if (const absl::Status exchanged = Exchange(old, catalogue); !exchanged.ok()) {
      static_cast<void>(Rename(old, NewPath(), RENAME_NOREPLACE));
      return exchanged;
    }
  } else {
    ATTND_RETURN_IF_ERROR(Rename(NewPath(), catalogue, RENAME_NOREPLACE));
  }
  ATTND_RETURN_IF_ERROR(SyncFolder(root_));
  return old;
}

}  // namespace attnd::ctl
