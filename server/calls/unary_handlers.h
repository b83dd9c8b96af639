// SPDX-License-Identifier: Apache-2.0
//
// The handlers of the unary calls, without gRPC: each checks the request, asks the engine and fills
// the reply.
#ifndef ATTND_SERVER_CALLS_UNARY_HANDLERS_H_
#define ATTND_SERVER_CALLS_UNARY_HANDLERS_H_

#include <atomic>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "attnd/v1/attnd.pb.h"
#include "engine/engine.h"
#include "server/calls/newest_round_trip.h"
#include "server/metrics/metrics.h"
#include "server/options/options.h"

namespace attnd::server {

// "major.minor.patch" of this build.
absl::string_view ServerVersion();

// Thread-safety: all functions may be called from any thread.
struct UnaryContext {
  const ServerOptions& options;
  engine::Engine& engine;
  Metrics& metrics;
  v1::GpuSharing gpu_sharing;
  const NewestRoundTrip& newest_round_trip;
  absl::string_view tenant;
  const std::atomic<bool>* cancelled = nullptr;  // set when the client has gone; may be null
};

absl::Status Handle(const UnaryContext& context, const v1::GetServerInfoRequest& request,
                    v1::GetServerInfoResponse* reply);
absl::Status Handle(const UnaryContext& context, const v1::OpenSequenceRequest& request,
                    v1::OpenSequenceResponse* reply);
absl::Status Handle(const UnaryContext& context, const v1::TruncateSequenceRequest& request,
                    v1::TruncateSequenceResponse* reply);
absl::Status Handle(const UnaryContext& context, const v1::ForkSequenceRequest& request,
                    v1::ForkSequenceResponse* reply);
absl::Status Handle(const UnaryContext& context, const v1::SealSequenceRequest& request,
                    v1::SealSequenceResponse* reply);
absl::Status Handle(const UnaryContext& context, const v1::ListSealedRequest& request,
                    v1::ListSealedResponse* reply);
absl::Status Handle(const UnaryContext& context, const v1::DropSealedRequest& request,
                    v1::DropSealedResponse* reply);
absl::Status Handle(const UnaryContext& context, const v1::CloseSequenceRequest& request,
                    v1::CloseSequenceResponse* reply);
absl::Status Handle(const UnaryContext& context, const v1::RenewLeaseRequest& request,
                    v1::RenewLeaseResponse* reply);
absl::Status Handle(const UnaryContext& context, const v1::ListSequencesRequest& request,
                    v1::ListSequencesResponse* reply);

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_UNARY_HANDLERS_H_
