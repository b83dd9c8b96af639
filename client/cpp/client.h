// SPDX-License-Identifier: Apache-2.0
//
// C++ client of attnd: a thin, typed layer over attnd.v1 with a deadline on every call, retries
// where they are safe, chunked upload of prefilled keys and values, and a streaming session for
// decoding.
//
// Tensors are raw little-endian bytes in row-major order, in the dtype that the model's shape
// names; shapes and limits stand at each function, and for single fields in
// proto/attnd/v1/attnd.proto. Errors are absl::Status with the server's code and message; the codes
// that each call may answer with are in the proto too. Two are the client's own: DeadlineExceeded
// if the server did not answer in time, Unavailable if it cannot be reached.
//
//   auto client = attnd::Client::Connect({.target = "unix:/run/attnd/attnd.sock"});
//   (*client)->OpenSequence(...), (*client)->AppendKv(...)
//   auto session = (*client)->StartDecode();  session->Step(...)
//
// example.cc shows the whole path.
#ifndef ATTND_CLIENT_CPP_CLIENT_H_
#define ATTND_CLIENT_CPP_CLIENT_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attnd/v1/attnd.pb.h"
#include "client/cpp/memory_session.h"

namespace attnd {

struct ClientOptions {
  // unix:PATH or HOST:PORT, as the server's --listen.
  std::string target{};
  // Whose sequences these are; at most 256 bytes, printable ASCII.
  std::string tenant{};
  // Limit of each unary call.
  std::chrono::milliseconds timeout{10'000};
  // Of calls that read or write KV on the server's disk: sealing, and opening with what is there.
  std::chrono::milliseconds disk_timeout{600'000};
  // Largest reply that is accepted.
  uint64_t max_message_bytes = uint64_t{64} << 20;
  // Attempts of a call that may be repeated, and of a decode step; 1 for none. Between two of them
  // is a pause: 20 ms before the second attempt of a call, 50 ms before that of a step; each
  // further one is twice and four times as long.
  int attempts = 4;
};

// Keys and values of tokens [first_position, first_position + tokens) of one layer. The bytes
// belong to the caller.
struct KvBlock {
  uint32_t layer = 0;
  uint64_t first_position = 0;
  uint64_t tokens = 0;
  absl::string_view k;  // [tokens, kv_heads, head_dim]
  absl::string_view v;  // [tokens, kv_heads, value_dim]; empty if the model is latent
};

struct ClientRegion;

struct AppendOptions {
  // Says that every layer is there: the server segments the prompt before it answers.
  bool prefill_complete = true;
  // What the sequence will have at the prompt's end; 0: not known (proto,
  // AppendKvRequest.prompt_tokens).
  uint64_t prompt_tokens = 0;
  // A message stands for about so many bytes of keys and values, at least one token; below the
  // server's max_message_bytes. With `memory` 32 MiB are faster.
  uint64_t chunk_bytes = uint64_t{4} << 20;
  // Limit of the whole upload, segmenting included.
  std::chrono::milliseconds timeout{600'000};
  // Memory that is shared with the server (memory_client.h), in which the blocks' k and v lie: the
  // server takes them from there. They begin at multiples of 64 bytes, and stay as they are until
  // the call returns; after an error unregister the region before anything else is written there,
  // as the server may be about to read it. Null: they are sent.
  const ClientRegion* memory = nullptr;
};

// A Decode stream: send a message for one layer of a batch, wait for its reply. While it lives it
// is the writer of the sequences that it appends to.
//
// Passes: a message with begin_pass declares that the messages of the model's other layers follow,
// which have no rows then, and q, k and v may have data alone (docs in the proto, Decode):
//
//   v1::DecodeRequest request;                       // rows, q, k and v of layer 0
//   request.mutable_begin_pass()->set_layers(layers);
//   session->Step(request, &reply, timeout);
//   for (uint32_t layer = 1; layer < layers; ++layer) {
//     request.Clear();
//     request.set_layer(layer);
//     request.mutable_q()->set_data(...);            // and k, v
//     session->Step(request, &reply, timeout);
//   }
//
// A step that ends with Unavailable (the connection broke, the server restarts) is repeated on a
// new stream, ClientOptions::attempts times in all and within the step's timeout: steps are
// idempotent by sequence, layer and position, so that one whose reply was lost is answered again
// and appends nothing twice. The server may notice the old stream's end later than the client: a
// repeated step whose rows are ABORTED, because the old stream still writes, is repeated once more.
// Within a pass all of its messages are repeated, of which the session keeps copies. A pass of more
// than kRepeatedBytesMax is not repeated, nor one that a row has left, nor one whose earlier
// layers now fail: the step is Unavailable, and the caller may repeat the pass in a new session.
// A server that was restarted has lost its sequences: their rows are then NOT_FOUND.
//
// Not thread-safe. Must not outlive its Client.
class DecodeSession {
 public:
  static constexpr uint64_t kRepeatedBytesMax = uint64_t{64} << 20;

  // Ends the stream, without waiting for anything in flight. A pass under way is given up.
  virtual ~DecodeSession() = default;
  DecodeSession(const DecodeSession&) = delete;
  DecodeSession& operator=(const DecodeSession&) = delete;

  // OK means that a reply came: its own status, and each row's, still say how the step went. A step
  // is safe to repeat with the same content, on this stream or another (docs in the proto,
  // DecodeRow.position). DeadlineExceeded if no reply came within `timeout`, repetitions included;
  // otherwise the status with which the stream ended, and Unavailable after the last attempt. After
  // any error the session is of no further use.
  virtual absl::Status Step(const v1::DecodeRequest& request, v1::DecodeResponse* reply,
                            std::chrono::milliseconds timeout) = 0;

  // Says that no message follows and waits for the server's status.
  virtual absl::Status Finish(std::chrono::milliseconds timeout) = 0;

 protected:
  DecodeSession() = default;
};

// Thread-safety: all methods may be called from any thread, several at once.
class Client {
 public:
  // Does not wait for the server: the first call, or WaitHealthy, does. InvalidArgument for options
  // that cannot work.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ClientOptions& options);
  virtual ~Client() = default;
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Waits until grpc.health.v1 answers SERVING for attnd.v1.Attnd. DeadlineExceeded otherwise.
  virtual absl::Status WaitHealthy(std::chrono::milliseconds timeout) = 0;

  // Repeated after Unavailable, as they change nothing; the timeout covers all attempts.
  virtual absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo() = 0;
  // All of the tenant's sequences, page by page.
  virtual absl::StatusOr<std::vector<v1::SequenceInfo>> ListSequences() = 0;
  virtual absl::StatusOr<std::vector<v1::SealedSequence>> ListSealed() = 0;

  // Never repeated: an answer that was lost may have had its effect.
  virtual absl::StatusOr<v1::OpenSequenceResponse> OpenSequence(
      const v1::OpenSequenceRequest& request) = 0;
  virtual absl::StatusOr<v1::TruncateSequenceResponse> TruncateSequence(
      const v1::TruncateSequenceRequest& request) = 0;
  virtual absl::StatusOr<v1::ForkSequenceResponse> ForkSequence(
      const v1::ForkSequenceRequest& request) = 0;
  virtual absl::Status CloseSequence(uint64_t sequence_id) = 0;
  // Repeated after Unavailable. For pauses longer than OpenSequenceRequest.lease_seconds; any other
  // call that names the sequence renews its lease, too.
  virtual absl::StatusOr<v1::RenewLeaseResponse> RenewLease(uint64_t sequence_id) = 0;
  virtual absl::StatusOr<v1::SealSequenceResponse> SealSequence(uint64_t sequence_id) = 0;
  virtual absl::Status DropSealed(uint64_t sealed_id) = 0;

  // Uploads `blocks` in their order, cut into messages of about chunk_bytes. `token_ids`: none, or
  // the ids of the tokens of the first layer among the blocks, in the blocks' order.
  // InvalidArgument before anything is sent if a block's bytes do not match `shape`, or do not lie
  // in options.memory as they should. Never repeated
  // by itself; the caller may, after an error, with the same content: what the server has is
  // compared and accepted. Once the prefill is complete there is nothing to repeat:
  // FailedPrecondition.
  virtual absl::StatusOr<v1::AppendKvResponse> AppendKv(uint64_t sequence_id,
                                                        const v1::ModelShape& shape,
                                                        std::span<const KvBlock> blocks,
                                                        std::span<const uint32_t> token_ids,
                                                        const AppendOptions& options) = 0;

  // Opens a Decode stream, without waiting. The server may be away: the first step tries again.
  virtual std::unique_ptr<DecodeSession> StartDecode() = 0;
  // Registers memory that client and server share, and opens a Decode stream for passes over it.
  // The server must run on this machine, for this user, with --allow-client-memory. InvalidArgument
  // for options that cannot work and for targets other than unix:PATH; Unavailable if nobody
  // listens for memory there; otherwise as the proto's RegisterRegionRequest.
  virtual absl::StatusOr<std::unique_ptr<MemorySession>> StartMemoryDecode(
      const MemorySessionOptions& options) = 0;

 protected:
  Client() = default;
};

}  // namespace attnd

#endif  // ATTND_CLIENT_CPP_CLIENT_H_
