// SPDX-License-Identifier: Apache-2.0
//
// Goal: where the system refuses the GPU backend a thread, what cannot do without it is an error
// that leaves nothing behind, and what only loses speed goes on. Method: the parts that have
// threads, and a backend, over the fake device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "common/aligned_buffer.h"
#include "gpu/fault_watch.h"
#include "gpu/memory/host_mapper.h"
#include "gpu/memory/host_pages.h"
#include "tests/gpu/support.h"
#include "tests/system_faults.h"

namespace attnd::gpu::test {
namespace {

using attnd::test::ThreadsRefused;
using testing::HasSubstr;

constexpr std::chrono::milliseconds kPeriod{1};

void ExpectRefused(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("a thread that watches the GPU for faults"));
}

TEST(RefusedThreadsTest, AWatchWithoutItsThreadIsNone) {
  FakePair fake = MakeFakeDevice(uint64_t{1} << 20);
  const auto start = [&] {
    return FaultWatch::Start(fake.device.get(), kPeriod, [](const absl::Status&) {});
  };
  {
    const ThreadsRefused no_threads;
    ExpectRefused(start().status());
    EXPECT_EQ(no_threads.refused(), 1u);
  }
  EXPECT_EQ(fake.control->allocations(), 0u);
  EXPECT_TRUE(start().ok());
}

// A server that goes on unwatched would hold a GPU closed that has failed under MPS.
TEST(RefusedThreadsTest, ABackendThatCannotWatchIsNone) {
  FakePair fake = MakeFakeDevice(uint64_t{1} << 30);
  CudaBackendOptions options = SmallOptions();
  options.fault_watch_period = kPeriod;
  std::shared_ptr<attention::Backend> cpu = MakeCpu();
  {
    const ThreadsRefused no_threads;
    ExpectRefused(MakeCudaBackend(options, std::move(fake.device), std::move(cpu)).status());
  }
  EXPECT_EQ(fake.control->allocations(), 0u);
}

// Steps map what they read; and the next pages find a thread if there is one again.
TEST(RefusedThreadsTest, WithoutItsThreadNothingIsMappedAhead) {
  FakePair fake = MakeFakeDevice(uint64_t{1} << 20, /*maps_host_memory=*/true);
  const AlignedBuffer memory(8192);
  const auto pages = std::make_shared<HostPages>(
      fake.device.get(), std::span<const std::byte>(memory.data(), memory.size()), 2, 1);
  HostMapper mapper([](const absl::Status&) {});
  {
    const ThreadsRefused no_threads;
    mapper.Add(pages);
    EXPECT_EQ(no_threads.refused(), 1u);
  }
  EXPECT_EQ(fake.control->mapped_bytes(), 0u);
  mapper.Add(pages);
  Await([&] { return fake.control->mapped_bytes() == memory.size(); });
}

}  // namespace
}  // namespace attnd::gpu::test
