// SPDX-License-Identifier: Apache-2.0
//
// DecodeReactor: one Decode stream.
#ifndef ATTND_SERVER_CALLS_DECODE_REACTOR_H_
#define ATTND_SERVER_CALLS_DECODE_REACTOR_H_

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "attnd/v1/attnd.pb.h"
#include "common/mutex.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "server/calls/decode_reply.h"
#include "server/calls/handler.h"
#include "server/calls/memory_pass.h"
#include "server/calls/pass_stats.h"
#include "server/calls/step_conversions.h"

namespace attnd::server {

// Reads a message, has it answered, writes the reply, and only then reads the next: one reply in
// flight.
//
//   kReading --message--> kStepping --reply made--> kWriting --reply written--> kReading ...
//   any state --FinishLocked--> kFinished
//     --on a thread for ends: the pass is given up, ReleaseWriter, Finish--> OnDone
//
// Apart from that a stream is idle or in a pass (the proto, Decode): pass_ is null or not.
//
// Who calls: gRPC's threads (OnReadDone, OnWriteDone, OnCancel, OnDone), a worker or a gRPC thread
// (Run), the registry (Stop, Abort, CheckReply), the thread for ends (End). Finish is called once,
// never while a step runs: so the request, the reply and the engine's pointers into them stay valid
// while the step runs. The object keeps itself alive until OnDone.
class DecodeReactor final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                            public ManagedStream,
                            private StepExecutor::Task {
 public:
  // Starts the stream, or ends it if the registry refuses it. The result belongs to itself.
  static DecodeReactor* Start(HandlerContext* handlers, grpc::CallbackServerContext* context);

  DecodeReactor(HandlerContext* handlers, grpc::CallbackServerContext* context);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void Stop() override;
  void Abort(const absl::Status& status) override;
  void CheckReply(std::chrono::steady_clock::time_point oldest) override;

 private:
  friend class StreamEnd<DecodeReactor>;
  using Clock = std::chrono::steady_clock;
  enum class State : uint8_t { kReading, kStepping, kWriting, kFinished };

  // What Run does next.
  enum class Work : uint8_t { kMessage, kDiskStep, kPrefills, kMemoryPass };

  void Run() override;
  // Parses the message. False if the bytes are no message, or a message that is refused unparsed:
  // then it was answered, or the stream was ended.
  bool TakeMessage();
  // Whether a row may have to wait for the disk.
  bool MayReadDisk() const;
  // Hands the step on to the workers that may wait for the disk.
  void StepOnDisk();
  void Step();
  absl::Status Answer();
  // Fills step_ from a message that begins something, and begins the pass that it declares.
  absl::Status BeginAnswer();
  // Fills step_ from a message that goes on with the pass.
  absl::Status ContinueAnswer();
  absl::Status BeginPass();
  bool LastLayer() const { return pass_options_.layers == request_.layer() + 1; }
  // Whether the stream's pass has answered its last layer.
  bool PassIsComplete() const { return pass_ != nullptr && pass_->layer() == pass_options_.layers; }
  // A refusal of the reply to a complete pass.
  static absl::Status AfterCommit(const absl::Status& status);
  DecodeReply::Parts PartsOfReply() const;
  // Segments the prompts of complete_prefills: has workers do so; does so.
  void QueuePrefills();
  void CompletePrefills();
  absl::Status CheckPrefills() const;
  absl::StatusOr<engine::PrefillResult> CompletePrefill(uint64_t sequence_id);
  // Answers a pass over memory from its declaration to its end, or the turns of a round trip: has a
  // thread do so; does so.
  void QueueMemoryPass();
  void AnswerMemoryPass();
  absl::Status RunMemoryPass();
  absl::Status MeasureTurns();
  // Finishes the stream if it waits for a prefill's worker in vain.
  void LeaveQueueLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckReplySize() const;
  absl::Status CheckReplyFits() const;
  absl::Status EndOfMessages() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Refuse(const absl::Status& status);
  void RefuseQueued();
  // Answers, with `status`, a message whose step did not run.
  void WriteRefusal(const absl::Status& status);
  void WriteReply();
  void RecordStep();
  void ReleaseLargeMessages();
  void AbortLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End();

  HandlerContext* const handlers_;
  grpc::CallbackServerContext* const context_;
  const engine::WriterId writer_;
  std::string tenant_;  // constant after Start
  std::shared_ptr<DecodeReactor> self_;
  StreamEnd<DecodeReactor> end_{this};

  // Set from any thread; the engine looks at it between stages.
  std::atomic<bool> cancelled_{false};
  // Set from any thread; a pass over memory looks at it between turns.
  std::atomic<bool> stopping_{false};
  MemoryPass::PromptRings prompt_rings_;  // of passes over memory

  // Belong to gRPC while reading or writing, to the step while stepping.
  grpc::ByteBuffer request_bytes_;  // of a message that has not been parsed
  grpc::ByteBuffer reply_bytes_;    // of the reply that is being written
  v1::DecodeRequest request_;
  DecodeReply reply_;
  uint64_t step_id_ = 0;
  DecodeStep step_;
  engine::DecodeResult result_;
  absl::StatusCode step_code_ = absl::StatusCode::kOk;
  Clock::time_point arrival_;
  Work work_ = Work::kMessage;
  // The pass that the stream is in; null: idle.
  std::unique_ptr<engine::Pass> pass_;
  PassOptions pass_options_;  // of pass_
  PassStats pass_stats_;      // likewise
  bool is_step_ = false;      // the message asks for a step, and is counted as one
  std::vector<engine::Lease::Call> prefill_calls_;  // while prefills wait or run
  Clock::duration queue_time_{0};
  Clock::duration engine_time_{0};

  Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kReading;
  bool stop_requested_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status abort_status_ ABSL_GUARDED_BY(mutex_);  // why, once aborted
  Clock::time_point write_start_ ABSL_GUARDED_BY(mutex_);
  absl::Status final_status_;  // written before Finish
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_DECODE_REACTOR_H_
