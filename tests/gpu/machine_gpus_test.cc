// SPDX-License-Identifier: Apache-2.0
//
// Goal: a machine's GPUs are known by their device files. Method: folders of files that are named
// as a driver names its own.
#include "tests/gpu/machine_gpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/temporary_folder.h"

namespace attnd::gpu::test {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(MachineGpus, AreTheNumberedDeviceFiles) {
  const attnd::test::TemporaryFolder temporary;
  const std::filesystem::path folder = std::filesystem::path(temporary.path()) / "dev";
  EXPECT_THAT(GpusIn(folder), IsEmpty()) << "no folder";
  std::filesystem::create_directories(folder / "nvidia-caps");
  const auto add = [&](const char* name) { std::ofstream(folder / name) << "x"; };
  for (const char* name : {"nvidia", "nvidiactl", "nvidia-uvm", "nvidia0a", "xnvidia0"}) add(name);
  EXPECT_THAT(GpusIn(folder), IsEmpty());
  for (const char* name : {"nvidia1", "nvidia0"}) add(name);
  EXPECT_THAT(GpusIn(folder), ElementsAre("nvidia0", "nvidia1"));
}

}  // namespace
}  // namespace attnd::gpu::test
