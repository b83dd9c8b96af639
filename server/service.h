// SPDX-License-Identifier: Apache-2.0
//
// AttndService: which handler answers which call.
#ifndef ATTND_SERVER_SERVICE_H_
#define ATTND_SERVER_SERVICE_H_

#include "attnd/v1/attnd.grpc.pb.h"
#include "server/handler.h"

namespace attnd::server {

// Thread-safety: gRPC calls from several threads. Nothing here waits: all that may is handed to
// workers.
class AttndService final : public v1::Attnd::CallbackService {
 public:
  // `handlers` must outlive the service.
  explicit AttndService(HandlerContext* handlers) : handlers_(handlers) {}

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* reply) override;
  grpc::ServerUnaryReactor* OpenSequence(grpc::CallbackServerContext* context,
                                         const v1::OpenSequenceRequest* request,
                                         v1::OpenSequenceResponse* reply) override;
  grpc::ServerUnaryReactor* TruncateSequence(grpc::CallbackServerContext* context,
                                             const v1::TruncateSequenceRequest* request,
                                             v1::TruncateSequenceResponse* reply) override;
  grpc::ServerUnaryReactor* ForkSequence(grpc::CallbackServerContext* context,
                                         const v1::ForkSequenceRequest* request,
                                         v1::ForkSequenceResponse* reply) override;
  grpc::ServerUnaryReactor* SealSequence(grpc::CallbackServerContext* context,
                                         const v1::SealSequenceRequest* request,
                                         v1::SealSequenceResponse* reply) override;
  grpc::ServerUnaryReactor* ListSealed(grpc::CallbackServerContext* context,
                                       const v1::ListSealedRequest* request,
                                       v1::ListSealedResponse* reply) override;
  grpc::ServerUnaryReactor* DropSealed(grpc::CallbackServerContext* context,
                                       const v1::DropSealedRequest* request,
                                       v1::DropSealedResponse* reply) override;
  grpc::ServerUnaryReactor* CloseSequence(grpc::CallbackServerContext* context,
                                          const v1::CloseSequenceRequest* request,
                                          v1::CloseSequenceResponse* reply) override;
  grpc::ServerUnaryReactor* ListSequences(grpc::CallbackServerContext* context,
                                          const v1::ListSequencesRequest* request,
                                          v1::ListSequencesResponse* reply) override;
  grpc::ServerReadReactor<v1::AppendKvRequest>* AppendKv(grpc::CallbackServerContext* context,
                                                         v1::AppendKvResponse* reply) override;
  grpc::ServerBidiReactor<v1::DecodeRequest, v1::DecodeResponse>* Decode(
      grpc::CallbackServerContext* context) override;

 private:
  HandlerContext* const handlers_;
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_SERVICE_H_
