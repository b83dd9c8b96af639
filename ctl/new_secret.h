// SPDX-License-Identifier: Apache-2.0
//
// NewSecret: another secret for a data folder that has lost its own.
#ifndef ATTND_CTL_NEW_SECRET_H_
#define ATTND_CTL_NEW_SECRET_H_

#include <string>

#include "absl/status/statusor.h"
#include "storage/io/file_system.h"

namespace attnd::ctl {

// Makes a secret in the data folder `root`, which no server may have open (AlreadyExists if one
// has); where what was in its place is now, or "" if there was nothing. AlreadyExists, and nothing
// is changed, if there is a good one; NotFound if `root` is no data folder. A crash leaves none, or
// the new one.
absl::StatusOr<std::string> NewSecret(const std::string& root, storage::FileSystem* files);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_NEW_SECRET_H_
