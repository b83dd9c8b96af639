// SPDX-License-Identifier: Apache-2.0
//
// Goal: why a server ends, and whether a fault of the GPU ends it. Method: the parts of the program
// that decide it.
#include "server/stop_request.h"

#include <csignal>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/backend.h"

namespace attnd::server {
namespace {

TEST(StopRequestTest, TheFirstReasonCounts) {
  StopRequest faulted;
  faulted.OnGpuFault(absl::InternalError("first"));
  faulted.OnSignal(SIGTERM);
  faulted.OnGpuFault(absl::InternalError("second"));
  EXPECT_EQ(faulted.Wait().signal, 0);
  EXPECT_EQ(faulted.Wait().gpu_fault.message(), "first");

  StopRequest asked;
  std::thread thread([&] { asked.OnSignal(SIGINT); });
  EXPECT_EQ(asked.Wait().signal, SIGINT);
  thread.join();
  asked.OnGpuFault(absl::InternalError("too late"));
  EXPECT_EQ(asked.Wait().signal, SIGINT);
  EXPECT_TRUE(asked.Wait().gpu_fault.ok());
}

TEST(GpuFaultChoiceTest, UnderMpsTheServerEndsUnlessToldOtherwise) {
  ServerOptions options;
  EXPECT_FALSE(ChooseOnGpuFault(options, "").exit);
  EXPECT_TRUE(ChooseOnGpuFault(options, "/pipes/control").exit);
  EXPECT_THAT(ChooseOnGpuFault(options, "/pipes/control").ToString(),
              ::testing::HasSubstr("/pipes/control"));
  options.on_gpu_fault = "cpu";
  EXPECT_FALSE(ChooseOnGpuFault(options, "/pipes/control").exit);
  options.on_gpu_fault = "exit";
  EXPECT_TRUE(ChooseOnGpuFault(options, "").exit);
}

}  // namespace
}  // namespace attnd::server
