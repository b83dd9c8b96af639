// SPDX-License-Identifier: Apache-2.0
#include "server/memory/memory_socket.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/file_lock.h"
#include "common/start_thread.h"
#include "common/status.h"
#include "glog/logging.h"
#include "server/memory/memory_calls.h"
#include "server/net/unix_socket.h"

namespace attnd::server {
namespace {

constexpr int kBacklog = 64;
// Between two looks after the system had no descriptor for a client: the client stays in the queue.
constexpr int kFullPauseMs = 100;

absl::Status SystemError(const std::string& path, const char* call) {
  return absl::UnavailableError(
      absl::StrCat("allow_client_memory: ", path, ": ", call, ": ", std::strerror(errno)));
}

absl::StatusOr<OwnedFd> Bind(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  CHECK_LT(path.size(), sizeof(address.sun_path));  // options.cc
  std::memcpy(address.sun_path, path.data(), path.size());
  OwnedFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return SystemError(path, "socket");
  {
    const PrivateUmask mask;
    if (bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      return SystemError(path, "bind");
    }
  }
  if (listen(socket.get(), kBacklog) != 0) return SystemError(path, "listen");
  return socket;
}

// Sends a packet with the descriptors, up to kMemoryDescriptorsMax. False if the client is gone or
// does not read.
bool SendPacket(int socket, const v1::MemoryReply& reply, std::span<const OwnedFd> descriptors) {
  std::string bytes = reply.SerializeAsString();
  iovec part = {bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMemoryDescriptorsMax * sizeof(int))> control{};
  CHECK_LE(descriptors.size(), kMemoryDescriptorsMax);
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::array<int, kMemoryDescriptorsMax> fds{};
    for (size_t i = 0; i < descriptors.size(); ++i) fds[i] = descriptors[i].get();
    std::memcpy(CMSG_DATA(head), fds.data(), descriptors.size() * sizeof(int));
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes.size());
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemorySocket>> MemorySocket::Listen(const Options& options,
                                                                   plane::RegionTable* regions) {
  ATTND_ASSIGN_OR_RETURN(const FileLock lock, PrepareSocket(options.path));  // until it is bound
  ATTND_ASSIGN_OR_RETURN(OwnedFd listener, Bind(options.path));
  OwnedFd wake(eventfd(0, EFD_CLOEXEC));
  if (!wake.valid()) return SystemError(options.path, "eventfd");
  std::unique_ptr<MemorySocket> socket(
      new MemorySocket(options, regions, std::move(listener), std::move(wake)));
  ATTND_ASSIGN_OR_RETURN(socket->thread_, StartThread("for clients that share memory",
                                                      [socket = socket.get()] { socket->Main(); }));
  return socket;
}

MemorySocket::MemorySocket(const Options& options, plane::RegionTable* regions, OwnedFd listener,
                           OwnedFd wake)
    : options_(options),
      regions_(regions),
      listener_(std::move(listener)),
      wake_(std::move(wake)) {}

MemorySocket::~MemorySocket() {
  // 1. Nobody finds the socket any more.
  unlink(options_.path.c_str());
  // 2. The thread ends, and disconnects its clients.
  const uint64_t one = 1;
  CHECK_EQ(write(wake_.get(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  if (thread_.joinable()) thread_.join();
}

void MemorySocket::Main() {
  std::vector<pollfd> events;
  while (true) {
    events.clear();
    events.push_back({.fd = wake_.get(), .events = POLLIN, .revents = 0});
    events.push_back({.fd = listener_.get(), .events = POLLIN, .revents = 0});
    for (const Connection& connection : connections_) {
      events.push_back({.fd = connection.socket.get(), .events = POLLIN, .revents = 0});
    }
    if (poll(events.data(), events.size(), -1) < 0) {
      CHECK_EQ(errno, EINTR) << "poll: " << std::strerror(errno);
      continue;
    }
    if (events[0].revents != 0) break;
    // From the last one, so that those that go do not move others; new ones come after that.
    for (size_t i = connections_.size(); i-- > 0;) {
      if (events[i + 2].revents != 0 && !Serve(connections_[i])) End(i);
    }
    if (events[1].revents != 0) Accept();
  }
  while (!connections_.empty()) End(connections_.size() - 1);
}

void MemorySocket::Accept() {
  OwnedFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      poll(nullptr, 0, kFullPauseMs);
    }
    return;
  }
  if (const absl::Status status = Admit(socket.get()); !status.ok()) {
    Send(socket.get(), MemoryRefusal(status), {});
    return;
  }
  connections_.push_back({.socket = std::move(socket), .owner = next_owner_++});
  clients_.store(static_cast<uint32_t>(connections_.size()));
}

absl::Status MemorySocket::Admit(int socket) const {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 ||
      peer.uid != options_.user) {
    return absl::PermissionDeniedError(absl::StrCat("memory is shared with processes of user ",
                                                    options_.user, " alone; this is one of user ",
                                                    peer.uid));
  }
  if (connections_.size() >= options_.clients_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("max_memory_clients: ", options_.clients_max, " clients are connected"));
  }
  return absl::OkStatus();
}

bool MemorySocket::Send(int socket, const v1::MemoryReply& reply,
                        std::span<const OwnedFd> descriptors) const {
  const auto is_full = [](const v1::Status& status) {
    return static_cast<absl::StatusCode>(status.code()) == absl::StatusCode::kResourceExhausted;
  };
  const bool full = is_full(reply.status()) || is_full(reply.register_region().no_twin());
  if (full && options_.on_full) options_.on_full();
  return SendPacket(socket, reply, descriptors);
}

bool MemorySocket::Serve(const Connection& connection) {
  // One byte more shows that a packet is too long. Descriptors that a client sends are closed by
  // the kernel, as there is no room for them.
  std::array<char, kMemoryPacketBytesMax + 1> packet;
  const ssize_t bytes = recv(connection.socket.get(), packet.data(), packet.size(), MSG_DONTWAIT);
  if (bytes < 0) return errno == EAGAIN || errno == EINTR;
  if (bytes == 0) return false;
  std::vector<OwnedFd> descriptors;
  const v1::MemoryReply reply = AnswerMemoryCall({packet.data(), static_cast<size_t>(bytes)},
                                                 connection.owner, regions_, &descriptors);
  return Send(connection.socket.get(), reply, descriptors);
}

void MemorySocket::End(size_t number) {
  regions_->RemoveOwner(connections_[number].owner);
  connections_[number] = std::move(connections_.back());
  connections_.pop_back();
  clients_.store(static_cast<uint32_t>(connections_.size()));
}

}  // namespace attnd::server
