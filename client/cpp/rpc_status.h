// SPDX-License-Identifier: Apache-2.0
//
// The client's one converter of gRPC statuses.
#ifndef ATTND_CLIENT_CPP_RPC_STATUS_H_
#define ATTND_CLIENT_CPP_RPC_STATUS_H_

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace attnd::client {

inline absl::Status FromGrpc(const grpc::Status& status) {
  return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
}

}  // namespace attnd::client

#endif  // ATTND_CLIENT_CPP_RPC_STATUS_H_
