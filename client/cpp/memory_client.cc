// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/memory_client.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace attnd {
namespace {

constexpr size_t kPacketBytesMax = 4096;

absl::Status SystemError(const char* call) {
  if (errno == EAGAIN || errno == EINPROGRESS) {
    return absl::DeadlineExceededError("the memory socket did not answer in time");
  }
  return absl::UnavailableError(
      absl::StrCat("the memory socket: ", call, ": ", std::strerror(errno)));
}

// Receives a packet, and the descriptor that it may carry. -1 with errno as recvmsg.
ssize_t Receive(int socket, char* packet, size_t packet_bytes, OwnedFd* descriptor) {
  iovec part = {packet, packet_bytes};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t bytes = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (bytes < 0) return bytes;
  const cmsghdr* const head = CMSG_FIRSTHDR(&message);
  if (head != nullptr && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS &&
      head->cmsg_len == CMSG_LEN(sizeof(int))) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(head), sizeof(fd));
    *descriptor = OwnedFd(fd);
  }
  return bytes;
}

}  // namespace

absl::StatusOr<std::string> MemoryClient::SocketOf(const std::string& target) {
  absl::string_view path = target;
  if (!absl::ConsumePrefix(&path, "unix:")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "target is ", target, "; memory is shared over a Unix socket alone, unix:PATH"));
  }
  absl::ConsumePrefix(&path, "//");  // unix:///absolute
  return absl::StrCat(path, ".memory");
}

absl::StatusOr<std::unique_ptr<MemoryClient>> MemoryClient::Connect(
    const std::string& socket, std::chrono::milliseconds timeout) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket.empty() || socket.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("the memory socket's path has ", socket.size(),
                                                   " bytes; allowed are 1..",
                                                   sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, socket.data(), socket.size());
  OwnedFd descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!descriptor.valid()) return SystemError("socket");
  const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(timeout).count();
  const timeval limit = {.tv_sec = static_cast<time_t>(micros / 1'000'000),
                         .tv_usec = static_cast<suseconds_t>(micros % 1'000'000)};
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    setsockopt(descriptor.get(), SOL_SOCKET, option, &limit, sizeof(limit));
  }
  if (connect(descriptor.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) !=
      0) {
    return SystemError("connect");
  }
  return std::unique_ptr<MemoryClient>(new MemoryClient(std::move(descriptor)));
}

absl::StatusOr<v1::MemoryReply> MemoryClient::Call(const v1::MemoryRequest& request,
                                                   OwnedFd* descriptor) {
  const std::string bytes = request.SerializeAsString();
  // A server that has sent the client away may have closed: its reply is there all the same.
  const bool sent = send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
                    static_cast<ssize_t>(bytes.size());
  if (!sent && errno != EPIPE && errno != ECONNRESET) return SystemError("send");
  std::array<char, kPacketBytesMax> packet;
  ssize_t received = Receive(socket_.get(), packet.data(), packet.size(), descriptor);
  if (received < 0 && errno == ECONNRESET) {
    received = Receive(socket_.get(), packet.data(), packet.size(), descriptor);
  }
  if (received < 0) return SystemError("recvmsg");
  v1::MemoryReply reply;
  if (received == 0 || !reply.ParseFromArray(packet.data(), static_cast<int>(received))) {
    return absl::UnavailableError("the memory socket: the server has ended the connection");
  }
  const auto code = static_cast<absl::StatusCode>(reply.status().code());
  if (code != absl::StatusCode::kOk) return absl::Status(code, reply.status().message());
  return reply;
}

absl::StatusOr<ClientRegion> MemoryClient::Register(uint64_t bytes, const std::string& tenant) {
  v1::MemoryRequest request;
  request.mutable_register_region()->set_bytes(bytes);
  request.mutable_register_region()->set_tenant(tenant);
  OwnedFd descriptor;
  const auto reply = Call(request, &descriptor);
  if (!reply.ok()) return reply.status();
  auto memory = plane::Region::Map(descriptor, reply->register_region().bytes());
  if (!memory.ok()) return memory.status();
  return ClientRegion{.id = reply->register_region().region_id(), .memory = *std::move(memory)};
}

absl::Status MemoryClient::Unregister(uint64_t region_id) {
  v1::MemoryRequest request;
  request.mutable_unregister_region()->set_region_id(region_id);
  OwnedFd none;
  return Call(request, &none).status();
}

absl::StatusOr<std::vector<v1::RegionInfo>> MemoryClient::List() {
  v1::MemoryRequest request;
  request.mutable_list_regions();
  OwnedFd none;
  const auto reply = Call(request, &none);
  if (!reply.ok()) return reply.status();
  const auto& regions = reply->list_regions().regions();
  return std::vector<v1::RegionInfo>(regions.begin(), regions.end());
}

}  // namespace attnd
