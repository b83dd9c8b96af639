// SPDX-License-Identifier: Apache-2.0
//
// HandlerContext, and helpers that the handlers of all calls share.
#ifndef ATTND_SERVER_CALLS_HANDLER_H_
#define ATTND_SERVER_CALLS_HANDLER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attnd/v1/attnd.pb.h"
#include "engine/engine.h"
#include "google/protobuf/message.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"
#include "server/calls/heap_trimmer.h"
#include "server/calls/newest_round_trip.h"
#include "server/calls/open_calls.h"
#include "server/calls/request_parser.h"
#include "server/calls/step_executor.h"
#include "server/calls/stream_registry.h"
#include "server/metrics/metrics.h"
#include "server/options/options.h"

namespace attnd::server {

// A stream that waits for its next message keeps no more than this of the last one's memory.
inline constexpr size_t kKeptMessageBytesMax = size_t{256} << 10;

// Unary calls answered at the same time. Few, as most wait for a lock or for memory bandwidth.
inline constexpr uint32_t kCallWorkers = 4;

inline constexpr char kTenantKey[] = "attnd-tenant";
inline constexpr size_t kTenantBytesMax = 256;

class MemoryPlane;

// The parts of a server that handlers use. Owned by Server; outlives every call.
struct HandlerContext {
  const ServerOptions* options = nullptr;
  engine::Engine* engine = nullptr;
  Metrics* metrics = nullptr;
  StreamRegistry* streams = nullptr;
  // Steps and chunks: short.
  StepExecutor* steps = nullptr;
  // Steps that may wait for the disk, so that other steps never wait for them.
  StepExecutor* disk_steps = nullptr;
  // Chunks that wait for room in memory.
  StepExecutor* room_waits = nullptr;
  // Finished prefills: seconds each, so that they never hold a step's worker.
  StepExecutor* prefills = nullptr;
  // Unary calls except GetServerInfo: they may wait for a sequence's lock, or hold the lock while
  // they copy.
  StepExecutor* calls = nullptr;
  // Ends of streams: they may wait for the locks of sequences too. Never full.
  StepExecutor* ends = nullptr;
  // Passes over memory that clients share. Null without allow_client_memory.
  MemoryPlane* memory = nullptr;
  // How the backend shares its GPU; does not change.
  v1::GpuSharing gpu_sharing = v1::GPU_SHARING_UNSPECIFIED;
  // What a client's stream has measured of it.
  NewestRoundTrip newest_round_trip;
  std::atomic<bool> round_trip_under_way{false};
  // From bytes to messages.
  const RequestParser* requests = nullptr;
  HeapTrimmer* trimmer = nullptr;
  // Unary calls that have not been answered yet.
  OpenCalls* open_calls = nullptr;
  std::atomic<engine::WriterId> next_writer{1};
};

// The tenant that a call's metadata names, "" if none. InvalidArgument if it is too long or named
// twice.
absl::StatusOr<std::string> TenantOf(const grpc::CallbackServerContext& context);

// Finds the stream's tenant and registers the stream. On an error the stream is not registered; a
// refusal by the registry is counted.
absl::Status AdmitStream(HandlerContext* handlers, const grpc::CallbackServerContext& context,
                         const std::shared_ptr<ManagedStream>& stream, std::string* tenant);

// Fills `request` as RequestParser::Parse does. A refusal for want of memory is counted.
absl::Status ParseMessage(HandlerContext* handlers, grpc::ByteBuffer* bytes,
                          google::protobuf::Message* request);

// Whole microseconds, as replies give times.
inline uint64_t Micros(std::chrono::nanoseconds time) {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count());
}

// Whether a message of this content keeps more than kKeptMessageBytesMax. Small messages are not
// measured in full: a byte on the wire (an empty row) may be a hundred in memory, but no more.
template <typename Message>
bool KeepsMuch(const Message& message) {
  return message.ByteSizeLong() > kKeptMessageBytesMax / 128 &&
         message.SpaceUsedLong() > kKeptMessageBytesMax;
}

// Frees the memory of a message that has been handled, if it is large.
template <typename Message>
bool ReleaseLarge(Message* message, HeapTrimmer* trimmer) {
  if (!KeepsMuch(*message)) return false;
  const size_t bytes = message->SpaceUsedLong();
  *message = Message();
  trimmer->OnReleased(bytes);
  return true;
}

// Why a stream or a call ends early.
absl::Status ClientGone();
absl::Status ShuttingDown();

// Runs Reactor::End, which releases the stream's sequences and finishes it.
template <typename Reactor>
class StreamEnd final : public StepExecutor::Task {
 public:
  explicit StreamEnd(Reactor* reactor) : reactor_(reactor) {}
  void Run() override { reactor_->End(); }

 private:
  Reactor* const reactor_;
};

// The code that a stream is counted under when it is over. A client that leaves between its last
// message and the answer did not get the answer. A message that is too large looks exactly like
// that, as gRPC refuses the message and ends the stream before the server sees it.
absl::StatusCode CodeOfEnd(const absl::Status& status, const grpc::CallbackServerContext& context);

// Same code; the message cut to what gRPC carries.
grpc::Status ToGrpc(const absl::Status& status);

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_HANDLER_H_
