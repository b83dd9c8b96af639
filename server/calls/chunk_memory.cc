// SPDX-License-Identifier: Apache-2.0
#include "server/calls/chunk_memory.h"

#include <cstdint>

#include "common/status.h"
#include "plane/pass_memory.h"
#include "server/calls/conversions.h"
#include "server/calls/memory_plane.h"

namespace attnd::server {

absl::StatusOr<plane::RegionUse> PlaceChunk(const v1::KvMemory& proto, absl::string_view tenant,
                                            const HandlerContext& handlers,
                                            engine::AppendChunk* chunk) {
  if (handlers.memory == nullptr) {
    return absl::FailedPreconditionError(
        "memory: the server was started without --allow-client-memory");
  }
  const uint64_t k_bytes = Bytes(chunk->k), v_bytes = Bytes(chunk->v);
  const uint64_t bytes_max = handlers.options->max_message_bytes;
  if (k_bytes > bytes_max || v_bytes > bytes_max - k_bytes) {
    return Invalid("k", " and v have more bytes than a message may have; allowed are ", bytes_max,
                   " (max_message_bytes)");
  }
  ATTND_ASSIGN_OR_RETURN(
      plane::RegionUse region,
      handlers.memory->regions()->Use("memory.region_id", tenant, proto.region_id()));
  ATTND_RETURN_IF_ERROR(
      plane::CheckPlace("memory.k_offset", proto.k_offset(), k_bytes, region.bytes()));
  chunk->k.data = region.data() + proto.k_offset();
  if (v_bytes > 0) {
    ATTND_RETURN_IF_ERROR(
        plane::CheckPlace("memory.v_offset", proto.v_offset(), v_bytes, region.bytes()));
    chunk->v.data = region.data() + proto.v_offset();
  }
  return region;
}

}  // namespace attnd::server
