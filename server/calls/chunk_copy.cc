// SPDX-License-Identifier: Apache-2.0
#include "server/calls/chunk_copy.h"

#include <cstdint>
#include <cstring>
#include <new>

#include "common/status.h"
#include "plane/pass_memory.h"
#include "plane/region_table.h"
#include "server/calls/conversions.h"
#include "server/calls/memory_plane.h"

namespace attnd::server {

absl::Status ChunkCopy::Take(const v1::KvMemory& proto, absl::string_view tenant,
                             const HandlerContext& handlers, engine::AppendChunk* chunk) {
  const uint64_t k_bytes = Bytes(chunk->k), v_bytes = Bytes(chunk->v);
  if (bytes_ == nullptr) {
    ATTND_RETURN_IF_ERROR(Copy(proto, tenant, handlers, k_bytes, v_bytes));
  }
  chunk->k.data = bytes_.get();
  if (v_bytes > 0) chunk->v.data = bytes_.get() + k_bytes;
  return absl::OkStatus();
}

absl::Status ChunkCopy::Copy(const v1::KvMemory& proto, absl::string_view tenant,
                             const HandlerContext& handlers, uint64_t k_bytes, uint64_t v_bytes) {
  if (handlers.memory == nullptr) {
    return absl::FailedPreconditionError(
        "memory: the server was started without --allow-client-memory");
  }
  const uint64_t bytes_max = handlers.options->max_message_bytes;
  if (k_bytes > bytes_max || v_bytes > bytes_max - k_bytes) {
    return Invalid("k", " and v have more bytes than a message may have; allowed are ", bytes_max,
                   " (max_message_bytes)");
  }
  ATTND_ASSIGN_OR_RETURN(
      const plane::RegionUse region,
      handlers.memory->regions()->Use("memory.region_id", tenant, proto.region_id()));
  ATTND_RETURN_IF_ERROR(
      plane::CheckPlace("memory.k_offset", proto.k_offset(), k_bytes, region.bytes()));
  if (v_bytes > 0) {
    ATTND_RETURN_IF_ERROR(
        plane::CheckPlace("memory.v_offset", proto.v_offset(), v_bytes, region.bytes()));
  }
  bytes_.reset(new (std::nothrow) std::byte[k_bytes + v_bytes]);
  if (bytes_ == nullptr) {
    return absl::ResourceExhaustedError("the system refused memory for a chunk of the upload");
  }
  size_ = k_bytes + v_bytes;
  std::memcpy(bytes_.get(), region.data() + proto.k_offset(), k_bytes);
  if (v_bytes > 0) std::memcpy(bytes_.get() + k_bytes, region.data() + proto.v_offset(), v_bytes);
  return absl::OkStatus();
}

void ChunkCopy::Release(HeapTrimmer* trimmer) {
  if (bytes_ == nullptr) return;
  bytes_.reset();
  trimmer->OnReleased(size_);
}

}  // namespace attnd::server
