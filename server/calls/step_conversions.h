// SPDX-License-Identifier: Apache-2.0
//
// Messages of the streams, AppendKv and Decode (conversions.h says what is checked here).
#ifndef ATTND_SERVER_CALLS_STEP_CONVERSIONS_H_
#define ATTND_SERVER_CALLS_STEP_CONVERSIONS_H_

#include <chrono>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attnd/v1/attnd.pb.h"
#include "common/dtype.h"
#include "engine/types.h"
#include "server/options/policy_catalog.h"

namespace attnd::server {

// --- From the wire.

// Points into `request`; the views of tensors that lie in shared memory have no data yet.
absl::StatusOr<engine::AppendChunk> FromProto(const v1::AppendKvRequest& request);
// The request's observed_queries, which must be there.
absl::StatusOr<engine::ObservedChunk> ObservedFromProto(const v1::AppendKvRequest& request);

// arrival + deadline_us, or nothing where there is no limit or it lies beyond the clock.
using OptionalTime = std::optional<std::chrono::steady_clock::time_point>;
OptionalTime DeadlineAt(std::chrono::steady_clock::time_point arrival, uint64_t deadline_us);
// The earlier of two deadlines, either of which may be absent.
OptionalTime Earlier(const OptionalTime& a, const OptionalTime& b);

// A Decode message as the engine wants it. A stream keeps one from step to step, so that its memory
// is used again.
struct DecodeStep {
  // Deadline and cancelled included; points into the request and into `rows`.
  engine::DecodeArgs args;
  std::vector<engine::DecodeRow> rows;
  DType output_dtype = DType::kFp32;
  uint64_t deadline_us = 0;  // of each message
};
// Fills `step` from `request`, which must outlive its use. A policy that does not parse is its
// row's fault (precheck); any error returned concerns the message. The tensors of a pass over
// memory have shapes alone: their views have no data yet.
absl::Status FromProto(const v1::DecodeRequest& request,
                       std::chrono::steady_clock::time_point arrival, DecodeStep* step,
                       const PolicyCatalog& policies = PolicyCatalog());
// The same for a later layer of a pass: puts the request's tensors into `step`, which the pass's
// messages before have filled. The rows stay as they are.
absl::Status LaterFromProto(const v1::DecodeRequest& request,
                            std::chrono::steady_clock::time_point arrival, DecodeStep* step);

// A pass as its first message declares it.
struct PassOptions {
  uint32_t layers = 0;
  OptionalTime deadline;  // of the whole pass
  bool want_lse = false;
  v1::Pass::Stats stats = v1::Pass::STATS_OF_PASS;
};
// InvalidArgument for the pass's fields, and if the message is not of layer 0.
absl::StatusOr<PassOptions> PassFromProto(const v1::DecodeRequest& request,
                                          std::chrono::steady_clock::time_point arrival);

// --- To the wire.

// Which rows a reply has: all, with statistics; or only if one is not OK, then all, without.
enum class ReplyRows { kAll, kIfFaulty };
// Fills the rows of `reply` and nothing else. Memory of an earlier reply is used again. The reply's
// tensors are never messages (server/calls/decode_reply.h).
void ToProto(const engine::DecodeResult& result, ReplyRows rows, v1::DecodeResponse* reply);
void ToProto(const engine::PrefillResult& result, v1::AppendKvResponse* reply);

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_STEP_CONVERSIONS_H_
