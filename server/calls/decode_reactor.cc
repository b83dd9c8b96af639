// SPDX-License-Identifier: Apache-2.0
#include "server/calls/decode_reactor.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/model_shape.h"
#include "common/status.h"
#include "glog/logging.h"
#include "grpc/grpc.h"
#include "server/calls/memory_pass.h"
#include "server/calls/memory_plane.h"
#include "server/calls/round_trip.h"

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
  is_step_ = true;
  {
    const MutexLock lock(mutex_);
    if (state_ == State::kFinished) return;
    CHECK(state_ == State::kReading);
    if (!ok) return FinishLocked(EndOfMessages());
    state_ = State::kStepping;
  }
  // A pass has its place: refusing one of its layers would waste those before.
  const auto place = pass_ != nullptr ? StepExecutor::Place::kAlways : StepExecutor::Place::kIfFree;
  if (handlers_->steps->Submit(this, place)) return;
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
  switch (std::exchange(work_, Work::kMessage)) {
    case Work::kMessage:
      if (!TakeMessage()) return;
      if (request_.complete_prefills_size() > 0) return QueuePrefills();
      if (request_.begin_pass().has_memory() || request_.has_round_trip()) {
        return QueueMemoryPass();
      }
      return MayReadDisk() ? StepOnDisk() : Step();
    case Work::kDiskStep:
      return Step();
    case Work::kPrefills:
      return CompletePrefills();
    case Work::kMemoryPass:
      return AnswerMemoryPass();
  }
}

void DecodeReactor::StepOnDisk() {
  const bool continues = request_.rows_size() == 0;
  work_ = Work::kDiskStep;
  if (handlers_->disk_steps->Enqueue(
          this, continues ? StepExecutor::Place::kAlways : StepExecutor::Place::kIfFree)) {
    return;
  }
  work_ = Work::kMessage;
  RefuseQueued();
}

void DecodeReactor::Step() {
  const Clock::time_point start = Clock::now();
  queue_time_ = start - arrival_;
  engine_time_ = Clock::duration::zero();
  if (const absl::Status status = Answer(); !status.ok()) Refuse(status);
  if (PassIsComplete()) pass_.reset();
  WriteReply();
}

bool DecodeReactor::MayReadDisk() const {
  engine::Engine* const engine = handlers_->engine;
  if (request_.rows_size() == 0) {
    return pass_ != nullptr &&
           std::any_of(step_.rows.begin(), step_.rows.end(), [&](const engine::DecodeRow& row) {
             return engine->MayReadDisk(tenant_, row.sequence_id);
           });
  }
  const uint32_t rows_max = handlers_->options->max_rows;  // a message of more is refused
  const int rows = std::min(request_.rows_size(), static_cast<int>(rows_max));
  for (int i = 0; i < rows; ++i) {
    if (engine->MayReadDisk(tenant_, request_.rows(i).sequence_id())) return true;
  }
  return false;
}

absl::Status DecodeReactor::Answer() {
  ATTND_RETURN_IF_ERROR(request_.rows_size() > 0 ? BeginAnswer() : ContinueAnswer());
  reply_.Start(step_id_, step_.output_dtype, PartsOfReply());
  const auto memory = [this](const engine::AnswerExtents& extents) {
    return reply_.Provide(extents);
  };
  const Clock::time_point start = Clock::now();
  absl::Status status =
      pass_ != nullptr ? pass_->Step(step_.args, memory, &result_)
                       : handlers_->engine->Decode(tenant_, writer_, step_.args, memory, &result_);
  if (pass_ != nullptr) pass_->ForgetNextLayer();  // it comes with a message, perhaps late
  engine_time_ = Clock::now() - start;
  if (status.ok() && pass_ != nullptr && pass_options_.stats == v1::Pass::STATS_OF_PASS) {
    pass_stats_.Add(result_);
    status = reply_.Finish(LastLayer() ? pass_stats_.Total(result_) : result_);
  } else if (status.ok()) {
    status = reply_.Finish(result_);
  }
  if (absl::IsResourceExhausted(status)) handlers_->metrics->OnRejected(Rejection::kMemory);
  if (!status.ok()) return PassIsComplete() ? AfterCommit(status) : status;
  step_code_ = absl::StatusCode::kOk;
  return CheckReplyFits();
}

