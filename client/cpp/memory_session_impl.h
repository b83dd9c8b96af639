// SPDX-License-Identifier: Apache-2.0
//
// The implementation of MemorySession.
#ifndef ATTND_CLIENT_CPP_MEMORY_SESSION_IMPL_H_
#define ATTND_CLIENT_CPP_MEMORY_SESSION_IMPL_H_

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "attnd/v1/attnd.grpc.pb.h"
#include "client/cpp/decode_session.h"
#include "client/cpp/memory_session.h"

namespace attnd::client {

// Registers a region at options.socket, which is not empty, and opens a Decode stream on `stub`,
// which must outlive the session. InvalidArgument for options that cannot work.
absl::StatusOr<std::unique_ptr<MemorySession>> MakeMemorySession(
    v1::Attnd::Stub* stub, std::unique_ptr<grpc::ClientContext> context, const std::string& tenant,
    const MemorySessionOptions& options, std::chrono::milliseconds timeout);

}  // namespace attnd::client

#endif  // ATTND_CLIENT_CPP_MEMORY_SESSION_IMPL_H_
