// SPDX-License-Identifier: Apache-2.0
//
// MemoryClient: registers memory at a server's second socket (proto/attnd/v1/memory.proto). A
// MemorySession does so by itself; this class is for those who lay their memory out otherwise.
#ifndef ATTND_CLIENT_CPP_MEMORY_CLIENT_H_
#define ATTND_CLIENT_CPP_MEMORY_CLIENT_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attnd/v1/memory.pb.h"
#include "common/owned_fd.h"
#include "plane/region.h"

namespace attnd {

// A region as its client has it. The memory stays mapped for as long as this lives; passes may use
// it until it is unregistered or its MemoryClient ends.
struct ClientRegion {
  uint64_t id = 0;
  std::unique_ptr<plane::Region> memory;  // all zero at first
};

// One connection. Its end, also by the client's death, unregisters its regions. Not thread-safe.
class MemoryClient {
 public:
  // `socket`: the second socket's path. InvalidArgument if it is too long, Unavailable if nobody
  // listens there. Each call waits `timeout` at most.
  static absl::StatusOr<std::unique_ptr<MemoryClient>> Connect(const std::string& socket,
                                                               std::chrono::milliseconds timeout);
  // "PATH.memory" of a target "unix:PATH"; InvalidArgument for others.
  static absl::StatusOr<std::string> SocketOf(const std::string& target);
  MemoryClient(const MemoryClient&) = delete;
  MemoryClient& operator=(const MemoryClient&) = delete;

  // The server's status, as memory.proto says; Unavailable if the connection broke,
  // DeadlineExceeded if no answer came in time: the client is of no further use then.
  absl::StatusOr<ClientRegion> Register(uint64_t bytes, const std::string& tenant);
  absl::Status Unregister(uint64_t region_id);
  absl::StatusOr<std::vector<v1::RegionInfo>> List();

 private:
  explicit MemoryClient(OwnedFd socket) : socket_(std::move(socket)) {}
  absl::StatusOr<v1::MemoryReply> Call(const v1::MemoryRequest& request, OwnedFd* descriptor);

  const OwnedFd socket_;
};

}  // namespace attnd

#endif  // ATTND_CLIENT_CPP_MEMORY_CLIENT_H_
