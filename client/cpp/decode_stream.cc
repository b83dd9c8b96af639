// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/decode_stream.h"

#include <utility>

#include "client/cpp/rpc_status.h"

namespace attnd::client {

DecodeStream::DecodeStream(v1::Attnd::Stub* stub, std::unique_ptr<grpc::ClientContext> context)
    : context_(std::move(context)), stream_(stub->PrepareAsyncDecode(context_.get(), &queue_)) {
  stream_->StartCall(nullptr);
  ++pending_;
}

DecodeStream::~DecodeStream() {
  context_->TryCancel();
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) continue;
}

absl::Status DecodeStream::Exchange(const v1::DecodeRequest& request, v1::DecodeResponse* reply,
                                    Clock::time_point limit) {
  absl::Status status = Send(request, reply, limit);
  return status.ok() ? Receive(limit) : status;
}

absl::Status DecodeStream::Send(const v1::DecodeRequest& request, v1::DecodeResponse* reply,
                                Clock::time_point limit) {
  // The stream's start may still be pending: a write must wait for it. If it failed, Receive says
  // why.
  absl::Status status = pending_ > 0 ? Await(limit) : absl::OkStatus();
  if (!status.ok() || !ok_) return status;
  stream_->Write(request, nullptr);
  stream_->Read(reply, nullptr);
  pending_ += 2;
  return absl::OkStatus();
}

absl::Status DecodeStream::Receive(Clock::time_point limit) {
  absl::Status status = Await(limit);
  if (!status.ok() || ok_) return status;
  status = FinalStatus(limit);
  return status.ok() ? absl::UnavailableError("the server ended the stream") : status;
}

bool DecodeStream::Arrived() {
  constexpr Clock::time_point kLongAgo{};  // in 1970; gRPC takes what is before for never
  void* tag = nullptr;
  bool one = false;
  for (; pending_ > 0; --pending_) {
    if (queue_.AsyncNext(&tag, &one, kLongAgo) != grpc::CompletionQueue::GOT_EVENT) return false;
    ok_ = ok_ && one;
  }
  return true;
}

absl::Status DecodeStream::Finish(Clock::time_point limit) {
  absl::Status status = pending_ > 0 ? Await(limit) : absl::OkStatus();
  if (status.ok() && ok_) {
    stream_->WritesDone(nullptr);
    stream_->Read(&rest_, nullptr);  // ends when the stream does
    pending_ += 2;
    status = Await(limit);
  }
  return status.ok() ? FinalStatus(limit) : status;
}

absl::Status DecodeStream::Await(Clock::time_point limit) {
  bool late = false;
  for (; pending_ > 0; --pending_) {
    void* tag = nullptr;
    bool one = false;
    if (!late && queue_.AsyncNext(&tag, &one, limit) != grpc::CompletionQueue::GOT_EVENT) {
      late = true;
      context_->TryCancel();
    }
    if (late) queue_.Next(&tag, &one);
    ok_ = ok_ && one;
  }
  return late ? absl::DeadlineExceededError("no reply in time") : absl::OkStatus();
}

absl::Status DecodeStream::FinalStatus(Clock::time_point limit) {
  stream_->Finish(&status_, nullptr);
  ++pending_;
  const absl::Status status = Await(limit);
  return status.ok() ? FromGrpc(status_) : status;
}

}  // namespace attnd::client
