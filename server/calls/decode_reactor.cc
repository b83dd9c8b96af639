// SPDX-License-Identifier: Apache-2.0
#include "server/calls/decode_reactor.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/model_shape.h"
#include "common/status.h"
#include "glog/logging.h"
#include "grpc/grpc.h"

namespace attnd::server {

DecodeReactor* DecodeReactor::Start(HandlerContext* handlers,
                                    grpc::CallbackServerContext* context) {
  const auto reactor = std::make_shared<DecodeReactor>(handlers, context);
  reactor->self_ = reactor;
  const absl::Status status = AdmitStream(handlers, *context, reactor, &reactor->tenant_);
  const MutexLock lock(reactor->mutex_);
  if (!status.ok()) {
    // Not registered, and nobody's writer.
    reactor->state_ = State::kFinished;
    reactor->final_status_ = status;
    reactor->Finish(ToGrpc(status));
  } else if (reactor->state_ == State::kReading) {  // not stopped meanwhile
    reactor->StartRead(&reactor->request_bytes_);
  }
  return reactor.get();
}

DecodeReactor::DecodeReactor(HandlerContext* handlers, grpc::CallbackServerContext* context)
    : handlers_(handlers), context_(context), writer_(handlers->next_writer.fetch_add(1)) {}

void DecodeReactor::OnReadDone(bool ok) {
  arrival_ = Clock::now();
  {
    const MutexLock lock(mutex_);
    if (state_ == State::kFinished) return;
    CHECK(state_ == State::kReading);
    if (!ok) return FinishLocked(EndOfMessages());
    state_ = State::kStepping;
  }
  if (handlers_->steps->Submit(this)) return;
  RefuseQueued();
}

void DecodeReactor::RefuseQueued() {
  handlers_->metrics->OnRejected(Rejection::kQueue);
  WriteRefusal(absl::ResourceExhaustedError(absl::StrCat(
      "max_queued_steps: ", handlers_->options->max_queued_steps, " steps wait for a worker")));
}

void DecodeReactor::WriteRefusal(const absl::Status& status) {
  if (request_bytes_.Valid()) {
    step_id_ = FindVarint(request_bytes_, v1::DecodeRequest::kStepIdFieldNumber).value_or(0);
    request_bytes_.Clear();
  }
  queue_time_ = engine_time_ = Clock::duration::zero();
  Refuse(status);
  WriteReply();
}

bool DecodeReactor::TakeMessage() {
  const absl::Status status = ParseMessage(handlers_, &request_bytes_, &request_);
  step_id_ = request_.step_id();
  if (status.ok()) return true;
  if (!IsNoMessage(status)) {
    WriteRefusal(status);
    return false;
  }
  const MutexLock lock(mutex_);
  FinishLocked(abort_status_.ok() ? status : abort_status_);
  return false;
}

absl::Status DecodeReactor::EndOfMessages() {
  if (!abort_status_.ok()) return abort_status_;
  if (cancelled_.load() || context_->IsCancelled()) return ClientGone();
  return absl::OkStatus();
}

void DecodeReactor::Run() {
  // Once the reply is on its way the stream may end on another thread before this one has left.
  const std::shared_ptr<DecodeReactor> self = self_;
  const bool second_time = std::exchange(on_disk_worker_, false);
  if (!second_time && !TakeMessage()) return;
  if (!second_time && MayReadDisk()) {
    on_disk_worker_ = true;
    if (handlers_->disk_steps->Enqueue(this)) return;
    on_disk_worker_ = false;
    return RefuseQueued();
  }
  const Clock::time_point start = Clock::now();
  queue_time_ = start - arrival_;
  engine_time_ = Clock::duration::zero();
  if (const absl::Status status = Answer(); !status.ok()) Refuse(status);
  WriteReply();
}

bool DecodeReactor::MayReadDisk() const {
  const uint32_t rows_max = handlers_->options->max_rows;  // a message of more is refused
  const int rows = std::min(request_.rows_size(), static_cast<int>(rows_max));
  for (int i = 0; i < rows; ++i) {
    if (handlers_->engine->MayReadDisk(tenant_, request_.rows(i).sequence_id())) return true;
  }
  return false;
}

absl::Status DecodeReactor::Answer() {
  const ServerOptions& options = *handlers_->options;
  ATTND_RETURN_IF_ERROR(FromProto(request_, arrival_, &step_, options.policies));
  if (absl::Status status = CheckReplySize(); !status.ok()) {
    handlers_->metrics->OnRejected(Rejection::kMessage);
    return status;
  }
  step_.args.cancelled = &cancelled_;
  reply_.Start(step_id_, step_.output_dtype);
  const auto memory = [this](const engine::AnswerExtents& extents) {
    return reply_.Provide(extents);
  };
  const Clock::time_point start = Clock::now();
  absl::Status status = handlers_->engine->Decode(tenant_, writer_, step_.args, memory, &result_);
  engine_time_ = Clock::now() - start;
  if (status.ok()) status = reply_.Finish(result_);
  if (absl::IsResourceExhausted(status)) handlers_->metrics->OnRejected(Rejection::kMemory);
  ATTND_RETURN_IF_ERROR(status);
  step_code_ = absl::StatusCode::kOk;
  return CheckReplyFits();
}

// Statistics and refusals of many rows count, too: what CheckReplySize cannot foresee.
absl::Status DecodeReactor::CheckReplyFits() const {
  const uint64_t bytes = reply_.ByteSize() + DecodeReply::kTimesBytesMax;
  const uint64_t max_bytes = handlers_->options->max_message_bytes;
  if (bytes <= max_bytes) return absl::OkStatus();
  handlers_->metrics->OnRejected(Rejection::kMessage);
  return absl::ResourceExhaustedError(absl::StrCat("max_message_bytes: the reply has ", bytes,
                                                   " bytes; allowed are ", max_bytes,
                                                   "; the step's tokens have been appended"));
}

// Before anything is computed or taken from memory: a small query may ask for wide values. The
// width is in v; without v it is looked up, if the widest that there is would be too much.
absl::Status DecodeReactor::CheckReplySize() const {
  const engine::DecodeArgs& args = step_.args;
  const uint64_t lanes = args.q.elements / args.q_head_dim;
  const uint64_t max_bytes = handlers_->options->max_message_bytes;
  const auto bytes = [&](uint64_t value_dim) {
    return lanes * (value_dim * DTypeBytes(step_.output_dtype) + sizeof(float));
  };
  uint64_t value_dim = std::min<uint64_t>(args.v_value_dim, kHeadDimMax);
  if (value_dim == 0 && bytes(kHeadDimMax) > max_bytes) {
    for (const engine::DecodeRow& row : args.rows) {
      const auto info = handlers_->engine->Info(tenant_, row.sequence_id);
      if (info.ok()) value_dim = std::max<uint64_t>(value_dim, info->args.shape.value_dim);
    }
  }
  if (bytes(value_dim) <= max_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("max_message_bytes: the reply would have ",
                                                   bytes(value_dim), " bytes; allowed are ",
                                                   max_bytes));
}

void DecodeReactor::Refuse(const absl::Status& status) {
  step_code_ = status.code();
  reply_.Refuse(step_id_, status);
}

void DecodeReactor::WriteReply() {
  const MutexLock lock(mutex_);
  CHECK(state_ == State::kStepping) << "a reply without a message";
  if (!abort_status_.ok() || cancelled_.load()) {
    RecordStep();
    return FinishLocked(abort_status_.ok() ? ClientGone() : abort_status_);
  }
  reply_.Serialize(Micros(queue_time_), Micros(engine_time_), &reply_bytes_);
  state_ = State::kWriting;
  write_start_ = Clock::now();
  StartWrite(&reply_bytes_);
}

void DecodeReactor::OnWriteDone(bool ok) {
  RecordStep();  // here, so that the client does not wait for it
  const MutexLock lock(mutex_);
  CHECK(state_ == State::kWriting);
  if (!abort_status_.ok()) return FinishLocked(abort_status_);
  if (!ok) return FinishLocked(ClientGone());
  if (stop_requested_) return FinishLocked(ShuttingDown());
  ReleaseLargeMessages();
  state_ = State::kReading;
  StartRead(&request_bytes_);
}

void DecodeReactor::RecordStep() {
  Metrics* const metrics = handlers_->metrics;
  metrics->OnStep(step_code_, step_code_ == absl::StatusCode::kOk ? &result_ : nullptr,
                  {step_.rows, handlers_->options->max_sequence_tokens});
  metrics->OnStage(Stage::kQueue, queue_time_);
  metrics->OnStage(Stage::kEngine, engine_time_);
  metrics->OnStage(Stage::kRpc, Clock::now() - arrival_ - queue_time_ - engine_time_);
}

void DecodeReactor::ReleaseLargeMessages() {
  HeapTrimmer* const trimmer = handlers_->trimmer;
  reply_bytes_.Clear();
  if (!ReleaseLarge(&request_, trimmer)) request_.Clear();
  if (reply_.ReleaseLarge(trimmer)) result_ = engine::DecodeResult();
}

void DecodeReactor::OnCancel() { cancelled_.store(true); }

void DecodeReactor::OnDone() {
  const std::shared_ptr<DecodeReactor> self = std::move(self_);  // may be the last reference
  {
    const MutexLock lock(mutex_);
    CHECK(state_ == State::kFinished) << "a stream is over that did not finish";
  }
  handlers_->metrics->OnRpc("Decode", CodeOfEnd(final_status_, *context_));
  handlers_->streams->Remove(this);
}

void DecodeReactor::Stop() {
  const MutexLock lock(mutex_);
  stop_requested_ = true;
  if (state_ == State::kReading) FinishLocked(ShuttingDown());
}

void DecodeReactor::Abort(const absl::Status& status) {
  const MutexLock lock(mutex_);
  AbortLocked(status);
}

void DecodeReactor::CheckReply(Clock::time_point oldest) {
  const MutexLock lock(mutex_);
  if (state_ != State::kWriting || write_start_ > oldest || !abort_status_.ok()) return;
  handlers_->metrics->OnRejected(Rejection::kReplyTimeout);
  AbortLocked(absl::ResourceExhaustedError(absl::StrCat(
      "reply_timeout_s: a reply was left unread for ", handlers_->options->reply_timeout_s, " s")));
}

// Finish alone would wait behind the reply that nobody reads; cancelling the call with a status
// sends the status past it. The operation in flight then fails, and its callback finishes.
void DecodeReactor::AbortLocked(const absl::Status& status) {
  if (state_ == State::kFinished || !abort_status_.ok()) return;
  abort_status_ = status;
  cancelled_.store(true);
  const grpc::Status converted = ToGrpc(status);
  grpc_call_cancel_with_status(context_->c_call(),
                               static_cast<grpc_status_code>(converted.error_code()),
                               converted.error_message().c_str(), nullptr);
}

void DecodeReactor::FinishLocked(const absl::Status& status) {
  CHECK(state_ != State::kFinished) << "a stream finishes twice";
  state_ = State::kFinished;
  final_status_ = status;
  if (!handlers_->ends->Enqueue(&end_)) End();  // there is room for every stream's one end
}

// The stream lets its sequences go before the client can see that it has ended. The object may be
// gone when this returns.
void DecodeReactor::End() {
  handlers_->engine->ReleaseWriter(writer_);
  Finish(ToGrpc(final_status_));
}

}  // namespace attnd::server
