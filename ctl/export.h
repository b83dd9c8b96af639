// SPDX-License-Identifier: Apache-2.0
//
// Export: a sealed sequence as a safetensors file (kv_file.h).
#ifndef ATTND_CTL_EXPORT_H_
#define ATTND_CTL_EXPORT_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "ctl/data_reader.h"
#include "storage/io/io_queue.h"

namespace attnd::ctl {

struct ExportResult {
  uint64_t tokens = 0;
  uint64_t known_ids = 0;  // of these, the tokens whose id is known
  uint64_t layers = 0;
  uint64_t bytes = 0;  // of the file
};

// Told how much has been written, again and again.
using BytesWritten = std::function<void(uint64_t bytes, uint64_t total)>;

// Writes `path`, by way of a new file beside it (path.RANDOM.tmp), which is removed again on an
// error: it is there, whole and durable, when this returns OK. Nothing that was there is changed.
// In memory is one layer of a segment at a time, and token ids. Safe beside a running server; a
// sequence that is dropped meanwhile is DataLoss. NotFound: no such sequence. AlreadyExists: there
// is such a file. DataLoss names what is damaged.
absl::StatusOr<ExportResult> Export(const DataReader& reader, uint64_t sealed_id,
                                    const std::string& path, storage::IoQueue* queue,
                                    const BytesWritten& written);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_EXPORT_H_
