// SPDX-License-Identifier: Apache-2.0
//
// Between attnd.v1 messages and the engine's types. No gRPC here: messages only.
//
// What can be wrong with a message is checked once. Here: what the wire's form adds, that is enum
// values, ranks, extents, their products and the lengths of tensors' data, the text of policies,
// fields that exclude one another. In the engine (engine/sequence/decode_batch.h for a step):
// limits of rows and tokens, how tensors divide among the rows, and everything that a sequence must
// be known for. Errors name the field.
#ifndef ATTND_SERVER_CALLS_CONVERSIONS_H_
#define ATTND_SERVER_CALLS_CONVERSIONS_H_

#include <chrono>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/policy/policy.h"
#include "attnd/v1/attnd.pb.h"
#include "engine/types.h"
#include "server/options/policy_catalog.h"

namespace attnd::server {

inline constexpr size_t kFingerprintBytesMax = 256;
inline constexpr uint32_t kShardsMax = 4096;
inline constexpr int kIndexesMax = 8;
inline constexpr uint32_t kListPageMax = 1000;
// A page ends before it, after one sequence at the least. Below the 4 MiB that a gRPC client takes
// unless it is told otherwise.
inline constexpr uint64_t kListPageBytesMax = uint64_t{1} << 20;
// A status message is cut to this many bytes.
inline constexpr size_t kStatusMessageBytesMax = 1024;

// --- From the wire.

// A tensor [tokens, heads, dim] in the message's own memory.
struct Tensor3 {
  engine::TensorView view;
  uint64_t tokens = 0;
  uint64_t heads = 0;
  uint64_t dim = 0;
};
absl::StatusOr<DType> FromProto(v1::DType dtype, absl::string_view field);
// Points into `tensor`. Extents are at least 1, and the data has exactly their product of elements.
absl::StatusOr<Tensor3> FromProto(const v1::Tensor& tensor, absl::string_view field);
// `policies` are the presets that the request may name.
absl::StatusOr<engine::OpenArgs> FromProto(const v1::OpenSequenceRequest& request,
                                           uint64_t max_sequence_tokens,
                                           const PolicyCatalog& policies = PolicyCatalog());
// Points into `request`.
absl::StatusOr<engine::AppendChunk> FromProto(const v1::AppendKvRequest& request);
// Its observed_queries, which it has.
absl::StatusOr<engine::ObservedChunk> ObservedFromProto(const v1::AppendKvRequest& request);

// A Decode message as the engine wants it. Kept from step to step, so that its memory is.
struct DecodeStep {
  // Deadline and cancelled included; points into the request and into `rows`.
  engine::DecodeArgs args;
  std::vector<engine::DecodeRow> rows;
  DType output_dtype = DType::kFp32;
};
// Fills `step` from `request`, which must outlive its use. A policy that does not parse is its
// row's fault (precheck); any error returned concerns the message.
absl::Status FromProto(const v1::DecodeRequest& request,
                       std::chrono::steady_clock::time_point arrival, DecodeStep* step,
                       const PolicyCatalog& policies = PolicyCatalog());

// --- To the wire.

v1::DType ToProto(DType dtype);
void ToProto(const attention::Policy& policy, v1::Policy* out);
void ToProto(const absl::Status& status, v1::Status* out);
// A preset, with what one must know to use it. indexes: Engine::IndexesOf(policy).
void ToProto(const attention::Policy& policy, const attention::IndexSet& indexes,
             v1::PresetInfo* out);
void ToProto(const engine::SequenceInfo& info, v1::SequenceInfo* out);
// Fills the rows of `reply` and nothing else. Memory of an earlier reply is used again. The reply's
// tensors are never messages (server/calls/decode_reply.h).
void ToProto(const engine::DecodeResult& result, v1::DecodeResponse* reply);
// The message cut to kStatusMessageBytesMax without breaking a UTF-8 character.
absl::string_view CutMessage(absl::string_view message);

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_CONVERSIONS_H_
