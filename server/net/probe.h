// SPDX-License-Identifier: Apache-2.0
//
// The health probe of `attnd --probe ADDRESS`.
#ifndef ATTND_SERVER_NET_PROBE_H_
#define ATTND_SERVER_NET_PROBE_H_

#include <chrono>
#include <string>

#include "absl/status/status.h"

namespace attnd::server {

// Asks grpc.health.v1 at `address` about the whole server. OK if it answers SERVING within
// `timeout`; Unavailable if it answers anything else or not at all.
absl::Status Probe(const std::string& address, std::chrono::milliseconds timeout);

}  // namespace attnd::server

#endif  // ATTND_SERVER_NET_PROBE_H_
