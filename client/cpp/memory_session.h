// SPDX-License-Identifier: Apache-2.0
//
// MemorySession: decode passes whose q, k, v, out and lse lie in memory that client and server
// share (the proto, PassMemory): per layer no message is sent, and no tensor is serialised.
//
//   auto session = client->StartMemoryDecode({.shape = shape});
//   (*session)->Begin(rows, pass);            // once a token
//   for (uint32_t layer = 0; layer < layers; ++layer) {
//     ... write (*session)->arrays().q, .k, .v ...
//     (*session)->Step(timeout);
//     ... read (*session)->arrays().out, .lse ...
//   }
//   (*session)->reply();                      // the pass's rows and statistics
#ifndef ATTND_CLIENT_CPP_MEMORY_SESSION_H_
#define ATTND_CLIENT_CPP_MEMORY_SESSION_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "attnd/v1/attnd.pb.h"

namespace attnd {

struct MemorySessionOptions {
  // Of the models of all sequences.
  v1::ModelShape shape{};
  // Query tokens of a pass, all rows together, 1 or more.
  uint32_t query_tokens_max = 1;
  // Element types of q and out. Unspecified: the shape's; q's.
  v1::DType query_dtype = v1::DTYPE_UNSPECIFIED;
  v1::DType output_dtype = v1::DTYPE_UNSPECIFIED;
  // How long both sides look for the other's turn without pause before they sleep, up to 10 ms: a
  // shorter round trip for a core on each side.
  std::chrono::microseconds spin{0};
  // The second socket's path; empty: that of the client's target with ".memory" behind it.
  std::string socket{};
};

// One Decode stream and one region. While it lives it is the writer of the sequences that it
// appends to. Not thread-safe. Must not outlive its Client.
//
// Nothing is repeated by itself. A pass that failed was given up, and may be begun again: in this
// session if the error came from the server's reply, else in a new one.
class MemorySession {
 public:
  // Views of the region. Those of the pass under way, or of the last one.
  struct Arrays {
    std::span<std::byte> q;          // [query tokens, query_heads, head_dim] of query_dtype
    std::span<std::byte> k;          // [new tokens, kv_heads, head_dim] of the shape's dtype
    std::span<std::byte> v;          // [new tokens, kv_heads, value_dim]; empty if latent
    std::span<const std::byte> out;  // [query tokens, query_heads, value_dim] of output_dtype
    std::span<const float> lse;      // [query tokens, query_heads]; empty without want_lse
  };

  // Ends the stream and unregisters the region. A pass under way is given up.
  virtual ~MemorySession() = default;
  MemorySession(const MemorySession&) = delete;
  MemorySession& operator=(const MemorySession&) = delete;

  // Declares a pass of the shape's layers over these rows; `pass.layers` and `pass.memory` are set
  // here. deadline_us: as DecodeRequest.deadline_us. Does not wait for the server, whose errors the
  // steps have. InvalidArgument if there are more tokens than query_tokens_max, or none;
  // FailedPrecondition while a pass is under way, or the session is over.
  virtual absl::Status Begin(std::span<const v1::DecodeRow> rows, const v1::Pass& pass,
                             uint64_t deadline_us = 0) = 0;

  // Sends the next layer, whose q, k and v have been written, and waits for its answer: Ring and
  // Wait. OK: out and lse are there, with NaN for rows that have left the pass (failed_rows). After
  // the last layer the pass is committed and reply() is there, too.
  //
  // Otherwise the pass is given up. The status is that of the server's reply, with which the
  // session goes on; or, with which it is over, the status of a stream that ended (Unavailable if
  // the server is gone), or DeadlineExceeded if no answer came within `timeout`.
  absl::Status Step(std::chrono::milliseconds timeout) {
    absl::Status status = Ring();
    return status.ok() ? Wait(timeout) : status;
  }
  // The two halves: between them the caller may do something else. FailedPrecondition out of turn.
  virtual absl::Status Ring() = 0;
  virtual absl::Status Wait(std::chrono::milliseconds timeout) = 0;

  virtual const Arrays& arrays() const = 0;
  // Rows that have left the pass so far.
  virtual uint32_t failed_rows() const = 0;
  // Of the last pass that is over: its rows' status and statistics, as the proto's PassMemory says.
  virtual const v1::DecodeResponse& reply() const = 0;

 protected:
  MemorySession() = default;
};

}  // namespace attnd

#endif  // ATTND_CLIENT_CPP_MEMORY_SESSION_H_
