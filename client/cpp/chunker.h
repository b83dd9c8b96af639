// SPDX-License-Identifier: Apache-2.0
//
// Chunker: cuts prefilled keys and values into AppendKv messages. No gRPC here.
#ifndef ATTND_CLIENT_CPP_CHUNKER_H_
#define ATTND_CLIENT_CPP_CHUNKER_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attnd/v1/attnd.pb.h"
#include "client/cpp/client.h"

namespace attnd::client {

// Not thread-safe. The blocks and ids must outlive it.
class Chunker {
 public:
  // InvalidArgument if a block's bytes do not match the shape, or the ids the blocks.
  static absl::StatusOr<Chunker> Create(uint64_t sequence_id, const v1::ModelShape& shape,
                                        std::span<const KvBlock> blocks,
                                        std::span<const uint32_t> token_ids,
                                        const AppendOptions& options);

  // Fills the next message, memory of an earlier one used again; false if there is none. The last
  // message says that the prefill is complete, if the options do.
  bool Next(v1::AppendKvRequest* message);

 private:
  Chunker() = default;
  // InvalidArgument unless the bytes begin at a multiple of kAlignmentBytes in the region.
  absl::Status CheckPlace(size_t block, const char* name, absl::string_view bytes) const;
  uint64_t OffsetOf(absl::string_view bytes) const;
  void FillChunk(const KvBlock& block, uint64_t tokens, v1::AppendKvRequest* message) const;

  uint64_t sequence_id_ = 0;
  v1::ModelShape shape_;
  std::span<const KvBlock> blocks_;
  std::span<const uint32_t> token_ids_;  // those not yet sent
  bool prefill_complete_ = false;
  uint64_t prompt_tokens_ = 0;
  uint64_t k_token_bytes_ = 0;  // of one token, all heads
  uint64_t v_token_bytes_ = 0;  // 0 if the model is latent
  uint64_t chunk_tokens_ = 0;
  const ClientRegion* memory_ = nullptr;  // null: the messages have copies of k and v

  size_t block_ = 0;       // the one being sent
  uint64_t sent_ = 0;      // tokens of it that have been
  bool complete_ = false;  // everything has been, the prefill's end included
};

}  // namespace attnd::client

#endif  // ATTND_CLIENT_CPP_CHUNKER_H_
