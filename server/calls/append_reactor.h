// SPDX-License-Identifier: Apache-2.0
//
// AppendReactor: one AppendKv stream.
#ifndef ATTND_SERVER_CALLS_APPEND_REACTOR_H_
#define ATTND_SERVER_CALLS_APPEND_REACTOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "attnd/v1/attnd.pb.h"
#include "common/mutex.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_callback.h"
#include "server/calls/handler.h"

namespace attnd::server {

// Reads a chunk, has it appended, and only then reads the next, so that a client cannot send faster
// than chunks are appended. After the last chunk a finished prefill is segmented, by an executor of
// its own.
//
//   kReading --chunk--> kAppending --taken--> kReading ...
//   kReading --end of messages--> kCompleting --answer made--> kFinished
//   kCompleting --client gone while the prompt waits for its turn--> kFinished
//   any state --error--> kFinished --on a thread for ends: ReleaseWriter, Finish--> OnDone
//
// Threads and lifetime as in DecodeReactor.
class AppendReactor final : public grpc::ServerReadReactor<grpc::ByteBuffer>,
                            public ManagedStream,
                            private StepExecutor::Task {
 public:
  // Starts the stream, or ends it if the registry refuses it. The result belongs to itself.
  static AppendReactor* Start(HandlerContext* handlers, grpc::CallbackServerContext* context,
                              grpc::ByteBuffer* reply);

  AppendReactor(HandlerContext* handlers, grpc::CallbackServerContext* context,
                grpc::ByteBuffer* reply);

  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void Stop() override;
  void Abort(const absl::Status& status) override;
  void CheckReply(std::chrono::steady_clock::time_point) override {}  // one reply, at the end

 private:
  friend class StreamEnd<AppendReactor>;
  enum class State : uint8_t { kReading, kAppending, kCompleting, kFinished };

  void Run() override;
  // From the first message on, which may wait for its turn.
  void HoldLease();
  void TakeMessage();
  // Parses the message, checks the fields that a stream may set only once, then takes the message's
  // parts.
  absl::Status BeginMessage();
  // Takes the observed queries and the chunk that the message carries. A second call for the same
  // message takes the parts that the first call did not take.
  absl::Status TakeParts();
  absl::Status Observe();
  absl::Status AppendChunk();
  absl::Status CheckSequenceId();
  absl::Status Complete();
  absl::Status WhyUnfinished(const absl::Status& status) const;
  // Adds to `status` which message failed.
  absl::Status DescribeChunk(const absl::Status& status) const;
  // Hands the work of `state` to its executor, or ends the stream if the queue is full.
  void Submit(State state);
  // Ends the stream if its finished prompt still waits in the queue, so that a client that has gone
  // does not hold its sequence until the prompt's turn.
  void LeaveQueueLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The chunk was taken: reads the next, or ends.
  void Continue(const absl::Status& status);
  void FinishLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End();

  HandlerContext* const handlers_;
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer* const reply_;  // belongs to gRPC; lives until OnDone
  const engine::WriterId writer_;
  std::string tenant_;  // constant after Start
  std::shared_ptr<AppendReactor> self_;
  StreamEnd<AppendReactor> end_{this};

  std::atomic<bool> cancelled_{false};

  // Belong to gRPC while reading, to the work otherwise.
  grpc::ByteBuffer bytes_;  // of a message that has not been parsed
  v1::AppendKvRequest request_;
  bool parsed_ = false;  // request_ is the message
  uint64_t messages_ = 0;
  uint64_t sequence_id_ = 0;
  engine::Lease::Call lease_call_;  // until the stream ends
  bool prefill_complete_ = false;
  bool observed_ = false;        // the engine has this message's observed queries
  bool waits_for_room_ = false;  // the message was handed on to HandlerContext::room_waits

  Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kReading;
  bool stop_requested_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status abort_status_ ABSL_GUARDED_BY(mutex_);
  absl::Status final_status_;  // written before Finish
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_APPEND_REACTOR_H_
