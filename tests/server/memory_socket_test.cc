// SPDX-License-Identifier: Apache-2.0
//
// Goal: the second socket answers its own user's clients alone, any bytes at all, and keeps nothing
// of a client that is gone. Method: the socket over a table of this test's, with clients that speak
// it right and wrong.
#include "server/memory/memory_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/cpp/memory_client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/memory/memory_calls.h"
#include "tests/server/test_server.h"
#include "tests/server/within.h"

namespace attnd::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

class MemorySocketTest : public ::testing::Test {
 protected:
  void Listen(uint32_t clients_max = 4, uid_t user = geteuid()) {
    auto socket = server::MemorySocket::Listen({.path = path_,
                                                .user = user,
                                                .clients_max = clients_max,
                                                .on_full = [this] { ++refused_; }},
                                               &regions_);
    ASSERT_TRUE(socket.ok()) << socket.status();
    socket_ = *std::move(socket);
  }
  std::unique_ptr<MemoryClient> NewClient() {
    auto client = MemoryClient::Connect(path_, 10s);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }
  // A connection without a client's manners.
  OwnedFd Connect() {
    OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  }
  static v1::MemoryReply Ask(const OwnedFd& fd, const std::string& packet) {
    EXPECT_EQ(send(fd.get(), packet.data(), packet.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(packet.size()));
    std::array<char, 4096> bytes;
    const ssize_t received = recv(fd.get(), bytes.data(), bytes.size(), 0);
    v1::MemoryReply reply;
    EXPECT_TRUE(received > 0 && reply.ParseFromArray(bytes.data(), static_cast<int>(received)));
    return reply;
  }
  static size_t OpenDescriptors() {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return static_cast<size_t>(std::distance(begin(all), end(all)));
  }

  TempDir directory_;
  const std::string path_ = directory_.path() + "/run/attnd.sock.memory";
  plane::RegionTable regions_{
      {.bytes_max = 1 << 20, .regions_max = 100, .client_regions_max = server::kClientRegionsMax}};
  std::atomic<int> refused_{0};
  std::unique_ptr<server::MemorySocket> socket_;
};

TEST_F(MemorySocketTest, RegionsAreRegisteredListedAndUnregistered) {
  Listen();
  const auto client = NewClient(), other = NewClient();
  const auto region = client->Register(5000, "");
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ(region->memory->bytes(), 8192u);
  ASSERT_TRUE(other->Register(1, "").ok());
  const auto listed = client->List();
  ASSERT_TRUE(listed.ok());
  ASSERT_EQ(listed->size(), 1u);
  EXPECT_EQ(listed->at(0).region_id(), region->id);
  EXPECT_EQ(listed->at(0).bytes(), 8192u);
  EXPECT_FALSE(listed->at(0).in_use());
  {
    const auto use = regions_.Use("region_id", "", region->id);
    ASSERT_TRUE(use.ok());
    region->memory->data()[100] = std::byte{9};
    EXPECT_EQ(use->data()[100], std::byte{9});
    EXPECT_TRUE(client->List()->at(0).in_use());
  }
  EXPECT_TRUE(absl::IsNotFound(other->Unregister(region->id)));
  EXPECT_TRUE(client->Unregister(region->id).ok());
  EXPECT_TRUE(absl::IsNotFound(client->Unregister(region->id)));
  EXPECT_TRUE(client->List()->empty());
  EXPECT_TRUE(absl::IsInvalidArgument(client->Register(0, "").status()));
  EXPECT_THAT(std::string(client->Register(2 << 20, "").status().message()),
              HasSubstr("client_memory_bytes"));
  EXPECT_THAT(std::string(client->Register(1, std::string(257, 'x')).status().message()),
              HasSubstr("tenant has 257 bytes; allowed are 0..256"));
}

TEST_F(MemorySocketTest, AClientThatGoesTakesItsRegionsAlong) {
  Listen();
  auto client = NewClient();
  for (int i = 0; i < 64; ++i) ASSERT_TRUE(client->Register(4096, "").ok()) << i;
  EXPECT_THAT(std::string(client->Register(4096, "").status().message()),
              HasSubstr("this client has registered 64 regions; allowed are 64"));
  EXPECT_EQ(client->List()->size(), 64u);  // fits in a packet
  EXPECT_EQ(regions_.usage().regions, 64u);
  client.reset();
  EXPECT_TRUE(Within([&] { return regions_.usage().bytes == 0; }));
  // So do those that are there when the server goes, and the socket's file.
  client = NewClient();
  ASSERT_TRUE(client->Register(4096, "").ok());
  socket_.reset();
  EXPECT_EQ(regions_.usage().bytes, 0u);
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_TRUE(absl::IsUnavailable(client->List().status()));
}

TEST_F(MemorySocketTest, TenThousandRegistrationsLeaveNothing) {
  Listen();
  const auto client = NewClient();
  ASSERT_TRUE(client->Register(4096, "").ok());
  ASSERT_TRUE(client->List().ok());  // by now the server has closed the first region's descriptor
  const size_t descriptors = OpenDescriptors();
  for (int i = 0; i < 10'000; ++i) {
    const auto region = client->Register(4096, "");
    ASSERT_TRUE(region.ok()) << i << ": " << region.status();
    ASSERT_TRUE(client->Unregister(region->id).ok());
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
  EXPECT_EQ(regions_.usage().regions, 1u);
  EXPECT_EQ(regions_.usage().bytes, 4096u);
}

TEST_F(MemorySocketTest, AnotherUserIsRefused) {
  Listen(4, geteuid() + 1);  // this process is of another user than the server then
  const auto refused = NewClient()->Register(4096, "");
  EXPECT_TRUE(absl::IsPermissionDenied(refused.status())) << refused.status();
  EXPECT_EQ(regions_.usage().regions, 0u);
  EXPECT_EQ(socket_->clients(), 0u);
  struct stat info {};
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777u, 0600u);
}

TEST_F(MemorySocketTest, ClientsBeyondTheirLimitAreRefused) {
  Listen(2);
  auto first = NewClient(), second = NewClient();
  ASSERT_TRUE(first->List().ok() && second->List().ok());
  const auto refused = NewClient()->List();
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("max_memory_clients: 2"));
  EXPECT_EQ(refused_, 1);
  first.reset();
  EXPECT_TRUE(Within([&] { return NewClient()->List().ok(); }));
}

