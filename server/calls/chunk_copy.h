// SPDX-License-Identifier: Apache-2.0
//
// ChunkCopy: a chunk of an upload that lies in memory which its client shares with the server.
#ifndef ATTND_SERVER_CALLS_CHUNK_COPY_H_
#define ATTND_SERVER_CALLS_CHUNK_COPY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "attnd/v1/attnd.pb.h"
#include "engine/types.h"
#include "server/calls/handler.h"

namespace attnd::server {

// What is checked is what is appended, whatever the client writes to the memory meanwhile. For one
// thread at a time.
class ChunkCopy {
 public:
  // Gives the chunk's k and v, whose views have no data yet, that of a copy. The first call copies
  // it; later ones, for a chunk that is tried again, find it. Errors as of KvMemory (attnd.proto);
  // ResourceExhausted if the system refuses memory.
  absl::Status Take(const v1::KvMemory& proto, absl::string_view tenant,
                    const HandlerContext& handlers, engine::AppendChunk* chunk);
  // The chunk is done with: frees the copy, if there is one.
  void Release(HeapTrimmer* trimmer);

 private:
  absl::Status Copy(const v1::KvMemory& proto, absl::string_view tenant,
                    const HandlerContext& handlers, uint64_t k_bytes, uint64_t v_bytes);

  std::unique_ptr<std::byte[]> bytes_;  // of k, and v behind it
  uint64_t size_ = 0;
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_CHUNK_COPY_H_
