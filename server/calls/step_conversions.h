// SPDX-License-Identifier: Apache-2.0
//
// Messages of the streams, AppendKv and Decode (conversions.h says what is checked here).
#ifndef ATTND_SERVER_CALLS_STEP_CONVERSIONS_H_
#define ATTND_SERVER_CALLS_STEP_CONVERSIONS_H_

#include <chrono>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attnd/v1/attnd.pb.h"
#include "common/dtype.h"
#include "engine/types.h"
#include "server/options/policy_catalog.h"

namespace attnd::server {

// --- From the wire.

// Points into `request`.
absl::StatusOr<engine::AppendChunk> FromProto(const v1::AppendKvRequest& request);
// The request's observed_queries, which must be there.
absl::StatusOr<engine::ObservedChunk> ObservedFromProto(const v1::AppendKvRequest& request);

// A Decode message as the engine wants it. A stream keeps one from step to step, so that its memory
// is used again.
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

// Fills the rows of `reply` and nothing else. Memory of an earlier reply is used again. The reply's
// tensors are never messages (server/calls/decode_reply.h).
void ToProto(const engine::DecodeResult& result, v1::DecodeResponse* reply);

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_STEP_CONVERSIONS_H_
