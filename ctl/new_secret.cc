// SPDX-License-Identifier: Apache-2.0
#include "ctl/new_secret.h"

#include "absl/strings/str_cat.h"
#include "common/file_lock.h"
#include "common/status.h"
#include "ctl/catalogue_swap.h"
#include "ctl/data_reader.h"
#include "storage/catalogue/secret.h"

namespace attnd::ctl {

absl::StatusOr<std::string> NewSecret(const std::string& root, storage::FileSystem* files) {
  ATTND_RETURN_IF_ERROR(CheckDataFolder(files, root));
  ATTND_ASSIGN_OR_RETURN(const FileLock lock, LockDataDir(root));
  const std::string path = root + "/secret";
  const absl::Status found = storage::ReadSecret(path).status();
  if (found.ok()) {
    return absl::AlreadyExistsError(
        absl::StrCat("secret ", path,
                     " is a good one and was left alone: with another, prompts "
                     "that were sealed before would no longer be recognised"));
  }
  std::string old;
  if (absl::IsDataLoss(found)) {
    ATTND_ASSIGN_OR_RETURN(old, OldNameFor(path));
    ATTND_RETURN_IF_ERROR(files->Rename(path, old));
  } else if (!absl::IsNotFound(found)) {
    return found;
  }
  ATTND_RETURN_IF_ERROR(storage::MakeSecret(files, root, path).status());
  return old;
}

}  // namespace attnd::ctl
