// SPDX-License-Identifier: Apache-2.0
//
// Goal: why a server ends, and whether a fault of the GPU ends it. Method: the parts of the program
// that decide it.
#include "server/stop_request.h"

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/backend.h"
#include "tests/temporary_folder.h"

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

// As CUDA looks for it: a folder without the pipe, or /dev/null, means no MPS.
TEST(GpuFaultChoiceTest, TheControlPipeIsWhatTellsMps) {
  const attnd::test::TemporaryFolder folder;
  const std::string path = folder.path();
  setenv("CUDA_MPS_PIPE_DIRECTORY", path.c_str(), /*replace=*/1);
  EXPECT_EQ(MpsControlPipe(), "");
  std::ofstream(path + "/control").flush();
  EXPECT_EQ(MpsControlPipe(), path + "/control");
  setenv("CUDA_MPS_PIPE_DIRECTORY", "/dev/null", /*replace=*/1);
  EXPECT_EQ(MpsControlPipe(), "");
  const bool daemon = std::filesystem::exists("/tmp/nvidia-mps/control");
  for (const char* const unset : {"", static_cast<const char*>(nullptr)}) {
    unsetenv("CUDA_MPS_PIPE_DIRECTORY");
    if (unset != nullptr) setenv("CUDA_MPS_PIPE_DIRECTORY", unset, /*replace=*/1);
    EXPECT_EQ(MpsControlPipe(), daemon ? "/tmp/nvidia-mps/control" : "");
  }
}

}  // namespace
}  // namespace attnd::server
