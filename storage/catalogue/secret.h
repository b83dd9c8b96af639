// SPDX-License-Identifier: Apache-2.0
//
// The file of a data folder's secret.
#ifndef ATTND_STORAGE_CATALOGUE_SECRET_H_
#define ATTND_STORAGE_CATALOGUE_SECRET_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/catalogue/data_folder.h"
#include "storage/io/file_system.h"

namespace attnd::storage {

// DataLoss: the file at `path` `is`, and what can be done.
absl::Status NoSecret(const std::string& path, absl::string_view is);

// NotFound; DataLoss or PermissionDenied as DataFolder::Open's.
absl::StatusOr<Secret> ReadSecret(const std::string& path);

// Makes a new secret in the file `path` of `folder`; the file is whole and durable before the call
// returns the secret. The caller sees to it that no other process does so at the same time.
absl::StatusOr<Secret> MakeSecret(FileSystem* files, const std::string& folder,
                                  const std::string& path);

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_CATALOGUE_SECRET_H_
