// SPDX-License-Identifier: Apache-2.0
//
// UnaryCall: one unary call, answered on a worker's thread or, if the call waits for nothing, on
// gRPC's.
#ifndef ATTND_SERVER_CALLS_UNARY_CALL_H_
#define ATTND_SERVER_CALLS_UNARY_CALL_H_

#include <atomic>
#include <chrono>
#include <new>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "glog/logging.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "server/calls/handler.h"
#include "server/calls/unary_handlers.h"
#include "server/calls/wire_check.h"

namespace attnd::server {

// Why a call is not made while the server is shutting down.
inline absl::Status RefuseAtShutdown(HandlerContext* handlers) {
  handlers->metrics->OnRejected(Rejection::kShutdown);
  return ShuttingDown();
}

// Holds the lease of the sequence that the request names, if it names one and the sequence is open:
// the call may wait long for its turn.
template <typename Request>
engine::Lease::Call HoldLease(HandlerContext* handlers, const grpc::CallbackServerContext& context,
                              const grpc::ByteBuffer& request) {
  if constexpr (requires { Request::kSequenceIdFieldNumber; }) {
    const auto tenant = TenantOf(context);
    const auto id = FindVarint(request, Request::kSequenceIdFieldNumber);
    if (!tenant.ok() || !id.has_value()) return {};
    auto call = handlers->engine->BeginCall(*tenant, *id);
    if (call.ok()) return *std::move(call);
  }
  return {};
}

// Makes the call for the tenant that it names.
template <typename Request, typename Reply>
absl::Status AnswerUnaryCall(HandlerContext* handlers, const grpc::CallbackServerContext& context,
                             const grpc::ByteBuffer& request_bytes,
                             const std::atomic<bool>* cancelled, grpc::ByteBuffer* reply_bytes) {
  ATTND_ASSIGN_OR_RETURN(const std::string tenant, TenantOf(context));
  Request request;
  Reply reply;
  grpc::ByteBuffer bytes(request_bytes);  // of references; gRPC's own stay until the call ends
  ATTND_RETURN_IF_ERROR(ParseMessage(handlers, &bytes, &request));
  ATTND_RETURN_IF_ERROR(
      Handle({*handlers->options, *handlers->engine, *handlers->metrics, handlers->gpu_sharing,
              handlers->newest_round_trip, tenant, cancelled},
             request, &reply));
  return Serialize(reply, reply_bytes);
}

// Waits in the queue of calls until a worker answers the call. gRPC's event threads thus never wait
// for a sequence's lock, which a truncation holds while it copies. A call whose client has left or
// whose deadline has passed when its turn comes is not made. A call that runs is finished, as it
// may have taken effect already; only long calls look at UnaryContext::cancelled.
//
// Threads: gRPC's (Start, OnCancel, OnDone) and a worker (Run). The object owns itself until
// OnDone, which comes after Finish; no code touches the object after End.
template <typename Request, typename Reply>
class UnaryCall final : public grpc::ServerUnaryReactor, private StepExecutor::Task {
 public:
  // Queues the call, or ends it with ResourceExhausted (the queue is full) or Unavailable (the
  // server is shutting down). `method` is the RPC's short name; request and reply live until
  // OnDone, as gRPC promises. Without workers it is answered on gRPC's thread, at once.
  static UnaryCall* Start(const char* method, HandlerContext* handlers, StepExecutor* workers,
                          grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                          grpc::ByteBuffer* reply) {
    auto* const call = new UnaryCall(method, handlers, context, request, reply);
    if (handlers->streams->stopping()) {
      call->End(RefuseAtShutdown(handlers));
      return call;
    }
    call->lease_call_ = HoldLease<Request>(handlers, *context, *request);
    call->open_ = true;
    handlers->open_calls->Begin();
    if (workers == nullptr) {
      call->Run();
    } else if (!workers->Enqueue(call)) {
      handlers->metrics->OnRejected(Rejection::kQueue);
      call->End(absl::ResourceExhaustedError(absl::StrCat(
          "max_queued_steps: ", handlers->options->max_queued_steps, " calls wait for a worker")));
    }
    return call;
  }

  void OnCancel() override { cancelled_.store(true); }
  void OnDone() override {
    CHECK(ended_) << method_ << " is over without an answer";
    if (open_) handlers_->open_calls->End();
    delete this;
  }

 private:
  UnaryCall(const char* method, HandlerContext* handlers, grpc::CallbackServerContext* context,
            const grpc::ByteBuffer* request, grpc::ByteBuffer* reply)
      : method_(method), handlers_(handlers), context_(context), request_(request), reply_(reply) {}

  void Run() override {
    absl::Status status;
    try {
      status = Answer();
    } catch (const std::bad_alloc&) {
      handlers_->metrics->OnRejected(Rejection::kMemory);
      status = absl::ResourceExhaustedError("the system refused memory for the reply");
    }
    End(status);
  }

  absl::Status Answer() {
    if (handlers_->streams->stopping()) return RefuseAtShutdown(handlers_);
    if (context_->deadline() <= std::chrono::system_clock::now()) {
      return absl::DeadlineExceededError("the call's deadline passed before it was made");
    }
    if (cancelled_.load()) return ClientGone();
    return AnswerUnaryCall<Request, Reply>(handlers_, *context_, *request_, &cancelled_, reply_);
  }

  // The object may be gone when this returns.
  void End(const absl::Status& status) {
    CHECK(!std::exchange(ended_, true)) << method_ << " is answered twice";
    handlers_->metrics->OnRpc(method_, status.code());
    lease_call_.End();
    Finish(ToGrpc(status));
  }

  const char* const method_;
  HandlerContext* const handlers_;
  grpc::CallbackServerContext* const context_;
  const grpc::ByteBuffer* const request_;
  grpc::ByteBuffer* const reply_;
  engine::Lease::Call lease_call_;  // of the sequence that the call names
  bool open_ = false;               // counted as such; written before the call runs
  bool ended_ = false;              // by whoever answers the call, which Start or Run does
  std::atomic<bool> cancelled_{false};
};

template <typename Request, typename Reply>
grpc::ServerUnaryReactor* StartUnaryCall(const char* method, HandlerContext* handlers,
                                         grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request, grpc::ByteBuffer* reply) {
  return UnaryCall<Request, Reply>::Start(method, handlers, handlers->calls, context, request,
                                          reply);
}

// StartUnaryCall for long calls, which take as long as the disk does: short calls never wait for
// them. Long calls end early when their client leaves.
template <typename Request, typename Reply>
grpc::ServerUnaryReactor* StartLongCall(const char* method, HandlerContext* handlers,
                                        grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request, grpc::ByteBuffer* reply) {
  return UnaryCall<Request, Reply>::Start(method, handlers, handlers->prefills, context, request,
                                          reply);
}

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_UNARY_CALL_H_
