// SPDX-License-Identifier: Apache-2.0
//
// DecodeStream: one Decode call.
#ifndef ATTND_CLIENT_CPP_DECODE_STREAM_H_
#define ATTND_CLIENT_CPP_DECODE_STREAM_H_

#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "attnd/v1/attnd.grpc.pb.h"
#include "grpcpp/client_context.h"
#include "grpcpp/completion_queue.h"

namespace attnd::client {

// The blocking stream of gRPC cannot wait with a limit, so this one drives a completion queue, on
// the caller's own thread. One message is in flight at a time; its operations are told apart by
// nobody: all of them have ended, or some have not.
//
// After an error the stream is of no further use. Not thread-safe.
class DecodeStream {
 public:
  using Clock = std::chrono::system_clock;

  DecodeStream(v1::Attnd::Stub* stub, std::unique_ptr<grpc::ClientContext> context);
  ~DecodeStream();
  DecodeStream(const DecodeStream&) = delete;
  DecodeStream& operator=(const DecodeStream&) = delete;

  // Sends a message and waits for its reply.
  absl::Status Exchange(const v1::DecodeRequest& request, v1::DecodeResponse* reply,
                        Clock::time_point limit);
  // The same in two parts. `reply` belongs to the stream until Receive returns.
  absl::Status Send(const v1::DecodeRequest& request, v1::DecodeResponse* reply,
                    Clock::time_point limit);
  absl::Status Receive(Clock::time_point limit);
  // Whether Receive would return at once, as the reply is there or the stream is over. Does not
  // wait.
  bool Arrived();

  // Says that no message follows, and waits for the server's status.
  absl::Status Finish(Clock::time_point limit);

 private:
  // Waits for everything that was started, and clears ok_ if any of it failed. When the time is
  // over it cancels the stream, so that nothing is pending in any case: what gRPC reads into
  // belongs to the caller again.
  absl::Status Await(Clock::time_point limit);
  // The status with which the stream ended; only after an operation failed or the last message was
  // sent.
  absl::Status FinalStatus(Clock::time_point limit);

  grpc::CompletionQueue queue_;
  const std::unique_ptr<grpc::ClientContext> context_;
  const std::unique_ptr<grpc::ClientAsyncReaderWriter<v1::DecodeRequest, v1::DecodeResponse>>
      stream_;
  int pending_ = 0;      // operations started and not yet waited for
  bool ok_ = true;       // whether all that ended so far succeeded
  grpc::Status status_;  // filled by gRPC when the stream has ended
  v1::DecodeResponse rest_;
};

}  // namespace attnd::client

#endif  // ATTND_CLIENT_CPP_DECODE_STREAM_H_
