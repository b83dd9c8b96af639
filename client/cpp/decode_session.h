// SPDX-License-Identifier: Apache-2.0
//
// The implementation of DecodeSession.
#ifndef ATTND_CLIENT_CPP_DECODE_SESSION_H_
#define ATTND_CLIENT_CPP_DECODE_SESSION_H_

#include <functional>
#include <memory>

#include "attnd/v1/attnd.grpc.pb.h"
#include "client/cpp/client.h"
#include "grpcpp/client_context.h"

namespace attnd::client {

// Makes the context of each new stream, with the tenant's metadata.
using ContextMaker = std::function<std::unique_ptr<grpc::ClientContext>()>;

// Opens a Decode stream on `stub`, which must outlive the session. A step is attempted `attempts`
// times, 1 or more.
std::unique_ptr<DecodeSession> MakeDecodeSession(v1::Attnd::Stub* stub, ContextMaker context,
                                                 int attempts);

}  // namespace attnd::client

#endif  // ATTND_CLIENT_CPP_DECODE_SESSION_H_
