// SPDX-License-Identifier: Apache-2.0
#include "server/service.h"

#include "server/calls/append_reactor.h"
#include "server/calls/decode_reactor.h"
#include "server/calls/unary_call.h"

namespace attnd::server {

using grpc::ByteBuffer;
using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

// Constant, so that it waits for nothing: answered on gRPC's thread.
ServerUnaryReactor* AttndService::GetServerInfo(CallbackServerContext* context,
                                                const ByteBuffer* request, ByteBuffer* reply) {
  return UnaryCall<v1::GetServerInfoRequest, v1::GetServerInfoResponse>::Start(
      "GetServerInfo", handlers_, /*workers=*/nullptr, context, request, reply);
}

ServerUnaryReactor* AttndService::OpenSequence(CallbackServerContext* context,
                                               const ByteBuffer* request, ByteBuffer* reply) {
  using Request = v1::OpenSequenceRequest;
  const bool reads =
      HasAnyField(*request, {Request::kResumeSealedIdFieldNumber, Request::kTokenIdsFieldNumber});
  return UnaryCall<Request, v1::OpenSequenceResponse>::Start(
      "OpenSequence", handlers_, reads ? handlers_->prefills : handlers_->calls, context, request,
      reply);
}

ServerUnaryReactor* AttndService::TruncateSequence(CallbackServerContext* context,
                                                   const ByteBuffer* request, ByteBuffer* reply) {
  return StartUnaryCall<v1::TruncateSequenceRequest, v1::TruncateSequenceResponse>(
      "TruncateSequence", handlers_, context, request, reply);
}

ServerUnaryReactor* AttndService::ForkSequence(CallbackServerContext* context,
                                               const ByteBuffer* request, ByteBuffer* reply) {
  return StartUnaryCall<v1::ForkSequenceRequest, v1::ForkSequenceResponse>(
      "ForkSequence", handlers_, context, request, reply);
}

ServerUnaryReactor* AttndService::SealSequence(CallbackServerContext* context,
                                               const ByteBuffer* request, ByteBuffer* reply) {
  return StartLongCall<v1::SealSequenceRequest, v1::SealSequenceResponse>("SealSequence", handlers_,
                                                                          context, request, reply);
}

ServerUnaryReactor* AttndService::ListSealed(CallbackServerContext* context,
                                             const ByteBuffer* request, ByteBuffer* reply) {
  return StartUnaryCall<v1::ListSealedRequest, v1::ListSealedResponse>("ListSealed", handlers_,
                                                                       context, request, reply);
}

ServerUnaryReactor* AttndService::DropSealed(CallbackServerContext* context,
                                             const ByteBuffer* request, ByteBuffer* reply) {
  return StartLongCall<v1::DropSealedRequest, v1::DropSealedResponse>("DropSealed", handlers_,
                                                                      context, request, reply);
}

ServerUnaryReactor* AttndService::CloseSequence(CallbackServerContext* context,
                                                const ByteBuffer* request, ByteBuffer* reply) {
  return StartUnaryCall<v1::CloseSequenceRequest, v1::CloseSequenceResponse>(
      "CloseSequence", handlers_, context, request, reply);
}

ServerUnaryReactor* AttndService::RenewLease(CallbackServerContext* context,
                                             const ByteBuffer* request, ByteBuffer* reply) {
  return StartUnaryCall<v1::RenewLeaseRequest, v1::RenewLeaseResponse>("RenewLease", handlers_,
                                                                       context, request, reply);
}

ServerUnaryReactor* AttndService::ListSequences(CallbackServerContext* context,
                                                const ByteBuffer* request, ByteBuffer* reply) {
  return StartUnaryCall<v1::ListSequencesRequest, v1::ListSequencesResponse>(
      "ListSequences", handlers_, context, request, reply);
}

grpc::ServerReadReactor<ByteBuffer>* AttndService::AppendKv(CallbackServerContext* context,
                                                            ByteBuffer* reply) {
  return AppendReactor::Start(handlers_, context, reply);
}

grpc::ServerBidiReactor<ByteBuffer, ByteBuffer>* AttndService::Decode(
    CallbackServerContext* context) {
  return DecodeReactor::Start(handlers_, context);
}

}  // namespace attnd::server
