// SPDX-License-Identifier: Apache-2.0
//
// The implementation of DecodeSession.
#ifndef ATTND_CLIENT_CPP_DECODE_SESSION_H_
#define ATTND_CLIENT_CPP_DECODE_SESSION_H_

#include <memory>

#include "attnd/v1/attnd.grpc.pb.h"
#include "client/cpp/client.h"
#include "grpcpp/client_context.h"

namespace attnd::client {

// Opens a Decode stream on `stub`, which must outlive the session.
std::unique_ptr<DecodeSession> MakeDecodeSession(v1::Attnd::Stub* stub,
                                                 std::unique_ptr<grpc::ClientContext> context);

}  // namespace attnd::client

#endif  // ATTND_CLIENT_CPP_DECODE_SESSION_H_