absl::Status DecodeReactor::BeginAnswer() {
  pass_.reset();
  const ServerOptions& options = *handlers_->options;
  ATTND_RETURN_IF_ERROR(FromProto(request_, arrival_, &step_, options.policies));
  step_.args.cancelled = &cancelled_;
  if (request_.has_begin_pass()) {
    ATTND_ASSIGN_OR_RETURN(pass_options_, PassFromProto(request_, arrival_));
  }
  ATTND_RETURN_IF_ERROR(CheckReplySize());
  return request_.has_begin_pass() ? BeginPass() : absl::OkStatus();
}

absl::Status DecodeReactor::BeginPass() {
  step_.args.deadline = Earlier(step_.args.deadline, pass_options_.deadline);
  pass_stats_.Start(step_.rows.size());
  ATTND_ASSIGN_OR_RETURN(
      pass_, handlers_->engine->BeginPass(tenant_, writer_, step_.rows, pass_options_.layers));
  for (engine::DecodeRow& row : step_.rows) row.token_ids = {};  // of this message
  return absl::OkStatus();
}

absl::Status DecodeReactor::ContinueAnswer() {
  if (pass_ == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("rows has 0 entries; allowed are 1..",
                                                   handlers_->options->max_rows,
                                                   ", as the stream is in no pass"));
  }
  if (request_.layer() != pass_->layer()) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer is ", request_.layer(), "; the pass goes on with ", pass_->layer()));
  }
  ATTND_RETURN_IF_ERROR(LaterFromProto(request_, arrival_, &step_));
  step_.args.deadline = Earlier(step_.args.deadline, pass_options_.deadline);
  return CheckReplySize();
}

DecodeReply::Parts DecodeReactor::PartsOfReply() const {
  if (pass_ == nullptr) return {};
  const bool stats = pass_options_.stats == v1::Pass::STATS_EACH_LAYER ||
                     (pass_options_.stats == v1::Pass::STATS_OF_PASS && LastLayer());
  return {stats ? ReplyRows::kAll : ReplyRows::kIfFaulty, pass_options_.want_lse};
}

// Statistics and refusals of many rows count, too: what CheckReplySize cannot foresee.
absl::Status DecodeReactor::CheckReplyFits() const {
  const uint64_t bytes = reply_.ByteSize() + DecodeReply::kTimesBytesMax;
  const uint64_t max_bytes = handlers_->options->max_message_bytes;
  if (bytes <= max_bytes) return absl::OkStatus();
  handlers_->metrics->OnRejected(Rejection::kMessage);
  const char* tokens = "";
  if (pass_ == nullptr) tokens = "; the step's tokens have been appended";
  if (pass_ != nullptr && !PassIsComplete()) tokens = "; the pass is given up";
  const absl::Status status = absl::ResourceExhaustedError(absl::StrCat(
      "max_message_bytes: the reply has ", bytes, " bytes; allowed are ", max_bytes, tokens));
  return PassIsComplete() ? AfterCommit(status) : status;
}

// The reply of the last layer is refused, not the layer.
absl::Status DecodeReactor::AfterCommit(const absl::Status& status) {
  return {status.code(), absl::StrCat(status.message(),
                                      "; the pass is complete and its tokens are committed: "
                                      "repeat the pass to learn its answers")};
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
  handlers_->metrics->OnRejected(Rejection::kMessage);
  return absl::ResourceExhaustedError(absl::StrCat("max_message_bytes: the reply would have ",
                                                   bytes(value_dim), " bytes; allowed are ",
                                                   max_bytes));
}

void DecodeReactor::QueuePrefills() {
  pass_.reset();
  is_step_ = false;
  if (const absl::Status status = CheckPrefills(); !status.ok()) {
    Refuse(status);
    return WriteReply();
  }
  for (const uint64_t id : request_.complete_prefills()) {
    auto call = handlers_->engine->BeginCall(tenant_, id);
    if (call.ok()) prefill_calls_.push_back(*std::move(call));
  }
  work_ = Work::kPrefills;
  if (handlers_->prefills->Enqueue(this)) {
    if (!cancelled_.load()) return;
    const MutexLock lock(mutex_);
    return LeaveQueueLocked();  // OnCancel may have come before it was queued
  }
  work_ = Work::kMessage;
  prefill_calls_.clear();
  RefuseQueued();
}

absl::Status DecodeReactor::CheckPrefills() const {
  const v1::DecodeRequest& r = request_;
  const bool others = r.rows_size() > 0 || r.has_q() || r.has_k() || r.has_v() ||
                      r.has_begin_pass() || r.layer() != 0 || r.deadline_us() != 0 ||
                      r.output_dtype() != 0 || r.has_round_trip();
  if (others) {
    return absl::InvalidArgumentError(
        "complete_prefills is there beside other fields; allowed is step_id");
  }
  return absl::OkStatus();
}

