// SPDX-License-Identifier: Apache-2.0
//
// What RocksDB says, as absl::Status; the only place that knows how.
#ifndef ATTND_STORAGE_CATALOGUE_ROCKSDB_STATUS_H_
#define ATTND_STORAGE_CATALOGUE_ROCKSDB_STATUS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "rocksdb/status.h"

namespace attnd::storage {

// DataLoss that names the catalogue's folder, what is wrong, and the remedy.
absl::Status DamagedCatalogue(const std::string& folder, absl::string_view what);

// NotFound for a key that is not there; DataLoss as above for files that are damaged, missing or of
// no known format; ResourceExhausted for a full disk or refused memory; Unavailable for the rest.
absl::Status FromRocksdb(const std::string& folder, const rocksdb::Status& status);

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_CATALOGUE_ROCKSDB_STATUS_H_
