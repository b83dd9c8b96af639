// SPDX-License-Identifier: Apache-2.0
//
// DecodeReply: a reply of Decode, made as the bytes that are sent.
#ifndef ATTND_SERVER_CALLS_DECODE_REPLY_H_
#define ATTND_SERVER_CALLS_DECODE_REPLY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attnd/v1/attnd.pb.h"
#include "common/dtype.h"
#include "engine/answer_memory.h"
#include "engine/engine.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "server/calls/heap_trimmer.h"
#include "server/calls/step_conversions.h"

namespace attnd::server {

// Memory for a tensor's elements on their way to the wire. The backend that computes the elements
// writes into this memory; then gRPC owns it and frees it when the last byte has been sent.
// Movable.
class WireData {
 public:
  WireData() = default;
  // ResourceExhausted if the system refuses the memory, whose content is then undefined.
  static absl::StatusOr<WireData> Make(uint64_t bytes);

  std::byte* data() const { return data_.get(); }
  uint64_t size() const { return bytes_; }
  // Hands the memory to gRPC.
  grpc::Slice Release();

 private:
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
  uint64_t bytes_ = 0;
};

// The tensors `out` and `lse` are nearly all of a reply. They never become fields of a message,
// which would be filled and then serialised: the engine's backend writes their elements into the
// memory that gRPC sends. An `out` of 16 bits takes one conversion instead, from floats kept here
// from step to step. Everything else is a message of protobuf's, and Serialize puts its bytes
// around the elements, in the order in which protobuf would have written the whole.
//
//   Start -> Provide (the engine asks) -> Finish -> Serialize
//   Start or Finish -> Refuse -> Serialize
//
// One thread at a time. Memory of an earlier reply is used again.
class DecodeReply {
 public:
  // Which parts of an answer are told.
  struct Parts {
    ReplyRows rows = ReplyRows::kAll;
    bool lse = true;
  };
  // Begins the reply to the message with this id; its answer will have elements of `output_dtype`.
  void Start(uint64_t step_id, DType output_dtype, const Parts& parts);
  void Start(uint64_t step_id, DType output_dtype) { Start(step_id, output_dtype, Parts()); }
  // The engine's AnswerMemory. ResourceExhausted if the system refuses it.
  absl::StatusOr<engine::AnswerBuffers> Provide(const engine::AnswerExtents& extents);
  // Takes the rows' results; the memory that Provide gave holds the answer. ResourceExhausted if
  // the system refuses memory for elements of 16 bits.
  absl::Status Finish(const engine::DecodeResult& result);
  // Replaces the reply by a refusal: the message was refused, or ran out of time.
  void Refuse(uint64_t step_id, const absl::Status& status);
  // The reply to complete_prefills, a row for each, in place of Start, Provide and Finish.
  void FinishPrefills(uint64_t step_id,
                      std::span<const absl::StatusOr<engine::PrefillResult>> prefills);

  // The reply to a pass over memory, whose tensors lie there, in place of Start, Provide and
  // Finish.
  void FinishMemoryPass(uint64_t step_id, const engine::DecodeResult& result, ReplyRows rows);

  // The reply to round_trip, likewise.
  void FinishRoundTrip(uint64_t step_id, const v1::RoundTrip& measured);

  // Bytes of the reply without its times, which take fewer than kTimesBytesMax.
  uint64_t ByteSize() const;
  static constexpr uint64_t kTimesBytesMax = 64;
  // The reply's bytes, in microseconds. Hands the tensors' memory to `bytes`: the next reply begins
  // with Start or Refuse.
  void Serialize(uint64_t queue_us, uint64_t engine_us, grpc::ByteBuffer* bytes);

  // Frees the memory that is kept of a reply that has been sent, if it is large. Returns whether it
  // was.
  bool ReleaseLarge(HeapTrimmer* trimmer);

 private:
  // A tensor's field of the reply.
  struct Field {
    std::string head;  // tag and length of the field, and all of the tensor but its elements
    WireData data;     // none: there is no element
  };
  void ClearTensors();

  DType output_dtype_ = DType::kFp32;
  Parts parts_;
  engine::AnswerExtents extents_;
  v1::DecodeResponse front_;  // step_id, status and rows
  Field out_;
  Field lse_;
  bool has_tensors_ = false;      // Finish was called
  std::vector<float> converted_;  // what the backend wrote, if output_dtype_ has 16 bits
  uint64_t sent_bytes_ = 0;       // elements that were handed to gRPC
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_DECODE_REPLY_H_
