// SPDX-License-Identifier: Apache-2.0
//
// Import: a safetensors file (kv_file.h) becomes a sequence of a running server.
#ifndef ATTND_CTL_IMPORT_H_
#define ATTND_CTL_IMPORT_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"

namespace attnd::ctl {

struct ImportOptions {
  bool seal = true;
  bool keep_open = false;  // a sequence that was sealed; one that was not stays open in any case
};

struct ImportResult {
  uint64_t sequence_id = 0;
  bool open = false;       // whether it still is
  uint64_t sealed_id = 0;  // 0: it was not sealed
  uint64_t tokens = 0;
  uint64_t tokens_present = 0;  // of these, what the server had on disk: not uploaded
};

// Told how much has been uploaded, again and again.
using BytesUploaded = std::function<void(uint64_t bytes, uint64_t total)>;

// Uploads some tokens of all layers at a time, so that the server makes segments meanwhile. After
// an error the sequence is closed again. InvalidArgument: the file is none of these; errors
// otherwise as Client's.
absl::StatusOr<ImportResult> Import(Client* client, const std::string& path,
                                    const ImportOptions& options, const BytesUploaded& uploaded);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_IMPORT_H_
