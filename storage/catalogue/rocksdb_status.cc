// SPDX-License-Identifier: Apache-2.0
#include "storage/catalogue/rocksdb_status.h"

#include "absl/strings/str_cat.h"

namespace attnd::storage {

absl::Status DamagedCatalogue(const std::string& folder, absl::string_view what) {
  return absl::DataLossError(absl::StrCat(
      "the catalogue in ", folder, " is damaged: ", what,
      "; `attnctl rebuild-catalogue` makes it again from the segment files, which are left alone"));
}

absl::Status FromRocksdb(const std::string& folder, const rocksdb::Status& status) {
  if (status.ok()) return absl::OkStatus();
  // One of its files is gone: no other way leads to this from a catalogue that exists.
  if (status.IsPathNotFound()) return DamagedCatalogue(folder, status.ToString());
  if (status.IsNoSpace() || status.subcode() == rocksdb::Status::kSpaceLimit ||
      status.IsMemoryLimit()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the catalogue in ", folder, ": ", status.ToString()));
  }
  switch (status.code()) {
    case rocksdb::Status::kNotFound:
      return absl::NotFoundError(absl::StrCat("not in the catalogue in ", folder));
    case rocksdb::Status::kCorruption:
    case rocksdb::Status::kNotSupported:     // a file that says it is of another version
    case rocksdb::Status::kInvalidArgument:  // files that do not fit together
      return DamagedCatalogue(folder, status.ToString());
    default:
      return absl::UnavailableError(
          absl::StrCat("the catalogue in ", folder, ": ", status.ToString()));
  }
}

}  // namespace attnd::storage
