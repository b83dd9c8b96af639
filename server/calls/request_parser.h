// SPDX-License-Identifier: Apache-2.0
//
// RequestParser: from a request's bytes to its message, and from a reply to its bytes. The service
// takes bytes from gRPC (raw methods), so that a message is looked at before it is parsed, is
// parsed by whoever answers it, and so that bytes that are no message are seen for what they are:
// gRPC reports them as it reports the end of a stream.
#ifndef ATTND_SERVER_CALLS_REQUEST_PARSER_H_
#define ATTND_SERVER_CALLS_REQUEST_PARSER_H_

#include <map>

#include "absl/status/status.h"
#include "google/protobuf/message.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/calls/heap_trimmer.h"
#include "server/calls/wire_check.h"
#include "server/options/options.h"

namespace attnd::server {

// Thread-safety: all methods may be called from any thread.
class RequestParser {
 public:
  // For the requests of every call of the service. The trimmer must outlive it.
  RequestParser(const ServerOptions& options, HeapTrimmer* trimmer);

  // Fills `request`, which is empty, and gives the bytes back. InvalidArgument as WireCheck::Check
  // says, NoMessage() too if the bytes do not parse; ResourceExhausted if the system refuses
  // memory. Then `request` is empty, and the bytes are still there.
  absl::Status Parse(grpc::ByteBuffer* bytes, google::protobuf::Message* request) const;

 private:
  std::map<const google::protobuf::Descriptor*, WireCheck> checks_;
  HeapTrimmer* const trimmer_;
};

// The reply's bytes. Internal if it has more than protobuf can write.
absl::Status Serialize(const google::protobuf::Message& reply, grpc::ByteBuffer* bytes);

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_REQUEST_PARSER_H_
