// SPDX-License-Identifier: Apache-2.0
#include "server/service.h"

#include "server/append_reactor.h"
#include "server/decode_reactor.h"
#include "server/unary_call.h"

namespace attnd::server {

// Constant, so that it waits for nothing: answered on gRPC's thread.
grpc::ServerUnaryReactor* AttndService::GetServerInfo(grpc::CallbackServerContext* context,
                                                      const v1::GetServerInfoRequest* request,
                                                      v1::GetServerInfoResponse* reply) {
  const absl::Status status =
      AnswerUnaryCall(handlers_, *context, *request, /*cancelled=*/nullptr, reply);
  handlers_->metrics->OnRpc("GetServerInfo", status.code());
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

grpc::ServerUnaryReactor* AttndService::OpenSequence(grpc::CallbackServerContext* context,
                                                     const v1::OpenSequenceRequest* request,
                                                     v1::OpenSequenceResponse* reply) {
  const bool reads = request->resume_sealed_id() != 0 || request->token_ids_size() > 0;
  return reads ? StartLongCall("OpenSequence", handlers_, context, request, reply)
               : StartUnaryCall("OpenSequence", handlers_, context, request, reply);
}

grpc::ServerUnaryReactor* AttndService::TruncateSequence(grpc::CallbackServerContext* context,
                                                         const v1::TruncateSequenceRequest* request,
                                                         v1::TruncateSequenceResponse* reply) {
  return StartUnaryCall("TruncateSequence", handlers_, context, request, reply);
}

grpc::ServerUnaryReactor* AttndService::ForkSequence(grpc::CallbackServerContext* context,
                                                     const v1::ForkSequenceRequest* request,
                                                     v1::ForkSequenceResponse* reply) {
  return StartUnaryCall("ForkSequence", handlers_, context, request, reply);
}

grpc::ServerUnaryReactor* AttndService::SealSequence(grpc::CallbackServerContext* context,
                                                     const v1::SealSequenceRequest* request,
                                                     v1::SealSequenceResponse* reply) {
  return StartLongCall("SealSequence", handlers_, context, request, reply);
}

grpc::ServerUnaryReactor* AttndService::ListSealed(grpc::CallbackServerContext* context,
                                                   const v1::ListSealedRequest* request,
                                                   v1::ListSealedResponse* reply) {
  return StartUnaryCall("ListSealed", handlers_, context, request, reply);
}

grpc::ServerUnaryReactor* AttndService::DropSealed(grpc::CallbackServerContext* context,
                                                   const v1::DropSealedRequest* request,
                                                   v1::DropSealedResponse* reply) {
  return StartLongCall("DropSealed", handlers_, context, request, reply);
}

grpc::ServerUnaryReactor* AttndService::CloseSequence(grpc::CallbackServerContext* context,
                                                      const v1::CloseSequenceRequest* request,
                                                      v1::CloseSequenceResponse* reply) {
  return StartUnaryCall("CloseSequence", handlers_, context, request, reply);
}

grpc::ServerUnaryReactor* AttndService::ListSequences(grpc::CallbackServerContext* context,
                                                      const v1::ListSequencesRequest* request,
                                                      v1::ListSequencesResponse* reply) {
  return StartUnaryCall("ListSequences", handlers_, context, request, reply);
}

grpc::ServerReadReactor<v1::AppendKvRequest>* AttndService::AppendKv(
    grpc::CallbackServerContext* context, v1::AppendKvResponse* reply) {
  return AppendReactor::Start(handlers_, context, reply);
}

grpc::ServerBidiReactor<v1::DecodeRequest, v1::DecodeResponse>* AttndService::Decode(
    grpc::CallbackServerContext* context) {
  return DecodeReactor::Start(handlers_, context);
}

}  // namespace attnd::server
