// SPDX-License-Identifier: Apache-2.0
//
// Goal: the PCIe link's rates are NVML's, in bytes and with their directions; what cannot be had is
// said, and NVML is given back. Method: a library in NVML's place (fake_nvml.cc), and none.
#include "gpu/device/pcie_meter.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "absl/status/status.h"

namespace attnd::gpu {
namespace {

using ::testing::HasSubstr;

constexpr char kBusId[] = "0000:17:00.0";

// How many users of the library have not given it back.
int Started() {
  void* const library = dlopen(ATTND_FAKE_NVML, RTLD_NOW);
  if (library == nullptr) return -1;
  const auto started = reinterpret_cast<int (*)()>(dlsym(library, "attnd_test_nvml_started"));
  const int count = started();
  dlclose(library);
  return count;
}

TEST(PcieMeter, TellsBytesByDirection) {
  void* const kept = dlopen(ATTND_FAKE_NVML, RTLD_NOW);  // so that its count outlives the meter
  ASSERT_NE(kept, nullptr) << dlerror();
  {
    const auto meter = PcieMeter::Open(ATTND_FAKE_NVML, kBusId);
    ASSERT_TRUE(meter.ok()) << meter.status();
    EXPECT_EQ(Started(), 1);
    const auto rates = (*meter)->Read();
    ASSERT_TRUE(rates.ok()) << rates.status();
    EXPECT_EQ(rates->to_device, 3 * 1024);
    EXPECT_EQ(rates->to_host, 5 * 1024);
    setenv("ATTND_TEST_NVML", "lost", /*overwrite=*/1);
    const absl::Status lost = (*meter)->Read().status();
    unsetenv("ATTND_TEST_NVML");
    EXPECT_TRUE(absl::IsUnavailable(lost)) << lost;
    EXPECT_THAT(lost.message(), HasSubstr("GPU is lost"));
    EXPECT_TRUE((*meter)->Read().ok());
  }
  EXPECT_EQ(Started(), 0);
  dlclose(kept);
}

TEST(PcieMeter, SaysWhatIsNotThere) {
  const absl::Status no_library = PcieMeter::Open("libattnd-none.so.1", kBusId).status();
  EXPECT_TRUE(absl::IsUnavailable(no_library)) << no_library;
  EXPECT_THAT(no_library.message(), HasSubstr("libattnd-none.so.1"));

  const absl::Status no_function = PcieMeter::Open("libm.so.6", kBusId).status();
  EXPECT_TRUE(absl::IsUnavailable(no_function)) << no_function;
  EXPECT_THAT(no_function.message(), HasSubstr("nvmlInit_v2"));

  const absl::Status no_gpu = PcieMeter::Open(ATTND_FAKE_NVML, "0000:99:00.0").status();
  EXPECT_TRUE(absl::IsUnavailable(no_gpu)) << no_gpu;
  EXPECT_THAT(no_gpu.message(), HasSubstr("Not Found"));
}

}  // namespace
}  // namespace attnd::gpu
