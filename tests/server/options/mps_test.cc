// SPDX-License-Identifier: Apache-2.0
//
// Goal: MPS is told as CUDA finds it. Method: folders with a control daemon's pipe, and without.
#include "server/options/mps.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"
#include "server/options/options.h"
#include "tests/temporary_folder.h"

namespace attnd::server {
namespace {

// A folder without the pipe, or /dev/null, means no MPS.
TEST(MpsTest, TheControlPipeIsWhatTells) {
  const attnd::test::TemporaryFolder folder;
  const std::string path = folder.path();
  setenv("CUDA_MPS_PIPE_DIRECTORY", path.c_str(), /*replace=*/1);
  EXPECT_EQ(MpsControlPipe(), "");
  EXPECT_EQ(Machine::Detect().mps_control, "");
  std::ofstream(path + "/control").flush();
  EXPECT_EQ(MpsControlPipe(), path + "/control");
  EXPECT_EQ(Machine::Detect().mps_control, path + "/control");
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
