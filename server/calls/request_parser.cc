// SPDX-License-Identifier: Apache-2.0
#include "server/calls/request_parser.h"

#include <new>

#include "attnd/v1/attnd.pb.h"
#include "common/status.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "grpcpp/support/proto_buffer_writer.h"

namespace attnd::server {
namespace {

using google::protobuf::Message;

absl::Status ParseBytes(grpc::ByteBuffer* bytes, Message* request) {
  grpc::ProtoBufferReader reader(bytes);
  if (!reader.status().ok() || !request->ParseFromZeroCopyStream(&reader)) return NoMessage();
  return absl::OkStatus();
}

}  // namespace

RequestParser::RequestParser(const ServerOptions& options, HeapTrimmer* trimmer)
    : trimmer_(trimmer) {
  const google::protobuf::ServiceDescriptor* const service =
      v1::DecodeRequest::descriptor()->file()->FindServiceByName("Attnd");
  for (int i = 0; i < service->method_count(); ++i) {
    const google::protobuf::Descriptor* const type = service->method(i)->input_type();
    checks_.try_emplace(type, type, options);
  }
}

absl::Status RequestParser::Parse(grpc::ByteBuffer* bytes, Message* request) const {
  const size_t length = bytes->Length();
  absl::Status status;
  try {
    status = checks_.at(request->GetDescriptor()).Check(*bytes);
    if (status.ok()) status = ParseBytes(bytes, request);
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError("the system refused memory for the message");
  }
  trimmer_->OnReleased(length);
  if (!status.ok()) {
    request->Clear();
    return status;
  }
  bytes->Clear();
  return absl::OkStatus();
}

absl::Status Serialize(const Message& reply, grpc::ByteBuffer* bytes) {
  bool own_buffer = false;
  const grpc::Status status =
      grpc::GenericSerialize<grpc::ProtoBufferWriter, Message>(reply, bytes, &own_buffer);
  if (status.ok()) return absl::OkStatus();
  return absl::InternalError(status.error_message());
}

}  // namespace attnd::server
