// SPDX-License-Identifier: Apache-2.0
#include "server/net/connections.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>

#include "absl/strings/numbers.h"

namespace attnd::server {
namespace {

// Whether the socket's own end is at the address. Of TCP the port alone tells: connections to
// 0.0.0.0 have the address that their client used.
bool IsAt(int fd, const ListenAddress& address) {
  sockaddr_storage bound{};
  socklen_t size = sizeof(bound);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return false;
  if (bound.ss_family == AF_UNIX) {
    const auto* const local = reinterpret_cast<const sockaddr_un*>(&bound);
    const size_t bytes = size - std::min<size_t>(size, offsetof(sockaddr_un, sun_path));
    return address.is_unix() &&
           std::string(local->sun_path, strnlen(local->sun_path, bytes)) == address.path;
  }
  if (address.is_unix()) return false;
  if (bound.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port) == address.port;
  }
  return bound.ss_family == AF_INET6 &&
         ntohs(reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port) == address.port;
}

bool Listens(int fd) {
  int listens = 0;
  socklen_t size = sizeof(listens);
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens != 0;
}

// This process's sockets at the addresses, those that listen or the others.
std::vector<int> Sockets(const std::vector<ListenAddress>& addresses, bool listening) {
  std::vector<int> sockets;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error), end;
       !error && entry != end; entry.increment(error)) {
    int fd = -1;
    if (!absl::SimpleAtoi(entry->path().filename().string(), &fd)) continue;
    const bool ours = std::any_of(addresses.begin(), addresses.end(),
                                  [fd](const ListenAddress& address) { return IsAt(fd, address); });
    if (ours && Listens(fd) == listening) sockets.push_back(fd);
  }
  return sockets;
}

// Whether the peer still has to take bytes that were written to the socket.
bool HasUnread(int fd) {
  int bytes = 0;
  return ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

// Returns when the peers have taken what was written to them, or after `limit`.
void WaitUntilRead(const std::vector<int>& sockets, std::chrono::milliseconds limit) {
  const auto due = std::chrono::steady_clock::now() + limit;
  while (std::any_of(sockets.begin(), sockets.end(), HasUnread) &&
         std::chrono::steady_clock::now() < due) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void ShutdownSockets(const std::vector<ListenAddress>& addresses, std::chrono::milliseconds limit) {
  for (const int fd : Sockets(addresses, /*listening=*/true)) shutdown(fd, SHUT_RDWR);
  const std::vector<int> connections = Sockets(addresses, /*listening=*/false);
  WaitUntilRead(connections, limit);
  for (const int fd : connections) shutdown(fd, SHUT_RDWR);
}

}  // namespace attnd::server
