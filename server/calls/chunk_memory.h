// SPDX-License-Identifier: Apache-2.0
//
// Where a chunk of an upload lies that its client shares with the server.
#ifndef ATTND_SERVER_CALLS_CHUNK_MEMORY_H_
#define ATTND_SERVER_CALLS_CHUNK_MEMORY_H_

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attnd/v1/attnd.pb.h"
#include "engine/types.h"
#include "plane/region_table.h"
#include "server/calls/handler.h"

namespace attnd::server {

// Gives the chunk's k and v, whose views have no data yet, that of the region, for as long as the
// result lives. Errors as of KvMemory (attnd.proto).
absl::StatusOr<plane::RegionUse> PlaceChunk(const v1::KvMemory& proto, absl::string_view tenant,
                                            const HandlerContext& handlers,
                                            engine::AppendChunk* chunk);

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_CHUNK_MEMORY_H_
