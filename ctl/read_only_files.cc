// SPDX-License-Identifier: Apache-2.0
#include "ctl/read_only_files.h"

#include "absl/strings/str_cat.h"

namespace attnd::ctl {
namespace {

absl::Status Refusal(absl::string_view what, const std::string& path) {
  return absl::PermissionDeniedError(absl::StrCat(what, " ", path, ": only reading is allowed"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<storage::File>> ReadOnlyFiles::Create(const std::string& path,
                                                                     uint64_t /*bytes*/) {
  return Refusal("create", path);
}
absl::Status ReadOnlyFiles::Rename(const std::string& from, const std::string& /*to*/) {
  return Refusal("rename", from);
}
absl::Status ReadOnlyFiles::Remove(const std::string& path) { return Refusal("remove", path); }

}  // namespace attnd::ctl
