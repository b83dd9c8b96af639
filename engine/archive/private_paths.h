// SPDX-License-Identifier: Apache-2.0
//
// What a client is told about a fault of the disk: what happened, but not where the server keeps
// its files.
#ifndef ATTND_ENGINE_ARCHIVE_PRIVATE_PATHS_H_
#define ATTND_ENGINE_ARCHIVE_PRIVATE_PATHS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace attnd::engine {

// The same status with every path below `root`, a data folder, replaced: segment files by their
// numbers, others by "the data folder".
absl::Status WithoutPaths(const absl::Status& status, absl::string_view root);

// DataLoss for `tokens` positions of a sequence from `first` on, in terms that its client knows.
absl::Status LostPositions(uint64_t first, uint64_t tokens, const absl::Status& why);

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_PRIVATE_PATHS_H_
