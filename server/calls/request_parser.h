// SPDX-License-Identifier: Apache-2.0
//
// RequestParser: from a request's bytes to its message, and from a reply to its bytes. The service
// takes bytes from gRPC (raw methods), for three reasons: a message is checked before it is parsed;
// the worker that answers a message parses it; and bytes that are no message are recognised as
// such, where gRPC would report them as the end of a stream.
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

  // Fills `request`, which is empty, and frees the bytes. InvalidArgument as WireCheck::Check says,
  // and NoMessage() if the bytes do not parse; ResourceExhausted if the system refuses memory. On
  // an error `request` is empty, and the bytes are kept.
  absl::Status Parse(grpc::ByteBuffer* bytes, google::protobuf::Message* request) const;

 private:
  std::map<const google::protobuf::Descriptor*, WireCheck> checks_;
  HeapTrimmer* const trimmer_;
};

// The reply's bytes. Internal if the reply has more bytes than protobuf can write.
absl::Status Serialize(const google::protobuf::Message& reply, grpc::ByteBuffer* bytes);

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_REQUEST_PARSER_H_
