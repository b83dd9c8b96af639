// SPDX-License-Identifier: Apache-2.0
//
// DataFolder: where things lie in a server's data folder.
//
//   secret                            32 random bytes, mode 0600: the key of chain ids
//   catalogue/                        RocksDB
//   segments/XX/XXXXXXXXXXXXXXXX.seg  a segment or tail file: its number in 16 hexadecimal digits,
//                                     in a folder named by the last two
//   quarantine/                       files that were found damaged, under their names
//   orphans/                          files that no record named when a server started, likewise
#ifndef ATTND_STORAGE_CATALOGUE_DATA_FOLDER_H_
#define ATTND_STORAGE_CATALOGUE_DATA_FOLDER_H_

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/io/file_system.h"

namespace attnd::storage {

using Secret = std::array<uint8_t, 32>;

struct StoredFile {
  uint64_t number = 0;
  std::string path;
  uint64_t bytes = 0;
  bool temporary = false;  // left by a crash while it was written
};

// Constant once opened: safe from any thread. `files` must outlive it.
class DataFolder {
 public:
  // Makes the folders that are missing (the catalogue's is the catalogue's) and, the first time,
  // the secret, durably. `root` is absolute. Errors as FileSystem's; InvalidArgument for another
  // root; DataLoss if the secret's file does not hold a secret, or is missing beside segments,
  // which it named, saying what to do; PermissionDenied if others may read or write it.
  static absl::StatusOr<DataFolder> Open(FileSystem* files, const std::string& root);
  // A data folder whose secret is kept elsewhere: touches nothing but `files`.
  static absl::StatusOr<DataFolder> OpenWithSecret(FileSystem* files, const std::string& root,
                                                   const Secret& secret);

  const std::string& root() const { return root_; }
  const Secret& secret() const { return secret_; }
  std::string CataloguePath() const;
  // In a folder that Open made: there are 256 of them.
  std::string SegmentPath(uint64_t number) const;
  // Every file in segments/, by ascending number, a temporary one behind the other of its number;
  // names that are none of ours are left out.
  absl::StatusOr<std::vector<StoredFile>> ListSegments() const;
  // Moves a damaged file to quarantine/, durably: no server reads the file there, and a person may
  // look at it. NotFound.
  absl::Status Quarantine(uint64_t number) const;
  // Moves files that no record names to orphans/, durably.
  absl::Status SetAside(const std::vector<uint64_t>& numbers) const;
  // The files in orphans/, by ascending number.
  absl::StatusOr<std::vector<StoredFile>> ListOrphans() const;
  // Moves files of orphans/ back to their places, durably. No other file may be in such a place.
  absl::Status TakeBack(const std::vector<StoredFile>& orphans) const;
  // Moves all files of orphans/ back. AlreadyExists, and nothing is moved, if there is a file of
  // one of their numbers again.
  absl::Status TakeBackOrphans() const;

 private:
  DataFolder(FileSystem* files, std::string root, const Secret& secret)
      : files_(files), root_(std::move(root)), secret_(secret) {}

  FileSystem* files_;
  std::string root_;
  Secret secret_;
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_CATALOGUE_DATA_FOLDER_H_