TEST_F(MemorySocketTest, AnyBytesAreAnswered) {
  Listen();
  const OwnedFd fd = Connect();
  EXPECT_EQ(Ask(fd, "\xff").status().code(), 3);
  EXPECT_THAT(Ask(fd, std::string(4097, 'x')).status().message(), HasSubstr("4096 bytes"));
  EXPECT_EQ(Ask(fd, std::string(100'000, 'x')).status().code(), 3);
  const v1::MemoryRequest none;
  v1::MemoryRequest list;
  list.mutable_list_regions();
  std::string unknown = none.SerializeAsString() + std::string("\xf8\x7f\x01", 3);
  EXPECT_THAT(Ask(fd, unknown).status().message(), HasSubstr("call is absent"));
  constexpr uint32_t kSeed = 20261125;
  std::mt19937 random(kSeed);
  for (int i = 0; i < 5000; ++i) {
    std::string bytes(1 + random() % 24, 0);
    for (char& byte : bytes) byte = static_cast<char>(random() % 4 == 0 ? random() : random() % 32);
    Ask(fd, bytes);
  }
  EXPECT_EQ(Ask(fd, list.SerializeAsString()).status().code(), 0) << "seed " << kSeed;
}

TEST_F(MemorySocketTest, DescriptorsThatAClientSendsAreClosed) {
  Listen();
  const OwnedFd fd = Connect();
  v1::MemoryRequest list;
  list.mutable_list_regions();
  std::string bytes = list.SerializeAsString();
  Ask(fd, bytes);
  const size_t descriptors = OpenDescriptors();
  for (int i = 0; i < 10; ++i) {
    iovec part = {bytes.data(), bytes.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    const int sent = STDERR_FILENO;
    std::memcpy(CMSG_DATA(head), &sent, sizeof(sent));
    ASSERT_GT(sendmsg(fd.get(), &message, 0), 0);
    std::array<char, 4096> reply;
    ASSERT_GT(recv(fd.get(), reply.data(), reply.size(), 0), 0);
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

// One that never reads its answers is disconnected; the others do not wait for it.
TEST_F(MemorySocketTest, AClientThatDoesNotReadIsDisconnected) {
  Listen();
  const OwnedFd fd = Connect();
  v1::MemoryRequest list;
  list.mutable_list_regions();
  const std::string bytes = list.SerializeAsString();
  const auto start = std::chrono::steady_clock::now();
  while (send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0) {
    ASSERT_LT(std::chrono::steady_clock::now() - start, 20s);
  }
  EXPECT_TRUE(NewClient()->List().ok());
}

TEST_F(MemorySocketTest, AServerThatListensThereStays) {
  Listen();
  plane::RegionTable others({.bytes_max = 1, .regions_max = 1, .client_regions_max = 1});
  const auto second = server::MemorySocket::Listen(
      {.path = path_, .user = geteuid(), .clients_max = 1, .on_full = nullptr}, &others);
  EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
  EXPECT_TRUE(NewClient()->List().ok());
}

}  // namespace
}  // namespace attnd::testing
