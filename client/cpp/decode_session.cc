// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/decode_session.h"

#include <utility>

#include "client/cpp/rpc_status.h"
#include "grpcpp/completion_queue.h"

namespace attnd::client {
namespace {

using Clock = std::chrono::system_clock;

// The blocking stream of gRPC cannot wait with a limit, so this one drives a completion queue, on
// the caller's own thread. Operations are waited for one by one: whatever completes is the one that
// was started.
class DecodeSessionImpl final : public DecodeSession {
 public:
  DecodeSessionImpl(v1::Attnd::Stub* stub, std::unique_ptr<grpc::ClientContext> context)
      : context_(std::move(context)), stream_(stub->PrepareAsyncDecode(context_.get(), &queue_)) {
    stream_->StartCall(nullptr);
    ++pending_;
  }
  ~DecodeSessionImpl() override {
    context_->TryCancel();
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) continue;
  }

  absl::Status Step(const v1::DecodeRequest& request, v1::DecodeResponse* reply,
                    std::chrono::milliseconds timeout) override;
  absl::Status Finish(std::chrono::milliseconds timeout) override;

 private:
  // Waits for everything that was started, and clears *ok if any of it failed. When the time is
  // over it cancels the stream, so that nothing is pending in any case: what gRPC reads into
  // belongs to the caller again.
  absl::Status Await(Clock::time_point limit, bool* ok);
  // The status with which the stream ended; only after an operation failed or the last message was
  // sent.
  absl::Status FinalStatus(Clock::time_point limit);

  grpc::CompletionQueue queue_;
  const std::unique_ptr<grpc::ClientContext> context_;
  const std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::DecodeRequest, v1::DecodeResponse>>
      stream_;
  int pending_ = 0;      // operations started and not yet waited for
  grpc::Status status_;  // filled by gRPC when the stream has ended
  absl::Status ended_;   // why the session is of no further use
  v1::DecodeResponse rest_;
};

absl::Status DecodeSessionImpl::Step(const v1::DecodeRequest& request, v1::DecodeResponse* reply,
                                     std::chrono::milliseconds timeout) {
  if (!ended_.ok()) return ended_;
  const Clock::time_point limit = Clock::now() + timeout;
  // The stream's start may still be pending: a write must wait for it.
  bool ok = true;
  if (pending_ > 0) ended_ = Await(limit, &ok);
  if (ended_.ok() && ok) {
    stream_->Write(request, nullptr);
    stream_->Read(reply, nullptr);
    pending_ += 2;
    ended_ = Await(limit, &ok);
  }
  if (ended_.ok() && !ok) {
    ended_ = FinalStatus(limit);
    if (ended_.ok()) ended_ = absl::UnavailableError("the server ended the stream");
  }
  return ended_;
}

absl::Status DecodeSessionImpl::Finish(std::chrono::milliseconds timeout) {
  if (!ended_.ok()) return ended_;
  const Clock::time_point limit = Clock::now() + timeout;
  bool ok = true;
  absl::Status status = pending_ > 0 ? Await(limit, &ok) : absl::OkStatus();
  if (status.ok() && ok) {
    stream_->WritesDone(nullptr);
    stream_->Read(&rest_, nullptr);  // ends when the stream does
    pending_ += 2;
    status = Await(limit, &ok);
  }
  if (status.ok()) status = FinalStatus(limit);
  ended_ = status.ok() ? absl::FailedPreconditionError("the session is finished") : status;
  return status;
}

absl::Status DecodeSessionImpl::Await(Clock::time_point limit, bool* ok) {
  bool late = false;
  for (; pending_ > 0; --pending_) {
    void* tag = nullptr;
    bool one = false;
    if (!late && queue_.AsyncNext(&tag, &one, limit) != grpc::CompletionQueue::GOT_EVENT) {
      late = true;
      context_->TryCancel();
    }
    if (late) queue_.Next(&tag, &one);
    *ok = *ok && one;
  }
  return late ? absl::DeadlineExceededError("no reply in time") : absl::OkStatus();
}

absl::Status DecodeSessionImpl::FinalStatus(Clock::time_point limit) {
  stream_->Finish(&status_, nullptr);
  ++pending_;
  bool ok = true;
  const absl::Status status = Await(limit, &ok);
  return status.ok() ? FromGrpc(status_) : status;
}

}  // namespace

std::unique_ptr<DecodeSession> MakeDecodeSession(v1::Attnd::Stub* stub,
                                                 std::unique_ptr<grpc::ClientContext> context) {
  return std::make_unique<DecodeSessionImpl>(stub, std::move(context));
}

}  // namespace attnd::client