void DecodeReactor::CompletePrefills() {
  queue_time_ = Clock::now() - arrival_;
  std::vector<absl::StatusOr<engine::PrefillResult>> results;
  for (const uint64_t id : request_.complete_prefills()) results.push_back(CompletePrefill(id));
  engine_time_ = Clock::now() - arrival_ - queue_time_;
  reply_.FinishPrefills(step_id_, results);
  prefill_calls_.clear();
  WriteReply();
}

absl::StatusOr<engine::PrefillResult> DecodeReactor::CompletePrefill(uint64_t sequence_id) {
  auto result = handlers_->engine->FinishPrefill(tenant_, writer_, sequence_id, &cancelled_);
  if (absl::IsResourceExhausted(result.status())) {
    handlers_->metrics->OnRejected(Rejection::kMemory);
  }
  return result;
}

void DecodeReactor::QueueMemoryPass() {
  pass_.reset();
  is_step_ = false;  // its layers are
  if (handlers_->memory == nullptr) {
    Refuse(absl::FailedPreconditionError(
        absl::StrCat(request_.has_round_trip() ? "round_trip" : "begin_pass",
                     ".memory: the server was started without --allow-client-memory")));
    return WriteReply();
  }
  work_ = Work::kMemoryPass;
  if (handlers_->memory->BeginPass(this)) return;
  work_ = Work::kMessage;
  handlers_->metrics->OnRejected(Rejection::kClientMemory);
  Refuse(absl::ResourceExhaustedError(absl::StrCat(
      "max_memory_passes: ", handlers_->options->max_memory_passes, " are under way")));
  WriteReply();
}

void DecodeReactor::AnswerMemoryPass() {
  queue_time_ = engine_time_ = Clock::duration::zero();
  const bool empty = request_.has_round_trip();
  absl::Status status = empty ? MeasureTurns() : RunMemoryPass();
  handlers_->memory->EndPass();
  if (status.ok() && !empty) {
    const bool stats = pass_options_.stats == v1::Pass::STATS_OF_PASS;
    reply_.FinishMemoryPass(step_id_, result_, stats ? ReplyRows::kAll : ReplyRows::kIfFaulty);
    status = CheckReplyFits();
  }
  if (!status.ok()) Refuse(status);
  WriteReply();
}

absl::Status DecodeReactor::RunMemoryPass() {
  ATTND_RETURN_IF_ERROR(FromProto(request_, arrival_, &step_, handlers_->options->policies));
  step_.args.cancelled = &cancelled_;
  ATTND_ASSIGN_OR_RETURN(pass_options_, PassFromProto(request_, arrival_));
  ATTND_ASSIGN_OR_RETURN(const std::unique_ptr<MemoryPass> pass,
                         MemoryPass::Declare({.handlers = handlers_,
                                              .tenant = &tenant_,
                                              .writer = writer_,
                                              .step = &step_,
                                              .options = &pass_options_,
                                              .prompt_rings = &prompt_rings_,
                                              .cancelled = &cancelled_,
                                              .stopping = &stopping_},
                                             request_.begin_pass().memory()));
  absl::Status status = pass->Run(&result_);
  queue_time_ = pass->queue_time();
  engine_time_ = pass->engine_time();
  return status;
}

absl::Status DecodeReactor::MeasureTurns() {
  ATTND_ASSIGN_OR_RETURN(const v1::RoundTrip measured, MeasureRoundTrip({.handlers = handlers_,
                                                                         .tenant = &tenant_,
                                                                         .cancelled = &cancelled_,
                                                                         .stopping = &stopping_},
                                                                        request_));
  reply_.FinishRoundTrip(step_id_, measured);
  return absl::OkStatus();
}

void DecodeReactor::LeaveQueueLocked() {
  if (state_ != State::kStepping || !handlers_->prefills->Withdraw(this)) return;
  FinishLocked(abort_status_.ok() ? ClientGone() : abort_status_);
}

// Gives the pass up, too.
void DecodeReactor::Refuse(const absl::Status& status) {
  pass_.reset();
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
  if (!is_step_) return;
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

void DecodeReactor::OnCancel() {
  cancelled_.store(true);
  const MutexLock lock(mutex_);
  LeaveQueueLocked();
}

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
  stopping_.store(true);
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
  LeaveQueueLocked();
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
  pass_.reset();  // given up, before another writer can come
  handlers_->engine->ReleaseWriter(writer_);
  prefill_calls_.clear();
  Finish(ToGrpc(final_status_));
}

}  // namespace attnd::server
