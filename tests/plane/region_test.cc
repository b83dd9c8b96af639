// SPDX-License-Identifier: Apache-2.0
//
// Goal: a region's bytes can be touched for as long as it is mapped, whatever the other side does
// to its file, and a client maps nothing that could shrink. Method: memfds of this process.
#include "plane/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>

#include "gtest/gtest.h"

namespace attnd::plane {
namespace {

TEST(RegionTest, BothSidesSeeTheSameBytes) {
  OwnedFd descriptor;
  const auto server = Region::Create(5000, &descriptor);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ((*server)->bytes(), 8192u);
  const auto client = Region::Map(descriptor, (*server)->bytes());
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_NE((*client)->data(), (*server)->data());
  for (uint64_t i = 0; i < 8192; ++i) ASSERT_EQ((*client)->data()[i], std::byte{0});
  (*client)->data()[8191] = std::byte{7};
  EXPECT_EQ((*server)->data()[8191], std::byte{7});
}

TEST(RegionTest, NobodyCanShrinkItOrMakeItGrow) {
  OwnedFd descriptor;
  const auto region = Region::Create(8192, &descriptor);
  ASSERT_TRUE(region.ok());
  EXPECT_NE(ftruncate(descriptor.get(), 4096), 0);
  EXPECT_NE(ftruncate(descriptor.get(), 16384), 0);
  EXPECT_NE(fcntl(descriptor.get(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  // A hole reads as zeros and can be written.
  std::memset((*region)->data(), 1, 8192);
  ASSERT_EQ(fallocate(descriptor.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 8192), 0);
  EXPECT_EQ((*region)->data()[8191], std::byte{0});
  (*region)->data()[8191] = std::byte{2};
}

TEST(RegionTest, AClientRefusesAFileThatIsShortOrCouldShrink) {
  OwnedFd descriptor;
  ASSERT_TRUE(Region::Create(4096, &descriptor).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(Region::Map(descriptor, 4097).status()));
  const OwnedFd unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), 8192), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(Region::Map(unsealed, 8192).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Region::Map(OwnedFd(), 8192).status()));
}

// Not by asking for too much: the system would end processes before it refuses.
TEST(RegionTest, WhatTheSystemRefusesIsAnError) {
  const OwnedFd next(dup(STDERR_FILENO));
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none = {.rlim_cur = static_cast<rlim_t>(next.get()), .rlim_max = limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  OwnedFd descriptor;
  const auto region = Region::Create(4096, &descriptor);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(region.status())) << region.status();
  EXPECT_FALSE(descriptor.valid());
}

}  // namespace
}  // namespace attnd::plane
