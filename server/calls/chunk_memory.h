// SPDX-License-Identifier: Apache-2.0
//
// ChunkMemory: where a chunk of an upload lies that its client shares with the server.
#ifndef ATTND_SERVER_CALLS_CHUNK_MEMORY_H_
#define ATTND_SERVER_CALLS_CHUNK_MEMORY_H_

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "attnd/v1/attnd.pb.h"
#include "engine/types.h"
#include "plane/region_table.h"
#include "server/calls/handler.h"

namespace attnd::server {

// Holds the region, so that its memory stays as the client left it even if the client gives the
// region back meanwhile. For one thread at a time.
class ChunkMemory {
 public:
  // Gives the chunk's k and v, whose views have no data yet, that of the region. A chunk that is
  // tried again finds the region that it has held since. Errors as of KvMemory (attnd.proto).
  absl::Status Hold(const v1::KvMemory& proto, absl::string_view tenant,
                    const HandlerContext& handlers, engine::AppendChunk* chunk);
  // The chunk is done with.
  void Release() { region_.reset(); }

 private:
  std::optional<plane::RegionUse> region_;
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_CHUNK_MEMORY_H_
