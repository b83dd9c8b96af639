// SPDX-License-Identifier: Apache-2.0
//
// The server's connections at its end. gRPC answers a call that comes while it shuts down with
// CANCELLED, which would tell the client that the client itself had cancelled it. So before gRPC
// shuts down, nothing may come any more: the sockets are shut down below it, and a client whose
// call had no answer is told UNAVAILABLE by its own gRPC.
#ifndef ATTND_SERVER_NET_CONNECTIONS_H_
#define ATTND_SERVER_NET_CONNECTIONS_H_

#include <chrono>
#include <vector>

#include "server/options/options.h"

namespace attnd::server {

// Shuts down this process's sockets at these addresses: those that listen, so that nobody connects
// any more, then the connections, once their clients have read what was written to them or `limit`
// has passed. Without that wait a client that happens to write learns that the pipe is broken, and
// its gRPC never looks at the status that the server had sent before. The descriptors stay gRPC's,
// which sees their end and closes them.
void ShutdownSockets(const std::vector<ListenAddress>& addresses, std::chrono::milliseconds limit);

}  // namespace attnd::server

#endif  // ATTND_SERVER_NET_CONNECTIONS_H_
