// SPDX-License-Identifier: Apache-2.0
//
// grpc.health.v1 without generated code, which the distribution does not ship.
#ifndef ATTND_CLIENT_CPP_HEALTH_H_
#define ATTND_CLIENT_CPP_HEALTH_H_

#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/channel.h"

namespace attnd::client {

// OK if the server answers SERVING for `service` (at most 127 bytes) within `timeout`.
absl::Status CheckHealth(const std::shared_ptr<grpc::Channel>& channel, absl::string_view service,
                         std::chrono::milliseconds timeout);

}  // namespace attnd::client

#endif  // ATTND_CLIENT_CPP_HEALTH_H_
