// SPDX-License-Identifier: Apache-2.0
//
// Server: the gRPC side of attnd, from listening to the end of the last stream.
//
// What stands between gRPC and the engine is in server/calls. A call goes down this list:
//
//   service.h                says which handler answers which call
//   calls/decode_reactor     a Decode stream: one message read, answered and written at a time
//   calls/append_reactor     an AppendKv stream: chunks, then the prompt's segmenting
//   calls/unary_call         every other call, from its bytes to its reply or its status
//   calls/unary_handlers     what these calls do, without gRPC
//   calls/handler            what the handlers share: HandlerContext, tenants, a stream's end
//   calls/step_executor      decides on which thread work runs; refuses it when the queue is full
//   calls/request_parser     from a request's bytes to its message
//   calls/wire_check         counts a request's fields before anything is parsed
//   calls/conversions        from messages to the engine's types and back: parts of messages;
//   calls/sequence_conversions  messages that open and list sequences;
//   calls/step_conversions   messages of the two streams
//   calls/decode_reply       a Decode reply, made as the bytes that are sent
//   calls/memory_pass        a pass whose layers lie in memory that the client shares
//   calls/memory_plane       the regions of that memory, and the threads that wait for its clients
//   calls/stream_registry    the open streams: their limit, their end, the clock of unread replies
//   calls/open_calls         counts unary calls under way, for a shutdown
//   calls/heap_trimmer       gives the memory of large messages back to the system
//
// Beside it: options/ (flags, limits, presets), metrics/ (Prometheus), net/ (sockets, connections),
// memory/ (the second socket, at which clients register memory).
#ifndef ATTND_SERVER_SERVER_H_
#define ATTND_SERVER_SERVER_H_

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "server/metrics/metrics.h"
#include "server/options/options.h"

namespace attnd::server {

// How long each part of a shutdown may take; together less than the 10 s that an orchestrator is
// promised.
struct ShutdownLimits {
  std::chrono::milliseconds steps{5000};       // steps in flight are answered
  std::chrono::milliseconds cancel{2000};      // cancelled ones end
  std::chrono::milliseconds calls{1000};       // unary calls that run are answered
  std::chrono::milliseconds read{200};         // clients read what was written to them
  std::chrono::milliseconds socket_lock{100};  // whoever starts at a socket of ours sees it taken
  std::chrono::milliseconds server{500};       // gRPC closes its connections
};

// Thread-safety: Start and Shutdown belong to one thread; the server itself answers on threads of
// its own.
class Server {
 public:
  // Listens and answers, health SERVING, when it returns. `options` have passed Validate();
  // `engine` and `metrics` must outlive the server. Fails if an address cannot be had;
  // ResourceExhausted if the system refuses a thread.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       const Machine& machine,
                                                       engine::Engine* engine, Metrics* metrics);
  virtual ~Server() = default;

  // The addresses in use, in the order of the options, port 0 resolved.
  virtual const std::vector<std::string>& addresses() const = 0;

  // Ends everything, in numbered steps; idempotent, and called by the destructor. Steps in flight
  // are answered, streams end with UNAVAILABLE. Logs what had to be cancelled.
  virtual void Shutdown(const ShutdownLimits& limits) = 0;
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_SERVER_H_
