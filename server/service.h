// SPDX-License-Identifier: Apache-2.0
//
// AttndService: which handler answers which call.
#ifndef ATTND_SERVER_SERVICE_H_
#define ATTND_SERVER_SERVICE_H_

#include "attnd/v1/attnd.grpc.pb.h"
#include "server/calls/handler.h"

namespace attnd::server {

// Every call with its bytes, which handlers parse (request_parser.h).
template <template <typename> typename... Methods>
struct RawService;
template <>
struct RawService<> {
  using Type = v1::Attnd::Service;
};
template <template <typename> typename Method, template <typename> typename... Methods>
struct RawService<Method, Methods...> {
  using Type = Method<typename RawService<Methods...>::Type>;
};
using RawAttndService = RawService<
    v1::Attnd::WithRawCallbackMethod_GetServerInfo, v1::Attnd::WithRawCallbackMethod_OpenSequence,
    v1::Attnd::WithRawCallbackMethod_AppendKv, v1::Attnd::WithRawCallbackMethod_Decode,
    v1::Attnd::WithRawCallbackMethod_TruncateSequence,
    v1::Attnd::WithRawCallbackMethod_ForkSequence, v1::Attnd::WithRawCallbackMethod_SealSequence,
    v1::Attnd::WithRawCallbackMethod_ListSealed, v1::Attnd::WithRawCallbackMethod_DropSealed,
    v1::Attnd::WithRawCallbackMethod_CloseSequence, v1::Attnd::WithRawCallbackMethod_RenewLease,
    v1::Attnd::WithRawCallbackMethod_ListSequences>::Type;

// Thread-safety: gRPC calls from several threads. Nothing here waits: all that may is handed to
// workers.
class AttndService final : public RawAttndService {
 public:
  // `handlers` must outlive the service.
  explicit AttndService(HandlerContext* handlers) : handlers_(handlers) {}

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* OpenSequence(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* TruncateSequence(grpc::CallbackServerContext* context,
                                             const grpc::ByteBuffer* request,
                                             grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* ForkSequence(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* SealSequence(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* ListSealed(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* DropSealed(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* CloseSequence(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* RenewLease(grpc::CallbackServerContext* context,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* ListSequences(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* reply) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* AppendKv(grpc::CallbackServerContext* context,
                                                      grpc::ByteBuffer* reply) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Decode(
      grpc::CallbackServerContext* context) override;

 private:
  HandlerContext* const handlers_;
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_SERVICE_H_
