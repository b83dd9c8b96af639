// SPDX-License-Identifier: Apache-2.0
#include "storage/io/errno_status.h"

#include <cerrno>

namespace attnd::storage {
namespace {

absl::StatusCode CodeOf(int error) {
  switch (error) {
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EEXIST:
      return absl::StatusCode::kAlreadyExists;
    case EACCES:
    case EPERM:
      return absl::StatusCode::kPermissionDenied;
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return absl::StatusCode::kResourceExhausted;
    default:
      return absl::StatusCode::kUnavailable;
  }
}

absl::Status WithText(absl::StatusCode code, int error, absl::string_view what) {
  // Abseil's converter has other codes than ours, but the text.
  return absl::Status(code, absl::ErrnoToStatus(error, what).message());
}

}  // namespace

absl::Status ErrnoStatus(int error, absl::string_view what) {
  return WithText(CodeOf(error), error, what);
}

absl::Status TransferErrnoStatus(int error, absl::string_view what) {
  const bool exhausted = CodeOf(error) == absl::StatusCode::kResourceExhausted;
  return WithText(exhausted ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnavailable,
                  error, what);
}

}  // namespace attnd::storage
