// SPDX-License-Identifier: Apache-2.0
#include "storage/catalogue/secret.h"

#include <fcntl.h>
#include <openssl/rand.h>
#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"
#include "storage/catalogue/small_file.h"
#include "storage/files/segment_file.h"
#include "storage/io/errno_status.h"

namespace attnd::storage {
namespace {

constexpr mode_t kPermissions = 0777;
constexpr mode_t kOthersPermissions = 0077;  // of the group and of everybody else

absl::Status CheckAttributes(const SmallFile& file) {
  struct stat attributes {};
  if (fstat(file.get(), &attributes) != 0)
    return ErrnoStatus(errno, absl::StrCat("look at ", file.path()));
  if (!S_ISREG(attributes.st_mode)) {
    return NoSecret(file.path(), "is no regular file");
  }
  if ((attributes.st_mode & kOthersPermissions) != 0) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "secret %s has permissions %04o; allowed are 0600 or less (chmod 600, if nobody else has "
        "read it)",
        file.path(), attributes.st_mode & kPermissions));
  }
  if (attributes.st_size == static_cast<off_t>(Secret{}.size())) return absl::OkStatus();
  return NoSecret(file.path(), absl::StrCat("has ", attributes.st_size, " bytes; allowed are ",
                                            Secret{}.size()));
}

}  // namespace

absl::Status NoSecret(const std::string& path, absl::string_view is) {
  return absl::DataLossError(absl::StrCat(
      "secret ", path, " ", is,
      "; put it back from a backup, or run `attnctl new-secret` on this data folder: with another "
      "secret every sealed sequence answers as before, and prompts that were sealed before are no "
      "longer recognised, so that they are uploaded again"));
}

absl::StatusOr<Secret> ReadSecret(const std::string& path) {
  // O_NONBLOCK: a pipe of this name would make us wait for its writer.
  ATTND_ASSIGN_OR_RETURN(const SmallFile file,
                         SmallFile::Open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
  ATTND_RETURN_IF_ERROR(CheckAttributes(file));
  Secret secret{};
  ATTND_ASSIGN_OR_RETURN(const size_t bytes, file.Read(secret.data(), secret.size(), 0));
  if (bytes != secret.size()) {
    return NoSecret(path, absl::StrCat("ended after ", bytes, " bytes"));
  }
  // What a file system leaves whose disk lost the contents and not the length.
  if (secret == Secret{}) {
    return NoSecret(path, "is all zeros");
  }
  return secret;
}

absl::StatusOr<Secret> MakeSecret(FileSystem* files, const std::string& folder,
                                  const std::string& path) {
  const std::string temporary = path + kTemporarySuffix;
  const absl::Status removed = files->Remove(temporary);  // a crash's
  if (!removed.ok() && !absl::IsNotFound(removed)) return removed;
  Secret secret{};
  if (RAND_bytes(secret.data(), static_cast<int>(secret.size())) != 1) {
    return absl::UnavailableError("OpenSSL has no random bytes for the secret");
  }
  {
    ATTND_ASSIGN_OR_RETURN(const SmallFile file,
                           SmallFile::Open(temporary, O_WRONLY | O_CREAT | O_EXCL));
    ATTND_RETURN_IF_ERROR(file.Write(secret.data(), secret.size(), 0));
    ATTND_RETURN_IF_ERROR(file.Sync());
  }
  ATTND_RETURN_IF_ERROR(files->Rename(temporary, path));
  ATTND_RETURN_IF_ERROR(files->SyncFolder(folder));
  return secret;
}

}  // namespace attnd::storage
