// SPDX-License-Identifier: Apache-2.0
#include "server/calls/append_reactor.h"

#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "glog/logging.h"
#include "server/calls/chunk_memory.h"
#include "server/calls/step_conversions.h"
#include "server/calls/wire_check.h"

namespace attnd::server {

AppendReactor* AppendReactor::Start(HandlerContext* handlers, grpc::CallbackServerContext* context,
                                    grpc::ByteBuffer* reply) {
  const auto reactor = std::make_shared<AppendReactor>(handlers, context, reply);
  reactor->self_ = reactor;
  const absl::Status status = AdmitStream(handlers, *context, reactor, &reactor->tenant_);
  const MutexLock lock(reactor->mutex_);
  if (!status.ok()) {
    // Not registered, and nobody's writer.
    reactor->state_ = State::kFinished;
    reactor->final_status_ = status;
    reactor->Finish(ToGrpc(status));
  } else if (reactor->state_ == State::kReading) {  // not stopped meanwhile
    reactor->StartRead(&reactor->bytes_);
  }
  return reactor.get();
}

AppendReactor::AppendReactor(HandlerContext* handlers, grpc::CallbackServerContext* context,
                             grpc::ByteBuffer* reply)
    : handlers_(handlers),
      context_(context),
      reply_(reply),
      writer_(handlers->next_writer.fetch_add(1)) {}

void AppendReactor::OnReadDone(bool ok) {
  {
    const MutexLock lock(mutex_);
    if (state_ == State::kFinished) return;
    CHECK(state_ == State::kReading);
    if (!abort_status_.ok()) return FinishLocked(abort_status_);
    if (!ok && (cancelled_.load() || context_->IsCancelled())) return FinishLocked(ClientGone());
    state_ = ok ? State::kAppending : State::kCompleting;
  }
  if (ok && messages_ == 0) HoldLease();
  Submit(ok ? State::kAppending : State::kCompleting);
}

// An upload's client may compute for as long as it likes between two chunks. The id of a sequence
// that is not there is refused later.
void AppendReactor::HoldLease() {
  const auto id = FindVarint(bytes_, v1::AppendKvRequest::kSequenceIdFieldNumber);
  auto call = handlers_->engine->BeginCall(tenant_, id.value_or(0));
  if (call.ok()) lease_call_ = *std::move(call);
}

void AppendReactor::Submit(State state) {
  // Segmenting takes long; an answer without it does not.
  const bool segment = state == State::kCompleting && prefill_complete_;
  const bool taken = segment ? handlers_->prefills->Enqueue(this) : handlers_->steps->Submit(this);
  if (taken && !(segment && cancelled_.load())) return;
  const MutexLock lock(mutex_);
  if (taken) return LeaveQueueLocked();  // OnCancel may have come before it was queued
  handlers_->metrics->OnRejected(Rejection::kQueue);
  FinishLocked(absl::ResourceExhaustedError(
      absl::StrCat("max_queued_steps: ", handlers_->options->max_queued_steps,
                   " steps and chunks wait for a worker")));
}

void AppendReactor::LeaveQueueLocked() {
  if (state_ != State::kCompleting || !handlers_->prefills->Withdraw(this)) return;
  FinishLocked(abort_status_.ok() ? ClientGone() : abort_status_);
}

void AppendReactor::Run() {
  const std::shared_ptr<AppendReactor> self = self_;  // see DecodeReactor::Run
  State state;
  {
    const MutexLock lock(mutex_);
    state = state_;
  }
  CHECK(state == State::kAppending || state == State::kCompleting);
  if (state == State::kAppending) return TakeMessage();
  const absl::Status status = Complete();
  const MutexLock lock(mutex_);
  FinishLocked(abort_status_.ok() ? status : abort_status_);
}

void AppendReactor::Continue(const absl::Status& status) {
  const MutexLock lock(mutex_);
  CHECK(state_ == State::kAppending);
  if (!abort_status_.ok()) return FinishLocked(abort_status_);
  if (!status.ok()) return FinishLocked(status);
  if (stop_requested_) return FinishLocked(ShuttingDown());
  state_ = State::kReading;
  // An upload that pauses keeps no chunk in memory.
  if (!ReleaseLarge(&request_, handlers_->trimmer)) request_.Clear();
  StartRead(&bytes_);
}

// A message that finds no room is tried once more by those that may wait for some. One that the
// system has no memory to parse is not: there is nothing yet that could be tried.
void AppendReactor::TakeMessage() {
  absl::Status status = waits_for_room_ ? TakeParts() : BeginMessage();
  const bool full = parsed_ && absl::IsResourceExhausted(status);
  if (full && !std::exchange(waits_for_room_, false) && handlers_->engine->MayMakeRoom()) {
    waits_for_room_ = true;
    if (handlers_->room_waits->Enqueue(this)) return;
  }
  waits_for_room_ = false;
  if (full) {
    const uint64_t tokens = request_.k().shape_size() > 0 ? request_.k().shape(0) : 0;
    handlers_->metrics->OnRejected(TokensRejection(request_.first_position(), tokens,
                                                   handlers_->options->max_sequence_tokens));
  }
  ++messages_;
  Continue(status.ok() ? status : DescribeChunk(status));
}

absl::Status AppendReactor::BeginMessage() {
  const absl::Status parsed = ParseMessage(handlers_, &bytes_, &request_);
  parsed_ = parsed.ok();
  ATTND_RETURN_IF_ERROR(parsed);
  if (prefill_complete_) {
    return absl::InvalidArgumentError("prefill_complete was not in the last message");
  }
  ATTND_RETURN_IF_ERROR(CheckSequenceId());
  prefill_complete_ = request_.prefill_complete();
  observed_ = false;
  return TakeParts();
}

absl::Status AppendReactor::TakeParts() {
  if (request_.has_observed_queries() && !observed_) {
    ATTND_RETURN_IF_ERROR(Observe());
    observed_ = true;
  }
  const bool may_be_empty = prefill_complete_ || request_.has_observed_queries();
  if (may_be_empty && !request_.has_k() && !request_.has_v() && !request_.has_memory()) {
    return absl::OkStatus();
  }
  return AppendChunk();
}

absl::Status AppendReactor::Observe() {
  ATTND_ASSIGN_OR_RETURN(engine::ObservedChunk observed, ObservedFromProto(request_));
  observed.may_wait = waits_for_room_;
  observed.cancelled = &cancelled_;
  return handlers_->engine->Observe(tenant_, writer_, sequence_id_, observed);
}

absl::Status AppendReactor::AppendChunk() {
  ATTND_ASSIGN_OR_RETURN(engine::AppendChunk chunk, FromProto(request_));
  plane::RegionUse region;  // not while the chunk waits in a queue to be tried again
  // A client that has gone, or has given the region back, may write something else there.
  const std::function<bool()> kept = [&] { return !cancelled_.load() && region.registered(); };
  if (request_.has_memory()) {
    ATTND_ASSIGN_OR_RETURN(region, PlaceChunk(request_.memory(), tenant_, *handlers_, &chunk));
    chunk.kept = &kept;
  }
  chunk.may_wait = waits_for_room_;
  chunk.cancelled = &cancelled_;
  return handlers_->engine->Append(tenant_, writer_, sequence_id_, chunk);
}

absl::Status AppendReactor::CheckSequenceId() {
  const uint64_t id = request_.sequence_id();
  if (messages_ == 0) sequence_id_ = id;
  if (id == sequence_id_ || id == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("sequence_id is ", id, "; the stream began with ", sequence_id_));
}

absl::Status AppendReactor::Complete() {
  if (cancelled_.load()) return ClientGone();
  if (messages_ == 0) return absl::InvalidArgumentError("the stream carries no message");
  engine::PrefillResult result;
  if (prefill_complete_) {
    auto finished = handlers_->engine->FinishPrefill(tenant_, writer_, sequence_id_, &cancelled_);
    if (!finished.ok()) return WhyUnfinished(finished.status());
    result = *finished;
  } else {
    ATTND_ASSIGN_OR_RETURN(const engine::SequenceInfo info,
                           handlers_->engine->Info(tenant_, sequence_id_));
    result.committed_tokens = info.committed_tokens;
    result.segmented_tokens = info.segmented_tokens;
  }
  v1::AppendKvResponse reply;
  ToProto(result, &reply);
  return Serialize(reply, reply_);
}

absl::Status AppendReactor::WhyUnfinished(const absl::Status& status) const {
  if (absl::IsResourceExhausted(status)) handlers_->metrics->OnRejected(Rejection::kMemory);
  return absl::IsCancelled(status) ? ClientGone() : status;
}

absl::Status AppendReactor::DescribeChunk(const absl::Status& status) const {
  const std::string where = parsed_
                                ? absl::StrCat(" (layer ", request_.layer(), ", first_position ",
                                               request_.first_position(), ")")
                                : std::string();
  return {status.code(), absl::StrCat("chunk ", messages_ - 1, where, ": ", status.message())};
}

void AppendReactor::OnCancel() {
  cancelled_.store(true);
  const MutexLock lock(mutex_);
  LeaveQueueLocked();
}

void AppendReactor::OnDone() {
  const std::shared_ptr<AppendReactor> self = std::move(self_);  // may be the last reference
  {
    const MutexLock lock(mutex_);
    CHECK(state_ == State::kFinished) << "a stream is over that did not finish";
  }
  handlers_->metrics->OnRpc("AppendKv", CodeOfEnd(final_status_, *context_));
  handlers_->streams->Remove(this);
}

void AppendReactor::Stop() {
  const MutexLock lock(mutex_);
  stop_requested_ = true;
  if (state_ == State::kReading) FinishLocked(ShuttingDown());
}

// Nothing that is sent here can be stuck behind an unread reply, so Finish is enough; work in
// flight sees cancelled_ and then finishes.
void AppendReactor::Abort(const absl::Status& status) {
  const MutexLock lock(mutex_);
  if (state_ == State::kFinished || !abort_status_.ok()) return;
  abort_status_ = status;
  cancelled_.store(true);
  if (state_ == State::kReading) return FinishLocked(status);
  LeaveQueueLocked();
}

void AppendReactor::FinishLocked(const absl::Status& status) {
  CHECK(state_ != State::kFinished) << "a stream finishes twice";
  state_ = State::kFinished;
  final_status_ = status;
  if (!handlers_->ends->Enqueue(&end_)) End();  // there is room for every stream's one end
}

// The stream lets its sequences go before the client can see that it has ended. The object may be
// gone when this returns.
void AppendReactor::End() {
  handlers_->engine->ReleaseWriter(writer_);
  lease_call_.End();
  Finish(ToGrpc(final_status_));
}

}  // namespace attnd::server
