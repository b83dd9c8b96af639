// SPDX-License-Identifier: Apache-2.0
//
// MemorySocket: the second Unix socket, at which clients register memory
// (proto/attnd/v1/memory.proto).
#ifndef ATTND_SERVER_MEMORY_MEMORY_SOCKET_H_
#define ATTND_SERVER_MEMORY_MEMORY_SOCKET_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attnd/v1/memory.pb.h"
#include "common/owned_fd.h"
#include "plane/region_table.h"

namespace attnd::server {

// One thread answers all connections, one packet after the other. A connection owns the regions
// that it registers; they go when it ends, whatever ends it. A client that does not read is
// disconnected as soon as a reply finds no room.
//
// Thread-safety: Listen and the destructor belong to one thread; the socket answers on a thread of
// its own.
class MemorySocket {
 public:
  struct Options {
    std::string path;
    // Whose processes are answered, as SO_PEERCRED names them: the server's own user.
    uid_t user = 0;
    uint32_t clients_max = 1;
    // Called on the socket's thread when a client or a region is refused for a limit. May be empty.
    std::function<void()> on_full;
  };
  // Makes the socket (mode 0600) and answers when it returns. `regions` outlives the result. As
  // PrepareSocket (server/net/unix_socket.h) if something is in the way; Unavailable if the system
  // refuses the socket, ResourceExhausted if it refuses the thread.
  static absl::StatusOr<std::unique_ptr<MemorySocket>> Listen(const Options& options,
                                                              plane::RegionTable* regions);
  // Disconnects all, which unregisters their regions, and removes the socket.
  ~MemorySocket();
  MemorySocket(const MemorySocket&) = delete;
  MemorySocket& operator=(const MemorySocket&) = delete;

  uint32_t clients() const { return clients_.load(); }

 private:
  struct Connection {
    OwnedFd socket;
    plane::OwnerId owner = 0;
  };

  MemorySocket(const Options& options, plane::RegionTable* regions, OwnedFd listener, OwnedFd wake);
  void Main();
  void Accept();
  // Why a client that has just connected is sent away.
  absl::Status Admit(int socket) const;
  // Sends the reply, and has a refusal counted. False if the client is gone or does not read.
  bool Send(int socket, const v1::MemoryReply& reply, std::span<const OwnedFd> descriptors) const;
  // Answers one packet. False if the connection is over.
  bool Serve(const Connection& connection);
  void End(size_t number);

  const Options options_;
  plane::RegionTable* const regions_;
  const OwnedFd listener_;
  const OwnedFd wake_;  // an eventfd: readable when the thread shall end

  // Of the thread.
  std::vector<Connection> connections_;
  plane::OwnerId next_owner_ = 1;

  std::atomic<uint32_t> clients_{0};
  std::thread thread_;  // last: it uses everything above
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_MEMORY_MEMORY_SOCKET_H_
