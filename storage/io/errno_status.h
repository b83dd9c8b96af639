// SPDX-License-Identifier: Apache-2.0
//
// The one place where an errno becomes a Status. Thread-safe.
#ifndef ATTND_STORAGE_IO_ERRNO_STATUS_H_
#define ATTND_STORAGE_IO_ERRNO_STATUS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace attnd::storage {

// "`what`: text of the error", with the code that FileSystem promises for it. error: not 0.
absl::Status ErrnoStatus(int error, absl::string_view what);

// The same for a transfer, of which IoQueue promises only ResourceExhausted and Unavailable.
absl::Status TransferErrnoStatus(int error, absl::string_view what);

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_IO_ERRNO_STATUS_H_
